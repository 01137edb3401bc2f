"""How what a Transformer is compared with is trained: the same lines for every network.

    >>> learn(network, lengths, rows, look, Recipe(lr=1e-3), seconds=20, seed=1, stop=stop)

AdamW, batches of texts of about the same length, the learning rate up, level and down; the weights
that did best on held-out texts are kept.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nanolm.classification.data import Ints, LengthBatches
from nanolm.comparison.networks import Network
from nanolm.runs.folder import Run
from nanolm.training.interrupt import StopRequest
from nanolm.training.optim import Optimizers
from nanolm.training.schedule import lr_factor
from nanolm.training.settings import Settings
from nanolm.training.step import Step

S = TypeVar("S", bound=Settings)
LOOKS = 12  # at held-out texts
PATIENCE, BEYOND = 4, 1.05  # of them in a row, so far beyond the lowest loss and not better
LEAST, MOST = 3, 20  # passes over the texts, and
ENOUGH = 24_000  # texts altogether, if that is between the two


@dataclass(frozen=True)
class Recipe:
    """What was found to suit a kind of network (docs/experiments.md)."""

    lr: float
    batch: int = 32
    weight_decay: float = 0.01


class Stopped(Exception):
    """Somebody wants it to stop."""


@dataclass(frozen=True)
class Row:
    """A kind of model."""

    title: str
    teaches: str
    share: float  # of the time, beside the others
    how: Callable[..., Any]  # it learns


def in_run(settings: S, folder: Path, train: Callable[[S, Path], Any]) -> dict[str, Any]:
    """What a run of its own came to, as run.json has it: finished before a kill, begun before it
    with other minutes, or new."""
    run = Run(folder)
    if run.exists() and run.finished():
        found: dict[str, Any] = run.facts()["result"]
        return found
    if run.exists():
        settings = replace(settings, minutes=run.facts()["request"].get("minutes"))
    if train(settings, folder).stopped == "interrupted":
        raise Stopped
    found = run.facts()["result"]
    return found


def learn(
    network: Network,
    lengths: Ints,
    rows: Callable[[Ints], tuple[Tensor, ...]],
    look: Callable[[], tuple[float, float]],
    recipe: Recipe,
    seconds: float,
    seed: int,
    stop: StopRequest,
) -> int:
    """Train for as many passes as so many texts need, or these seconds; how many steps it took.

    `rows` gives texts and labels by their numbers; `look` says how good the network is by two
    numbers, lower is better, of which the second is a loss.
    """

    def loss(*batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        words, more, truth = batch
        return F.cross_entropy(network(words, more).float(), truth), {}

    batches = LengthBatches(lengths, recipe.batch, seed)
    passes = max(LEAST, min(MOST, ENOUGH / len(lengths)))
    steps = max(1, round(passes * batches.in_epoch))
    parameters = dict(network.named_parameters())
    step = Step(loss, Optimizers(parameters, weight_decay=recipe.weight_decay), "float32")
    begin, number, looks, worse = time.monotonic(), 0, 0, 0
    best, lowest = (float("inf"), 0.0), float("inf")
    kept: dict[str, Tensor] = {}
    while True:
        progress = max(number / steps, (time.monotonic() - begin) / seconds)
        if progress >= (looks + 1) / LOOKS:
            looks = int(progress * LOOKS)
            found = look()
            lowest = min(lowest, found[1])
            # Many stand still for long before they see what matters: that is no reason to stop.
            worse = worse + 1 if found[1] > BEYOND * lowest else 0
            if found < best or not kept:
                best, worse = found, 0
                kept = {name: value.clone() for name, value in network.state_dict().items()}
        if progress >= 1 or worse >= PATIENCE:
            break
        if stop.requested:
            raise Stopped
        network.train()
        torch.manual_seed(seed * 1_000_003 + number)
        step(rows(batches[number]), recipe.lr * lr_factor(progress))
        number += 1
    network.load_state_dict(kept)
    return number
