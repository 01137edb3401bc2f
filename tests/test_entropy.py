"""What a model can learn of a grammar that is known: the truth, and how close training comes."""

import json
import math
import runpy
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Cli

DATA = Path(__file__).parents[1] / "data"
grammar = SimpleNamespace(**runpy.run_path(str(DATA / "generate.py")))


def test_probabilities_are_those_of_the_draws() -> None:
    probabilities = grammar.tiny_probabilities()
    assert len(probabilities) == 1608
    assert sum(probabilities.values()) == pytest.approx(1)
    entropy = -sum(p * math.log(p) for p in probabilities.values())
    assert entropy == pytest.approx(grammar.tiny_entropy())
    draws = 100_000
    drawn = Counter(grammar.fresh_tiny(draws))
    assert drawn.keys() <= probabilities.keys()
    expected = {sentence: draws * p for sentence, p in probabilities.items()}
    chi2 = sum((drawn[sentence] - n) ** 2 / n for sentence, n in expected.items())
    free = len(expected) - 1  # how much chi2 should be, give or take the root of twice as much
    assert abs(chi2 - free) < 4 * math.sqrt(2 * free)


def test_fresh_sentences_are_mostly_new() -> None:
    known = set((DATA / "tiny.txt").read_text().splitlines())
    probabilities = grammar.tiny_probabilities()
    assert len(known) == 145
    assert sum(probabilities[sentence] for sentence in known) == pytest.approx(0.244, abs=0.001)
    fresh = grammar.fresh_tiny(1000)
    assert 0.7 < sum(sentence not in known for sentence in fresh) / len(fresh) < 0.8


def test_bits_per_byte_count_the_line_ends() -> None:
    # One of two, four and five, and then the end, one of two: 80 alike, of 15 bytes.
    assert grammar.tiny_bits_per_byte(["the cat sings."]) == pytest.approx(math.log2(80) / 15)
    fresh = grammar.fresh_tiny(20_000)
    probabilities = grammar.tiny_probabilities()
    length = sum(p * len(sentence + "\n") for sentence, p in probabilities.items())
    expected = grammar.tiny_entropy() / math.log(2) / length
    assert grammar.tiny_bits_per_byte(fresh) == pytest.approx(expected, rel=0.005)


@pytest.mark.slow
def test_nano_comes_close_to_the_entropy_of_the_grammar(cli: Cli, tmp_path: Path) -> None:
    fresh = grammar.fresh_tiny(1000)
    (tmp_path / "fresh.txt").write_text("\n".join(fresh) + "\n")
    start = time.monotonic()
    shown = cli("train", "embedded:tiny", "--preset", "nano", "--device", "cpu", "--json")
    seconds = time.monotonic() - start
    assert shown.returncode == 0, shown.stderr
    run = json.loads(shown.stdout)["run"]
    # Windows overlap: whoever begins to read amid a sentence knows less than the grammar does.
    shown = cli("eval", run, "fresh.txt", "--stride", 8, "--json")
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert found["bytes"] == sum(len(sentence) + 1 for sentence in fresh)
    assert found["bits_per_byte"] < 1.2 * grammar.tiny_bits_per_byte(fresh)
    assert seconds < 30
