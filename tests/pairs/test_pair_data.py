"""Pairs on their way to a model: the split, the token ids, and the batches."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanolm.errors import DataError, UsageError
from nanolm.pairs.data import (
    EncodedPairs,
    PairBatches,
    PairSplit,
    Sequences,
    encode_pairs,
    hold_out,
    split_pairs,
)
from nanolm.pairs.recipe import choose_settings
from nanolm.pairs.settings import PairSettings
from nanolm.text.pairs import Pairs
from nanolm.text.tokenizer import train_tokenizer


def quiet(*_: object) -> None:
    pass


def split(*pairs: str, **files: tuple[str, ...]) -> PairSplit:
    return split_pairs(PairSettings(pairs=pairs, **files), quiet)  # type: ignore[arg-type]


def written(folder: Path, name: str, lines: list[str]) -> str:
    (folder / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(folder / name)


def encoded(lengths: list[tuple[int, int]], multiple: int = 1) -> EncodedPairs:
    """Pairs with these lengths of source and decoder input; every id tells its pair."""
    sides = []
    for side in (0, 1):
        counts = np.array([pair[side] + side for pair in lengths], dtype=np.int64)
        ids = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        sides.append(Sequences(ids, np.cumsum(counts) - counts, counts, padding=-1))
    return EncodedPairs(sides[0], sides[1], multiple)


def some_lengths(count: int, seed: int = 3) -> list[tuple[int, int]]:
    random = np.random.default_rng(seed)
    source = random.integers(1, 60, count)
    target = np.maximum(1, source + random.integers(-8, 9, count))
    return list(zip(source.tolist(), target.tolist(), strict=True))


def test_no_date_of_the_validation_is_trained_on() -> None:
    parts = split("embedded:dates")
    assert (len(parts.train), len(parts.val)) == (9_500, 500)
    assert not set(parts.train.targets) & set(parts.val.targets)
    assert parts.val.sources == split("embedded:dates").val.sources
    assert parts.test is None
    assert parts.notes == []
    assert len(parts.examples) == 3


def test_few_targets_do_not_keep_pairs_together() -> None:
    pairs = Pairs([f"{n // 2} + 0" for n in range(400)], [str(n % 2) for n in range(400)])
    train, val = hold_out(pairs)
    assert len(val) == 80  # at least 100, but never more than a fifth
    assert not set(train.sources) & set(val.sources)
    assert len(hold_out(pairs, 0.05)[1]) == 20


def test_the_split_depends_only_on_the_texts() -> None:
    pairs = Pairs([f"source {n}" for n in range(1000)], [f"target {n}" for n in range(1000)])
    _, val = hold_out(pairs)
    assert len(val) == 100
    _, again = hold_out(pairs.part(range(999, -1, -1)))
    assert sorted(val.sources) == sorted(again.sources)


def test_too_few_pairs() -> None:
    with pytest.raises(DataError, match="3 pairs with 1 distinct source: too few"):
        hold_out(Pairs(["a", "a", "a"], ["b", "c", "b"]))


def test_validation_and_test_files(tmp_path: Path) -> None:
    words = [f"word {n}" for n in range(20)]
    for name in ("train", "val", "test"):
        for language in ("de", "en"):
            lines = [f"{language} {word}" for word in words]
            lines = lines if name == "train" else [*lines[:2], f"{language} {name}"]
            written(tmp_path, f"{name}.{language}", lines)
    train, val, test = (
        tuple(str(tmp_path / f"{name}.{language}") for language in ("de", "en"))
        for name in ("train", "val", "test")
    )
    parts = split(*train, val=val, test=test)
    assert (parts.val.sources[2], parts.val.targets[2]) == ("de val", "en val")
    assert parts.test
    assert (parts.test.sources[2], parts.test.targets[2]) == ("de test", "en test")
    assert len(parts.train) == 20
    assert parts.notes == [
        "2 of 3 validation sources are also in the training set",
        "2 of 3 test sources are also in the training set",
    ]
    with pytest.raises(
        UsageError, match=r"(?s)--val .*none.de .*none.en: .*none.en does not exist"
    ):
        split(*train, val=(str(tmp_path / "none.de"), str(tmp_path / "none.en")))


def test_token_ids() -> None:
    pairs = Pairs(["ab", "abba a"], ["b", "ba" * 5])
    tokenizer = train_tokenizer(["ab "], "char")
    other = train_tokenizer(["abc "], "char")
    end, pad = tokenizer.end_of_text, tokenizer.padding
    source, target = encode_pairs(pairs, tokenizer, other, 20, 1, quiet).rows(np.array([0, 1]))
    assert source[0].tolist() == [*other.encode("ab"), other.end_of_text, *[other.padding] * 4]
    assert source[1].tolist() == [*other.encode("abba a"), other.end_of_text]
    assert target[0].tolist() == [end, *tokenizer.encode("b"), end, *[pad] * 9]
    assert target[1].tolist() == [end, *tokenizer.encode("ba" * 5), end]
    both = encode_pairs(pairs, tokenizer, tokenizer, 20, 8, quiet)
    source, target = both.rows(np.array([0, 1]))
    assert (source.shape, target.shape) == ((2, 8), (2, 17))  # the decoder's input is 16 long
    assert both.tokens(np.array([0, 1])) == 3 + 2 + 7 + 11
    assert (source != pad).sum() + (target[:, 1:] != pad).sum() == 23


def test_long_pairs_are_truncated() -> None:
    pairs = Pairs(["ab", "abba a", "a"], ["b", "b", "ba" * 5])
    tokenizer = train_tokenizer(["ab "], "char")
    short = encode_pairs(pairs, tokenizer, tokenizer, 4, 1, quiet)
    assert short.truncated == 2
    source, target = short.rows(np.arange(3))
    end = tokenizer.end_of_text
    assert source[1].tolist() == [*tokenizer.encode("abb"), end]
    assert target[2].tolist() == [end, *tokenizer.encode("bab")]  # it did not end there
    assert [encode_pairs(pairs, tokenizer, tokenizer, n, 1, quiet).truncated for n in (11, 12)] == [
        1,
        0,
    ]
    assert encode_pairs(pairs, tokenizer, tokenizer, 1, 1, quiet).target_lengths.tolist() == [1] * 3


def test_a_model_can_generate_the_longest_target_of_its_training() -> None:
    """With its start and its end, it is as long as the context that is chosen for it."""
    tokenizer = train_tokenizer(["ab"], "char")
    for letters, context in ((62, 64), (63, 128)):
        pairs = Pairs(["ab"], ["a" * letters])
        tokens, longest = encode_pairs(pairs, tokenizer, tokenizer, 512, 1, quiet).size()
        assert (tokens, longest) == (3 + letters + 1, letters + 2)
        asked = PairSettings(pairs=("x.tsv",), device="cpu")
        assert choose_settings(asked, None, tokens, longest)[0].context == context


@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=200),
    st.sampled_from([1, 8]),
    st.integers(1, 2000),
)
def test_an_epoch_has_every_pair_once(
    lengths: list[tuple[int, int]], multiple: int, tokens: int
) -> None:
    pairs = encoded(lengths, multiple)
    batches = PairBatches(pairs, tokens, seed=1)
    for epoch in range(2):
        all_rows = [batches[epoch * batches.in_epoch + n] for n in range(batches.in_epoch)]
        assert sorted(np.concatenate(all_rows).tolist()) == list(range(len(lengths)))
        for rows in all_rows:
            source, target = pairs.rows(rows)
            assert len(rows) == 1 or source.size + target[:, 1:].size <= tokens
            assert [*source[:, 0]] == [*target[:, 0]] == [*rows]


def test_batches_are_a_function_of_seed_and_index() -> None:
    pairs = encoded(some_lengths(2000))
    one, two = PairBatches(pairs, 1000, seed=1), PairBatches(pairs, 1000, seed=1)
    count = one.in_epoch
    forward = [one[n].tolist() for n in range(3 * count)]
    assert [two[n].tolist() for n in range(3 * count - 1, -1, -1)][::-1] == forward
    assert forward[:count] != forward[count : 2 * count]
    assert forward[0] != PairBatches(pairs, 1000, seed=2)[0].tolist()
    # Pairs meet others from one epoch to the next.
    together = [{frozenset(rows) for rows in forward[n * count :][:count]} for n in range(2)]
    assert len(together[0] & together[1]) < count / 2


@pytest.mark.parametrize(("multiple", "least", "most_shapes"), [(1, 0.85, 200), (8, 0.75, 60)])
def test_there_is_little_padding_in_few_shapes(
    multiple: int, least: float, most_shapes: int
) -> None:
    pairs = encoded(some_lengths(20_000), multiple)
    batches = PairBatches(pairs, 4096, seed=1)
    shapes, real = Counter[tuple[int, ...]](), 0
    for rows in (batches[n] for n in range(batches.in_epoch)):
        shapes[len(rows), *pairs.shape(rows)] += 1
        real += pairs.tokens(rows)
    padded = sum(rows * (source + target) * n for (rows, source, target), n in shapes.items())
    assert real > least * padded
    assert padded > 0.9 * 4096 * batches.in_epoch
    assert len(shapes) <= most_shapes
    if multiple == 8:
        assert sum(n for (rows, _, _), n in shapes.items() if rows % 8) <= 1  # the last one
