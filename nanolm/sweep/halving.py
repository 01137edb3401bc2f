"""Successive halving with a factor of 3 (Jamieson & Talwalkar 2016): survivors and cost per round.

>>> rungs(9), cost(9)
([9, 3, 1], 27)
"""

from nanolm.sweep.space import MOST_COMBINATIONS
from nanolm.training.schedule import DECAY

FACTOR = 3  # each round keeps one trial in FACTOR and trains it FACTOR times as long
FULL_COUNTS: tuple[int, ...] = (27, 9, 3)  # trials: these counts fill every round
FIRST_ROUND_SECONDS = 10.0  # per trial: with less, the first round says little,
FIRST_ROUND_SECONDS_BY_VALUE = 3.0  # but less is accepted if the user listed every value
SHORTEST_TRIAL = 1.0  # seconds, if --trials allows no more; half of it is startup and shutdown


def rungs(trials: int) -> list[int]:
    """The number of trials in each round."""
    counts = [trials]
    while counts[-1] > 1:
        counts.append(max(1, counts[-1] // FACTOR))
    return counts


def cost(trials: int) -> int:
    """The cost of all rounds, in units of one first-round trial."""
    return sum(count * FACTOR**number for number, count in enumerate(rungs(trials)))


def affordable(seconds: float, size: int, by_value: bool) -> int:
    """How many of `size` combinations to start with in this time: as many as possible if the user
    listed every value."""
    counts, least = FULL_COUNTS, FIRST_ROUND_SECONDS
    if by_value:
        counts = tuple(range(min(size, MOST_COMBINATIONS), 1, -1))
        least = FIRST_ROUND_SECONDS_BY_VALUE
    return min(size, next((count for count in counts if seconds / cost(count) >= least), 1))


def longest(seconds: float, trials: int) -> float:
    """Seconds of training that the best trial gets: each round resumes from before the decay."""
    each, total = max(SHORTEST_TRIAL, seconds / cost(trials)), 0.0
    for number in range(len(rungs(trials))):
        total = (1 - DECAY) * total + each * FACTOR**number
    return total
