"""The training loop: one story, top to bottom.

    >>> train(TrainSettings(corpus=("embedded:tiny",), steps=100), out="runs/first")

Everything that the loop changes lives in `State`, the model and the optimizer. The three are
saved together, and a batch is a pure function of its index, so a run that is killed goes on from
its last checkpoint as if nothing had happened.
"""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from nanolm import files
from nanolm.errors import Diverged, ModelError, OutOfMemory
from nanolm.generation.language_model import LanguageModel
from nanolm.model.device import choose_device
from nanolm.model.huggingface import load_model, save_model
from nanolm.runs import checkpoint
from nanolm.runs.folder import Run, append
from nanolm.text.tokens import Batches
from nanolm.training.events import Event, Note, Notify, Preparing, Progressed, Started, Wrote
from nanolm.training.interrupt import StopRequest
from nanolm.training.metrics import Score, evaluate
from nanolm.training.optim import load_optimizer, make_optimizer, save_optimizer
from nanolm.training.prepare import (
    Job,
    choose_run,
    find_base,
    prepare,
    prepare_text,
    refuse_finished,
    with_absolute_paths,
)
from nanolm.training.schedule import DECAY, rate
from nanolm.training.settings import TrainSettings

LOG_EVERY = 10  # steps
SAVE_SECONDS = 60.0  # a kill costs at most this much work, however long the steps are
EVALUATION_SHARE = 0.03  # of the budget
MAX_GRADIENT_NORM = 1.0
PATIENCE = 10  # steps in a row without a finite gradient before giving up
SAMPLE_TOKENS = 80


@dataclass
class State:
    """Everything the loop changes besides weights and moments; state.json."""

    step: int = 0
    passed_over: int = 0  # batches left out; the index of a batch is step + passed_over
    seconds: float = 0.0  # spent in the loop, evaluating and saving included
    loss_sum: float = 0.0  # since the last line of metrics
    loss_count: int = 0
    train_loss: float | None = None  # in the last line of metrics
    evaluations: int = 0
    evaluated_tokens: int | None = None  # how much held-out text is looked at on the way
    val_loss: float | None = None
    val_bits_per_byte: float | None = None
    best_loss: float | None = None
    best_step: int = 0
    decay_step: int | None = None  # where the learning rate began to fall
    bad_steps: int = 0  # in a row without a finite gradient
    lengths: dict[str, int] = field(default_factory=dict)  # of metrics.jsonl and samples.md


@dataclass(frozen=True)
class Result:
    """What a run came to: the last line that `nanolm train --json` prints."""

    run: str
    steps: int
    tokens: int
    seconds: float
    train_loss: float | None
    val_loss: float | None
    val_bits_per_byte: float | None
    best_step: int
    stopped: str  # "steps" or "minutes" (the budget is used up), or "interrupted"


def train(
    settings: TrainSettings,
    out: str | Path | None = None,
    resume: bool = False,
    notify: Notify = lambda event: None,
) -> Result:
    """Train on `settings.corpus`, or go on with an unfinished run of the same settings."""
    settings.check()
    settings = with_absolute_paths(settings)
    choose_device(settings.device)  # one that is not there is better told at once
    run = choose_run(settings, Path(out) if out is not None else None, resume, notify)
    base = find_base(settings, notify)
    text = prepare_text(settings, base, notify)
    with run.locked():
        if run.exists():
            refuse_finished(run)  # it may have ended between the choice and the lock
        notify = also_to_log(run, notify)
        job = prepare(settings, run, base, text, notify)
        with thread_count(job.settings.threads), StopRequest() as stop:
            return Trainer(job, notify).loop(stop)


class Trainer:
    """A job, its optimizer and its state."""

    def __init__(self, job: Job, notify: Notify) -> None:
        self.job, self.notify, self.run = job, notify, job.run
        settings = self.settings = job.settings
        assert settings.context and settings.batch and settings.lr
        self.lr = settings.lr
        self.step_tokens = settings.batch * settings.context
        self.batches = Batches(job.text.train, settings.context, settings.batch, settings.seed)
        self.model = job.model.to(settings.device)
        self.optimizer = make_optimizer(self.model, self.lr, settings.weight_decay)
        self.state = State()
        self.saved_step = -1
        if job.checkpoint:
            saved = json.loads((job.checkpoint / "state.json").read_text(encoding="utf-8"))
            self.state = State(**saved)
            self.saved_step = self.state.step
            load_optimizer(self.optimizer, self.model, job.checkpoint / "optimizer.safetensors")
        self.run.cut_back(self.state.lengths)

    def loop(self, stop: StopRequest) -> Result:
        state = self.state
        self.notify(
            Started(
                run=self.run.path,
                parameters=self.model.parameter_count(),
                tokens=len(self.job.text.train),
                step=state.step,
            )
        )
        last_save = self.clock = time.monotonic()
        last_log = (state.step, state.seconds)
        self.model.train()
        while True:
            progress = self.progress()
            due = progress >= (state.evaluations + 1) / self.settings.evaluations
            save = due or stop.requested or time.monotonic() - last_save > SAVE_SECONDS
            if self.settings.save_every and state.step % self.settings.save_every == 0:
                save = save or state.step > 0
            if state.decay_step is None and progress >= 1 - DECAY:
                state.decay_step, save = state.step, True  # the place to extend the run from
            if save:
                self.save()
                last_save = time.monotonic()
            if stop.requested and progress < 1:
                return self.result("interrupted")
            if due:
                self.evaluate(progress)
                last_log = (state.step, state.seconds)
            if progress >= 1:
                return self.finish()

            lr = self.lr * rate(progress)
            loss, norm = self.train_step(lr)
            state.bad_steps = 0 if math.isfinite(norm) else state.bad_steps + 1
            if state.bad_steps >= PATIENCE:
                raise Diverged(
                    f"no finite gradient for {PATIENCE} steps, up to step {state.step}; they were "
                    f"left out. Start again with a smaller --lr (it was {self.lr:g})."
                )
            state.step += 1
            state.loss_sum += loss
            state.loss_count += 1
            self.tick()
            if state.step % LOG_EVERY == 0:
                steps, seconds = state.step - last_log[0], state.seconds - last_log[1]
                last_log = (state.step, state.seconds)
                state.train_loss = state.loss_sum / state.loss_count
                state.loss_sum, state.loss_count = 0.0, 0
                self.record(
                    loss=state.train_loss,
                    lr=lr,
                    grad_norm=norm,
                    tokens_per_second=round(steps * self.step_tokens / max(seconds, 1e-9)),
                )

    def train_step(self, lr: float) -> tuple[float, float]:
        """Forward, backward, update; the loss and the norm of the gradient."""
        state, settings = self.state, self.settings
        x, y = (
            torch.from_numpy(part).to(settings.device)
            for part in self.batches[state.step + state.passed_over]
        )  # (batch, context) each
        if settings.dropout:
            torch.manual_seed((settings.seed * 1_000_003 + state.step) % (1 << 63))
        low = settings.dtype == "bfloat16"
        try:
            with torch.autocast(settings.device, torch.bfloat16, enabled=low):
                logits = self.model(x)  # (batch, context, vocabulary)
                loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            loss.backward()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                raise OutOfMemory(
                    f"--batch {settings.batch} of --context {settings.context} does not fit into "
                    f"memory; try --batch {max(1, (settings.batch or 1) // 2)}"
                ) from None
            raise
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM).item()
        if math.isfinite(norm):  # else the step is left out: nothing must be poisoned
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item(), norm

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
            "tokens": state.step * self.step_tokens,
            "seconds": round(state.seconds, 3),
            **{name: value if math.isfinite(value) else None for name, value in values.items()},
        }
        append(self.run.metrics, json.dumps(line) + "\n")
        progress = self.progress()
        left = state.seconds / progress * max(0, 1 - progress) if progress else math.inf
        self.notify(Progressed(line, min(1, progress), left))

    def evaluate(self, progress: float) -> None:
        """Look at the held-out text, keep the best, and write a sample."""
        state, settings, job = self.state, self.settings, self.job
        if state.evaluated_tokens is None:
            # Looking at a token costs a third of learning from it.
            budget = state.step * self.step_tokens / progress
            affordable = round(3 * EVALUATION_SHARE * budget / settings.evaluations)
            state.evaluated_tokens = max(1, min(affordable, len(job.text.val) - 1))
        score = self.score(state.evaluated_tokens)
        state.evaluations = int(progress * settings.evaluations + 1e-9)
        state.val_loss, state.val_bits_per_byte = score.loss, score.bits_per_byte
        if state.best_loss is None or score.loss < state.best_loss:
            state.best_loss, state.best_step = score.loss, state.step
            checkpoint.point(self.run.path / "best", self.checkpoint_folder(state.step))
        writer = LanguageModel(self.model, job.text.tokenizer)
        text = writer.generate(job.text.prompt, tokens=SAMPLE_TOKENS, seed=settings.seed)
        heading = f"## Step {state.step:,}: {score.bits_per_byte:.3f} bits per byte\n"
        quoted = "\n".join("> " + line for line in (job.text.prompt + text).splitlines())
        append(self.run.samples, f"{heading}\n{quoted}\n\n")
        self.notify(Wrote(state.step, job.text.prompt, text))
        self.record(val_loss=score.loss, val_bits_per_byte=score.bits_per_byte)

    def score(self, limit: int | None = None) -> Score:
        """How good the model is on held-out text, or on its first `limit` tokens."""
        assert self.settings.context
        text = self.job.text
        return evaluate(self.model, text.tokenizer, text.val, self.settings.context, limit)

    def save(self) -> None:
        """Commit a checkpoint of this step, unless it is there already."""
        if self.saved_step == self.state.step:
            return
        self.state.lengths = self.run.lengths()

        def write(folder: Path) -> None:
            save_model(self.model, folder, self.job.text.tokenizer)
            save_optimizer(self.optimizer, self.model, folder / "optimizer.safetensors")
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

    def finish(self) -> Result:
        """One full pass of the best model over all held-out text; the run is then finished."""
        if self.state.best_step != self.state.step:
            folder = self.checkpoint_folder(self.state.best_step)
            try:
                files.verify(folder)
                self.model.load_state_dict(load_model(folder).state_dict())
            except ModelError as error:
                self.notify(Note(f"{error}; taking the last checkpoint as the best"))
                self.state.best_step = self.state.step
                last = self.checkpoint_folder(self.state.step)
                checkpoint.point(self.run.path / "best", last)
        score = self.score()
        self.state.val_loss, self.state.val_bits_per_byte = score.loss, score.bits_per_byte
        result = self.result("steps" if self.settings.steps else "minutes")
        self.run.update({**self.run.facts(), "result": asdict(result)})
        return result

    def result(self, stopped: str) -> Result:
        state = self.state
        return Result(
            run=str(self.run.path),
            steps=state.step,
            tokens=state.step * self.step_tokens,
            seconds=round(state.seconds, 3),
            train_loss=state.train_loss,
            val_loss=state.val_loss,
            val_bits_per_byte=state.val_bits_per_byte,
            best_step=state.best_step,
            stopped=stopped,
        )


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
