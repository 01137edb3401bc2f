"""How fast this machine trains and writes.

>>> measured(Request(presets=("nano",)), note=print).results[0]
Result(what='training', shape='nano', value=61840.2, unit='tokens/s', of_peak=0.21)
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch

from nanolm.bench.costs import Profile, costs
from nanolm.bench.machine import ceilings, facts, peak_of, product
from nanolm.bench.peers import Transformers
from nanolm.bench.request import Request
from nanolm.bench.turns import OnThreads, R, Runner, fastest, medians, warm_up
from nanolm.errors import UsageError
from nanolm.generation.language_model import LanguageModel, Sample
from nanolm.generation.sampling_params import SamplingParams
from nanolm.machine import available_threads
from nanolm.model.base import Model
from nanolm.model.build import build_model
from nanolm.model.config import PRESETS, GPTConfig, ModelConfig, configure
from nanolm.model.device import choose_device, choose_dtype, free_memory, use_fitting_threads
from nanolm.model.size import training_bytes
from nanolm.model.stored import parameters_by_part
from nanolm.planning.trial import SpeedTrial
from nanolm.planning.tuning import threads_for
from nanolm.text.tokenizer import ByteLevel

FITTING = {"cpu": ("nano", "micro"), "cuda": ("mini", "small", "gpt2"), "mps": ("micro", "mini")}
CPU_TOKENS = 2048  # a step at most, so that a round takes seconds and not minutes
NEW_TOKENS = {"cuda": 128}  # written in one go; elsewhere fewer
TOGETHER = 64  # rows that a GPU writes at once
PRODUCTS = "matrix products"

Note = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """One number."""

    what: str
    shape: str  # the preset
    value: float | None  # None where it cannot be known
    unit: str
    of_peak: float | None = None


@dataclass
class Report:
    """All that was measured."""

    machine: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    profiles: dict[str, Profile] = field(default_factory=dict)  # by preset


def measured(request: Request, note: Note) -> Report:
    device, _ = choose_device(request.device)
    if request.profile and device == "mps":
        raise UsageError("--profile: an Apple GPU tells no times; try --device cpu")
    dtype, _ = choose_dtype("auto", device)
    report = Report(facts(device, dtype))
    for name in request.presets or FITTING[device]:
        config, rows = shape(name, request, device)
        bench = Bench(name, config, rows, device, dtype, request.seconds)
        note(f"{name}: training, {rows} x {config.context} tokens a step")
        report.results += bench.training(request.against, note)
        note(f"{name}: writing")
        report.results += bench.sampling()
        if request.profile:
            note(f"{name}: profiling one update")
            report.profiles[name] = bench.profile()
    return report


def shape(name: str, request: Request, device: str) -> tuple[ModelConfig, int]:
    """The model of a preset, and as many rows a step as the device can take."""
    preset = PRESETS[name]
    sizes = {part: getattr(preset, part) for part in ("layers", "heads", "dim", "context")}
    config = configure(request.family, vocab_size=preset.vocab_size, **sizes)
    rows = preset.batch
    if device == "cpu":
        rows = max(1, min(rows, CPU_TOKENS // config.context))
    if device == "cuda":
        with torch.device("meta"):
            parameters = build_model(config).parameter_count()
        free_memory()  # of the preset before
        free, _ = torch.cuda.mem_get_info()
        room = free * (0.5 if request.against else 0.8)  # both have to fit, or one and some more
        while rows > 1 and training_bytes(config, parameters, rows * config.context) > room:
            rows //= 2
    return config, rows


def flops_per_token(model: Model) -> int:
    """Of training: two for each weight of a product, and twice as many on the way back.

    Attention is counted in full, as is usual, though no token looks ahead. Embeddings that are only
    looked up cost no products.
    """
    config = model.config
    parts = parameters_by_part(model.config)
    weights = sum(parts.values()) - parts.get("position embedding", 0)
    if not config.tied:
        weights -= parts["token embedding"]
    attention = isinstance(config, GPTConfig) and 12 * config.layers * config.dim * config.context
    return 6 * weights + attention


@dataclass(frozen=True)
class Bench:
    """The measurements of one preset."""

    name: str
    config: ModelConfig
    rows: int
    device: str
    dtype: str
    seconds: float

    def training(self, against: str | None, note: Note) -> list[Result]:
        """Real updates on random tokens; with `against`, in turn with another's."""
        results: list[Result] = []
        with closing(self.started(self.trial, results, "memory")) as trial:
            for choice in trial.choices:
                note(f"{self.name}: {choice}")
            runners: dict[str, Runner] = {"training": trial}
            if against:
                runners[f"training, {against}"] = self.started(
                    lambda: self.peer(note), results, f"memory, {against}"
                )
            large = product(self.device, self.dtype) if self.device == "cpu" else None
            if large:
                runners[PRODUCTS] = OnThreads(large, trial.settings.threads or 1)
            taken = medians(runners, self.seconds)
            flops = flops_per_token(trial.model)
            tokens = trial.tokens
        if large:
            peak: float | None = large.amount / taken.pop(PRODUCTS)
            results.append(Result(PRODUCTS, self.name, peak, "FLOP/s"))
        else:
            peak = peak_of(torch.cuda.get_device_name()) if self.device == "cuda" else None
        speeds = []
        for what, seconds in taken.items():
            rate = tokens / seconds
            of_peak = rate * flops / peak if peak else None
            speeds.append(Result(what, self.name, rate, "tokens/s", of_peak))
        if against:
            times = taken[f"training, {against}"] / taken["training"]
            speeds.append(Result(f"nanolm / {against}", self.name, times, "times"))
        speeds.append(Result("step", self.name, 1000 * taken["training"], "ms a step"))
        return speeds + results

    def trial(self) -> SpeedTrial:
        return SpeedTrial(self.config, self.rows, self.device, self.dtype)

    def peer(self, note: Note) -> Runner:
        """On a CPU, with all threads or one, whichever is faster: small models want one."""
        theirs = Transformers(self.config, self.rows, self.device, self.dtype, note)
        ways = [OnThreads(theirs, count) for count in {1, available_threads()}]
        if self.device != "cpu" or len(ways) == 1:
            return theirs
        best = fastest(ways)
        note(f"{self.name}: transformers on {best.threads} of {available_threads()} threads")
        return best

    def started(self, make: Callable[[], R], results: list[Result], what: str) -> R:
        """A warm runner; the most memory it took is added to the results."""
        cuda = self.device == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        runner = make()
        warm_up(runner)
        peak = torch.cuda.max_memory_allocated() - before if cuda else None
        results.append(Result(what, self.name, peak, "bytes"))
        return runner

    def sampling(self) -> list[Result]:
        """Greedy writing from an empty prompt, alone and, on a GPU, many rows at once."""
        dtype = getattr(torch, self.dtype)
        merges = [(left, right) for left in range(256) for right in range(256)]
        tokenizer = ByteLevel(merges[: self.config.vocab_size - 258])
        writer = LanguageModel(build_model(self.config).to(self.device, dtype), tokenizer)
        tokens = min(NEW_TOKENS.get(self.device, 64), self.config.context // 2)
        runners = {"sampling": Writing(writer, 1, tokens)}
        if self.device == "cuda":
            runners[f"sampling, {TOGETHER} rows"] = Writing(writer, TOGETHER, tokens)
        with threads_for(available_threads()):
            if self.device == "cpu":
                use_fitting_threads(writer.model)
            taken = medians(runners, self.seconds)
        return [
            Result(what, self.name, runners[what].rows * tokens / seconds, "tokens/s")
            for what, seconds in taken.items()
        ]

    def profile(self) -> Profile:
        """Of one update, neither compiled nor on several threads, which would hide its parts."""
        with threads_for(1):
            products, copies = ceilings(self.device, self.dtype, min(1.0, self.seconds))
            trial = SpeedTrial(self.config, self.rows, self.device, self.dtype, 1, compiled=False)
            with closing(trial):
                return costs(trial, self.device, products, copies)


@dataclass(frozen=True)
class Writing:
    """Rows of new tokens."""

    writer: LanguageModel
    rows: int
    tokens: int

    def step(self) -> None:
        samples = [Sample("", number) for number in range(self.rows)]
        params = SamplingParams(tokens=self.tokens, min_tokens=self.tokens, greedy=True)
        for _ in self.writer.stream(samples, params):
            pass

    def wait(self) -> None:
        """Nothing: a token that has been seen is done."""
