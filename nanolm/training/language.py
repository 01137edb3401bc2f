"""Learning a language: the next token, from the ones before it.

>>> train(TrainSettings(corpus=("embedded:tiny",), steps=100), out="runs/first")
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nanolm.generation.language_model import LanguageModel
from nanolm.model.device import choose_device
from nanolm.model.huggingface import load_model, save_model
from nanolm.runs.folder import append
from nanolm.text.tokens import Batches
from nanolm.training.events import Notify, Started, Wrote
from nanolm.training.interrupt import StopRequest
from nanolm.training.loop import State, Task, Trainer, also_to_log, thread_count
from nanolm.training.metrics import Score, evaluate
from nanolm.training.prepare import (
    Job,
    choose_run,
    find_base,
    prepare,
    prepare_text,
    refuse_finished,
    with_absolute_paths,
)
from nanolm.training.settings import TrainSettings

EVALUATION_SHARE = 0.03  # of the budget
SAMPLE_TOKENS = 80


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
            task = NextToken(job, notify)
            trainer = Trainer(run, job.settings, task, job.checkpoint, notify)
            stopped = trainer.loop(stop)
            scores = trainer.state.scores
            if stopped != "interrupted":
                trainer.take_best()
                scores = as_metrics(task.score())  # of all that was held out
            state = trainer.state
            result = Result(
                run=str(run.path),
                steps=state.step,
                tokens=state.tokens,
                seconds=round(state.seconds, 3),
                train_loss=state.train_loss,
                val_loss=scores.get("val_loss"),
                val_bits_per_byte=scores.get("val_bits_per_byte"),
                best_step=state.best_step,
                stopped=stopped,
            )
            if stopped != "interrupted":
                run.update({**run.facts(), "result": asdict(result)})
            return result


class NextToken(Task):
    """A language model on a text."""

    def __init__(self, job: Job, notify: Notify) -> None:
        settings = self.settings = job.settings
        assert settings.context and settings.batch
        self.job, self.notify = job, notify
        self.batches = Batches(job.text.train, settings.context, settings.batch, settings.seed)
        self.network = job.model.to(settings.device)
        self.model = self.network
        self.weight_decay, self.evaluations = settings.weight_decay, settings.evaluations

    def started(self, run: Path, step: int) -> Started:
        parameters = self.network.parameter_count()
        return Started(run, parameters, f"{len(self.job.text.train):,} training tokens", step)

    def batch(self, index: int) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(part) for part in self.batches[index])

    def loss(self, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, y = batch  # (batch, context) each
        logits = self.network(x)  # (batch, context, vocabulary)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()), {}

    def evaluate(self, state: State, progress: float) -> tuple[list[float], dict[str, float]]:
        """Look at the held-out text, and write a sample."""
        settings, text = self.settings, self.job.text
        if state.evaluated_tokens is None:
            # Looking at a token costs a third of learning from it.
            budget = state.tokens / progress
            affordable = round(3 * EVALUATION_SHARE * budget / settings.evaluations)
            state.evaluated_tokens = max(1, min(affordable, len(text.val) - 1))
        score = self.score(state.evaluated_tokens)
        writer = LanguageModel(self.network, text.tokenizer)
        sample = writer.generate(text.prompt, tokens=SAMPLE_TOKENS, seed=settings.seed)
        heading = f"## Step {state.step:,}: {score.bits_per_byte:.3f} bits per byte\n"
        quoted = "\n".join("> " + line for line in (text.prompt + sample).splitlines())
        append(self.job.run.samples, f"{heading}\n{quoted}\n\n")
        self.notify(Wrote(state.step, text.prompt, sample))
        return [score.loss], as_metrics(score)

    def score(self, limit: int | None = None) -> Score:
        """How good the model is on held-out text, or on its first `limit` tokens."""
        assert self.settings.context
        text = self.job.text
        return evaluate(self.network, text.tokenizer, text.val, self.settings.context, limit)

    def save(self, folder: Path) -> None:
        save_model(self.network, folder, self.job.text.tokenizer)

    def take_back(self, folder: Path) -> None:
        self.network.load_state_dict(load_model(folder).state_dict())


def as_metrics(score: Score) -> dict[str, float]:
    return {"val_loss": score.loss, "val_bits_per_byte": score.bits_per_byte}
