"""Inspections as PNG images, drawn by matplotlib (optional dependency: nanolm[plot])."""

from collections.abc import Callable
from pathlib import Path

from nanolm.inspect.heads import HeadPattern
from nanolm.inspect.inspection import Floats, Inspection
from nanolm.report.png import figure

MAX_LABELS = 40  # tokens on an axis; more would overlap
BLUES = {"cmap": "Blues", "vmin": 0}
Spelling = Callable[[list[int]], list[str]]  # of tokens


def attention_png(file: Path, inspection: Inspection, heads: list[list[HeadPattern]]) -> None:
    """A map for each head, one row per layer."""
    picture = figure(1 + 1.6 * len(heads[0]), 0.5 + 1.8 * len(heads))
    axes = picture.subplots(len(heads), len(heads[0]), squeeze=False)
    for layer, row in enumerate(heads):
        for number, (head, axis) in enumerate(zip(row, axes[layer], strict=True)):
            axis.imshow(inspection.attention[layer, number] ** 0.5, vmax=1, **BLUES)
            axis.set_title(f"{layer + 1}.{number + 1} {head.kind}", fontsize=7)
            axis.set(xticks=[], yticks=[])
    picture.savefig(file, format="png")


def head_png(file: Path, weights: Floats, title: str, rows: list[str], columns: list[str]) -> None:
    """The attention of one head, from each token of `rows` to those of `columns`."""
    picture = figure(6, 6)
    axis = picture.subplots()
    picture.colorbar(axis.imshow(weights, vmax=1, **BLUES), shrink=0.7)
    axis.set_title(title, fontsize=10)
    if max(len(rows), len(columns)) <= MAX_LABELS:
        small = {"fontsize": 7, "parse_math": False}
        axis.set_xticks(range(len(columns)), columns, rotation=90, **small)
        axis.set_yticks(range(len(rows)), rows, **small)
    picture.savefig(file, format="png")


def predictions_png(file: Path, inspection: Inspection, spelled: Spelling) -> None:
    """The most likely next tokens after each token, with the actual one in bold."""
    predictions = inspection.layers[-1]
    rows, columns = predictions.ids.shape
    picture = figure(1.6 + 1.3 * columns, 0.6 + 0.24 * rows)
    axis = picture.subplots()
    axis.imshow(predictions.probabilities**0.5, vmax=1.4, aspect="auto", **BLUES)
    middle = {"ha": "center", "va": "center", "fontsize": 6.5, "parse_math": False}
    for row in range(rows):
        next_id = inspection.ids[row + 1] if row + 1 < rows else None
        for column, name in enumerate(spelled(predictions.ids[row].tolist())):
            text = f"{name}  {predictions.probabilities[row, column]:.2f}"
            weight = "bold" if predictions.ids[row, column] == next_id else "normal"
            axis.text(column, row, text, weight=weight, **middle)
    axis.set_xticks(range(columns), range(1, columns + 1), fontsize=7)
    axis.set_yticks(range(rows), spelled(inspection.ids), fontsize=6.5, parse_math=False)
    axis.set_title("most likely next tokens after each token", fontsize=9)
    picture.savefig(file, format="png")


def matrices_png(file: Path, matrices: list[tuple[str, Floats]], aspect: str = "equal") -> None:
    """Heat maps of numbers between -1 and 1, side by side."""
    columns = min(4, len(matrices))
    rows = -(-len(matrices) // columns)
    picture = figure(3.2 * columns, 3.2 * rows)
    for number, (title, matrix) in enumerate(matrices, start=1):
        axis = picture.add_subplot(rows, columns, number)
        axis.imshow(matrix, cmap="RdBu", vmin=-1, vmax=1, aspect=aspect)
        axis.set_title(title, fontsize=8)
    picture.savefig(file, format="png")
