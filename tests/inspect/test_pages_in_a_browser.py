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
from nanolm.inspect.page import (
    alignment_page,
    inspection_page,
    neighbours_page,
    positions_page,
    word_page,
)
from nanolm.inspect.vectors import occurrences, position_vectors, similarities
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
        "neighbours": neighbours_page([*"abc"], np.eye(3, 4, dtype=np.float32), [0.5, 0.4], {}),
        "positions": positions_page(kind, vectors, {}),
        "report": report_page(read_run(run)),
        "comparison": comparison_page([run, run]),
    }
    for name, page in made.items():
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


@pytest.mark.parametrize(
    "name", ["language model", "classifier", "alignment", "positions", "word", "neighbours"]
)
def test_pages_with_a_script(name: str, browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages[name], READY)
    drawn = """[...document.querySelectorAll("canvas:not(.empty *, [data-value='0'])")]
        .every(canvas => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height)
            .data.some(value => value > 0))"""
    assert browser.value(drawn)


@pytest.mark.parametrize("name", ["report", "comparison"])
def test_reports(name: str, browser: Browser, pages: dict[str, Path]) -> None:
    opened(browser, pages[name], READY)


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


def press(browser: Browser, keys: str) -> None:
    for key in keys.split():
        browser.tell("Input.dispatchKeyEvent", type="keyDown", key=f"Arrow{key}")


def test_hover_and_choice(browser: Browser, pages: dict[str, Path]) -> None:
    browser.look(1200)
    browser.open(pages["language model"], READY)
    text = 'document.getElementById("about").textContent'
    assert browser.value(text).startswith("t (42) attends to ")
    browser.point("#tokens button", 4)
    assert browser.value(text).startswith("a (5) attends to ")
    assert browser.value('document.querySelectorAll("#tokens [aria-pressed=true]").length') == 1
    assert browser.value("document.querySelectorAll(\"#tokens [tabindex='0']\").length") == 1
    large, head = (f'document.getElementById("{id}")' for id in ("large", "head"))
    before = browser.value(f"{large}.toDataURL()")
    browser.point('.grid button[data-layer="1"][data-head="2"]', click=True)
    assert browser.value(f"{head}.selectedOptions[0].text").startswith("Head 2.3 ")
    assert browser.value(f"{large}.toDataURL()") != before
    press(browser, "Right")
    chosen = browser.value("""(() => {
        const on = document.querySelector(".grid [aria-pressed=true]");
        return [on.dataset.layer, on.dataset.head]; })()""")
    assert chosen == ["1", "3"]


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
            assert abs(int(shown.split()[-1].rstrip("%")) - 100 * share) <= 1


def test_two_heads_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    """The same cell is marked in both maps, with the share of each head."""
    weights = np.tril(np.random.default_rng(1).random((2, 2, 5, 5), np.float32))
    weights /= weights.sum(axis=-1, keepdims=True)
    tokenizer = train_tokenizer([], "byte")
    seen = Inspection(tokenizer.encode("abcde"), weights, [])
    page = tmp_path / "heads.html"
    heads = describe_heads(weights, seen.ids)
    page.write_text(inspection_page(tokenizer, seen, heads, {}, (0, 0)), encoding="utf-8")
    browser.look(1200)
    browser.open(page, READY)
    beside = 'document.querySelectorAll(".panel select")[1]'
    browser.value(f"{beside}.value = 6; {beside}.dispatchEvent(new Event('change'))")  # head 2.2
    browser.point("#tokens button", 4)
    browser.value('document.querySelector(".matrix").focus()')
    press(browser, "Up Left Left Left Left Left Right")
    about = '[...document.querySelectorAll(".panel > p")].map(p => p.textContent)'
    badges = '[...document.querySelectorAll(".badge")].map(b => b.textContent)'
    shares = browser.value(badges)
    expected = [weights[0, 0, 3, 1], weights[1, 1, 3, 1]]
    assert [int(share.rstrip("%")) for share in shares] == pytest.approx(
        [100 * share for share in expected], abs=1
    )
    assert browser.value(about) == [f"d (4) attends to b (2): {share}" for share in shares]
    on = browser.value('[...document.querySelectorAll(".matrix .on")].map(s => s.textContent)')
    assert on == ["b", "d"] * 2
    press(browser, "Up Up Right")
    assert browser.value(badges) == ["masked", "masked"]
    browser.value(f"{beside}.value = ''; {beside}.dispatchEvent(new Event('change'))")
    visible = "getComputedStyle(document.getElementById('beside').closest('.scroll')).display"
    assert browser.value(visible) == "none"


def test_alignment_under_the_pointer(browser: Browser, pages: dict[str, Path]) -> None:
    browser.look(1200)
    browser.open(pages["alignment"], READY)
    text = 'document.getElementById("about").textContent'
    browser.point("#tokens button", 1)
    assert browser.value(text) == "y (2) attends to c (3): 100%"
    darkness = '[...document.querySelectorAll("#source span")].map(s => s.style.cssText)'
    assert browser.value(darkness) == ["--w: 0;", "--w: 0;", "--w: 100;"]
    browser.point("#large")  # the middle: the third row, the second column
    assert browser.value(text) == "z (3) attends to b (2): 50%"
    browser.point('.grid button[data-head="1"]', click=True)
    assert browser.value(text) == "z (3) attends to b (2): 0%"
    looks = browser.value('[...document.querySelectorAll(".looks")].map(s => s.textContent)')
    assert looks == ["b 50%", "b 50%", "b 100%", "c 100%"]


def test_a_layer_of_the_map(browser: Browser, pages: dict[str, Path]) -> None:
    """Distances in the picture are those of the vectors, and all layers have the same scale."""
    tokenizer = train_tokenizer([], "byte")
    model = of_family("modern", vocab_size=258, context=64)
    cosines = similarities(occurrences(model, tokenizer, "was", [TEXT]).vectors)[:, 0, 1]
    expected = np.sqrt(np.maximum(2 - 2 * cosines, 0))
    browser.look(1200)
    browser.open(pages["word"], READY)
    distances = []
    for layer in range(3):
        slider = 'document.getElementById("layer")'
        browser.value(f"{slider}.value = {layer}; {slider}.dispatchEvent(new Event('input'))")
        (x, y), (other_x, other_y) = browser.value(
            '[...document.querySelectorAll("#map circle")].map(c => '
            "[c.cx.baseVal.value, c.cy.baseVal.value])"
        )
        distances.append(np.hypot(x - other_x, y - other_y))
        hidden = browser.value('[...document.querySelectorAll("section.layer")].map(s => s.hidden)')
        assert hidden == [number != layer for number in range(3)]
    assert distances[0] < 1 < distances[2]
    assert distances[1] / distances[2] == pytest.approx(expected[1] / expected[2], rel=0.05)


def test_positions_have_axes(browser: Browser, pages: dict[str, Path]) -> None:
    _, vectors = position_vectors(of_family("modern", vocab_size=258, context=64))
    browser.look(1200)
    browser.open(pages["positions"], READY)
    browser.value('document.querySelector(".matrix").focus()')
    press(browser, "Down Down Right")
    about = browser.value('document.querySelector(".panel > p").textContent')
    place, value = about.split(": ")
    assert place == "position 3, dimension 2"
    assert float(value.replace("\u2212", "-")) == pytest.approx(vectors[2, 1], abs=0.02)
    ticks = browser.value('[...document.querySelectorAll(".rows span")].map(s => s.textContent)')
    assert ticks[:3] == ["3", "5", "9"]  # every fourth, and the selected one


def test_the_first_head_is_the_one_asked_for(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["classifier"], READY)
    head = 'document.getElementById("head").selectedOptions[0].text'
    assert browser.value(head).startswith("Head 2.3 ")


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
