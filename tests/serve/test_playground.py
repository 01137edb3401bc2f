"""The page in a real browser: type, stream, stop, branch, switch, classify."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from browser import CHROMIUM, Browser
from conftest import Cli
from servers import Served, Start

from nanolm.generation.sampling_params import DECLARATIONS, SamplingParams

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(running: Browser) -> Browser:
    running.fresh_page()
    return running


def visit(browser: Browser, server: Served, rest: str = "/") -> None:
    browser.tell("Page.navigate", url=server.url + rest)
    browser.wait("document.body && document.body.dataset.ready === 'yes'")


def put(browser: Browser, selector: str, value: object) -> None:
    """As if typed or selected."""
    browser.value(
        f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
        f"e.value = {json.dumps(str(value))};"
        "for (const kind of ['input', 'change']) e.dispatchEvent(new Event(kind)); })()"
    )


def box(name: str) -> str:
    """The number input of a parameter."""
    return f"#params [data-name={name}] input[type=number]"


def press(browser: Browser, key: str, modifiers: int = 0) -> None:
    code = {"Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowDown": 40}[key]
    text = {"text": "\r"} if key == "Enter" else {}
    for kind in ("keyDown", "keyUp"):
        given: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        browser.tell("Input.dispatchKeyEvent", type=kind, **given, **text)


IDLE = "document.getElementById('stop').disabled"
CTRL = 2


def text_of(browser: Browser, number: int = 0) -> str:
    """The text of a card, without the newline marks."""
    found = browser.value(
        f"(() => {{ const body = document.querySelectorAll('.body')[{number}].cloneNode(true);"
        "for (const mark of body.querySelectorAll('i')) mark.remove(); return body.textContent;})()"
    )
    assert isinstance(found, str)
    return found


def fine(browser: Browser, server: Served) -> None:
    """No error in the console, and no request to other servers."""
    assert browser.complaints == []
    assert all(url.startswith((server.url, "data:", "about:")) for url in browser.requests)
    assert browser.value("document.getElementById('problem').hidden") is True


def test_type_and_it_writes_what_sample_writes(browser: Browser, served: Served, cli: Cli) -> None:
    expected = cli(
        "sample", served.folder / "writer", "--prompt", "the cat", "--greedy", "--tokens", 50,
        "--json",
    )  # fmt: skip
    visit(browser, served)
    put(browser, "#prompt", "the cat")
    put(browser, box("temperature"), 0)
    put(browser, box("max_tokens"), 50)
    browser.value("document.getElementById('prompt').focus()")
    press(browser, "Enter", CTRL)
    written = json.loads(expected.stdout)
    count = len(written["tokens"])
    browser.wait(f"document.querySelectorAll('.token').length === {count} && {IDLE}")
    assert text_of(browser) == "the cat" + written["text"]
    assert "tokens/s" in browser.value("document.getElementById('status').textContent")
    spans = "document.querySelectorAll('#tokens span').length"
    browser.wait(f"document.getElementById('count').textContent === `${{{spans}}} tokens`")
    assert browser.value("document.querySelector('#tokens small').textContent").isdecimal()
    fine(browser, served)


def test_every_declared_parameter_has_a_control(browser: Browser, served: Served) -> None:
    """Parameters that are off are not sent."""
    visit(browser, served)
    rows = "document.querySelectorAll('#params .param')"
    names = browser.value(f"[...{rows}].map(row => row.dataset.name)")
    declared = [name for name, about in DECLARATIONS.items() if about.slider]
    assert set(names) == {"max_tokens" if name == "tokens" else name for name in declared} | {
        "n", "seed", "stop", "ban",
    }  # fmt: skip
    sent = browser.value("settings()")
    off = [name for name in declared if getattr(SamplingParams, name) is None]
    assert "top_k" in off
    assert not set(off) & set(sent)
    assert (sent["max_tokens"], sent["temperature"]) == (200, 0.8)
    for name in off:
        put(browser, box(name), 1 if name == "top_k" else 0.25)
    sent = browser.value("settings()")
    assert {name: sent[name] for name in off} == {
        name: 1 if name == "top_k" else 0.25 for name in off
    }
    browser.point("#write", click=True)
    browser.wait(f"document.querySelectorAll('.token').length > 0 && {IDLE}")
    fine(browser, served)


def test_it_streams_and_stops(browser: Browser, start: Start) -> None:
    server = start("--max-tokens", 1_000_000, names=("writer",))
    visit(browser, server)
    for name in ("max_tokens", "min_tokens"):
        put(browser, box(name), 900_000)
    browser.point("#write", click=True)
    browser.wait("document.querySelectorAll('.token').length > 100")
    assert browser.value(IDLE) is False
    browser.point("#stop", click=True)
    browser.wait(IDLE)
    count = browser.value("document.querySelectorAll('.token').length")
    header = browser.value("document.querySelector('.text header').textContent")
    assert re.search(r", stopped, seed \d+", header)
    put(browser, "#param-seed", "abc")
    browser.point("#write", click=True)
    browser.wait("!document.getElementById('problem').hidden")
    problem = browser.value("document.getElementById('problem').textContent")
    assert "seed abc: use a whole number" in problem
    put(browser, "#param-seed", "")
    browser.point("#write", click=True)  # again, with the keyboard
    browser.wait(f"!({IDLE}) && document.querySelectorAll('.token').length > 20")
    press(browser, "Escape")
    browser.wait(IDLE)
    assert count > 100
    fine(browser, server)


def test_another_token_leads_elsewhere(browser: Browser, served: Served) -> None:
    visit(browser, served)
    put(browser, "#prompt", "the dog")
    put(browser, box("n"), 2)
    for name in ("max_tokens", "min_tokens"):
        put(browser, box(name), 20)
    browser.point("#write", click=True)
    browser.wait(f"document.querySelectorAll('.text').length === 2 && {IDLE}")
    browser.wait("document.querySelectorAll('.token').length > 20")
    before = text_of(browser)
    browser.point(".token", 4)
    browser.wait("document.querySelectorAll('.other').length === 6")
    about = browser.value("document.querySelector('#others p').textContent")
    assert "token " in about and "%" in about
    other = browser.value("document.querySelectorAll('.other:not(.came)')[1].title")
    browser.point(".other:not(.came)", 1, click=True)
    browser.wait(f"document.querySelectorAll('.text').length === 3 && {IDLE}")
    browser.wait("document.querySelectorAll('.text')[1].querySelectorAll('.token').length > 5")
    assert text_of(browser) == before
    branch = text_of(browser, 1)
    kept = browser.value(
        "[...document.querySelectorAll('.text')[0].querySelectorAll('.token')].slice(0, 4)"
        ".map(token => token.textContent.replace('⏎', '')).join('')"
    )
    assert branch.startswith("the dog" + kept)
    assert branch != before
    assert "continue from here" in other
    # With the keyboard: along the tokens, into the alternatives, and back.
    browser.value("document.querySelector('.token').focus()")
    press(browser, "ArrowRight")
    press(browser, "ArrowDown")
    assert browser.value("document.activeElement.className").startswith("other")
    press(browser, "Escape")
    assert browser.value("document.activeElement.className").startswith("token")
    fine(browser, served)


def test_other_models_classify_and_are_looked_into(browser: Browser, served: Served) -> None:
    visit(browser, served)
    options = "[...document.querySelectorAll('#model option')].map(option => option.value)"
    assert browser.value(options) == ["writer", "other", "labels"]
    put(browser, "#model", "other")
    assert "language model" in browser.value("document.getElementById('facts').textContent")
    browser.point("#write", click=True)
    browser.wait(f"document.querySelectorAll('.token').length > 0 && {IDLE}")
    browser.point(".text header button", click=True)
    browser.wait("document.getElementById('look').src.includes('/look/')")
    assert browser.value("document.getElementById('views').hidden") is True  # no attention
    browser.point("#close", click=True)
    assert browser.value("document.activeElement.textContent") == "Inspect"
    put(browser, "#model", "labels")
    browser.wait("document.querySelectorAll('.label').length === 2")
    outputs = "[...document.querySelectorAll('.label output')].map(o => parseFloat(o.textContent))"
    first = browser.value(outputs)
    put(browser, "#input", "a tree and the dog that ran after a cat")
    browser.wait(f"JSON.stringify({outputs}) !== {json.dumps(json.dumps(first))!r}")
    assert sum(browser.value(outputs)) == pytest.approx(100, abs=0.2)
    browser.point("#why", click=True)
    browser.wait("!document.getElementById('inside').hidden")
    assert browser.value("document.getElementById('views').hidden") is True
    fine(browser, served)


def test_attention_and_every_number_of_a_text(browser: Browser, served: Served) -> None:
    visit(browser, served)
    browser.point("#write", click=True)
    browser.wait(f"document.querySelectorAll('.token').length > 0 && {IDLE}")
    browser.point(".text header button", click=True)
    browser.wait("document.getElementById('look').src.includes('/look/')")
    first = browser.value("document.getElementById('look').src")
    browser.point("#walk", click=True)
    browser.wait(f"document.getElementById('look').src !== {json.dumps(first)}")
    pressed = "[...document.querySelectorAll('#views [aria-pressed=true]')].map(b => b.id)"
    assert browser.value(pressed) == ["walk"]
    fine(browser, served)


def test_the_key_comes_with_the_address(browser: Browser, start: Start) -> None:
    server = start("--key", "a-long-secret", names=("labels",))
    visit(browser, server, "/#key=a-long-secret")
    assert browser.value("location.href") == f"{server.url}/"  # the key is removed from the URL
    browser.wait("document.querySelectorAll('.label').length === 2")
    fine(browser, server)


def test_what_is_wrong_is_shown(browser: Browser, served: Served) -> None:
    visit(browser, served)
    put(browser, box("max_tokens"), 10**7)
    browser.point("#write", click=True)
    browser.wait("!document.getElementById('problem').hidden")
    assert "max_tokens must be" in browser.value("document.getElementById('problem').textContent")
    assert browser.value(IDLE) is True


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_sticks_out(browser: Browser, served: Served, width: int, dark: bool) -> None:
    browser.look(width, dark)
    visit(browser, served)
    put(browser, "#prompt", "the cat " * 30)
    browser.point("#write", click=True)
    browser.wait(f"document.querySelectorAll('.token').length > 0 && {IDLE}")
    for model in ("writer", "labels"):
        put(browser, "#model", model)
        assert browser.value("document.documentElement.scrollWidth <= innerWidth") is True
    fine(browser, served)
