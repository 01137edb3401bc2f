"""Curves in the terminal, drawn with Braille characters of 2 by 4 dots.

>>> print("\\n".join(plot([Series("training", points)], width=70, height=16)))
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from nanolm.report.axes import PlotArea, linear_axis, log_axis
from nanolm.report.curves import Point, Series

BRAILLE = 0x2800
BRAILLE_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column


def plot(
    series: Sequence[Series],
    width: int,
    height: int,
    plain: bool = False,
    logarithmic: bool = False,
) -> list[str]:
    """Lines of text: the first curve as a line and the others as marks, with axes and a legend;
    with `plain`, in ASCII only. With `logarithmic`, both axes are logarithmic, and all values must
    be positive."""
    curves = {each.name: each.finite for each in series if each.finite}
    if not curves:
        return ["no data yet"]
    xs, ys = zip(*(point for points in curves.values() for point in points), strict=True)
    x_axis, y_axis = linear_axis(xs, 4, extend=False), linear_axis(ys, 4)
    if logarithmic:
        x_axis, y_axis = log_axis(xs), log_axis(ys)
    margin = max(len(label) for _, label in y_axis.ticks)
    inner = max(10, width - margin - 2)
    dots: dict[tuple[int, int], int] = defaultdict(int)  # by row and column of characters
    marks: dict[tuple[int, int], str] = {}
    legend: list[str] = []
    # Lines, marks and ticks share a grid of dots, so that equal values are in the same row.
    area = PlotArea(0, 0, 2 * inner - 1, 4 * height - 1, x_axis, y_axis)
    for name, points in curves.items():
        single = bool(legend)
        mark = ("o" if plain else "●") if single else ("*" if plain else "⠒")
        legend.append(f"{mark} {name}")
        places = [(area.x(x), area.y(y)) for x, y in points]
        for x, y in places if single else joined(places):
            column, row = round(x), round(y)
            if single or plain:
                marks[row // 4, column // 2] = mark
            else:
                dots[row // 4, column // 2] |= BRAILLE_DOTS[row % 4][column % 2]
    ticks = {round(area.y(y)) // 4: label for y, label in y_axis.ticks}
    wall, corner, floor = "|+-" if plain else "│└─"
    chars = {place: chr(BRAILLE + dot) for place, dot in dots.items()} | marks
    cells = ("".join(chars.get((y, x), " ") for x in range(inner)) for y in range(height))
    lines = [f"{ticks.get(y, ''):>{margin}} {wall}{row}".rstrip() for y, row in enumerate(cells)]
    labels = [" "] * inner
    for x, label in x_axis.ticks:
        start = min(max(0, round(area.x(x)) // 2 - len(label) // 2), inner - len(label))
        labels[start : start + len(label)] = label
    indent = " " * (margin + 1)
    below = [f"{indent}{corner}{floor * inner}", f"{indent} {''.join(labels)}".rstrip()]
    return [*lines, *below, f"{indent} {'   '.join(legend)}"]


def joined(places: list[Point]) -> Iterator[Point]:
    """The places, with points in between that form a line."""
    for (x1, y1), (x2, y2) in itertools.pairwise([places[0], *places]):
        steps = max(1, round(max(abs(x2 - x1), abs(y2 - y1))))
        for step in range(1, steps + 1):
            yield x1 + step / steps * (x2 - x1), y1 + step / steps * (y2 - y1)
