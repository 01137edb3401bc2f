"""Estimates the speedup of more processes, from the step time here and the data to exchange.

    >>> estimates(BenchSettings(scale="1,8", bandwidth=50.0), note=print)

A step is measured with the rows of one process. The communication is computed: the gradients in a
ring all-reduce (each value passes each process twice), which DDP overlaps with the backward pass,
and Muon's updates, each computed by one process, which do not overlap.
"""

from collections.abc import Callable
from contextlib import closing
from typing import Any

from nanolm.bench.measure import DEFAULT_PRESETS, shape
from nanolm.bench.settings import BenchSettings
from nanolm.bench.turns import medians
from nanolm.model.config import GPTConfig
from nanolm.model.device import choose_device, choose_dtype, free_memory
from nanolm.model.size import non_embedding_parameters
from nanolm.planning import recipe
from nanolm.planning.trial import SpeedTrial

GRADIENT_BYTES = 4  # per value
BACKWARD_SHARE = 0.5  # of a step


def estimates(settings: BenchSettings, note: Callable[[str], None]) -> list[dict[str, Any]]:
    device, _ = choose_device(settings.device)
    dtype, _ = choose_dtype("auto", device)
    estimates = []
    for preset in settings.preset or DEFAULT_PRESETS[device][:1]:
        config, batch = shape(preset, settings, device)
        muon = recipe.optimizer(config, batch)[0] == "muon"
        counts = sorted({1, *settings.process_counts()})
        rows = {count: max(1, batch // count) for count in counts}
        note(f"{preset}: {batch} x {config.context} tokens per step, {len(counts)} process counts")
        seconds: dict[int, float] = {}
        for number in sorted(set(rows.values())):
            with closing(SpeedTrial(config, number, device, dtype)) as trial:
                seconds[number] = medians({"step": trial}, settings.seconds)["step"]
                parameters = trial.model.parameter_count()
            del trial
            free_memory()
        alone = seconds[batch]
        shared = non_embedding_parameters(config) if muon and isinstance(config, GPTConfig) else 0
        for count in counts:
            once = GRADIENT_BYTES * (count - 1) / count / (1e9 * settings.bandwidth)
            gradients, updates = 2 * parameters * once, shared * once
            compute = seconds[rows[count]]
            shown = max(0.0, gradients - BACKWARD_SHARE * compute) + updates
            step = compute + shown
            grown = alone + max(0.0, gradients - BACKWARD_SHARE * alone) + updates
            estimate = {
                "preset": preset,
                "processes": count,
                "rows": rows[count],  # per process
                "compute": compute,  # seconds, measured
                "exchange": gradients + updates,  # seconds, computed
                "shown": shown,  # seconds of it that do not overlap
                "speed": rows[count] * count * config.context / step,  # total tokens per second
                "efficiency": alone * rows[count] / (batch * step),  # of ideal scaling
                "grown": alone / grown,  # the same with the full batch for each process
            }
            estimates.append(estimate)
    return estimates
