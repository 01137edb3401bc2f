"""The budget of a run: steps, minutes, or whichever is used up first."""

import math
import time

from nanolm.training.schedule import DECAY
from nanolm.training.settings import Settings
from nanolm.training.state import State

MIN_STEPS = 20  # with fewer, a model learns nothing
OVERTIME = 1.05  # times the budget, at most, to reach MIN_STEPS
MAX_EVALUATION_SHARE = 0.25  # of the training time, if the run has a time limit
MAX_RESERVE_SHARE = 0.4  # of the remaining time, before the final work has been timed


class Budget:
    """Tracks the time, and keeps a reserve for the work after the last step."""

    def __init__(self, settings: Settings, state: State) -> None:
        self.settings, self.state = settings, state
        self.total = 60 * (settings.minutes or math.inf)  # seconds
        self.evaluation_seconds = 0.0  # in this process, including saving
        self.evaluated = False  # by this process
        self.start_clock()

    def spend(self, seconds: float) -> float:
        """Add the time spent before the first step. Returns the progress of the run."""
        self.state.seconds += seconds
        self.state.setup += seconds
        progress = self.progress()
        if progress < 1 - DECAY:  # an extended run may be before its decay again
            self.state.decay_step = None
        return progress

    def start_clock(self) -> None:
        self.clock = time.monotonic()

    def tick(self) -> None:
        """Add the time since the last call."""
        now = time.monotonic()
        self.state.seconds += now - self.clock
        self.clock = now

    def progress(self) -> float:
        """The share of the steps, or of the time for them, that is used: 0 to 1."""
        used, state = [], self.state
        if self.settings.steps:
            used.append(state.step / self.settings.steps)
        if self.settings.minutes:
            end = self.total - state.reserve
            share = (state.seconds - state.setup) / max(end - state.setup, 1e-3)
            if state.step < MIN_STEPS and state.seconds < OVERTIME * end:
                share = min(share, state.step / MIN_STEPS)
            used.append(share)
        return max(used)

    def decay_begins(self, progress: float) -> bool:
        """Whether the learning rate starts to decay at this step, which is then recorded."""
        if self.state.decay_step is not None or progress < 1 - DECAY:
            return False
        self.state.decay_step = self.state.step
        return True

    def used_up_by(self) -> str:
        steps = self.settings.steps
        return "steps" if steps and self.state.step >= steps else "minutes"

    def reserve_for_end(self, seconds: float, spent: float) -> None:
        """Before the first step: reserve about `seconds` for the end; `spent` is the time used."""
        if self.settings.minutes:
            self.state.reserve = min(seconds, MAX_RESERVE_SHARE * max(0.0, self.total - spent))

    def allows_evaluation(self, progress: float) -> bool:
        """With a time limit, evaluations during training must leave time for the steps."""
        if not self.settings.minutes or progress >= 1:
            return True
        training = self.state.seconds - self.state.setup
        return self.evaluation_seconds <= MAX_EVALUATION_SHARE * training

    def count_evaluation(self, seconds: float, after: float) -> None:
        """Record an evaluation of `seconds`; the work after the last one takes `after`."""
        self.state.reserve = after
        if self.evaluated:  # the first one is not typical: it includes warming up
            self.state.reserve += seconds
            self.evaluation_seconds += seconds
        self.evaluated = True

    def seconds_left(self) -> float:
        training, progress = self.state.seconds - self.state.setup, self.progress()
        return training / progress * max(0, 1 - progress) if progress else math.inf

    def seconds_left_at(self, step_seconds: float) -> float:
        """Seconds left if each step takes `step_seconds`."""
        left = self.total - self.state.seconds
        if self.settings.steps:
            left = min(left, step_seconds * (self.settings.steps - self.state.step))
        return left
