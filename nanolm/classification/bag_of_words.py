"""Texts as bags of words (TF-IDF), and logistic regression on them.

    >>> vocabulary = Vocabulary.of(["a good film", "a bad film"])
    >>> bags = vocabulary.bags(["good, good film!", "bad"])
    >>> LogisticModel.fit(bags, np.array([1, 0]), labels=2, words=len(vocabulary), strength=1.0)

The weight of a word is its frequency in the text times its inverse document frequency in the
training texts. Text vectors have length 1, so long texts do not outweigh short ones.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

WORD = re.compile(r"\b\w\w+\b")  # at least two letters
NGRAMS = range(3, 6)  # lengths of character n-grams, including the spaces around a word
MOST_ITERATIONS = 200  # of L-BFGS
TOLERANCE = 1e-4  # for the gradient of the mean loss

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Analyze = Callable[[str], list[str]]  # splits a text into words


@dataclass(frozen=True)
class Bags:
    """The words of all texts, one text after the other, and their weights."""

    words: Ints
    weights: Floats
    lengths: Ints  # of each text

    @cached_property
    def texts(self) -> Ints:
        """The index of each word's text."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def rows(self, which: Ints) -> tuple[Ints, npt.NDArray[np.float32]]:
        """Words and weights of these texts, (texts, longest) each, padded with weight 0."""
        lengths = self.lengths[which]
        starts = (np.cumsum(self.lengths) - self.lengths)[which]
        columns = np.arange(max(1, int(lengths.max())))
        inside = columns < lengths[:, None]
        places = np.where(inside, starts[:, None] + columns, 0)
        if not len(self.words):
            return np.zeros_like(places), np.zeros(places.shape, dtype=np.float32)
        return self.words[places], np.where(inside, self.weights[places], 0).astype(np.float32)

    def logits(self, weight: Floats, bias: Floats) -> Floats:
        """The sum over each text's words, (texts, labels); with two labels, the first gets 0."""
        weighted = (self.weights * column[self.words] for column in weight.T)
        columns = [np.bincount(self.texts, each, len(self.lengths)) for each in weighted]
        logits = np.stack(columns, axis=1) + bias
        return np.pad(logits, ((0, 0), (1, 0))) if len(bias) == 1 else logits

    def sum_by_word(self, of_texts: Floats, words: int) -> Floats:
        """For each word, the sum over the texts that contain it, (words, columns)."""
        weighted = (self.weights * column[self.texts] for column in of_texts.T)
        return np.stack([np.bincount(self.words, each, words) for each in weighted], axis=1)


@dataclass(frozen=True)
class Vocabulary:
    """The words of the training texts, each with its inverse document frequency."""

    ids: dict[str, int]
    idf: Floats
    analyze: Analyze

    @classmethod
    def of(
        cls,
        texts: Sequence[str],
        longest: int = 1,
        analyze: Analyze | None = None,
        most: int | None = None,
    ) -> Self:
        """`longest` is the maximum n of word n-grams; `analyze` replaces the default analyzer.
        Keeps at most `most` words, the most frequent ones."""
        analyze = analyze or partial(words, longest=longest)
        counts = Counter(word for text in texts for word in set(analyze(text)))
        kept = sorted(counts)
        if most is not None and len(kept) > most:  # the same ones in every process
            kept = sorted(sorted(kept, key=lambda word: -counts[word])[:most])
        ids = {word: number for number, word in enumerate(kept)}
        frequency = np.array([counts[word] for word in ids], dtype=np.float64)
        return cls(ids, np.log((1 + len(texts)) / (1 + frequency)) + 1, analyze)

    def __len__(self) -> int:
        return len(self.ids)

    def bags(self, texts: Sequence[str]) -> Bags:
        """Words that do not occur in the training texts are skipped."""
        ids, weights = [], []
        for text in texts:
            known = map(self.ids.get, self.analyze(text))
            counts = Counter(number for number in known if number is not None)
            ids.append(np.array(sorted(counts), dtype=np.int64))
            values = np.array([counts[id] for id in ids[-1].tolist()]) * self.idf[ids[-1]]
            weights.append(values / max(1e-12, np.sqrt((values**2).sum())))
        return Bags(np.concatenate(ids), np.concatenate(weights), np.array(list(map(len, ids))))


def words(text: str, longest: int = 1) -> list[str]:
    """Lower-case words; with `longest` 2, also bigrams."""
    single, joined = WORD.findall(text.lower()), []
    for count in range(1, longest + 1):
        joined += [" ".join(single[at : at + count]) for at in range(len(single) - count + 1)]
    return joined


def subwords(text: str) -> list[str]:
    """Lower-case words with their character n-grams: new words share stems and endings."""
    return [ngram for word in text.lower().split() for ngram in ngrams(word)]


@lru_cache(maxsize=1 << 16)
def ngrams(word: str) -> list[str]:
    padded = f" {word} "
    parts = [padded[at : at + size] for size in NGRAMS for at in range(len(padded) - size + 1)]
    return parts if len(padded) in NGRAMS else [*parts, padded]


@dataclass(frozen=True)
class LogisticModel:
    """A column of weights for each label; with two labels, only for the second."""

    weight: Floats  # (words, columns)
    bias: Floats  # (columns,)

    @classmethod
    def fit(
        cls,
        bags: Bags,
        truth: Ints,
        labels: int,
        words: int,
        strength: float,
        tolerance: float = TOLERANCE,
        history: int = 100,
    ) -> Self:
        """Minimize the summed loss times `strength` plus half the sum of squared weights; the bias
        is not penalized. The objective is convex, and L-BFGS finds its minimum; it keeps `history`
        pairs of vectors as large as the weights."""
        columns = 1 if labels == 2 else labels
        both = torch.zeros(words + 1, columns, dtype=torch.float64)  # the last row is the bias
        weight, bias = both.numpy()[:-1], both.numpy()[-1]  # views of the same memory
        one_hot = np.eye(labels)[truth]

        def loss() -> float:
            logits = bags.logits(weight, bias)
            log_p = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
            slope = strength * (np.exp(log_p) - one_hot)[:, -columns:]  # (texts, columns)
            by_word = bags.sum_by_word(slope, words) + weight
            both.grad = torch.from_numpy(np.vstack([by_word, slope.sum(axis=0)]))
            return float(-strength * (log_p * one_hot).sum() + (weight**2).sum() / 2)

        how: dict[str, Any] = {"max_iter": MOST_ITERATIONS, "line_search_fn": "strong_wolfe"}
        how["history_size"] = history
        least = tolerance * strength * len(truth)
        torch.optim.LBFGS([both], tolerance_grad=least, **how).step(loss)
        return cls(weight, bias)

    def logits(self, bags: Bags) -> npt.NDArray[np.float32]:
        return bags.logits(self.weight, self.bias).astype(np.float32)
