"""`nanolm runs`: list, compare and remove runs."""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nanolm import files
from nanolm.cli.console import note, print_json
from nanolm.cli.options import Command, CommandGroup, json_option
from nanolm.cli.tables import one_line, show_table
from nanolm.errors import DataError, UsageError
from nanolm.formats import printable

if TYPE_CHECKING:
    from nanolm.report.run_data import RunSummary
    from nanolm.runs.folder import Run

# The heading and the format of each column.
COLUMNS: dict[str, tuple[str, Callable[..., str]]] = {
    "run": ("run", str),
    "corpus": ("corpus", str),
    "parameters": ("size", "{:,}".format),
    "steps": ("steps", "{:,}".format),
    "bits_per_byte": ("bits/byte", "{:.3f}".format),
    "val_accuracy": ("val acc", "{:.1%}".format),
    "test_accuracy": ("test acc", "{:.1%}".format),
    "bleu": ("BLEU", "{:.1f}".format),
    "minutes": ("minutes", "{:.1f}".format),
    "state": ("state", str),
}
# Sort keys by the first word of a heading.
FIRST_WORDS = {re.split("[/ ]", head)[0].lower(): key for key, (head, _) in COLUMNS.items()}
SORT_KEYS = {"started": "started"} | FIRST_WORDS
REMOVED = f"{files.TRASH}nanolm-run-"  # prefix of a run that is being removed
NAME_WIDTH = 40  # characters of a name in the table


@click.group("runs", cls=CommandGroup, invoke_without_command=True)
@click.option(
    "--folder",
    metavar="DIR",
    default="runs",
    show_default=True,
    help="Folder that contains the runs.",
)
@click.option(
    "--sort", metavar="|".join(SORT_KEYS), default="started", help="Sort key.  [default: started]"
)
@json_option(help="Print one JSON object per run.")
@click.pass_context
def command(context: click.Context, folder: str, sort: str, as_json: bool) -> None:
    """List runs with their corpus, size, results, duration and state.

    \b
    nanolm runs
    nanolm runs --sort bits
    nanolm runs compare runs/novel runs/novel-2
    nanolm runs rm runs/novel-2
    """
    if context.invoked_subcommand is not None:
        return
    keys = {**SORT_KEYS, "right": "accuracy"}  # a former name
    if sort not in keys:
        raise UsageError(f"--sort {sort}: choose from {', '.join(SORT_KEYS)}")

    from nanolm.report.run_data import list_runs

    finish_removing(Path(folder))
    runs, key = list_runs(Path(folder), note), keys[sort]
    rows = [row for row in runs if getattr(row, key) is not None]
    ascending = key in ("run", "corpus", "state", "bits_per_byte")
    rows.sort(key=lambda row: getattr(row, key), reverse=not ascending)
    rows += [row for row in runs if getattr(row, key) is None]
    if as_json:
        for row in rows:
            print_json(asdict(row))
    elif rows:
        show(rows)
    else:
        note(f"no runs in {folder}; create one with `nanolm train corpus.txt`")


def show(rows: "list[RunSummary]") -> None:
    used = [name for name in COLUMNS if any(getattr(row, name) is not None for row in rows)]
    table = [[COLUMNS[name][0] for name in used]]
    for row in rows:
        values = {name: getattr(row, name) for name in used}
        known = {name: COLUMNS[name][1](v) for name, v in values.items() if v is not None}
        table.append([short_name(known.get(name, "")) for name in used])
    show_table(table, {number for number, name in enumerate(used) if COLUMNS[name][1] is str})


def short_name(text: str) -> str:
    """`text` on one line, truncated at the start if it is too long."""
    text = one_line(text)
    return text if len(text) <= NAME_WIDTH else "…" + text[1 - NAME_WIDTH :]


@command.command("compare", cls=Command)
@click.argument("run", nargs=-1, required=True, metavar="RUN RUN...")
def compare(run: tuple[str, ...]) -> None:
    """Compare the results of runs and the settings that differ.

    To compare the curves as well, use `nanolm report RUN RUN...`.

    \b
    nanolm runs compare runs/novel runs/novel-2
    """
    if len(run) < 2:
        raise UsageError("name at least two runs")

    from nanolm.report.page import differing, distinct, side_by_side, summary
    from nanolm.report.run_data import read_run

    data = [read_run(existing(name)) for name in run]
    results = side_by_side([summary(each) for each in data])
    table = [["", *distinct(list(run))], *([name, *values] for name, values in results.items())]
    table += [["--" + name.replace("_", "-"), *values] for name, values in differing(data).items()]
    show_table([[short_name(cell) for cell in row] for row in table], range(len(table[0])))


@command.command("rm", cls=Command)
@click.argument("run", nargs=-1, required=True, metavar="RUN...")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def remove(run: tuple[str, ...], yes: bool) -> None:
    """Delete runs and all their checkpoints, after confirmation.

    \b
    nanolm runs rm runs/novel-2
    """
    from nanolm.runs.folder import Run

    run = tuple(dict.fromkeys(run))
    runs = [Run(Path(os.path.abspath(name))) for name in run]  # `.` has no name
    for parent in {each.path.parent for each in runs}:
        finish_removing(parent)
    for name, each in zip(run, runs, strict=True):
        if not each.exists() and not each.is_rest():
            raise DataError(f"{name} is not a run; `nanolm runs` lists all runs")
    if links := [str(each.path) for each in runs if each.path.is_symlink()]:
        raise DataError(f"{', '.join(links)}: symbolic link; name the run itself")
    if not yes and not sys.stdin.isatty():
        raise UsageError("cannot ask for confirmation without a terminal; add --yes to delete")
    for name, each in zip(run, runs, strict=True):
        size = sum(file.lstat().st_size for file in each.path.rglob("*") if not file.is_symlink())
        try:
            state = "finished" if each.finished() else "not finished"
        except DataError:
            state = "run.json is missing or damaged"
        text = f"delete {printable(name)} ({state}, {size / 1e6:,.1f} MB)?"
        removed = yes or click.confirm(text, err=True)
        if removed:
            trash = each.path.with_name(f"{REMOVED}{each.path.name}-{os.getpid()}")
            with each.locked():
                each.path.rename(trash)  # no longer a run
            files.remove(trash)
            if trash.exists():
                raise DataError(f"deleted the run {name}, but could not remove all of {trash}")
        note(f"{'deleted' if removed else 'kept'} {name}")


def finish_removing(parent: Path) -> None:
    """Remove the remains of runs from an interrupted `runs rm`."""
    for trash in parent.glob(f"{REMOVED}*"):
        files.remove(trash)
        if not trash.exists():
            name = trash.name.removeprefix(REMOVED).rpartition("-")[0]
            note(f"{parent / name}: completed an interrupted `nanolm runs rm`")


def existing(name: str) -> "Run":
    from nanolm.runs.folder import Run

    run = Run(Path(name))
    run.settle(note)
    if not run.exists():
        raise DataError(f"{name} is not a run; `nanolm runs` lists all runs")
    return run
