"""Tables on stdout that fit the width of the terminal."""

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import zip_longest

import click

from nanolm.cli.columns import fitted
from nanolm.formats import printable

BREAK = re.compile(r"(?<=[^\s-][\s/_:-])(?=[^\s/_:-])")  # where a name or a text may be wrapped


def show_table(
    rows: Sequence[Sequence[str]],
    left: Collection[int] = (0,),
    first_limit: int | None = None,
    limit: int | None = None,
    style: Callable[[int, int, str], str] | None = None,  # of row, column and cell
) -> None:
    """Columns two spaces apart, as wide as their widest cell; those in `left` are left-aligned.
    `first_limit` limits the width of the first column, `limit` that of the others. On a narrow
    terminal, headings and the columns in `left` are wrapped, or each row becomes a list."""
    limits = [first_limit, *[limit] * len(rows[0][1:])]
    rows = [list(map(shortened, row, limits)) for row in rows]
    columns = list(zip(*rows, strict=True))
    widths = list(map(cell_width, columns))
    room = (terminal_width() or sys.maxsize) - 2 * (len(widths) - 1)
    if sum(widths) > room:
        least = []
        for number, (heading, *cells) in enumerate(columns):
            words = [word for cell in cells for word in BREAK.split(cell)]
            least.append(cell_width([*BREAK.split(heading), *(words if number in left else cells)]))
        if sum(least) > room:
            show_lists(rows)
            return
        while sum(widths) > room:
            spare = [width * (width > n) for width, n in zip(widths, least, strict=True)]
            widths[spare.index(max(spare))] -= 1
    for number, row in enumerate(rows):
        for line in zip_longest(*map(wrapped, row, widths), fillvalue=""):
            cells = []
            for column, (text, width) in enumerate(zip(line, widths, strict=True)):
                padding = " " * (width - cell_width([text]))
                text = text + padding if column in left else padding + text
                cells.append(style(number, column, text) if style and column not in left else text)
            click.echo("  ".join(cells).rstrip())


def show_lists(rows: Sequence[Sequence[str]]) -> None:
    """Print the first cell of each row, and below it the other cells with their headings."""
    (_, *headings), *others = rows
    width = max(16, terminal_width() or sys.maxsize)
    indent = min(cell_width(headings), width // 2)
    for first, *cells in others:
        click.echo("\n".join(wrapped(first, width)))
        for heading, cell in zip(headings, cells, strict=True):
            if cell:
                text = f"\n{'':{indent + 4}}".join(wrapped(cell, width - indent - 4))
                click.echo(f"  {fitted(heading, indent)}  {text}")


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns, broken between words where possible."""
    from rich.cells import chop_cells

    lines = [""]
    for word in (part for whole in BREAK.split(text) for part in chop_cells(whole, max(1, width))):
        if lines[-1] and cell_width([(lines[-1] + word).rstrip()]) > width:
            lines.append("")
        lines[-1] += word
    return [line.rstrip() for line in lines]


def show_sentence(text: str) -> None:
    """Print text, wrapped between words on a terminal and on one line elsewhere."""
    width = terminal_width() or sys.maxsize
    click.echo(textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False))


def terminal_width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def one_line(text: str) -> str:
    return " ".join(printable(text).split())


def cell_width(cells: Iterable[str]) -> int:
    """The width of the widest cell; some characters take two columns of a terminal."""
    from rich.cells import cell_len

    return max((cell_len(cell.rstrip()) for cell in cells), default=0)


def shortened(text: str, limit: int | None) -> str:
    return text if limit is None or cell_width([text]) <= limit else fitted(text, limit)
