"""A classifier with its tokenizer: texts in, a probability for each label out.

    >>> text_classifier = load("runs/reviews", note=print)
    >>> text_classifier.logits(["A lovely film."])

Texts of similar length are batched together, as many as fit.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from nanolm.choice import Report
from nanolm.classification.data import Encoded, Ints, Texts, Truncation, encode, known_labels
from nanolm.classification.metrics import ClassifierScores, Mistake, score, softmax, worst_mistakes
from nanolm.classification.ngrams import NgramModel
from nanolm.errors import NOT_FINITE, DataError, ModelError
from nanolm.model.classifier import Classifier
from nanolm.model.device import choose_device, choose_dtype, use_fitting_threads
from nanolm.model.huggingface import load_classifier
from nanolm.model.stored import NGRAMS, load_classifier_config
from nanolm.runs.folder import find_adapter, find_named, model_tokenizer
from nanolm.text.labeled import LabelReading, read_labeled
from nanolm.text.tokenizer import Tokenizer

BATCH_TOKENS = {"cpu": 4096, "cuda": 65_536, "mps": 16_384}  # including padding
MOST_SORTED = 8192  # texts that are sorted by length together
MISTAKES = 10  # in a result; mistakes.csv has all of them
LENGTH_MULTIPLE = {"cpu": 1, "cuda": 8, "mps": 1}  # batches are padded to a multiple of this

Logits = npt.NDArray[np.float32]


def predict(
    model: nn.Module,
    labels: int,
    data: Encoded,
    low: bool = False,
    report: Report = lambda *how_far: None,
) -> Logits:
    """The logits of each text, (texts, labels), averaged over its windows. `model` takes ids,
    (batch, time), and the length of each row."""
    logits = np.empty((len(data.lengths), labels), dtype=np.float32)  # of each window
    was_training, device = model.training, next(model.parameters()).device
    for rows, batch in in_batches(model.eval(), data, device, low, report):
        logits[rows] = batch.cpu().numpy()
    model.train(was_training)
    totals = np.zeros((data.count, labels), dtype=np.float32)
    np.add.at(totals, data.text, logits)
    windows: Logits = np.bincount(data.text, minlength=data.count).astype(np.float32)
    return totals / windows[:, None]


@torch.inference_mode()
def in_batches(
    compute: Callable[[Tensor, Tensor], Tensor],
    data: Encoded,
    device: torch.device,
    low: bool = False,
    report: Report = lambda *how_far: None,
    what: str = "classifying",
) -> list[tuple[Ints, Tensor]]:
    """The outputs of `compute` for ids and lengths, in float32, each with its window indices."""
    order, most = np.argsort(data.lengths, kind="stable"), BATCH_TOKENS[device.type]
    done, batches = 0, []
    while done < len(order):
        # Take as many of the next longer windows as fit.
        some = order[done : done + most]
        sizes = data.lengths[some] * np.arange(1, len(some) + 1)
        rows = some[: max(1, int(np.searchsorted(sizes, most, side="right")))]
        ids, lengths, _ = (torch.from_numpy(part).to(device) for part in data.rows(rows))
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            batches.append((rows, compute(ids, lengths).float()))
        done += len(rows)
        report(what, done, len(order))
    return batches


def encode_for(model: Classifier, texts: Texts, tokenizer: Tokenizer, report: Report) -> Encoded:
    """Texts encoded and truncated for `model`."""
    cut = Truncation(model.config.window, model.config.long)
    return encode(texts, tokenizer, cut, report, LENGTH_MULTIPLE[model.device.type])


@dataclass(frozen=True)
class Measured:
    scores: ClassifierScores
    mistakes: tuple[Mistake, ...]  # all of them, the most confident first
    notes: list[str]


def mistakes_csv(mistakes: Iterable[Mistake]) -> str:
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(["text", "label", "prediction", "probability"])
    rows.writerows([m.text, m.label, m.predicted, f"{m.probability:.6f}"] for m in mistakes)
    return table.getvalue()


@dataclass(frozen=True)
class TextClassifier:
    """The result of `nanolm.load_classifier`."""

    model: Classifier
    tokenizer: Tokenizer
    low: bool = False  # in bfloat16
    ngrams: NgramModel | None = None  # added to the logits

    @property
    def labels(self) -> tuple[str, ...]:
        return self.model.config.labels

    def logits(self, texts: list[str], report: Report = lambda *how_far: None) -> Logits:
        texts = [text.strip() for text in texts]
        unknown = Texts(texts, np.zeros(len(texts), dtype=np.int64))
        data = encode_for(self.model, unknown, self.tokenizer, report)
        logits = predict(self.model, len(self.labels), data, self.low, report)
        if self.ngrams:
            logits += self.ngrams.logits(texts)
        if not np.isfinite(logits).all():
            raise ModelError(NOT_FINITE)
        return logits

    def classify(self, text: str) -> dict[str, float]:
        """The probability of each label, most likely first."""
        (probabilities,) = softmax(self.logits([text]))
        pairs = zip(self.labels, probabilities.tolist(), strict=True)
        return dict(sorted(pairs, key=lambda pair: -pair[1]))

    def stream(self, parts: Iterable[list[str]]) -> Iterator[tuple[str, npt.NDArray[np.float64]]]:
        """Each text with its probabilities, in order; the texts of a part are batched together."""
        for part in parts:
            if part:
                yield from zip(part, softmax(self.logits(part)), strict=True)

    def measure(self, names: tuple[str, ...], reading: LabelReading, report: Report) -> Measured:
        read = read_labeled(names, reading, report)
        ids = known_labels(set(read.labels), self.labels, ", ".join(names[:5]))
        truth = np.array([ids[label] for label in read.labels], dtype=np.int64)
        logits = self.logits(read.texts, report)
        mistakes = worst_mistakes(read.texts, logits, truth, self.labels)
        return Measured(score(logits, truth, self.labels), mistakes, [read.how, *read.notes])

    def on(self, device: str, dtype: str) -> Self:
        """The same classifier on a device ("auto": the best available)."""
        where, _ = choose_device(device)
        precision, _ = choose_dtype(dtype, where)
        if where == "cpu":
            use_fitting_threads(self.model)
        return replace(self, model=self.model.to(where), low=precision == "bfloat16")


class TrueLabels:
    """Maps the labels in a file to the labels of a classifier."""

    def __init__(self, labels: tuple[str, ...], where: str) -> None:
        self.labels, self.where = labels, where
        self.written: set[str] = set()
        self.known: dict[str, int] = {}

    def are_known(self, values: set[str]) -> bool:
        """Whether all are labels of the classifier. A set can be clear when one value is not: 0 may
        be negative or neutral, but -1, 0 and 1 together are unambiguous."""
        try:
            self.add(values)
        except DataError:
            return False
        return bool(values)

    def add(self, values: set[str]) -> None:
        self.known = known_labels(self.written | values, self.labels, self.where)
        self.written |= values

    def __getitem__(self, value: str) -> str:
        """The name of a label; empty for an empty value. DataError if it is not known."""
        if value and value not in self.written:
            self.add({value})
        return self.labels[self.known[value]] if value else ""


def in_parts(texts: Iterable[str], size: int = 64) -> Iterator[list[str]]:
    """Parts of `size` texts first, so that results appear soon, then up to MOST_SORTED."""
    left = iter(texts)
    while part := list(islice(left, size)):
        yield part
        size = min(MOST_SORTED, 2 * size)


def load(
    path: str | Path,
    note: Callable[[str], None],
    progress: Report = lambda *how_far: None,
    adapter: str | None = None,
) -> TextClassifier:
    """The classifier in a run folder, a checkpoint, a model folder of a known family, or hf://. The
    LoRA `adapter` is merged into it."""
    folder, merged = find_named(path, note, progress), find_adapter(adapter)
    if merged is None:
        load_classifier_config(folder)  # fails early if this is not a classifier
    model = load_classifier(folder, adapter=merged)
    config, ngrams = model.config, None
    if merged is None and config.ngrams:
        ngrams = NgramModel.load(folder, len(config.labels))
    elif merged is not None and (config.ngrams or (merged.parent / NGRAMS).is_file()):
        note(
            f"--adapter: {NGRAMS} is not used, so scores differ from those of the whole classifier"
        )
    return TextClassifier(model, model_tokenizer(folder), ngrams=ngrams)
