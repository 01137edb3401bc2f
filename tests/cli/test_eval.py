import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Cli
from models import lively

import nanolm
from nanolm.cli.eval import PAGE_TOKENS
from nanolm.model.config import configure
from nanolm.model.huggingface import save_model
from nanolm.text.tokenizer import train_tokenizer

KEYS = {
    "run",
    "loss",
    "perplexity",
    "bits_per_byte",
    "bits_per_character",
    "top_1_accuracy",
    "top_5_accuracy",
    "tokens",
    "bytes",
    "characters",
    "window",
}


def strictly(text: str) -> Any:
    """Standard JSON, without NaN and Infinity."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


def folder_of(kind: str, place: Path, context: int = 16, std: float = 0.3) -> Path:
    """A model folder with random weights."""
    tokenizer = train_tokenizer(["the cat sat on the mat. " * 9], kind)
    shape = {"layers": 1, "heads": 2, "dim": 16, "context": context}
    place.mkdir()
    size = tokenizer.vocab_size
    save_model(lively(configure("modern", vocab_size=size, **shape), std), place, tokenizer)
    return place


@pytest.mark.parametrize("family", ["modern", "lstm"])
def test_a_text_is_scored(family: str, cli: Cli, corpus: Path, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"layers": 1, "dim": 16, "context": 16, "batch": 4}
    if family == "modern":
        shape["heads"] = 2
    nanolm.train(corpus, out=tmp_path / "run", family=family, steps=20, **shape)
    text = "The 7 cats sät on 8 mats.\n"
    (tmp_path / "other.txt").write_text(text, encoding="utf-8")
    shown = cli("eval", "run", "other.txt", "--json")
    assert shown.returncode == 0, shown.stderr
    found = strictly(shown.stdout)
    assert set(found) == KEYS

    writer = nanolm.load(tmp_path / "run")
    ids = torch.tensor([writer.tokenizer.end_of_text, *writer.tokenizer.encode(text)])
    assert len(ids) <= 17  # one window
    with torch.no_grad():
        logits = writer.model(ids[None, :-1])[0]  # (time, vocabulary)
    loss = F.cross_entropy(logits, ids[1:]).item()
    assert (found["run"], found["tokens"]) == ("run", len(ids) - 1)
    assert (found["bytes"], found["characters"]) == (len(text) + 1, len(text))
    assert found["loss"] == pytest.approx(loss, abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    bits = loss * (len(ids) - 1) / math.log(2)
    assert found["bits_per_byte"] == pytest.approx(bits / (len(text) + 1), abs=1e-5)
    assert found["bits_per_character"] == pytest.approx(bits / len(text), abs=1e-5)
    top = logits.topk(5).indices == ids[1:, None]  # (time, 5)
    assert found["top_1_accuracy"] == pytest.approx(top[:, 0].float().mean().item())
    assert found["top_5_accuracy"] == pytest.approx(top.any(dim=1).float().mean().item())
    said = cli("eval", "run", "other.txt").stdout
    assert f"{bits / (len(text) + 1):.4f} bits per byte" in said
    assert f"top 1 {found['top_1_accuracy']:.1%}" in said


def test_a_window_is_the_context_and_is_shown(cli: Cli, tmp_path: Path) -> None:
    folder_of("byte", tmp_path / "model", context=1500)
    folder_of("byte", tmp_path / "long", context=9000)
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 100)
    shown = [cli("eval", "model", "a.txt", "--json", *more) for more in ([], ["--context", 1500])]
    default, whole = (strictly(each.stdout) for each in shown)
    assert default == whole
    assert (default["window"], default["tokens"]) == (1500, 2400)
    assert "in windows of 1,500" in cli("eval", "model", "a.txt").stdout
    both = cli("eval", "model", "a.txt", "--against", "long")
    assert re.search(r"window.*1,500.*8,192", both.stdout, re.DOTALL)
    assert "long: windows of 8,192 tokens to save time, of a context of 9,000" in both.stderr
    assert "model: windows" not in both.stderr


def test_surprisal_per_token(cli: Cli, tmp_path: Path) -> None:
    model = folder_of("byte", tmp_path / "model")
    text = "the cät\nsat. " * 3
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.txt").write_text("<dog>\n", encoding="utf-8")
    words = [model, "a.txt", "b.txt", "--stride", 4, "--per-token"]
    shown = cli("eval", *words, "--json", "--html", "page.html")
    assert shown.returncode == 0, shown.stderr
    found = strictly(shown.stdout)
    assert set(found) == KEYS | {"per_token"}
    tokens = found["per_token"]
    data = (text + "<dog>\n").encode()
    assert [token["id"] for token in tokens] == list(data)  # without the separator between the two
    assert [token["token"] for token in tokens[4:8]] == ["c", r"\xc3", r"\xa4", "t"]
    bits = sum(token["bits"] for token in tokens)
    assert bits / len(data) == pytest.approx(found["bits_per_byte"], rel=1e-5)
    right = sum(token["rank"] == 1 for token in tokens) / len(tokens)
    assert right == found["top_1_accuracy"]

    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("title=") == len(data.decode())
    assert page.count("<hr>") == 1
    assert f"<dt>bits per byte</dt><dd>{found['bits_per_byte']:.4f}</dd>" in page
    assert "page.html: all tokens" in shown.stderr
    assert "shown" not in page

    lines = cli("eval", *words)
    rows = [line.split("\t") for line in lines.stdout.splitlines()]
    assert [(int(rank), json.loads(token)) for _, rank, token in rows] == [
        (token["rank"], token["token"]) for token in tokens
    ]
    for row, token in zip(rows, tokens, strict=True):
        assert float(row[0]) == pytest.approx(token["bits"], abs=1e-4)
    assert f"{found['bits_per_byte']:.4f} bits per byte" in lines.stderr


def test_a_page_shows_the_beginning_of_a_long_text(cli: Cli, tmp_path: Path) -> None:
    model = folder_of("byte", tmp_path / "model")
    (tmp_path / "long.txt").write_text("0123456789" * 2500)
    shown = cli("eval", model, "long.txt", "--html", "page.html")
    assert "over 25,000 tokens" in shown.stdout
    assert f"the first {PAGE_TOKENS:,} tokens" in shown.stderr
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"<dt>shown</dt><dd>the first {PAGE_TOKENS:,} tokens</dd>" in page
    assert page.count("title=") == PAGE_TOKENS


def test_models_side_by_side(cli: Cli, corpus: Path, trained: Path, tmp_path: Path) -> None:
    other = folder_of("char", tmp_path / "other", context=8)
    words = [other, corpus, "--against", trained, "--against", other]
    shown = cli("eval", *words, "--json")
    assert shown.returncode == 0, shown.stderr
    scores = [strictly(line) for line in shown.stdout.splitlines()]
    assert [score["run"] for score in scores] == [str(other), str(trained), str(other)]
    for score in scores[:2]:
        assert score == strictly(cli("eval", score["run"], corpus, "--json").stdout)
    assert scores[0]["tokens"] != scores[1]["tokens"]  # different tokenizers
    table = cli("eval", *words)
    head, *rows = table.stdout.splitlines()
    assert re.split("  +", head) == [
        "model",
        "bits per byte",
        "bits per character",
        "loss",
        "perplexity",
        "top 1",
        "top 5",
        "tokens",
        "window",
    ]
    cells = [re.split("  +", row) for row in rows]
    assert [row[0] for row in cells] == [score["run"] for score in scores]
    best = min(score["bits_per_byte"] for score in scores)
    for row, score in zip(cells, scores, strict=True):
        mark = " *" if score["bits_per_byte"] == best else ""
        assert row[1] == f"{score['bits_per_byte']:.4f}{mark}"
        assert row[-2:] == [f"{score[name]:,}" for name in ("tokens", "window")]
    assert {line.rindex(row[-1]) + len(row[-1]) for line, row in zip(rows, cells, strict=True)} == {
        len(head)
    }
    assert "same tokenizer" in table.stderr
    each = cli("eval", *words[:4], "--json", "--per-token")
    assert [len(strictly(line)["per_token"]) for line in each.stdout.splitlines()] == [
        score["tokens"] for score in scores[:2]
    ]


def test_a_broken_model_is_refused(cli: Cli, corpus: Path, tmp_path: Path) -> None:
    model, whole = folder_of("byte", tmp_path / "1", std=1e18), folder_of("byte", tmp_path / "2")
    for words in ([model, corpus, "--json"], [whole, corpus, "--against", model]):
        refused = cli("eval", *words)
        assert refused.returncode == 4
        assert re.search("overflow|too large|not finite", refused.stderr)
        assert not refused.stdout


def test_invalid_arguments(cli: Cli, corpus: Path, trained: Path, tmp_path: Path) -> None:
    small = folder_of("byte", tmp_path / "small", context=8)
    wrong: list[tuple[list[object], list[str]]] = [
        ([trained, "nothing.txt"], ["nothing.txt"]),
        (["nothing", corpus], ["nothing does not exist"]),
        ([trained, corpus, "--against", "nowhere"], ["nowhere does not exist"]),
        ([trained, corpus, "--context", 17], [f"--context 17: must be at most 16 for {trained}"]),
        ([trained], ["FILE"]),
        (
            [trained, corpus, "--against", small, "--stride", 17],
            [f"--stride 17: must be at most {most}" for most in (16, 8)],
        ),
        (
            [trained, corpus, "--against", small, "--context", 17],
            [f"at most 16 for {trained}", f"at most 8 for {small}"],
        ),
        (
            [trained, corpus, "--stride", 0, "--context", -1, "--device", "tpu", "--html", "no/a"],
            [
                "--stride 0: must be at least 1",
                "--context -1: must be at least 1",
                "--device tpu: choose from auto",
                "--html no/a: ",
            ],
        ),
        (
            [trained, corpus, "--against", small, "--per-token", "--encoding", "utf8x"],
            ["--per-token unless --json", "--encoding utf8x"],
        ),
    ]
    for words, parts in wrong:
        shown = cli("eval", *words)
        assert shown.returncode == 2, shown.stderr
        for part in parts:
            assert part in re.sub(r"\s+", " ", shown.stderr)
