"""The records of a run: metrics.jsonl, log.txt, and the result in run.json.

A GPU runs several steps behind the loop that launches them. Waiting for the loss of each step would
leave it idle, so results are read back a few steps late.
"""

import json
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanolm.formats import printable
from nanolm.report.page import write_report
from nanolm.runs.folder import Run, append
from nanolm.training.budget import Budget
from nanolm.training.distributed import World
from nanolm.training.events import Event, Note, Notify, Preparing, Progressed, Wrote
from nanolm.training.task import Task

LOG_EVERY = 10  # steps
MAX_PENDING = 10  # launched steps that a GPU may still be computing
MAX_PENDING_SECONDS = 0.25  # of work in them
MAX_PENDING_DISTRIBUTED = 4  # the same for all processes


@dataclass
class LaunchedStep:
    """A step launched on the device, which may still be computing it."""

    step: int
    tokens: int
    lr: float
    names: list[str]
    metrics: Tensor  # the gradient norm, the loss and other metrics
    done: torch.cuda.Event | None  # set when they can be read

    def read_back(self) -> None:
        if self.done:
            self.done.synchronize()
        self.grad_norm, *values = self.metrics.tolist()
        self.values = dict(zip(self.names, values, strict=True))

    def is_finite(self) -> bool:
        return all(map(math.isfinite, (self.grad_norm, *self.values.values())))


class MetricsLog:
    """Reads back and averages the results of steps, and writes a line every few steps."""

    def __init__(self, run: Run, task: Task, budget: Budget, notify: Notify, world: World) -> None:
        self.run, self.task, self.state, self.budget = run, task, budget.state, budget
        self.notify, self.world = notify, world
        self.pending: deque[LaunchedStep] = deque()
        self.max_pending = 0  # until the first steps are timed
        if world.joined and next(iter(task.parameters().values())).is_cuda:
            self.max_pending = MAX_PENDING_DISTRIBUTED
        self.tokens_per_second = 0
        self.measure_speed_from_here()

    def measure_speed_from_here(self) -> None:
        self.last_log = (self.state.tokens, self.state.seconds)

    def exclude_since(self, seconds: float) -> None:
        """Exclude the time since `seconds` from the measured training speed."""
        self.last_log = (self.last_log[0], self.last_log[1] + self.state.seconds - seconds)

    def record_launch(self, lr: float, names: list[str], metrics: Tensor) -> None:
        """Record the step just launched, and start copying its metrics to the CPU."""
        done = None
        if metrics.is_cuda:
            metrics = torch.empty(metrics.shape, pin_memory=True).copy_(metrics, non_blocking=True)
            done = torch.cuda.current_stream().record_event()
        state = self.state
        self.pending.append(LaunchedStep(state.step, state.tokens, lr, names, metrics, done))

    def read_back(self, keep: int) -> Iterator[LaunchedStep]:
        """The results of launched steps, except for the last `keep`."""
        before, count = self.state.seconds, 0
        while len(self.pending) > keep:
            step, count = self.pending.popleft(), count + 1
            step.read_back()
            self.budget.tick()
            yield step
            if step.done and not self.world.joined:
                each = (self.state.seconds - before) / count
                fitting = int(MAX_PENDING_SECONDS / max(each, 1e-9))
                self.max_pending = max(1, min(MAX_PENDING, fitting))

    def add(self, step: LaunchedStep) -> None:
        """Add a step to the sums for the next line of metrics and for the next evaluation."""
        state = self.state
        for name, value in step.values.items():
            for sums in (state.sums, state.evaluation_sums):
                sums[name] = sums.get(name, 0.0) + value
        state.summed += 1
        state.evaluation_steps += 1

    def log(self, step: LaunchedStep) -> None:
        """Write a line of metrics if one is due: the means since the last line."""
        if step.step % LOG_EVERY:
            return
        state = self.state
        seconds = state.seconds - self.last_log[1]
        if seconds >= MAX_PENDING_SECONDS or not self.tokens_per_second:  # too short to be exact
            self.tokens_per_second = round((step.tokens - self.last_log[0]) / max(seconds, 1e-9))
            self.last_log = (step.tokens, state.seconds)
        means = {name: value / state.summed for name, value in state.sums.items()}
        state.train_loss = means.get("loss", state.train_loss)
        means.setdefault("loss", math.nan)
        if state.first_loss is None:
            state.first_loss = state.train_loss
        means |= {"lr": step.lr, "grad_norm": step.grad_norm}
        means |= {"tokens_per_second": self.tokens_per_second}
        means |= {"skipped": state.skipped} if state.skipped else {}
        state.sums, state.summed, state.skipped = {}, 0, 0
        self.write(step.step, step.tokens, means)

    def log_evaluation(self) -> None:
        """Write the scores, beside the means over all steps since the last evaluation."""
        state, steps = self.state, self.state.evaluation_steps
        means = {f"train_{name}": sum_ / steps for name, sum_ in state.evaluation_sums.items()}
        state.evaluation_sums, state.evaluation_steps = {}, 0
        self.write(state.step, state.tokens, means | state.scores)

    def write(self, step: int, tokens: int, values: dict[str, float]) -> None:
        self.budget.tick()
        epoch = self.task.epoch(step + self.state.data_offset)
        line = {
            "step": step,
            **({} if epoch is None else {"epoch": round(epoch, 4)}),
            "tokens": tokens,
            "seconds": round(self.state.seconds, 3),
            **{name: value if math.isfinite(value) else None for name, value in values.items()},
        }
        if self.world.first:
            append(self.run, self.run.metrics.name, json.dumps(line) + "\n")
        left, progress = self.budget.seconds_left(), min(1, self.budget.progress())
        expected = self.task.expected(progress) if "val_loss" in values else None
        self.notify(Progressed(line, progress, left, expected))


def also_to_log(run: Run, notify: Notify) -> Notify:
    """`notify`, plus a line of log.txt for all events except metrics, which have their own file."""

    def both(event: Event) -> None:
        if not isinstance(event, Preparing | Progressed | Wrote):
            line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(str(event))}\n"
            try:
                append(run, run.log.name, line)
            except OSError as error:  # the run is complete without it
                notify(Note(f"could not write to {run.log}: {error.strerror}"))
        notify(event)

    return both


def write_result(run: Run, result: dict[str, Any], notify: Notify) -> None:
    """Write the report, which is optional, and then run.json, which marks the run as finished."""
    try:
        write_report(run, result=result)
    except Exception as error:
        notify(Note(f"could not write the report ({error!r}); try `nanolm report {run.path}`"))
    run.finish({**run.facts(), "result": result})
