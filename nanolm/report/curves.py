"""Curves as an SVG image.

>>> rows = read_metrics(Path("runs/novel/metrics.jsonl"))
>>> loss = Series("train", [(row["step"], row.get("loss")) for row in rows])
>>> chart = Chart("novel", [Panel("loss (nats per token)", [loss])])
>>> Path("curves.svg").write_text(chart.svg)
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from operator import itemgetter
from typing import Any, TypeGuard, cast

import numpy as np

from nanolm.report import svg
from nanolm.report.axes import (
    MAX_VALUE,
    Axis,
    PlotArea,
    epoch_ticks,
    linear_axis,
    log_axis,
    value_axis,
)
from nanolm.report.svg import Drawing, Mark

SERIES_POINTS = 500  # per series: more than a curve has pixels
CHART_POINTS = 4000  # per chart: about 80 kB
DOTTED_POINTS = 30  # up to this many, each has a dot
TREND_POINTS = 40  # from this many, noisy curves get a trend line
NOISE = 0.015  # mean distance from the trend, relative to the axis, from which a curve is noisy
LINE_STYLES = 12  # in svg.css: six colors, four dash patterns
TITLE_HEIGHT, ROW_HEIGHT, TICKS_HEIGHT, WIDTH, HEIGHT = 44, 18, 52, 440, 270  # pixels

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One curve. Series of the same name have the same color in all panels."""

    name: str
    points: Sequence[tuple[float | None, float | None]]
    spread: Mapping[Any, float] = field(default_factory=dict)  # by x: on both sides of the curve
    counts: Mapping[Any, int] = field(default_factory=dict)  # by x: texts that a point stands for

    @cached_property
    def finite(self) -> list[Point]:
        """The points with finite values, from left to right."""
        return sorted((float(x), float(y)) for x, y in self.points if is_finite(x) and is_finite(y))


@dataclass(frozen=True)
class Panel:
    title: str  # with the unit of its values
    series: Sequence[Series]
    mark: tuple[float, str] | None = None  # a label at an x: (1200, "best")
    baseline: tuple[float, str] | None = None  # a label at a y: (0.5, "majority class")

    @property
    def drawn(self) -> list[Series]:
        return [series for series in self.series if series.finite]

    def y_axis(self, logarithmic: bool) -> Axis:
        values = [self.baseline[0]] if self.baseline else []
        for each in self.drawn:
            bands = [(y, each.spread.get(x, 0.0)) for x, y in each.finite]
            values += [edge for y, reach in bands for edge in {y - reach, y + reach}]
        return log_axis(values) if logarithmic else value_axis(values, 5)


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

    @property
    def svg(self) -> str:
        return draw_curves(self).svg


def draw_curves(chart: Chart, some: Sequence[Panel] | None = None) -> Drawing:
    """All panels or some, two side by side. Long noisy curves are faint behind their trend, and
    curves with many points are thinned."""
    panels = chart.panels if some is None else some
    styles = {name: f"c{number % LINE_STYLES}" for number, name in enumerate(chart.names)}
    xs = [x for panel in panels for each in panel.drawn for x, _ in each.finite]
    xs += [panel.mark[0] for panel in panels if panel.mark and is_finite(panel.mark[0])]
    x_axis = log_axis(xs) if chart.logarithmic else linear_axis(xs, 6, extend=False)
    y_axes = [panel.y_axis(chart.logarithmic) for panel in panels]
    drawn = [each for panel in panels for each in panel.drawn]
    max_points = min(SERIES_POINTS, CHART_POINTS // max(1, len(drawn)))

    columns = max(1, min(2, len(panels)))
    labels = [label for axis in y_axes for _, label in axis.ticks]
    margin = 22 + max((svg.text_width(label, 11) for label in labels), default=0)
    if chart.steps_per_epoch:
        margin = max(margin, 16 + svg.text_width("epoch", 11))
    inner = WIDTH - margin - 16
    legends = [legend(panel, styles, inner) for panel in panels]
    above = max((rows for _, rows in legends), default=0) * ROW_HEIGHT
    above += 16 if any(panel.mark for panel in panels) else 6
    panel_height = above + HEIGHT + TICKS_HEIGHT

    parts: list[str] = []
    marks: dict[str, list[Mark]] = {}
    for number, panel in enumerate(panels):
        left = number % columns * WIDTH + margin
        top = TITLE_HEIGHT + number // columns * panel_height
        area = PlotArea(left, top + above, inner, HEIGHT, x_axis, y_axes[number])
        parts.append(f'<g transform="translate({left:g} {top + 12})">{legends[number][0]}</g>')
        parts += svg.axes(area, chart.x, epoch_ticks(x_axis, chart.steps_per_epoch))
        if panel.mark and is_finite(panel.mark[0]):  # keep its label inside the panel
            at, word = area.x(panel.mark[0]), svg.shorten(panel.mark[1], 11, inner)
            half = svg.text_width(word, 11) / 2
            center = min(max(at, left + half), left + inner - half)
            parts.append(svg.line("mark", at, area.top, at, area.top + HEIGHT))
            parts.append(svg.text(center, area.top - 5, word, "tick", "middle"))
        if panel.baseline:
            y, word = area.y(panel.baseline[0]), svg.shorten(panel.baseline[1], 11, inner)
            parts.append(svg.line("mark", left, y, left + inner, y))
            parts.append(svg.text(left + inner, y - 5, word, "tick", "end"))
        if not panel.drawn:
            y = area.top + HEIGHT / 2
            parts.append(svg.text(left + inner / 2, y, "no data yet", "tick", "middle"))
        for place, series in enumerate(panel.drawn):
            parts += band(area, series, styles[series.name])
            shown = thinned(series.finite, max_points)
            parts += curve(area, series.finite, shown, max_points, styles[series.name])
            for x, y in shown:
                if x in series.counts:  # below the first curve, above the others
                    words, below = f"{series.counts[x]:,}", -9 if place else 17
                    parts.append(svg.text(area.x(x), area.y(y) + below, words, "tick", "middle"))
                more = [of[x] for of in (series.spread, series.counts) if x in of]
                marks.setdefault(series.name, []).append((area.x(x), area.y(y), x, y, *more))
    whole = TITLE_HEIGHT + panel_height * -(-len(panels) // columns)
    image = svg.document(columns * WIDTH, whole, chart.title, margin, parts)
    names = ["series", chart.x, ", ".join(panel.title for panel in panels)]
    names += ["standard deviation"] * any(each.spread for each in drawn)
    names += ["count"] * any(each.counts for each in drawn)
    return Drawing(image, names, marks, together=True)


def mean_series(name: str, curves: Sequence[Series]) -> Series:
    """The mean of several curves, point by point, with its standard deviation."""
    count = min(len(each.finite) for each in curves)
    if len(curves) == 1 or not count:
        return Series(name, curves[0].points if count else ())
    points = np.array([each.finite[:count] for each in curves])  # (curves, points, 2)
    means, spread = points.mean(axis=0).tolist(), points[:, :, 1].std(axis=0, ddof=1).tolist()
    return Series(name, means, {x: reach for (x, _), reach in zip(means, spread, strict=True)})


def is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and abs(cast(float, value)) < MAX_VALUE


def thinned(points: list[Point], most: int) -> list[Point]:
    """The minimum and the maximum of each group of points, if there are too many."""
    if len(points) <= most:
        return points
    groups = in_buckets(points, max(1, most // 2))
    ends = [(min(each, key=itemgetter(1)), max(each, key=itemgetter(1))) for each in groups]
    return [point for pair in ends for point in sorted(set(pair))]


def curve(
    area: PlotArea, points: list[Point], shown: list[Point], max_points: int, style: str
) -> Iterator[str]:
    """A line, with dots if there are few points, or faint behind its trend if it is noisy."""
    buckets = in_buckets(points, max(1, max_points // 2))
    trend = noisy_trend(buckets, area.y_axis.high - area.y_axis.low)
    paths = {f"{style} faint": shown, style: trend} if trend else {style: shown}
    for kind, each in paths.items():
        yield f'<path class="{kind}" d="M{places(area, each)}"/>'
    if len(points) <= DOTTED_POINTS:  # strokes of no length with round caps
        dots = "".join(f"M{area.x(x):.1f},{area.y(y):.1f}h.01" for x, y in points)
        yield f'<path class="{style} dots" d="{dots}"/>'


def band(area: PlotArea, series: Series, style: str) -> Iterator[str]:
    if inside := [(x, y, series.spread[x]) for x, y in series.finite if x in series.spread]:
        edge = [(x, y + reach) for x, y, reach in inside]
        edge += [(x, y - reach) for x, y, reach in reversed(inside)]
        yield f'<path class="{style} band" d="M{places(area, edge)}Z"/>'


def places(area: PlotArea, points: list[Point]) -> str:
    return " ".join(f"{area.x(x):.1f},{area.y(y):.1f}" for x, y in points)


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
