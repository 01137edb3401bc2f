import math
import random
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanolm.errors import DataError
from nanolm.report.axes import linear_axis, value_axis
from nanolm.report.curves import Chart, Panel, Series, draw_curves, mean_series
from nanolm.report.run_data import read_metrics
from nanolm.report.svg import text_width

SVG = "{http://www.w3.org/2000/svg}"


def picture(*panels: Panel, title: str = "run") -> ElementTree.Element:
    """The image, after the checks that apply to all images."""
    text = Chart(title, panels).svg
    assert len(text) < 100_000
    root = ElementTree.fromstring(text)
    assert "nan" not in text and "inf" not in text
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    for path in paths(root, only_curves=True):
        for x, y in path:
            assert 0 <= x <= width and 0 <= y <= height
    return root


def paths(root: ElementTree.Element, only_curves: bool = False) -> list[list[tuple[float, float]]]:
    places = root.findall(f"{SVG}path") if only_curves else root.iter(f"{SVG}path")
    return [
        [(float(x), float(y)) for x, y in re.findall(r"([-\d.]+),([-\d.]+)", path.get("d", ""))]
        for path in places
    ]


def classes(root: ElementTree.Element) -> list[str]:
    return [path.get("class", "") for path in root.findall(f"{SVG}path")]


def words(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def noisy(count: int, noise: float = 0.2) -> list[tuple[float, float]]:
    generator = random.Random(1)
    return [(n, 1 + 2 * math.exp(-n / count * 5) + generator.gauss(0, noise)) for n in range(count)]


def test_two_panels() -> None:
    loss = Panel("loss", [Series("train", noisy(300)), Series("val", [(100, 2.0), (200, 1.5)])])
    accuracy = Panel("accuracy", [Series("val", [(100, 0.5), (200, 0.75)])], mark=(200, "best"))
    root = picture(loss, accuracy, title="my run")
    assert root.findtext(f"{SVG}title") == "my run"
    assert {"my run", "loss", "accuracy", "train", "val", "best", "step"} <= set(words(root))
    # Noise is faint behind its trend, few points get dots, a name keeps its color.
    assert classes(root) == ["c0 faint", "c0", "c1", "c1 dots", "c1", "c1 dots"]
    raw, trend = paths(root, only_curves=True)[:2]
    assert len(raw) == 300

    def roughness(line: list[tuple[float, float]]) -> float:
        return sum(abs(b - a) for (_, a), (_, b) in pairwise(line))

    assert roughness(trend) < roughness(raw) / 5
    assert root.get("width", "") > root.get("height", "")


def test_higher_is_higher_and_later_is_to_the_right() -> None:
    root = picture(Panel("loss", [Series("train", [(20, 3.0), (0, 1.0), (10, 2.0)])]))  # any order
    (x0, y0), (x1, y1), (x2, y2) = paths(root, only_curves=True)[0]
    assert x0 < x1 < x2 and y0 > y1 > y2
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)


def test_panels_are_in_two_columns() -> None:
    panels = [Panel(f"panel {n}", [Series("a", [(1, n), (2, n + 1)])]) for n in range(4)]
    groups = picture(*panels).findall(f"{SVG}g")
    tops = [re.findall(r"[\d.]+", group.get("transform", "")) for group in groups]
    assert len({left for left, _ in tops}) == 2 and len({top for _, top in tops}) == 2


def test_a_panel_alone_keeps_its_colors() -> None:
    loss = Panel("loss", [Series("train", [(1, 2)]), Series("val", [(1, 3)])])
    accuracy = Panel("accuracy", [Series("val", [(1, 0.5)])])
    alone = draw_curves(Chart("run", [loss, accuracy]), [accuracy])
    assert classes(ElementTree.fromstring(alone.svg)) == ["c1", "c1 dots"]
    assert alone.columns == ["series", "step", "accuracy"]
    assert [mark[2:] for mark in alone.marks["val"]] == [(1, 0.5)]


@pytest.mark.parametrize(
    ("values", "first", "broken"),
    [([0.2, 1.0], "0", False), ([4.4, 6.7], "4.0", True), ([-1.0, 3.0], "-1", False)],
)
def test_a_value_axis_begins_at_zero_or_is_broken(
    values: list[float], first: str, broken: bool
) -> None:
    axis = value_axis(values, 5)
    assert (axis.ticks[0][1], axis.broken) == (first, broken)
    text = Chart("run", [Panel("loss", [Series("a", list(enumerate(values)))])]).svg
    assert ('class="gap"' in text) == broken


def test_seeds_become_a_mean_and_a_band() -> None:
    curves = [Series("", [(1, 4.0), (2, 2.0)]), Series("", [(1, 6.0), (2, 2.0), (3, 9.0)])]
    both = mean_series("both", curves)
    assert both.finite == [(1, 5.0), (2, 2.0)]
    assert both.spread == {1: pytest.approx(2**0.5), 2: 0.0}
    root = picture(Panel("loss", [both, Series("one", [(1, 1), (2, 1)])], baseline=(8, "chance")))
    assert classes(root) == ["c0 band", "c0", "c0 dots", "c1", "c1 dots"]
    band, line = paths(root, only_curves=True)[:2]
    assert band[0][1] < line[0][1] < band[-1][1] and band[1] == band[2] == line[1]
    assert "chance" in words(root)
    assert mean_series("none", [Series("", []), curves[0]]).finite == []


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_many_points_are_thinned_and_keep_their_peaks(noise: float) -> None:
    points = noisy(50_000, noise)
    points[31_234] = (31_234, 9.0)
    line, *_ = paths(picture(Panel("loss", [Series("train", points)])), only_curves=True)
    assert 200 < len(line) <= 500
    peak = min(line, key=lambda point: point[1])
    assert peak[1] < min(y for x, y in line if x != peak[0]) - 50


def test_many_lines_stay_small() -> None:
    few = [Series(f"run {n}", noisy(25, n / 10)) for n in range(60)]
    assert len(set(classes(picture(Panel("loss", few))))) == 24  # twelve lines and their dots
    picture(
        *(Panel("loss", [Series(f"run {n}", noisy(2000)) for n in range(10)]) for _ in range(3))
    )


def test_a_smooth_line_is_not_faint() -> None:
    root = picture(Panel("rate", [Series("rate", noisy(300, noise=0))]))
    assert classes(root) == ["c0"]
    assert words(root).count("rate") == 1  # a line named like its panel needs no second label


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(5, 0.5)],
        [(0, 0)],
        [(0, 3), (1, 3)],
        [(1, 1), (1, 2), (1, 3)],
        [(1, math.nan), (2, None), (3, math.inf), (None, 4), (5, 1e300), (6, 10**400)],
        [(1, 1.0), (2, None), (3, 2.0)],
        [(1, "high"), (2, 1.0)],
        [(n, 5e-7 * n) for n in range(100)],
        [(1e12 * n, -1e12 * n) for n in range(100)],
        [(1, 1e8), (2, 1e8 + 1e-7)],
        [(1, 1e-310), (2, 2e-310)],
        [(1, -1e99), (2, 1e99)],
        [(7, 1.0)] * 100,
        [(n, math.sin(n) * 9e99) for n in range(100)],
    ],
)
def test_odd_points(points: list[tuple[float | None, float | None]]) -> None:
    root = picture(Panel("loss", [Series("a", points)]), Panel("none", []))
    assert words(root).count("no data yet") == 2 - any(classes(root))


def test_no_panel_and_odd_marks() -> None:
    assert "nothing" in words(picture(title="nothing"))
    line = Series("a", [(0, 1), (10, 2)])
    assert "late" in words(picture(Panel("loss", [line], mark=(40, "late"))))
    assert "never" not in words(picture(Panel("loss", [line], mark=(math.nan, "never"))))


def test_two_lines_of_one_name_are_both_drawn() -> None:
    root = picture(Panel("loss", [Series("a", [(1, 1), (2, 2)]), Series("a", [(1, 3), (2, 4)])]))
    assert len(paths(root, only_curves=True)) == 4


HOSTILE = "</text><script>alert(1)</script>&amp;\"'\x00\x1b\ud800\u202e]]>"


def test_text_is_escaped() -> None:
    root = picture(
        Panel(HOSTILE, [Series(HOSTILE + "2", [(1, 2), (2, 3)])], mark=(1, HOSTILE)), title=HOSTILE
    )
    allowed = ("svg", "title", "style", "rect", "g", "line", "path", "text")
    assert {element.tag for element in root.iter()} <= {SVG + name for name in allowed}
    assert sum(word.startswith("</text><script>") for word in words(root)) == 4
    assert all("\u202e" not in word for word in words(root))


def test_long_text_is_cut() -> None:
    root = picture(Panel("p" * 9999, [Series("長" * 9999, [(1, 2)])]), title="t" * 9999)
    assert all(len(word) < 150 for word in words(root))


numbers = st.floats(-1e99, 1e99) | st.floats(1e5, 1e5 + 1e-3) | st.integers(0, 10**7)


@given(st.lists(numbers, min_size=1, max_size=20), st.booleans())
def test_ticks_cover_the_data(values: Sequence[float], whole: bool) -> None:
    found = linear_axis(values, 5, whole)
    rounding = 1e-6 * (found.high - found.low)  # far below a pixel
    assert found.low - rounding <= min(values) and max(values) <= found.high + rounding
    ticks = [value for value, _ in found.ticks]
    texts = [text for _, text in found.ticks]
    assert 1 + whole <= len(ticks) <= 9 and len(set(texts)) == len(texts)
    assert found.low <= ticks[0] and ticks[-1] <= found.high
    if whole:
        assert (ticks[0], ticks[-1]) == (found.low, found.high)


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.02, 0.98], "0 0.2 0.4 0.6 0.8 1.0"),
        ([0.51, 0.93], "0.5 0.6 0.7 0.8 0.9 1.0"),
        ([10, 990], "0 200 400 600 800 1,000"),
        ([0, 50_000], "0 10k 20k 30k 40k 50k"),
        ([0, 2_500_000], "0 0.5M 1M 1.5M 2M 2.5M"),
        ([0, 5e-5], "0 1e-5 2e-5 3e-5 4e-5 5e-5"),
        ([-0.9, 1], "-1.0 -0.5 0 0.5 1.0"),
    ],
)
def test_ticks_are_round(values: list[float], texts: str) -> None:
    assert " ".join(text for _, text in linear_axis(values, 5).ticks) == texts


def test_steps_are_whole() -> None:
    found = linear_axis([1, 2, 3], 6, extend=False)
    assert [text for _, text in found.ticks] == ["1", "2", "3"]


def test_metrics_are_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": NaN}\n')
    rows = read_metrics(file)
    assert rows[0] == {"step": 1, "loss": 2.5} and len(rows) == 2
    picture(Panel("loss", [Series("train", [(row["step"], row["loss"]) for row in rows])]))
    for torn in ('{"step": 3, "lo', "[" * 100_000, "3", '{"step": "\xff'):
        file.write_bytes(b'{"step": 1}\n' + torn.encode("latin-1"))
        assert read_metrics(file) == [{"step": 1}]
    file.write_text("")
    assert read_metrics(file) == []
    file.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2"):
        read_metrics(file)


def test_the_name_of_an_axis_is_left_of_its_first_tick() -> None:
    line = Series("train", [(108, 3.0), (846, 1.0)])  # the axis begins at 100
    root = ElementTree.fromstring(Chart("run", [Panel("loss", [line])], steps_per_epoch=240).svg)
    shown = {each.text: float(each.get("x", 0)) for each in root.iter(f"{SVG}text")}
    assert shown["step"] <= shown["100"] - text_width("100", 11) / 2 - 5  # pixels


def test_epochs_stand_below_the_steps() -> None:
    line = Series("train", [(10, 3.0), (206, 1.0)])
    text = Chart("run", [Panel("loss", [line])], steps_per_epoch=206.5 / 8).svg
    root = ElementTree.fromstring(text)
    shown = {
        (each.text, each.get("y")): float(each.get("x", 0)) for each in root.iter(f"{SVG}text")
    }
    rows = {word: y for word, y in shown if word in ("step", "epoch")}
    assert float(rows["epoch"] or 0) > float(rows["step"] or 0)
    epochs = {word: x for (word, y), x in shown.items() if y == rows["epoch"] and word != "epoch"}
    assert list(epochs) == ["0", "2", "4", "6", "8"]  # the last, although it ends within step 207
    steps = {word: x for (word, y), x in shown.items() if y == rows["step"] and word != "step"}
    assert epochs["0"] == pytest.approx(steps["0"], abs=0.1)
    per_step = (steps["200"] - steps["0"]) / 200
    assert epochs["4"] == pytest.approx(steps["0"] + per_step * 4 * 206.5 / 8, abs=0.2)
    assert shown["epoch", rows["epoch"]] > 35  # its five letters end there
