"""Prepare labeled texts for a model: split them, encode them and make batches.

>>> split = split_data(settings, report)
>>> encoded = encode(split.train, tokenizer, Truncation(256, "windows"), report, multiple=1)
>>> ids, lengths, truth = encoded.rows(LengthBatches(encoded.lengths, batch=32, seed=1)[0])
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from nanolm.choice import Report
from nanolm.classification.settings import FinetuneSettings
from nanolm.errors import DataError
from nanolm.formats import abridged, listed
from nanolm.text.labeled import RIGHT_COLUMN, Labeled, read_labeled
from nanolm.text.tokenizer import Tokenizer

Ints = npt.NDArray[np.int64]
POOLED_BATCHES = 50  # batches whose texts are sorted by length together

TWO, THREE = ("negative", "positive"), ("negative", "neutral", "positive")
SENTIMENTS = {  # common sentiment labels and their meaning
    ("0", "1"): TWO,
    ("-1", "1"): TWO,
    ("neg", "pos"): TWO,
    ("-1", "0", "1"): THREE,
    ("0", "1", "2"): THREE,
    ("0", "1", "2", "3", "4"): ("very negative", *THREE, "very positive"),
}
NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


@dataclass(frozen=True)
class Texts:
    texts: list[str]
    truth: Ints  # the label index of each

    def __len__(self) -> int:
        return len(self.texts)

    def part(self, rows: Ints) -> "Texts":
        return Texts([self.texts[row] for row in rows], self.truth[rows])


@dataclass(frozen=True)
class LabelSplit:
    """The training, validation and test texts."""

    labels: tuple[str, ...]
    train: Texts
    val: Texts
    test: Texts | None
    how: str  # one line on how the data was read
    examples: list[str]  # the first rows, for display
    notes: list[str]


def split_data(settings: FinetuneSettings, report: Report) -> LabelSplit:
    """Read all data, with a stratified split where no file is given."""
    reading = settings.reading()
    whole = read_labeled(settings.data, reading, report, settings.limit)
    written, count, notes = sorted_labels(set(whole.labels)), len(whole.labels), list(whole.notes)
    if len(written) == 1:
        more = "; --limit may be too low" if count == settings.limit else ""
        where = listed(settings.data, 5)
        raise DataError(
            f"{where}: only one label, {abridged(written[0])!r}; a classifier needs two{more}"
        )
    if len(written) > 10 and 5 * len(written) > count:
        notes.append(f"{len(written):,} labels for {count:,} texts: {RIGHT_COLUMN}")
    labels = SENTIMENTS.get(written, written) if settings.sentiment else written
    train = numbered(whole, written)
    parts: dict[str, Texts | None] = {"val": None, "test": None}
    for name in parts:
        if file := getattr(settings, name):
            other = read_labeled((file,), replace(reading, label_file=None), report)
            notes += other.notes
            if strange := sorted(set(other.labels) - set(written)):
                words = f"{listed(strange)}; the training labels are {listed(written)}"
                problem = f"--{name} {file} has labels that are not in the training data"
                raise DataError(f"{problem}: {words}")
            parts[name] = numbered(other, written)
    if settings.test_fraction:
        train, parts["test"] = stratified(train, settings.test_fraction, settings.seed)
    val, test = parts["val"], parts["test"]
    if val is None:
        assert settings.val_fraction is not None
        train, val = stratified(train, settings.val_fraction, settings.seed)
    if not len(train) or not len(val):
        unique = "no label occurs twice, so check --label-column"
        hint = unique if len(written) == count else "add more"
        raise DataError(f"{count} labeled texts are too few to split; {hint}")
    notes += duplicates(train, val, "validation")
    notes += duplicates(train, test, "test") if test else []
    first = zip((labels[id] for id in train.truth[:3]), train.texts[:3], strict=True)
    shown = [
        f"  {abridged(' '.join(label.split()))}: {' '.join(text[:1000].split())[:70]}"
        for label, text in first
    ]
    return LabelSplit(labels, train, val, test, whole.how, shown, notes)


def sorted_labels(labels: set[str]) -> tuple[str, ...]:
    """Sorted by value if all are numbers, else alphabetically."""
    numbers = all(NUMBER.fullmatch(label) for label in labels)
    return tuple(sorted(labels, key=lambda label: (float(label) if numbers else 0, label)))


def numbered(read: Labeled, labels: tuple[str, ...]) -> Texts:
    ids = {label: id for id, label in enumerate(labels)}
    return Texts(read.texts, np.array([ids[label] for label in read.labels], dtype=np.int64))


def known_labels(written: set[str], known: tuple[str, ...], where: str) -> dict[str, int]:
    """Map each label in the file to one of the `known` labels: by its name, or as a common
    sentiment label if that is unambiguous."""
    usual = [names for names, means in SENTIMENTS.items() if means == known]
    fitting = [names for names in (known, *usual) if written <= set(names)]
    if len({tuple(names.index(name) for name in sorted(written)) for names in fitting}) == 1:
        return {name: id for id, name in enumerate(fitting[0])}
    if fitting:
        words = f"{listed(sorted(written))} could mean more than one of {listed(known)}"
        raise DataError(f"{where}: ambiguous labels: {words}; use the full label names")
    words = f"{listed(sorted(written - set(known)))}; its labels are {listed(known, 20)}"
    raise DataError(f"{where} has labels that the classifier does not know: {words}")


def stratified(texts: Texts, fraction: float, seed: int) -> tuple[Texts, Texts]:
    """A random stratified split: everything but `fraction`, and that fraction. A label with two
    texts has one in each part; a single text goes to the first."""
    order = np.random.default_rng(seed).permutation(len(texts))
    held_out = np.zeros(len(texts), dtype=bool)
    for label in np.unique(texts.truth):
        rows = order[texts.truth[order] == label]
        count = min(max(1, round(fraction * len(rows))), len(rows) - 1)
        held_out[rows[:count]] = True
    return texts.part(np.flatnonzero(~held_out)), texts.part(np.flatnonzero(held_out))


def duplicates(train: Texts, other: Texts, name: str) -> list[str]:
    """A note on texts of `other` that are also in the training set, if there are any."""
    known = dict(zip(train.texts, train.truth.tolist(), strict=True))
    pairs = zip(other.texts, other.truth.tolist(), strict=True)
    same = [known[text] == id for text, id in pairs if text in known]
    words = f"{len(same):,} of {len(other):,} {name} texts are also in the training set"
    others = f", {same.count(False):,} of them with a different label" if False in same else ""
    return [words + others] if same else []


@dataclass(frozen=True)
class Truncation:
    context: int
    rule: str  # head, tail or windows

    def windows(self, ids: list[int], begin: int) -> list[list[int]]:
        """The windows of a text that the model sees; each starts with the first `begin` tokens."""
        if len(ids) <= self.context:
            return [ids]
        first, rest, room = ids[:begin], ids[begin:], max(1, self.context - begin)
        if self.rule != "windows":
            return [first + (rest[:room] if self.rule == "head" else rest[-room:])]
        count = -(-len(rest) // room)
        edges = np.linspace(0, len(rest), count + 1).astype(int)  # similar lengths
        return [first + rest[start:stop] for start, stop in pairwise(edges)]


@dataclass(frozen=True)
class Encoded:
    """Windows of texts as token ids, one after the other."""

    ids: npt.NDArray[np.int32]
    starts: Ints
    lengths: Ints
    truth: Ints  # of each window
    text: Ints  # the index of each window's text
    count: int  # of texts
    padding: int
    most: int  # maximum tokens in a window
    multiple: int  # batches are padded to a multiple of this

    def window(self, row: int) -> npt.NDArray[np.int32]:
        return self.ids[self.starts[row] :][: self.lengths[row]]

    def rows(self, which: Ints) -> tuple[npt.NDArray[Any], Ints, Ints]:
        """(ids, lengths, truth) of these windows; ids are (rows, longest), padded on the right."""
        ids = self.gather(self.ids, which, self.padding).astype(np.int64)
        return ids, self.lengths[which], self.truth[which]

    def gather(self, values: npt.NDArray[Any], which: Ints, padding: int) -> npt.NDArray[Any]:
        """The value of each token of these windows: (rows, longest, ...)."""
        lengths = self.lengths[which][:, None]
        columns = np.arange(min(self.most, rounded(int(lengths.max()), self.multiple)))
        places = self.starts[which][:, None] + columns  # (rows, longest)
        gathered: npt.NDArray[Any] = values[np.minimum(places, len(values) - 1)]
        gathered[columns >= lengths] = padding
        return gathered


@dataclass(frozen=True)
class CachedStates(Encoded):
    """Windows with the cached outputs of the frozen layers: a vector for each token, or for each
    window if all layers are frozen."""

    states: npt.NDArray[np.float32]
    pooled: bool  # one vector for each window

    def rows(self, which: Ints) -> tuple[npt.NDArray[Any], Ints, Ints]:
        """(states, lengths, truth) of these windows; states are (rows, dim) or (rows, longest,
        dim), zero after the end."""
        x = self.states[which] if self.pooled else self.gather(self.states, which, 0)
        return x, self.lengths[which], self.truth[which]


def rounded(length: int, multiple: int) -> int:
    """Round up to `multiple`, or to four times that for long texts, so batches share lengths."""
    multiple = multiple if length <= 8 * multiple else 4 * multiple if multiple > 1 else 1
    return -(-length // multiple) * multiple


def encode(
    texts: Texts, tokenizer: Tokenizer, cut: Truncation, report: Report, multiple: int
) -> Encoded:
    windows: list[npt.NDArray[np.int32]] = []
    text: list[int] = []
    for number, words in enumerate(texts.texts):
        parts = cut.windows(tokenizer.encode_prompt(words), len(tokenizer.begin))
        windows += (np.array(part, dtype=np.int32) for part in parts)
        text += [number] * len(parts)
        if number % 1000 == 0:
            report("encoding", number, len(texts))
    of = np.array(text, dtype=np.int64)
    how = {"count": len(texts), "padding": tokenizer.padding, "most": cut.context}
    return Encoded(**packed(windows) | how, truth=texts.truth[of], text=of, multiple=multiple)


def packed(windows: Sequence[Sequence[int] | npt.NDArray[np.int32]]) -> dict[str, Any]:
    """Concatenate windows for `Encoded`."""
    lengths = np.array([len(window) for window in windows], dtype=np.int64)
    ids = np.concatenate([np.asarray(window, dtype=np.int32) for window in windows])
    return {"ids": ids, "starts": np.cumsum(lengths) - lengths, "lengths": lengths}


class LengthBatches:
    """Batch i is a pure function of the seed and i. Each epoch has every window once; windows in a
    batch have similar lengths, so there is little padding."""

    def __init__(self, lengths: Ints, batch: int, seed: int) -> None:
        self.lengths, self.batch, self.seed = lengths, min(batch, len(lengths)), seed
        self.in_epoch = -(-len(lengths) // self.batch)
        self.epoch = lru_cache(maxsize=2)(self._epoch)

    def __getitem__(self, index: int) -> Ints:
        epoch, number = divmod(index, self.in_epoch)
        return self.epoch(epoch)[number]

    def _epoch(self, number: int) -> list[Ints]:
        random = np.random.default_rng([self.seed, number])
        order = random.permutation(len(self.lengths))
        # The last batch is filled up with texts of this epoch, so all have the same size.
        order = np.concatenate([order, order[: self.in_epoch * self.batch - len(order)]])
        batches: list[Ints] = []
        for start in range(0, len(order), POOLED_BATCHES * self.batch):
            pool = order[start : start + POOLED_BATCHES * self.batch]
            pool = pool[np.argsort(self.lengths[pool], kind="stable")]
            batches += list(pool.reshape(-1, self.batch))
        return [batches[place] for place in random.permutation(len(batches))]
