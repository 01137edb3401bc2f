"""Generation speed with a model of GPT-2's size, compared with `transformers`.

    python benchmarks/sampling.py

Both generate 256 tokens from a prompt of 16, with the same random weights. On a GPU, in bfloat16
with batch sizes 1 and 64, the peers are transformers with its static (compiled) and its dynamic
cache. On a CPU, in float32, the peer is its dynamic cache, and the limit is the memory bandwidth
for reading the weights; with 8-bit and 4-bit weights, the peer is llama.cpp. Runs alternate.
Results are medians in tokens per second, after one warmup round.
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from results import save
from transformers import AutoModelForCausalLM

from nanolm.bench.llama_cpp import LlamaCpp
from nanolm.generation.language_model import LanguageModel, Sample
from nanolm.generation.sampling_params import SamplingParams
from nanolm.machine import available_threads
from nanolm.model.build import build_model
from nanolm.model.config import configure
from nanolm.model.device import use_fitting_threads
from nanolm.model.fast.quantized import quantize
from nanolm.model.huggingface import load_model, save_model
from nanolm.runs.export_gguf import export_gguf
from nanolm.text.tokenizer import ByteLevel

NEW, PROMPT = 256, "ab" * 16


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--new", type=int, default=NEW)
    arguments.add_argument("--family", default="gpt2", choices=["gpt2", "modern", "llama"])
    asked = arguments.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    merges = [(left, right) for left in range(256) for right in range(256)][: 50_257 - 258]
    tokenizer = ByteLevel(merges)
    prompt = tokenizer.encode_prompt(PROMPT)
    assert (len(prompt), tokenizer.vocab_size) == (16, 50_257)
    torch.manual_seed(0)
    shape = {"vocab_size": 50_257, "layers": 12, "heads": 12, "dim": 768, "context": 1024}
    temporary = tempfile.TemporaryDirectory()
    folder = Path(temporary.name)
    save_model(build_model(configure(asked.family, **shape)), folder, tokenizer)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    ours = LanguageModel(load_model(folder).to(device, dtype), tokenizer)

    def nanolm(rows: int, params: SamplingParams, writer: LanguageModel = ours) -> None:
        samples = [Sample(PROMPT, number) for number in range(rows)]
        for _ in writer.stream(samples, params):
            pass
        assert all(len(sample.tokens) == asked.new for sample in samples)

    if not cuda:
        use_fitting_threads(ours.model)

    def transformers(rows: int, **how: object) -> None:
        ids = torch.tensor([prompt] * rows, device=device)
        out = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=asked.new,
            min_new_tokens=asked.new,
            **how,
        )
        assert out.shape == (rows, 16 + asked.new)

    greedy = SamplingParams(tokens=asked.new, min_tokens=asked.new, greedy=True)
    sampled = SamplingParams(tokens=asked.new, min_tokens=asked.new, temperature=0.8)
    top_k = SamplingParams(tokens=asked.new, min_tokens=asked.new, temperature=0.8, top_k=50)
    like = {"do_sample": True, "temperature": 0.8, "top_k": 50}
    cases: dict[tuple[str, int], Callable[[], None]] = {
        ("nanolm, greedy", 1): lambda: nanolm(1, greedy),
        ("nanolm, temperature 0.8", 1): lambda: nanolm(1, sampled),
        ("nanolm, temperature 0.8, top-k 50", 1): lambda: nanolm(1, top_k),
        ("transformers, dynamic cache, greedy", 1): lambda: transformers(1, do_sample=False),
    }
    if cuda:
        static = {"cache_implementation": "static"}
        cases |= {
            ("transformers, static cache, greedy", 1): lambda: transformers(
                1, do_sample=False, **static
            ),
            ("nanolm, greedy", 64): lambda: nanolm(64, greedy),
            ("nanolm, temperature 0.8", 64): lambda: nanolm(64, sampled),
            ("nanolm, temperature 0.8, top-k 50", 64): lambda: nanolm(64, top_k),
            ("transformers, dynamic cache, temperature 0.8, top-k 50", 64): lambda: transformers(
                64, **like
            ),
        }
    else:
        for bits, peer in {8: "q8_0", 4: "q4_0"}.items():
            model = copy.deepcopy(ours.model)
            quantize(model, bits)
            writer = LanguageModel(model, tokenizer)
            cases[f"nanolm, int{bits}, greedy", 1] = partial(nanolm, 1, greedy, writer)
            export_gguf(str(folder), folder / f"{peer}.gguf", peer, print)
            how = (prompt, asked.new, available_threads())
            llama_cpp = LlamaCpp(folder / f"{peer}.gguf", *how)
            cases[f"llama.cpp, {peer}, greedy", 1] = llama_cpp.step
    rates: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    bandwidths = []
    weights = [
        module.weight for module in ours.model.modules() if isinstance(module, torch.nn.Linear)
    ]
    size = sum(weight.nbytes for weight in weights)
    for turn in range(asked.rounds + 1):
        for (name, rows), run in cases.items():
            start = time.perf_counter()
            run()
            if cuda:
                torch.cuda.synchronize()
            if turn:
                rates[name, rows].append(rows * asked.new / (time.perf_counter() - start))
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
    save("sampling", lines)


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
