"""Language models on a plain text: counting, recurrence, attention; bits per byte against time.

>>> Corpus(settings, notify).learn("lstm", seed=1, seconds=60, folder=Path("runs/x/lstm"))
"""

import json
import math
import time
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from nanolm.comparison.learning import Row, in_run
from nanolm.pretraining.prepare import prepare_text
from nanolm.pretraining.train import train
from nanolm.report.run_data import read_metrics
from nanolm.runs.folder import Run
from nanolm.runs.info import describe
from nanolm.text.store import Prepared
from nanolm.text.vocabulary import counted_bits
from nanolm.training.events import Notify
from nanolm.training.settings import TrainSettings

LONGEST = 5  # tokens that are counted together


class Corpus:
    """A text, and what can learn to go on with it."""

    measure = "bits_per_byte"

    def __init__(self, settings: TrainSettings, notify: Notify) -> None:
        self.settings, self.notify = settings, notify
        self.rows = {
            "ngram": Row(
                "n-gram",
                "counts of what followed the last few tokens: nothing is known of words alike",
                0.2,
                self.count,
            ),
            "rnn": Row(
                "Elman RNN",
                "one state for all that was read, rewritten at every token, one after the other",
                1.0,
                partial(self.train, family="rnn"),
            ),
            "lstm": Row(
                "LSTM",
                "gates keep what matters for longer, but still one token after the other",
                1.0,
                partial(self.train, family="lstm"),
            ),
            "transformer": Row(
                "Transformer",
                "all tokens at once, each looking at any before it: more is learned in the time",
                1.0,
                partial(self.train, family=self.settings.family),
            ),
        }

    def seeds(self) -> int:
        return 1

    def fingerprint(self) -> str:
        return json.dumps(self.text.fingerprints)

    def learn(self, name: str, seed: int, seconds: float, folder: Path) -> dict[str, Any]:
        settings = replace(self.settings, seed=seed)
        found: dict[str, Any] = self.rows[name].how(settings, seconds, folder)
        return found

    @cached_property
    def text(self) -> Prepared:
        return prepare_text(self.settings, None, self.notify)

    def count(self, settings: TrainSettings, seconds: float, folder: Path) -> dict[str, Any]:
        """Longer and longer contexts, as long as they help."""
        text, curve = self.text, []
        begin, vocabulary = time.monotonic(), text.tokenizer.vocab_size
        ids, held_out = (np.asarray(part[:]).astype(np.int64) for part in (text.train, text.val))
        size = int(text.tokenizer.byte_lengths()[held_out].sum())
        most = min(LONGEST, int(62 / math.log2(vocabulary)))  # together they are one number
        for length in range(most):
            bits = counted_bits(ids, held_out, vocabulary, length) / size
            curve.append([time.monotonic() - begin, bits])
            if bits > min(bits for _, bits in curve):
                break
        return {
            "bits_per_byte": min(bits for _, bits in curve),
            "seconds": time.monotonic() - begin,
            "steps": len(curve),
            "curve": curve,
        }

    def train(
        self, settings: TrainSettings, seconds: float, folder: Path, family: str | None
    ) -> dict[str, Any]:
        """A run as `nanolm train` has it."""
        asked = replace(settings, family=family, minutes=seconds / 60)
        result = in_run(asked, folder, partial(train, notify=self.notify))
        lines = read_metrics(Run(folder).metrics)
        key = "val_bits_per_byte"
        return {
            "bits_per_byte": result["val_bits_per_byte"],
            "parameters": describe(str(folder), lambda text: None).parameters,
            "seconds": result["seconds"],
            "steps": result["steps"],
            "curve": [[line["seconds"], line[key]] for line in lines if key in line],
        }
