"""`nanolm runs`: all that was trained."""

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

# The heading of each column, and how it is written.
COLUMNS: dict[str, tuple[str, Callable[..., str]]] = {
    "run": ("run", str),
    "corpus": ("corpus", str),
    "parameters": ("size", "{:,}".format),
    "steps": ("steps", "{:,}".format),
    "bits_per_byte": ("bits/byte", "{:.3f}".format),
    "val_accuracy": ("val acc", "{:.1%}".format),
    "test_accuracy": ("test acc", "{:.1%}".format),
    "minutes": ("minutes", "{:.1f}".format),
    "state": ("state", str),
}
# By the first word of a heading.
SORT_KEYS = {"started": "started"} | {re.split("[/ ]", COLUMNS[key][0])[0]: key for key in COLUMNS}
REMOVED = f"{files.TRASH}nanolm-run-"  # what a run that is being removed is called
NAME_WIDTH = 40  # letters of a name in the table


@click.group("runs", cls=CommandGroup, invoke_without_command=True)
@click.option("--folder", metavar="DIR", default="runs", show_default=True, help="Where they are.")
@click.option(
    "--sort", metavar="|".join(SORT_KEYS), default="started", help="Best first.  [default: started]"
)
@json_option(help="Print one JSON object a run.")
@click.pass_context
def command(context: click.Context, folder: str, sort: str, as_json: bool) -> None:
    """List what was trained: on what, how large, how good, how long, and whether it is done.

    \b
    nanolm runs
    nanolm runs --sort bits
    nanolm runs compare runs/novel runs/novel-2
    nanolm runs rm runs/novel-2
    """
    if context.invoked_subcommand is not None:
        return
    keys = {**SORT_KEYS, "right": "accuracy"}  # as it was called before there were two of them
    if sort not in keys:
        raise UsageError(f"--sort {sort}: there is {', '.join(SORT_KEYS)}")

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
        note(f"no runs in {folder}; `nanolm train corpus.txt` makes one")


def show(rows: "list[RunSummary]") -> None:
    used = [name for name in COLUMNS if any(getattr(row, name) is not None for row in rows)]
    table = [[COLUMNS[name][0] for name in used]]
    for row in rows:
        values = {name: getattr(row, name) for name in used}
        known = {name: COLUMNS[name][1](v) for name, v in values.items() if v is not None}
        table.append([short_name(known.get(name, "")) for name in used])
    show_table(table, {number for number, name in enumerate(used) if COLUMNS[name][1] is str})


def short_name(text: str) -> str:
    """In one line; a name that is too long loses its beginning."""
    text = one_line(text)
    return text if len(text) <= NAME_WIDTH else "…" + text[1 - NAME_WIDTH :]


@command.command("compare", cls=Command)
@click.argument("run", nargs=-1, required=True, metavar="RUN RUN...")
def compare(run: tuple[str, ...]) -> None:
    """Put runs beside each other: what came out, and the settings that differ.

    `nanolm report RUN RUN...` makes a page of it, with curves.

    \b
    nanolm runs compare runs/novel runs/novel-2
    """
    if len(run) < 2:
        raise UsageError("give two runs or more")

    from nanolm.report.page import differing, distinct, side_by_side, summary
    from nanolm.report.run_data import read_run

    data = [read_run(existing(name)) for name in run]
    results = side_by_side([summary(each) for each in data])
    table = [["", *distinct(list(run))], *([name, *values] for name, values in results.items())]
    table += [["--" + name.replace("_", "-"), *values] for name, values in differing(data).items()]
    show_table([[short_name(cell) for cell in row] for row in table], range(len(table[0])))


@command.command("rm", cls=Command)
@click.argument("run", nargs=-1, required=True, metavar="RUN...")
@click.option("--yes", is_flag=True, help="Do not ask.")
def remove(run: tuple[str, ...], yes: bool) -> None:
    """Remove runs with all their checkpoints, after asking.

    \b
    nanolm runs rm runs/novel-2
    """
    from nanolm.runs.folder import Run

    run = tuple(dict.fromkeys(run))
    runs = [Run(Path(os.path.abspath(name))) for name in run]  # `.` has no name of its own
    for parent in {each.path.parent for each in runs}:
        finish_removing(parent)
    for name, each in zip(run, runs, strict=True):
        if not each.exists() and not each.is_rest():
            raise DataError(f"{name} is no run; `nanolm runs` shows what there is")
    if links := [str(each.path) for each in runs if each.path.is_symlink()]:
        raise DataError(f"{', '.join(links)}: a link; name the run itself")
    if not yes and not sys.stdin.isatty():
        raise UsageError("nobody is there to be asked; give --yes to remove them")
    for name, each in zip(run, runs, strict=True):
        size = sum(file.lstat().st_size for file in each.path.rglob("*") if not file.is_symlink())
        try:
            state = "finished" if each.finished() else "not finished"
        except DataError:
            state = "run.json is missing or damaged"
        text = f"remove {printable(name)} ({state}, {size / 1e6:,.1f} MB)?"
        removed = yes or click.confirm(text, err=True)
        if removed:
            trash = each.path.with_name(f"{REMOVED}{each.path.name}-{os.getpid()}")
            with each.locked():
                each.path.rename(trash)  # from here on it is no run
            files.remove(trash)
            if trash.exists():
                raise DataError(f"{name} is no run any more, but not all of {trash} can be removed")
        note(f"{name} is {'removed' if removed else 'kept'}")


def finish_removing(parent: Path) -> None:
    """Remove what is left of runs that `runs rm` was killed at."""
    for trash in parent.glob(f"{REMOVED}*"):
        files.remove(trash)
        if not trash.exists():
            name = trash.name.removeprefix(REMOVED).rpartition("-")[0]
            note(f"{parent / name}: removed what an interrupted `nanolm runs rm` had left")


def existing(name: str) -> "Run":
    from nanolm.runs.folder import Run

    run = Run(Path(name))
    run.settle(note)
    if not run.exists():
        raise DataError(f"{name} is no run; `nanolm runs` shows what there is")
    return run
