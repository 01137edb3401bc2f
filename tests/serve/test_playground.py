"""The page in a real browser: type, stream, stop, branch, switch, classify."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from browser import CHROMIUM, Browser
from conftest import Cli
from servers import Served, Start

from nanolm.generation.sampling_params import DECLARATIONS, SamplingParams
from nanolm.serve.models import own_prompts

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
    code = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowDown": 40}[key]
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
    put(browser, "#input", "a tree")
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
    put(browser, "#input", "a tree")
    browser.wait("document.querySelectorAll('.label').length === 2")
    fine(browser, server)


def test_what_is_wrong_is_shown(browser: Browser, served: Served) -> None:
    visit(browser, served)
    put(browser, box("max_tokens"), 10**7)
    browser.point("#write", click=True)
    browser.wait("!document.getElementById('problem').hidden")
    assert "max_tokens must be" in browser.value("document.getElementById('problem').textContent")
    assert browser.value(IDLE) is True


def generate(browser: Browser, prompt: str = "the dog", tokens: int = 20, **params: object) -> None:
    put(browser, "#prompt", prompt)
    put(browser, "#param-seed", 1)
    for name, value in {"max_tokens": tokens, "min_tokens": tokens, **params}.items():
        put(browser, box(name), value)
    browser.point("#write", click=True)
    browser.wait(f"document.querySelectorAll('.token').length >= {tokens} && {IDLE}")


def texts(browser: Browser) -> list[str]:
    return [
        text_of(browser, n)
        for n in range(browser.value("document.querySelectorAll('.body').length"))
    ]


CHOSEN = "document.getElementById('others').hidden ? '' : others.place"


def test_a_tap_shows_alternatives_while_a_mouse_is_parked(browser: Browser, served: Served) -> None:
    """After a tap, the browser reports the mouse where it is parked, as if it had moved there."""
    visit(browser, served)
    generate(browser)
    for parked, place in (("#count", 9), (".token", 12)):
        browser.point(parked)
        spot = f"document.querySelectorAll('.token')[{place}].getBoundingClientRect()"
        x, y = browser.value(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({spot})")
        browser.tell("Emulation.setTouchEmulationEnabled", enabled=True)
        touch = {"touchPoints": [{"x": x, "y": y}]}
        browser.tell("Input.dispatchTouchEvent", type="touchStart", **touch)
        browser.tell("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        browser.wait(f"({CHOSEN}) === {place}")
        time.sleep(0.4)  # more than it takes to vanish
        assert browser.value(CHOSEN) == place
        browser.tell("Emulation.setTouchEmulationEnabled", enabled=False)
        browser.point("#status", click=True)
        assert browser.value(CHOSEN) == ""


def test_bars_follow_the_parameters(browser: Browser, served: Served) -> None:
    visit(browser, served)
    generate(browser)
    browser.point(".token", 5, click=True)
    shares = "[...document.querySelectorAll('.other')].map(row => parseFloat("
    shares += "row.style.getPropertyValue('--{}')))"
    browser.wait(f"{shares.format('now')}.every(share => share >= 0)")
    model, before = (browser.value(shares.format(name)) for name in ("share", "now"))
    assert before[0] > model[0]  # at a temperature of 0.8
    put(browser, box("top_k"), 2)  # the list stays open
    browser.wait(f"{shares.format('now')}.filter(share => share > 0).length === 2")
    sharper = [share ** (1 / 0.8) for share in model[:2]]
    expected = [100 * share / sum(sharper) for share in sharper]
    assert browser.value(shares.format("now"))[:2] == pytest.approx(expected, abs=0.01)
    assert "Sampled from 2 tokens" in browser.value("document.getElementById('others').textContent")
    assert browser.value(shares.format("share")) == model
    fine(browser, served)


def test_nothing_is_lost_by_reloading_or_switching(browser: Browser, start: Start) -> None:
    server = start("--key", "a-long-secret")
    visit(
        browser, server, "/#key=a-long-secret&prompt=a+%3Cb%3E+%26+tree&temperature=1.5&stop=%5Cn"
    )
    assert browser.value("document.getElementById('prompt').value") == "a <b> & tree"
    assert browser.value("settings().temperature") == 1.5
    generate(browser, "the dog ran & ran", n=2)
    generate(browser, "the cat", n=1)
    browser.point(".token", 3, click=True)
    browser.point(".other:not(.came)", 0, click=True)
    browser.wait(f"document.querySelectorAll('.text').length === 2 && {IDLE}")
    marks = "[...document.querySelectorAll('.fork')].map(token => token.getAttribute('aria-label'))"
    leaves, branched = browser.value(marks)
    assert leaves.endswith("%, a branch leaves here") and branched.endswith("%, branched here")
    written = texts(browser)
    put(browser, "#model", "labels")
    put(browser, "#input", "a tree")
    put(browser, "#model", "writer")
    assert texts(browser) == written
    browser.wait("location.hash.includes('input=a+tree')")
    address = browser.value("location.href")
    assert "prompt=the+cat" in address and "temperature=1.5" in address and "key" not in address
    browser.value("document.body.dataset.ready = 'no'; location.reload()")
    browser.wait("document.body && document.body.dataset.ready === 'yes'")
    assert texts(browser) == written
    assert browser.value(marks) == [leaves, branched]
    assert browser.value("document.getElementById('input').value") == "a tree"
    assert browser.value("[settings().temperature, settings().stop]") == [1.5, "\n"]
    assert browser.value("location.href") == address
    browser.value("document.getElementById('visits').open = true")
    browser.point("#history button", 1, click=True)
    browser.wait("document.getElementById('prompt').value === 'the dog ran & ran'")
    assert browser.value("document.querySelectorAll('.text').length") == 2
    seeds = "[document.getElementById('param-seed').value, "
    seeds += "document.querySelector('.text header').textContent.match(/seed (\\d+)/)[1]]"
    assert len(set(browser.value(seeds))) == 1
    fine(browser, server)


def test_two_models_get_the_same_prompt_and_seed(browser: Browser, served: Served) -> None:
    visit(browser, served, "/#rival=other")
    generate(browser, "the cat", 10, n=2)
    browser.wait(f"document.querySelectorAll('.token').length >= 40 && {IDLE}")
    names = browser.value(
        "[...document.querySelectorAll('.column h2')].map(name => name.textContent)"
    )
    assert names == ["writer", "other"]
    headers = browser.value(
        "[...document.querySelectorAll('.text header')].map(h => h.textContent)"
    )
    assert len({re.search(r"seed (\d+)", header)[1] for header in headers}) == 1  # type: ignore[index]
    boxes = "[...document.querySelectorAll('.column')].map(c => c.getBoundingClientRect().left)"
    left, right = browser.value(boxes)
    assert left < right
    fine(browser, served)


def test_a_request_as_code_gives_the_same_text(browser: Browser, served: Served) -> None:
    visit(browser, served)
    generate(browser, 'the cat\'s "mat"\n', 12, n=2)
    browser.point(".text:last-child header button", 2, click=True)
    expected = text_of(browser, 1).removeprefix('the cat\'s "mat"\n')
    python, curl = (
        browser.value(f"document.getElementById('{id}').textContent") for id in ("python", "curl")
    )
    run: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
    assert subprocess.run([sys.executable, "-c", python], **run).stdout == expected + "\n"
    if shutil.which("curl"):
        answer = json.loads(subprocess.run(["sh", "-c", curl], **run).stdout)
        assert answer["choices"][1]["text"] == expected
    fine(browser, served)


def test_the_drawer_follows_the_chosen_text(browser: Browser, served: Served) -> None:
    browser.look(1440)
    visit(browser, served)
    generate(browser, "the cat", 60, n=2)
    look = "document.getElementById('look').src"
    browser.point(".text header button", click=True)
    browser.wait(f"{look}.includes('/look/')")
    first = browser.value(look)
    page = requests.get(first, timeout=30).text
    assert re.search(r"truncated: the last 32 of \d\d", page)
    sides = "['.text', '#inside'].map(each => document.querySelector(each).getBoundingClientRect())"
    assert browser.value(f"(([text, inside]) => text.right <= inside.left)({sides})") is True
    browser.point(".text:last-child .body b", click=True)
    browser.wait(f"{look} !== {json.dumps(first)}")
    fine(browser, served)


def test_a_prompt_beyond_the_context_says_so(browser: Browser, served: Served) -> None:
    visit(browser, served)
    put(browser, "#prompt", "the cat sat on the mat. " * 8)
    note = "document.getElementById('beyond').textContent"
    browser.wait(note)
    count = browser.value("tokens.children.length")
    unseen = browser.value("document.querySelectorAll('.unseen').length")
    assert 0 < count - unseen <= 32
    assert f"writer sees only the last {count - unseen} of {count} tokens" in browser.value(note)
    put(browser, "#prompt", "the cat")
    browser.wait(f"{note} === ''")


def test_no_text_has_no_label(browser: Browser, served: Served) -> None:
    visit(browser, served, "/#model=labels")
    assert browser.value("document.querySelectorAll('.label').length") == 0
    for text, count in (("a tree", 2), (" ", 0)):
        put(browser, "#input", text)
        browser.wait(f"document.querySelectorAll('.label').length === {count}")
        assert browser.value("document.getElementById('why').disabled") is (count == 0)
    assert len([url for url in browser.requests if url.endswith("/v1/classify")]) == 1
    fine(browser, served)


SAMPLES = """## Step 1: 3.0 bits per byte

> the cat sat on a tree. the dog

## Step 2: 2.0 bits per byte

> the cat ran up the mat. the dog sat on <b> trees
> a tree <|endoftext|> the cat sat on it
> a <i>mat</i> ran after it
"""


def test_it_opens_with_prompts_of_the_run(
    browser: Browser, start: Start, models: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "novel" / "checkpoints" / "step-00000002"
    shutil.copytree(models / "writer", checkpoint)
    (tmp_path / "novel" / "samples.md").write_text(SAMPLES)
    assert own_prompts(checkpoint) == []  # not a run
    (tmp_path / "novel" / "run.json").write_text("{}")
    server = start(names=(str(checkpoint), "writer"))
    visit(browser, server)
    prompts = "[...document.querySelectorAll('#prompts button')].map(each => each.textContent)"
    expected = ["a <i>mat</i> ran after", "the cat ran up", "the dog sat on"]
    assert browser.value(prompts) == expected
    browser.point("#prompts button", click=True)
    browser.wait(f"document.querySelectorAll('.token').length > 5 && {IDLE}")
    assert text_of(browser).startswith(expected[0])
    browser.point("h1", click=True)
    stops: list[str] = []  # with the keyboard, from the beginning of the page
    while not browser.value("document.activeElement.closest('#texts') !== null"):
        press(browser, "Tab")
        stops.append(browser.value("document.activeElement.id"))
    assert len(stops) < 20 and {"model", "prompt", "write"} <= set(stops)
    put(browser, "#model", "writer")
    assert browser.value("document.getElementById('prompts').hidden") is True
    fine(browser, server)


@pytest.mark.parametrize(("text", "expected"), [
    ("> 白日依山盡黃河入海流。欲窮千里目更上一層樓", ["白日依山盡", "欲窮千里目"]),
    ("> emma\n> o\n> \n> olivia", ["oli", "em"]),
    ("", []),
])  # fmt: skip
def test_prompts_of_texts_without_sentences(tmp_path: Path, text: str, expected: list[str]) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "samples.md").write_text(f"## Step 1\n\n{text}\n")
    assert own_prompts(tmp_path / "checkpoints" / "step-00000001") == expected


NAMED = (
    "button",
    "combobox",
    "textbox",
    "spinbutton",
    "slider",
    "link",
    "Iframe",
    "dialog",
    "image",
)


def test_every_control_has_a_name(browser: Browser, served: Served) -> None:
    visit(browser, served)
    generate(browser)
    browser.point(".text header button", click=True)
    browser.wait("!document.getElementById('inside').hidden")
    browser.point(".token", 3, click=True)
    script = "for (const each of document.querySelectorAll('details, main')) "
    browser.value(script + "Object.assign(each, {open: true, hidden: false})")
    nodes = browser.tell("Accessibility.getFullAXTree")["nodes"]
    named = [
        (node["role"]["value"], node["name"]["value"].strip())
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in NAMED
    ]
    assert len(named) > 50
    assert not [role for role, name in named if not name]
    # Each token with its probability.
    assert len([name for role, name in named if role == "button" and name.endswith("%")]) >= 20


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
