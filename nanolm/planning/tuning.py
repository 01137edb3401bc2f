"""Choices that need a measurement: threads, dtype, the attention kernel.

>>> fit_to_machine(settings, model)  # the settings, with the choices and their reasons

This takes a second or two before the first step of a run. The choices are saved in its settings.
"""

import contextlib
import math
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanolm.choice import Choice, Chosen
from nanolm.errors import UsageError
from nanolm.formats import counted, readable
from nanolm.machine import available_threads, cache_folder, is_busy, keep_memory
from nanolm.model.base import Model, Network
from nanolm.model.config import GPTConfig, TransformerConfig, unsupported
from nanolm.model.fast.training import FUSED_BLOCKS, speed_up, training_kernels
from nanolm.training.events import Note, Notify
from nanolm.training.loss import next_token_loss
from nanolm.training.optim import Optimizers
from nanolm.training.settings import NO_FLOAT8, Settings, TrainSettings
from nanolm.training.step import AUTOCAST_DTYPES, Batch, Loss, Step, temporarily

PROBE_TOKENS = 2_048  # of the batch used to time threads; with fewer, workers look slower
TIMED_ROUNDS = 3  # on a CPU
ATTENTION_ROUNDS = 5
SLOW_ROUND = 1.0  # seconds to time every option once; if slower, one round is enough
NARROW_DIM = 96  # below it, matrices are too small for threads and dtype to matter
FASTER = 0.95  # of the time; with a smaller gain, keep the simpler option
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
DETERMINISTIC_KERNELS = ("flash", "math")  # can sum in a fixed order
Fitted = tuple[TrainSettings, list[Choice]]


class SpeedProbe(NamedTuple):
    model: Network
    parameters: dict[str, nn.Parameter]
    loss: Loss
    batch: Batch


def fit_to_machine(settings: TrainSettings, model: Model, seconds: float = math.inf) -> Fitted:
    """Choose open settings by timing `model`, for about `seconds` seconds."""
    end = time.perf_counter() + seconds
    chosen, config = Chosen(settings), model.config
    fusible = isinstance(config, GPTConfig) and not unsupported(config, FUSED_BLOCKS)
    if settings.dtype == "float8" and not fusible:  # float8 products are part of the fused kernels
        raise UsageError(NO_FLOAT8)
    if settings.device == "cuda" and chosen.open("attention") and isinstance(config, GPTConfig):
        times = attention_times(config, settings)
        chosen.choose("attention", min(times, key=times.__getitem__), in_words(times, "ms"))
    if settings.device != "cpu":
        chosen.fill(threads=available_threads(), dtype="float32")
        chosen.settings = replace(chosen.settings, workers=1)
    else:
        with_kernels(model, settings)
    if settings.device == "cpu" and (settings.threads is None or settings.workers is None):
        widest = replace(settings, workers=settings.workers or available_threads())
        probe = make_probe([widest], model)
        (threads, workers), reason = best_threads(settings, probe, seconds / 2)
        chosen.choose("threads", threads, reason)
        chosen.settings = replace(chosen.settings, workers=workers)
    if chosen.open("dtype"):
        probe = make_probe([chosen.settings], model)
        chosen.choose("dtype", *best_dtype(chosen.settings, probe, end - time.perf_counter()))
    return chosen.settings, chosen.choices


def best_threads(
    settings: Any, probe: SpeedProbe, seconds: float = math.inf
) -> tuple[tuple[int, int], str]:
    """The number of threads, the number of workers that split a batch, and the reason."""
    counts = [settings.threads or available_threads()]
    while not settings.threads and counts[0] > 1:
        counts.insert(0, counts[0] // 2)
    busy, ways = is_busy(), []
    for threads in counts:
        # Dropout draws one sequence of random numbers, so a batch cannot be split among workers.
        side_by_side = {1} if settings.dropout else {1, min(threads, settings.batch or 1)}
        # Threads that share an operation wait for each other. On a busy machine, the wait can take
        # longer than the operation itself, and a short trial may not show it.
        if busy and max(side_by_side) > 1:
            side_by_side.remove(1)
        if settings.workers:
            side_by_side = {settings.workers}
        ways += [(threads, workers) for workers in sorted(side_by_side, reverse=True)]
    if len(ways) == 1:
        return ways[0], "all cores available to this process"
    asked = [replace(settings, threads=threads, workers=workers) for threads, workers in ways]
    times = dict(zip(ways, step_seconds(asked, probe, seconds), strict=True))
    best, least = ways[0], min(times.values())
    for way in ways[1:]:
        # Beside busy processes, more workers gain little. But those may end before the run.
        patient = busy and way[0] == way[1]
        if times[way] < (least / FASTER if patient else FASTER * times[best]):
            best = way
    names = [f"{threads} with {n} workers" if n > 1 else f"{threads}" for threads, n in ways]
    return best, in_words(dict(zip(names, times.values(), strict=True)), "ms per step")


def best_dtype(settings: Settings, probe: SpeedProbe, seconds: float = math.inf) -> tuple[str, str]:
    """The faster precision for matrix multiplications on a CPU, and the reason."""
    config = probe.model.config
    if seconds <= 0:
        return "float32", "no time to measure others"
    if not isinstance(config, TransformerConfig) or config.dim < NARROW_DIM:
        return "float32", "the safe choice on a CPU"
    ways = [replace(settings, dtype=dtype) for dtype in ("float32", "bfloat16")]
    exact, low = step_seconds(ways, probe, seconds)
    reason = in_words({"float32": exact, "bfloat16": low}, "ms per step")
    return "bfloat16" if low <= FASTER * exact else "float32", reason


def make_probe(ways: list[TrainSettings], model: Model) -> SpeedProbe:
    """A small batch of random tokens, to time training steps with."""
    rows, context = ways[0].batch or 1, ways[0].context or 1
    rows = min(rows, max(PROBE_TOKENS // context, *(way.workers or 1 for way in ways), 1))
    context = min(context, max(16, PROBE_TOKENS // rows))

    def loss(ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return next_token_loss(model.head, model.hidden_states(ids[:, :-1]), ids[:, 1:]), {}

    ids = torch.randint(model.config.vocab_size, (rows, context + 1))
    return SpeedProbe(model, dict(model.named_parameters()), loss, (ids,))


def step_seconds(ways: Sequence[Settings], probe: SpeedProbe, seconds: float) -> list[float]:
    """Median time of forward and backward for each of the settings, measured in turn."""
    end = time.perf_counter() + seconds
    probe.model.train()

    def once(way: Settings, step: Step) -> float:
        use_attention(probe.model, way)
        with threads_for(way.threads, step.workers):
            start = time.perf_counter()
            step.accumulate_gradients(probe.batch)
            seconds = time.perf_counter() - start
        step.optimizers.zero_grad()
        return seconds

    turns = []
    for way in ways:
        workers = getattr(way, "workers", None) or 1
        with threads_for(way.threads, workers):
            step = Step(probe.loss, Optimizers(probe.parameters, workers=workers), way.dtype)
            turns.append((way, step))
    first = [once(*turn) for turn in turns]
    tries = TIMED_ROUNDS if sum(first) < SLOW_ROUND else 0
    rounds: list[list[float]] = []
    while len(rounds) < tries and (not rounds or time.perf_counter() < end):
        rounds.append([once(*turn) for turn in turns])
    use_attention(probe.model, ways[0])
    return [statistics.median(column) for column in zip(*(rounds or [first]), strict=True)]


def use_attention(model: Network, settings: Settings) -> None:
    """On a CPU, use explicit matrix products if requested, or for bfloat16, where SDPA is slow."""
    asked = getattr(settings, "attention", None) == "math" or settings.dtype == "bfloat16"
    if isinstance(model, Model):
        speed_up(model, math_attention=asked and settings.device == "cpu")


def attention_times(config: GPTConfig, settings: TrainSettings) -> dict[str, float]:
    """Seconds of forward and backward, for each kernel that supports these settings."""
    rows = max(1, 65_536 // (settings.context or 1))  # enough to hide the launch overhead
    dtype = AUTOCAST_DTYPES.get(settings.dtype, torch.float32)

    def some(heads: int) -> Tensor:
        shape = (rows, settings.context or 1, heads, config.head_dim)
        return torch.randn(shape, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()

    q, k, v = some(config.heads), some(config.kv_heads), some(config.kv_heads)
    later = some(config.heads).detach()  # in the layout of training, which affects the speed
    shared = config.heads != config.kv_heads

    def some_times(name: str) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        with sdpa_kernel(KERNELS[name]):
            for _ in range(5):
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
                torch.autograd.grad(y, (q, k, v), later)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / 5

    able: list[str] = []
    for name in DETERMINISTIC_KERNELS if settings.deterministic else KERNELS:
        if name == "math" and able:
            continue  # it materializes all attention weights: only if nothing else works
        with contextlib.suppress(RuntimeError):
            some_times(name)
            able.append(name)
    rounds = [[some_times(name) for name in able] for _ in range(ATTENTION_ROUNDS)]  # in turn
    return dict(zip(able, map(min, zip(*rounds, strict=True)), strict=True)) or {"math": 0.0}


@contextlib.contextmanager
def attention_by(kernel: str | None) -> Iterator[None]:
    """On a GPU, make this the preferred attention kernel."""
    if kernel is None or not torch.cuda.is_available():
        yield
        return
    others = [other for name, other in KERNELS.items() if name != kernel]
    # torch's compile cache does not include the kernel in its key.
    tag = temporarily(torch.compiler.config, "cache_key_tag", f"attention by {kernel}")
    with tag, sdpa_kernel([KERNELS[kernel], *others], set_priority=True):
        yield


@contextlib.contextmanager
def threads_for(threads: int | None, workers: int | None = 1) -> Iterator[None]:
    """Set the threads per worker. On a CPU, results are bit-identical only for the same values."""
    keep_memory()  # each step allocates what the last one freed
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, (threads or before) // (workers or 1)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def warn_about_threads(settings: Settings, notify: Notify) -> None:
    """Warn if the number of threads differs from when the run began; call inside `threads_for`."""
    workers = getattr(settings, "workers", None) or 1
    wanted, threads = settings.threads or 1, torch.get_num_threads()
    if threads < wanted // workers and settings.device == "cpu":
        text = f"training with {counted(threads * workers, 'thread')} instead of {wanted}"
        notify(Note(f"{text}: results are not bit-identical"))
    elif wanted > (available := available_threads()):
        notify(
            Note(f"{wanted} threads, but only {available} can run at once: same results, slower")
        )


@contextlib.contextmanager
def deterministic_algorithms(wanted: bool | None) -> Iterator[None]:
    """On a GPU, if `wanted`, use only algorithms that sum in a fixed order."""
    if not wanted or not torch.cuda.is_available():
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
    torch.use_deterministic_algorithms(True)
    unfilled = temporarily(torch.utils.deterministic, "fill_uninitialized_memory", False)
    try:
        with unfilled, attention_by(DETERMINISTIC_KERNELS[0]):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def with_kernels(model: Network, settings: Settings) -> None:
    """Train a model with our kernels. On a GPU, they do not sum in a fixed order."""
    if isinstance(model, Model) and not (
        model.device.type == "cuda" and getattr(settings, "deterministic", False)
    ):
        dtype = next(model.parameters()).dtype
        kernels = training_kernels(model.device, dtype, settings.dtype == "float8")
        speed_up(model, kernels=kernels)


def compile_model(model: Model) -> None:
    """Compile the model at its next training step; the model object itself is unchanged."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
    speed_up(model, compiled=True)


def missing_compiler(device: str) -> str | None:
    """Why torch.compile cannot be used; None if it can."""
    if device == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError:
            return "Triton is not installed"
        return None
    if device != "cpu":
        return f"not tested on {device}"
    return None if shutil.which("g++") or shutil.which("clang++") else "no C++ compiler found"


def in_words(times: dict[str, float], unit: str) -> str:
    """`1: 48.1, 2 with 2 workers: 27.9 ms per step`."""
    shown = (f"{name}: {readable(1000 * time)}" for name, time in times.items())
    return f"{', '.join(shown)} {unit}"
