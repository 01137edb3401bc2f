"""A classifier's scores as people read them: columns on stdout, cut to the width of a terminal."""

import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from nanolm.cli.columns import fitted
from nanolm.cli.console import note, printable, styled
from nanolm.formats import counted

if TYPE_CHECKING:
    from nanolm.classification.metrics import ClassifierScores

MATRIX = 12  # classes; a larger matrix is read by programs
LONGEST = 24  # letters of a label in a table
LEAST = 4  # letters of a label over a column of the matrix
ROOM = 30  # letters of a text that are worth a place beside its labels

Style = Callable[[int, int, str], str]  # of a cell in a row and column


def show_scores(name: str, scores: "ClassifierScores") -> None:
    """One line for all, a table of the classes, and what was taken for what."""
    width = terminal_width()
    summary = (
        f"{one_line(name)}: accuracy {scores.accuracy:.1%}, macro F1 {scores.macro_f1:.3f}, "
        f"log-loss {scores.loss:.3f}, calibration error {scores.calibration_error:.3f}, "
        f"{counted(scores.count, 'text')}"
    )
    click.echo(summary if width is None else textwrap.fill(summary, width))
    click.echo()
    labels = [one_line(each.label) for each in scores.classes]
    rows = [["class", "precision", "recall", "F1", "texts"]]
    for label, each in zip(labels, scores.classes, strict=True):
        figures = (f"{value:.3f}" for value in (each.precision, each.recall, each.f1))
        rows.append([label, *figures, f"{each.support:,}"])
    numbers = sum(widest(column) + 2 for column in list(zip(*rows, strict=True))[1:])
    show(rows, width and min(LONGEST, width - numbers))
    show_confusion(labels, scores.confusion, width)


def show_confusion(
    labels: list[str], confusion: Sequence[Sequence[int]], width: int | None
) -> None:
    """A row for each true class and a column for each predicted one."""
    corner = "true \\ predicted"
    rows = [[f"{count:,}" for count in row] for row in confusion]
    digits = max(widest(row) for row in rows)
    lead = max(len(corner), min(widest(labels), LONGEST))
    room = width and (width - lead) // len(labels) - 2
    if len(labels) > MATRIX or (room is not None and room < max(digits, LEAST)):
        note(f"{len(labels)} classes: no room to show what was taken for what; --json has it")
        return

    def style(row: int, column: int, text: str) -> str:
        if row == column:
            return styled(text, bold=True)
        return styled(text, dim=True) if row > 0 and text.strip() == "0" else text

    click.echo()
    table = [[corner, *labels]]
    table += [[label, *row] for label, row in zip(labels, rows, strict=True)]
    show(table, width and lead, room, style if width else None)


def show_mistakes(rows: list[tuple[str, str, str, float]]) -> None:
    """(text, truth, predicted, probability) each, in the given order."""
    if not rows:
        click.echo("no mistakes")
        return
    width = terminal_width()
    table = [["chance", "predicted", "true"]]
    for _, truth, predicted, chance in rows:
        table.append([f"{chance:.3f}", one_line(predicted), one_line(truth)])
    most = sys.maxsize if width is None else max(LEAST, min(LONGEST, (width - 10) // 2))
    rooms = [min(widest(column), most) for column in zip(*table, strict=True)]
    lead = sum(rooms) + 2 * len(rooms)
    beside = width is None or width - lead >= ROOM
    texts = ["text" if beside else "", *(one_line(text) for text, *_ in rows)]
    for cells, text in zip(table, texts, strict=True):
        start = "  ".join(map(fitted, cells, rooms))
        if beside:
            click.echo(f"{start}  {shortened(text, width and width - lead)}")
        else:
            click.echo(start.rstrip())
            if text and width:
                click.echo("  " + shortened(text, width - 2))


def show(
    rows: list[list[str]], first: int | None, room: int | None = None, style: Style | None = None
) -> None:
    """Columns two blanks apart, numbers at the right of theirs.

    Where given, the first is no wider than `first` letters, and the others than `room`.
    """
    columns = list(zip(*rows, strict=True))
    rooms = [min(widest(column), room or sys.maxsize) for column in columns]
    rooms[0] = min(widest(columns[0]), max(LEAST, first or sys.maxsize))
    for number, (label, *cells) in enumerate(rows):
        shown = [fitted(label, rooms[0])]
        for column, (cell, space) in enumerate(zip(cells, rooms[1:], strict=True), start=1):
            text = to_the_right(cell, space)
            shown.append(style(number, column, text) if style else text)
        click.echo("  ".join(shown))


def terminal_width() -> int | None:
    """How many letters a line may have; a pipe takes any."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def one_line(text: str) -> str:
    return " ".join(printable(text).split())


def widest(cells: Sequence[str]) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, cells), default=0)


def shortened(text: str, room: int | None) -> str:
    return text if room is None or widest([text]) <= room else fitted(text, room)


def to_the_right(text: str, room: int) -> str:
    cut = shortened(text, room)
    return " " * (room - widest([cut])) + cut
