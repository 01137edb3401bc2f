"""The time of a training step by sequence length: recurrent or parallel over positions.

>>> step_times("cpu", ["rnn", "modern"], lambda *progress: None, seconds=60)

Each step has one sequence, and all models have the same width. A recurrent layer waits for each
token, so doubling the length doubles the time, however fast the machine is. A Transformer computes
all positions in parallel, until the quadratic cost of attention dominates.
"""

import statistics
import time
from collections.abc import Sequence
from contextlib import closing

from nanolm.choice import Report
from nanolm.model.config import configure
from nanolm.planning.trial import SpeedTrial

SEQUENCE_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
MODEL_SHAPE = {"vocab_size": 512, "layers": 2, "heads": 4, "dim": 256}
WARM_UP_STEPS = 3  # to compile kernels and, on a GPU, capture a graph
MIN_SECONDS, MIN_STEPS = 0.6, 3  # timed for each length and model
GROWTH = 3.0  # the time to measure one length, at most, relative to the length before


def step_times(
    device: str, families: Sequence[str], report: Report, seconds: float
) -> dict[str, list[tuple[int, float]]]:
    """Seconds per step for each family, as (length, seconds) pairs, up to the longest length that
    can be measured for all families within about `seconds` seconds."""
    times: dict[str, list[tuple[int, float]]] = {family: [] for family in families}
    cases = len(times) * len(SEQUENCE_LENGTHS)
    begin = time.monotonic()
    for length in SEQUENCE_LENGTHS:
        before = time.monotonic()
        for family in times:
            report("measuring steps", sum(map(len, times.values())), cases)
            config = configure(family, context=length, **MODEL_SHAPE)
            with closing(SpeedTrial(config, rows=1, device=device)) as trial:
                times[family].append((length, median_step(trial)))
        now = time.monotonic()
        if now - begin + GROWTH * (now - before) > seconds:
            break
    return times


def median_step(trial: SpeedTrial) -> float:
    """The median time of a step in seconds."""
    for _ in range(WARM_UP_STEPS):
        trial.step()
    trial.wait()
    times: list[float] = []
    while len(times) < MIN_STEPS or sum(times) < MIN_SECONDS:
        begin = time.monotonic()
        trial.step()
        trial.wait()
        times.append(time.monotonic() - begin)
    return statistics.median(times)
