"""LogisticModel regression: a weight for each word and label, added up. Fitted to the end.

>>> model = LogisticModel.fit(bags, truth, labels=2, words=5000, strength=1.0)
>>> model.logits(bags)
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from nanolm.classification.words import Bags, Ints

MOST_ITERATIONS = 200
TOLERANCE = 1e-4  # the largest slope of the mean loss of a text at which it is done
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LogisticModel:
    """A column of weights for each label; of two labels, only the second has one."""

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
        enough: float = TOLERANCE,
    ) -> Self:
        """The least of all losses times `strength`, and half the squares of all weights; the bias
        goes free. It is a bowl with one lowest place, which L-BFGS finds."""
        columns = 1 if labels == 2 else labels
        both = torch.zeros(words + 1, columns, dtype=torch.float64)  # the last row is the bias
        found = both.numpy()  # the same numbers
        optimizer = torch.optim.LBFGS(
            [both],
            max_iter=MOST_ITERATIONS,
            tolerance_grad=enough * strength * len(truth),
            line_search_fn="strong_wolfe",
        )
        right = np.eye(labels)[truth]

        def loss() -> float:
            weight, bias = found[:-1], found[-1]
            logits = scores(bags, weight, bias)
            logs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
            slope = strength * (np.exp(logs) - right)[:, -columns:]  # (texts, columns)
            uphill = np.vstack([by_word(bags, slope, words) + weight, slope.sum(axis=0)])
            both.grad = torch.from_numpy(uphill)
            return float(-strength * (logs * right).sum() + (weight**2).sum() / 2)

        optimizer.step(loss)
        return cls(found[:-1], found[-1])

    def logits(self, bags: Bags) -> npt.NDArray[np.float32]:
        """(texts, labels)"""
        return scores(bags, self.weight, self.bias).astype(np.float32)

    def parameter_count(self) -> int:
        return self.weight.size + self.bias.size


def scores(bags: Bags, weight: Floats, bias: Floats) -> Floats:
    """Of each text the sum over its words, (texts, labels); of two labels the first has 0."""
    texts = np.repeat(np.arange(len(bags.lengths)), bags.lengths)
    columns = [
        np.bincount(texts, bags.weights * column[bags.words], len(bags.lengths)) + free
        for column, free in zip(weight.T, bias, strict=True)
    ]
    return np.stack(columns if len(columns) > 1 else [np.zeros_like(columns[0]), *columns], axis=1)


def by_word(bags: Bags, of_texts: Floats, words: int) -> Floats:
    """Of each word the sum over the texts that have it, (words, columns)."""
    texts = np.repeat(np.arange(len(bags.lengths)), bags.lengths)
    columns = [np.bincount(bags.words, bags.weights * each[texts], words) for each in of_texts.T]
    return np.stack(columns, axis=1)
