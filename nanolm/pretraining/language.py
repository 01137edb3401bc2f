"""Learning a language: the next token, from the ones before it.

>>> train(TrainSettings(corpus=("embedded:tiny",), steps=100), out="runs/first")
"""

import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from nanolm.errors import TooLittleTime
from nanolm.evaluation import Score, evaluate
from nanolm.formats import counted
from nanolm.generation.language_model import LanguageModel
from nanolm.machine import available_threads
from nanolm.model.base import Model
from nanolm.model.config import GPTConfig
from nanolm.model.device import choose_device, choose_dtype
from nanolm.model.fast.training import speed_up, speedups_of
from nanolm.model.gpt import GPT
from nanolm.model.huggingface import load_model, save_model, snapshot
from nanolm.model.size import non_embedding_parameters
from nanolm.planning import recipe
from nanolm.planning.planner import BEFORE, Plan
from nanolm.planning.scaling_law import Forecast
from nanolm.planning.tuning import (
    attention_by,
    compile_model,
    missing_compiler,
    repeatable,
    tell_of_threads,
    threads_for,
    use_attention,
    with_kernels,
)
from nanolm.pretraining.prepare import (
    Job,
    choose_run,
    find_base,
    plan_for,
    prepare,
    prepare_text,
    refuse_finished,
    saved_settings,
    taken_up,
    text_deadline,
    with_absolute_paths,
)
from nanolm.runs.folder import append
from nanolm.text.split import TO_CHOOSE_BY
from nanolm.text.store import Prepared
from nanolm.text.tokens import Batches
from nanolm.training.distributed import (
    ALONE,
    World,
    collected,
    fill,
    local_rank,
    meet,
    sharded,
    whole,
)
from nanolm.training.events import Note, Notify, Started, Wrote
from nanolm.training.feed import source
from nanolm.training.interrupt import StopRequest
from nanolm.training.loss import next_token_loss
from nanolm.training.settings import TrainSettings
from nanolm.training.step import LOW
from nanolm.training.task import State, Task
from nanolm.training.trainer import LEAST_STEPS, Trainer, also_to_log, end

SLOWER = 0.7  # of the planned steps: fewer are worth a word
COMPILE_SECONDS = 25.0  # that it takes, about
EVALUATION_SHARE = 0.03  # of the budget
CHEAPER = 3  # times, looking at a token than learning from it
LEAST_LOOK = 4_096  # tokens
FIRST_LOOK = 0.8  # seconds more than the others, where it is also the last
SAMPLE_TOKENS = 80
PATIENCE = 3  # evaluations clearly beyond the best, where no number of steps was asked for
UNLIKE = 1.3  # times as hard for n-gram counts: held-out text of another kind
ENDING = 0.7  # seconds, when all is done,
MOST_BUSY = 4.0  # times as long, at most, on a busy machine


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
    # "steps" or "minutes" (the budget is used up), "enough", "interrupted" or "too little time"
    stopped: str
    setup_seconds: float = 0.0  # before the first step: reading, planning, measuring


def train(
    settings: TrainSettings,
    out: str | Path | None = None,
    resume: bool = False,
    notify: Notify = lambda event: None,
    started: float | None = None,
) -> Result:
    """Train on `settings.corpus`, or go on with an unfinished run of the same settings.

    A time to train for is counted from `started`, by `time.monotonic`, or from now. Where this is
    the first of several processes, the others `follow` it.
    """
    elapsed = stopwatch(started)
    settings.check()
    with meet() as world, world.leading():
        settings = with_absolute_paths(settings)
        # What is not there is better told at once.
        device = choose_device(settings.device)[0]
        choose_dtype(settings.dtype, device)
        if world.joined and device == "cuda":
            local_rank()
        run = choose_run(settings, Path(out) if out is not None else None, resume, notify)
        base = find_base(settings, notify)
        anew = run.exists() and run.too_short()
        if run.exists() and not anew:  # the same text as before, however much time is left
            text = prepare_text(saved_settings(run), base, notify)
        else:
            text = prepare_text(settings, base, notify, text_deadline(settings, elapsed))
        with run.locked(), repeatable(settings.deterministic):
            if anew and run.exists():
                run.clear()
            if run.exists():
                refuse_finished(run)  # it may have ended between the choice and the lock
            notify = also_to_log(run, notify)
            job = prepare(settings, run, base, text, elapsed, notify, world.size)
            world.tell(job.facts())
            result = learn(job, world, elapsed, notify)
            if result.stopped != "interrupted":
                end(run, asdict(result), notify)
            return result


def follow() -> Result:
    """Do what the first of several processes has decided, and tell nothing."""
    with meet() as world:
        job = taken_up(world.hear())
        with repeatable(job.settings.deterministic):
            return learn(job, world, stopwatch(None), lambda event: None)


def learn(job: Job, world: World, elapsed: Callable[[], float], notify: Notify) -> Result:
    """All steps of a run, or what is left of them."""
    settings = job.settings
    if world.joined:  # what was found for one process may be too much for each of several
        threads = min(settings.threads or 1, available_threads())
        job = replace(job, settings=replace(settings, workers=1, threads=threads))
        settings = job.settings
    world.connect(settings.device)
    with (
        threads_for(settings.threads, settings.workers),
        attention_by(settings.attention),
        StopRequest() as stop,
    ):
        tell_of_threads(settings, notify)
        # On a busy machine everything takes longer, what comes after the steps too.
        busy = min(MOST_BUSY, max(1.0, elapsed() / max(time.process_time(), 1e-3)))
        task = NextToken(job, notify, world, busy)
        trainer = Trainer(job.run, settings, task, job.checkpoint, notify, elapsed(), world)
        stopped = trainer.loop(stop)
        if stopped == "minutes" and trainer.state.step < LEAST_STEPS:
            stopped = TooLittleTime.stopped
        elif stopped == "minutes":
            task.tell_of_speed(trainer.state.step)
        scores = trainer.state.scores
        if stopped != "interrupted":
            trainer.take_best()
            seen = task.all_seen and trainer.state.best_step == trainer.state.step
            if len(job.text.val) and not seen:
                scores = as_metrics(task.score())  # of all that was held out
                if not task.all_seen and trainer.state.evaluated_tokens:
                    part, whole_ = trainer.state.evaluated_tokens, len(job.text.val)
                    notify(
                        Note(
                            f"final validation on all {whole_:,} held-out tokens; the evaluations "
                            f"during training used {part:,} of them"
                        )
                    )
            trainer.tick()
        state = trainer.state
        return Result(
            run=str(job.run.path),
            steps=state.step,
            tokens=state.tokens,
            seconds=round(state.seconds, 3),
            train_loss=state.train_loss,
            val_loss=scores.get("val_loss"),
            val_bits_per_byte=scores.get("val_bits_per_byte"),
            best_step=state.best_step,
            stopped=stopped,
            setup_seconds=round(state.setup, 3),
        )


def what_to_type(result: Result) -> str:
    """After a run that had too little time."""
    needed = max(2 * result.seconds, result.setup_seconds / BEFORE) / 60
    minutes = next((some for some in (0.5, 1, 2, 3, 5, 10, 20, 30) if some >= needed), 60)
    preparing = result.setup_seconds > result.seconds / 2
    less = ", or with less text (--max-bytes 250000)" if preparing else ""
    return (
        f"too little time: {counted(result.steps, 'step')} in {result.seconds:.0f} s, of which "
        f"preparing took {result.setup_seconds:.0f}; the model has learned next to nothing. "
        f"Run the same command with --minutes {minutes:g}{less}, or train it on: "
        f"nanolm train --extend {shlex.quote(result.run)} --minutes {minutes:g}"
    )


def plan_only(
    settings: TrainSettings, notify: Notify = lambda event: None, started: float | None = None
) -> Plan:
    """What `train` would do, without doing it."""
    elapsed = stopwatch(started)
    settings.check()
    settings = with_absolute_paths(settings)
    base = find_base(settings, notify)
    text = prepare_text(settings, base, notify, text_deadline(settings, elapsed))
    return plan_for(settings, base, text, elapsed, notify)


def stopwatch(started: float | None) -> Callable[[], float]:
    """Seconds since then, or since now."""
    begin = time.monotonic() if started is None else started
    return lambda: time.monotonic() - begin


class NextToken(Task):
    """A language model on a text."""

    def __init__(self, job: Job, notify: Notify, world: World = ALONE, busy: float = 1.0) -> None:
        """`busy` is how many times as long as usual everything takes."""
        settings = self.settings = job.settings
        self.busy = busy
        assert settings.context and settings.batch
        self.job, self.notify, self.world = job, notify, world
        self.step_tokens = settings.batch * settings.context
        batches = Batches(
            job.text.train,
            settings.context,
            settings.batch,
            settings.seed,
            world.rows(settings.batch),
        )
        self.source = source(batches, settings.device)
        self.network = self.model = job.model.to(settings.device)
        if settings.shard and world.joined:
            # Kernels that reach from one layer into the next would miss what others have of it.
            self.sharded = sharded(self.network, self.loss)
        else:
            with_kernels(self.network, settings)
        use_attention(self.network, settings)
        assert settings.weight_decay is not None and settings.evaluations
        self.weight_decay, self.evaluations = settings.weight_decay, settings.evaluations
        if not job.counted:
            self.patience = PATIENCE
        self.keeps_last = len(job.text.val) > 0 and not chooses(job.text)
        self.all_seen = False  # of the held-out text, by the last evaluation
        self.looked = False
        self.scoring = 0.0  # seconds for a token of it: until one has been looked at, a guess
        forecast = self.forecast = job.forecast
        if forecast and forecast.seconds:
            learned = forecast.passes * len(job.text.train)
            self.scoring = forecast.seconds / learned / CHEAPER
        missing: str | None = "recurrent layers gain nothing from it"
        if isinstance(self.network, GPT):
            missing = missing_compiler(settings.device)
        if not missing:
            self.compile_seconds = COMPILE_SECONDS
        elif settings.compile:
            notify(Note(f"--compile is left out: {missing}"))

    def started(self, run: Path, step: int) -> Started:
        parameters = self.network.parameter_count()
        return Started(run, parameters, f"{len(self.job.text.train):,} training tokens", step)

    def rate(self, name: str) -> float:
        if self.settings.start_from is not None or not isinstance(self.network, GPT):
            return 1.0
        return recipe.rates(self.network.config.tied).get(name, 1.0)

    def matrices(self) -> dict[str, list[int]]:
        return self.network.muon_parameters() if self.settings.optimizer == "muon" else {}

    def expected(self, learned: float) -> float | None:
        return self.forecast.expected(learned) if self.forecast else None

    def forecast_for(self, steps: float) -> Forecast | None:
        """What was predicted; where far fewer steps come out than planned, for these."""
        forecast = self.job.forecast
        if not forecast or not forecast.steps or steps > SLOWER * forecast.steps:
            return forecast
        assert isinstance(self.network.config, GPTConfig)
        return forecast.at(steps, non_embedding_parameters(self.network.config), self.job.text.size)

    def tell_of_speed(self, steps: int) -> None:
        """Say so where far fewer steps than planned could be done in the time."""
        planned, forecast = self.job.forecast, self.forecast_for(steps)
        if planned and forecast and forecast is not planned:
            text = f"{steps:,} steps were done in the time, not {planned.steps:,} as planned: the "
            text += "machine was slower than when it was measured. Predicted for that many: "
            text += f"{forecast.bits_per_byte:.3f} bits per byte, not {planned.bits_per_byte:.3f}"
            self.notify(Note(text))

    def why_validation_rises(self) -> str:
        if self.job.text.shift < UNLIKE:
            return super().why_validation_rises()
        cure = "hold out text from all over the file with --val-split spread"
        if self.settings.val:
            cure = f"validate on text like the training text instead of --val {self.settings.val}"
        return f"the held-out text is unlike the training text, so it says little; {cure}"

    def seconds_after(self) -> float:
        tokens = 0 if self.all_seen else len(self.job.text.val)
        once = ENDING + (0 if self.looked else FIRST_LOOK)
        return self.busy * once + self.scoring * tokens

    def batch(self, index: int) -> tuple[Tensor, ...]:
        return (self.source.batch(index),)

    def tokens(self, batch: tuple[Tensor, ...]) -> int:
        return self.step_tokens

    def epoch(self, batches: int) -> float:
        return batches * self.step_tokens / max(1, len(self.job.text.train))

    def loss(self, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        ids = self.source.ids(*batch)  # (batch, context + 1)
        x = self.network.hidden_states(ids[:, :-1])  # (batch, context, dim)
        return next_token_loss(self.network.head, x, ids[:, 1:]), {}

    def compile(self, wanted: bool) -> None:
        if wanted:
            compile_model(self.network, self.settings.device)
        else:
            speed_up(self.network, compiled=False)

    def save_memory(self) -> bool:
        if not isinstance(self.network, GPT) or speedups_of(self.network).recompute:
            return False
        speed_up(self.network, recompute=True)
        self.notify(Note("still not enough memory: computing every layer twice"))
        return True

    def evaluate(self, state: State, progress: float) -> tuple[list[float], dict[str, float]]:
        """Look at the held-out text, and write a sample."""
        settings, text = self.settings, self.job.text
        if settings.minutes and progress:
            self.forecast = self.forecast_for(state.step / progress)
        if state.evaluated_tokens is None:
            share = EVALUATION_SHARE / self.evaluations
            affordable = CHEAPER * share * state.tokens / progress
            if settings.minutes and self.scoring:  # much of it may have passed before the steps
                affordable = max(affordable, share * 60 * settings.minutes / self.scoring)
            affordable = self.world.same(affordable)
            state.evaluated_tokens = min(max(LEAST_LOOK, round(affordable)), len(text.val))
        self.all_seen = state.evaluated_tokens == len(text.val)
        network = self.seen()
        latest = -float(state.step)  # lower is better: the last weights are kept
        if not len(text.val):
            if self.world.first:
                self.write(network, state.step)
            return [latest], {}
        if not self.looked:
            self.score(network, limit=1)  # what only the first time takes
            self.looked = True
        start = time.monotonic()
        score = self.score(network, state.evaluated_tokens)
        self.scoring = (time.monotonic() - start) / max(1, score.tokens)
        if self.world.first:
            self.write(network, state.step, f": {score.bits_per_byte:.3f} bits per byte")
        return [latest if self.keeps_last else score.loss], as_metrics(score)

    def seen(self) -> Model:
        """The model, to be looked at: one that is sharded as a copy that is whole."""
        return snapshot(self.network, whole) if self.sharded else self.network

    def write(self, network: Model, step: int, measured: str = "") -> None:
        """A sample of what the model has come to."""
        text = self.job.text
        writer = LanguageModel(network, text.tokenizer)
        sample = writer.generate(text.prompt, tokens=SAMPLE_TOKENS, seed=self.settings.seed)
        heading = f"## Step {step:,}{measured}\n"
        quoted = "\n".join("> " + line for line in (text.prompt + sample).splitlines())
        append(self.job.run.samples, f"{heading}\n{quoted}\n\n")
        self.notify(Wrote(step, text.prompt, sample))

    def score(self, network: Model | None = None, limit: int | None = None) -> Score:
        """How good the model is on held-out text, or on about `limit` tokens of it; `network` is
        what `seen` gave, if anything."""
        assert self.settings.context
        text = self.job.text
        low = LOW.get(self.settings.dtype) if self.settings.device != "cpu" else None
        network = network or self.seen()
        with torch.autocast(self.settings.device, low, enabled=low is not None):
            return evaluate(
                network,
                text.tokenizer,
                text.val,
                self.settings.context,
                limit,
                world=self.world,
            )

    def copied(self) -> Callable[[Path], None]:
        copy = snapshot(self.network, collected)
        return lambda folder: save_model(copy, folder, self.job.text.tokenizer)

    def take_back(self, folder: Path) -> None:
        saved = dict(load_model(folder).named_parameters())
        for name, parameter in self.network.named_parameters():
            fill(parameter, saved[name])


def chooses(text: Prepared) -> bool:
    """Is enough text held out to choose the best weights by?"""
    sizes = text.tokenizer.byte_lengths()
    return int(sizes[text.val[: 2 * TO_CHOOSE_BY]].sum()) >= TO_CHOOSE_BY


def as_metrics(score: Score) -> dict[str, float]:
    return {"val_loss": score.loss, "val_bits_per_byte": score.bits_per_byte}
