"""Figures in a real browser, from disk: read-outs by pointer and keyboard, and downloads."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browser import CHROMIUM, Browser

from nanolm.report.curves import Chart, Panel, Series
from nanolm.report.figure import figures, figures_page
from nanolm.report.matrix import draw_matrix

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]
NAME = '<b>"a", b</b>'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Browser:
    """Two curves, of which one has a spread, and a confusion matrix."""
    train = Series("train", [(step, 5 - step / 4) for step in range(1, 9)])
    val = Series(NAME, [(4, 4.5), (8, 3.25)], {4: 0.5, 8: 0.125})
    chart = Chart("run", [Panel("loss (nats per token)", [train, val])])
    body = figures([chart, draw_matrix(["bad", "good"], [[3, 1], [0, 4]], "films")])
    file = tmp_path / "page.html"
    file.write_text(figures_page("A run", {}, "Good.", {"Curves": body}), encoding="utf-8")
    browser.fresh_page()
    browser.look(1200)
    browser.open(file, "document.body.dataset.ready === 'yes'")
    where = {"browserContextId": browser.context, "downloadPath": str(tmp_path / "downloads")}
    browser.tell("Browser.setDownloadBehavior", behavior="allow", **where)
    return browser


def read_out(page: Browser) -> list[str]:
    return [text.strip() for text in page.value('all(".read")')]


def test_values_by_pointer_and_keyboard(page: Browser) -> None:
    page.value("all = name => [...document.querySelectorAll(name)].map(e => e.textContent)")
    page.point(".plot")  # the middle of the first figure
    with_spread = f"step 4; train 4; {NAME} 4.5 standard deviation 0.5"
    assert read_out(page)[0].replace("  ", " ") == with_spread
    page.point("h1")
    assert read_out(page) == ["", ""]
    for key, number in (("Tab", 9), ("ArrowRight", 39), ("ArrowRight", 39)):
        for kind in ("keyDown", "keyUp"):
            page.tell("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=number)
    assert read_out(page)[0].replace("  ", " ") == "step 2; train 4.5"
    touch = page.value(
        "(() => { const r = document.querySelectorAll('rect.wrong')[0].getBoundingClientRect();"
        "return {x: r.x + 9, y: r.y + 9}; })()"
    )
    page.tell("Input.dispatchTouchEvent", type="touchStart", touchPoints=[touch])
    page.tell("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    assert read_out(page)[1] == "true bad; predicted good; count 1; share of row 25.0%"
    assert page.complaints == [] and len(page.requests) == 1


def test_downloads(page: Browser, tmp_path: Path) -> None:
    page.point(".plot")  # the marker of the read-out is not part of the image
    for number in range(3):
        page.point("button", number, click=True)
    stem = tmp_path / "downloads/run-loss-nats-per-token"
    files = [stem.with_suffix(suffix) for suffix in (".svg", ".png", ".csv")]
    for _ in range(100):
        if all(file.is_file() and file.stat().st_size for file in files):
            break
        time.sleep(0.05)
    image = ElementTree.fromstring(files[0].read_text(encoding="utf-8"))
    kinds = [element.get("class") for element in image.iter()]
    assert "c1 band" in kinds and "cursor" not in kinds
    assert "prefers-color-scheme" not in files[0].read_text(encoding="utf-8")
    width, height = (int(3 * float(image.get(side, 0))) for side in ("width", "height"))
    head = files[1].read_bytes()[:24]
    assert head[1:4] == b"PNG" and head[16:] == width.to_bytes(4) + height.to_bytes(4)
    header, *rows = files[2].read_text(encoding="utf-8").splitlines()
    assert header == "series,step,loss (nats per token),standard deviation"
    assert rows[0] == "train,1,4.75" and rows[8] == '"<b>""a"", b</b>",4,4.5,0.5'
    assert len(rows) == 10
    assert page.complaints == [], json.dumps(page.complaints)
