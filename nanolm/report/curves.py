"""Curves as an SVG image.

>>> rows = read_metrics(Path("runs/novel/metrics.jsonl"))
>>> loss = Series("train", [(row["step"], row.get("loss")) for row in rows])
>>> Path("curves.svg").write_text(curves_svg(Chart("novel", [Panel("loss", [loss])])))
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from operator import itemgetter
from typing import TypeGuard, cast

from nanolm.report import svg
from nanolm.report.axes import MAX_VALUE, PlotArea, epoch_ticks, linear_axis, log_axis

SERIES_POINTS = 500  # per series: more than a curve has pixels
CHART_POINTS = 4000  # per chart: about 80 kB
DOTTED_POINTS = 30  # up to this many, each has a dot
TREND_POINTS = 40  # from this many, noisy curves get a trend line
NOISE = 0.015  # mean distance from the trend, relative to the axis, from which a curve is noisy
LINE_STYLES = 12  # in svg.css: six colors, four dash patterns
TITLE_HEIGHT, ROW_HEIGHT, TICKS_HEIGHT = 44, 18, 52  # pixels

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One curve. Series of the same name have the same color in all panels."""

    name: str
    points: Sequence[tuple[float | None, float | None]]

    @cached_property
    def finite(self) -> list[Point]:
        """The points with finite values, from left to right."""
        return sorted((float(x), float(y)) for x, y in self.points if is_finite(x) and is_finite(y))


@dataclass(frozen=True)
class Panel:
    title: str
    series: Sequence[Series]
    mark: tuple[float, str] | None = None  # a label at an x: (1200, "best")

    @property
    def drawn(self) -> list[Series]:
        return [series for series in self.series if series.finite]


@dataclass(frozen=True)
class Chart:
    """Panels with the same x axis, drawn as SVG here or as PNG by `nanolm.report.png`."""

    title: str
    panels: Sequence[Panel]
    x: str = "step"
    steps_per_epoch: float | None = None  # for a second row of ticks
    logarithmic: bool = False  # both axes, for positive values: power laws are straight lines

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(each.name for panel in self.panels for each in panel.drawn))


def curves_svg(chart: Chart) -> str:
    """Up to two panels are side by side, more are below each other. Long noisy curves are faint
    behind their trend, and curves with many points are thinned."""
    panels = chart.panels
    styles = {name: f"c{number % LINE_STYLES}" for number, name in enumerate(chart.names)}
    points = [[point for each in panel.drawn for point in each.finite] for panel in panels]
    xs = [x for each in points for x, _ in each]
    xs += [panel.mark[0] for panel in panels if panel.mark and is_finite(panel.mark[0])]
    x_axis = log_axis(xs) if chart.logarithmic else linear_axis(xs, 6, extend=False)
    ys = [[y for _, y in each] for each in points]
    y_axes = [log_axis(each) if chart.logarithmic else linear_axis(each, 5) for each in ys]
    count = sum(len(panel.drawn) for panel in panels)
    max_points = min(SERIES_POINTS, CHART_POINTS // max(1, count))

    columns = 2 if len(panels) == 2 else 1
    width, height = (460, 270) if columns == 2 else (720, 330 if len(panels) == 1 else 200)
    labels = [label for axis in y_axes for _, label in axis.ticks]
    margin = 22 + max((svg.text_width(label, 11) for label in labels), default=0)
    if chart.steps_per_epoch:
        margin = max(margin, 16 + svg.text_width("epoch", 11))
    inner = width - margin - 16
    legends = [legend(panel, styles, inner) for panel in panels]
    above = max((rows for _, rows in legends), default=0) * ROW_HEIGHT
    above += 16 if any(panel.mark for panel in panels) else 6
    panel_height = above + height + TICKS_HEIGHT

    parts: list[str] = []
    for number, panel in enumerate(panels):
        left = number % columns * width + margin
        top = TITLE_HEIGHT + number // columns * panel_height
        area = PlotArea(left, top + above, inner, height, x_axis, y_axes[number])
        parts.append(f'<g transform="translate({left:g} {top + 12})">{legends[number][0]}</g>')
        parts += svg.axes(area, chart.x, epoch_ticks(x_axis, chart.steps_per_epoch))
        if panel.mark and is_finite(panel.mark[0]):  # keep its label inside the panel
            at, word = area.x(panel.mark[0]), svg.shorten(panel.mark[1], 11, inner)
            half = svg.text_width(word, 11) / 2
            center = min(max(at, left + half), left + inner - half)
            parts.append(svg.line("mark", at, area.top, at, area.top + height))
            parts.append(svg.text(center, area.top - 5, word, "tick", "middle"))
        if not panel.drawn:
            y = area.top + height / 2
            parts.append(svg.text(left + inner / 2, y, "no data yet", "tick", "middle"))
        for series in panel.drawn:
            parts += curve(area, series.finite, max_points, styles[series.name])
    whole = TITLE_HEIGHT + panel_height * -(-len(panels) // columns)
    return svg.document(columns * width, whole, chart.title, margin, parts)


def is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and abs(cast(float, value)) < MAX_VALUE


def curve(area: PlotArea, points: list[Point], max_points: int, style: str) -> Iterator[str]:
    """A line, with dots if there are few points, or faint behind its trend if it is noisy."""
    buckets, line = in_buckets(points, max(1, max_points // 2)), points
    if len(points) > max_points:  # keep the minimum and maximum of each bucket
        ends = [(min(each, key=itemgetter(1)), max(each, key=itemgetter(1))) for each in buckets]
        line = [point for pair in ends for point in sorted(set(pair))]
    trend = noisy_trend(buckets, area.y_axis.high - area.y_axis.low)
    paths = {f"{style} faint": line, style: trend} if trend else {style: line}
    for kind, each in paths.items():
        places = " ".join(f"{area.x(x):.1f},{area.y(y):.1f}" for x, y in each)
        yield f'<path class="{kind}" d="M{places}"/>'
    if len(points) <= DOTTED_POINTS:  # strokes of no length with round caps
        dots = "".join(f"M{area.x(x):.1f},{area.y(y):.1f}h.01" for x, y in points)
        yield f'<path class="{style} dots" d="{dots}"/>'


def in_buckets(points: list[Point], count: int) -> list[list[Point]]:
    """The points in at most `count` groups of consecutive ones."""
    size = math.ceil(len(points) / count)
    return [points[start : start + size] for start in range(0, len(points), size)]


def mean(points: list[Point]) -> Point:
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def noisy_trend(buckets: list[list[Point]], height: float) -> list[Point]:
    """The trend of a long noisy curve on an axis of this height; empty if it is short or smooth.
    Uses local linear regression, which has no lag and is accurate at the ends."""
    count = sum(map(len, buckets))
    if count < TREND_POINTS:
        return []
    means = [mean(bucket) for bucket in buckets]
    reach = max(3, len(means) // 25)
    trend, distance = [], 0.0
    for number, (at, _) in enumerate(means):
        near = means[max(0, number - reach) : number + reach + 1]
        center, level = mean(near)
        variance = sum((x - center) ** 2 for x, _ in near)
        slope = sum((x - center) * (y - level) for x, y in near) / variance if variance else 0.0
        level += slope * (at - center)
        trend.append((at, level))
        distance += sum(abs(y - level) for _, y in buckets[number])
    return trend if distance / count > NOISE * height else []


def legend(panel: Panel, styles: dict[str, str], width: float) -> tuple[str, int]:
    """A panel's title and the names of its series, and the number of rows they take."""
    heading = svg.shorten(panel.title, 12, width)
    parts, at, row = [svg.text(0, 0, heading, "panel")], svg.text_width(heading, 13) + 18, 0
    for name in [series.name for series in panel.drawn if series.name != panel.title]:
        label = svg.shorten(name, 12, min(200, width - 30))
        room = svg.text_width(label, 12) + 28
        if at + room > width:
            at, row = 0, row + 1
        y = row * ROW_HEIGHT
        parts.append(f'<path class="{styles[name]}" d="M{at:.1f},{y - 4}h22"/>')
        parts.append(svg.text(at + 28, y, label))
        at += room + 16
    return "".join(parts), row + 1
