"""How much of a run is done: so many steps, so many minutes, or what is used up first."""

import math
import time

from nanolm.training.schedule import DECAY
from nanolm.training.settings import Settings
from nanolm.training.state import State

MIN_STEPS = 20  # fewer teach nothing:
OVERTIME = 1.05  # times the budget, where they would not be done otherwise
MAX_EVALUATION_SHARE = 0.25  # of the time, where the clock ends the run
MAX_RESERVE_SHARE = 0.4  # of the time for steps, before it is known what the end takes


class Budget:
    """Counts the time, and keeps a reserve for what comes after the steps."""

    def __init__(self, settings: Settings, state: State) -> None:
        self.settings, self.state = settings, state
        self.total = 60 * (settings.minutes or math.inf)  # seconds
        self.evaluation_seconds = 0.0  # of this process, saving included
        self.evaluated = False  # by this process
        self.start_clock()

    def spend(self, seconds: float) -> float:
        """Count what was spent before the first step; how far that leaves the run."""
        self.state.seconds += seconds
        self.state.setup += seconds
        progress = self.progress()
        if progress < 1 - DECAY:  # a longer run is not as far as it was
            self.state.decay_step = None
        return progress

    def start_clock(self) -> None:
        self.clock = time.monotonic()

    def tick(self) -> None:
        """Add the time since the last call to what the run has cost."""
        now = time.monotonic()
        self.state.seconds += now - self.clock
        self.clock = now

    def progress(self) -> float:
        """How much of the steps, or of the time that there is for them, is used: 0 to 1."""
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
        """Whether this is the step from which on the learning rate falls; it is kept in mind."""
        if self.state.decay_step is not None or progress < 1 - DECAY:
            return False
        self.state.decay_step = self.state.step
        return True

    def used_up_by(self) -> str:
        steps = self.settings.steps
        return "steps" if steps and self.state.step >= steps else "minutes"

    def reserve_for_end(self, seconds: float, spent: float) -> None:
        """Before the first step: seconds that the end takes, about, and what is spent by now."""
        if self.settings.minutes:
            self.state.reserve = min(seconds, MAX_RESERVE_SHARE * max(0.0, self.total - spent))

    def allows_evaluation(self, progress: float) -> bool:
        """Where the clock ends the run, evaluations on the way must leave time for the steps."""
        if not self.settings.minutes or progress >= 1:
            return True
        training = self.state.seconds - self.state.setup
        return self.evaluation_seconds <= MAX_EVALUATION_SHARE * training

    def count_evaluation(self, seconds: float, after: float) -> None:
        """One took so long, and what comes after the last one takes `after`."""
        self.state.reserve = after
        if self.evaluated:  # the first time is not like the others: much is made ready in it
            self.state.reserve += seconds
            self.evaluation_seconds += seconds
        self.evaluated = True

    def seconds_left(self) -> float:
        training, progress = self.state.seconds - self.state.setup, self.progress()
        return training / progress * max(0, 1 - progress) if progress else math.inf

    def seconds_left_at(self, step_seconds: float) -> float:
        """If each step takes so long."""
        left = self.total - self.state.seconds
        if self.settings.steps:
            left = min(left, step_seconds * (self.settings.steps - self.state.step))
        return left
