"""The trials of a sweep and their results, as saved in sweep.json."""

import math
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import fmean, stdev
from typing import Any

from nanolm.pretraining.ledger import LedgerState
from nanolm.report.sweep import format_value
from nanolm.sweep.space import SEED, Point


@dataclass
class SweepTrial:
    """A point of the search space, and its result in each round."""

    number: int
    values: Point
    results: list[dict[str, Any]] = field(default_factory=list)  # from `train`, by round
    error: str | None = None

    def __post_init__(self) -> None:
        if not all(result["seconds"] >= 0 and result["stopped"] for result in self.results):
            raise ValueError("a result is invalid")
        [float(bits) for bits in self.bits()]

    def bits(self) -> list[float]:
        return [result["val_bits_per_byte"] for result in self.results]

    def score(self, number: int | None = None) -> float:
        """Bits per byte of the latest model, or of the one after round `number`; inf if none."""
        bits = self.bits() if number is not None or self.error is None else []
        bits = bits if number is None else bits[number : number + 1]
        return bits[-1] if bits else math.inf


@dataclass
class SweepState(LedgerState):
    base: dict[str, Any] | None = None  # resolved settings
    trials: list[SweepTrial] = field(default_factory=list)
    waiting: list[Point] = field(default_factory=list)  # not tried yet for lack of time
    budgets: list[float] = field(default_factory=list)  # seconds per trial, by round
    run: str | None = None  # the best run

    def __post_init__(self) -> None:
        self.trials = [SweepTrial(**t) if isinstance(t, dict) else t for t in self.trials]


@dataclass(frozen=True)
class Combination:
    values: Point  # without the seed
    trials: list[SweepTrial]

    def score(self, number: int | None = None) -> float:
        """The mean over seeds; infinite if one of them failed."""
        return fmean(trial.score(number) for trial in self.trials)

    def rounds(self) -> list[tuple[float, float]]:
        """The mean and the standard deviation of bits per byte over seeds, by round."""
        by_round = zip_longest(*(trial.bits() for trial in self.trials))
        ended = [[bits for bits in each if bits is not None] for each in by_round]
        return [(fmean(each), stdev(each) if len(each) > 1 else 0.0) for each in ended]


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep: the last line that `nanolm sweep --json` prints."""

    folder: str
    run: str | None  # None if interrupted
    val_bits_per_byte: float | None
    trials: list[SweepTrial]  # best first
    not_tried: list[Point] = field(default_factory=list)  # for lack of time

    def combinations(self) -> list[Combination]:
        return combinations(self.trials)


def combinations(trials: list[SweepTrial]) -> list[Combination]:
    """Trials grouped so that those in a group differ only in their seed; the order is kept."""
    grouped: dict[tuple[Any, ...], Combination] = {}
    for trial in trials:
        values = {name: value for name, value in trial.values.items() if name != SEED}
        key = tuple(values.values()) if SEED in trial.values else (trial.number,)
        grouped.setdefault(key, Combination(values, [])).trials.append(trial)
    return list(grouped.values())


def ranked(trials: list[SweepTrial]) -> list[SweepTrial]:
    """Best first: by the mean over seeds, and within one combination by the score itself."""
    order = sorted(combinations(trials), key=Combination.score)
    return [trial for each in order for trial in sorted(each.trials, key=SweepTrial.score)]


def in_words(points: list[Point], most: int = 10) -> str:
    """`lr=0.003 dropout=0; ...`"""
    more = [f"and {len(points) - most:,} more"] if len(points) > most else []
    pairs = ([f"{name}={format_value(v)}" for name, v in each.items()] for each in points[:most])
    return "; ".join([*map(" ".join, pairs), *more])
