"""Train the baselines, with the same code for every network.

    >>> train_network(network, lengths, rows, evaluate, 1e-3, seconds=20, seed=1, stop=stop)

AdamW on batches of texts of similar length; the weights with the best validation score are kept.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanolm.classification.data import Ints, LengthBatches
from nanolm.runs.folder import Run
from nanolm.training.interrupt import StopRequest
from nanolm.training.optim import Optimizers
from nanolm.training.schedule import lr_factor
from nanolm.training.settings import Settings
from nanolm.training.step import Step

S = TypeVar("S", bound=Settings)
BATCH, WEIGHT_DECAY, EVALUATIONS = 32, 0.01, 12
EARLY_STOP_AFTER = 4  # evaluations in a row with a loss above EARLY_STOP_LOSS and no new best
EARLY_STOP_LOSS = 1.05  # times the lowest
MIN_EPOCHS, MAX_EPOCHS = 3, 20
CHOSEN = ("minutes", "epochs", "ngrams")  # settings that the comparison chooses
TEXTS_SEEN = 24_000  # in total, within the limits above


class StopTraining(Exception):
    """The user asked to stop."""


@dataclass(frozen=True)
class ModelKind:
    title: str
    teaches: str
    share: float  # of the time, relative to the other rows
    train: Callable[..., Any]


def train_in_run(settings: S, folder: Path, train: Callable[[S, Path], Any]) -> dict[str, Any]:
    """Train in a separate run and return the result in run.json. The run may be finished already,
    or have been started before a kill, with a different number of minutes or an older version."""
    run = Run(folder)
    if not (run.exists() and run.finished()):
        if run.exists():
            asked = run.facts()["request"]
            same = {name: asked.get(name) for name in CHOSEN if hasattr(settings, name)}
            settings = replace(settings, **same)
        if train(settings, folder).stopped == "interrupted":
            raise StopTraining
    return run.facts()["result"]  # type: ignore[no-any-return]


def train_network(
    network: nn.Module,
    lengths: Ints,
    rows: Callable[[Ints], tuple[Tensor, ...]],
    evaluate: Callable[[], tuple[float, float]],
    lr: float,
    seconds: float,
    seed: int,
    stop: StopRequest,
    batch: int = BATCH,
    epochs: float | None = None,
) -> int:
    """Train until enough texts are seen or the time is up; returns the number of steps. `rows`
    returns texts and labels by index; `evaluate` returns an error and a loss."""

    def loss(words: Tensor, more: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return F.cross_entropy(network(words, more).float(), labels), {}

    batches = LengthBatches(lengths, batch, seed)
    epochs = epochs or max(MIN_EPOCHS, min(MAX_EPOCHS, TEXTS_SEEN / len(lengths)))
    steps = max(1, round(epochs * batches.in_epoch))
    optimizers = Optimizers(dict(network.named_parameters()), weight_decay=WEIGHT_DECAY)
    update = Step(loss, optimizers, "float32")
    begin, step, evaluations, worse = time.monotonic(), 0, 0, 0
    best, lowest_loss, best_weights = (math.inf, 0.0), math.inf, dict[str, Tensor]()
    while True:
        progress = max(step / steps, (time.monotonic() - begin) / seconds)
        if progress >= (evaluations + 1) / EVALUATIONS:
            evaluations = int(progress * EVALUATIONS)
            score = evaluate()
            lowest_loss = min(lowest_loss, score[1])
            # Many networks plateau for a while before they learn: do not stop for that.
            worse = worse + 1 if score[1] > EARLY_STOP_LOSS * lowest_loss else 0
            if score < best or not best_weights:
                best, worse = score, 0
                best_weights = {name: value.clone() for name, value in network.state_dict().items()}
        if progress >= 1 or worse >= EARLY_STOP_AFTER:
            break
        if stop.requested:
            raise StopTraining
        network.train()
        torch.manual_seed(seed * 1_000_003 + step)
        update(rows(batches[step]), lr * lr_factor(progress))
        step += 1
    network.load_state_dict(best_weights)
    return step
