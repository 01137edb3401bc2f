"""Sources with weights: their names, and the windows that come from each."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import corpus_of
from hypothesis import given
from hypothesis import strategies as st

from nanolm.text import mix
from nanolm.text.mix import Part, parse, share_out
from nanolm.text.store import Prepared, TextRequest, prepare_tokens
from nanolm.text.tokens import Batches, interleaved
from nanolm.text.vocabulary import count_mix
from nanolm.training.distributed import World
from nanolm.training.feed import DeviceSource, Source

SIZES, WEIGHTS = (2_000, 300, 5_000), (0.5, 0.3, 0.2)


@pytest.fixture
def parts() -> tuple[Part, ...]:
    facts = [{"size": size, "train": size, "val": 0} for size in SIZES]
    names = [f"{name}:{weight}" for name, weight in zip("abc", WEIGHTS, strict=True)]
    return mix.make_parts(names, facts)


def batches(parts: tuple[Part, ...], batch: int = 1, rows: slice = slice(None)) -> Batches:
    return Batches(np.arange(sum(SIZES), dtype=np.uint16), 9, batch, 3, rows, parts)


@pytest.mark.parametrize(
    ("name", "source", "weight"),
    [
        ("news.txt:0.7", "news.txt", 0.7),
        ("news.txt:7", "news.txt", 7),
        ("letters/:.5", "letters/", 0.5),
        ("a:b:1e-2", "a:b", 0.01),
        ("-:0.5", "-", 0.5),
        ("embedded:tiny:2", "embedded:tiny", 2),
        ("hf://owner/name:0.3", "hf://owner/name", 0.3),
        ("http://host:8000/x.txt:0.3", "http://host:8000/x.txt", 0.3),
        ("http://host:8000", "http://host:8000", None),
        ("http://host:8000/x.txt", "http://host:8000/x.txt", None),
        ("C:\\x", "C:\\x", None),
        ("C:\\x:0.5", "C:\\x", 0.5),
        ("embedded:tiny", "embedded:tiny", None),
        ("news.txt:", "news.txt:", None),
        (":0.5", ":0.5", None),
    ],
)
def test_a_weight_is_a_final_number(name: str, source: str, weight: float | None) -> None:
    assert parse(name) == (source, weight)


def test_a_path_that_exists_has_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("day:1").touch()
    assert parse("day:1") == ("day:1", None)
    assert parse("day:1:2") == ("day:1", 2)


@pytest.mark.parametrize(
    ("corpus", "problem"),
    [
        (["a:1", "b"], "b has no weight, but other sources have one; try b:1"),
        (["a:1", "b:0"], "b:0: a weight must be a positive number; try b:1"),
        (["a:1", "b:-2"], "b:-2: a weight must be a positive number; try b:1"),
        (["a:1", "b:1e999"], "b:1e999: a weight must be a positive number; try b:1"),
        (["a:1", "a:2"], "a is listed twice in the corpus; list it once"),
    ],
)
def test_problems_say_what_to_type(corpus: list[str], problem: str) -> None:
    found = mix.problems(corpus)
    assert len(found) == 1 and found[0].startswith(problem)
    assert mix.problems(["a:1", "b:2"]) == mix.problems(["a", "b"]) == []


def test_weights_are_normalized() -> None:
    assert mix.weights(["a:3", "b:1"]) == (0.75, 0.25)
    assert mix.weights(["a", "b"]) == mix.weights(["a:3"]) == ()


def test_parts_are_named_as_briefly_as_possible() -> None:
    assert mix.part_names(["/x/a.txt:1", "/y/b.txt:1", "-:1"]) == ["a.txt", "b.txt", "stdin"]
    assert mix.part_names(["/x/a.txt:1", "/y/a.txt:1"]) == ["x/a.txt", "y/a.txt"]
    assert mix.part_names(["a:1", "a:2"]) == ["a", "a"]


@given(st.lists(st.integers(1, 100), min_size=2, max_size=6), st.integers(0, 2**40))
def test_windows_follow_the_weights(given: list[int], first: int) -> None:
    """In 10,000 windows from anywhere; and no part skips or repeats one of its windows."""
    weights = [weight / sum(given) for weight in given]
    numbers = np.arange(first, first + 10_000, dtype=np.uint64)
    chosen, inside = interleaved(numbers, weights)
    for part, weight in enumerate(weights):
        own = inside[chosen == part]
        assert len(own) == pytest.approx(10_000 * weight, abs=len(weights))
        assert (np.diff(own) == 1).all()


def test_a_part_is_visited_without_repetition(parts: tuple[Part, ...]) -> None:
    all_ = batches(parts)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for index in range(2_000):
        ids = all_[index][0].astype(int)
        assert (np.diff(ids) == 1).all()
        which = next(n for n, part in enumerate(parts) if ids[0] < part.train.stop)
        assert parts[which].train.start <= ids[0] and ids[-1] < parts[which].train.stop
        seen[which].append(int(ids[0]))
    for which, part in enumerate(parts):
        windows = (part.tokens - 9) // 9
        for start in range(0, len(seen[which]) - windows, windows):
            epoch = sorted(seen[which][start : start + windows])
            assert set(np.diff(epoch)) == {9}
    assert len(seen[1]) / ((300 - 9) // 9) == pytest.approx(parts[1].epochs(2_000 * 9), abs=1)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_processes_share_the_same_batches(parts: tuple[Part, ...], size: int) -> None:
    alone = batches(parts, 7)
    shares = [batches(parts, 7, World(rank, size).rows(7)) for rank in range(size)]
    for index in range(200):
        assert (np.concatenate([share[index] for share in shares]) == alone[index]).all()


def test_every_source_reads_the_same_tokens(parts: tuple[Part, ...]) -> None:
    plain, on_device = Source(batches(parts, 7)), DeviceSource(batches(parts, 7), "cpu")
    for index in (0, 5, 2):
        assert (plain.ids(plain.batch(index)) == on_device.ids(on_device.batch(index))).all()


def test_one_part_gives_the_batches_of_a_plain_text() -> None:
    tokens = np.arange(1_000, dtype=np.uint16)
    part = Part("a", 1.0, 1_000, slice(0, 1_000), slice(0, 0))
    for index in range(50):
        mixed = Batches(tokens, 9, 4, 3, parts=(part,))[index]
        assert (mixed == Batches(tokens, 9, 4, 3)[index]).all()


def test_an_epoch_is_the_mean_by_weight(parts: tuple[Part, ...]) -> None:
    tokens = mix.epoch_tokens(parts)
    assert sum(part.weight * part.epochs(tokens) for part in parts) == pytest.approx(1)
    names = [f"{size}:{size}" for size in SIZES]
    facts = [{"size": size, "train": size, "val": 0} for size in SIZES]
    assert mix.epoch_tokens(mix.make_parts(names, facts)) == pytest.approx(sum(SIZES))


def test_what_a_small_part_cannot_use_goes_to_the_others() -> None:
    assert share_out(100, [1000, 1000], [0.7, 0.3]) == [70, 30]
    assert share_out(100, [1000, 10], [0.5, 0.5]) == [90, 10]
    assert share_out(100, [60, 10, 100], [0.5, 0.4, 0.1]) == [60, 10, 30]
    assert share_out(110, [100, 10], [0.1, 0.9]) == [100, 10]


def test_word_counts_follow_the_weights() -> None:
    with corpus_of("a a a a") as one, corpus_of("b " * 400) as other:
        words = count_mix([(one, 0.5), (other, 0.5)], lambda *_: None)
    kinds = Counter[bytes]()
    for word, count in words.items():
        kinds[word.strip()] += count
    assert kinds[b"a"] == pytest.approx(kinds[b"b"], rel=0.1)


def test_parts_are_prepared_once_and_split_one_by_one(tmp_path: Path) -> None:
    for name in ("one", "two"):
        written = (f"{name} has {n % 31} words and {n % 7} more.\n" for n in range(900))
        (tmp_path / f"{name}.txt").write_text("".join(written))

    def prepared(*weights: float, tokenizer: str = "char", **more: int) -> Prepared:
        corpus = [f"{tmp_path}/{n}.txt:{w}" for n, w in zip(("one", "two"), weights, strict=True)]
        request = TextRequest(tuple(corpus), tokenizer=tokenizer, **more)  # type: ignore[arg-type]
        return prepare_tokens(request, cache=tmp_path / "cache")

    text = prepared(3, 1)
    assert [part.weight for part in text.parts] == [0.75, 0.25]
    for part in text.parts:
        for tokens in (text.train[part.train], text.val[part.val]):
            lines = text.tokenizer.decode(tokens.tolist()).strip().splitlines()
            assert len(lines) > 9 and all(f"{part.name[:3]} has " in line for line in lines)
    assert text.parts[-1].train.stop == len(text.train) > text.tokens
    assert text.parts[-1].val.stop == len(text.val)
    assert prepared(1, 1).folder == text.folder
    assert prepared(1, 1).tokens != text.tokens
    bpe = [prepared(*weights, tokenizer="bpe", vocab_size=300) for weights in ((3, 1), (6, 2))]
    assert bpe[0].folder == bpe[1].folder
    small = prepared(3, 1, max_bytes=8_000)
    assert small.max_bytes == 8_000
    assert small.parts[0].size > 1.5 * small.parts[1].size
