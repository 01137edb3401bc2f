"""Charts as PNG, drawn by matplotlib, which comes with nanolm[plot].

>>> chart_png(Chart("novel", panels), Path("loss.png"))
"""

import re
from pathlib import Path
from typing import Any

from nanolm.errors import UsageError
from nanolm.report.curves import (
    DOTTED_POINTS,
    SERIES_POINTS,
    Chart,
    Series,
    in_buckets,
    noisy_trend,
)
from nanolm.report.svg import STYLE_SHEET

DOTS_PER_INCH = 200
COLOURS = re.findall(r"\.c\d+ { stroke: (#\w+)", STYLE_SHEET)[:6]  # those on white
LINE_STYLES = ("-", "--", ":", "-.")  # distinct in black and white too


def figure(width: float, height: float) -> Any:
    """An empty matplotlib figure of this size in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--png needs matplotlib: pip install 'nanolm[plot]'") from None
    return Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")


def chart_png(chart: Chart, file: Path) -> None:
    """The same panels, curves and colours as in the SVG."""
    drawing = figure(4.6 * len(chart.panels), 3.6)
    drawing.suptitle(chart.title, parse_math=False)
    axes = drawing.subplots(1, len(chart.panels), squeeze=False)[0]
    styles = {
        name: {
            "color": COLOURS[number % len(COLOURS)],
            "linestyle": LINE_STYLES[number % len(LINE_STYLES)],
        }
        for number, name in enumerate(chart.names)
    }
    for axis, panel in zip(axes, chart.panels, strict=True):
        axis.set_title(panel.title, fontsize=10, loc="left", pad=16, parse_math=False)
        drawn = [series for series in panel.series if series.finite]
        for series in drawn:
            draw(axis, series, styles[series.name])
        if panel.mark:
            x, word = panel.mark
            place = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
            axis.axvline(x, color="0.5", linestyle=":", linewidth=1)
            axis.annotate(word, (x, 1), fontsize=8, **place)
        axis.set_xlabel(chart.x)
        axis.grid(color="0.92")
        axis.spines[["top", "right"]].set_visible(False)
        if drawn:
            axis.legend(fontsize=8, frameon=False)
        if chart.x == "epoch":
            axis.xaxis.get_major_locator().set_params(integer=True)
        if per_epoch := chart.steps_per_epoch:
            below = axis.secondary_xaxis(
                -0.24, functions=(lambda x, n=per_epoch: x / n, lambda x, n=per_epoch: x * n)
            )
            below.set_xlabel("epoch")
    drawing.savefig(file, bbox_inches="tight")


def draw(axis: Any, series: Series, style: dict[str, str]) -> None:
    """One curve; where it is noisy, faint behind its trend; where points are few, with dots."""
    points = series.finite
    xs, ys = zip(*points, strict=True)
    if trend := noisy_trend(in_buckets(points, SERIES_POINTS // 2), max(ys) - min(ys)):
        axis.plot(xs, ys, color=style["color"], linewidth=0.7, alpha=0.3)
        xs, ys = zip(*trend, strict=True)
    marker = "o" if len(points) <= DOTTED_POINTS else None
    axis.plot(xs, ys, **style, linewidth=1.5, marker=marker, markersize=3.5, label=series.name)
