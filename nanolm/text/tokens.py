"""Batches of tokens.

    >>> Batches(prepared.train, context=64, batch=32, seed=1)[0].shape
    (32, 65)

A batch is a pure function of (seed, index), so a kill loses no state. Each epoch cuts the tokens
into windows at a new offset and visits each once, by a keyed permutation that is never stored. In
a mix, each part has its own epochs, and the parts alternate according to their weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nanolm.text.mix import Part

Store = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Batches:
    tokens: Store
    context: int
    batch: int
    seed: int
    # The rows of each batch to return, if several processes share it.
    rows: slice = field(default_factory=lambda: slice(None))
    parts: tuple[Part, ...] = ()  # of a mix
    offsets: int | None = None  # at how many offsets the epochs cut the tokens; None: any

    @property
    def windows(self) -> int:
        return self._windows(len(self.tokens))

    def _windows(self, tokens: int) -> int:
        return max(1, (tokens - self.context) // self.context)

    def starts(self, index: int) -> Words:
        numbers = np.arange(index * self.batch, (index + 1) * self.batch, dtype=np.uint64)
        numbers = numbers[self.rows]
        if not self.parts:
            return self._starts(numbers, len(self.tokens), self.seed)
        chosen, numbers = interleaved(numbers, [part.weight for part in self.parts])
        starts = np.empty_like(numbers)
        for which, part in enumerate(self.parts):
            own = chosen == which
            inside = self._starts(numbers[own], part.tokens, self.seed + which)
            starts[own] = inside + np.uint64(part.train.start)
        return starts

    def _starts(self, numbers: Words, tokens: int, seed: int) -> Words:
        """The start offsets of windows, given their numbers, in a text of `tokens` tokens."""
        windows = self._windows(tokens)
        epochs, positions = np.divmod(numbers, np.uint64(windows))
        keys = _mix(_mix(np.full_like(epochs, seed)) + epochs)
        room = min(self.context, tokens - windows * self.context)
        places = permuted(positions, windows, keys) * np.uint64(self.context)
        if self.offsets is None:
            return keys % np.uint64(room) + places
        return epochs % np.uint64(self.offsets) * np.uint64(room // self.offsets) + places

    def all_starts(self) -> Words:
        """Where all windows start, in order, if they are at a few offsets."""
        texts = [(part.train.start, part.tokens) for part in self.parts]
        starts = []
        for first, tokens in texts or [(0, len(self.tokens))]:
            windows = self._windows(tokens)
            numbers = np.arange(windows * (self.offsets or 1), dtype=np.uint64)
            starts.append(self._starts(numbers, tokens, self.seed) + np.uint64(first))
        return np.unique(np.concatenate(starts))

    def __getitem__(self, index: int) -> Store:
        """The windows, each with the next token: (batch, context + 1)."""
        window = np.arange(self.context + 1, dtype=np.uint64)
        ids: Store = self.tokens[self.starts(index)[:, None] + window]
        return ids


def interleaved(numbers: Words, weights: Sequence[float]) -> tuple[npt.NDArray[np.intp], Words]:
    """The part that each window comes from, and the window's number in that part. Every stretch of
    windows has the shares of the weights, up to rounding."""
    parts, numbers = np.zeros(len(numbers), dtype=np.intp), numbers.copy()
    rest = np.arange(len(numbers))  # not in an earlier part
    for part, weight in enumerate(weights[:-1]):
        share = np.uint64(round(weight / sum(weights[part:]) * (1 << 32)))
        before = _rounded_share(numbers[rest], share)
        own = _rounded_share(numbers[rest] + np.uint64(1), share) > before
        numbers[rest] = np.where(own, before, numbers[rest] - before)
        rest = rest[~own]
        parts[rest] += 1
    return parts, numbers


def _rounded_share(numbers: Words, share: np.uint64) -> Words:
    """numbers * share / 2**32, rounded, without overflow."""
    bits, half = np.uint64(32), np.uint64(1 << 31)
    low = numbers & np.uint64((1 << 32) - 1)
    return (numbers >> bits) * share + (low * share + half >> bits)


def permuted(positions: Words, size: int, keys: Words) -> Words:
    """Where each of `positions` goes in a permutation of range(size) that depends on its key: a
    Feistel network over the next even number of bits. A value outside the range is permuted again
    until it falls inside, which keeps the map one-to-one."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    values = positions.copy()
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for turn in range(4):
            scrambled = _mix((right << np.uint64(3) | np.uint64(turn)) ^ keys[outside])
            left, right = right, left ^ (scrambled & mask)
        values[outside] = left << half | right
        outside = values >= np.uint64(size)
    return values


def _mix(words: Words) -> Words:
    """Scramble 64-bit words so that every bit of the input reaches every bit of the output."""
    words = (words + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
