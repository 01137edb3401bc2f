"""`nanolm runs`: all that was trained."""

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nanolm.cli.console import note, printable
from nanolm.cli.options import Command, Group
from nanolm.errors import DataError, UsageError

if TYPE_CHECKING:
    from nanolm.report.listing import RunSummary
    from nanolm.runs.folder import Run

RUNS = "runs"
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
SORTED = ("started", "run", "corpus", "size", "steps", "bits", "val", "test", "minutes", "state")
KEYS = {"size": "parameters", "bits": "bits_per_byte"}
KEYS |= {"val": "val_accuracy", "test": "test_accuracy", "right": "accuracy"}
WIDEST = 40  # letters of a name in the table


@click.group("runs", cls=Group, invoke_without_command=True)
@click.option("--folder", metavar="DIR", default=RUNS, show_default=True, help="Where they are.")
@click.option(
    "--sort",
    metavar="|".join(SORTED),
    default="started",
    show_default=True,
    help="The best or the most first, for names the first.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a run.")
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
    if sort not in (*SORTED, "right"):  # as it was called before there were two of them
        raise UsageError(f"--sort {sort}: there is {', '.join(SORTED)}")

    from nanolm.report.listing import list_runs

    rows = in_order(list_runs(Path(folder), note), KEYS.get(sort, sort))
    if as_json:
        for row in rows:
            click.echo(json.dumps(asdict(row), ensure_ascii=False))
    elif rows:
        show(rows)
    else:
        note(f"no runs in {folder}; `nanolm train corpus.txt` makes one")


def in_order(rows: "list[RunSummary]", key: str) -> "list[RunSummary]":
    """The best, the largest or the newest first, names from A on; what has no such number last."""
    known = [row for row in rows if getattr(row, key) is not None]
    upwards = key in ("run", "corpus", "state", "bits_per_byte")
    known.sort(key=lambda row: getattr(row, key), reverse=not upwards)
    return known + [row for row in rows if getattr(row, key) is None]


def show(rows: "list[RunSummary]") -> None:
    """As a table; columns that no run has are left out."""
    used = [name for name in COLUMNS if any(getattr(row, name) is not None for row in rows)]
    table = [[COLUMNS[name][0] for name in used]]
    for row in rows:
        values = [(name, getattr(row, name)) for name in used]
        table.append(["" if value is None else COLUMNS[name][1](value) for name, value in values])
    left = [COLUMNS[name][1] is str for name in used]
    show_table(table, left)


def show_table(table: Sequence[Sequence[str]], left: Sequence[bool]) -> None:
    """Columns as wide as they need; names that are too long lose their beginning."""
    lines = [[shortened(printable(cell)) for cell in line] for line in table]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (
            f"{cell:<{width}}" if to_left else f"{cell:>{width}}"
            for cell, width, to_left in zip(line, widths, left, strict=True)
        )
        click.echo("  ".join(cells).rstrip())


def shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= WIDEST else "…" + text[1 - WIDEST :]


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

    from nanolm.report.page import differing, distinct, summary, summary_columns
    from nanolm.report.run_data import read_run

    data = [read_run(existing(name)) for name in run]
    table = [["", *distinct(list(run))]]
    table += [
        [name, *(summary(each).get(name, "") for each in data)] for name in summary_columns(data)
    ]
    table += [["--" + name.replace("_", "-"), *values] for name, values in differing(data)]
    show_table(table, [True] * len(table[0]))


@command.command("rm", cls=Command)
@click.argument("run", nargs=-1, required=True, metavar="RUN...")
@click.option("--yes", is_flag=True, help="Do not ask.")
def remove(run: tuple[str, ...], yes: bool) -> None:
    """Remove runs with all their checkpoints, after asking.

    \b
    nanolm runs rm runs/novel-2
    """
    found = [existing(name) for name in run]
    if not yes and not sys.stdin.isatty():
        raise UsageError("nobody is there to be asked; give --yes to remove them")
    for each in found:
        size = sum(file.lstat().st_size for file in each.path.rglob("*") if not file.is_symlink())
        state = "finished" if each.finished() else "not finished"
        text = f"remove {printable(str(each.path))} ({state}, {size / 1e6:,.1f} MB)?"
        if yes or click.confirm(text, err=True):
            with each.locked():
                shutil.rmtree(each.path)
            note(f"{each.path} is removed")
        else:
            note(f"{each.path} is kept")


def existing(name: str) -> "Run":
    from nanolm.runs.folder import Run

    run = Run(Path(name))
    if not run.exists() or run.path.is_symlink():
        raise DataError(f"{name} is no run; `nanolm runs` shows what there is")
    return run
