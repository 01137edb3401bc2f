"""What the training loop works on: how a batch becomes a loss, and how good the model is."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from nanolm.training.events import Started
from nanolm.training.state import State


class Task(ABC):
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
        return dict(self.model.named_parameters())

    def lr_scale(self, name: str) -> float:
        """What to multiply the learning rate of a parameter by."""
        return 1.0

    def muon_parameters(self) -> dict[str, list[int]]:
        """Those for Muon, each with the rows of the matrices stacked in it."""
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
        return batch[0].numel()

    def epoch(self, batches: int) -> float | None:
        """Passes over the training data after this many batches; None if the task has no epochs."""
        return None

    @abstractmethod
    def loss(self, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What to minimise, and what to record besides, or instead as "loss": on the device."""

    @abstractmethod
    def evaluate(self, state: State, progress: float) -> tuple[list[float], dict[str, float]]:
        """How good the model is, lower is better, and what to keep a record of: `val_loss`, ..."""

    def compile(self, wanted: bool) -> None:
        """From the next use on; asked only of tasks that say how long it takes."""
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
