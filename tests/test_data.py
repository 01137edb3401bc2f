"""The embedded data: made by its generator, and what it is said to be."""

import importlib.util
import math
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import ModuleType

import pytest
from conftest import Cli

import nanolm

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DATA / "generate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generator_makes_these_bytes(tmp_path: Path) -> None:
    script = [sys.executable, str(DATA / "generate.py")]
    assert subprocess.run([*script, "--check"]).returncode == 0
    assert subprocess.run([*script, "--out", str(tmp_path)]).returncode == 0
    (tmp_path / "tiny.txt").write_text("changed")
    found = subprocess.run([*script, "--check", "--out", str(tmp_path)], capture_output=True)
    assert found.returncode == 1
    assert b"tiny.txt" in found.stdout + found.stderr


def test_tiny(generator: ModuleType) -> None:
    text = (DATA / "tiny.txt").read_text()
    assert 4_500 < len(text) < 5_500
    assert len(set(text.replace(".", "").split())) == 12
    assert all(generator.tiny_allows(line) for line in text.splitlines())
    assert not generator.tiny_allows("the sees cat.")
    assert generator.tiny_allows_prefix("the cat sees")
    assert not generator.tiny_allows_prefix("the sees")


def test_the_entropy_of_the_grammar(generator: ModuleType) -> None:
    dice = generator.Dice(5)
    drawn = Counter(generator.tiny_sentence(dice) for _ in range(60_000))
    estimate = -sum(n / 60_000 * math.log(n / 60_000) for n in drawn.values())
    assert generator.tiny_entropy() == pytest.approx(estimate, abs=0.03)


def test_stories() -> None:
    stories = (DATA / "stories.txt").read_text().split("\n***\n")
    assert 900_000 < sum(map(len, stories)) < 1_100_000
    assert len(set(stories)) == len(stories) > 500
    assert all('"' in story for story in stories)


def test_in_the_reviews_only_word_order_decides() -> None:
    rows = [line.split("\t") for line in (DATA / "reviews.tsv").read_text().splitlines()]
    assert rows.pop(0) == ["text", "label"]
    assert len(rows) >= 4_000
    assert len({text for text, _ in rows}) == len(rows)
    words: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for text, label in rows:
        words[" ".join(sorted(re.findall(r"[a-z']+", text.lower())))][label] += 1
    # The same words, equally often good and bad: counting them tells nothing.
    assert all(labels["negative"] == labels["positive"] for labels in words.values())


@pytest.mark.slow
def test_the_course_model_learns_the_grammar(
    generator: ModuleType, cli: Cli, tmp_path: Path
) -> None:
    shown = cli("train", DATA / "tiny.txt", "--preset", "nano")
    assert shown.returncode == 0, shown.stderr
    model = nanolm.load(tmp_path / "runs/tiny")
    prompts = ("the", "a small", "the cat sleeps", "a bird sees the dog")
    texts = [prompt + model.generate(prompt, greedy=True) for prompt in prompts]
    shown = cli("sample", "--prompt", prompts[0], "--greedy")
    assert shown.stdout == texts[0] + "\n"
    right = []
    for text in texts:
        *sentences, last = text.split("\n")
        assert len(sentences) > 10
        right += [generator.tiny_allows(sentence) for sentence in sentences]
        assert generator.tiny_allows(last) or generator.tiny_allows_prefix(last), last
    assert sum(right) > 0.9 * len(right), texts  # not quite all: it saw 1,119 tokens
