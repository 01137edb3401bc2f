"""Byte-pair encoding: learn which neighbouring pieces to glue together.

Start from single bytes; again and again take the pair of neighbours that occurs most often and
make it one new token. Common words end up as one token, rare words as several, and no text is
ever out of vocabulary, because every byte stays a token. Pairs never reach across words, so the
work is done on distinct words with their counts instead of on the text.

    >>> learn(count_words(["low lower lowest"]), vocab_size=258)
    [(108, 111), (256, 119)]

The ids are `l` = 108, `o` = 111 and `w` = 119: first "lo" becomes 256, then "low" becomes 257.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import pairwise

import regex

# How text is cut into words before pairs are counted: contractions; letters with the one
# character before them (usually a space); up to three digits; runs of punctuation with the line
# ends after them; line ends; other white space, leaving the last blank to the word that follows.
# It is the pattern of GPT-4's tokenizer in the form that tiktoken, `tokenizers` and llama.cpp
# all read alike (theirs has a possessive quantifier, which they do not).
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Pair = tuple[int, int]


def count_words(texts: Iterable[str]) -> Counter[bytes]:
    """How often each word occurs, a word being what `SPLIT` cuts out, as UTF-8."""
    words: Counter[str] = Counter()
    for text in texts:
        words.update(regex.findall(SPLIT, text))
    return Counter({word.encode(): count for word, count in words.items()})


def learn(words: Counter[bytes], vocab_size: int | None = None) -> list[Pair]:
    """The merges in the order they were learned; merge number n makes token 256 + n.

    Stops at `vocab_size` tokens (bytes included), or when no pair occurs twice: gluing together
    what was seen once would be learning by heart. Equal counts go to the smaller ids, so the
    result depends on the counts alone.
    """
    pieces = [list(word) for word in words]
    counts = list(words.values())
    pair_counts: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[int]] = defaultdict(set)  # the words a pair occurs in
    for index, word in enumerate(pieces):
        for pair in pairwise(word):
            pair_counts[pair] += counts[index]
            where[pair].add(index)

    # A heap of (-count, pair). Its counts go stale as pairs change; an entry is good only if it
    # still agrees with pair_counts, and every change pushes a fresh one.
    heap = [(-count, pair) for pair, count in pair_counts.items()]
    heapify(heap)
    merges: list[Pair] = []
    while heap and (vocab_size is None or 256 + len(merges) < vocab_size):
        negative, best = heappop(heap)
        if -negative != pair_counts[best]:
            continue
        if -negative < 2:
            break
        new = 256 + len(merges)
        merges.append(best)
        changed: set[Pair] = set()
        for index in where.pop(best):
            old_word = pieces[index]
            new_word = merge(old_word, best, new)
            for pair in pairwise(old_word):
                pair_counts[pair] -= counts[index]
                changed.add(pair)
            for pair in pairwise(new_word):
                pair_counts[pair] += counts[index]
                where[pair].add(index)
                changed.add(pair)
            pieces[index] = new_word
        for pair in changed:
            if pair_counts[pair] > 0:
                heappush(heap, (-pair_counts[pair], pair))
    return merges


def merge(word: list[int], pair: Pair, new: int) -> list[int]:
    """`word` with every occurrence of `pair`, from the left, replaced by `new`."""
    merged: list[int] = []
    position = 0
    while position < len(word):
        if tuple(word[position : position + 2]) == pair:
            merged.append(new)
            position += 2
        else:
            merged.append(word[position])
            position += 1
    return merged
