"""A linear n-gram model whose logits are added to a classifier's.

    >>> ngrams = NgramModel.fit(train, labels=2)
    >>> ngrams.logits(["not a good film"]).shape
    (1, 2)

A small language model knows what words mean, but it reads rare words and fixed phrases less well
than logistic regression on word n-grams, which counts them in all labeled texts. Both make
different mistakes, so the sum of their logits is better than either (docs/experiments.md).
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from nanolm.classification.bag_of_words import LogisticModel, Vocabulary
from nanolm.classification.data import Ints, Texts
from nanolm.classification.metrics import fit_temperature, score
from nanolm.errors import ModelError
from nanolm.model.huggingface import load_tensors
from nanolm.model.stored import NGRAMS

LONGEST = 3  # words
# Unlike TF-IDF for topics: negations and exclamation marks count, single letters do not.
WORD = re.compile(r"\w+(?=n't)|n't|\w\w+|[!?]")
STRENGTH = 10.0  # inverse of the L2 penalty
MOST_NGRAMS = 300_000  # the most common ones
RATIOS = (0.25, 0.5, 1.0, 2.0)  # of its logits to those of the classifier
LEAST_GAIN = 3.0  # nats over all validation texts; a smaller gain may be chance
HISTORY = 10  # of L-BFGS; more would take gigabytes with many labels

Logits = npt.NDArray[np.float32]


def word_ngrams(text: str) -> list[str]:
    words = WORD.findall(text.lower().replace("\u2019", "'"))
    counts = range(1, LONGEST + 1)
    return [" ".join(words[at : at + n]) for n in counts for at in range(len(words) - n + 1)]


@dataclass(frozen=True)
class NgramModel:
    vocabulary: Vocabulary
    model: LogisticModel

    @staticmethod
    def fit(train: Texts, labels: int) -> "NgramModel | None":
        """Deterministic given the texts: a resumed run fits it again. None without words."""
        return fit_to(tuple(train.texts), tuple(train.truth.tolist()), labels)

    def logits(self, texts: list[str]) -> Logits:
        """(texts, labels)"""
        return self.model.logits(self.vocabulary.bags(texts))

    def scaled(self, factor: float) -> Self:
        model = LogisticModel(factor * self.model.weight, factor * self.model.bias)
        return replace(self, model=model)

    def save(self, folder: Path) -> None:
        words = "\n".join(self.vocabulary.ids).encode()  # in the order of their ids
        tensors = {
            "words": np.frombuffer(words, dtype=np.uint8).copy(),
            "idf": self.vocabulary.idf.astype(np.float32),
            "weight": self.model.weight.astype(np.float32),
            "bias": self.model.bias.astype(np.float32),
        }
        save_file({name: torch.from_numpy(each) for name, each in tensors.items()}, folder / NGRAMS)

    @classmethod
    def load(cls, folder: Path, labels: int) -> Self:
        file, columns = folder / NGRAMS, 1 if labels == 2 else labels
        if not file.is_file():
            raise ModelError(f"{folder} lacks {NGRAMS}, which the classifier needs; copy it again")
        tensors = load_tensors(file)
        try:
            words: list[str] = []
            if len(tensors["idf"]) <= MOST_NGRAMS:
                words = tensors["words"].numpy().tobytes().decode().split("\n", MOST_NGRAMS)
            idf, weight, bias = (
                tensors[name].double().numpy() for name in ("idf", "weight", "bias")
            )
        except (KeyError, UnicodeDecodeError, TypeError, RuntimeError):
            raise ModelError(f"{file} is not an n-gram model") from None
        shapes = ((len(words),), (len(words), columns), (columns,))
        if (idf.shape, weight.shape, bias.shape) != shapes or len(set(words)) < len(words):
            raise ModelError(f"{file} does not match its classifier")
        ids = {word: number for number, word in enumerate(words)}
        return cls(Vocabulary(ids, idf, word_ngrams), LogisticModel(weight, bias))


@lru_cache(maxsize=1)  # with several seeds, fitting it each time would take as long as training
def fit_to(texts: tuple[str, ...], truth: tuple[int, ...], labels: int) -> NgramModel | None:
    vocabulary = Vocabulary.of(texts, analyze=word_ngrams, most=MOST_NGRAMS)
    if not len(vocabulary):
        return None
    what = (vocabulary.bags(texts), np.array(truth), labels, len(vocabulary))
    return NgramModel(vocabulary, LogisticModel.fit(*what, STRENGTH, history=HISTORY))


def best_ratio(logits: Logits, ngram_logits: Logits, truth: Ints, labels: tuple[str, ...]) -> float:
    """How much of the n-gram model's logits to add to the classifier's, for the lowest calibrated
    loss; 0 if that hardly lowers it."""

    def loss(ratio: float) -> float:
        mixed = logits + ratio * ngram_logits
        return score(mixed, truth, labels, fit_temperature(mixed, truth)).loss

    losses = {ratio: loss(ratio) for ratio in RATIOS}
    best = min(RATIOS, key=losses.__getitem__)
    return best if losses[best] < loss(0.0) - LEAST_GAIN / len(truth) else 0.0
