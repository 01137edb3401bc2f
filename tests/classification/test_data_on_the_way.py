"""Preparing labeled texts: stratified splits, truncation, and batches by length."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanolm.classification.data import (
    LengthBatches,
    Texts,
    Truncation,
    encode,
    known_labels,
    sorted_labels,
    split_data,
    stratified,
)
from nanolm.classification.settings import FinetuneSettings
from nanolm.errors import DataError
from nanolm.text.tokenizer import train_tokenizer


def quiet(what: str, done: int, total: int) -> None:
    pass


def texts_of(*counts: int) -> Texts:
    truth = np.repeat(np.arange(len(counts)), counts)
    return Texts([f"text {number}" for number in range(len(truth))], truth)


@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=5), st.floats(0.05, 0.5), st.integers(0, 9)
)
@settings(max_examples=100, deadline=None)
def test_a_split_has_the_same_share_of_each_label(
    counts: list[int], fraction: float, seed: int
) -> None:
    whole = texts_of(*counts)
    train, held_out = stratified(whole, fraction, seed)
    assert sorted(train.texts + held_out.texts) == sorted(whole.texts)
    for label, count in enumerate(counts):
        there = int((held_out.truth == label).sum())
        assert there == min(max(1, round(fraction * count)), count - 1)
    again = stratified(whole, fraction, seed)[1]
    assert again.texts == held_out.texts


def test_another_seed_is_another_split() -> None:
    whole = texts_of(50, 50)
    assert stratified(whole, 0.2, 1)[1].texts != stratified(whole, 0.2, 2)[1].texts


def test_the_first_rows_are_taken_and_then_split(tmp_path: Path) -> None:
    file = tmp_path / "data.tsv"
    lines = [f"a row that is number {n} here\t{n % 2}\n" for n in range(100)]
    file.write_text("text\tlabel\n" + "".join(lines))
    split = split_data(
        FinetuneSettings(data=(str(file),), limit=40, val_fraction=0.25, sentiment=True), quiet
    )
    assert split.labels == ("negative", "positive")
    assert (len(split.train), len(split.val)) == (30, 10)
    assert int(split.val.truth.sum()) == 5
    seen = {text.split()[5] for text in split.train.texts + split.val.texts}
    assert seen == {str(number) for number in range(40)}


def test_files_of_their_own_and_what_is_in_two_of_them(tmp_path: Path) -> None:
    def write(name: str, rows: list[tuple[str, str]]) -> str:
        file = tmp_path / name
        file.write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows))
        return str(file)

    rows = [(f"this is text number {n}", "xy"[n % 2]) for n in range(20)]
    train = write("train.tsv", rows)
    val = write("val.tsv", [("quite another text", "y"), rows[2], (rows[3][0], "x")])
    test = write("test.tsv", [("and one more text", "y"), ("the last of them", "x")])
    split = split_data(FinetuneSettings(data=(train,), val=val, test=test), quiet)
    assert (len(split.train), len(split.val), len(split.test or [])) == (20, 3, 2)
    assert split.notes == [
        "2 of 3 validation texts are also in the training set, 1 of them with a different label"
    ]
    strange = write("strange.tsv", [("what is this", "z"), ("and this here", "x")])
    with pytest.raises(DataError, match=r"--test .* has labels that are not in .*: z"):
        split_data(FinetuneSettings(data=(train,), val=val, test=strange), quiet)


def test_what_a_classifier_knows_labels_by() -> None:
    three = ("negative", "neutral", "positive")
    assert known_labels({"positive", "neutral"}, three, "x")["positive"] == 2
    assert known_labels({"0", "2"}, three, "x")["2"] == 2
    assert known_labels({"-1", "1"}, three, "x")["1"] == 2
    with pytest.raises(DataError, match="0, 1 could mean more than one"):
        known_labels({"0", "1"}, three, "x")
    assert known_labels({"1"}, ("negative", "positive"), "x")["1"] == 1
    with pytest.raises(DataError, match="does not know: blue"):
        known_labels({"blue"}, three, "x")


def test_labels_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "all.tsv"
    file.write_text("text\tlabel\n" + "".join(f"some text number {n}\tx{n}\n" for n in range(30)))
    asked = FinetuneSettings(data=(str(file),), val_fraction=0.2, label_column="label")
    with pytest.raises(DataError, match="no label occurs twice"):
        split_data(asked, quiet)


def test_a_label_file_is_that_of_the_data_alone(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("".join(f"some text number {n}\n" for n in range(30)))
    (tmp_path / "labels.txt").write_text("".join(f"{n % 2}\n" for n in range(30)))
    (tmp_path / "val.tsv").write_text("text\tlabel\nquite another\t1\nand one more\t0\n")
    asked = FinetuneSettings(
        data=(str(tmp_path / "texts.txt"),),
        label_file=str(tmp_path / "labels.txt"),
        val=str(tmp_path / "val.tsv"),
    )
    split = split_data(asked, quiet)
    assert split.val.truth.tolist() == [1, 0]
    assert (len(split.train), split.labels) == (30, ("0", "1"))


def test_labels_in_order() -> None:
    assert sorted_labels({"10", "9", "-1"}) == ("-1", "9", "10")
    assert sorted_labels({"b", "a", "10"}) == ("10", "a", "b")


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 1))
@settings(max_examples=200, deadline=None)
def test_long_texts_are_cut_by_the_rule(length: int, context: int, begin: int) -> None:
    ids = list(range(length + begin))
    head, tail, windows = (
        Truncation(context, rule).windows(ids, begin) for rule in ("head", "tail", "windows")
    )
    most = max(context, begin + 1)
    assert all(len(window) <= most for window in (*head, *tail, *windows))
    if len(ids) <= context:
        assert head == tail == windows == [ids]
        return
    assert head[0] == ids[: len(head[0])]
    assert tail[0][begin:] == ids[-(len(tail[0]) - begin) :]
    assert [id for window in windows for id in window[begin:]] == ids[begin:]
    assert all(window[:begin] == ids[:begin] for window in (*tail, *windows))
    sizes = [len(window) for window in windows]
    assert max(sizes) - min(sizes) <= 1


def test_batches_have_every_text_once_and_little_filling() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 60, 3000)
    batches = LengthBatches(lengths, 32, seed=5)
    first = [batches[index] for index in range(batches.in_epoch)]
    whole = np.concatenate(first)
    assert len(whole) == 32 * batches.in_epoch
    assert set(whole.tolist()) == set(range(3000))
    filled = sum(int(lengths[rows].max()) * len(rows) for rows in first)
    assert filled < 1.1 * lengths[whole].sum()
    # A pure function of seed and index; a different order in the next epoch.
    other = LengthBatches(lengths, 32, seed=5)
    for index in (200, 3, 93, 94):
        assert np.array_equal(other[index], batches[index])
    assert not np.array_equal(batches[batches.in_epoch], batches[0])
    means = [lengths[rows].mean() for rows in first]
    assert np.corrcoef(means[:-1], means[1:])[0, 1] < 0.5  # short and long ones alternate


def test_rows_are_filled_up_with_padding_at_the_end() -> None:
    tokenizer = train_tokenizer([], "byte")
    texts = Texts(["a", "bcd", "efghijklmnop"], np.array([1, 0, 1]))
    data = encode(texts, tokenizer, Truncation(5, "windows"), quiet, multiple=4)
    assert data.text.tolist() == [0, 1, 2, 2, 2]
    ids, lengths, truth = data.rows(np.array([1, 0, 4]))
    assert ids.shape == (3, 4)
    assert lengths.tolist() == [3, 1, 4]
    assert truth.tolist() == [0, 1, 1]
    padding = tokenizer.padding
    assert ids[0].tolist() == [*b"bcd", padding]
    assert ids[1].tolist() == [*b"a", padding, padding, padding]
    assert ids[2].tolist() == [*b"mnop"]
