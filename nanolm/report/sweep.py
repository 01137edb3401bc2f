"""What a sweep found, as a picture: one SVG file, a panel for each setting, a dot for each trial.

>>> Path("sweep.svg").write_text(sweep_svg([Dot({"lr": 0.003}, 2.14, True, True)], "novel"))
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nanolm.formats import readable
from nanolm.report import curves
from nanolm.report.curves import Axis, Box, cut, measure, safe, write

WIDE = 8  # times the smallest is the largest, from which on an axis is logarithmic
HOPELESS = 2  # times the best are the bits per byte that need no more room
COLUMNS = 3
HEIGHT = 230
SMALL, LARGE, RING = 4, 6.5, 10  # pixels
DOTS = """
.curves circle {{ fill: {0}; fill-opacity: 0.4; }} .curves .kept {{ fill-opacity: 0.85; }}
.curves .best {{ fill: none; stroke: {1}; stroke-width: 2.5; }}
"""


@dataclass(frozen=True)
class Dot:
    """A trial, as its first round was."""

    values: dict[str, Any]
    bits_per_byte: float
    kept: bool  # trained for longer
    best: bool


def sweep_svg(dots: Sequence[Dot], title: str) -> str:
    """A panel for each setting that was varied: its values across, bits per byte up."""
    dots = sorted(dots, key=lambda dot: (dot.best, dot.kept))  # the best on top
    names = list(dots[0].values)
    columns = min(COLUMNS, len(names))
    width = 560 if columns == 1 else 340
    most = HOPELESS * min(dot.bits_per_byte for dot in dots)
    if any(dot.bits_per_byte > most for dot in dots):
        title += f"; at the top, more than {readable(most)}"
    found = [min(dot.bits_per_byte, most) for dot in dots]
    beside = 0.06 * (max(found) - min(found))  # room for a ring
    up = curves.axis([min(found) - beside, max(found) + beside], 5)
    margin = 22 + max(measure(text, 11) for _, text in up.ticks)
    above, each = 74, HEIGHT + 56
    parts = [*legend(margin, 50, dots)]
    for number, name in enumerate(names):
        left, top = number % columns * width + margin, above + number // columns * each
        places, across = spread([dot.values[name] for dot in dots], width - margin - 16)
        box = Box(left, top, width - margin - 16, HEIGHT, across, up)
        parts += curves.frame(box, name.replace("_", " "))
        for dot, x, y in zip(dots, places, found, strict=True):
            said = ", ".join(f"{name} {shown(value)}" for name, value in dot.values.items())
            parts.append(f"<g><title>{safe(said)}: {dot.bits_per_byte:.3f}</title>")
            parts += [*circles(box.x(x), box.y(y), dot), "</g>"]
    light, dark = (DOTS.format(*colours) for colours in (curves.LIGHT, curves.DARK))
    whole = above + each * -(-len(names) // columns)
    return curves.page(columns * width, whole, title, margin, light, dark, parts)


def spread(values: Sequence[Any], width: float) -> tuple[list[float], Axis]:
    """Where on an axis each value is, and that axis: numbers by what they are, or by their
    logarithm where they differ much; words, and what has no logarithm, side by side."""
    distinct = sorted(set(values))
    numbers = not isinstance(distinct[0], str | bool)
    positive = [value for value in distinct if numbers and value > 0]
    wide = bool(positive) and positive[-1] > WIDE * positive[0]
    if numbers and not wide:
        places = {value: float(value) for value in distinct}
    elif numbers and positive == distinct:
        places = {value: math.log10(value) for value in distinct}
    else:
        places = {value: float(place) for place, value in enumerate(distinct)}
    low, high = min(places.values()), max(places.values())
    beside = 0.12 * (high - low) or 1.0
    low, high = low - beside, high + beside
    return [places[value] for value in values], Axis(low, high, labels(places, low, high, width))


def labels(
    places: dict[Any, float], low: float, high: float, width: float
) -> list[tuple[float, str]]:
    """The values below their places, as many as have room."""
    found, free = [], -math.inf
    for value, place in places.items():
        text = cut(shown(value), 11, width / max(2, min(len(places), 6)))
        at, half = width * (place - low) / (high - low), measure(text, 11) / 2 + 3
        found.append((place, text if at - half >= free else ""))
        free = at + half if at - half >= free else free
    return found


def shown(value: Any) -> str:
    """As one would type it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def circles(x: float, y: float, dot: Dot) -> Iterator[str]:
    kind, size = ("kept", LARGE) if dot.kept else ("", SMALL)
    yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"/>'
    if dot.best:
        yield f'<circle class="best" cx="{x:.1f}" cy="{y:.1f}" r="{RING}"/>'


def legend(x: float, y: float, dots: Sequence[Dot]) -> Iterator[str]:
    """What the dots are."""
    kinds = {
        "a trial": Dot({}, 0, False, False),
        "trained for longer": Dot({}, 0, True, False),
        "the best at the end": dots[-1],
    }
    for text, dot in kinds.items():
        yield from circles(x + RING, y - 4, dot)
        yield write(x + 2 * RING + 6, y, text)
        x += 2 * RING + 24 + measure(text, 12)
