"""Drawings as figures of a page, with values to read and downloads as SVG, PNG and CSV.

>>> figures_page("A run", {}, "", {"Curves": figures([chart])})
"""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from nanolm import webpage
from nanolm.report.curves import Chart, draw_curves
from nanolm.report.svg import Drawing

STYLE_SHEET = webpage.beside(__file__, "page.css")
SCRIPT = webpage.beside(__file__, "figure.js")
DIGITS = 6  # of a number in a CSV file
FIGURE = """<figure><div class="plot" tabindex="0" role="group">{image}</div>
<figcaption><button>SVG</button><button>PNG</button><button>CSV</button>
<p class="read" aria-live="polite"></p></figcaption>
<script type="application/json">{data}</script></figure>
"""


def figures_page(title: str, facts: dict[str, str], sentence: str, sections: dict[str, str]) -> str:
    """A page that begins with its result in a sentence; empty sections are skipped."""
    body = f'<p class="result">{escape(sentence)}</p>\n'
    body += "\n".join(f"<h2>{name}</h2>\n{part}" for name, part in sections.items() if part)
    return webpage.page(title, facts, body, STYLE_SHEET, SCRIPT, images=True)


def figures(images: Sequence[Chart | Drawing]) -> str:
    """A figure for each drawing, and for each panel of a chart: a phone shows them one by one."""
    drawings: list[Drawing] = []
    for image in images:
        if isinstance(image, Drawing):
            drawings.append(image)
        else:
            drawings += (draw_curves(image, [panel]) for panel in image.panels)
    return f'<div class="figures">{"".join(map(figure, drawings))}</div>'


def figure(drawing: Drawing) -> str:
    marks = drawing.marks.items()
    series = [[name, [list(map(short, mark)) for mark in of_it]] for name, of_it in marks]
    data = {"columns": drawing.columns, "together": drawing.together, "series": series}
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return FIGURE.format(image=drawing.svg, data=text)


def short(value: Any) -> Any:
    """A number with as many digits as a CSV file needs; whole numbers stay exact."""
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() else float(f"{value:.{DIGITS}g}")
