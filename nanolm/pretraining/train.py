"""Trains a language model on a text, from reading it to the finished run.

>>> train(TrainSettings(corpus=("embedded:tiny",), steps=100), out="runs/first")
"""

import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nanolm.formats import counted
from nanolm.planning import tuning
from nanolm.planning.planner import SETUP_SHARE, Plan
from nanolm.pretraining import prepare
from nanolm.pretraining.begin import RunStart, with_absolute_paths
from nanolm.pretraining.distil import Ensemble
from nanolm.pretraining.language import NextToken, as_metrics
from nanolm.pretraining.prepare import Job, find_base, prepare_text, text_deadline
from nanolm.pretraining.session import all_steps, first_process, stopwatch
from nanolm.runs.folder import Run
from nanolm.text.mix import bits_by_part
from nanolm.training.distributed import World, join_world
from nanolm.training.events import Note, Notify
from nanolm.training.interrupt import EvaluationStopped
from nanolm.training.metrics_log import write_result
from nanolm.training.settings import TrainSettings


@dataclass(frozen=True)
class TrainResult:
    """The result of a run: the last line that `nanolm train --json` prints."""

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
    val_bits_per_byte_by_part: dict[str, float] = field(default_factory=dict)  # of a mix


def train(
    settings: TrainSettings,
    out: str | Path | None = None,
    notify: Notify = lambda event: None,
    started: float | None = None,
) -> TrainResult:
    """Train on `settings.corpus`, or resume an unfinished run with the same settings. Minutes count
    from `started`, by `time.monotonic`, or from now. Other processes call `follow`."""
    elapsed = stopwatch(started)
    with first_process(settings) as world:
        start = RunStart(settings, out, notify)
        base = find_base(start.settings, notify)
        # A resumed run uses the same text as before, however little time remains.
        until = text_deadline(start.settings, elapsed) if start.fresh else None
        text = prepare_text(start.settings, base, notify, until)
        with start.locked():
            job = prepare.make_job(start, base, text, elapsed, world.size)
            world.broadcast(job.to_dict())
            result = learn(job, world, elapsed, start.notify)
            if result.stopped != "interrupted":
                write_result(start.run, asdict(result), start.notify)
                start.run.extending.unlink(missing_ok=True)
            return result


def follow() -> TrainResult:
    """Take part in the training that the first process has planned, and report nothing."""
    with join_world() as world:
        job = Job.from_dict(world.receive())
        with tuning.deterministic_algorithms(job.settings.deterministic), job.run.held():
            return learn(job, world, stopwatch(None), lambda event: None)


def learn(job: Job, world: World, elapsed: Callable[[], float], notify: Notify) -> TrainResult:
    """Run all remaining steps of a job, after those of its teachers, if any."""
    with tuning.attention_by(job.settings.attention):
        if not job.settings.teachers:
            return learn_by(NextToken, job, elapsed, world, notify)
        ensemble = Ensemble(job, elapsed, notify)
        if ensemble.train(world):
            return learn_by(*ensemble.student(), world, notify)
        seconds = round(ensemble.spent(), 3)
        nothing = (0, 0, seconds, None, None, None, 0)  # not even the first step of the student
        return TrainResult(str(job.run.path), *nothing, stopped="interrupted")


def learn_by(
    make_task: Callable[..., NextToken],
    job: Job,
    elapsed: Callable[[], float],
    world: World,
    notify: Notify,
) -> TrainResult:
    """Run all remaining steps of one task."""
    with all_steps(job, make_task, world, elapsed, notify) as (task, trainer, stopped):
        if stopped == "minutes":
            task.report_slow_steps(trainer.state.step)
        state, scores, held_out = trainer.state, trainer.state.scores, len(job.text.val)
        if stopped != "interrupted":
            if held_out and not (task.evaluated_all and state.best_step == state.step):
                try:
                    scores = as_metrics(task.score())  # on the whole validation set
                    if not task.evaluated_all and state.evaluated_tokens:
                        text = f"final validation on all {held_out:,} validation tokens; "
                        text += f"evaluations during training used {state.evaluated_tokens:,}"
                        notify(Note(f"{text} of them"))
                except EvaluationStopped:
                    stopped = "interrupted"
            if stopped != "interrupted":
                task.save_final(state)
            trainer.budget.tick()
        return TrainResult(
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
            val_bits_per_byte_by_part=bits_by_part(scores),
        )


def what_to_type(result: TrainResult) -> str:
    """The message after a run that had too little time."""
    needed = max(2 * result.seconds, result.setup_seconds / SETUP_SHARE) / 60
    minutes = next((some for some in (0.5, 1, 2, 3, 5, 10, 20, 30) if some >= needed), 60)
    preparing = result.setup_seconds > result.seconds / 2
    less = ", or with less text (--max-bytes 250000)" if preparing else ""
    run, longer = Run(Path(result.run)), ""
    if not (run.exists() and run.settings().get("teachers")):  # distilled runs cannot be extended
        command = f"nanolm train --extend {shlex.quote(result.run)} --minutes {minutes:g}"
        longer = f", or train this run longer: {command}"
    return (
        f"too little time: {counted(result.steps, 'step')} in {result.seconds:.0f} s, of which "
        f"preparation took {result.setup_seconds:.0f} s. The model has learned almost nothing. "
        f"Run the same command with --minutes {minutes:g}{less}{longer}"
    )


def plan_only(
    settings: TrainSettings, notify: Notify = lambda event: None, started: float | None = None
) -> Plan:
    """The plan that `train` would follow, without training."""
    elapsed = stopwatch(started)
    settings.check()
    settings = with_absolute_paths(settings)
    base = find_base(settings, notify)
    text = prepare_text(settings, base, notify, text_deadline(settings, elapsed))
    return prepare.plan_for(settings, base, text, elapsed, notify)
