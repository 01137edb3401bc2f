"""What a model or a text says is shown and never obeyed: on a terminal, and in a browser."""

import os
import re
import string
import subprocess
import sys
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from conftest import Cli, Tally, Terminal, shown_on
from hostile import MARKUP
from models import of_family

import nanolm
from nanolm.classification.finetune import finetune
from nanolm.classification.metrics import score
from nanolm.classification.settings import FinetuneSettings
from nanolm.generation.language_model import Sample
from nanolm.generation.page import samples_page
from nanolm.inspect.attribution import attribute
from nanolm.inspect.heads import describe_heads
from nanolm.inspect.inspection import inspect_text
from nanolm.inspect.page import inspection_page, neighbours_page, word_page
from nanolm.inspect.vectors import Occurrences
from nanolm.model.classifier import Classifier
from nanolm.model.config import ClassifierConfig
from nanolm.report.curves import Chart, Panel, Series
from nanolm.report.page import report_page
from nanolm.report.run_data import RunData
from nanolm.runs.folder import Run
from nanolm.text.page import surprise_page, tokens_page
from nanolm.text.tokenizer import train_tokenizer

SHOW = """
import sys
from nanolm.cli.console import show_text
for first in range(256):
    for second in range(256):
        show_text(bytes([first, second]).decode("utf-8", "replace") + "\\n")
"""
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def test_no_two_bytes_make_a_terminal_do_anything(tally: Tally) -> None:
    """A pipe gets them as they are."""
    command = [sys.executable, "-c", SHOW]
    master, slave = os.openpty()
    with subprocess.Popen(command, stdout=slave):
        os.close(slave)
        shown = shown_on(master).replace("\r\n", "\n")
    raw = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.decode()
    texts = [bytes([a, b]).decode("utf-8", "replace") for a in range(256) for b in range(256)]
    assert raw == "".join(text + "\n" for text in texts)
    assert len(OBEYED.findall(raw)) > 10_000
    assert shown.count("\n") == raw.count("\n")
    tally("two bytes on a terminal", len(texts), len(texts) - len(OBEYED.findall(shown)))


def test_what_a_model_writes_is_not_obeyed(terminal: Terminal, tmp_path: Path) -> None:
    """One that has learned nothing but escape codes."""
    text = tmp_path / "codes.txt"
    text.write_bytes(b"\x1b[31m\x1b]0;owned\x07\xc2\x9b2J\x1b[6n" * 200)
    shape = {"layers": 1, "heads": 2, "dim": 16, "context": 16, "batch": 4}
    nanolm.train(text, out=tmp_path / "run", steps=30, tokenizer="byte", **shape)  # type: ignore[arg-type]
    shown = terminal("sample", "run", "--prompt", "\x1b[2J", "--tokens", 100, "--seed", 1)
    ours = re.sub(r"\x1b\[(0|1)m", "", shown.replace("\r\n", "\n"))  # the prompt is bold
    assert "␛" in ours
    assert not OBEYED.findall(ours)


class SeenTags(HTMLParser):
    """The tags of a page with the names of their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: set[tuple[str, tuple[str, ...]]] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add((tag, tuple(name for name, _ in attrs)))


def pages(text: str) -> dict[str, str]:
    """Every page and picture that nanolm makes, with `text` wherever words of others can be."""
    tokenizer = train_tokenizer([text], "bpe", 300)
    ids = tokenizer.encode(text)
    rows = [(id, 1.0, 1) for id in ids]
    sample = Sample(
        text, 0, tokens=ids, logprobs=[-1.0] * len(ids), top=[[(ids[0], -1.0)]] * len(ids)
    )
    points = [(0.0, 1.0), (1.0, 0.5)]
    model = of_family("gpt2", vocab_size=tokenizer.vocab_size, context=len(ids) + 1)
    seen = inspect_text(model, ids)
    heads = describe_heads(seen.attention, ids)
    config = ClassifierConfig(base=model.config, labels=(text, f"no {text}"), window=512)
    what = attribute(Classifier(config, of_family("gpt2", **asdict(model.config))), ids)
    one = RunData(
        run=Run(Path("runs") / text.replace("/", "").replace("\0", "")),
        settings={"corpus": [text], text: text, "minutes": 1},
        facts={
            "machine": text,
            "choices": [{"what": text, "value": text, "reason": text}],
            "fingerprints": {text: text},
            "result": {
                "seconds": 1.0,
                "val": score(np.eye(2), np.array([0, 1]), config.labels).to_json(),
                "mistakes": [{"text": text, "label": text, "predicted": text, "probability": 0.9}],
            },
        },
        metrics=[{"step": 1, "loss": 2.0}],
        samples=[(text, text)],
    )
    return {
        "inspect": inspection_page(tokenizer, seen, heads, {text: text}),
        "decided": inspection_page(
            tokenizer, seen, heads, {text: text}, (0, 0), (what, config.labels)
        ),
        "word": word_page(Occurrences(text, [text, text], np.ones((2, 2, 3), np.float32)), {}),
        "neighbours": neighbours_page([text] * 2, np.ones((2, 3), np.float32), [1.0], {text: text}),
        "report": report_page(one),
        "labels": report_page(replace(one, settings={"data": [text]})),
        "tokens": tokens_page(tokenizer, text, text),
        "surprise": surprise_page(tokenizer, rows, {text: text}, text),
        "samples": samples_page(tokenizer, [sample], {text: text}),
        "curves": Chart(text, [Panel(text, [Series(text, points)], (1.0, text))]).svg,
    }


def test_markup_is_text_on_every_page(tally: Tally) -> None:
    made, long = pages("some harmless words\n\0\u202e"), pages(string.ascii_letters)
    harmless = {
        name: SeenTags(page).found | SeenTags(long[name]).found for name, page in made.items()
    }
    survived = 0
    for text in MARKUP:
        made = pages(text)
        fine = all(SeenTags(page).found <= harmless[name] for name, page in made.items())
        policy = "default-src 'none'; style-src 'sha256-"
        survived += fine and all(policy in page for name, page in made.items() if name != "curves")
    assert len(MARKUP) == len(set(MARKUP)) == 50
    tally("markup on pages", len(MARKUP), survived)


def test_the_parser_would_see_it() -> None:
    assert ("script", ("src", "onerror")) in SeenTags(MARKUP[0]).found


@pytest.mark.parametrize("verb", ["train", "sample"])
def test_names_are_not_obeyed_either(verb: str, cli: Cli) -> None:
    shown = cli(verb, "\x1b[32mevil")
    assert "[32mevil" in shown.stderr
    assert "\x1b[32m" not in shown.stderr


def test_the_files_of_a_run_are_not_obeyed(tmp_path: Path) -> None:
    """Those that one would look at with `cat`, whatever names, labels and texts hold."""
    codes = "\x1b]0;owned\x07\x9b2J\u202e"
    data = tmp_path / "labels.tsv"
    rows = [f"{word} soup {n}\t{word}{codes}" for n in range(30) for word in ("good", "bad")]
    data.write_text("sentence\tlabel\n" + "\n".join(rows) + "\n", encoding="utf-8")
    asked = FinetuneSettings(data=(str(data),), start_from="none", preset="nano", steps=3)
    labels, words = (tmp_path / f"{kind}{codes}" for kind in ("labels", "words"))
    finetune(asked, labels)
    text = tmp_path / "text.txt"
    text.write_text(f"{codes} and more\n" * 200, encoding="utf-8")
    shape = {"layers": 1, "heads": 2, "dim": 16, "context": 16, "batch": 4}
    nanolm.train(text, out=words, steps=20, tokenizer="byte", **shape)  # type: ignore[arg-type]
    names = ("log.txt", "config.toml", "run.json", "metrics.jsonl", "samples.md")
    for file in [*(labels / name for name in names[:-1]), *(words / name for name in names)]:
        found = file.read_text(encoding="utf-8")
        assert not OBEYED.findall(found), file.name
        assert "owned" in found or file.name not in ("log.txt", "samples.md")
