"""Charts as PNG, drawn by matplotlib (optional dependency: nanolm[plot])."""

import re
from itertools import cycle
from pathlib import Path
from typing import Any

from nanolm.errors import UsageError
from nanolm.report.curves import DOTTED_POINTS, SERIES_POINTS, Chart, in_buckets, noisy_trend
from nanolm.report.svg import STYLE_SHEET

DOTS_PER_INCH = 200
COLORS = re.findall(r"\.c\d+ { stroke: (#\w+)", STYLE_SHEET)[:6]  # of the light theme
SLASH = [(-1, -0.5), (1, 0.5)]  # two of them show that an axis is broken
LINE_STYLES = ("-", "--", ":", "-.")  # distinct in black and white too


def figure(width: float, height: float) -> Any:
    """An empty matplotlib figure of this size in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--png needs matplotlib: pip install 'nanolm[plot]'") from None
    return Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")


def chart_png(chart: Chart, file: Path) -> None:
    """The same panels, curves and colors as in the SVG."""
    drawing = figure(4.6 * len(chart.panels), 3.6)
    drawing.suptitle(chart.title, parse_math=False)
    axes = drawing.subplots(1, len(chart.panels), squeeze=False)[0]
    per_epoch = chart.steps_per_epoch or 0
    looks = zip(cycle(COLORS), cycle(LINE_STYLES), strict=False)
    styles = dict(zip(chart.names, looks, strict=False))
    for axis, panel in zip(axes, chart.panels, strict=True):
        axis.set_title(panel.title, fontsize=10, loc="left", pad=16, parse_math=False)
        for series in panel.drawn:
            color, line = styles[series.name]
            xs, ys = zip(*series.finite, strict=True)
            marker = "o" if len(xs) <= DOTTED_POINTS else None
            buckets = in_buckets(series.finite, SERIES_POINTS // 2)
            if trend := noisy_trend(buckets, max(ys) - min(ys)):
                axis.plot(xs, ys, color=color, linewidth=0.7, alpha=0.3)
                xs, ys = zip(*trend, strict=True)
            look = {"color": color, "linestyle": line, "marker": marker, "label": series.name}
            axis.plot(xs, ys, linewidth=1.5, markersize=3.5, **look)
        y_axis = panel.y_axis(chart.logarithmic)
        axis.set_ylim(y_axis.low, y_axis.high)
        if y_axis.broken:
            place = {"transform": axis.transAxes, "clip_on": False, "linestyle": "none"}
            axis.plot([0, 0], [0.01, 0.03], color="0.3", marker=SLASH, markersize=8, **place)
        if panel.mark:
            x, word = panel.mark
            place = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
            axis.axvline(x, color="0.5", linestyle=":", linewidth=1)
            axis.annotate(word, (x, 1), fontsize=8, **place)
        if panel.baseline:
            y, word = panel.baseline
            axis.axhline(y, color="0.5", linestyle=":", linewidth=1)
            place = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
            axis.annotate(word, (1, y), fontsize=8, **place)
        axis.set_xlabel(chart.x)
        axis.grid(color="0.92")
        axis.spines[["top", "right"]].set_visible(False)
        if panel.drawn:
            axis.legend(fontsize=8, frameon=False)
        if chart.x == "epoch":
            axis.xaxis.get_major_locator().set_params(integer=True)
        if per_epoch:
            to_and_from_epochs = (lambda x: x / per_epoch, lambda x: x * per_epoch)
            axis.secondary_xaxis(-0.24, functions=to_and_from_epochs).set_xlabel("epoch")
    drawing.savefig(file, format="png", bbox_inches="tight")
