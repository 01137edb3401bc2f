"""How the cost of a training step grows with one dimension of the model or the batch.

    >>> growth(BenchSettings(grow="context", preset=("nano",)), note=print).points[-1]
    Point(size=1024, tokens=16384, seconds=1.31, bytes=412000000, power=1.4, expected=1.3)

The dimension doubles until a step takes a third of `seconds`. Between two points, the time grows as
size ** power. The expected power is that of the number of FLOPs: 1 for the batch, from 0 to 1 for
layers and vocabulary, and from 1 to 2 for the context length, because every token attends to all
earlier ones.
"""

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanolm.bench.machine import facts
from nanolm.bench.measure import DEFAULT_PRESETS, flops_per_token, shape
from nanolm.bench.settings import SMALLEST, BenchSettings
from nanolm.bench.turns import medians
from nanolm.machine import give_back_memory
from nanolm.model.config import ModelConfig
from nanolm.model.device import choose_device, choose_dtype, free_memory
from nanolm.planning import recipe
from nanolm.planning.trial import SpeedTrial
from nanolm.training.settings import TrainSettings
from nanolm.training.step import out_of_memory

FIELDS = {"context": "context", "layers": "layers", "vocab": "vocab_size"}  # of the config
MOST_POINTS = 12
UNEXPECTED = 0.25  # from the expected power
FEWEST_STEPS = 3  # that fit into --seconds, at the last point


@dataclass(frozen=True)
class Point:
    size: int  # of the dimension that grows
    tokens: int  # per step
    seconds: float  # per step
    bytes: int | None  # of peak memory; None if the system does not report it
    power: float | None = None  # from the previous point to this one; None for the first
    expected: float | None = None


@dataclass(frozen=True)
class Growth:
    machine: dict[str, Any]
    preset: str
    points: list[Point]


def growth(settings: BenchSettings, note: Callable[[str], None]) -> Growth:
    device, _ = choose_device(settings.device)
    dtype, _ = choose_dtype("auto", device)
    preset = (settings.preset or DEFAULT_PRESETS[device])[0]
    base, batch = shape(preset, settings, device)
    # One optimizer, and the same threads, for all sizes.
    how = TrainSettings((), dtype=dtype, optimizer=recipe.optimizer(base, batch)[0])
    points: list[Point] = []
    operations = 0
    for config, rows, size in variants(base, batch, settings.grow or "context"):
        note(f"{settings.grow} {size:,}: {rows} x {config.context} tokens per step")
        try:
            trial_of = partial(SpeedTrial, config, rows, device, settings=how)
            with peak_memory(device) as peak, closing(trial_of()) as trial:
                seconds = medians({"step": trial}, settings.seconds / FEWEST_STEPS)["step"]
                how = replace(trial.settings, batch=None, context=None, attention=None)
                before, operations = operations, trial.tokens * flops_per_token(trial.model)
                point = Point(size, trial.tokens, seconds, peak())
                del trial
        except RuntimeError as error:
            if not out_of_memory(error) or not points:
                raise
            note(f"{settings.grow} {size:,} does not fit into memory")
            break
        finally:
            free_memory()
        if points:
            doublings = math.log2(size / points[-1].size)
            power = math.log2(seconds / points[-1].seconds) / doublings
            expected = math.log2(operations / before) / doublings
            point = replace(point, power=power, expected=expected)
        points.append(point)
        if FEWEST_STEPS * seconds > settings.seconds:
            break
    return Growth(facts(device, dtype), preset, points)


def variants(config: ModelConfig, rows: int, grow: str) -> Iterator[tuple[ModelConfig, int, int]]:
    """Config, rows per step, and size of the dimension that grows."""
    for doublings in range(MOST_POINTS):
        size = SMALLEST[grow] << doublings
        if grow == "batch":
            yield config, size, size
        else:
            yield replace(config, **{FIELDS[grow]: size}), rows, size  # type: ignore[arg-type]


@contextlib.contextmanager
def peak_memory(device: str) -> Iterator[Callable[[], int | None]]:
    """A function that returns the most bytes that were in use since the start of the block."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield lambda: torch.cuda.max_memory_allocated() - before
        return
    gc.collect()  # of earlier trials, which refer to themselves
    give_back_memory()
    try:  # only Linux has it
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    except OSError:
        yield lambda: None
        return
    before = resident("VmRSS") or 0

    def peak() -> int | None:
        most = resident("VmHWM")
        return None if most is None else max(0, most - before)

    yield peak


def resident(kind: str) -> int | None:
    """Bytes of main memory that this process uses (VmRSS), or has used at most (VmHWM)."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        _, _, rest = Path("/proc/self/status").read_text().partition(f"{kind}:")
        return 1024 * int(rest.split(maxsplit=1)[0])
    return None
