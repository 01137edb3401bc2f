"""How language models and models of pairs are trained: by one process, or by several of torchrun.

>>> with first_process(settings) as world:
...     with all_steps(job, NextToken, world, stopwatch(None), notify) as (task, trainer, stopped):
...         scores = task.score()
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from nanolm.errors import TooLittleTime
from nanolm.machine import available_threads
from nanolm.model.device import choose_device
from nanolm.planning import tuning
from nanolm.training.budget import MIN_STEPS
from nanolm.training.distributed import World, join_world, local_rank
from nanolm.training.events import Notify
from nanolm.training.interrupt import EvaluationStopped, StopRequest
from nanolm.training.settings import Settings
from nanolm.training.task import Task
from nanolm.training.trainer import Trainer

MOST_SLOWDOWN = 4.0  # of the work after the last step, on a busy machine
TaskT = TypeVar("TaskT", bound=Task)


@contextmanager
def first_process(settings: Settings) -> Iterator[World]:
    """Check the settings and join the other processes, which stop if this one fails."""
    settings.check()
    with join_world() as world, world.leading():
        if world.joined and choose_device(settings.device)[0] == "cuda":
            local_rank()  # fail early if there are too few GPUs
        yield world


@contextmanager
def all_steps(
    job: Any,
    make_task: Callable[[Any, Notify, World, float], TaskT],
    world: World,
    elapsed: Callable[[], float],
    notify: Notify,
) -> Iterator[tuple[TaskT, Trainer, str]]:
    """Run all remaining steps of a job and load the best weights; yields why training stopped, too.
    The number of threads applies until the end of the `with` block."""
    settings = job.settings
    if world.joined:  # threads chosen for one process may be too many for each of several
        threads = min(settings.threads or 1, available_threads())
        settings = replace(settings, workers=1, threads=threads)
        job = replace(job, settings=settings)
    world.connect(settings.device)
    with tuning.threads_for(settings.threads, settings.workers), StopRequest() as stop:
        tuning.warn_about_threads(settings, notify)
        # On a busy machine, the work after the last step takes longer too.
        slowdown = min(MOST_SLOWDOWN, max(1.0, elapsed() / max(time.process_time(), 1e-3)))
        task = make_task(job, notify, world, slowdown)
        trainer = Trainer(job.run, settings, task, job.checkpoint, notify, elapsed(), world)
        task.stop = None if world.joined else stop  # processes would stop at different batches
        try:
            with trainer.checkpointer.writer:  # nothing is written once the run is unlocked
                stopped = trainer.train(stop)
        except EvaluationStopped:
            trainer.checkpointer.finish()  # it was saved before the evaluation
            stopped = "interrupted"
        if stopped == "minutes" and trainer.state.step < MIN_STEPS:
            stopped = TooLittleTime.stopped
        if stopped != "interrupted":
            trainer.checkpointer.load_best()
        yield task, trainer, stopped


def stopwatch(started: float | None) -> Callable[[], float]:
    """A function that returns the seconds since `started`, or since now."""
    begin = time.monotonic() if started is None else started
    return lambda: time.monotonic() - begin
