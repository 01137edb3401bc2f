"""What a training step costs as sequences grow: one token after the other, or all at once.

>>> step_times("cpu", ["rnn", "modern"], lambda *progress: None)

One sequence a step, through models of the same width. A recurrent layer waits for each token: twice
the length is twice the time, however fast the machine. A Transformer computes all positions in
parallel, until the number of pairs of positions, which grows with the square, is what counts.
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
WARM_UP_STEPS = 3  # kernels are compiled, and on a GPU a step is captured
MIN_SECONDS, MIN_STEPS = 0.6, 3  # that are timed of each length and model


def step_times(
    device: str, families: Sequence[str], report: Report
) -> dict[str, list[tuple[int, float]]]:
    """Seconds of a step by family: (length, seconds) each."""
    times: dict[str, list[tuple[int, float]]] = {}
    cases = [(family, length) for family in families for length in SEQUENCE_LENGTHS]
    for number, (family, length) in enumerate(cases):
        report("measuring steps", number, len(cases))
        config = configure(family, context=length, **MODEL_SHAPE)
        with closing(SpeedTrial(config, rows=1, device=device)) as trial:
            times.setdefault(family, []).append((length, median_step(trial)))
    return times


def median_step(trial: SpeedTrial) -> float:
    """Seconds."""
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
