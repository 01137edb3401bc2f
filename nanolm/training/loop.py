"""The training loop: one story, top to bottom, whatever is learned.

    >>> Trainer(run, settings, task, checkpoint, notify).loop(stop)

What is learned is a `Task`. Everything that the loop changes lives in `State`, the weights and the
optimizer. The three are saved together, and a batch is a pure function of its index, so a run that
is killed goes on from its last checkpoint as if nothing had happened.
"""

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from nanolm import files
from nanolm.errors import Diverged, ModelError, OutOfMemory
from nanolm.runs import checkpoint
from nanolm.runs.folder import Run, append
from nanolm.training.events import Event, Note, Notify, Preparing, Progressed, Started, Wrote
from nanolm.training.interrupt import StopRequest
from nanolm.training.optim import load_optimizer, make_optimizer, save_optimizer
from nanolm.training.schedule import DECAY, rate
from nanolm.training.settings import Settings
from nanolm.training.step import Step

LOG_EVERY = 10  # steps
SAVE_SECONDS = 60.0  # a kill costs at most this much work, however long the steps are
PATIENCE = 10  # steps in a row without a finite gradient before giving up


@dataclass
class State:
    """Everything the loop changes besides weights and moments; state.json."""

    step: int = 0
    passed_over: int = 0  # batches left out; the index of a batch is step + passed_over
    tokens: int = 0  # trained on
    seconds: float = 0.0  # spent in the loop, evaluating and saving included
    sums: dict[str, float] = field(default_factory=dict)  # of loss and the like, since the
    summed: int = 0  # last line of metrics, over so many steps
    train_loss: float | None = None  # in the last line of metrics
    evaluations: int = 0
    evaluated_tokens: int | None = None  # how much held-out text is looked at on the way
    scores: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    best: list[float] | None = None  # lower is better, the first number deciding first
    best_step: int = 0
    lowest_loss: float | None = None  # on held-out data
    beyond: int = 0  # evaluations in a row since the best that were clearly worse
    decay_step: int | None = None  # where the learning rate began to fall
    bad_steps: int = 0  # in a row without a finite gradient
    lengths: dict[str, int] = field(default_factory=dict)  # of metrics.jsonl and samples.md


class Task(ABC):
    """What is learned: how a batch becomes a loss, and how good the model is."""

    model: nn.Module
    weight_decay: float
    evaluations: int  # in the whole run
    patience: int | None = None  # evaluations clearly beyond the best before it is enough

    @abstractmethod
    def started(self, run: Path, step: int) -> Started:
        """What to tell before the first step."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by name."""
        return dict(self.model.named_parameters())

    def rate(self, name: str) -> float:
        """What to multiply the learning rate of a parameter by."""
        return 1.0

    @abstractmethod
    def batch(self, index: int) -> tuple[Tensor, ...]:
        """Batch number `index`, on the CPU."""

    def tokens(self, batch: tuple[Tensor, ...]) -> int:
        """How many a batch has."""
        return batch[0].numel()

    @abstractmethod
    def loss(self, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What to minimise, and what to keep a record of besides, or instead as "loss".

        No number may leave the device.
        """

    @abstractmethod
    def evaluate(self, state: State, progress: float) -> tuple[list[float], dict[str, float]]:
        """How good the model is, lower is better, and what to keep a record of: `val_loss`, ..."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the model, and what only this task needs to go on."""

    @abstractmethod
    def take_back(self, folder: Path) -> None:
        """Let the model be the one that was saved in `folder`."""


class Trainer:
    """A task, its optimizer and its state."""

    def __init__(
        self, run: Run, settings: Settings, task: Task, saved: Path | None, notify: Notify
    ) -> None:
        self.run, self.settings, self.task, self.notify = run, settings, task, notify
        assert settings.lr
        self.lr = settings.lr
        self.parameters = task.parameters()
        self.optimizer = make_optimizer(self.parameters, self.lr, task.weight_decay, task.rate)
        self.step = Step(task.loss, self.parameters, self.optimizer, settings.dtype)
        self.state = State()
        self.saved_step = -1
        if saved:
            text = (saved / "state.json").read_text(encoding="utf-8")
            self.state = State(**json.loads(text))
            self.saved_step = self.state.step
            load_optimizer(self.optimizer, self.parameters, saved / "optimizer.safetensors")
        run.cut_back(self.state.lengths)

    def loop(self, stop: StopRequest) -> str:
        """Train; why it ended: "steps", "minutes" (the budget), "enough", or "interrupted"."""
        state, task = self.state, self.task
        self.notify(task.started(self.run.path, state.step))
        last_save = self.clock = time.monotonic()
        last_log = (state.tokens, state.seconds)
        task.model.train()
        while True:
            progress = self.progress()
            due = progress >= (state.evaluations + 1) / task.evaluations
            save = due or stop.requested or time.monotonic() - last_save > SAVE_SECONDS
            if self.settings.save_every and state.step % self.settings.save_every == 0:
                save = save or state.step > 0
            if state.decay_step is None and progress >= 1 - DECAY:
                state.decay_step, save = state.step, True  # the place to extend the run from
            if save:
                self.save()
                last_save = time.monotonic()
            if stop.requested and progress < 1:
                return "interrupted"
            if due:
                self.evaluate(progress)
                last_log = (state.tokens, state.seconds)
                if task.patience is not None and state.beyond >= task.patience:
                    return "enough"
            if progress >= 1:
                return "steps" if self.settings.steps else "minutes"

            lr = self.lr * rate(progress)
            values, norm = self.train_step(lr)
            state.bad_steps = 0 if math.isfinite(norm) else state.bad_steps + 1
            if state.bad_steps >= PATIENCE:
                raise Diverged(
                    f"no finite gradient for {PATIENCE} steps, up to step {state.step}; they were "
                    f"left out. Start again with a smaller --lr (it was {self.lr:g})."
                )
            state.step += 1
            state.sums = {name: state.sums.get(name, 0.0) + values[name] for name in values}
            state.summed += 1
            self.tick()
            if state.step % LOG_EVERY == 0:
                tokens, seconds = state.tokens - last_log[0], state.seconds - last_log[1]
                last_log = (state.tokens, state.seconds)
                means = {name: value / state.summed for name, value in state.sums.items()}
                state.sums, state.summed, state.train_loss = {}, 0, means["loss"]
                speed = round(tokens / max(seconds, 1e-9))
                self.record(**means, lr=lr, grad_norm=norm, tokens_per_second=speed)

    def train_step(self, lr: float) -> tuple[dict[str, float], float]:
        """Forward, backward, update; the loss (and what else there is) and the gradient's norm."""
        state, settings = self.state, self.settings
        batch = self.task.batch(state.step + state.passed_over)
        if settings.dropout:
            torch.manual_seed((settings.seed * 1_000_003 + state.step) % (1 << 63))
        try:
            values, norm = self.step(batch, lr)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                raise OutOfMemory(
                    f"--batch {settings.batch} of --context {settings.context} does not fit into "
                    f"memory; try --batch {max(1, (settings.batch or 1) // 2)}"
                ) from None
            raise
        state.tokens += self.task.tokens(batch)
        return values, norm

    def progress(self) -> float:
        """How much of the budget is used: 0 to 1."""
        if self.settings.steps:
            return self.state.step / self.settings.steps
        assert self.settings.minutes
        return self.state.seconds / (60 * self.settings.minutes)

    def tick(self) -> None:
        """Add the time since the last call to what the run has cost."""
        now = time.monotonic()
        self.state.seconds += now - self.clock
        self.clock = now

    def record(self, **values: float) -> None:
        """Write a line of metrics, and tell."""
        self.tick()
        state = self.state
        line = {
            "step": state.step,
            "tokens": state.tokens,
            "seconds": round(state.seconds, 3),
            **{name: value if math.isfinite(value) else None for name, value in values.items()},
        }
        append(self.run.metrics, json.dumps(line) + "\n")
        progress = self.progress()
        left = state.seconds / progress * max(0, 1 - progress) if progress else math.inf
        self.notify(Progressed(line, min(1, progress), left))

    def evaluate(self, progress: float) -> None:
        """Look at what was held out, and keep the best."""
        state, task = self.state, self.task
        found, state.scores = task.evaluate(state, progress)
        state.evaluations = int(progress * task.evaluations + 1e-9)
        loss = state.scores["val_loss"]
        state.lowest_loss = min(loss, loss if state.lowest_loss is None else state.lowest_loss)
        if state.best is None or found < state.best:
            state.best, state.best_step, state.beyond = found, state.step, 0
            checkpoint.point(self.run.path / "best", self.checkpoint_folder(state.step))
        elif loss > 1.05 * state.lowest_loss:
            state.beyond += 1
        self.record(**state.scores)

    def save(self) -> None:
        """Commit a checkpoint of this step, unless it is there already."""
        if self.saved_step == self.state.step:
            return
        self.state.lengths = self.run.lengths()

        def write(folder: Path) -> None:
            self.task.save(folder)
            save_optimizer(self.optimizer, self.parameters, folder / "optimizer.safetensors")
            state = json.dumps(asdict(self.state), indent=1) + "\n"
            (folder / "state.json").write_text(state, encoding="utf-8")

        folder = self.checkpoint_folder(self.state.step)
        files.commit(self.run.checkpoints, folder.name, write)
        checkpoint.point(self.run.path / "last", folder)
        self.saved_step = self.state.step
        kept = (self.state.best_step, self.state.decay_step)
        names = {self.checkpoint_folder(step).name for step in kept if step is not None}
        checkpoint.prune(self.run.checkpoints, names)

    def checkpoint_folder(self, step: int) -> Path:
        return self.run.checkpoints / f"step-{step:08}"

    def take_best(self) -> None:
        """Let the model be the best that was seen; where that is damaged, the last one is."""
        if self.state.best_step == self.state.step:
            return
        folder = self.checkpoint_folder(self.state.best_step)
        try:
            files.verify(folder)
            self.task.take_back(folder)
        except ModelError as error:
            self.notify(Note(f"{error}; taking the last checkpoint as the best"))
            self.state.best_step = self.state.step
            last = self.checkpoint_folder(self.state.step)
            checkpoint.point(self.run.path / "best", last)


def also_to_log(run: Run, notify: Notify) -> Notify:
    """`notify`, and a line of log.txt for everything but the metrics, which have their own file."""

    def both(event: Event) -> None:
        if not isinstance(event, Preparing | Progressed | Wrote):
            append(run.log, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {event}\n")
        notify(event)

    return both


@contextmanager
def thread_count(threads: int | None) -> Iterator[None]:
    """Results on a CPU are bit for bit the same only at the same number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
