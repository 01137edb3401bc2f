"""Which size of model learns most in the time there is: a few are tried, the others reckoned.

    >>> pick(settings, text, seconds=170).outlook
    Outlook(config=GPTConfig(...), batch=16, step=0.104, steps=1592, ..., bits_per_byte=2.05)

Each is trained on noise for about a second. The loss it would reach with as many steps as the time
allows is predicted by `nanolm.planning.scaling_law`. Of those that come about as far, the smallest
is taken: it writes faster, and needs less room.
"""

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from nanolm.choice import Choice
from nanolm.model.config import PRESETS, GPTConfig, complete_shape
from nanolm.model.device import free_memory
from nanolm.model.size import non_embedding_parameters, training_bytes
from nanolm.planning import recipe
from nanolm.planning.scaling_law import Law
from nanolm.planning.trial import Trial
from nanolm.training.settings import TrainSettings

SHARE = {"cpu": 0.04}  # of the time may go into trying further sizes,
SHARE_ON_GPU = 0.12  # where kernels are made for each of them at first,
EACH = 1.0  # seconds for one of them, about,
MOST = 4  # and so many are enough
LEAST_TOKENS = {"cpu": 2_048}  # a step; elsewhere more, or a GPU has nothing to do
LEAST_ON_GPU = 8_192
MOST_TOKENS = 1 << 19
STEPS = 1_200  # about; with more of them, larger ones
FEW_STEPS = 120  # with fewer, smaller ones: half the tokens a step, or with a third, a quarter
A_TOKEN = 30  # parameters for each token of the text: more would learn it by heart
MOMENT = 25.0  # seconds, in which a small one learns most on a CPU,
TO_TRY = 2.0  # of which there are these to try others
CLOSE = 1.004  # what comes so near to the best is as good
FULL = 0.7  # of the memory of a GPU
WITH_SIZE = 0.85  # a model of twice the arithmetic takes 2 ** this times as long, about
# Layers, heads, width, context. The first one to be tried is that of a preset.
LADDER = (
    (2, 2, 64, 128),
    (3, 3, 96, 128),
    (4, 4, 128, 128),
    (4, 6, 192, 128),
    (6, 4, 256, 256),
    (6, 6, 384, 256),
    (8, 8, 512, 512),
    (12, 12, 768, 512),
    (16, 16, 1024, 1024),
    (24, 16, 1024, 1024),
    (24, 20, 1280, 1024),
    (32, 25, 1600, 1024),
)


@dataclass(frozen=True)
class Text:
    """What a plan has to know of a text."""

    vocab_size: int
    size: int  # bytes of training text
    tokens: int
    # Bits per byte by counting; asked only where it is needed. None: there is no time to count.
    hard: Callable[[], float | None]


@dataclass(frozen=True)
class Outlook:
    """What training a model for the time there is would come to."""

    config: GPTConfig
    batch: int
    step: float  # seconds
    steps: int
    seconds: float
    passes: float
    bits_per_byte: float

    def __str__(self) -> str:
        return f"{self.config.layers} x {self.config.dim}: {self.bits_per_byte:.3f}"


@dataclass(frozen=True)
class Picked:
    outlook: Outlook
    tried: list[Outlook]  # by size
    settings: TrainSettings  # with what the machine does best
    choices: list[Choice]  # about the machine


Make = Callable[[TrainSettings], GPTConfig]


def pick(
    settings: TrainSettings,
    text: Text,
    make: Make,
    seconds: Callable[[], float],
    fit: Callable[[TrainSettings, GPTConfig], tuple[TrainSettings, list[Choice]]],
    report: Callable[[str, int, int], None],
    processes: int = 1,
    spare: Callable[[], float] = lambda: math.inf,
) -> Picked:
    """The best of the sizes that `settings` leave open. `make` gives the model that settings
    describe, `fit` what the machine does best with it; `seconds` are those left for training,
    `spare` those that may go into measuring. Of several processes, each does its part of a batch,
    and this one is tried."""
    configs = candidates(settings, text, make)
    first = nearest(configs, PRESETS["micro" if settings.device == "cpu" else "mini"].dim)
    if settings.device == "cpu" and (seconds() < MOMENT or spare() < TO_TRY):
        first = 0
    settings, choices = fit(settings, configs[first])
    # How hard a text is does not change which size is best for it.
    law = Law(text.hard() or 1.0, text.size)
    measured: dict[int, float] = {}  # seconds a step
    tokens = LEAST_TOKENS.get(settings.device, LEAST_ON_GPU)
    share = SHARE.get(settings.device, SHARE_ON_GPU)

    took = 0.0  # seconds, the last one that was tried

    def measure(index: int) -> None:
        nonlocal took
        begin = seconds()
        report("trying sizes", len(measured), MOST)
        each = min(EACH, share * seconds(), spare() / 2)
        rows = -(-batch_of(configs[index]) // processes)
        measured[index] = step_seconds(configs[index], rows, settings, each)
        took = begin - seconds()

    def batch_of(config: GPTConfig) -> int:
        return settings.batch or max(processes, tokens // config.context)

    def outlook(index: int) -> Outlook:
        known = min(measured, key=lambda other: abs(other - index))
        ratio = arithmetic(configs[index]) / arithmetic(configs[known])
        step = measured[known] * ratio**WITH_SIZE
        return foresee(configs[index], batch_of(configs[index]), step, text, law, seconds())

    measure(first)
    # On a GPU another size takes as long again: kernels are made for each, unless they are known.
    another = 0.0 if settings.device == "cpu" else took
    # As many steps as are good, and larger ones where there is time for more.
    most = min(seconds() / measured[first], recipe.MOST_PASSES * text.tokens / tokens)
    larger = round(math.log2(max(1.0, most / STEPS)))
    if larger > 0 and settings.batch is None and spare() > took:
        tokens = min(MOST_TOKENS, tokens << larger)
        measured.clear()
        measure(first)
    elif most < FEW_STEPS and settings.batch is None and settings.device == "cpu":
        smaller = 1 if most > FEW_STEPS / 3 else 2
        tokens >>= smaller
        measured[first] *= (1 + 1 / (1 << smaller)) / 2  # not in proportion, to be on the safe side
    end = time.monotonic() + min(share * seconds(), spare())
    while len(measured) < MOST and time.monotonic() + another < end and spare() > took:
        outlooks = [outlook(index) for index in range(len(configs))]
        best = min(range(len(configs)), key=lambda index: outlooks[index].bits_per_byte)
        near = [n for n in (best, best - 1, best + 1) if 0 <= n < len(configs)]
        open_ = [n for n in near if n not in measured]
        if not open_:
            break
        measure(open_[0])
    report("trying sizes", MOST, MOST)
    # Of a size that would not get far in the time, all smaller ones are better known than not.
    slow = outlook(min(measured)).steps < FEW_STEPS
    known = range(max(measured) + 1) if slow else sorted(measured)
    tried = [outlook(index) for index in known]
    least = min(found.bits_per_byte for found in tried)
    chosen = next(found for found in tried if found.bits_per_byte <= CLOSE * least)
    return Picked(chosen, tried, settings, choices)


def candidates(settings: TrainSettings, text: Text, make: Make) -> list[GPTConfig]:
    """Models from small to large, with all that was asked for."""
    preset = PRESETS.get(settings.preset or "")
    sizes = [(preset.layers, preset.heads, preset.dim)] if preset else [row[:3] for row in LADDER]
    found: dict[GPTConfig, None] = {}
    for size in sizes:
        values = dict(zip(("layers", "heads", "dim"), size, strict=True))
        if preset is None:
            given = (settings.heads, settings.dim, settings.kv_heads)
            values["heads"], values["dim"] = complete_shape(*size[1:], *given)
        values = {name: getattr(settings, name) or value for name, value in values.items()}
        suiting = preset.context if preset else reach(values["layers"], values["dim"])
        values["context"] = min(settings.context or suiting, max(1, text.tokens - 1))
        config = make(replace(settings, **values))  # type: ignore[arg-type]
        if not config.problems():
            found[config] = None
    fitting = [config for config in found if fits(config, settings, text)]
    return fitting or list(found)[:1]


def reach(layers: int, dim: int) -> int:
    """The context that suits a size: that of the size in the ladder that is nearest."""

    def distance(row: tuple[int, int, int, int]) -> float:
        return abs(math.log(row[0] * row[2] ** 2 / (layers * dim**2)))

    return min(LADDER, key=distance)[3]


def fits(config: GPTConfig, settings: TrainSettings, text: Text) -> bool:
    parameters = non_embedding_parameters(config)
    if settings.device == "cuda":
        tokens = max(LEAST_ON_GPU, (settings.batch or 1) * config.context)
        all_ = parameters + 2 * config.vocab_size * config.dim
        if training_bytes(config, all_, tokens) > FULL * torch.cuda.mem_get_info()[0]:
            return False
    return parameters <= A_TOKEN * text.tokens


def nearest(configs: list[GPTConfig], dim: int) -> int:
    return min(range(len(configs)), key=lambda index: abs(configs[index].dim - dim))


def foresee(
    config: GPTConfig, batch: int, step: float, text: Text, law: Law, seconds: float
) -> Outlook:
    """What comes of as many steps as there are seconds for; but no more than help."""
    tokens = batch * config.context
    enough = math.ceil(recipe.MOST_PASSES * text.tokens / tokens)
    steps = max(1, min(int(seconds / step), enough))
    passes = steps * tokens / text.tokens
    found = law.bits_per_byte(non_embedding_parameters(config), passes * text.size, steps)
    return Outlook(config, batch, step, steps, steps * step, passes, found)


def arithmetic(config: GPTConfig) -> float:
    """Of a token, in products."""
    seen = config.layers * config.context * config.dim
    return float(non_embedding_parameters(config) + config.vocab_size * config.dim + seen)


def step_seconds(config: GPTConfig, batch: int, settings: TrainSettings, each: float) -> float:
    """Of one update, tried for so long."""
    with closing(Trial(config, batch, settings.device, settings=settings)) as trial:
        for _ in range(1 if settings.device == "cpu" else 4):  # kernels are made, steps captured
            trial.step()
        trial.wait()
        start, count = time.perf_counter(), 0
        while count < 2 or time.perf_counter() - start < each / 2:
            trial.step()
            count += 1
            if count % 8 == 0 or settings.device == "cpu":
                trial.wait()
        trial.wait()
        seconds = (time.perf_counter() - start) / count
    del trial
    free_memory()
    return seconds
