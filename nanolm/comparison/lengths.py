"""What a step costs as sequences grow: one token after the other, against all at once.

>>> step_times("cpu", ["rnn", "modern"], lambda *how_far: None)

One sequence a step, of 64 to 4,096 tokens, through models of the same width. A recurrent layer has
to wait for each token before it can take the next: twice the length is twice the time, on however
fast a machine. A Transformer computes all positions together, as far as the machine has units for
them; in the end the number of pairs of positions, which grows with the square, is what counts.
"""

import statistics
import time
from collections.abc import Sequence

from nanolm.choice import Report
from nanolm.model.config import configure
from nanolm.planning.trial import SpeedTrial

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
SHAPE = {"vocab_size": 512, "layers": 2, "heads": 4, "dim": 256}
WARM_UP = 3  # steps: kernels are made, and on a GPU a step is captured
SECONDS = 0.6  # for each length and model, or
LEAST = 3  # steps


def step_times(
    device: str, families: Sequence[str], report: Report
) -> dict[str, list[tuple[int, float]]]:
    """Seconds of a step by family: (length, seconds) each."""
    found: dict[str, list[tuple[int, float]]] = {}
    for number, family in enumerate(families):
        for place, length in enumerate(LENGTHS):
            report("measuring steps", number * len(LENGTHS) + place, len(families) * len(LENGTHS))
            trial = SpeedTrial(configure(family, context=length, **SHAPE), rows=1, device=device)
            try:
                found.setdefault(family, []).append((length, step_time(trial)))
            finally:
                trial.close()
    return found


def step_time(trial: SpeedTrial) -> float:
    """The median of as many steps as there is time for."""
    for _ in range(WARM_UP):
        trial.step()
    trial.wait()
    times: list[float] = []
    while len(times) < LEAST or sum(times) < SECONDS:
        begin = time.monotonic()
        trial.step()
        trial.wait()
        times.append(time.monotonic() - begin)
    return statistics.median(times)
