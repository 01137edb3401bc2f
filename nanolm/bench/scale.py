"""What more processes would be worth: from what a step takes here, and what has to be exchanged.

    >>> estimates(Request(scale=(1, 8), bandwidth=50.0), note=print)

Measured is a step with the rows that each process would have. Reckoned is what they tell each
other: the gradients, as a ring of processes adds them up (every number goes twice past each), of
which half the step's time hides some, for DDP sends what the way back has found already; and Muon's
updates, each made by one process, which nothing hides.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from nanolm.bench.measure import FITTING, shape
from nanolm.bench.request import Request
from nanolm.bench.turns import medians
from nanolm.model.config import GPTConfig
from nanolm.model.device import choose_device, choose_dtype, free_memory
from nanolm.model.size import non_embedding_parameters
from nanolm.planning import recipe
from nanolm.planning.trial import SpeedTrial

NUMBER = 4  # bytes
HIDES = 0.5  # of a step: the way back


@dataclass(frozen=True)
class Estimate:
    """One number of processes."""

    preset: str
    processes: int
    rows: int  # of each process
    compute: float  # seconds, measured
    exchange: float  # seconds, reckoned,
    shown: float  # and what of them nothing hides
    speed: float  # tokens a second of all of them, the batch being the same
    efficiency: float  # of so many times the speed of one
    grown: float  # the same, if each had as many rows as one has alone


def estimates(request: Request, note: Callable[[str], None]) -> list[Estimate]:
    device, _ = choose_device(request.device)
    dtype, _ = choose_dtype("auto", device)
    found: list[Estimate] = []
    for preset in request.presets or FITTING[device][:1]:
        config, batch = shape(preset, request, device)
        muon = recipe.optimizer(config, batch)[0] == "muon"
        counts = sorted({1, *request.scale})
        rows = {count: max(1, batch // count) for count in counts}
        note(f"{preset}: {batch} x {config.context} tokens a step, for {len(counts)} numbers")
        seconds: dict[int, float] = {}
        for number in sorted(set(rows.values())):
            with closing(SpeedTrial(config, number, device, dtype)) as trial:
                seconds[number] = medians({"step": trial}, request.seconds)["step"]
                parameters = trial.model.parameter_count()
            del trial
            free_memory()
        alone = seconds[batch]
        shared = non_embedding_parameters(config) if muon and isinstance(config, GPTConfig) else 0
        for count in counts:
            once = NUMBER * (count - 1) / count / (1e9 * request.bandwidth)
            gradients, updates = 2 * parameters * once, shared * once
            compute = seconds[rows[count]]
            shown = max(0.0, gradients - HIDES * compute) + updates
            step = compute + shown
            more = max(0.0, gradients - HIDES * alone) + updates
            found.append(
                Estimate(
                    preset,
                    count,
                    rows[count],
                    compute,
                    gradients + updates,
                    shown,
                    rows[count] * count * config.context / step,
                    alone * rows[count] / (batch * step),
                    alone / (alone + more),
                )
            )
    return found
