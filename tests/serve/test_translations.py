"""`/v1/translate`: the same as `nanolm translate`, bounded, and in nobody's way."""

import json
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from browser import CHROMIUM, Browser
from conftest import Cli
from servers import Served, Start
from test_api import health, post, until
from test_bounds import Health, raw_request
from test_isolation import BODIES
from test_playground import fine, press, put, visit

CHAT = [{"role": "user", "content": "a"}]
TEXTS = ["the cat sat", "a tree and the dog", "", "日本 ran up \U0001f63a"]
LONG = {"model": "endless", "text": ["the dog ran after the cat"] * 16, "beams": 16}


@pytest.fixture(scope="module")
def server(start: Start) -> Served:
    return start(names=("translator", "endless", "bottleneck", "writer"))


def translated(server: Served, **body: Any) -> list[dict[str, Any]]:
    status, _, answer = post(server, "/v1/translate", body)
    assert status == 200, answer
    found: list[dict[str, Any]] = answer["translations"]
    return found


@pytest.mark.parametrize("name", ["translator", "bottleneck"])
@pytest.mark.parametrize("options", [{}, {"beams": 1}, {"temperature": 1.5, "seed": 7}])
def test_it_is_what_translate_prints(
    server: Served, cli: Cli, name: str, options: dict[str, Any]
) -> None:
    given = [f"--{option}={value}" for option, value in options.items()]
    result = cli("translate", server.folder / name, "--json", *given, *TEXTS)
    expected = [json.loads(line) for line in result.stdout.splitlines()]
    found = translated(server, model=name, text=TEXTS, **options)
    for each, wanted in zip(found, expected, strict=True):
        assert each.pop("alignment") is None
        assert each.pop("score") == pytest.approx(wanted.pop("score"), abs=1e-4)
        assert each == wanted
    assert [each["source"] for each in found] == TEXTS
    (alone,) = translated(server, model=name, text=TEXTS[0], **options)
    assert alone["translation"] == found[0]["translation"]


def test_an_alignment_has_both_texts_on_its_axes(server: Served) -> None:
    text = "日本 ran up \U0001f63a"
    (found,) = translated(server, text=text, alignment=True)
    (part,) = found["alignment"]
    assert "".join(part["source"]) == text
    assert "".join(part["target"]) == found["translation"]
    assert part["source"][-1] == part["target"][-1] == ""  # the ends
    assert len(part["weights"]) == len(part["target"])
    for row in part["weights"]:
        assert len(row) == len(part["source"])
        assert sum(row) == pytest.approx(1, abs=0.01)
    (none,) = translated(server, model="bottleneck", text=text, alignment=True)
    assert none["alignment"] is None


def test_a_text_beyond_the_context_is_translated_in_parts(server: Served) -> None:
    text = "the cat sat on the mat. " * 12
    (found,) = translated(server, text=text, alignment=True)
    assert "translated in" in found["notes"][0]
    assert len(found["alignment"]) > 1
    sources = "".join("".join(part["source"]) for part in found["alignment"])
    assert sources.replace(" ", "") == text.replace(" ", "")


def test_models_of_all_kinds_are_served_together(server: Served) -> None:
    listed = requests.get(f"{server.url}/v1/models", timeout=30).json()["data"]
    assert [(each["id"], each["kind"], each["attention"]) for each in listed] == [
        ("translator", "translator", True),
        ("endless", "translator", True),
        ("bottleneck", "translator", False),
        ("writer", "language model", True),
    ]
    status, _, answer = post(server, "/v1/completions", {"max_tokens": 2})
    assert (status, answer["model"]) == (200, "writer")
    status, _, answer = post(server, "/v1/tokenize", {"model": "translator", "text": "the cat"})
    assert (status, "".join(answer["tokens"])) == (200, "the cat")
    status, _, answer = post(server, "/v1/inspect", {"model": "translator", "text": "the cat"})
    assert status == 200
    page = requests.get(server.url + answer["page"], timeout=30).text
    assert "<title>Alignment" in page


WRONG: list[tuple[str, Any, int, str]] = [
    ("completions", {"model": "translator"}, 404,
     "model must be one of writer; translator is a translator: use /v1/translate"),
    ("chat/completions", {"model": "translator", "messages": CHAT}, 404, "use /v1/translate"),
    ("translate", {"model": "writer", "text": "a"}, 404,
     "endless, bottleneck; writer is a language model: use /v1/completions"),
    ("classify", {"input": "a"}, 404, "no classifier that supports this is served; translator is"),
    ("classify", {"input": "a", "model": "translator"}, 404, "use /v1/translate"),
    ("inspect", {"model": "bottleneck", "text": "a"}, 404, "model must be one of translator"),
    ("translate", {"text": "a", "model": "translatr"}, 404, "did you mean translator?"),
    ("translate", {}, 400, "text is missing"),
    ("translate", {"text": 5}, 400, "text must be a string or a list of strings"),
    ("translate", {"text": []}, 400, "text must have at least 1 item"),
    ("translate", {"text": ["a"] * 65}, 400, "text must have at most 64 items"),
    ("translate", {"text": "a", "beams": 17}, 400, "beams must be less than or equal to 16"),
    ("translate", {"text": "a", "beams": 0}, 400, "beams must be greater than or equal to 1"),
    ("translate", {"text": "a", "length_penalty": 11}, 400, "length_penalty must be less"),
    ("translate", {"text": "a", "temperature": -1}, 400, "temperature must be greater"),
    ("translate", {"text": "a", "max_tokens": 4097}, 400, "max_tokens must be less"),
    ("translate", {"text": "a", "alignment": 1}, 400, "alignment must be a valid boolean"),
    ("translate", {"text": "a", "top": 1}, 400, "top is not a known field"),
    ("translate", {"text": "ab " * 20_000}, 400, "the limit is 16,384"),
    ("translate", {"model": "endless", "text": "ab " * 5_000, "alignment": True}, 400,
     "the limit is 4,194,304; send less text"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "message"), WRONG)
def test_what_is_wrong_is_said(
    server: Served, path: str, body: Any, status: int, message: str
) -> None:
    found, _, answer = post(server, f"/v1/{path}", body)
    assert (found, message in answer["error"]["message"]) == (status, True), answer


def test_without_a_translator_it_says_so(served: Served) -> None:
    status, _, answer = post(served, "/v1/translate", {"text": "a"})
    assert status == 404
    assert "no translator that supports this is served" in answer["error"]["message"]
    status, _, answer = post(served, "/v1/translate", {"text": "a", "model": "writer"})
    assert (status, "use /v1/completions" in answer["error"]["message"]) == (404, True)


def test_it_is_documented(server: Served) -> None:
    document = requests.get(f"{server.url}/openapi.json", timeout=30).json()
    about = document["paths"]["/v1/translate"]["post"]
    reference = about["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = document["components"]["schemas"][reference.rsplit("/", 1)[1]]["properties"]
    assert fields["beams"]["default"] == 4
    assert fields["model"]["enum"] == ["translator", "endless", "bottleneck"]
    assert all("description" in fields[name] for name in fields if name != "model")


def test_strange_requests_never_break_it(server: Served) -> None:
    """Several hundred: strange JSON, fields of every type, and broken bytes."""
    source = random.Random(0)
    odd: list[Any] = [None, True, -1, 0, 1.5, 1e308, 10**30, "", "a", "\ud800", "\0"]
    odd += [[], ["a"], [[]], {}, [None]]
    fields = ["model", "text", "beams", "length_penalty", "temperature", "seed", "max_tokens"]
    fields += ["alignment", "user", "stream", "\ud800"]
    bodies = [body.encode() for body in BODIES]
    good = json.dumps({"text": ["the cat", ""], "beams": 2, "max_tokens": 3, "alignment": True})
    for _ in range(200):
        body = {"text": "the cat", "max_tokens": 2}
        body |= {name: source.choice(odd) for name in source.sample(fields, 2)}
        bodies.append(json.dumps(body).encode())
        broken = bytearray(good.encode())
        for _ in range(source.randint(1, 4)):
            broken[source.randrange(len(broken))] = source.randrange(256)
        bodies.append(bytes(broken))
    statuses = {post(server, "/v1/translate", body)[0] for body in bodies}
    assert statuses == {200, 400, 404}


def begun(server: Served, body: dict[str, Any]) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    client.sendall(raw_request(json.dumps(body).encode(), "/v1/translate"))
    until(lambda: health(server)["writing"] > 0)
    return client


def test_a_long_translation_holds_nobody_up(server: Served) -> None:
    """/health, other models, and short translations with the same model."""
    expected = [translated(server, model="endless", text=text, max_tokens=9) for text in TEXTS]
    with begun(server, LONG) as client, Health(server) as times:
        assert post(server, "/v1/completions", {"max_tokens": 20})[0] == 200
        with ThreadPoolExecutor(4) as pool:
            ask = [
                pool.submit(translated, server, model="endless", text=text, max_tokens=9)
                for text in TEXTS
            ]
            found = [each.result() for each in ask]
        assert health(server)["writing"] >= 16  # the long one is still there
        client.close()
        until(lambda: health(server)["writing"] == 0)  # ends with its client
    for each, alone in zip(found, expected, strict=True):
        assert each[0]["translation"] == alone[0]["translation"]
        assert each[0]["score"] == pytest.approx(alone[0]["score"], abs=1e-4)
    assert times.slowest < 1


def test_time_and_queue_are_bounded(start: Start) -> None:
    server = start("--timeout", 1, "--batch", 8, "--queue", 8, names=("endless",))
    began = time.monotonic()
    with begun(server, LONG) as client:
        status, headers, _ = post(server, "/v1/translate", {"text": "a"})
        assert (status, headers["retry-after"]) == (429, "1")
        answer = b""
        while not answer.endswith(b"}"):
            answer += client.recv(65_536)
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"not finished within 1 s; send less text" in answer
    assert time.monotonic() - began < 10
    assert post(server, "/v1/translate", {"text": "a", "max_tokens": 3})[0] == 200


def test_the_key_and_the_page_it_comes_from_are_checked(start: Start) -> None:
    server = start("--key", "a-long-secret", names=("translator",))
    body = {"text": "a", "max_tokens": 1}
    assert post(server, "/v1/translate", body)[0] == 401
    right = {"authorization": "Bearer a-long-secret"}
    assert post(server, "/v1/translate", body, **right)[0] == 200
    assert post(server, "/v1/translate", body, **right, origin="http://evil.example")[0] == 403
    assert post(server, "/v1/translate", body, **right, host="evil.example")[0] == 403


# In the browser.

needs_browser = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
SHARES = "[...document.querySelectorAll('.{} .word')].map(word => parseFloat("
SHARES += "word.style.getPropertyValue('--share')))"
TARGET = "document.querySelector('.target')?.textContent"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as browser:
        yield browser


@needs_browser
def test_it_translates_as_you_type(browser: Browser, server: Served) -> None:
    (expected,) = translated(server, text="the cat sat")
    visit(browser, server)
    for end in range(1, 12):  # faster than the answers come
        put(browser, "#source", "the cat sat"[:end])
    put(browser, "#source", "the cat sat")
    wanted = json.dumps(expected["translation"].strip())
    browser.wait(f"({TARGET})?.trim() === {wanted}")
    assert browser.value("document.querySelector('.source').textContent") == "the cat sat"
    put(browser, "#source", "the cat sat\n\na tree")
    browser.wait("document.querySelectorAll('.pair').length === 2")
    put(browser, "#search [data-name=temperature] input[type=number]", 1)
    browser.value("document.getElementById('search').dispatchEvent(new Event('input'))")
    browser.wait("document.querySelectorAll('.pair.waiting').length === 0")
    put(browser, "#model", "bottleneck")
    browser.wait("document.querySelectorAll('.pair').length === 2")
    assert browser.value("document.querySelectorAll('.word').length") == 0
    put(browser, "#model", "writer")
    assert browser.value("document.getElementById('translating').hidden") is True
    fine(browser, server)


@needs_browser
def test_a_word_shows_its_alignment(browser: Browser, server: Served) -> None:
    (found,) = translated(server, text="the cat sat", alignment=True)
    visit(browser, server)
    put(browser, "#source", "the cat sat")
    browser.wait("document.querySelectorAll('.target .word').length > 1")
    words = "[...document.querySelectorAll('.source .word')].map(word => word.textContent)"
    assert browser.value(words) == ["the", "cat", "sat"]
    browser.point(".target .word", 1)
    browser.wait("document.querySelectorAll('.target .word.on').length === 1")
    given = browser.value(SHARES.format("source"))
    assert len(given) == 3 and 0 < sum(given) <= 101
    assert "←" in browser.value("document.querySelector('.pair [role=status]').textContent")
    # With the keyboard, from the source to the translation.
    browser.value("document.querySelector('.source .word').focus()")
    press(browser, "ArrowRight")
    assert browser.value("document.activeElement.textContent") == "cat"
    (part,) = found["alignment"]
    starts = [len("".join(part["source"][:place])) for place in range(len(part["source"]))]
    tokens = [place for place, at in enumerate(starts) if 3 <= at < 7]
    column = [sum(row[place] for place in tokens) for row in part["weights"]]
    targets = browser.value(SHARES.format("target"))
    assert max(targets) <= 100 * max(column) + 0.1 and min(targets) >= 100 * min(column) - 0.1
    browser.value("document.activeElement.blur()")
    assert browser.value("document.querySelectorAll('.word.on').length") == 0
    browser.point(".pair button", click=True)
    browser.wait("document.getElementById('look').src.includes('/look/')")
    fine(browser, server)


@needs_browser
@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_sticks_out(browser: Browser, server: Served, width: int, dark: bool) -> None:
    browser.look(width, dark)
    visit(browser, server)
    put(browser, "#source", "the cat " * 30 + "cat" * 60)
    browser.wait("document.querySelectorAll('.pair').length === 1")
    assert browser.value("document.documentElement.scrollWidth <= innerWidth") is True
    fine(browser, server)
