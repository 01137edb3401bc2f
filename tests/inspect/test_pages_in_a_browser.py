"""The pages in a real browser, from disk: no errors, no requests, and everything works."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from hostile import MARKUP
from models import of_family

from nanolm.inspect.attribution import attribute
from nanolm.inspect.heads import describe_heads
from nanolm.inspect.inspection import Inspection, inspect_text
from nanolm.inspect.page import alignment_page, inspection_page, positions_page, word_page
from nanolm.inspect.vectors import occurrences, position_vectors
from nanolm.model.classifier import Classifier
from nanolm.model.config import ClassifierConfig
from nanolm.report.page import comparison_page, report_page
from nanolm.report.run_data import read_run
from nanolm.runs.folder import Run
from nanolm.text.tokenizer import train_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]
READY = "document.body.dataset.ready === 'yes'"
TEXT = "It was the best of times, it was the worst"
WIDTHS = (1200, 360)
ALIGNED = np.zeros((1, 2, 5, 3), np.float32)  # (layers, heads, target, source)
ALIGNED[0, 0, range(5), [0, 2, 1, 0, 1]] = 1
ALIGNED[0, 1, :, 2] = 1


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, trained: Path) -> dict[str, Path]:
    """One of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    tokenizer = train_tokenizer([], "byte")
    shape: dict[str, Any] = {"vocab_size": 258, "context": 64}
    model = of_family("modern", **shape)
    ids = tokenizer.encode_prompt(TEXT)
    seen = inspect_text(model, ids)
    heads = describe_heads(seen.attention, ids)
    kind, vectors = position_vectors(model)
    base = of_family("modern", **shape)
    config = ClassifierConfig(base=base.config, labels=("bad", "good"), window=64)
    classifier = Classifier(config, base).eval()
    what = attribute(classifier, ids)
    looks = Inspection(ids, what.attention, [])
    words = occurrences(model, tokenizer, "was", [TEXT])
    run = Run(trained)
    made = {
        "language model": inspection_page(tokenizer, seen, heads, {"model": "x"}),
        "classifier": inspection_page(
            tokenizer,
            looks,
            describe_heads(what.attention, ids),
            {"model": "x"},
            (1, 2),
            (what, config.labels),
        ),
        "alignment": alignment_page(ALIGNED, [*"abc"], [*"xyzw", MARKUP[0]], {"model": "x"}),
        "word": word_page(words, {}),
        "positions": positions_page(kind, vectors, {}),
        "report": report_page(read_run(run)),
        "comparison": comparison_page([run, run]),
    }
    for name, page in made.items():
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


@pytest.mark.parametrize("name", ["language model", "classifier", "alignment", "positions"])
def test_pages_with_a_script(name: str, browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages[name], READY)
    drawn = """[...document.querySelectorAll("canvas")].every(canvas => canvas.getContext("2d")
        .getImageData(0, 0, canvas.width, canvas.height).data.some(value => value > 0))"""
    assert browser.value(drawn)


@pytest.mark.parametrize("name", ["report", "comparison"])
def test_reports(name: str, browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages[name], READY)


@pytest.mark.parametrize("name", ["word"])
def test_pages_without_one(name: str, browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages[name], "document.readyState === 'complete'")
    assert browser.value("document.scripts.length") == 0


def opened(browser: Browser, page: Path, ready: str) -> None:
    """On a desktop and on a phone, in light and dark mode."""
    browser.complaints.clear()
    browser.requests.clear()
    for width in WIDTHS:
        for dark in (False, True):
            browser.look(width, dark)
            browser.open(page, ready)
            wide = browser.value("document.documentElement.scrollWidth")
            assert wide <= width, f"{page.name} is {wide} wide on a screen of {width}"
    browser.look(WIDTHS[0])
    assert browser.complaints == []
    assert set(browser.requests) == {page.as_uri()}


def test_hover_and_choice(browser: Browser, pages: dict[str, Path]) -> None:
    browser.look(1200)
    browser.open(pages["language model"], READY)
    text = 'document.getElementById("about").textContent'
    assert browser.value(text).startswith("Average of all heads. Selected token: t (42)")
    browser.point("#tokens button", 4)
    assert browser.value(text).startswith("Average of all heads. Selected token: a (5)")
    assert browser.value('document.querySelectorAll("#tokens button.on").length') == 1
    large = 'document.getElementById("large").toDataURL()'
    before = browser.value(large)
    browser.point('.grid button[data-layer="1"][data-head="2"]', click=True)
    assert browser.value(text).startswith("Head 2.3 ")
    assert browser.value(large) != before
    chosen = browser.value("""(() => { const on = document.querySelector(".grid button.on");
        return [on.dataset.layer, on.dataset.head]; })()""")
    assert chosen == ["1", "2"]


def test_what_a_head_looks_at_is_what_was_measured(
    browser: Browser, pages: dict[str, Path]
) -> None:
    """Read back from the page: the token that gets most of each head's attention, and how much."""
    tokenizer = train_tokenizer([], "byte")
    model = of_family("modern", vocab_size=258, context=64)
    ids = tokenizer.encode_prompt(TEXT)
    seen = inspect_text(model, ids)
    browser.look(1200)
    browser.open(pages["language model"], READY)
    browser.point("#tokens button", 20)
    for layer, weights in enumerate(seen.attention):
        for head, rows in enumerate(weights):
            place = f'.grid button[data-layer="{layer}"][data-head="{head}"] .looks'
            shown = browser.value(f"document.querySelector('{place}').textContent")
            share = rows[20].max()
            assert abs(int(shown.split()[-1].rstrip("%")) - 100 * share) <= 3


def test_alignment_under_the_pointer(browser: Browser, pages: dict[str, Path]) -> None:
    browser.look(1200)
    browser.open(pages["alignment"], READY)
    text = 'document.getElementById("about").textContent'
    browser.point("#tokens button", 1)
    assert browser.value(text) == "Average of all heads. Selected token: y (2)"
    darkness = '[...document.querySelectorAll("#source span")].map(s => s.style.cssText)'
    assert browser.value(darkness) == ["--w: 0;", "--w: 0;", "--w: 100;"]
    browser.point("#large")  # the middle: the third row, the second column
    assert browser.value(text) == "Average of all heads. Selected token: z (3), 50% to b"
    browser.point('.grid button[data-head="1"]', click=True)
    assert browser.value(text) == "Head 1.2. Selected token: z (3)"
    looks = browser.value('[...document.querySelectorAll(".looks")].map(s => s.textContent)')
    assert looks == ["b 50%", "b 50%", "b 100%", "c 100%"]


def test_the_first_head_is_the_one_asked_for(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["classifier"], READY)
    assert browser.value('document.getElementById("about").textContent').startswith("Head 2.3 ")


def test_hostile_text_is_inert(browser: Browser, tmp_path: Path) -> None:
    browser.complaints.clear()
    browser.requests.clear()
    model = of_family("modern", vocab_size=258, context=512)
    tokenizer = train_tokenizer([], "byte")
    page = tmp_path / "hostile.html"
    for text in MARKUP:
        ids = tokenizer.encode_prompt(text)[:200]
        seen = inspect_text(model, ids)
        heads = describe_heads(seen.attention, ids)
        page.write_text(inspection_page(tokenizer, seen, heads, {text: text}))
        browser.open(page, READY)
        assert browser.value("document.scripts.length") == 2
        assert browser.value('document.querySelectorAll("img, iframe, object, svg, a").length') == 0
    assert browser.complaints == []
    assert set(browser.requests) == {page.as_uri()}
