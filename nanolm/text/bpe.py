"""Byte-pair encoding: learn which adjacent tokens to merge.

Start from single bytes. Repeatedly take the most frequent pair of adjacent tokens and make it a new
token. Pairs never cross word boundaries, so training works on the distinct words and their counts
(`nanolm.text.words`) instead of on the text.

    >>> learn(count_words(["low lower lowest"]), vocab_size=258)  # l = 108, o = 111, w = 119
    [(108, 111), (256, 119)]
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
import numpy.typing as npt

Pair = tuple[int, int]
Places = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint16] | npt.NDArray[np.int64]
GAP = -1  # between two words, and inside a token


def learn(
    words: Counter[bytes],
    vocab_size: int | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
    known: Sequence[Pair] = (),
) -> list[Pair]:
    """The merges in the order they were learned, after the `known` ones; merge n makes token
    256 + n. Stops at `vocab_size` tokens (bytes included), or when no pair occurs twice, since
    merging a pair seen once would be memorizing. Ties go to the smaller ids."""
    merges = list(known)
    if vocab_size is None or vocab_size > 256 + len(merges):
        for pair in merges_in_order(words, known):
            merges.append(pair)
            report(len(merges), max(0, (vocab_size or 0) - 256))
            if 256 + len(merges) == vocab_size:
                break
    return merges


def merges_in_order(words: Counter[bytes], known: Sequence[Pair] = ()) -> Iterator[Pair]:
    """Generates the merges one by one: a smaller vocabulary is a prefix of a larger one."""
    text = PairIndex(words, known)
    while text.heap:
        negative, pair = text.heap[0]
        places, count = text.find(pair)
        if count == -negative:
            heappop(text.heap)
            text.merge(pair, places)
            yield pair
        elif count > 1:
            heapreplace(text.heap, (-count, pair))
        else:
            heappop(text.heap)


class PairIndex:
    """The distinct words as one long array of bytes with gaps between, and the places of each pair.

    The first and last place of a token hold its id; its length in bytes leads to its neighbors. A
    pair appears in all its places at once, when the newer of its tokens is made. After that, places
    can only disappear. So they are recorded once and checked when the pair is popped from the heap,
    whose count is an upper bound that is corrected then. Pairs that a merge breaks up need no work,
    and everything left is array arithmetic.
    """

    def __init__(self, words: Counter[bytes], merges: Sequence[Pair] = ()) -> None:
        joined = b"\xff".join([b"", *words, b""])  # 0xff never occurs in UTF-8
        bytes_ = np.frombuffer(joined, dtype=np.uint8)
        gaps = bytes_ == 0xFF
        self.tokens = np.where(gaps, np.int32(GAP), bytes_)
        counts = np.fromiter([*words.values(), 0], np.int64, len(words) + 1)
        small = counts.max() < 1 << 31
        number = np.cumsum(gaps, dtype=np.int32) - 1
        self.counts = counts.astype(np.int32 if small else np.int64)[number]  # of the word there
        self.lengths = np.ones(512, dtype=np.int32)  # bytes of each token, with room for more
        self.size = 256  # of the vocabulary
        self.places: dict[Pair, Places] = {}
        self.heap: list[tuple[int, Pair]] = []  # (-count or less, pair)
        self.fewest = 1 if merges else 2  # rarer pairs are not recorded
        places = np.flatnonzero(~gaps[:-1] & ~gaps[1:]).astype(np.int32)
        self.add(bytes_[places].astype(np.uint16) << 8 | bytes_[places + 1], 8, places)
        for pair in merges:
            self.merge(pair, self.find(pair)[0])
        if merges:
            self.fewest = 2
            self.heap = [(count, pair) for count, pair in self.heap if count < -1]
            heapify(self.heap)

    def find(self, pair: Pair) -> tuple[Places, int]:
        """The remaining places of `pair`, and its count in the text."""
        left, right = pair
        places = self.places.pop(pair, np.empty(0, dtype=np.int32))
        places = places[self.tokens[places] == left]
        places = places[self.tokens[places + self.lengths[left]] == right]
        self.places[pair] = places
        return places, int(self.counts[places].sum(dtype=np.int64))

    def merge(self, pair: Pair, places: Places) -> None:
        """Replace `pair` by a new token, and record the pairs this makes."""
        del self.places[pair]
        left, right = self.lengths[pair[0]], self.lengths[pair[1]]
        if pair[0] == pair[1]:  # "aaa" contains "aa" twice: in a run, merge every other one
            number = np.arange(len(places))
            begins = np.append(True, np.diff(places) != left)
            begin = np.maximum.accumulate(np.where(begins, number, 0))
            places = places[(number - begin) % 2 == 0]
        new = self.size
        self.size += 1
        if self.size > len(self.lengths):
            self.lengths = np.resize(self.lengths, 2 * self.size)
        self.lengths[new] = left + right
        self.tokens[places + (left - 1)] = self.tokens[places + left] = GAP
        self.tokens[places] = self.tokens[places + (left + right - 1)] = new

        before, after = self.tokens[places - 1], self.tokens[places + (left + right)]
        has_before = (before != GAP) & (before != new)  # `after` covers (new, new)
        has_after = after != GAP
        before, after = before[has_before], after[has_after]
        starts = places[has_before] - self.lengths[before]
        keys = [before.astype(np.int64) << 32 | new, after | np.int64(new << 32)]
        self.add(np.concatenate(keys), 32, np.concatenate([starts, places[has_after]]))

    def add(self, keys: Keys, bits: int, places: Places) -> None:
        """Record new pairs; a key has the right token in its low `bits`, the left one above."""
        if not len(places):
            return
        order = np.argsort(keys, kind="stable")
        keys, places = keys[order], places[order]
        del order
        starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        counts = np.add.reduceat(self.counts[places], starts, dtype=np.int64).tolist()
        ends = [*starts[1:].tolist(), len(keys)]
        pairs = zip(keys[starts].tolist(), starts.tolist(), ends, counts, strict=True)
        for key, start, end, count in pairs:
            if count >= self.fewest:
                pair = (key >> bits, key & (1 << bits) - 1)
                self.places[pair] = places[start:end]
                heappush(self.heap, (-count, pair))
