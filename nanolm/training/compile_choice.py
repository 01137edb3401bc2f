"""Decides whether to use torch.compile: as requested, or if it pays off within the run.

If the first steps suggest that it saves more time than it costs, it is tried, and kept if faster.
"""

import time
from dataclasses import dataclass, replace
from statistics import median

from nanolm.choice import Choice
from nanolm.runs.folder import Run
from nanolm.training.budget import Budget
from nanolm.training.events import Note, Notify
from nanolm.training.settings import Settings
from nanolm.training.step import Step, out_of_memory
from nanolm.training.task import Task

DECIDED_AT = 10  # this step; the timings of those before estimate the gain
EXPECTED_GAIN = {"cpu": 0.1}  # share of the time; on a GPU, our fused kernels gain more


@dataclass
class CompileChoice:
    """Decided once per run; the decision is saved in its settings."""

    run: Run
    settings: Settings
    task: Task
    step: Step
    notify: Notify

    def __post_init__(self) -> None:
        self.open = self.task.compile_seconds is not None
        self.step_seconds: list[float] = []  # before the decision

    def is_due(self, step: int) -> bool:
        return self.open and step >= DECIDED_AT

    def decide(self, budget: Budget) -> None:
        self.open = False
        asked = getattr(self.settings, "compile", None)
        wanted, cost = bool(asked), self.task.compile_seconds or 0.0
        if asked is None and self.settings.device in EXPECTED_GAIN and not self.step.world.joined:
            # The median, because the first step includes warming up.
            state = budget.state
            left = budget.seconds_left_at(median(self.step_seconds or [state.seconds / state.step]))
            gain = EXPECTED_GAIN[self.settings.device] * left
            wanted = gain > cost
            saving = f"would save about {gain:.0f} s of the remaining {left:.0f} s"
            reason = f"compiling takes about {cost:.0f} s and {saving}"
            self.notify(Choice("compile", "trying it" if wanted else "no", reason))
        compiled = self.try_compiled() if wanted else None
        if asked is None and compiled is not None:
            self.task.compile(False)
            plain = self.measure()
            self.task.compile(wanted := compiled < plain)
            times = f"{1000 * compiled:.1f} ms per step, {1000 * plain:.1f} without"
            self.notify(Choice("compile", "yes" if wanted else "no", times))
        if asked is None and self.step.world.first:
            decided = replace(self.settings, compile=wanted)  # type: ignore[call-arg]
            self.run.configure(decided.to_dict())
        self.step.discard_graphs()

    def try_compiled(self) -> float | None:
        """Seconds of a compiled step, or None if compiling failed; then it is off again."""
        self.task.compile(True)
        try:
            return self.measure()
        except Exception as error:  # a compiler has many ways to fail
            if isinstance(error, RuntimeError) and out_of_memory(error):
                raise
            self.task.compile(False)
            first = str(error).strip().partition("\n")[0][:200]
            self.notify(Note(f"torch.compile failed ({first}); continuing without it"))
            return None

    def measure(self) -> float:
        """Seconds of forward and backward, after a warmup."""
        taken = []
        for _ in range(4):
            start = time.perf_counter()
            self.step.accumulate_gradients(self.task.batch(0)).tolist()
            taken.append(time.perf_counter() - start)
        self.step.optimizers.zero_grad()
        return sorted(taken[1:])[1]
