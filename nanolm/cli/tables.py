"""Tables on stdout, truncated to the width of the terminal."""

import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Sequence

import click

from nanolm.cli.columns import fitted
from nanolm.formats import printable

NARROWEST = 4  # minimum width of the first column


def show_table(
    rows: Sequence[Sequence[str]],
    left: Collection[int] = (0,),
    first_limit: int | None = None,
    limit: int | None = None,
    style: Callable[[int, int, str], str] | None = None,  # of row, column and cell
) -> None:
    """Columns two spaces apart, as wide as their widest cell; those in `left` are left-aligned.
    `first_limit` limits the width of the first column, `limit` that of the others."""
    widths = [min(cell_width(column), limit or sys.maxsize) for column in zip(*rows, strict=True)]
    if first_limit:
        widths[0] = min(cell_width(row[0] for row in rows), max(NARROWEST, first_limit))
    for number, row in enumerate(rows):
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            text = shortened(cell, width)
            padding = " " * (width - cell_width([text]))
            text = text + padding if column in left else padding + text
            cells.append(style(number, column, text) if style and column not in left else text)
        click.echo("  ".join(cells).rstrip())


def terminal_width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def one_line(text: str) -> str:
    return " ".join(printable(text).split())


def cell_width(cells: Iterable[str]) -> int:
    """The width of the widest cell; some characters take two columns of a terminal."""
    from rich.cells import cell_len

    return max(map(cell_len, cells), default=0)


def shortened(text: str, limit: int | None) -> str:
    return text if limit is None or cell_width([text]) <= limit else fitted(text, limit)
