"""What the training loop works on: what is learned, and how far it has come.

A `Task` says how a batch becomes a loss and how good the model is. A `State` is everything that the
loop changes besides weights and moments; it is saved with them.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from nanolm.errors import ModelError
from nanolm.training.events import Started


@dataclass
class State:
    """Everything the loop changes besides weights and moments; state.json."""

    step: int = 0
    passed_over: int = 0  # batches left out; the index of a batch is step + passed_over
    tokens: int = 0  # trained on
    seconds: float = 0.0  # spent in the loop, evaluating and saving included
    sums: dict[str, float] = field(default_factory=dict)  # of loss and the like, since the
    summed: int = 0  # last line of metrics, over so many steps
    evaluation_sums: dict[str, float] = field(default_factory=dict)  # of the same values since the
    evaluation_steps: int = 0  # last evaluation, and the number of steps
    train_loss: float | None = None  # in the last line of metrics
    evaluations: int = 0
    evaluated_tokens: int | None = None  # how much held-out text is looked at on the way
    scores: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    best: list[float] | None = None  # lower is better, the first number deciding first
    best_step: int = 0
    lowest_loss: float | None = None  # on held-out data
    beyond: int = 0  # evaluations in a row since the best that were clearly worse
    decay_step: int | None = None  # where the learning rate began to fall
    bad_steps: int = 0  # in a row without a finite gradient,
    skipped: int = 0  # and how many since the last line of metrics
    returns: int = 0  # to a checkpoint, after too many of them
    good_step: int = 0  # of the last checkpoint that was not saved between them
    reserve: float = 0.0  # seconds that looking at held-out data takes when the steps are done
    begun: float = 0.0  # of runs of 0.1.0: how much of the budget was used before the first step
    setup: float = 0.0  # seconds of the budget that went into preparing, not into steps
    first_loss: float | None = None  # in the first line of metrics
    told: list[str] = field(default_factory=list)  # what was warned of
    parts: int = 1  # that a batch goes through in, so that it fits into memory
    lengths: dict[str, int] = field(default_factory=dict)  # of metrics.jsonl and samples.md


class Task(ABC):
    """What is learned: how a batch becomes a loss, and how good the model is."""

    model: nn.Module
    weight_decay: float
    evaluations: int  # in the whole run
    evaluate_first = False  # what training starts from may be the best already
    patience: int | None = None  # evaluations clearly beyond the best before it is enough
    compile_seconds: float | None = None  # what compiling takes, about; None: it cannot be
    keeps_last: bool = False  # whatever validation says: there is too little of it to choose by
    sharded: nn.Module | None = None  # the loss, where each process has a share of the weights

    @abstractmethod
    def start_event(self, run: Path, step: int) -> Started:
        """What to tell before the first step."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        return dict(self.model.named_parameters())

    def lr_scale(self, name: str) -> float:
        """What to multiply the learning rate of a parameter by."""
        return 1.0

    def muon_parameters(self) -> dict[str, list[int]]:
        """Those of the parameters that are for Muon, each with the rows of its matrices."""
        return {}

    def expected(self, learned: float) -> float | None:
        """The bits per byte that a plan foretold for when so much of all learning is done."""
        return None

    def seconds_after_training(self) -> float:
        """What is done when the steps are done, and not by the loop, takes."""
        return 0.0

    def why_validation_rises(self) -> str:
        """What it means that validation loss rises, and what to do about it."""
        return "the model is overfitting; try more --dropout, more --weight-decay, or more data"

    @abstractmethod
    def batch(self, index: int) -> tuple[Tensor, ...]:
        """Batch number `index`, on the CPU."""

    def tokens(self, batch: tuple[Tensor, ...]) -> int:
        """How many a batch has."""
        return batch[0].numel()

    def epoch(self, batches: int) -> float | None:
        """Passes over the training data after this many batches; None if the task has no epochs."""
        return None

    @abstractmethod
    def loss(self, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What to minimise, and what to keep a record of besides, or instead as "loss".

        No number may leave the device.
        """

    @abstractmethod
    def evaluate(self, state: State, progress: float) -> tuple[list[float], dict[str, float]]:
        """How good the model is, lower is better, and what to keep a record of: `val_loss`, ..."""

    def compile(self, wanted: bool) -> None:
        """Let the model be compiled when it is next used, or not any more; asked only of tasks
        that say how long it takes."""
        raise NotImplementedError

    def save_memory(self) -> bool:
        """Do something that is slower but takes less, unless there is nothing left to do."""
        return False

    def saved_bytes(self) -> int:
        """The size of the weights in a checkpoint, about."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @abstractmethod
    def snapshot(self) -> Callable[[Path], None]:
        """What writes the model as it is now, and what only this task needs to go on."""

    @abstractmethod
    def load_weights(self, folder: Path) -> None:
        """Let the model be the one that was saved in `folder`."""

    def load_checkpoint(self, folder: Path) -> None:
        """Let all that is trained be as it was saved in `folder`, to go on from there."""
        self.load_weights(folder)


def read_state(folder: Path) -> State:
    """What was saved in `folder`."""
    file = folder / "state.json"
    try:
        return State(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
