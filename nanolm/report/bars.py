"""Bars side by side, each with how far it was spread: one SVG file, as `nanolm.report.curves`.

>>> bars = [Bar("bag of words", 0.61, 0.01), Bar("Transformer", 0.98, 0.002)]
>>> Path("compare.svg").write_text(bars_svg(bars, "reviews: accuracy", percent))
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nanolm.report import curves
from nanolm.report.curves import Box, cut, measure, write

WIDTH, ROW, THICK = 720, 30, 16  # pixels
NAMES = 230  # pixels that names have, at most
BARS = """
.curves .bar {{ fill: {0}; fill-opacity: 0.75; }}
.curves .spread {{ stroke: {1}; stroke-width: 2; }}
"""


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    spread: float  # to both sides of the value


def bars_svg(bars: Sequence[Bar], title: str, said: Callable[[float], str], x: str = "") -> str:
    """A bar for each, one below the other; `said` writes its value behind it."""
    names = min(NAMES, max((measure(bar.name, 12) for bar in bars), default=0)) + 28
    behind = max((measure(said(bar.value), 12) for bar in bars), default=0) + 24
    ends = [bar.value + bar.spread for bar in bars]
    across = curves.axis([0.0, *ends], 5, whole=False)
    height = ROW * len(bars)
    box = Box(names, 52, WIDTH - names - behind, height, across, curves.Axis(0, 1, ()))
    parts = [*curves.frame(box, x)]
    for number, bar in enumerate(bars):
        parts += drawn(box, 52 + ROW * number + ROW / 2, bar, said(bar.value))
    light, dark = (BARS.format(*colours) for colours in (curves.LIGHT, curves.DARK))
    return curves.page(WIDTH, 52 + height + 50, title, 20, light, dark, parts)


def drawn(box: Box, middle: float, bar: Bar, text: str) -> Iterator[str]:
    end = box.x(bar.value)
    yield (
        f'<rect class="bar" x="{box.left:.1f}" y="{middle - THICK / 2:.1f}" '
        f'width="{max(0.0, end - box.left):.1f}" height="{THICK}"/>'
    )
    yield write(box.left - 10, middle + 4, cut(bar.name, 12, NAMES), "", "end")
    low, high = box.x(max(0.0, bar.value - bar.spread)), box.x(bar.value + bar.spread)
    if bar.spread:
        yield curves.stroke("spread", low, middle, high, middle)
    yield write(max(end, high) + 8, middle + 4, text)
