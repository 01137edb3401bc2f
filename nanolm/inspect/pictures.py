"""The same as pictures for a paper. They need matplotlib, which comes with nanolm[plot]."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanolm.inspect.heads import Head
from nanolm.inspect.look import Floats, Seen
from nanolm.report.png import figure

LEGIBLE = 40  # tokens; the names of more would lie over each other


def attention_png(file: Path, seen: Seen, heads: list[list[Head]]) -> None:
    """A map for each head, the layers below each other."""
    layers, across = len(heads), len(heads[0])
    picture = figure(1 + 1.6 * across, 0.5 + 1.8 * layers)
    places = picture.subplots(layers, across, squeeze=False)
    for layer, row in enumerate(heads):
        for number, head in enumerate(row):
            place = places[layer][number]
            place.imshow(seen.attention[layer, number] ** 0.5, cmap="Blues", vmin=0, vmax=1)
            place.set_title(f"{layer + 1}.{number + 1} {head.kind}", fontsize=7)
            place.set_xticks([])
            place.set_yticks([])
    picture.savefig(file)


def head_png(file: Path, weights: Floats, title: str, names: list[str]) -> None:
    """One head large: from each token (a row) to those before it."""
    picture = figure(6, 6)
    place = picture.subplots()
    drawn = place.imshow(weights, cmap="Blues", vmin=0, vmax=1)
    picture.colorbar(drawn, shrink=0.7)
    place.set_title(title, fontsize=10)
    with_names(place, names)
    picture.savefig(file)


def predictions_png(file: Path, seen: Seen, spelled: Callable[[list[int]], list[str]]) -> None:
    """After each token the likeliest ones, those that came in bold."""
    found = seen.foretold
    rows, columns = found.ids.shape
    picture = figure(1.6 + 1.3 * columns, 0.6 + 0.24 * rows)
    place = picture.subplots()
    place.imshow(found.chances**0.5, cmap="Blues", vmin=0, vmax=1.4, aspect="auto")
    for row in range(rows):
        came = seen.ids[row + 1] if row + 1 < rows else None
        for column, name in enumerate(spelled(found.ids[row].tolist())):
            text = literal(f"{name}  {found.chances[row, column]:.2f}")
            weight = "bold" if found.ids[row, column] == came else "normal"
            place.text(column, row, text, ha="center", va="center", fontsize=6.5, weight=weight)
    place.set_xticks(range(columns), [str(number + 1) for number in range(columns)], fontsize=7)
    place.set_yticks(range(rows), [literal(name) for name in spelled(seen.ids)], fontsize=6.5)
    place.set_title("after each token, the likeliest next ones", fontsize=9)
    picture.savefig(file)


def matrices_png(file: Path, matrices: list[tuple[str, Floats]], aspect: str = "equal") -> None:
    """Pictures of numbers between -1 and 1, side by side."""
    columns = min(4, len(matrices))
    rows = -(-len(matrices) // columns)
    picture = figure(3.2 * columns, 3.2 * rows)
    places = picture.subplots(rows, columns, squeeze=False).flatten()
    for place in places[len(matrices) :]:
        place.set_visible(False)
    for place, (title, matrix) in zip(places, matrices, strict=False):
        place.imshow(matrix, cmap="RdBu", vmin=-1, vmax=1, aspect=aspect)
        place.set_title(title, fontsize=8)
    picture.savefig(file)


def with_names(place: Any, names: list[str]) -> None:
    if len(names) <= LEGIBLE:
        shown = [literal(name) for name in names]
        place.set_xticks(range(len(names)), shown, rotation=90, fontsize=7)
        place.set_yticks(range(len(names)), shown, fontsize=7)


def literal(text: str) -> str:
    """Not as a formula, which matplotlib would make of dollar signs."""
    return text.replace("$", r"\$")
