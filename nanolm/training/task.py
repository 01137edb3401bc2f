"""The interface between the training loop and a task: model, batches, loss and evaluation."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from nanolm.training.events import Started
from nanolm.training.interrupt import EvaluationStopped, StopRequest
from nanolm.training.state import State


class Task(ABC):
    model: nn.Module
    weight_decay: float
    evaluations: int  # in the whole run
    evaluate_first = False  # the initial weights may already be the best
    patience: int | None = None  # evaluations clearly worse than the best before stopping
    compile_seconds: float | None = None  # approximate time to compile; None if not supported
    keeps_last: bool = False  # keep the last weights: the validation set is too small to choose by
    sharded: nn.Module | None = None  # the loss, if the weights are sharded
    lengthens = False  # batches have another shape once the learning rate decays
    decaying = False  # set by the trainer if so
    loss_weight: float = 1.0  # of this process's mean loss, relative to those of the others
    stop: StopRequest | None = None  # that ends evaluations early

    @abstractmethod
    def start_event(self, run: Path, step: int) -> Started:
        """The event to report before the first step."""

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def lr_scale(self, name: str) -> float:
        """The learning rate multiplier of a parameter."""
        return 1.0

    def muon_parameters(self) -> dict[str, list[int]]:
        """The parameters for Muon, with the row counts of the matrices stacked in each."""
        return {}

    def expected(self, learned: float) -> float | None:
        """The bits per byte predicted for this share of the training, if any."""
        return None

    def seconds_after_training(self) -> float:
        """Seconds of work after the last step, outside the training loop."""
        return 0.0

    def why_validation_rises(self) -> str:
        """Why validation loss is rising, and what to do about it."""
        return "the model is overfitting; try more --dropout, more --weight-decay, or more data"

    @abstractmethod
    def batch(self, index: int) -> tuple[Tensor, ...]:
        """Batch number `index`, on the CPU."""

    def tokens(self, batch: tuple[Tensor, ...]) -> int:
        return batch[0].numel()

    def epoch(self, batches: int) -> float | None:
        """Passes over the training data after this many batches; None if the task has no epochs."""
        return None

    @abstractmethod
    def loss(self, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to minimize, and metrics to record; one named "loss" is recorded instead."""

    def check_stop(self, *how_far: object) -> None:
        """Called between the batches of an evaluation; raises `EvaluationStopped` to end it."""
        if self.stop and self.stop.requested:
            raise EvaluationStopped

    @abstractmethod
    def evaluate(self, state: State, progress: float) -> tuple[list[float], dict[str, float]]:
        """A score to rank checkpoints by (lower is better), and metrics: `val_loss`, ..."""

    def compile(self, wanted: bool) -> None:
        """Turn compiling on or off; called only for tasks with `compile_seconds`."""
        raise NotImplementedError

    def save_memory(self) -> bool:
        """Trade speed for memory; returns False if nothing is left to try."""
        return False

    def saved_bytes(self) -> int:
        """The approximate size of the weights in a checkpoint."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @abstractmethod
    def snapshot(self) -> Callable[[Path], None]:
        """A function that writes the current model, and whatever else this task needs to resume."""

    @abstractmethod
    def load_weights(self, folder: Path) -> None:
        """Load the model saved in `folder`."""

    def load_checkpoint(self, folder: Path) -> None:
        """Load everything that is trained from `folder`, to resume from there."""
        self.load_weights(folder)
