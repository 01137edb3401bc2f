"""A sweep as one SVG image, with a panel for each setting and a dot for each trial.

>>> Path("sweep.svg").write_text(draw_sweep([Dot({"lr": 0.003}, 2.14, True, True)], "novel").svg)
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nanolm.formats import readable
from nanolm.report import svg
from nanolm.report.axes import Axis, PlotArea, value_axis
from nanolm.report.svg import Drawing, Mark

LOG_RATIO = 8  # largest to smallest value from which an axis is logarithmic
MAX_RATIO = 2  # to the best; higher bits per byte are drawn at the top
MAX_COLUMNS = 3
TOP, HEIGHT, TICKS_HEIGHT = 90, 230, 56  # pixels
SMALL, LARGE, RING = 4, 6.5, 10  # radii in pixels


@dataclass(frozen=True)
class Dot:
    """A trial after the first round."""

    values: dict[str, Any]
    bits_per_byte: float
    kept: bool  # trained longer
    best: bool


def draw_sweep(dots: Sequence[Dot], title: str, names: Sequence[str] = ()) -> Drawing:
    """A panel for each setting, or for those named: its values on the x axis, bits per byte on the
    y axis."""
    names = names or list(dots[0].values)
    dots = sorted(dots, key=lambda dot: (dot.best, dot.kept))  # draw the best last
    columns = min(MAX_COLUMNS, len(names))
    width = 440 if columns == 1 else 340
    limit = MAX_RATIO * min(dot.bits_per_byte for dot in dots)
    if any(dot.bits_per_byte > limit for dot in dots):
        title += f" (clipped at {readable(limit)})"
    bits = [min(dot.bits_per_byte, limit) for dot in dots]
    padding = 0.06 * (max(bits) - min(bits))  # room for the ring
    y_axis = value_axis([min(bits) - padding, max(bits) + padding], 5)
    margin = 22 + max(svg.text_width(label, 11) for _, label in y_axis.ticks)
    inner, panel_height = width - margin - 16, HEIGHT + TICKS_HEIGHT
    legend = {"trial": (False, False), "trained longer": (True, False)}
    legend["best"] = (dots[-1].kept, dots[-1].best)
    parts, x = [], margin
    for label, look in legend.items():
        parts += [*circles(x + RING, 46, *look), svg.text(x + 2 * RING + 6, 50, label)]
        x += 2 * RING + 24 + svg.text_width(label, 12)
    marks: dict[str, list[Mark]] = {}
    for number, name in enumerate(names):
        left, top = number % columns * width + margin, TOP + number // columns * panel_height
        places, x_axis = place_values([dot.values[name] for dot in dots], inner)
        area = PlotArea(left, top, inner, HEIGHT, x_axis, y_axis)
        parts += svg.axes(area, name.replace("_", " "))
        parts.append(svg.text(left, top - 8, "bits per byte", "panel"))
        for dot, place, y in zip(dots, places, bits, strict=True):
            values = [format_value(value) for value in dot.values.values()]
            hint = ", ".join(map(" ".join, zip(dot.values, values, strict=True)))
            parts.append(f"<g><title>{svg.safe(hint)}: {dot.bits_per_byte:.3f}</title>")
            parts += [*circles(area.x(place), area.y(y), dot.kept, dot.best), "</g>"]
            kind = "best" if dot.best else "trained longer" if dot.kept else "first round only"
            mark = (area.x(place), area.y(y), *values, dot.bits_per_byte)
            marks.setdefault(kind, []).append(mark)
    whole = TOP + panel_height * -(-len(names) // columns)
    image = svg.document(columns * width, whole, title, margin, parts)
    return Drawing(image, ["trial", *dots[0].values, "bits per byte"], marks)


def place_values(values: Sequence[Any], width: float) -> tuple[list[float], Axis]:
    """The position of each value, and the axis. Numbers get a linear axis, or a logarithmic one if
    their range is wide. Words, and numbers that have no logarithm, are evenly spaced."""
    distinct = sorted(set(values))
    numbers = not isinstance(distinct[0], str | bool)
    positive = [value for value in distinct if numbers and value > 0]
    wide = bool(positive) and positive[-1] > LOG_RATIO * positive[0]
    if numbers and not wide:
        places = {value: float(value) for value in distinct}
    elif numbers and positive == distinct:
        places = {value: math.log10(value) for value in distinct}
    else:
        places = {value: float(place) for place, value in enumerate(distinct)}
    low, high = min(places.values()), max(places.values())
    padding = 0.12 * (high - low) or 1.0
    axis = Axis(low - padding, high + padding)
    ticks, free = [], -math.inf
    for value, place in places.items():  # skip labels that would overlap
        label = svg.shorten(format_value(value), 11, width / max(2, min(len(places), 6)))
        at, half = width * axis.fraction(place), svg.text_width(label, 11) / 2 + 3
        fits = at - half >= free
        ticks.append((place, label if fits else ""))
        free = at + half if fits else free
    return [places[value] for value in values], Axis(axis.low, axis.high, ticks)


def format_value(value: Any) -> str:
    """As typed on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def circles(x: float, y: float, kept: bool, best: bool) -> Iterator[str]:
    kind, radius = ("kept", LARGE) if kept else ("", SMALL)
    yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'
    if best:
        yield f'<circle class="best" cx="{x:.1f}" cy="{y:.1f}" r="{RING}"/>'
