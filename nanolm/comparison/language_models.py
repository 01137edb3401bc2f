"""Language models on plain text (n-grams, recurrence, attention): bits per byte over time.

>>> task = LanguageModelComparison(settings, notify)
>>> task.train("lstm", seed=1, seconds=60, folder=Path("runs/x/lstm"))
"""

import json
import math
import time
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from nanolm.comparison.training import ModelKind, train_in_run
from nanolm.pretraining.prepare import prepare_text
from nanolm.pretraining.train import train
from nanolm.report.run_data import read_metrics
from nanolm.runs.folder import Run
from nanolm.runs.info import describe
from nanolm.text.store import Prepared
from nanolm.text.vocabulary import counted_bits
from nanolm.training.events import Notify
from nanolm.training.settings import TrainSettings

MAX_NGRAM = 5  # tokens


class LanguageModelComparison:
    """A text, and the language models trained on it."""

    measure, seeds = "bits_per_byte", 1

    def __init__(self, settings: TrainSettings, notify: Notify) -> None:
        self.settings, self.notify, self.kinds = settings, notify, LANGUAGE_MODELS

    def fingerprint(self) -> str:
        return json.dumps(self.text.fingerprints)

    @cached_property
    def text(self) -> Prepared:
        return prepare_text(self.settings, None, self.notify)

    def train(self, name: str, seed: int, seconds: float, folder: Path) -> dict[str, Any]:
        return self.kinds[name].train(self, seed, seconds, folder)  # type: ignore[no-any-return]


def count_ngrams(
    task: LanguageModelComparison, seed: int, seconds: float, folder: Path
) -> dict[str, Any]:
    """Count n-grams with longer and longer contexts, while they help."""
    text, curve, best = task.text, [], math.inf
    begin, vocab_size = time.monotonic(), text.tokenizer.vocab_size
    ids, held_out = (np.asarray(part[:]).astype(np.int64) for part in (text.train, text.val))
    size = int(text.tokenizer.byte_lengths()[held_out].sum())
    longest = min(MAX_NGRAM, int(62 / math.log2(vocab_size)))  # an n-gram fits in 64 bits
    for length in range(longest):
        bits = counted_bits(ids, held_out, vocab_size, length) / size
        curve.append([time.monotonic() - begin, bits])
        if bits > best:
            break
        best = bits
    seconds = time.monotonic() - begin
    return {"bits_per_byte": best, "seconds": seconds, "steps": len(curve), "curve": curve}


def train_family(
    task: LanguageModelComparison, seed: int, seconds: float, folder: Path, family: str | None
) -> dict[str, Any]:
    """Train in a run like `nanolm train`."""
    family = family or task.settings.family
    settings = replace(task.settings, seed=seed, family=family, minutes=seconds / 60)
    result = train_in_run(settings, folder, partial(train, notify=task.notify))
    metrics, key = read_metrics(Run(folder).metrics), "val_bits_per_byte"
    return {
        "bits_per_byte": result[key],
        "parameters": describe(str(folder), lambda text: None).parameters,
        "seconds": result["seconds"],
        "steps": result["steps"],
        "curve": [[row["seconds"], row[key]] for row in metrics if key in row],
    }


def family(title: str, teaches: str, name: str | None) -> ModelKind:
    return ModelKind(title, teaches, 1.0, partial(train_family, family=name))


LANGUAGE_MODELS: dict[str, ModelKind] = {
    "ngram": ModelKind(
        "n-gram", "counts of which token followed the last few tokens", 0.2, count_ngrams
    ),
    "rnn": family("Elman RNN", "one state for all past tokens, updated at every token", "rnn"),
    "lstm": family("LSTM", "gates keep information longer, still token by token", "lstm"),
    "transformer": family("Transformer", "all positions in parallel; learns more per second", None),
}
