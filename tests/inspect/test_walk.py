"""The walk has the numbers of the model: in Python, and as the page computes them in a browser."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import CHROMIUM, Browser
from hostile import MARKUP
from models import gpt_config, lively, lively_seq2seq, of_family
from torch import Tensor

from nanolm.errors import ModelError, UsageError
from nanolm.inspect import walk_page as page
from nanolm.inspect.inspection import residual_stream
from nanolm.inspect.walk import Walk, walk_through
from nanolm.inspect.walk_page import ROLES, SOURCES, walk_data
from nanolm.model.base import Model
from nanolm.model.encoder_decoder import EncoderDecoder
from nanolm.model.fast.quantized import quantize
from nanolm.model.gpt import GPT
from nanolm.text.tokenizer import train_tokenizer

IDS = [5, 3, 31, 3, 3, 17]
SOURCE = [7, 2, 9]
FAMILIES = ("modern", "llama", "gpt2", "rnn", "lstm")
SWITCHED: list[dict[str, Any]] = [
    *({"positions": kind} for kind in ("learned", "sinusoidal", "alibi", "none")),
    *({"norm_place": place, "norm": "layer", "bias": True} for place in ("post", "branch")),
    *({"feed_forward": kind} for kind in ("relu", "gelu", "gelu_tanh", "relu2", "silu")),
    {"kv_heads": 2, "tied": True},
    {"kv_heads": 1, "qk_norm_whole": True},
    {"parallel_residual": True, "rotary_dims": 2},
    {"unrotated_layers": (0,), "sliding_window": 3, "attention_bias": "qkv"},
]
AS_MODEL = 1e-5


def walked(model: Model) -> tuple[Walk, Tensor]:
    with torch.inference_mode():
        return walk_through(model, IDS), model(torch.tensor([IDS]))[0]


def by_role(walk: Walk, role: str, side: str = "") -> list[Tensor]:
    return [s.values for s in walk.stages if s.role == role and s.side == side]


def close(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs.double(), atol=AS_MODEL)


def all_close(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(close(*both) for both in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_model(family: str) -> None:
    walk, logits = walked(of_family(family))
    assert close(walk.stages[-1].values, logits)


@pytest.mark.parametrize("switched", SWITCHED, ids=str)
def test_every_architecture(switched: dict[str, Any]) -> None:
    walk, logits = walked(lively(gpt_config(**switched)))
    assert close(walk.stages[-1].values, logits)


@pytest.mark.parametrize("family", ["modern", "llama", "gpt2"])
def test_attention_and_residuals_are_those_of_the_model(family: str) -> None:
    model = of_family(family)
    assert isinstance(model, GPT)
    weights: list[Tensor] = []
    first, *after = residual_stream(model, IDS, weights)
    walk = walk_through(model, IDS)
    assert close(by_role(walk, "embedded" if family == "gpt2" else "token")[0], first)
    assert all_close(by_role(walk, "residual")[1::2], after)
    assert all_close(by_role(walk, "weights"), [layer[0] for layer in weights])


@pytest.mark.parametrize("family", ["encoder-decoder", "modern-encoder-decoder"])
def test_both_sides_of_an_encoder_decoder(family: str) -> None:
    model = lively_seq2seq(family)
    assert isinstance(model, EncoderDecoder)
    walk, cross = walk_through(model, IDS, SOURCE), list[Tensor]()
    with torch.inference_mode():
        memory = model.encode(torch.tensor([SOURCE]), torch.ones(1, len(SOURCE), dtype=torch.bool))
        states = model.decode(torch.tensor([IDS]), memory, cross_weights=cross)
        assert close(walk.stages[-1].values, model.head(states)[0])
    shares = by_role(walk, "weights", "decoder")[1::2]
    assert all_close(shares, [layer[0] for layer in cross])
    with pytest.raises(UsageError, match="recurrent"):
        walk_through(lively_seq2seq("seq2seq-gru"), IDS, SOURCE)


def test_every_stage_is_described_and_in_the_course() -> None:
    course = (Path(__file__).parents[2] / "docs" / "course.md").read_text(encoding="utf-8")
    assert ROLES.keys() == SOURCES.keys()
    for _, idea in (*SOURCES.values(), page.ELMAN):
        assert f"\n| {idea} |" in course, idea
    for family in FAMILIES:
        walk, _ = walked(of_family(family))
        described = walk_data(train_tokenizer([], "byte"), walk)["roles"]
        assert all(each["code"].startswith(("def ", "class ", "@")) for each in described.values())
        assert ("Elman" in described.get("state", {}).get("idea", "")) == (family == "rnn")


def test_a_page_of_the_smallest_model_is_small() -> None:
    shape: dict[str, Any] = {"layers": 3, "heads": 3, "dim": 48, "context": 64}
    tokenizer = train_tokenizer(["the cat sat on the mat " * 9], "bpe", 1000)
    model = of_family("modern", **shape, vocab_size=tokenizer.vocab_size)
    html = page.walk_page(tokenizer, walk_through(model, [65] * 24), {})
    assert len(html) < 1_500_000
    assert walk_data(tokenizer, walk_through(model, [65] * 24))["exact"]


def test_a_large_model_is_summarized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MOST_COLUMNS", 4)
    tokenizer, (walk, _) = train_tokenizer([], "byte"), walked(of_family("modern", dim=32))
    exact = walk_data(tokenizer, walk)
    monkeypatch.setattr(page, "MOST_WEIGHTS", 10)
    data = walk_data(tokenizer, walk)
    assert exact["exact"] and not data["exact"] and "weights" not in data
    shapes = [tuple(shape) for shape in data["shapes"]]
    assert shapes[0] == (len(IDS), 4)
    assert (4, len(IDS), len(IDS)) in shapes  # attention as it is
    assert data["best"][0][0] == int(walk.stages[-1].values[0].argmax())


def test_models_that_a_walk_cannot_show() -> None:
    model = of_family("modern", dim=64)
    quantize(model, 8)
    with pytest.raises(UsageError, match="omit --int8"):
        walk_through(model, IDS)
    broken = of_family("gpt2")
    torch.nn.init.constant_(broken.head.weight, torch.nan)
    with pytest.raises(ModelError, match="not finite"):
        walk_through(broken, IDS)


@pytest.mark.parametrize("most", [0, 10**6])
def test_a_padded_vocabulary(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MOST_WEIGHTS", most)
    tokenizer = train_tokenizer([], "byte")
    data = walk_data(tokenizer, walk_through(of_family("modern", vocab_size=300), IDS))
    assert max(map(int, data["names"])) < tokenizer.vocab_size
    # A recurrent model has no limit but that of the page.
    assert walk_through(of_family("lstm"), [3] * 20).limit == 64


# In a browser.

needs_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
READY = "document.body.dataset.ready === 'yes'"
# The sum of the terms that a number is explained with, next to the number, for many numbers.
EXPLAINED = """stages.slice(0, -1).flatMap((one, n) => [0, 1, 5, 17, 40].map(place => {
  const x = values[n], r = place % x.rows, c = place % x.cols, h = place % x.heads;
  const how = HOW[one.op](inputsOf(one), weightsOf(one), one.options, r, c, h, one.side, one);
  const terms = [...(how.terms ?? []), ...(how.more ?? [])];
  const op = one.op === "part" ? stages[one.inputs[0]].op : one.op;
  const total = terms.length ? sum(terms.map(product)) : null;
  return [op, one.role, total, at(x, r, c, h), how.say ?? []];
}))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def opened(browser: Browser, folder: Path, walk: Walk) -> None:
    tokenizer = train_tokenizer([], "byte")
    file = folder / "walk.html"
    file.write_text(page.walk_page(tokenizer, walk, {"model": MARKUP[0]}), encoding="utf-8")
    browser.complaints.clear()
    browser.requests.clear()
    browser.open(file, READY)


@pytest.mark.slow
@needs_a_browser
@pytest.mark.parametrize("family", [*FAMILIES, "encoder-decoder", *map(json.dumps, SWITCHED)])
def test_the_page_computes_the_numbers_of_the_model(
    family: str, browser: Browser, tmp_path: Path
) -> None:
    if family == "encoder-decoder":
        walk = walk_through(lively_seq2seq(family), IDS, SOURCE)
    elif family in FAMILIES:
        walk, _ = walked(of_family(family))
    else:
        walk, _ = walked(lively(gpt_config(**json.loads(family))))
    opened(browser, tmp_path, walk)
    shown = browser.value("values.map(x => [...x.numbers].map(n => Number.isFinite(n) ? n : -1e9))")
    assert len(shown) == len(walk.stages)
    for stage, numbers in zip(walk.stages, shown, strict=True):
        values = stage.values.clamp(min=-1e9).flatten()
        assert torch.allclose(torch.tensor(numbers).double(), values, rtol=1e-4, atol=1e-5), stage
    for op, role, total, value, say in browser.value(EXPLAINED):
        if op in ("linear", "add", "scale", "rope", "mix") and total is not None:
            assert total == pytest.approx(value, rel=1e-4, abs=1e-6), (op, role)
        else:
            assert say or total is not None, (op, role)
    assert browser.complaints == [] and len(browser.requests) == 1


@pytest.mark.slow
@needs_a_browser
def test_every_stage_by_keyboard_and_a_token_more(browser: Browser, tmp_path: Path) -> None:
    model = of_family("modern", vocab_size=258, context=16)
    opened(browser, tmp_path, walk_through(model, IDS))
    titles: list[str] = []
    while not titles or titles[-1] != browser.value("find('title').textContent"):
        titles.append(browser.value("find('title').textContent"))
        for width, dark in ((390, True), (1440, False)):
            browser.look(width, dark)
            assert browser.value("document.documentElement.scrollWidth") <= width, titles[-1]
        press(browser, "ArrowRight")
    assert titles[-1] == "The next token" and len(titles) == browser.value("stages.length")
    browser.point("#draw", click=True)
    ids = browser.value("ids")
    assert ids[:-1] == IDS and "random number" in browser.value("find('drawn').textContent")
    logits = browser.value("[...values.at(-1).numbers]")
    with torch.inference_mode():
        wanted = model(torch.tensor([ids]))[0].flatten()
    assert torch.allclose(torch.tensor(logits), wanted, atol=1e-4)
    # Top-p applies to what top-k leaves, as in `nanolm sample`.
    browser.value("find('k').value = 2; find('p').value = 0.5; render()")
    assert browser.value("distribution().filter(({after}) => after > 0).length") == 1
    browser.value("find('p').value = 1; find('k').value = -1; render()")
    assert browser.value("distribution().every(({after}) => after > 0)")
    press(browser, "ArrowUp")
    assert browser.value("find('draw').disabled")
    press(browser, "ArrowDown")
    for _ in range(4):
        press(browser, "ArrowLeft")
    press(browser, "PageUp")
    press(browser, "ArrowUp")
    place = browser.value("[stages[stage].layer, stages[stage].role, row]")
    assert place == [1, "down", len(ids) - 2]
    assert browser.complaints == []


@pytest.mark.slow
@needs_a_browser
def test_a_summary_has_attention_and_candidates(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "MOST_WEIGHTS", 10)
    model = of_family("gpt2", vocab_size=258, context=16)
    walk, logits = walk_through(model, IDS), model(torch.tensor([IDS]))[0]
    opened(browser, tmp_path, walk)
    assert not browser.value("find('summary').hidden")
    for number in range(len(walk.stages) + 1):
        browser.value(f"go({number})")
    assert browser.value("find('draw').offsetParent") is None  # there is nothing to compute with
    model_share = browser.value("distribution()[0].model")
    assert model_share == pytest.approx(float(logits[-1].softmax(dim=0).max()), abs=1e-4)
    assert browser.complaints == []


def press(browser: Browser, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        browser.tell("Input.dispatchKeyEvent", type=kind, key=key)
