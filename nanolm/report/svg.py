"""Parts of SVG images: text that fits, lines, axes, and the document itself. The images follow the
reader's light or dark theme."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from nanolm.report.axes import BREAK, PlotArea
from nanolm.webpage import beside

STYLE_SHEET = beside(__file__, "svg.css")
# Characters that XML does not allow, and direction marks.
FORBIDDEN = re.compile("[\0-\x08\v\f\x0e-\x1f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")

Mark = tuple[Any, ...]  # x and y in pixels, then the values


@dataclass(frozen=True)
class Drawing:
    """An image and its numbers."""

    svg: str
    columns: Sequence[str]  # what the values are; the first is the name of a series
    marks: Mapping[str, Sequence[Mark]]  # by series
    together: bool = False  # marks at the same x belong together


def document(width: int, height: int, title: str, left: float, parts: Iterable[str]) -> str:
    heading = shorten(title, 14, width - left - 16)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    body = "\n".join((text(left, 28, heading, "title"), *parts))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" class="curves" role="img" {size}>
<title>{safe(heading)}</title><style>{STYLE_SHEET}</style>
<rect class="page" width="100%" height="100%"/>
{body}
</svg>
"""


def axes(area: PlotArea, x: str, epochs: Sequence[tuple[float, str]] = ()) -> Iterator[str]:
    """Grid, axes and tick labels, with a second row for `epochs`, if any."""
    right, bottom = area.left + area.width, area.top + area.height
    for value, label in area.y_axis.ticks:
        yield line("grid", area.left, y := area.y(value), right, y)
        yield text(area.left - 8, y + 4, label, "tick", "end")
    for value, label in area.x_axis.ticks:
        yield line("grid", at := area.x(value), area.top, at, bottom)
        yield text(at, bottom + 17, label, "tick", "middle")
    yield line("frame", area.left, bottom, right, bottom)
    yield line("frame", area.left, area.top, area.left, bottom)
    if area.y_axis.broken:
        low, high, left = bottom - BREAK / 3, bottom - 2 * BREAK / 3, area.left
        yield line("gap", left, low - 2, left, high + 2)
        yield from (line("frame", left - 5, y + 2, left + 5, y - 2) for y in (low, high))
    if epochs:
        for value, label in epochs:
            yield text(area.x(value), bottom + 35, label, "tick", "middle")
        for ticks, name, y in ((area.x_axis.ticks, x, 17), (epochs, "epoch", 35)):
            starts = [area.x(value) - text_width(label, 11) / 2 for value, label in ticks[:1]]
            yield text(min([area.left - 4, *starts]) - 6, bottom + y, name, "tick", "end")
    else:
        name = shorten(x, 11, area.width)
        yield text(area.left + area.width / 2, bottom + 36, name, "tick", "middle")


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{safe(words)}</text>'


def safe(words: str) -> str:
    return escape(FORBIDDEN.sub("\ufffd", words))


def text_width(words: str, size: float) -> float:
    """The approximate width of a text in pixels."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in words)
    return size * (0.58 * (len(words) - wide) + 1.05 * wide)


def shorten(words: str, size: float, width: float) -> str:
    """As much of a text as fits a width in pixels."""
    words = " ".join(words[: int(width)].split())  # no character is narrower than a pixel
    if text_width(words, size) > width:
        while words and text_width(words + "…", size) > width:
            words = words[:-1]
        words += "…"
    return words
