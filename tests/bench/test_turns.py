"""Timing in turns."""

import time
from dataclasses import dataclass, field

import torch

from nanolm.bench.turns import FEWEST_ROUNDS, OnThreads, fastest, medians


@dataclass
class Sleeper:
    """Works only when waited for, like a GPU."""

    name: str
    seconds: float
    log: list[str] = field(default_factory=list)
    owed: float = 0.0

    def step(self) -> None:
        self.owed += self.seconds

    def wait(self) -> None:
        time.sleep(self.owed)
        self.owed = 0.0
        self.log.append(self.name)


def test_each_gets_its_own_time_in_turn() -> None:
    log: list[str] = []
    short, long = Sleeper("short", 0.004, log), Sleeper("long", 0.016, log)
    taken = medians({"short": short, "long": long}, seconds=0.2)
    assert 0.004 <= taken["short"] < 0.016 <= taken["long"]
    rounds = log[4:]  # both were warmed up, and tried once to choose the number of steps
    assert rounds == ["short", "long"] * (len(rounds) // 2)
    assert len(rounds) // 2 >= FEWEST_ROUNDS


def test_what_outlasts_the_time_still_gets_its_rounds() -> None:
    log: list[str] = []
    medians({"long": Sleeper("long", 0.002, log)}, seconds=0)
    assert len(log) == 2 + FEWEST_ROUNDS  # waits after warmup, trial, and each round


def test_the_fastest_is_found() -> None:
    runners = [Sleeper(name, seconds) for name, seconds in (("a", 0.01), ("b", 0.002), ("c", 0.02))]
    assert fastest(runners).name == "b"


def test_threads_are_given_for_a_turn() -> None:
    class Counting(Sleeper):
        def step(self) -> None:
            self.log.append(str(torch.get_num_threads()))

    before = torch.get_num_threads()
    counting = Counting("", 0.0)
    OnThreads(counting, before + 1).step()
    assert counting.log == [str(before + 1)]
    assert torch.get_num_threads() == before
