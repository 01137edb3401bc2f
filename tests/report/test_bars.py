"""Bar charts: their contents, and that names are escaped."""

import itertools
import xml.etree.ElementTree as ElementTree

import pytest

from nanolm.report.bars import Bar, draw_bars
from nanolm.report.curves import Chart, Panel, Series

SVG = "{http://www.w3.org/2000/svg}"


def test_bars_are_as_long_as_their_values() -> None:
    bars = [Bar("one", 25.0, 0.0), Bar("<two> & " + 80 * "x", 50.0, 2.0), Bar("none", 0.0, 0.0)]
    tree = ElementTree.fromstring(
        draw_bars(bars, "a <title>", "{:.1f} %".format, "share (%)", 40.0).svg
    )
    rects = [rect for rect in tree.iter(f"{SVG}rect") if rect.get("class") == "bar"]
    drawn = [float(rect.get("width", 0)) for rect in rects]
    assert drawn[1] == pytest.approx(2 * drawn[0], abs=0.2) and drawn[0] > 90
    assert drawn[2] == 0
    words = [text.text or "" for text in tree.iter(f"{SVG}text")]
    assert {"25.0 %", "share (%)", "majority class"} <= set(words)
    assert any(word.startswith("<two> & x") and word.endswith("…") for word in words)
    assert len([line for line in tree.iter(f"{SVG}line") if line.get("class") == "spread"]) == 1


def test_a_power_is_a_straight_line_on_logarithmic_axes() -> None:
    line = Series("square", [(x, 0.01 * x * x) for x in (64, 128, 256, 4096)])
    panel = Panel("milliseconds", [line])
    tree = ElementTree.fromstring(Chart("t", [panel], "tokens", logarithmic=True).svg)
    paths = [each.get("d", "") for each in tree.iter(f"{SVG}path")]
    path = next(each for each in paths if each.count(",") == 4 and "h.01" not in each)
    points = [tuple(map(float, pair.split(","))) for pair in path[1:].split()]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(points)]
    assert max(slopes) - min(slopes) < 0.02
