"""Training curves as a picture: one SVG file, light or dark as its reader is, nothing to install.

>>> rows = read_metrics(Path("runs/novel/metrics.jsonl"))
>>> loss = Line("train", [(row["step"], row.get("loss")) for row in rows])
>>> Path("curves.svg").write_text(curves_svg([Panel("loss", [loss])], "novel"))
"""

import json
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from numbers import Real
from pathlib import Path
from typing import Any, TypeGuard, cast

from nanolm.errors import DataError

POINTS = 500  # of a line, at most: more than a line has pixels
ALL_POINTS = 4000  # of a picture: about 80 kB
FEW = 30  # points, each of which is worth a dot
LONG = 40  # points, from which on a line may be noise around a trend
HUGE = 1e100  # no measurement is, and squares of less than that are still floats

# Okabe and Ito's colours, which the colour-blind tell apart; darker on white, lighter on black.
LIGHT = ("#0072b2", "#d55e00", "#008f68", "#b8558c", "#a87800", "#3a3a3a")
DARK = ("#62b8f0", "#ff9852", "#3fd0a2", "#eb9cc8", "#f0c24a", "#d0d0d0")
DASHES = ("none", "7 3", "3 2", "9 3 2 3")
KINDS = math.lcm(len(LIGHT), len(DASHES))  # lines that look different
STYLE = """
.curves { font: 12px system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
.curves .page { fill: #fff; } .curves text { fill: #24292f; }
.curves .title { font-size: 16px; font-weight: 600; } .curves .panel { font-weight: 600; }
.curves .tick { font-size: 11px; fill: #59636e; font-variant-numeric: tabular-nums; }
.curves .grid { stroke: #e4e8ec; } .curves .frame { stroke: #8c959f; }
.curves .mark { stroke: #59636e; stroke-dasharray: 3 3; }
.curves path { fill: none; stroke-width: 1.75; stroke-linejoin: round; stroke-linecap: butt; }
.curves path.faint { stroke-width: 1; stroke-opacity: 0.28; stroke-dasharray: none; }
.curves path.dots { stroke-width: 5.2; stroke-linecap: round; stroke-dasharray: none; }
"""
DARK_STYLE = """
.curves .page { fill: #0d1117; } .curves text { fill: #e6edf3; }
.curves .tick { fill: #9da7b1; } .curves .grid { stroke: #21262d; }
.curves .frame { stroke: #6e7681; } .curves .mark { stroke: #9da7b1; }
.curves path.faint { stroke-opacity: 0.35; }
"""
# What XML cannot hold, and what would turn the text around it.
HARMFUL = re.compile(
    "[^\t\n\r -\u2029\u202f-\u2065\u206a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
)

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """What is not a finite number is passed over. A name has one colour in all panels."""

    name: str
    points: Sequence[tuple[float | None, float | None]]


@dataclass(frozen=True)
class Panel:
    title: str
    lines: Sequence[Line]
    mark: tuple[float, str] | None = None  # a word at an x: (1200, "best")


@dataclass(frozen=True)
class Picture:
    """Panels with their axis, to be drawn as SVG here or as PNG by `nanolm.report.png`."""

    name: str  # of its file, without suffix
    title: str
    panels: Sequence[Panel]
    x: str = "step"
    steps_per_epoch: float | None = None

    def svg(self) -> str:
        return curves_svg(self.panels, self.title, self.x, steps_per_epoch=self.steps_per_epoch)


@dataclass(frozen=True)
class Axis:
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Box:
    """Where in the picture a panel's curves are."""

    left: float
    top: float
    width: float
    height: float
    across: Axis
    up: Axis

    def x(self, value: float) -> float:
        return self.left + self.width * self.across.share(value)

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - self.up.share(value))


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The objects of a metrics.jsonl; a last line that is not yet whole is passed over."""
    lines = file.read_bytes().splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif number < len(lines):
            raise DataError(f"{file}, line {number}: no JSON object; remove that line")
    return rows


def curves_svg(
    panels: Sequence[Panel],
    title: str,
    x: str = "step",
    logarithmic: bool = False,
    steps_per_epoch: float | None = None,
) -> str:
    """One or two panels side by side, more of them one below the other; `x` names what they share.

    With `steps_per_epoch` the axis of steps has a second row of ticks, for epochs. Long noisy
    lines are faint behind their trend, and lines of many points are thinned. With `logarithmic`,
    for numbers above 0, what grows as a power of x is a straight line.
    """
    panels = [
        replace(each, lines=[line for line in each.lines if drawable(line)]) for each in panels
    ]
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    kinds = {name: f"c{number % KINDS}" for number, name in enumerate(names)}
    drawn = [[drawable(line) for line in panel.lines] for panel in panels]
    places = [each for lines in drawn for points in lines for each, _ in points]
    places += [panel.mark[0] for panel in panels if panel.mark and measured(panel.mark[0])]
    across = log_axis(places) if logarithmic else axis(places, 6, whole=False)
    most = min(POINTS, ALL_POINTS // max(1, sum(map(len, drawn))))

    columns = 2 if len(panels) == 2 else 1
    width, height = (460, 270) if columns == 2 else (720, 330 if len(panels) == 1 else 200)
    heights = [[y for points in lines for _, y in points] for lines in drawn]
    ups = [log_axis(each) if logarithmic else axis(each, 5) for each in heights]
    margin = 22 + max((measure(text, 11) for up in ups for _, text in up.ticks), default=0)
    if steps_per_epoch:
        margin = max(margin, 16 + measure("epoch", 11))
    inner = width - margin - 16
    heads = [head(panel, kinds, inner) for panel in panels]
    above = max((rows for _, rows in heads), default=0) * 18
    above += 16 if any(panel.mark for panel in panels) else 6
    each = above + height + 52  # ticks and what they count below
    whole = 44 + each * -(-len(panels) // columns)

    parts: list[str] = []
    for number, (panel, lines, up, (legend, _)) in enumerate(
        zip(panels, drawn, ups, heads, strict=True)
    ):
        left, top = number % columns * width, 44 + number // columns * each
        box = Box(left + margin, top + above, inner, height, across, up)
        parts.append(f'<g transform="translate({box.left:g} {top + 12})">{legend}</g>')
        parts += frame(box, x, epoch_ticks(across, steps_per_epoch))
        if panel.mark and measured(panel.mark[0]):
            parts += mark(box, *panel.mark)
        if not any(lines):
            centre = box.left + inner / 2
            parts.append(write(centre, box.top + height / 2, "no data yet", "tick", "middle"))
        for line, points in zip(panel.lines, lines, strict=True):
            parts += curve(box, points, most, kinds[line.name])
    light, dark = style(min(KINDS, len(names)))
    return page(columns * width, whole, title, margin, light, dark, parts)


def page(
    width: int, height: int, title: str, left: float, light: str, dark: str, parts: Iterable[str]
) -> str:
    """The whole file: a title, and `parts` in colours for a light reader and for a dark one."""
    heading = cut(title, 18, width - left - 16)
    dark = f"@media (prefers-color-scheme: dark) {{{DARK_STYLE}{dark}}}"
    above = (
        '<svg xmlns="http://www.w3.org/2000/svg" class="curves" role="img" '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<title>{safe(heading)}</title><style>{STYLE}{light}{dark}\n</style>",
        '<rect class="page" width="100%" height="100%"/>',
        write(left, 28, heading, "title"),
    )
    return "\n".join((*above, *parts, "</svg>")) + "\n"


def measured(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and abs(cast(float, value)) < HUGE


def drawable(line: Line) -> list[Point]:
    """The points that are numbers, from left to right."""
    return sorted((float(x), float(y)) for x, y in line.points if measured(x) and measured(y))


def axis(values: Sequence[float], count: int, whole: bool = True) -> Axis:
    """About `count` round ticks; if `whole`, the axis goes on to the ticks around the values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1 / HUGE):  # all the same
        around = abs(low) / 10 if abs(low) > 1 / HUGE else 1.0
        low, high = low - around, high + around
    step = round_step((high - low) / count)
    if not whole and all(value == int(value) for value in values):
        step = max(1.0, step)  # there is no half step
    if not whole and 0 < low <= min(step, (high - low) / 4):
        low = 0.0  # counting began there
    # 1 / 0.1 may be a little more than 10, and the axis should not go on to 1.1.
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    far = step if whole else step / 4
    low = first * step if low - first * step <= far else low
    high = last * step if last * step - high <= far else high
    top = max(abs(low), abs(high))
    ticks = [number * step for number in range(first, last + 1) if low <= number * step <= high]
    return Axis(low, high, [(value, tick(value, step, top)) for value in ticks])


def log_axis(values: Sequence[float]) -> Axis:
    """As wide as the values, with ticks at 1, 2 and 5 times powers of ten."""
    low, high = min(values, default=1.0), max(values, default=10.0)
    low, high = (low / 2, high * 2) if low == high else (low, high)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [times * 10.0**power for power in powers for times in (1, 2, 5)]
    return Axis(low, high, [(tick, f"{tick:,g}") for tick in ticks if low <= tick <= high], True)


def round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, the one about as large."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= rough * 0.8)


def tick(value: float, step: float, top: float) -> str:
    """How a number is written on an axis that goes up to `top`."""
    if not value:
        return "0"
    if top >= 1e9 or step < 1e-4:
        power = math.floor(math.log10(top))
        return f"{value / 10.0**power:.12g}e{power}"
    if top >= 1e6 and step >= 1e4:
        return f"{value / 1e6:g}M"
    if 1e4 <= top < 1e6 and step >= 100:
        return f"{value / 1e3:g}k"
    return f"{value:,.{max(0, -math.floor(math.log10(step * 1.001)))}f}"


def epoch_ticks(steps: Axis, steps_per_epoch: float | None) -> list[tuple[float, str]]:
    """Round numbers of epochs, each at its place on the axis of steps."""
    if not steps_per_epoch:
        return []
    low, high = steps.low / steps_per_epoch, steps.high / steps_per_epoch
    step = round_step((high - low) / 6)
    # The last epoch may end within the last step.
    near = 0.02 * (high - low) / step
    numbers = range(math.ceil(low / step - near), math.floor(high / step + near) + 1)
    places = [max(steps.low, min(steps.high, n * step * steps_per_epoch)) for n in numbers]
    return [(x, tick(n * step, step, high)) for x, n in zip(places, numbers, strict=True)]


def frame(box: Box, x: str, epochs: Sequence[tuple[float, str]] = ()) -> Iterator[str]:
    """Grid, axes and their numbers; a row of `epochs` where there are any."""
    right, bottom = box.left + box.width, box.top + box.height
    for value, text in box.up.ticks:
        y = box.y(value)
        yield stroke("grid", box.left, y, right, y)
        yield write(box.left - 8, y + 4, text, "tick", "end")
    for value, text in box.across.ticks:
        at = box.x(value)
        yield stroke("grid", at, box.top, at, bottom)
        yield write(at, bottom + 17, text, "tick", "middle")
    yield stroke("frame", box.left, bottom, right, bottom)
    if not epochs:
        yield write(box.left + box.width / 2, bottom + 36, cut(x, 11, box.width), "tick", "middle")
        return
    for value, text in epochs:
        yield write(box.x(value), bottom + 35, text, "tick", "middle")
    for name, y in ((x, bottom + 17), ("epoch", bottom + 35)):
        yield write(box.left - 10, y, name, "tick", "end")


def mark(box: Box, x: float, word: str) -> Iterator[str]:
    """A dashed line from bottom to top, its word above the curves and not beyond their sides."""
    at, text = box.x(x), cut(word, 11, box.width)
    half = measure(text, 11) / 2
    yield stroke("mark", at, box.top, at, box.top + box.height)
    centre = min(max(at, box.left + half), box.left + box.width - half)
    yield write(centre, box.top - 5, text, "tick", "middle")


def curve(box: Box, points: list[Point], most: int, kind: str) -> Iterator[str]:
    """A line, with dots where points are few, or faint behind its trend where it is noise."""
    parts = buckets(points, max(1, most // 2))
    line = points if len(points) <= most else [point for part in parts for point in ends(part)]
    trend = smooth([middle(part) for part in parts]) if len(points) >= LONG else []
    noisy = bool(trend) and noise(parts, trend) > 0.015 * (box.up.high - box.up.low)
    if noisy:
        yield path(box, line, f"{kind} faint")
    yield path(box, trend if noisy else line, kind)
    if 0 < len(points) <= FEW:  # strokes without a length, but with round ends
        dots = "".join(f"M{box.x(x):.1f},{box.y(y):.1f}h.01" for x, y in points)
        yield f'<path class="{kind} dots" d="{dots}"/>'


def buckets(points: list[Point], count: int) -> list[list[Point]]:
    """The points in at most `count` groups of neighbours."""
    size = -(-len(points) // count) or 1
    return [points[start : start + size] for start in range(0, len(points), size)]


def ends(part: list[Point]) -> list[Point]:
    """The lowest and the highest point, in their order: thinned so, a line keeps its peaks."""
    low, high = min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])
    return sorted({low, high})


def middle(part: list[Point]) -> Point:
    return sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)


def smooth(points: list[Point]) -> list[Point]:
    """Through each point the straight line that fits its neighbours best: no lag, honest ends."""
    reach = max(3, len(points) // 25)
    found = []
    for number, (at, _) in enumerate(points):
        near = points[max(0, number - reach) : number + reach + 1]
        centre, level = middle(near)
        spread = sum((x - centre) ** 2 for x, _ in near)
        slope = sum((x - centre) * (y - level) for x, y in near) / spread if spread else 0.0
        found.append((at, level + slope * (at - centre)))
    return found


def noise(parts: list[list[Point]], trend: list[Point]) -> float:
    """How far points are from the trend, in the mean."""
    far = [abs(y - at) for part, (_, at) in zip(parts, trend, strict=True) for _, y in part]
    return sum(far) / len(far)


def path(box: Box, points: list[Point], kind: str) -> str:
    places = " ".join(f"{box.x(x):.1f},{box.y(y):.1f}" for x, y in points)
    return f'<path class="{kind}" d="M{places}"/>' if places else ""


def head(panel: Panel, kinds: dict[str, str], width: float) -> tuple[str, int]:
    """A panel's title and what its lines are, in as many rows as they need; and how many."""
    text = cut(panel.title, 12, width)
    parts, at, row = [write(0, 0, text, "panel")], measure(text, 13) + 18, 0
    for line in panel.lines:
        if line.name == panel.title:
            continue
        name = cut(line.name, 12, min(200, width - 30))
        room = measure(name, 12) + 28
        if at + room > width:
            at, row = 0, row + 1
        parts.append(f'<path class="{kinds[line.name]}" d="M{at:.1f},{row * 18 - 4}h22"/>')
        parts.append(write(at + 28, row * 18, name))
        at += room + 16
    return "".join(parts), row + 1


def style(kinds: int) -> tuple[str, str]:
    """The dashes and colours of so many kinds of lines, light and dark."""

    def colours(palette: tuple[str, ...]) -> str:
        return "".join(
            f".curves .c{number} {{ stroke: {palette[number % len(palette)]}; }}\n"
            for number in range(kinds)
        )

    dashes = "".join(
        f".curves .c{number} {{ stroke-dasharray: {DASHES[number % len(DASHES)]}; }}\n"
        for number in range(kinds)
    )
    return dashes + colours(LIGHT), colours(DARK)


def stroke(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def write(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{safe(text)}</text>'
    )


def safe(text: str) -> str:
    return escape(HARMFUL.sub("\ufffd", text))


def measure(text: str, size: float) -> float:
    """About how wide a text is, in pixels."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return size * (0.58 * (len(text) - wide) + 1.05 * wide)


def cut(text: str, size: float, width: float) -> str:
    """As much of a text as has room."""
    text = " ".join(text[: int(width)].split())  # no letter is narrower than a pixel
    if measure(text, size) <= width:
        return text
    while text and measure(text + "…", size) > width:
        text = text[:-1]
    return text + "…"
