"""Ensemble distillation: one model, the student, learns the mean prediction of several teachers.

    >>> ensemble = Ensemble(job, elapsed, notify)
    >>> if ensemble.train(world):
    ...     make_task, job, elapsed = ensemble.student()

After about twenty passes over a small text, more training does not help a model. But the mean
prediction of several models, trained with different seeds, is better than that of each, and a new
model of the same size can learn it. The teachers are trained one after the other in the folder
`teachers` of the run, which is removed when the run ends.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanolm import files
from nanolm.choice import Choice, Report
from nanolm.errors import ModelError
from nanolm.formats import counted
from nanolm.model.base import Model
from nanolm.model.device import free_memory
from nanolm.model.huggingface import load_model
from nanolm.planning import recipe
from nanolm.planning.sizes import soft_target_columns
from nanolm.pretraining.begin import reports
from nanolm.pretraining.language import WRONG_FORECAST, NextToken
from nanolm.pretraining.ledger import Ledger, LedgerState, read_state
from nanolm.pretraining.prepare import Job, build
from nanolm.pretraining.session import all_steps
from nanolm.runs import checkpoint
from nanolm.runs.folder import TEACHERS, Run
from nanolm.text.tokens import Batches
from nanolm.training import state as training_state
from nanolm.training.distributed import World
from nanolm.training.events import Event, Note, Notify, Preparing, Progressed
from nanolm.training.feed import DeviceSource
from nanolm.training.loss import SoftTargets, distillation_loss
from nanolm.training.settings import TrainSettings
from nanolm.training.step import AUTOCAST_DTYPES

FILE = "teachers.json"
SEED_STEP = 1_000_003  # between the seeds of two teachers
CHUNK_TOKENS = 1 << 14  # that the teachers predict at a time
CHUNK_LOGITS = 1 << 24


@dataclass
class EnsembleState(LedgerState):
    teachers: list[dict[str, Any]] = field(default_factory=list)  # those that are trained
    columns: int | None = None  # probabilities kept for each token, once that is decided
    offsets: int = 1  # at which the text is cut into windows


class Ensemble(Ledger[EnsembleState]):
    """The teachers of a run, trained one after the other. `finished` means that all are."""

    def __init__(self, job: Job, elapsed: Callable[[], float], notify: Notify) -> None:
        """`elapsed` returns the seconds since this process started."""
        file = job.run.path / TEACHERS / FILE
        state = read_state(file, EnsembleState) or EnsembleState({})
        minutes, clock = job.settings.minutes or math.inf, time.monotonic() - elapsed()
        super().__init__(file, state, minutes, clock, notify)
        self.job, self.elapsed = job, elapsed

    @property
    def place(self) -> Path:
        """The folder of the teachers, even if the run was moved."""
        return self.job.run.path / TEACHERS

    def save(self) -> None:
        self.folder, self.file = self.place, self.place / FILE
        super().save()

    def spent(self) -> float:
        """Seconds of the run so far, including those of killed processes."""
        return self.state.seconds + time.monotonic() - self.clock

    def train(self, world: World) -> bool:
        """Train all teachers that are not trained yet; returns False if it was interrupted."""
        self.place.mkdir(exist_ok=True)
        files.sweep(self.place)
        while not self.state.finished:
            for left in self.place.glob("training-*"):
                if left.name != self.training().path.name:
                    files.discard(left)  # its model is saved
            self.state.finished = self.are_enough()
            if not self.state.finished and not self.train_next(world):
                return False
            self.save()
        if self.job.checkpoint is None:
            facts = self.job.run.facts()
            self.job.run.update({**facts, "teachers": self.state.teachers})
        return True

    def training(self) -> Run:
        """The run of the next teacher."""
        return Run(self.place / f"training-{len(self.state.teachers) + 1}")

    def are_enough(self) -> bool:
        """Whether all are trained, or another one would leave the student too little time."""
        settings, teachers = self.job.settings, self.state.teachers
        assert settings.teachers
        if len(teachers) >= settings.teachers:
            return True
        if not teachers or not settings.minutes:
            return False
        left = self.left() - fmean(teacher["seconds"] for teacher in teachers)
        if left >= recipe.LEAST_STUDENT_SHARE * 60 * settings.minutes:
            return False
        text = f"{counted(len(teachers), 'teacher')} instead of {settings.teachers}"
        self.watch(Note(f"{text}: the machine is slower than expected"))
        return True

    def teacher_settings(self, number: int) -> TrainSettings:
        settings = self.job.settings
        minutes = settings.minutes and (1 - recipe.LEAST_STUDENT_SHARE) * settings.minutes
        seed = (settings.seed + SEED_STEP * number) % (1 << 63)
        once = replace(settings, teachers=0, evaluations=1, compile=bool(settings.compile))
        return replace(once, seed=seed, minutes=minutes)

    def train_next(self, world: World) -> bool:
        """Train the next teacher and keep its model; returns False if it was interrupted."""
        number, run = len(self.state.teachers) + 1, self.training()
        settings, note = self.teacher_settings(number), reports(self.watch)[0]
        run.path.mkdir(exist_ok=True)
        with run.held():
            files.sweep(run.checkpoints)
            saved, elapsed = checkpoint.newest_valid(run.checkpoints, note), self.spent
            if saved:
                checkpoint.retire_after(run.checkpoints, saved, note)
                self.state.seconds = training_state.read_state(saved).seconds
                elapsed = self.elapsed
            job = replace(self.job, settings=settings, run=run, checkpoint=saved, forecast=None)
            job = replace(job, fixed_steps=True, model=build(settings, None, saved, job.text))
            what = f"teacher {number} of {self.job.settings.teachers}"
            steps = all_steps(job, TeacherTask, world, elapsed, partial(self.pass_on_teacher, what))
            with steps as (task, trainer, stopped):
                state = trainer.state
                if stopped == "interrupted":
                    return False
                files.commit(self.place, str(number), task.snapshot())
        bits = state.scores.get("val_bits_per_byte")
        known = {"seed": settings.seed, "steps": state.step, "val_bits_per_byte": bits}
        self.state.teachers.append({**known, "seconds": round(state.seconds - state.setup, 3)})
        result = "" if bits is None else f"{bits:.3f} bits per byte "
        note(f"{what}: {result}after {counted(state.step, 'step')}")
        if number == 1:
            self.correct_forecast(note)
        stopping = bool(task.stop and task.stop.requested)  # after its last step
        del task, trainer, steps
        free_memory()
        self.save()
        return not stopping

    def pass_on_teacher(self, what: str, event: Event) -> None:
        """Report the progress of a teacher, whose metrics are not those of the run."""
        if isinstance(event, Progressed):
            self.watch(Preparing(what, round(1000 * event.progress), 1000))
        elif isinstance(event, Note | Choice):
            self.watch(event)

    def predicted_bits(self) -> float | None:
        """The student's bits per byte, predicted from those of the teachers so far."""
        teachers, planned = self.state.teachers, self.job.settings.teachers or 0
        bits = [each["val_bits_per_byte"] for each in teachers]
        if not bits or None in bits:
            return None
        count = len(teachers) if self.state.finished else max(planned, len(teachers))
        return fmean(bits) * (1 - recipe.distillation_gain(count))

    def correct_forecast(self, note: Callable[[str], None]) -> None:
        """Report and record a forecast that the first teacher shows to be wrong."""
        planned, bits, run = self.job.forecast, self.predicted_bits(), self.job.run
        if planned and bits and abs(bits / planned.bits_per_byte - 1) > WRONG_FORECAST:
            run.update({**run.facts(), "forecast": asdict(replace(planned, corrected=bits))})
            text = f"forecast: {bits:.3f} bits per byte instead of {planned.bits_per_byte:.3f}"
            note(f"{text}, from the first teacher")

    def student(self) -> tuple[Callable[..., NextToken], Job, Callable[[], float]]:
        """The task of the student, its job, and the seconds spent before its first step."""
        job = replace(self.job, settings=recipe.student(self.job.settings))
        if job.forecast and (bits := self.predicted_bits()):
            job = replace(job, forecast=replace(job.forecast, bits_per_byte=bits))
        # Those of earlier processes are part of a checkpoint.
        return partial(StudentTask, self), job, self.elapsed if job.checkpoint else self.spent

    def batches(self, batches: Batches) -> Batches:
        """Windows at few enough offsets to keep the predictions for all of them."""
        size, tokens = self.job.text.tokenizer.vocab_size, len(self.job.text.train)
        if self.state.columns is None:
            device, several = self.job.settings.device, recipe.OFFSETS_ON_GPU
            if device == "cuda" and soft_target_columns(size, several * tokens, device) >= size:
                self.state.offsets = several
            kept = soft_target_columns(size, self.state.offsets * tokens, device)
            self.state.columns = max(recipe.LEAST_COLUMNS, kept)
            self.save()
        return replace(batches, offsets=self.state.offsets)

    def soft_targets(self, source: DeviceSource) -> SoftTargets:
        """The mean prediction of all teachers for each token of the windows."""
        settings = self.job.settings
        folders = [self.place / str(n + 1) for n in range(len(self.state.teachers))]
        for folder in folders:
            try:
                files.verify(folder)
            except ModelError as error:
                raise ModelError(f"{error}; restore it, or start a new run with --out") from None
        models = [load_model(folder).to(settings.device).eval() for folder in folders]
        low = AUTOCAST_DTYPES.get(settings.dtype) if settings.device != "cpu" else None
        with torch.autocast(settings.device, low, enabled=low is not None):
            assert self.state.columns
            return mean_predictions(models, source, self.state.columns, reports(self.watch)[1])


class TeacherTask(NextToken):
    def write(self, network: Model, step: int, measured: str = "") -> None:
        """Teachers generate no samples."""


class StudentTask(NextToken):
    """Learns the predictions of an ensemble instead of the tokens of the text. Student and teachers
    see the same windows: predictions made with more context than the student has teach it less."""

    def __init__(self, ensemble: Ensemble, *rest: Any) -> None:
        super().__init__(*rest)
        batches = ensemble.batches(self.source.batches)
        self.feed = DeviceSource(batches, self.settings.device)
        self.source = self.feed
        self.starts = all_starts(self.feed)
        self.targets = ensemble.soft_targets(self.feed)
        free_memory()

    def correct_forecast(self, *_: Any) -> float:
        """A student's loss does not fall like that of other models, so the forecast is kept."""
        assert self.forecast
        return self.forecast.bits_per_byte

    def loss(self, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        (starts,) = batch
        x = self.network.hidden_states(self.feed.ids(starts)[:, :-1])  # (batch, context, dim)
        rows = torch.searchsorted(self.starts, starts)[:, None] * x.shape[1]
        places = rows + self.feed.window[:-1]  # (batch, context)
        return distillation_loss(self.network.head, x, self.targets, places), {}


def all_starts(source: DeviceSource) -> Tensor:
    starts = torch.from_numpy(source.batches.all_starts().astype(np.int64))
    return starts.to(source.tokens.device)


@torch.no_grad()
def mean_predictions(
    models: list[Model], source: DeviceSource, columns: int, report: Report = lambda *_: None
) -> SoftTargets:
    """The mean prediction of the models for all tokens of all windows, one after the other: the
    `columns` highest probabilities, and the sum of the others."""
    vocab_size, starts = models[0].config.vocab_size, all_starts(source)
    window, kept, ids = source.batches.context, columns + 1, None
    if columns >= vocab_size:
        kept = vocab_size
    else:
        kind = torch.int16 if vocab_size <= 1 << 15 else torch.int32
        ids = torch.empty(len(starts) * window, columns, dtype=kind, device=starts.device)
    found = torch.empty(len(starts) * window, kept, dtype=torch.float16, device=starts.device)
    rows = max(1, min(CHUNK_TOKENS // window, CHUNK_LOGITS // (window * vocab_size)))
    for first in range(0, len(starts), rows):
        x = source.ids(starts[first : first + rows])[:, :-1]  # (rows, window)
        mean = torch.zeros(x.numel(), vocab_size, device=x.device)
        for model in models:
            logits = model.head(model.hidden_states(x))  # (rows, window, vocabulary)
            mean += logits.float().flatten(0, 1).softmax(dim=1) / len(models)
        part = slice(first * window, (first + rows) * window)
        if ids is None:
            found[part] = mean.half()
        else:
            top = mean.topk(columns)
            rest = (1 - top.values.sum(dim=1, keepdim=True)).clamp(min=0)
            found[part] = torch.cat([top.values, rest], dim=1).half()
            ids[part] = top.indices.to(ids.dtype)
        report("computing the predictions of the teachers", first + len(x), len(starts))
    return SoftTargets(found, ids)
