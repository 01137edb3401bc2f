"""Measures how fast this machine trains and samples.

>>> measure(BenchSettings(preset=("nano",)), note=print).results[0]
Measurement(what='training', shape='nano', value=61840.2, unit='tokens/s', of_peak=0.21)
"""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanolm.bench.costs import Profile, costs
from nanolm.bench.llama_cpp import check_installed, llama_cpp
from nanolm.bench.machine import ceilings, facts, peak_of, product
from nanolm.bench.peers import Transformers
from nanolm.bench.plain import Plain
from nanolm.bench.process import RunnerProcess
from nanolm.bench.sampling import SamplingRunner, whole_text
from nanolm.bench.settings import LLAMA_CPP, BenchSettings
from nanolm.bench.turns import OnThreads, Runner, RunnerT, fastest, medians, warm_up
from nanolm.errors import UsageError
from nanolm.generation.language_model import LanguageModel
from nanolm.machine import available_threads, cache_folder
from nanolm.model.base import Model
from nanolm.model.build import build_model
from nanolm.model.config import PRESETS, GPTConfig, ModelConfig, configure
from nanolm.model.device import choose_device, choose_dtype, free_memory, use_fitting_threads
from nanolm.model.gguf import why_not
from nanolm.model.huggingface import save_model
from nanolm.model.shapes import parameters_by_part
from nanolm.model.size import training_bytes
from nanolm.planning.trial import SpeedTrial
from nanolm.planning.tuning import threads_for
from nanolm.runs.export_gguf import export_gguf
from nanolm.text.tokenizer import ByteLevel

DEFAULT_PRESETS = {  # those that fit the device
    "cpu": ("nano", "micro"),
    "cuda": ("mini", "small", "gpt2"),
    "mps": ("micro", "mini"),
}
CPU_TOKENS = 2048  # per step at most, so that a round takes seconds, not minutes
NEW_TOKENS = {"cuda": 128}  # per sample; fewer elsewhere
SAMPLED_ROWS = 64  # at once on a GPU
MATRIX_PRODUCTS = "matrix products"
QUANTIZED = {8: "Q8_0", 4: "Q4_0"}  # llama.cpp's formats with as many bits

Note = Callable[[str], None]


@dataclass(frozen=True)
class Measurement:
    what: str
    shape: str  # the preset
    value: float | None  # None if unknown
    unit: str
    of_peak: float | None = None


@dataclass
class BenchReport:
    machine: dict[str, Any]
    results: list[Measurement] = field(default_factory=list)
    profiles: dict[str, Profile] = field(default_factory=dict)  # by preset


def measure(settings: BenchSettings, note: Note) -> BenchReport:
    device, _ = choose_device(settings.device)
    if settings.profile and device == "mps":
        raise UsageError("--profile: an Apple GPU does not report kernel times; try --device cpu")
    if settings.against == LLAMA_CPP:
        refuse_llama_cpp(device, settings.family)
    dtype, _ = choose_dtype("auto", device)
    report = BenchReport(facts(device, dtype))
    for name in settings.preset or DEFAULT_PRESETS[device]:
        config, rows = shape(name, settings, device)
        bench = PresetBench(name, config, rows, device, dtype, settings.seconds)
        note(f"{name}: training, {rows} x {config.context} tokens per step")
        trains = settings.against != LLAMA_CPP
        report.results += bench.training(settings.against if trains else None, note)
        note(f"{name}: sampling")
        report.results += bench.sampling(note, against_llama_cpp=not trains)
        if settings.profile:
            note(f"{name}: profiling one step")
            report.profiles[name] = bench.profile()
    return report


def refuse_llama_cpp(device: str, family: str) -> None:
    """Raise a UsageError if there is nothing to compare with."""
    if device != "cpu":
        raise UsageError(f"--against {LLAMA_CPP} works only on a CPU; add --device cpu")
    shape = {"vocab_size": 258, "layers": 1, "heads": 1, "dim": 32, "context": 16}
    if why := why_not(configure(family, **shape)):
        raise UsageError(f"--against {LLAMA_CPP}: {why}; try --family modern")
    check_installed()


def shape(name: str, settings: BenchSettings, device: str) -> tuple[ModelConfig, int]:
    """The model of a preset, and the number of rows per step that fit on the device."""
    preset = PRESETS[name]
    sizes = {part: getattr(preset, part) for part in ("layers", "heads", "dim", "context")}
    config = configure(settings.family, vocab_size=preset.vocab_size, **sizes)
    rows = preset.batch
    if device == "cpu":
        rows = max(1, min(rows, CPU_TOKENS // config.context))
    if device == "cuda":
        parameters = sum(parameters_by_part(config).values())
        free_memory()  # of the previous preset
        free, _ = torch.cuda.mem_get_info()
        room = free * (0.5 if settings.against else 0.8)  # for two models, or one with a margin
        while rows > 1 and training_bytes(config, parameters, rows * config.context) > room:
            rows //= 2
    return config, rows


def flops_per_token(model: Model) -> int:
    """FLOPs of training: two per weight of a matrix product forward, four backward. By convention,
    attention counts in full, although it is causal. Embedding lookups are free."""
    config, parts = model.config, parameters_by_part(model.config)
    weights = sum(parts.values()) - parts.get("position embedding", 0)
    if not config.tied:
        weights -= parts["token embedding"]
    attention = isinstance(config, GPTConfig) and 12 * config.layers * config.dim * config.context
    return 6 * weights + attention


@dataclass(frozen=True)
class PresetBench:
    name: str
    config: ModelConfig
    rows: int
    device: str
    dtype: str
    seconds: float

    def training(self, against: str | None, note: Note) -> list[Measurement]:
        """Real training steps on random tokens; with `against`, in turn with another library."""
        results: list[Measurement] = []
        make = partial(SpeedTrial, self.config, self.rows, self.device, self.dtype)
        with closing(self.warm(make, results, "memory")) as trial:
            for choice in trial.choices:
                note(f"{self.name}: {choice}")
            runners: dict[str, Runner] = {"training": trial}
            if against:
                peer = self.warm(partial(self.peer, against, note), results, f"memory, {against}")
                runners[f"training, {against}"] = peer
            large = product(self.device, self.dtype) if self.device == "cpu" else None
            if large:
                runners[MATRIX_PRODUCTS] = OnThreads(large, trial.settings.threads or 1)
            times = medians(runners, self.seconds)
            flops, tokens = flops_per_token(trial.model), trial.tokens
        if large:
            peak: float | None = large.amount / times.pop(MATRIX_PRODUCTS)
            results.append(Measurement(MATRIX_PRODUCTS, self.name, peak, "FLOP/s"))
        else:
            peak = peak_of(torch.cuda.get_device_name()) if self.device == "cuda" else None
        speeds = []
        for what, seconds in times.items():
            of_peak = tokens / seconds * flops / peak if peak else None
            speeds.append(Measurement(what, self.name, tokens / seconds, "tokens/s", of_peak))
        if against:
            ratio = times[f"training, {against}"] / times["training"]
            speeds.append(Measurement(f"nanolm / {against}", self.name, ratio, "times"))
        speeds.append(Measurement("step", self.name, 1000 * times["training"], "ms per step"))
        return speeds + results

    def peer(self, against: str, note: Note) -> Runner:
        """On a CPU, with all threads or one, whichever is faster; one is best for small models."""
        peer: Runner
        if against == "transformers":
            peer = Transformers(self.config, self.rows, self.device, self.dtype, note)
        elif isinstance(self.config, GPTConfig):
            peer = Plain(self.config, self.rows, self.device, self.dtype, note)
        else:
            raise UsageError(f"--against {against}: it has no recurrent models; try --family gpt2")
        ways = [OnThreads(peer, count) for count in {1, available_threads()}]
        if self.device != "cpu" or len(ways) == 1:
            return peer
        best = fastest(ways)
        note(f"{self.name}: {against} on {best.threads} of {available_threads()} threads")
        return best

    def warm(self, make: Callable[[], RunnerT], results: list[Measurement], what: str) -> RunnerT:
        """Make and warm up a runner, and add its peak memory to the results."""
        cuda = self.device == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        runner = make()
        warm_up(runner)
        peak = torch.cuda.max_memory_allocated() - before if cuda else None
        results.append(Measurement(what, self.name, peak, "bytes"))
        return runner

    def sampling(self, note: Note, against_llama_cpp: bool = False) -> list[Measurement]:
        """Greedy sampling from an empty prompt: one row and, on a GPU, many rows at once."""
        merges = [(left, right) for left in range(256) for right in range(256)]
        tokenizer = ByteLevel(merges[: self.config.vocab_size - 258])
        model = build_model(self.config).to(self.device, getattr(torch, self.dtype))
        loaded = LanguageModel(model, tokenizer)
        tokens = min(NEW_TOKENS.get(self.device, 64), self.config.context // 2)
        rows = {"sampling": 1}
        if self.device == "cuda":
            rows[f"sampling, {SAMPLED_ROWS} rows"] = SAMPLED_ROWS
        runners: dict[str, Runner] = {
            what: SamplingRunner(loaded, count, whole_text(tokens)) for what, count in rows.items()
        }
        with ExitStack() as stack:
            stack.enter_context(threads_for(available_threads()))
            if self.device == "cpu":
                use_fitting_threads(model)
            if against_llama_cpp:
                runners |= quantized_runners(loaded, tokens, note, stack)
            times = medians(runners, self.seconds)
        rates = {what: rows.get(what, 1) * tokens / times[what] for what in times}
        results = [Measurement(what, self.name, rate, "tokens/s") for what, rate in rates.items()]
        for bits, peer in QUANTIZED.items() if against_llama_cpp else ():
            ratio = rates[f"sampling, int{bits}"] / rates[f"{LLAMA_CPP}, {peer}"]
            what = f"int{bits} / {LLAMA_CPP}"
            results.append(Measurement(what, self.name, ratio, "times"))
        return results

    def profile(self) -> Profile:
        """Profile one step, uncompiled and on one thread, so that all operators are visible."""
        with threads_for(1):
            products, copies = ceilings(self.device, self.dtype, min(1.0, self.seconds))
            trial = SpeedTrial(self.config, self.rows, self.device, self.dtype, 1, compiled=False)
            with closing(trial):
                return costs(trial, self.device, products, copies)


def quantized_runners(
    loaded: LanguageModel, tokens: int, note: Note, stack: ExitStack
) -> dict[str, Runner]:
    """Sampling with 8-bit and 4-bit weights, and llama.cpp with the same model from a GGUF file,
    each in its own process, until `stack` closes."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=cache_folder())))
    save_model(loaded.model, folder, loaded.tokenizer)
    runners: dict[str, Runner] = {}
    for bits, peer in QUANTIZED.items():
        file = folder / f"{peer}.gguf"
        export_gguf(str(folder), file, peer.lower(), note)
        ours = RunnerProcess("nanolm.bench.sampling", folder=str(folder), tokens=tokens, bits=bits)
        runners[f"sampling, int{bits}"] = stack.enter_context(closing(ours))
        prompt, counts = [loaded.tokenizer.end_of_text], {1, available_threads()}
        made = (llama_cpp(file, prompt, tokens, threads) for threads in counts)
        peers = [stack.enter_context(closing(each)) for each in made]
        runners[f"{LLAMA_CPP}, {peer}"] = fastest(peers)
    return runners
