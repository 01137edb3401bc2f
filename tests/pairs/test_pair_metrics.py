"""Metrics of generated targets, against sacrebleu and against plain definitions."""

import random
from functools import cache
from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanolm.pairs.metrics import (
    bleu,
    by_length,
    chrf,
    edit_distance,
    length_chart,
    score_pairs,
    split_words,
)

TEXT = """
3- the a of Katze don't well-known e-mail 1990-91 3-D -5 1,000.50 .5 5. ... ,, , . ! ? it's 1. .a
&amp; &quot;x&quot; &lt;b&gt; &amp;lt; <skipped> A&B [a] {b} c|d x_y `q` 50% $5 #1 a/b U.S.A. a.b
Straße naïve 北京 你好。 日本語、 שלום мир 🙂 e\u0301 “quoted” — … ½ \u0663. \uff11.\uff12 x² -- '
"""
WORDS = [*TEXT.split(), "\u00a0", "\u3000", "\t", "-\n", "\n"]


def random_text(rng: random.Random, longest: int = 14) -> str:
    return rng.choice(["", " "]).join(
        rng.choice(WORDS) + " " for _ in range(rng.randrange(longest))
    )


def changed(rng: random.Random, text: str) -> str:
    """A hypothesis for a reference: equal, shorter, shuffled or with other words."""
    words = text.split(" ")
    kind = rng.randrange(5)
    if kind == 1:
        rng.shuffle(words)
    elif kind == 2:
        words = words[: rng.randrange(len(words) + 1)]
    elif kind == 3:
        words = [rng.choice(WORDS) if rng.random() < 0.3 else word for word in words]
    elif kind == 4:
        return random_text(rng)
    return " ".join(words)


def test_bleu_and_chrf_are_those_of_sacrebleu() -> None:
    sacrebleu = pytest.importorskip("sacrebleu", reason="the reference for BLEU and chrF")
    rng = random.Random(0)
    scores = set()
    for _ in range(500):
        count, most = rng.choice([1, 1, 2, 10]), rng.choice([1, 1, 1, 2, 3])
        references = [[random_text(rng) for _ in range(rng.randint(1, most))] for _ in range(count)]
        hypotheses = [changed(rng, rng.choice(row)) for row in references]
        columns = list(zip_longest(*references))
        score = bleu(hypotheses, references)
        assert score == sacrebleu.corpus_bleu(hypotheses, columns).score
        assert chrf(hypotheses, references) == sacrebleu.corpus_chrf(hypotheses, columns).score
        scores.add(score)
    assert len(scores) > 200  # not all 0 or 100


@given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=5))
def test_any_text_has_the_scores_of_sacrebleu(pairs: list[tuple[str, str]]) -> None:
    sacrebleu = pytest.importorskip("sacrebleu", reason="the reference for BLEU and chrF")
    hypotheses, references = map(list, zip(*pairs, strict=True))
    assert bleu(hypotheses, references) == sacrebleu.corpus_bleu(hypotheses, [references]).score
    assert chrf(hypotheses, references) == sacrebleu.corpus_chrf(hypotheses, [references]).score


def test_words_are_those_of_mteval() -> None:
    text = 'Mr. Smith\'s "well-known" 1,000.5 dogs (1990-91) cost &lt; 5%, say.'
    expected = 'Mr . Smith\'s " well-known " 1,000.5 dogs ( 1990 - 91 ) cost < 5 % , say .'
    assert " ".join(split_words(text)) == expected


def test_perfect_empty_and_missing_targets() -> None:
    text = "a perfect translation of four words or more"
    assert score_pairs([text], [text]).bleu == pytest.approx(100)
    perfect = score_pairs([text], [[text, "another"]])
    assert (perfect.exact, perfect.edit_distance, perfect.symbol_edit_distance) == (1, 0, 0)
    assert perfect.chrf == 100
    empty = score_pairs([""], [text])
    assert (empty.bleu, empty.chrf, empty.exact, empty.edit_distance) == (0, 0, 0, 1)
    nothing = score_pairs([], [])
    assert (nothing.bleu, nothing.chrf, nothing.exact, nothing.edit_distance) == (0, 0, 0, 0)


def test_any_pronunciation_is_right_and_each_word_counts_once() -> None:
    sources = ["either", "either", "cat"]
    references = ["IY DH ER", "AY DH ER", "K AE T"]
    scores = score_pairs(["AY DH ER", "AY DH ER", "K AE D"], references, sources)
    assert scores.exact == 1 / 2
    assert scores.symbol_edit_distance == 1 / 6
    assert score_pairs(["AY DH ER", "AY DH ER", "K AE D"], references).exact == 1 / 3


@cache
def plain_distance(a: str, b: str) -> int:
    if not a or not b:
        return len(a) + len(b)
    replaced = plain_distance(a[1:], b[1:]) + (a[0] != b[0])
    return min(replaced, plain_distance(a[1:], b) + 1, plain_distance(a, b[1:]) + 1)


@given(st.text("abc", max_size=12), st.text("abc", max_size=12))
def test_edit_distance_by_its_definition(a: str, b: str) -> None:
    assert edit_distance(a, b) == plain_distance(a, b)


def test_edit_distance_of_long_texts() -> None:
    rng = random.Random(0)
    text = "".join(rng.choice("ab cd") for _ in range(3000))
    assert edit_distance(text, text[:1000] + "x" + text[1000:2500] + text[2501:]) == 2


def test_scores_by_length_of_the_source() -> None:
    sources = ["x" * n for n in range(1, 101)]
    references = [f"the target number {n} of them all" for n in range(1, 101)]
    hypotheses = [text if n <= 80 else "wrong" for n, text in enumerate(references, start=1)]
    groups = by_length(hypotheses, references, sources)
    assert [(each.shortest, each.longest, each.count) for each in groups] == [
        (first, first + 19, 20) for first in (1, 21, 41, 61, 81)
    ]
    assert [each.exact for each in groups] == [1, 1, 1, 1, 0]
    assert groups[0].mean_length == 10.5
    whole = by_length(hypotheses, references, sources, [7] * 100)
    assert len(whole) == 1
    assert whole[0].bleu == score_pairs(hypotheses, references).bleu
    assert by_length([], [], []) == []


def test_the_picture_has_a_curve_for_each_model() -> None:
    sources = ["x" * n for n in range(1, 11)]
    good = by_length(sources, sources, sources)
    bad = by_length(["y"] * 10, sources, sources)
    picture = length_chart("By length", {"good": good, "bad": bad}, "tokens").svg
    assert picture.count("good</text>") == 2
    assert "source length in tokens" in picture
