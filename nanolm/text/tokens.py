"""Batches of tokens.

    >>> Batches(prepared.train, context=64, batch=32, seed=1)[0].shape
    (32, 65)

A batch is a pure function of (seed, index), so a kill loses no state. Each epoch cuts the tokens
into windows at a new offset and visits each once, by a keyed permutation that is never stored.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

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

    @property
    def windows(self) -> int:
        return max(1, (len(self.tokens) - self.context) // self.context)

    def starts(self, index: int) -> Words:
        numbers = np.arange(index * self.batch, (index + 1) * self.batch, dtype=np.uint64)
        numbers = numbers[self.rows]
        epochs, positions = np.divmod(numbers, np.uint64(self.windows))
        keys = _mix(_mix(np.full_like(epochs, self.seed)) + epochs)
        room = min(self.context, len(self.tokens) - self.windows * self.context)
        places = permuted(positions, self.windows, keys) * np.uint64(self.context)
        return keys % np.uint64(room) + places

    def __getitem__(self, index: int) -> Store:
        """The windows, each with the next token: (batch, context + 1)."""
        window = np.arange(self.context + 1, dtype=np.uint64)
        ids: Store = self.tokens[self.starts(index)[:, None] + window]
        return ids


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
