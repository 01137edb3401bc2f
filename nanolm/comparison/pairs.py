"""Models that turn one text into another, on the same pairs: recurrent without and with attention,
and Transformers.

>>> task = PairComparison(settings, notify)
>>> task.train("attention", seed=1, seconds=60, folder=Path("runs/x/attention"))
"""

import statistics
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from nanolm.comparison.training import ModelKind, train_in_run
from nanolm.pairs.data import PairSplit, split_pairs
from nanolm.pairs.recipe import MOST_SYMBOLS
from nanolm.pairs.settings import PairSettings
from nanolm.pairs.train import train_pairs
from nanolm.pretraining.begin import reports
from nanolm.runs.info import describe
from nanolm.training.events import Notify

SENTENCE_WORDS = 4  # words of a typical target, from which BLEU means something
RECURRENT = "seq2seq-gru"


class PairComparison:
    """Pairs of texts, and the models trained on them."""

    seeds = 1

    def __init__(self, settings: PairSettings, notify: Notify) -> None:
        self.settings, self.notify, self.kinds = settings, notify, PAIR_MODELS

    @cached_property
    def split(self) -> PairSplit:
        return split_pairs(self.settings, reports(self.notify)[1])

    def fingerprint(self) -> str:
        return self.split.fingerprint()

    @cached_property
    def measure(self) -> str:
        """BLEU for sentences, which can be right in many ways; else exact match."""
        targets = [target.split() for target in self.split.train.targets]
        symbols = {word for target in targets for word in target}
        typical = statistics.median(map(len, targets))
        return "bleu" if typical >= SENTENCE_WORDS and len(symbols) > MOST_SYMBOLS else "exact"

    def train(self, name: str, seed: int, seconds: float, folder: Path) -> dict[str, Any]:
        """Train in a run like `nanolm train-pairs`."""
        settings = replace(self.settings, seed=seed, minutes=seconds / 60, **SWITCHES[name])
        result = train_in_run(settings, folder, partial(train_pairs, notify=self.notify))
        by_length = result["by_length"]
        scores = {"": result["val"], "long_": by_length[-1], "test_": result.get("test", {})}
        return {
            **{f"{p}{key}": s[key] for p, s in scores.items() for key in ("bleu", "exact") if s},
            **({"val_loss": result["val_loss"]} if "val_loss" in result else {}),
            "parameters": describe(str(folder), lambda text: None).parameters,
            "seconds": result["seconds"],
            "steps": result["steps"],
            "by_length": by_length,
        }


def kind(title: str, teaches: str) -> ModelKind:
    return ModelKind(title, teaches, 1.0, PairComparison.train)


SWITCHES: dict[str, dict[str, Any]] = {
    "bottleneck": {"family": RECURRENT, "attention": "none"},
    "attention": {"family": RECURRENT, "attention": "additive"},
    "transformer": {"family": "encoder-decoder"},
    "modern": {"family": "modern-encoder-decoder"},
}
PAIR_MODELS: dict[str, ModelKind] = {
    "bottleneck": kind("GRU", "one vector has to hold the whole source"),
    "attention": kind("GRU with attention", "each target token looks back at all source tokens"),
    "transformer": kind("original Transformer", "attention only; all positions in parallel"),
    "modern": kind(
        "modern Transformer", "rotary positions, RMSNorm, SwiGLU and QK-norm speed up learning"
    ),
}
