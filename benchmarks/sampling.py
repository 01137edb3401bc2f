"""Generation speed with a model of GPT-2's size, compared with `transformers`.

    python benchmarks/sampling.py

Both generate 256 tokens from a prompt of 16, with the same random weights. On a GPU, in bfloat16
with batch sizes 1 and 64, the peers are transformers with its static (compiled) and its dynamic
cache. On a CPU, in float32, the peer is its dynamic cache, and the limit is the memory bandwidth
for reading the weights; with 8-bit and 4-bit weights, the peer is llama.cpp. There, each has a
process of its own. Runs alternate. Results are medians in tokens per second, after a warmup round.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from results import save
from transformers_sampling import load

from nanolm.bench.llama_cpp import llama_cpp
from nanolm.bench.process import RunnerProcess
from nanolm.bench.sampling import SamplingRunner, whole_text
from nanolm.generation.language_model import LanguageModel
from nanolm.machine import available_threads
from nanolm.model.build import build_model
from nanolm.model.config import configure
from nanolm.model.huggingface import load_model, save_model
from nanolm.runs.export_gguf import export_gguf
from nanolm.text.tokenizer import ByteLevel

NEW, PROMPT = 256, "ab" * 16
TEMPERATURE: dict[str, Any] = {"temperature": 0.8}
TOP_K: dict[str, Any] = {"temperature": 0.8, "top_k": 50}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 0.8": TEMPERATURE,
    "temperature 0.8, top-k 50": TOP_K,
}
Cases = dict[tuple[str, int], Callable[[], object]]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--new", type=int, default=NEW)
    arguments.add_argument("--family", default="gpt2", choices=["gpt2", "modern", "llama"])
    asked = arguments.parse_args()
    cuda = torch.cuda.is_available()
    merges = [(left, right) for left in range(256) for right in range(256)][: 50_257 - 258]
    tokenizer = ByteLevel(merges)
    prompt = tokenizer.encode_prompt(PROMPT)
    assert (len(prompt), tokenizer.vocab_size) == (16, 50_257)
    torch.manual_seed(0)
    shape = {"vocab_size": 50_257, "layers": 12, "heads": 12, "dim": 768, "context": 1024}
    model = build_model(configure(asked.family, **shape))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_model(model, folder, tokenizer)
        if cuda:
            cases = on_gpu(folder, tokenizer, prompt, asked.new)
        else:
            cases = on_cpu(folder, prompt, asked.new, stack)
        save("sampling", measure(cases, model, asked.rounds, asked.new))


def on_gpu(folder: Path, tokenizer: ByteLevel, prompt: list[int], new: int) -> Cases:
    ours = LanguageModel(load_model(folder).to("cuda", torch.bfloat16), tokenizer)
    theirs = load(folder, torch.bfloat16, "cuda")
    cases: Cases = {
        (f"nanolm, {way}", rows): SamplingRunner(ours, rows, whole_text(new, **how), PROMPT).step
        for rows in (1, 64)
        for way, how in WAYS.items()
    }
    static, like = {"cache_implementation": "static"}, {"do_sample": True, **TOP_K}
    for cache, how in (("dynamic", {}), ("static", static)):
        cases[f"transformers, {cache} cache, greedy", 1] = partial(theirs, prompt, new, 1, **how)
    name = "transformers, dynamic cache, temperature 0.8, top-k 50"
    cases[name, 64] = partial(theirs, prompt, new, 64, **like)
    return cases


def on_cpu(folder: Path, prompt: list[int], new: int, stack: ExitStack) -> Cases:
    def process(module: str, **how: Any) -> Callable[[], None]:
        how |= {"folder": str(folder), "tokens": new}
        return stack.enter_context(closing(RunnerProcess(module, **how))).step

    ours = partial(process, "nanolm.bench.sampling", prompt=PROMPT)
    cases: Cases = {(f"nanolm, {way}", 1): ours(**how) for way, how in WAYS.items()}
    paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    theirs = process("transformers_sampling", prompt=prompt)
    cases["transformers, dynamic cache, greedy", 1] = theirs
    for bits, peer in {8: "q8_0", 4: "q4_0"}.items():
        cases[f"nanolm, int{bits}, greedy", 1] = ours(bits=bits)
        export_gguf(str(folder), folder / f"{peer}.gguf", peer, print)
        runner = llama_cpp(folder / f"{peer}.gguf", prompt, new, available_threads())
        cases[f"llama.cpp, {peer}, greedy", 1] = stack.enter_context(closing(runner)).step
    return cases


def measure(cases: Cases, model: torch.nn.Module, rounds: int, new: int) -> list[dict[str, Any]]:
    cuda = torch.cuda.is_available()
    rates: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    bandwidths = []
    weights = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    size = sum(weight.nbytes for weight in weights)
    for turn in range(rounds + 1):
        for (name, rows), run in cases.items():
            start = time.perf_counter()
            run()
            if cuda:
                torch.cuda.synchronize()
            if turn:
                rates[name, rows].append(rows * new / (time.perf_counter() - start))
        if not cuda:
            bandwidths.append(bandwidth(weights, size))
    limit = statistics.median(bandwidths or [0]) / size  # tokens/s if bandwidth were all
    lines: list[dict[str, Any]] = [{"threads": torch.get_num_threads()}]
    for (name, rows), found in rates.items():
        middle = statistics.median(found)
        line = {"what": name, "rows": rows, "tokens_per_second": round(middle, 1)}
        if not cuda:
            line["of_bandwidth"] = round(middle / limit, 3)
        lines.append(line)
    if not cuda:
        lines.append({"matrix_vector_gb_per_second": round(limit * size / 1e9, 1)})
    return lines


@torch.inference_mode()
def bandwidth(weights: list[torch.Tensor], size: int) -> float:
    """Bytes per second of multiplying one vector by each of the matrices."""
    vectors = [weight.new_ones(1, weight.shape[1]) for weight in weights]
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        for weight, vector in zip(weights, vectors, strict=True):
            F.linear(vector, weight)
        seconds.append(time.perf_counter() - start)
    return size / statistics.median(seconds)


if __name__ == "__main__":
    main()
