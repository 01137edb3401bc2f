"""Rows of tokens with a value under each, wrapped to the width of the terminal."""

import math
import shutil
import sys
from typing import TYPE_CHECKING

import click

from nanolm.cli.console import styled
from nanolm.formats import printable
from nanolm.text import spelled

if TYPE_CHECKING:
    from nanolm.text.tokenizer import Tokenizer

Cell = tuple[str, float, bool]  # a token, its probability, and whether it was the one generated
WIDEST = 16  # characters of a token in a table
# Minimum probability and its background in the 256-color palette, dark enough for white text.
SCALE = ((0.5, 22), (0.25, 58), (0.1, 94), (0.02, 130), (0.0, 88))


def color(probability: float) -> int:
    """From green (expected) to red (surprising)."""
    return next((shade for least, shade in SCALE if probability >= least), 88)  # red for NaN


def short(probability: float) -> str:
    """At most four characters: 1.0, .41, .04, .004."""
    if not math.isfinite(probability):
        return "?"
    if probability >= 0.995:
        return "1.0"
    return f"{probability:.{2 if probability >= 0.0095 else 3}f}"[1:]


def visible(tokenizer: "Tokenizer", id: int) -> str:
    """A token as a terminal can show it, with visible spaces and line ends."""
    return visible_text(tokenizer.special.get(id) or spelled(tokenizer.tokens[id]))


def visible_text(text: str) -> str:
    """`text` on one line, with visible spaces and line ends."""
    return printable(text).replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥")


def fitted(token: str, room: int) -> str:
    from rich.cells import cell_len, set_cell_size

    fits = cell_len(token) <= room
    return set_cell_size(token, room) if fits else set_cell_size(token, room - 1) + "…"


class Columns:
    """Rows of colored tokens, each above a value; a row is printed when it is full."""

    def __init__(self) -> None:
        self.width = shutil.get_terminal_size().columns
        self.cells: list[tuple[str, str]] = []  # of the current row
        self.used = 0

    def add(self, token: str, below: str, background: int) -> None:
        from rich.cells import cell_len

        room = min(max(cell_len(token), len(below)), self.width)
        if self.used and self.used + room > self.width:
            self.flush()
        upper = styled(fitted(token, room), fg=231, bg=background)
        self.cells.append((upper, styled(f"{below:<{room}}", dim=True)))
        self.used += room + 1
        if token.endswith("⏎"):
            self.flush()

    def flush(self) -> None:
        for line in zip(*self.cells, strict=True):
            click.echo(" ".join(line))
        self.cells, self.used = [], 0


def show_table(rows: list[tuple[Cell, list[Cell]]]) -> None:
    """Each generated token and the most likely ones at its position, wrapped on a narrow terminal;
    the generated one is bold."""
    from rich.cells import cell_len

    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else sys.maxsize
    longest = max(cell_len(token) for first, others in rows for token, _, _ in (first, *others))
    room = min(longest, WIDEST) if terminal else longest
    digits = len(str(len(rows)))
    lead = digits + room + 6  # number, token, probability
    fitting = max(1, (width - lead) // (room + 6))
    count = len(rows[0][1])
    in_a_row = -(-count // -(-count // fitting))  # evenly distributed
    for number, ((written, chance, _), others) in enumerate(rows, start=1):
        start = f"{number:>{digits}} {fitted(written, room)} {short(chance):<4}"
        cells = []
        for token, probability, same in others:
            cell = f"{fitted(token, room)} {short(probability):<4}"
            if terminal:
                cell = styled(cell, fg=231, bg=color(probability), bold=same)
            cells.append(cell)
        for first in range(0, len(cells), in_a_row):
            before = start if first == 0 else " " * lead
            click.echo(" ".join([before, *cells[first : first + in_a_row]]).rstrip())
