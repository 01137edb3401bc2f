"""Successive halving, by thirds (Jamieson & Talwalkar 2016): who goes on, and what it costs.

>>> rungs(9), cost(9)
([9, 3, 1], 27)
"""

from nanolm.sweep.space import MOST_COMBINATIONS
from nanolm.training.schedule import DECAY

FACTOR = 3  # one of so many goes on, for so many times as long
FULL_COUNTS: tuple[int, ...] = (27, 9, 3)  # trials: each count fills its rounds
FIRST_ROUND_SECONDS = 10.0  # of a trial: with less, the first round says little,
FIRST_ROUND_SECONDS_BY_VALUE = 3.0  # but may do where all combinations were asked for
SHORTEST_TRIAL = 1.0  # seconds, where --trials leaves no more; half of it is start and end


def rungs(trials: int) -> list[int]:
    """How many are in each round."""
    counts = [trials]
    while counts[-1] > 1:
        counts.append(max(1, counts[-1] // FACTOR))
    return counts


def cost(trials: int) -> int:
    """Of all rounds, in times that a trial takes in the first."""
    return sum(count * FACTOR**number for number, count in enumerate(rungs(trials)))


def affordable(seconds: float, size: int, by_value: bool) -> int:
    """How many of `size` combinations to begin with, in that time; of those that were asked for
    by their values, as many as possible."""
    counts, least = FULL_COUNTS, FIRST_ROUND_SECONDS
    if by_value:
        counts = tuple(range(min(size, MOST_COMBINATIONS), 1, -1))
        least = FIRST_ROUND_SECONDS_BY_VALUE
    return min(size, next((count for count in counts if seconds / cost(count) >= least), 1))


def longest(seconds: float, trials: int) -> float:
    """Seconds of training that the best will have: each round goes on from before the decay."""
    each, total = max(SHORTEST_TRIAL, seconds / cost(trials)), 0.0
    for number in range(len(rungs(trials))):
        total = (1 - DECAY) * total + each * FACTOR**number
    return total
