"""Tables of a classifier's scores."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from nanolm.cli.columns import fitted
from nanolm.cli.console import note, styled
from nanolm.cli.tables import (
    cell_width,
    one_line,
    shortened,
    show_sentence,
    show_table,
    terminal_width,
)
from nanolm.formats import counted

if TYPE_CHECKING:
    from nanolm.classification.metrics import ClassifierScores, Mistake

NARROWEST = 4  # columns of a shortened label
MATRIX_CLASSES = 12  # a larger confusion matrix is only in --json
LABEL_WIDTH = 24  # characters of a label in a table
TEXT_WIDTH = 30  # with less room, a text goes below its labels


def show_scores(name: str, scores: "ClassifierScores") -> None:
    show_sentence(
        f"{one_line(name)}: accuracy {scores.accuracy:.1%}, macro F1 {scores.macro_f1:.3f}, "
        f"log-loss {scores.loss:.3f}, calibration error {scores.calibration_error:.3f}, "
        f"{counted(scores.count, 'text')}"
    )
    click.echo()
    labels = [one_line(each.label) for each in scores.classes]
    rows = [["class", "precision", "recall", "F1", "texts"]]
    for label, each in zip(labels, scores.classes, strict=True):
        figures = (f"{value:.3f}" for value in (each.precision, each.recall, each.f1))
        rows.append([label, *figures, f"{each.support:,}"])
    width = terminal_width()
    show_table(rows, first_limit=width and LABEL_WIDTH)
    show_matrix(labels, scores.confusion, width)


def show_matrix(labels: list[str], confusion: Sequence[Sequence[int]], width: int | None) -> None:
    corner = "true \\ predicted"
    rows = [[f"{count:,}" for count in row] for row in confusion]
    digits = max(cell_width(row) for row in rows)
    lead = max(len(corner), min(cell_width(labels), LABEL_WIDTH))
    room = width and (width - lead) // len(labels) - 2
    if len(labels) > MATRIX_CLASSES or (room is not None and room < max(digits, NARROWEST)):
        note(f"the confusion matrix of {len(labels)} classes is too wide to show; use --json")
        return

    def style(row: int, column: int, text: str) -> str:
        if row == column:
            return styled(text, bold=True)
        return styled(text, dim=True) if row > 0 and text.strip() == "0" else text

    click.echo()
    table = [[corner, *labels]]
    table += [[label, *row] for label, row in zip(labels, rows, strict=True)]
    show_table(table, first_limit=width and lead, limit=room, style=style if width else None)


def show_mistakes(mistakes: "Sequence[Mistake]") -> None:
    width = terminal_width()
    table = [["probability", "predicted", "true"]]
    for each in mistakes:
        table.append([f"{each.probability:.3f}", one_line(each.predicted), one_line(each.label)])
    most = sys.maxsize if width is None else max(NARROWEST, min(LABEL_WIDTH, (width - 15) // 2))
    rooms = [min(cell_width(column), most) for column in zip(*table, strict=True)]
    lead = sum(rooms) + 2 * len(rooms)
    beside = width is None or width - lead >= TEXT_WIDTH
    texts = ["text" if beside else "", *(one_line(each.text) for each in mistakes)]
    for cells, text in zip(table, texts, strict=True):
        start = "  ".join(map(fitted, cells, rooms))
        if beside:
            click.echo(f"{start}  {shortened(text, width and width - lead)}")
            continue
        click.echo(start.rstrip())
        if text and width:
            click.echo("  " + shortened(text, width - 2))
