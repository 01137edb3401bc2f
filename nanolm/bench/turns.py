"""Timing: runners take turns, so that other load on the machine affects all of them equally.

>>> medians({"ours": trial, "theirs": other}, seconds=3)
{'ours': 0.0112, 'theirs': 0.0198}
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from nanolm.planning.tuning import threads_for

WARM_UP_STEPS = 3  # the first steps select, compile and capture kernels
ROUNDS = 10  # in the given time
FEWEST_ROUNDS = 3  # regardless of time


class Runner(Protocol):
    def step(self) -> object:
        """Run one step, which may still be in progress afterwards."""

    def wait(self) -> object:
        """Wait until all steps are done."""


RunnerT = TypeVar("RunnerT", bound=Runner)


@dataclass(frozen=True)
class OnThreads:
    runner: Runner
    threads: int

    def step(self) -> None:
        with threads_for(self.threads):
            self.runner.step()

    def wait(self) -> None:
        self.runner.wait()


def warm_up(runner: Runner) -> None:
    seconds_for(runner, WARM_UP_STEPS)


def seconds_for(runner: Runner, steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        runner.step()
    runner.wait()
    return time.perf_counter() - start


def fastest(runners: Sequence[RunnerT]) -> RunnerT:
    times = medians({str(number): runner for number, runner in enumerate(runners)}, seconds=0.0)
    return runners[int(min(times, key=lambda number: times[number]))]


def medians(runners: Mapping[str, Runner], seconds: float) -> dict[str, float]:
    """Seconds per step of each runner: the median of rounds that take about `seconds` in all."""
    steps = {}
    for name, runner in runners.items():
        warm_up(runner)
        steps[name] = max(1, round(seconds / ROUNDS / seconds_for(runner, 1)))
    rounds: dict[str, list[float]] = {name: [] for name in runners}
    start, done = time.perf_counter(), 0
    while done < FEWEST_ROUNDS or time.perf_counter() - start < seconds * len(runners):
        for name, runner in runners.items():
            rounds[name].append(seconds_for(runner, steps[name]) / steps[name])
        done += 1
    return {name: statistics.median(times) for name, times in rounds.items()}
