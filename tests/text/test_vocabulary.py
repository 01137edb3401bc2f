import math
import random
from itertools import islice, pairwise

import numpy as np
import pytest
from conftest import corpus_of

from nanolm.text import vocabulary
from nanolm.text.vocabulary import choose_vocabulary, counted_bits, make_tokenizer


def quiet(what: str, done: int, total: int) -> None:
    pass


def test_a_tiny_text_gets_whole_words() -> None:
    with corpus_of("the cat sat on the mat\n" * 20) as corpus:
        tokenizer, choices = make_tokenizer(corpus, None, None, quiet)
    assert len(tokenizer.encode("the cat")) == 2
    assert [choice.value for choice in choices] == ["bpe", "all words"]


def test_a_text_of_few_words_gets_them_all_and_a_varied_one_fewer_tokens() -> None:
    dice = random.Random(1)

    def word(letters: str) -> str:
        return "".join(dice.choice(letters) for _ in range(dice.randint(4, 9)))

    few = [word("abcdefghijklmnop") for _ in range(1500)]
    regular = " ".join(dice.choice(few) for _ in range(40_000))
    varied = " ".join(word("abcdefghijklmnop") for _ in range(20_000))
    chosen = []
    for text in (regular, varied):
        with corpus_of(text) as corpus:
            choice, size = choose_vocabulary(corpus, quiet)
        assert size == choice.value
        assert f" at {size:,}" in choice.reason  # the measurements are recorded
        chosen.append(size)
    assert chosen == [4096, 512]


def test_a_large_text_is_sampled_and_gets_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with corpus_of("".join(f"line {n * n % 7919} of it\n" for n in range(20_000))) as corpus:
        _, measured = choose_vocabulary(corpus, quiet)
        monkeypatch.setattr(vocabulary, "MEASURED_BYTES", corpus.length // 17)
        choice, raised = choose_vocabulary(corpus, quiet)
        kept, not_raised = choose_vocabulary(corpus, quiet, most_doublings=0)
    assert measured and raised and not_raised
    assert raised == 4 * not_raised > measured
    assert "increased for" in choice.reason
    assert "no time to read all" in kept.reason


def test_many_epochs_of_a_small_text_suit_fewer_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = {512: 2.274, 1024: 2.236, 2048: 2.229}  # of 135 kB of Shakespeare
    tokens = {512: 64_378.0, 1024: 48_444.0, 2048: 39_582.0}
    monkeypatch.setattr(vocabulary, "measure_sizes", lambda *_: (tokens, bits))

    def chosen(size: int, seconds: float | None) -> int | None:
        monkeypatch.setattr(vocabulary, "MEASURED_BYTES", size)
        with corpus_of("four" * (size // 4)) as corpus:
            choice, number = choose_vocabulary(corpus, quiet, measured=size, seconds=seconds)
        if seconds and number != 1024:
            assert f"for about {'20' if seconds > 60 else '2'} epochs" in choice.reason
        return number

    assert chosen(135_000, None) == 1024
    assert chosen(135_000, 120) == chosen(135_000, math.inf) == 512
    assert chosen(135_000, 4) == 2048  # too little time for many epochs
    assert chosen(1_200_000, math.inf) == 1024


def test_where_there_is_no_time_to_measure() -> None:
    with corpus_of("".join(f"line {n * n % 7919} of it\n" for n in range(10_000))) as corpus:
        choice, size = choose_vocabulary(corpus, quiet, measured=False)
    assert size == choice.value == 1024
    assert "no time to measure" in choice.reason


def test_counted_bits_by_hand() -> None:
    """Token by token, with dictionaries."""
    dice = np.random.default_rng(3)
    train, val = dice.integers(0, 6, 300), dice.integers(0, 7, 80)  # 6 was never seen

    def chance(tokens: list[int], length: int) -> float:
        *before, last = tokens
        if length < 0:
            return 1 / 7
        context = tuple(before[len(before) - length :])
        follow = [
            int(train[n + length])
            for n in range(len(train) - length)
            if tuple(train[n : n + length]) == context
        ]
        shorter = chance(tokens, length - 1)
        if not follow:
            return shorter
        seen = max(0, follow.count(last) - 0.75)
        return (seen + 0.75 * len(set(follow)) * shorter) / len(follow)

    bits = 0.0
    for n in range(len(val)):
        tokens = val[max(0, n - 2) : n + 1].tolist()
        bits -= math.log2(chance(tokens, len(tokens) - 1))
    assert list(islice(counted_bits(train, val, 7), 3))[-1] == pytest.approx(bits)


def test_the_measurement_is_the_same_every_time() -> None:
    with corpus_of("some words and some more words\n" * 3000) as corpus:
        first, second = (choose_vocabulary(corpus, quiet) for _ in range(2))
    assert first == second


def test_characters_and_bytes() -> None:
    with corpus_of("abc", "cdé") as corpus:
        characters, choices = make_tokenizer(corpus, "char", None, quiet)
        assert [chr(token[0]) for token in characters.tokens[256:260]] == list("abcd")
        assert characters.vocab_size == 258 + 5
        assert choices == []
        assert make_tokenizer(corpus, "byte", None, quiet)[0].vocab_size == 258


def test_progress_moves_forward_to_the_end() -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    with corpus_of("some words and some more words, 1 2 3\n" * 3000) as corpus:
        make_tokenizer(
            corpus,
            None,
            None,
            lambda what, done, total: seen.setdefault(what, []).append((done, total)),
        )
    assert set(seen) == {"measuring vocabularies", "counting words", "learning merges"}
    for steps in seen.values():
        assert all(before[0] <= after[0] for before, after in pairwise(steps))
    assert seen["counting words"][-1] == (corpus.length, corpus.length)
