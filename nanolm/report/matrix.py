"""A confusion matrix as one SVG image, each row colored by its shares.

>>> Path("matrix.svg").write_text(draw_matrix(["bad", "good"], [[45, 5], [2, 48]], "films").svg)
"""

from collections.abc import Sequence

from nanolm.report import svg
from nanolm.report.svg import Drawing, Mark

CELL, MAX_NAME_WIDTH, TOP, NARROWEST = 66, 150, 82, 440  # pixels
MOST_WHOLE = 20  # labels; with more, cells without texts are left out, which are most of them
DARKEST = 0.5  # opacity; text on it is still easy to read
KEY = "rows: true label, columns: predicted label, shade: share of the row"


def draw_matrix(labels: Sequence[str], counts: Sequence[Sequence[int]], title: str) -> Drawing:
    """Counts and shares of each row; mistakes have their own color."""
    left = min(MAX_NAME_WIDTH, max(svg.text_width(label, 12) for label in labels)) + 26
    parts, marks = [svg.text(16, 50, KEY, "tick")], dict[str, list[Mark]]()
    for row, (label, own) in enumerate(zip(labels, counts, strict=True)):
        y, x = TOP + CELL * (row + 0.5), left + CELL * (row + 0.5)  # of the cell of this label
        parts.append(svg.text(left - 10, y + 4, svg.shorten(label, 12, MAX_NAME_WIDTH), "", "end"))
        parts.append(svg.text(x, TOP - 8, svg.shorten(label, 11, CELL - 4), "tick", "middle"))
        for column, count in enumerate(own):
            if not count and row != column and len(labels) > MOST_WHOLE:
                continue
            share, x = count / max(1, sum(own)), left + CELL * (column + 0.5)
            mark = (x, y, labels[column], count, f"{share:.1%}")
            marks.setdefault(label, []).append(mark)
            kind, place = "right" if row == column else "wrong", x - CELL / 2 + 1
            shape = f'x="{place:.1f}" y="{y - CELL / 2 + 1}" width="{CELL - 2}" height="{CELL - 2}"'
            parts.append(f'<rect class="{kind}" {shape} fill-opacity="{DARKEST * share:.2f}"/>')
            parts.append(svg.text(x, y - 2, f"{count:,}", "", "middle"))
            parts.append(svg.text(x, y + 14, f"{share:.0%}", "", "middle"))
    side = CELL * len(labels)
    image = svg.document(round(max(NARROWEST, left + side + 16)), TOP + side + 12, title, 16, parts)
    return Drawing(image, ["true", "predicted", "count", "share of row"], marks)
