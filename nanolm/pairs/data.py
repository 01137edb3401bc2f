"""Prepare pairs of texts for a model: split them, encode them and make batches.

>>> split = split_pairs(settings, report)
>>> encoded = encode_pairs(split.train, tokenizer, tokenizer, 256, multiple=1, report=report)
>>> source, target = encoded.rows(PairBatches(encoded, tokens=4096, seed=1)[0])
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from nanolm.choice import Report
from nanolm.classification.data import Ints, packed, rounded
from nanolm.errors import DataError, UsageError
from nanolm.formats import counted
from nanolm.pairs.settings import PairSettings
from nanolm.text.pairs import Pairs, read_pairs
from nanolm.text.tokenizer import Tokenizer

VAL_FRACTION, LEAST_HELD_OUT, MOST_HELD_OUT = 0.05, 100, 2_000  # pairs
LARGEST_GROUP = 0.02  # of all pairs; larger ones are not kept together by their target
BUCKET = 4  # tokens; where padding is exact, pairs with lengths this similar are shuffled together


@dataclass(frozen=True)
class PairSplit:
    """The training, validation and test pairs."""

    train: Pairs
    val: Pairs
    test: Pairs | None
    how: str  # one line on how the data was read
    examples: list[str]  # the first rows, for display
    notes: list[str]

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for part in (self.train, self.val, self.test):
            rows = [part.sources, part.targets] if part else []
            digest.update(json.dumps(rows).encode())
        return digest.hexdigest()


def split_pairs(settings: PairSettings, report: Report) -> PairSplit:
    """Read all pairs; hold some out for validation unless there is a file of them."""
    reading = settings.reading()
    train = read_pairs(settings.pairs, reading, report, settings.limit)
    notes, others = list(train.notes), list[Pairs | None]()
    for option, names in (("--val", settings.val), ("--test", settings.test)):
        try:
            others.append(read_pairs(names, reading, report) if names else None)
        except UsageError as error:
            raise UsageError(f"{option} {' '.join(names)}: {error}") from None
        notes += [f"{option}: {note}" for note in others[-1].notes] if others[-1] else []
    val, test = others
    how, examples = train.how, train.examples
    if val is None:
        train, val = hold_out(train, settings.val_fraction)
    for name, held_out in (("validation", val), ("test", test)):
        notes += _also_in_training(train, held_out, name) if held_out else []
    return PairSplit(train, val, test, how, examples, notes)


def hold_out(pairs: Pairs, fraction: float | None = None) -> tuple[Pairs, Pairs]:
    """The training and the validation pairs: those whose sources have the smallest hashes, so every
    run holds out the same. Pairs with the same source stay together, and so do those with the same
    target, unless targets are few: what is held out is new on both sides."""
    group = _groups(pairs, by_target=True)
    if np.bincount(group).max() > max(2, LARGEST_GROUP * len(pairs)):
        group = _groups(pairs, by_target=False)
    wanted = round((VAL_FRACTION if fraction is None else fraction) * len(pairs))
    if fraction is None:
        wanted = min(max(wanted, LEAST_HELD_OUT), MOST_HELD_OUT, len(pairs) // 5)
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in pairs.sources]
    smallest: dict[int, bytes] = {}  # digest of each group
    for number, digest in zip(group.tolist(), digests, strict=True):
        smallest[number] = min(digest, smallest.get(number, digest))
    sizes = np.bincount(group)
    chosen, left = set[int](), max(1, wanted)
    for number in sorted(smallest, key=smallest.__getitem__):
        if sizes[number] <= left:
            chosen.add(number)
            left -= int(sizes[number])
    held_out = np.isin(group, [*chosen])
    if not held_out.any() or held_out.all():
        few = f"{counted(len(pairs), 'pair')} with {counted(len(smallest), 'distinct source')}"
        raise DataError(f"{few}: too few to hold some out for validation; add more, or pass --val")
    parts = [np.flatnonzero(mask).tolist() for mask in (~held_out, held_out)]
    return pairs.part(parts[0]), pairs.part(parts[1])


def _groups(pairs: Pairs, by_target: bool) -> Ints:
    """The number of each pair's group: pairs that share a source, or a target if `by_target`."""
    parent = list(range(len(pairs)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    first: dict[tuple[str, str], int] = {}
    for number, both in enumerate(zip(pairs.sources, pairs.targets, strict=True)):
        for side, text in zip(
            ("source", "target") if by_target else ("source",), both, strict=False
        ):
            other = first.setdefault((side, text), number)
            parent[root(number)] = root(other)
    return np.array([root(number) for number in range(len(pairs))], dtype=np.int64)


def _also_in_training(train: Pairs, other: Pairs, name: str) -> list[str]:
    known = set(train.sources)
    same = sum(source in known for source in other.sources)
    verb = "is" if same == 1 else "are"
    words = f"{same:,} of {len(other):,} {name} sources {verb} also in the training set"
    return [words] if same else []


@dataclass(frozen=True)
class Sequences:
    """Token ids of texts, one after the other."""

    ids: npt.NDArray[np.int32]
    starts: Ints
    lengths: Ints
    padding: int

    def rows(self, which: Ints, width: int) -> Ints:
        """(rows, width), padded on the right."""
        columns = np.arange(width)
        places = np.minimum(self.starts[which][:, None] + columns, len(self.ids) - 1)
        inside = columns < self.lengths[which][:, None]
        return np.where(inside, self.ids[places], self.padding).astype(np.int64)


@dataclass(frozen=True)
class EncodedPairs:
    """Pairs as token ids. Sources and targets end with `end_of_text`, and a target begins with
    `start_of_text`, which is usually the same."""

    source: Sequences
    target: Sequences
    multiple: int  # lengths are padded to a multiple of this
    truncated: int = 0  # pairs that were longer than the context

    def __len__(self) -> int:
        return len(self.source.lengths)

    @property
    def target_lengths(self) -> Ints:
        """The number of tokens to predict in each target."""
        return self.target.lengths - 1

    def size(self) -> tuple[int, int]:
        """The number of tokens, as in `tokens`, and the length of the longest source or target."""
        longest = max(int(side.lengths.max()) for side in (self.source, self.target))
        return self.tokens(np.arange(len(self))), longest

    def first(self, count: int) -> "EncodedPairs":
        """The first `count` pairs."""
        source, target = (
            replace(side, starts=side.starts[:count], lengths=side.lengths[:count])
            for side in (self.source, self.target)
        )
        return EncodedPairs(source, target, self.multiple)

    def shape(self, which: Ints) -> tuple[int, int]:
        """The lengths of source and decoder input to which these pairs are padded."""
        source, target = self.source.lengths[which].max(), self.target_lengths[which].max()
        return rounded(int(source), self.multiple), rounded(int(target), self.multiple)

    def rows(self, which: Ints) -> tuple[Ints, Ints]:
        """(source, target) of these pairs, (rows, source) and (rows, target + 1): target[:, :-1] is
        the input of the decoder, target[:, 1:] what it should predict."""
        source, target = self.shape(which)
        return self.source.rows(which, source), self.target.rows(which, target + 1)

    def tokens(self, which: Ints) -> int:
        """The number of source and target tokens, without padding."""
        return int((self.source.lengths[which] + self.target_lengths[which]).sum())


def encode_pairs(
    pairs: Pairs,
    tokenizer: Tokenizer,
    source_tokenizer: Tokenizer,
    context: int,
    multiple: int,
    report: Report,
) -> EncodedPairs:
    """Encode pairs. A source with its end, or a target with its start and end, is truncated if it
    is longer than `context`: `Translator` generates no longer ones."""
    sources, targets, truncated = list[list[int]](), list[list[int]](), 0
    for number, (source, target) in enumerate(zip(pairs.sources, pairs.targets, strict=True)):
        ids, end = source_tokenizer.encode(source), source_tokenizer.end_of_text
        sources.append([*ids[: context - 1], end])
        labels = [*tokenizer.encode(target), tokenizer.end_of_text]
        targets.append([tokenizer.start_of_text, *labels[: max(1, context - 1)]])
        truncated += len(ids) >= context or len(labels) >= max(2, context)
        if number % 1000 == 0:
            report("encoding", number, len(pairs))
    return EncodedPairs(
        Sequences(**packed(sources), padding=source_tokenizer.padding),
        Sequences(**packed(targets), padding=tokenizer.padding),
        multiple,
        truncated,
    )


class PairBatches:
    """Batch i is a pure function of the seed and i. Pairs in a batch have similar lengths; padded
    to the same shape, they have at most `tokens` tokens. Each epoch has every pair once and the
    same number of batches. The number of rows follows from the shape, so there are few of them."""

    def __init__(self, encoded: EncodedPairs, tokens: int, seed: int) -> None:
        self.encoded, self.limit, self.seed = encoded, tokens, seed
        lengths = np.stack([encoded.target_lengths, encoded.source.lengths], axis=1)
        step = encoded.multiple if encoded.multiple > 1 else BUCKET
        shapes = np.array([rounded(n, step) for n in range(lengths.max() + 1)])[lengths]
        # The source lengths go up and down by turns, so neighbors in this order are similar.
        level = np.unique(shapes[:, 0], return_inverse=True)[1]
        key = level * (2 * shapes[:, 1].max() + 1) + np.where(level % 2, -1, 1) * shapes[:, 1]
        _, first, self.bucket = np.unique(key, return_index=True, return_inverse=True)
        self.cuts = _cuts(shapes[first], np.bincount(self.bucket), self.rows_of)
        self.in_epoch = len(self.cuts)
        self.epoch = lru_cache(maxsize=2)(self._epoch)

    def rows_of(self, tokens: int) -> int:
        """The rows of a batch for pairs of this many tokens after padding."""
        rows = max(1, self.limit // tokens)
        multiple = self.encoded.multiple
        return rows if rows < multiple else rows // multiple * multiple

    def __getitem__(self, index: int) -> Ints:
        epoch, number = divmod(index, self.in_epoch)
        return self.epoch(epoch)[number]

    def _epoch(self, number: int) -> list[Ints]:
        random = np.random.default_rng([self.seed, number])
        order = random.permutation(len(self.encoded))
        order = order[np.argsort(self.bucket[order], kind="stable")]
        batches = np.split(order, self.cuts[:-1])
        return [batches[place] for place in random.permutation(len(batches))]


def _cuts(shapes: Ints, sizes: Ints, rows_of: Callable[[int], int]) -> list[int]:
    """Where batches end among pairs sorted by bucket, given the shape and size of each bucket. A
    batch that its bucket cannot fill is filled from the next, with fewer rows if that is longer."""
    ends = np.cumsum(sizes).tolist()
    cuts, start, first = list[int](), 0, 0
    while start < ends[-1]:
        while ends[first] <= start:
            first += 1
        last, shape = first, shapes[first]
        while start + rows_of(int(shape.sum())) > ends[last] and last + 1 < len(ends):
            last += 1
            shape = np.maximum(shape, shapes[last])
        start = min(start + rows_of(int(shape.sum())), ends[-1])
        cuts.append(start)
    return cuts
