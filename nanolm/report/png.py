"""The curves of a run as PNG, drawn by matplotlib, which comes with nanolm[plot].

>>> picture_png(Path("runs/novel"), Picture("loss", "novel", panels))
"""

from pathlib import Path
from typing import Any

from nanolm.errors import UsageError
from nanolm.report import curves
from nanolm.report.curves import Picture, Point, drawable

DOTS = 200  # per inch
LINE_STYLES = ("-", "--", ":", "-.")  # told apart in black and white too


def figure(width: float, height: float) -> Any:
    """An empty matplotlib figure of this size in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--png needs matplotlib: pip install 'nanolm[plot]'") from None
    return Figure(figsize=(width, height), dpi=DOTS, layout="constrained")


def picture_png(folder: Path, picture: Picture) -> Path:
    """Draw `picture` into `folder`: the same panels, lines and colours as in the SVG."""
    file = folder / f"{picture.name}.png"
    drawing = figure(4.6 * len(picture.panels), 3.6)
    drawing.suptitle(picture.title, parse_math=False)
    places = drawing.subplots(1, len(picture.panels), squeeze=False)[0]
    names = list(dict.fromkeys(line.name for panel in picture.panels for line in panel.lines))
    looks = {
        name: {
            "color": curves.LIGHT[n % len(curves.LIGHT)],
            "linestyle": LINE_STYLES[n % len(LINE_STYLES)],
        }
        for n, name in enumerate(names)
    }
    for place, panel in zip(places, picture.panels, strict=True):
        place.set_title(panel.title, fontsize=10, loc="left", pad=16, parse_math=False)
        for line in panel.lines:
            if points := drawable(line):
                draw(place, points, line.name, looks[line.name])
        if panel.mark:
            x, word = panel.mark
            place.axvline(x, color="0.5", linestyle=":", linewidth=1)
            place.annotate(
                word,
                (x, 1),
                xycoords=("data", "axes fraction"),
                fontsize=8,
                ha="center",
                va="bottom",
            )
        place.set_xlabel(picture.x)
        place.grid(color="0.92")
        place.spines[["top", "right"]].set_visible(False)
        if any(drawable(line) for line in panel.lines):
            place.legend(fontsize=8, frameon=False)
        if picture.x == "epoch":
            place.xaxis.get_major_locator().set_params(integer=True)
        if per_epoch := picture.steps_per_epoch:
            below = place.secondary_xaxis(
                -0.24, functions=(lambda x, n=per_epoch: x / n, lambda x, n=per_epoch: x * n)
            )
            below.set_xlabel("epoch")
    drawing.savefig(file, bbox_inches="tight")
    return file


def draw(place: Any, points: list[Point], name: str, look: dict[str, str]) -> None:
    """One line; where it is noisy, faint behind its trend; where points are few, with dots."""
    xs, ys = zip(*points, strict=True)
    parts = curves.buckets(points, curves.POINTS // 2)
    trend = curves.smooth([curves.middle(part) for part in parts])
    spread = max(ys) - min(ys)
    noisy = len(points) >= curves.LONG and curves.noise(parts, trend) > 0.015 * spread
    if noisy:
        place.plot(xs, ys, color=look["color"], linewidth=0.7, alpha=0.3)
        xs, ys = zip(*trend, strict=True)
    marker = "o" if len(points) <= curves.FEW else None
    place.plot(xs, ys, **look, linewidth=1.5, marker=marker, markersize=3.5, label=name)
