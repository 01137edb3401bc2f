"""A curve out of characters, for where there is no browser.

>>> print("\\n".join(plot([Line("training", points)], width=70, height=16)))

Every character holds two columns and four rows of dots (the Braille patterns of Unicode). A line of
few points beside it is drawn as these points, so that the two can be told apart.
"""

import itertools
from collections.abc import Sequence

from nanolm.report.curves import Line, axis, drawable

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column
BRAILLE = 0x2800
FEW = 40  # points


def plot(lines: Sequence[Line], width: int, height: int, plain: bool = False) -> list[str]:
    """A row of text each: the curves with their axes, and what they are. `plain` is for where
    there is no Unicode."""
    curves = {line.name: points for line in lines if (points := drawable(line))}
    if not curves:
        return ["no data yet"]
    across = axis([x for points in curves.values() for x, _ in points], 4, whole=False)
    up = axis([y for points in curves.values() for _, y in points], 4)
    margin = max(len(text) for _, text in up.ticks)
    inner = max(10, width - margin - 2)
    dots = [[0] * inner for _ in range(height)]
    marks: dict[tuple[int, int], str] = {}
    line_mark, point_mark = ("*", "o") if plain else ("⠒", "●")
    names: list[str] = []
    for name, points in curves.items():
        few = len(points) <= FEW and bool(names)  # the first is a line
        names.append(f"{point_mark if few else line_mark} {name}")
        columns, rows = (inner, height) if few or plain else (2 * inner, 4 * height)
        places = [
            (across.share(x) * (columns - 1), (1 - up.share(y)) * (rows - 1)) for x, y in points
        ]
        for column, row in places if few else joined(places):
            column, row = round(column), round(row)
            if few or plain:
                marks[row, column] = point_mark if few else line_mark
            else:
                dots[row // 4][column // 2] |= DOTS[row % 4][column % 2]
    ticks = {round((1 - up.share(value)) * (height - 1)): text for value, text in up.ticks}
    wall, corner, floor = "|+-" if plain else "│└─"
    found = []
    for row in range(height):
        cells = (
            marks.get((row, column)) or (chr(BRAILLE + dot) if dot else " ")
            for column, dot in enumerate(dots[row])
        )
        found.append(f"{ticks.get(row, ''):>{margin}} {wall}{''.join(cells)}".rstrip())
    found.append(" " * (margin + 1) + corner + floor * inner)
    below = [" "] * inner
    for value, text in across.ticks:
        at = round(across.share(value) * (inner - 1)) - len(text) // 2
        at = min(max(0, at), inner - len(text))
        below[at : at + len(text)] = text
    found.append((" " * (margin + 2) + "".join(below)).rstrip())
    return [*found, " " * (margin + 2) + "   ".join(names)]


def joined(places: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The places, and enough between them to make a line."""
    found = list(places[:1])
    for (x1, y1), (x2, y2) in itertools.pairwise(places):
        steps = max(1, round(max(abs(x2 - x1), abs(y2 - y1))))
        for step in range(1, steps + 1):
            share = step / steps
            found.append((x1 + share * (x2 - x1), y1 + share * (y2 - y1)))
    return found
