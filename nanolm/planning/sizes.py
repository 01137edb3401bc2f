"""Finds the model size with the lowest predicted loss for a time budget.

    >>> search_sizes(plan, text, clock, report)[0]
    SizeEstimate(config=GPTConfig(...), batch=16, step=0.104, steps=1592, ..., bits_per_byte=2.05)

A few sizes are timed for about a second each, and `nanolm.planning.scaling_law` predicts the loss
of all. On a small text, a size that leaves time to train and distill several has an advantage.
Among nearly equal sizes, the smallest wins if the text is read at least three times: it is faster
and needs less memory.
"""

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from nanolm.choice import Chosen, Report
from nanolm.errors import refuse
from nanolm.machine import available_memory, available_threads, is_busy
from nanolm.model.build import build_model
from nanolm.model.config import PRESETS, GPTConfig, ModelConfig, complete_shape, configure
from nanolm.model.device import free_memory
from nanolm.model.size import non_embedding_parameters, training_bytes
from nanolm.planning import recipe
from nanolm.planning.scaling_law import Law
from nanolm.planning.trial import SpeedTrial
from nanolm.planning.tuning import Fitted, fit_to_machine
from nanolm.training.settings import SIZES, SWITCHES, TrainSettings

# Share of the time for timing more sizes. On a GPU, each size first compiles its kernels.
SEARCH_SHARE, SEARCH_SHARE_ON_GPU = 0.04, 0.12
SECONDS_PER_SIZE = 1.0  # approximately
MOST_TIMED = 4  # sizes; more rarely change the choice
TIMED_AGAIN = 2  # of them, on a CPU
STEP_TOKENS, STEP_TOKENS_ON_GPU = 2_048, 8_192  # initially; fewer would leave a GPU idle
MORE_STEP_TOKENS = 3_072  # on a CPU, with time for more than ENOUGH_STEPS (docs/experiments.md)
MOST_STEP_TOKENS = 1 << 19
GOOD_STEPS = 1_200  # approximately; with time for more, steps get more tokens instead
ENOUGH_STEPS = 900
FEW_STEPS = 120  # with time for fewer, halve the tokens per step; below a third, quarter them
PARAMETERS_PER_TOKEN = 30  # of training text; larger models would overfit
SHORT_RUN = 25.0  # seconds of training within which the smallest size is best on a CPU
LEAST_SEARCH = 2.0  # seconds; with less time to measure, the smallest size is timed first
SECONDS_OF_FIT = 1.0  # to measure threads and dtype, approximately
# In runs shorter than this, in seconds, there is no time for that. On a GPU, timing the attention
# kernels takes 3 to 4 s, and the best two are equally fast for `mini`.
HURRY, HURRY_ON_GPU = 12.0, 60.0
AS_GOOD = 1.004  # times the best bits per byte, and below, is a tie
REPEATED = 3.0  # passes from which the smaller model wins a tie
GPU_MEMORY_SHARE = 0.7  # that a model may use
TIME_EXPONENT = 0.85  # step time ~ arithmetic ** 0.85
# Layers, heads, width, context. The first size to be timed is that of a preset.
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
class TextStats:
    vocab_size: int
    size: int  # bytes of training text in an epoch
    tokens: int  # in an epoch
    # Bits per byte of an n-gram model, computed only if needed; None if there is no time for it.
    ngram_bits: Callable[[], float | None]
    shortest: int | None = None  # tokens of the smallest part of a mix
    all_tokens: int | None = None  # of a mix, whose epochs may have fewer

    @property
    def longest_context(self) -> int:
        return max(1, (self.shortest or self.tokens) - 1)


@dataclass(frozen=True)
class Clock:
    """The seconds remaining at any moment."""

    training: Callable[[], float]
    measuring: Callable[[], float] = lambda: math.inf  # before the first step


@dataclass(frozen=True)
class SizeEstimate:
    """The predicted result of training a model for the whole time budget."""

    config: GPTConfig
    batch: int
    step: float  # seconds
    steps: int
    seconds: float
    passes: float
    bits_per_byte: float  # of a single model
    teachers: int = 0  # that there is time to train and distill

    @property
    def score(self) -> float:
        """What sizes are compared by; lower is better."""
        return self.bits_per_byte * (1 - recipe.SIZE_GAIN if self.teachers else 1)

    def __str__(self) -> str:
        return f"{self.config.layers} x {self.config.dim}: {self.bits_per_byte:.3f}"


def search_sizes(
    plan: Chosen[TrainSettings], text: TextStats, clock: Clock, report: Report, processes: int = 1
) -> tuple[SizeEstimate, list[SizeEstimate]]:
    """Returns the best size that fits the plan, and all that were tried. Also sets the fastest
    threads, dtype and attention. With several processes, times this one's share of the batch."""
    configs = candidates(plan.settings, text)
    on_cpu = plan.settings.device == "cpu"
    dim = PRESETS["micro" if on_cpu else "mini"].dim
    first = min(range(len(configs)), key=lambda index: abs(configs[index].dim - dim))
    if on_cpu and (clock.training() < SHORT_RUN or clock.measuring() < LEAST_SEARCH):
        first = 0
    settings, choices = fit(plan.settings, configs[first], clock, processes)
    plan.settings, plan.choices = settings, plan.choices + choices
    # Without the n-gram bits, any value will do: it does not change which size is best.
    law = Law(text.ngram_bits() or 1.0, text.size)
    distil = may_distil(plan, text, processes)
    measured: dict[int, float] = {}  # seconds per step
    tokens = STEP_TOKENS if on_cpu else STEP_TOKENS_ON_GPU
    share = SEARCH_SHARE if on_cpu else SEARCH_SHARE_ON_GPU
    took = 0.0  # seconds, for the last size that was timed

    def measure(index: int) -> None:
        nonlocal took
        begin = clock.training()
        report("trying sizes", len(measured), MOST_TIMED)
        each = min(SECONDS_PER_SIZE, share * clock.training(), clock.measuring() / 2)
        rows = -(-batch_of(configs[index]) // processes)
        seconds = step_seconds(configs[index], rows, settings, each)
        measured[index] = min(seconds, measured.get(index, seconds))
        took = begin - clock.training()

    def batch_of(config: GPTConfig) -> int:
        return settings.batch or max(processes, tokens // config.context)

    def estimate(index: int) -> SizeEstimate:
        config = configs[index]
        nearest = min(measured, key=lambda other: abs(other - index))
        ratio = arithmetic(config) / arithmetic(configs[nearest])
        step = measured[nearest] * ratio**TIME_EXPONENT
        return predict(config, batch_of(config), step, text, law, clock.training(), distil)

    measure(first)
    # On a GPU, the next size takes as long again, because its kernels may have to be compiled.
    another = 0.0 if on_cpu else took
    # With time for more than GOOD_STEPS steps, use larger batches instead.
    most = min(clock.training() / measured[first], recipe.MOST_PASSES * text.tokens / tokens)
    larger = round(math.log2(max(1.0, most / GOOD_STEPS)))
    if larger > 0 and settings.batch is None and clock.measuring() > took:
        tokens = min(MOST_STEP_TOKENS, tokens << larger)
        measured.clear()
        measure(first)
    elif most > ENOUGH_STEPS and settings.batch is None and on_cpu:
        before = batch_of(configs[first])
        tokens = MORE_STEP_TOKENS
        if batch_of(configs[first]) % (2 * (settings.workers or 1)):
            tokens = STEP_TOKENS  # some workers would have fewer rows than others
        measured[first] *= batch_of(configs[first]) / before
    elif most < FEW_STEPS and settings.batch is None and on_cpu:
        smaller = 1 if most > FEW_STEPS / 3 else 2
        tokens >>= smaller
        measured[first] *= (1 + 1 / (1 << smaller)) / 2  # cautious: less than in proportion
    end = time.monotonic() + min(share * clock.training(), clock.measuring())
    while len(measured) < MOST_TIMED and time.monotonic() + another < end:
        scores = [estimate(index).score for index in range(len(configs))]
        best = scores.index(min(scores))
        close = (n for n in (best, best - 1, best + 1) if 0 <= n < len(configs))
        untimed = next((n for n in close if n not in measured), None)
        if untimed is None or clock.measuring() <= took:
            break
        measure(untimed)
    # Other work on the machine may have slowed a trial: time the best sizes again.
    again = sorted(measured, key=lambda index: estimate(index).score)[:TIMED_AGAIN]
    for index in again if on_cpu and len(measured) > 1 else ():
        if time.monotonic() + took < end and clock.measuring() > took:
            measure(index)
    report("trying sizes", MOST_TIMED, MOST_TIMED)
    # If even the smallest timed size would get few steps, consider all smaller sizes too.
    slow = estimate(min(measured)).steps < FEW_STEPS
    tried = [estimate(n) for n in (range(max(measured) + 1) if slow else sorted(measured))]
    least = min(each.score for each in tried)
    return next(each for each in tried if each.score <= tolerance(each) * least), tried


def tolerance(estimate: SizeEstimate) -> float:
    """A smaller model wins if its score is within this factor of the best. Larger models
    are better than predicted if the text is hardly repeated; then there is no tolerance."""
    return AS_GOOD if estimate.passes >= REPEATED else 1.0


def fit(settings: TrainSettings, config: GPTConfig, clock: Clock, processes: int) -> Fitted:
    """Threads, dtype and attention: measured, or the usual best if time is short."""
    on_cpu = settings.device == "cpu"
    hurry = clock.training() < (HURRY if on_cpu else HURRY_ON_GPU)
    if not hurry and clock.measuring() >= SECONDS_OF_FIT:
        batch = -(-(settings.batch or max(1, 2_048 // config.context)) // processes)
        asked = replace(settings, batch=batch, context=config.context)
        fitted, choices = fit_to_machine(asked, build_model(config), clock.measuring() / 2)
        return replace(fitted, batch=settings.batch, context=settings.context), choices
    threads = settings.threads or available_threads()
    if not on_cpu:
        return replace(settings, threads=threads, attention=settings.attention or "flash"), []
    if settings.dropout and not settings.threads and is_busy():
        threads = 1  # more would wait for each other
    workers = settings.workers or (1 if settings.dropout else threads)
    dtype = "float32" if settings.dtype == "auto" else settings.dtype
    return replace(settings, threads=threads, workers=workers, dtype=dtype), []


def candidates(settings: TrainSettings, text: TextStats) -> list[GPTConfig]:
    """Model configs from small to large that match the settings."""
    preset = PRESETS.get(settings.preset or "")
    sizes = [(preset.layers, preset.heads, preset.dim)] if preset else [row[:3] for row in LADDER]
    configs: dict[GPTConfig, None] = {}  # an ordered set
    for size in sizes:
        values = dict(zip(("layers", "heads", "dim"), size, strict=True))
        if preset is None:
            given = (settings.heads, settings.dim, settings.kv_heads)
            values["heads"], values["dim"] = complete_shape(*size[1:], *given)
        values = {name: getattr(settings, name) or value for name, value in values.items()}
        area = values["layers"] * values["dim"] ** 2
        nearest = min(LADDER, key=lambda row: abs(math.log(row[0] * row[2] ** 2 / area)))
        suiting = preset.context if preset else nearest[3]
        values["context"] = min(settings.context or suiting, text.longest_context)
        sized = replace(settings, **values)  # type: ignore[arg-type]
        config = model_config(sized, text.vocab_size, check=False)
        assert isinstance(config, GPTConfig)
        if not config.problems():
            configs[config] = None
    return [config for config in configs if fits(config, settings, text)] or list(configs)[:1]


def fits(config: GPTConfig, settings: TrainSettings, text: TextStats) -> bool:
    """Whether a model is small enough for the text and the GPU."""
    parameters = non_embedding_parameters(config)
    if settings.device == "cuda":
        tokens = max(STEP_TOKENS_ON_GPU, (settings.batch or 1) * config.context)
        needed = training_bytes(config, parameters + 2 * config.vocab_size * config.dim, tokens)
        if needed > GPU_MEMORY_SHARE * torch.cuda.mem_get_info()[0]:
            return False
    return parameters <= PARAMETERS_PER_TOKEN * text.tokens


def soft_target_columns(vocab_size: int, tokens: int, device: str) -> int:
    """How many probabilities for each of `tokens` fit into memory: all, or the highest ones."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else available_memory()
    most = min(recipe.COLUMNS_MEMORY_SHARE * free, recipe.MOST_COLUMNS_BYTES)
    room = most / tokens  # bytes for each
    if 2 * vocab_size <= room:
        return vocab_size
    return int((room - 2) // (4 if vocab_size <= 1 << 15 else 6))  # with their ids, and the rest


def may_distil(plan: Chosen[TrainSettings], text: TextStats, processes: int) -> bool:
    """Whether the time left after MOST_PASSES passes may be used to train more models."""
    # With early_context, a student would see other windows than its teachers.
    names = ("teachers", "steps", "epochs", "tokens", "early_context")
    tokens = text.all_tokens or text.tokens
    columns = soft_target_columns(text.vocab_size, tokens, plan.settings.device)
    return processes == 1 and columns >= recipe.LEAST_COLUMNS and all(map(plan.open, names))


def predict(
    config: GPTConfig,
    batch: int,
    step: float,
    text: TextStats,
    law: Law,
    seconds: float,
    distil: bool,
) -> SizeEstimate:
    """Predict the result of all the steps that fit into `seconds`: up to MOST_PASSES passes, and
    then, with `distil`, those of more models."""
    tokens = batch * config.context
    enough = math.ceil(recipe.MOST_PASSES * text.tokens / tokens)
    steps = max(1, min(int(seconds / step), enough))
    teachers = 0
    if distil and steps == enough:
        predicted = (text.all_tokens or text.tokens) / text.tokens  # epochs
        teachers = recipe.affordable_teachers(steps * step, predicted, seconds)
    passes = steps * tokens / text.tokens
    bits = law.bits_per_byte(non_embedding_parameters(config), passes * text.size, steps)
    return SizeEstimate(config, batch, step, steps, steps * step, passes, bits, teachers)


def arithmetic(config: GPTConfig) -> float:
    """Multiplications per token."""
    attended = config.layers * config.context * config.dim
    return float(non_embedding_parameters(config) + config.vocab_size * config.dim + attended)


def step_seconds(config: GPTConfig, batch: int, settings: TrainSettings, each: float) -> float:
    """Seconds per training step, timed for about `each` seconds."""
    with closing(SpeedTrial(config, batch, settings.device, settings=settings)) as trial:
        for _ in range(1 if settings.device == "cpu" else 4):  # kernels compiled, steps captured
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


def model_config(settings: TrainSettings, vocab_size: int, check: bool = True) -> ModelConfig:
    """The model that resolved settings describe, or a UsageError that names the conflicts."""
    assert settings.family
    asked = {n: getattr(settings, n) for n in ("context", "dropout", *SIZES, *SWITCHES)}
    config = configure(settings.family, vocab_size=vocab_size, **asked)
    refuse(config.problems() if check else [])
    return config
