"""Distillation for small labeled datasets: a linear n-gram model teaches the classifier.

    >>> teacher = Teacher.fit(split.train, labels=2, seed=1)
    >>> teacher.accuracy, teacher.weight()
    >>> ids, lengths, truth, target = Distillation(teacher, ...).batch(0)

A small language model memorizes a few hundred labeled texts. Logistic regression on n-grams does
better there, and costs almost nothing: it labels synthetic texts, spliced together from the
training texts, after each word. The classifier learns from these and from the true labels. Where
cross-validation shows that words alone do not predict the label, there is no teacher.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from nanolm.classification.bag_of_words import LogisticModel, Vocabulary, subwords
from nanolm.classification.data import Encoded, Ints, LengthBatches, Texts, Truncation, packed
from nanolm.classification.metrics import majority, softmax
from nanolm.text.tokenizer import Tokenizer

TEACHER_FOLDS = 4  # of cross-validation
TEACHER_STRENGTH = 5.0  # inverse of the L2 penalty; from 3 to 10 the accuracy is the same
TEACHER_TOLERANCE = 1e-3  # of the fit; a closer fit does not predict better
FEWEST_TEXTS, MOST_TEXTS = 100, 5_000  # with fewer, cross-validation says nothing
LEAST_SKILL = 0.05  # share of the majority-class baseline's errors that a teacher must avoid
SYNTHETIC_WORDS = (4, 24)  # minimum and maximum length of a synthetic text
IGNORED_LABEL = -100  # the default ignore_index of cross-entropy
LABELED_WEIGHT = 0.5  # of the labeled texts in a batch, relative to the synthetic ones
REPLACED_SHARE = 0.3  # of the words in a synthetic text, so that the classifier learns n-grams
WORD_TOKEN = re.compile(r" \w{3,}")  # a token that starts a word, and may be all of it

Probabilities = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Teacher:
    """A linear n-gram model, and its predictions for texts that it was not fitted on."""

    vocabulary: Vocabulary
    model: LogisticModel
    held_out: Probabilities  # (texts, labels); each text by a model fitted on the other folds
    accuracy: float  # of these predictions
    majority: float

    @classmethod
    def fit(cls, train: Texts, labels: int, seed: int) -> Self:
        """Deterministic given the texts and the seed: a resumed run fits it again."""
        held_out = np.empty((len(train), labels))
        fold = np.random.default_rng([seed, TEACHER_FOLDS]).permutation(len(train)) % TEACHER_FOLDS
        for number in range(TEACHER_FOLDS):
            rest, left_out = np.flatnonzero(fold != number), np.flatnonzero(fold == number)
            vocabulary, model = fit_linear(train.part(rest), labels)
            held_out[left_out] = softmax(model.logits(vocabulary.bags(train.part(left_out).texts)))
        accuracy = float((held_out.argmax(axis=1) == train.truth).mean())
        return cls(*fit_linear(train, labels), held_out, accuracy, majority(train.truth, labels))

    def weight(self) -> float:
        """Its share of a labeled text's target; 0 if it barely beats the majority class."""
        skill = (self.accuracy - self.majority) / max(1e-9, 1 - self.majority)
        noise = 2 * (0.25 / len(self.held_out)) ** 0.5  # two standard errors
        useful = skill >= LEAST_SKILL and self.accuracy - self.majority >= noise
        return round(min(0.5, skill), 2) if useful else 0.0

    def probabilities(self, texts: list[str]) -> Probabilities:
        return softmax(self.model.logits(self.vocabulary.bags(texts)))


def fit_linear(train: Texts, labels: int) -> tuple[Vocabulary, LogisticModel]:
    vocabulary = Vocabulary.of(train.texts, analyze=subwords)
    bags, how = vocabulary.bags(train.texts), (TEACHER_STRENGTH, TEACHER_TOLERANCE)
    return vocabulary, LogisticModel.fit(bags, train.truth, labels, len(vocabulary), *how)


class Distillation:
    """Batches of labeled and synthetic texts, each a pure function of the seed and its index."""

    def __init__(
        self,
        teacher: Teacher,
        weight: float,
        train: Texts,
        encoded: Encoded,
        batches: LengthBatches,
        tokenizer: Tokenizer,
    ) -> None:
        self.teacher, self.encoded, self.batches = teacher, encoded, batches
        self.tokenizer, self.byte_lengths = tokenizer, tokenizer.byte_lengths()
        true = np.eye(teacher.held_out.shape[1])[train.truth]
        self.targets = (1 - weight) * true + weight * teacher.held_out
        self.words = [words for text in train.texts if (words := text.split())]
        tokens = (token.decode(errors="ignore") for token in tokenizer.tokens)
        self.vocabulary = [token[1:] for token in tokens if WORD_TOKEN.fullmatch(token)]

    def batch(self, index: int) -> tuple[Ints, Ints, Ints, npt.NDArray[np.float32]]:
        """(ids, lengths, truth, target), where target is (texts, time, labels). A causal model
        classifies every prefix of a text at once, so the teacher labels a synthetic text after each
        of its words. A labeled text has one target, at its end. Targets are probabilities times a
        weight that balances labeled and synthetic texts, however many words they have. All other
        targets are zero."""
        rows = self.batches[index]
        random = np.random.default_rng([self.batches.seed, index, TEACHER_FOLDS])
        count = int(random.integers(*SYNTHETIC_WORDS, endpoint=True))  # for all: less padding
        spliced = [self.splice(count, random) for _ in rows]
        # Labeled and synthetic texts alternate, so that any part of a batch has both.
        cut, begin = Truncation(self.encoded.most, "head"), len(self.tokenizer.begin)
        windows: list[Sequence[int] | npt.NDArray[np.int32]] = []
        for row, words in zip(rows, spliced, strict=True):
            windows.append(self.encoded.window(row))
            windows += cut.windows(self.tokenizer.encode_prompt(" ".join(words)), begin)
        truth = np.full(len(windows), IGNORED_LABEL)
        truth[::2] = self.encoded.truth[rows]
        both = replace(self.encoded, **packed(windows), truth=truth)
        ids, lengths, truth = both.rows(np.arange(len(windows)))
        target = np.zeros((*ids.shape, self.targets.shape[1]), dtype=np.float32)
        labeled = 2 * LABELED_WEIGHT * self.targets[self.encoded.text[rows]]
        target[np.arange(0, len(ids), 2), lengths[::2] - 1] = labeled
        places = [
            (2 * row + 1, position, " ".join(words[:count]))
            for row, words in enumerate(spliced)
            for count, position in self.word_ends(words, ids[2 * row + 1], lengths[2 * row + 1])
        ]
        which, positions, prefixes = (list(column) for column in zip(*places, strict=True))
        target[which, positions] = len(ids) / len(places) * self.teacher.probabilities(prefixes)
        return ids, lengths, truth, target

    def word_ends(self, words: list[str], ids: Ints, length: int) -> list[tuple[int, int]]:
        """(number of words, position of the token that ends them). A word is skipped if it shares
        its last token with the next one."""
        begin = len(self.tokenizer.begin)
        ends = np.cumsum([len(word.encode()) + 1 for word in words]) - 1  # in bytes
        reached = np.cumsum(self.byte_lengths[ids[begin:length]])
        positions = np.searchsorted(reached, ends)
        known = [
            (count, begin + int(position))
            for count, (position, end) in enumerate(zip(positions, ends, strict=True), start=1)
            if position < len(reached) and reached[position] == end
        ]
        return known or [(len(words), length - 1)]

    def splice(self, count: int, random: np.random.Generator) -> list[str]:
        """`count` words in spans from random training texts. Some are replaced by a word of the
        tokenizer's vocabulary, or by the beginning of one word and the end of another."""
        spliced: list[str] = []
        while len(spliced) < count:
            words = self.words[random.integers(len(self.words))]
            start = int(random.integers(len(words)))
            spliced += words[start : start + int(random.integers(1, len(words) - start + 1))]
        spliced = spliced[:count]
        for place in np.flatnonzero(random.random(count) < REPLACED_SHARE):
            if self.vocabulary and random.random() < 0.5:
                spliced[place] = self.vocabulary[random.integers(len(self.vocabulary))]
                continue
            words = self.words[random.integers(len(self.words))]
            beginning, ending = spliced[place], words[random.integers(len(words))]
            beginning = beginning[: random.integers(1, len(beginning) + 1)]
            spliced[place] = beginning + ending[random.integers(len(ending)) :]
        return spliced
