"""Byte-pair encoding: learn which neighbouring pieces to glue together.

Start from single bytes; again and again take the pair of neighbours that occurs most often and
make it one new token. Common words end up as one token, rare words as several, and no text is
ever out of vocabulary, because every byte stays a token. Pairs never reach across words, so the
work is done on distinct words with their counts (`nanolm.text.words`) instead of on the text.

    >>> learn(count_words(["low lower lowest"]), vocab_size=258)
    [(108, 111), (256, 119)]

The ids are `l` = 108, `o` = 111 and `w` = 119: first "lo" becomes 256, then "low" becomes 257.
"""

from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush, heapreplace

import numpy as np
import numpy.typing as npt

Pair = tuple[int, int]
Places = npt.NDArray[np.int32]


def learn(
    words: Counter[bytes],
    vocab_size: int | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[Pair]:
    """The merges in the order they were learned; merge number n makes token 256 + n.

    Stops at `vocab_size` tokens (bytes included), or when no pair occurs twice: gluing together
    what was seen once would be learning by heart. Equal counts go to the smaller ids, so the
    result depends on the counts alone.
    """
    text = Pieces(words)
    merges: list[Pair] = []
    while text.heap and (vocab_size is None or 256 + len(merges) < vocab_size):
        negative, pair = text.heap[0]
        places, count = text.find(pair)
        if count == -negative:
            heappop(text.heap)
            text.merge(pair, places, 256 + len(merges))
            merges.append(pair)
            report(len(merges), (vocab_size or 0) - 256)
        elif count > 1:
            heapreplace(text.heap, (-count, pair))
        else:
            heappop(text.heap)
    return merges


GAP = -1  # in place of a token: between two words, or where the second half of a merge was


class Pieces:
    """The distinct words as one long row of tokens with gaps between, and where each pair stands.

    A pair first appears when the younger of its tokens is made, in all its places at once; from
    then on its places can only become fewer. So they are noted once and checked when the pair's
    turn comes, and its count in the heap is an upper bound that is corrected then: nothing has to
    be done for the pairs that a merge breaks up, and all that remains is arithmetic on arrays.
    """

    def __init__(self, words: Counter[bytes]) -> None:
        joined = b"\xff".join([b"", *words, b""])  # 0xff: the byte that UTF-8 never has
        self.tokens = np.frombuffer(joined, dtype=np.uint8).astype(np.int32)
        gaps = self.tokens == 0xFF
        self.tokens[gaps] = GAP
        counts = np.fromiter(words.values(), np.int64, len(words))
        self.counts = np.append(counts, 0)[np.cumsum(gaps) - 1]  # of the word a place is in
        self.after = np.arange(1, len(self.tokens) + 1, dtype=np.int32)  # the next token's place
        self.before = self.after - 2
        self.places: dict[Pair, Places] = {}
        self.heap: list[tuple[int, Pair]] = []  # (-count or less, pair)
        places = np.flatnonzero(~gaps[:-1] & ~gaps[1:]).astype(np.int32)
        self.add(self.tokens[places], self.tokens[places + 1], places)

    def find(self, pair: Pair) -> tuple[Places, int]:
        """Where `pair` still stands, and how often it occurs in the text."""
        left, right = pair
        places = self.places.pop(pair)
        places = places[self.tokens[places] == left]
        places = places[self.tokens[self.after[places]] == right]
        self.places[pair] = places
        return places, int(self.counts[places].sum())

    def merge(self, pair: Pair, places: Places, new: int) -> None:
        """Put the token `new` in place of `pair`, and take in the pairs it makes."""
        del self.places[pair]
        if pair[0] == pair[1]:  # "aaa" holds "aa" twice: only every other one of a run is merged
            number = np.arange(len(places))
            begins = np.append(True, self.before[places[1:]] != places[:-1])
            begin = np.maximum.accumulate(np.where(begins, number, 0))
            places = places[(number - begin) % 2 == 0]
        second = self.after[places]
        behind, ahead = self.before[places], self.after[second]
        self.tokens[places], self.tokens[second] = new, GAP
        self.after[places], self.before[ahead] = ahead, places
        lefts, rights = self.tokens[behind], self.tokens[ahead]
        has_left = (lefts != GAP) & (lefts != new)  # (new, new) is among the right ones
        has_right = rights != GAP
        lefts, rights = lefts[has_left], rights[has_right]
        self.add(
            np.append(lefts, np.full_like(rights, new)),
            np.append(np.full_like(lefts, new), rights),
            np.append(behind[has_left], places[has_right]),
        )

    def add(self, lefts: Places, rights: Places, places: Places) -> None:
        """Note pairs that are new, each with all its places and its count."""
        if not len(places):
            return
        keys = lefts.astype(np.int64) << 32 | rights
        order = np.argsort(keys, kind="stable")
        keys, places = keys[order], places[order]
        starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        counts = np.add.reduceat(self.counts[places], starts).tolist()
        parts = [*starts.tolist(), len(keys)]
        for number, (key, count) in enumerate(zip(keys[starts].tolist(), counts, strict=True)):
            if count > 1:
                pair = (key >> 32, key & 0xFFFFFFFF)
                self.places[pair] = places[parts[number] : parts[number + 1]]
                heappush(self.heap, (-count, pair))
