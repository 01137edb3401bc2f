"""Texts as bags of words: which occur, how often, and how rare they are elsewhere.

    >>> vocabulary = Vocabulary.of(["a good film", "a bad film"])
    >>> vocabulary.bags(["good, good film!"])

A word counts for its frequency in the text times the logarithm of its rarity in the training texts
(TF-IDF); what a text comes to has length 1, so that long texts do not outweigh short ones. The
order of the words is lost, unless pairs of neighbours count as words too.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
WORD = re.compile(r"\b\w\w+\b")  # of two letters at least
NGRAMS = range(3, 6)  # lengths of character n-grams, the spaces around a word included


@dataclass(frozen=True)
class Bags:
    """The words of each text, one text after the other, and what each of them counts."""

    words: Ints
    weights: npt.NDArray[np.float64]
    lengths: Ints  # of each text

    def rows(self, which: Ints) -> tuple[Ints, npt.NDArray[np.float32]]:
        """Of these texts: both (texts, most), filled up with words that count nothing."""
        lengths = self.lengths[which]
        starts = (np.cumsum(self.lengths) - self.lengths)[which]
        columns = np.arange(max(1, int(lengths.max())))
        inside = columns < lengths[:, None]
        places = np.where(inside, starts[:, None] + columns, 0)
        if not len(self.words):
            return np.zeros_like(places), np.zeros(places.shape, dtype=np.float32)
        return self.words[places], np.where(inside, self.weights[places], 0).astype(np.float32)


@dataclass(frozen=True)
class Vocabulary:
    """The words of the training texts, each with its rarity."""

    numbers: dict[str, int]
    rarity: npt.NDArray[np.float64]
    analyze: Callable[[str], list[str]]  # a text to its words

    @classmethod
    def of(
        cls,
        texts: Sequence[str],
        longest: int = 1,
        analyze: Callable[[str], list[str]] | None = None,
    ) -> Self:
        """`longest`: how many neighbouring words count as one, at most. `analyze` replaces that."""
        analyze = analyze or partial(words, longest=longest)
        found = Counter(word for text in texts for word in set(analyze(text)))
        numbers = {word: number for number, word in enumerate(sorted(found))}
        seen = np.array([found[word] for word in numbers], dtype=np.float64)
        return cls(numbers, np.log((1 + len(texts)) / (1 + seen)) + 1, analyze)

    def __len__(self) -> int:
        return len(self.numbers)

    def bags(self, texts: Sequence[str]) -> Bags:
        """Words that no training text has are passed over."""
        found, weights, lengths = [], [], []
        for text in texts:
            known = map(self.numbers.get, self.analyze(text))
            counts = Counter(number for number in known if number is not None)
            ids = np.array(sorted(counts), dtype=np.int64)
            values = np.array([counts[id] for id in ids.tolist()]) * self.rarity[ids]
            found.append(ids)
            weights.append(values / max(1e-12, np.sqrt((values**2).sum())))
            lengths.append(len(ids))
        return Bags(np.concatenate(found), np.concatenate(weights), np.array(lengths))


def words(text: str, longest: int = 1) -> list[str]:
    """In small letters; with `longest` 2, the pairs of neighbours too."""
    single = WORD.findall(text.lower())
    return [
        " ".join(single[start : start + count])
        for count in range(1, longest + 1)
        for start in range(len(single) - count + 1)
    ]


def subwords(text: str) -> list[str]:
    """Words in lower case, each with the character n-grams in it: of few texts, most words of a new
    one are unknown, but their stems and endings are not."""
    return [ngram for word in text.lower().split() for ngram in ngrams(word)]


@lru_cache(maxsize=1 << 16)
def ngrams(word: str) -> list[str]:
    padded = f" {word} "
    parts = [padded[at : at + size] for size in NGRAMS for at in range(len(padded) - size + 1)]
    return parts if len(padded) in NGRAMS else [*parts, padded]
