"""Classifier metrics: accuracy, per-class scores, calibration, and the worst mistakes.

>>> scores = score(logits, truth, ["bad", "good"], temperature=fit_temperature(logits, truth))
>>> print(scores.accuracy, scores.macro_f1, scores.calibration_error)

Logits are (texts, classes), `truth` has a class index for each text; all sums are in float64.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import starmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

BINS = 10  # of the top probability, equally wide (Guo et al. 2017 use 10 or 15)
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.05, 20.0
TEMPERATURE_PRIOR = 10.0  # penalty in nats for 1 / T = 0 or 2, over all texts

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class ClassScore:
    """One class; a ratio with a zero denominator is 0."""

    label: str
    precision: float
    recall: float
    f1: float
    support: int  # texts of this class


@dataclass(frozen=True)
class Bin:
    """The texts whose top probability is in (low, high]; the means are 0 if there are none."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class ClassifierScores:
    accuracy: float
    macro_f1: float
    loss: float  # mean log-loss in nats
    count: int
    classes: tuple[ClassScore, ...]
    confusion: tuple[tuple[int, ...], ...]  # rows are true classes, columns predicted ones
    calibration_error: float  # |confidence - accuracy| of a bin, averaged over texts
    bins: tuple[Bin, ...]  # of a reliability diagram

    def to_json(self) -> dict[str, Any]:
        """As lists and plain values; non-finite numbers, which JSON lacks, become None."""
        return json_value(asdict(self))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Mistake:
    text: str
    label: str
    predicted: str
    probability: float


def score(
    logits: Floats, truth: Integers, labels: Sequence[str], temperature: float = 1.0
) -> ClassifierScores:
    """All metrics at once; only loss and calibration depend on the `temperature`."""
    count, classes = logits.shape
    logs = log_softmax(logits, temperature)
    predicted = logits.argmax(axis=1)
    pairs = np.bincount(truth.astype(np.int64) * classes + predicted, minlength=classes**2)
    confusion = pairs.reshape(classes, classes)  # (truth, predicted)
    right, support, predictions = confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)
    precision, recall = right / np.maximum(1, predictions), right / np.maximum(1, support)
    f1 = 2 * right / np.maximum(1, support + predictions)
    columns = [column.tolist() for column in (precision, recall, f1, support)]
    error, bins = calibration(np.exp(logs.max(axis=1)), predicted == truth)
    some = max(1, count)
    return ClassifierScores(
        accuracy=float(right.sum() / some),
        macro_f1=float(f1.mean()),
        loss=float(-logs[np.arange(count), truth].sum() / some),
        count=count,
        classes=tuple(starmap(ClassScore, zip(labels, *columns, strict=True))),
        confusion=tuple(map(tuple, confusion.tolist())),
        calibration_error=error,
        bins=bins,
    )


def calibration(confidence: Floats, right: NDArray[np.bool_]) -> tuple[float, tuple[Bin, ...]]:
    """The expected calibration error, and its bins."""
    edges = np.arange(BINS + 1) / BINS
    # NaN, from a broken model, sorts last: it falls into the last bin and becomes the error.
    place = np.clip(np.searchsorted(edges, confidence) - 1, 0, BINS - 1)
    counts, sure, true = (np.bincount(place, of, BINS) for of in (None, confidence, right))
    error = float(np.abs(sure - true).sum() / max(1, len(confidence)))
    some = np.maximum(1, counts)
    columns = (edges[:-1], edges[1:], counts, sure / some, true / some)
    return error, tuple(map(Bin, *(column.tolist() for column in columns)))


def fit_temperature(logits: Floats, truth: Integers) -> float:
    """The T between 0.05 and 20 that minimizes the log-loss of softmax(logits / T). A few texts, or
    texts without mistakes, say little about T, so a prior pulls it toward 1. The loss is convex in
    1 / T, so its slope has at most one root, which bisection finds."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    right = shifted[np.arange(len(truth)), truth]

    def slope(temperature: float) -> float:
        """The derivative of the loss in 1 / T; positive if a higher temperature is better."""
        expected = (softmax(shifted, temperature) * shifted).sum(axis=1)
        return float((expected - right).sum()) + 2 * TEMPERATURE_PRIOR * (1 / temperature - 1)

    if not abs(slope(1.0)) > 0:
        return 1.0  # it is optimal, or every T is equally good, or the slope is NaN
    low, high = math.log(LEAST_TEMPERATURE), math.log(MOST_TEMPERATURE)
    for _ in range(50):  # to the precision of floats
        middle = (low + high) / 2
        low, high = (middle, high) if slope(math.exp(middle)) > 0 else (low, middle)
    return math.exp((low + high) / 2)


def majority(truth: Integers, classes: int) -> float:
    """The accuracy of the majority-class baseline, which a classifier has to beat."""
    return float(np.bincount(truth, minlength=classes).max() / max(1, len(truth)))


def worst_mistakes(
    texts: list[str], logits: Floats, truth: Integers, labels: Sequence[str], temperature: float = 1
) -> tuple[Mistake, ...]:
    """All mistakes, most confident first."""
    predicted, confidence = logits.argmax(axis=1), softmax(logits, temperature).max(axis=1)
    wrong = np.flatnonzero(predicted != truth)
    worst = wrong[np.argsort(-confidence[wrong], kind="stable")]
    return tuple(
        Mistake(texts[row], labels[truth[row]], labels[predicted[row]], float(confidence[row]))
        for row in worst
    )


def softmax(logits: Floats, temperature: float = 1.0) -> NDArray[np.float64]:
    return np.exp(log_softmax(logits, temperature))


def log_softmax(logits: Floats, temperature: float = 1.0) -> NDArray[np.float64]:
    """Log probabilities (texts, classes), without overflow or log 0."""
    logs: NDArray[np.float64] = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    logs /= temperature
    logs -= np.log(np.exp(logs).sum(axis=1, keepdims=True))
    return logs


def json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: json_value(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [json_value(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
