"""A bar chart with standard deviations, as one SVG file.

>>> bars = [Bar("bag of words", 61.0, 1.0), Bar("Transformer", 98.0, 0.2)]
>>> image = draw_bars(bars, "reviews", "{:.1f} %".format, "accuracy (%)", 50.0)
>>> Path("compare.svg").write_text(image.svg)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanolm.report import svg
from nanolm.report.axes import Axis, PlotArea, linear_axis
from nanolm.report.svg import Drawing, Mark

WIDTH, MAX_NAME_WIDTH, TOP, ROW_HEIGHT, BAR_HEIGHT = 480, 190, 58, 30, 16  # pixels


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    spread: float  # on both sides of the value


def draw_bars(
    bars: Sequence[Bar], title: str, label: Callable[[float], str], unit: str, chance: float | None
) -> Drawing:
    """Bars below each other, each followed by the `label` of its value, and a line at `chance`."""
    left = min(MAX_NAME_WIDTH, max((svg.text_width(bar.name, 12) for bar in bars), default=0)) + 28
    right = max((svg.text_width(label(bar.value), 12) for bar in bars), default=0) + 24
    x_axis = linear_axis([0.0, *(bar.value + bar.spread for bar in bars)], 5, extend=False)
    height = ROW_HEIGHT * len(bars)
    area = PlotArea(left, TOP, WIDTH - left - right, height, x_axis, Axis(0, 1))
    parts = [*svg.axes(area, unit)]
    marks: dict[str, list[Mark]] = {}
    for number, bar in enumerate(bars):
        middle = TOP + ROW_HEIGHT * number + ROW_HEIGHT / 2
        end, high = area.x(bar.value), area.x(bar.value + bar.spread)
        place = f'x="{left:.1f}" y="{middle - BAR_HEIGHT / 2:.1f}"'
        size = f'width="{max(0.0, end - left):.1f}" height="{BAR_HEIGHT}"'
        name = svg.shorten(bar.name, 12, MAX_NAME_WIDTH)
        parts.append(f'<rect class="bar" {place} {size}/>')
        parts.append(svg.text(left - 10, middle + 4, name, "", "end"))
        if bar.spread:
            low = area.x(max(0.0, bar.value - bar.spread))
            parts.append(svg.line("spread", low, middle, high, middle))
        parts.append(svg.text(max(end, high) + 8, middle + 4, label(bar.value)))
        marks.setdefault(bar.name, []).append((end, middle, bar.value, bar.spread))
    if chance is not None:
        parts.append(svg.line("mark", area.x(chance), TOP, area.x(chance), TOP + height))
        parts.append(svg.text(area.x(chance), TOP - 5, "majority class", "tick", "middle"))
    image = svg.document(WIDTH, TOP + height + 50, title, 20, parts)
    return Drawing(image, ["model", unit, "standard deviation"], marks)
