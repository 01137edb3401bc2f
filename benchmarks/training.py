"""Training speed, compared with a plain PyTorch loop and `transformers`.

    python benchmarks/training.py            # all shapes for this machine
    python benchmarks/training.py --shape small

On a GPU: GPT-2 with 124 million parameters and 65,536 tokens per step (`gpt2`), and the small model
that nanoGPT trains on the characters of Shakespeare (`small`); if asked for, GPT-2 with 350 million
parameters and 24,576 tokens (`gpt2-medium`), or with 1.5 billion and 16,384 (`gpt2-xl`). On a CPU:
the model from nanoGPT's documentation for CPUs (`cpu`). The plain loop does what nanoGPT does:
autocast, fused attention, fused AdamW and, on a GPU, torch.compile. Like nanoGPT, it returns the
logits with the loss. nanolm trains its default, a `modern` model with Muon, and, if memory allows,
the same GPT-2 with AdamW. Each contestant uses its best number of threads. Results are medians of
alternating rounds after warmup.
"""

import argparse
from typing import Any

import torch
from results import save

from nanolm.bench.machine import peak_of, product
from nanolm.bench.measure import flops_per_token
from nanolm.bench.peers import Transformers
from nanolm.bench.plain import Plain
from nanolm.bench.turns import OnThreads, Runner, fastest, medians
from nanolm.machine import available_threads
from nanolm.model.build import build_model
from nanolm.model.config import GPTConfig, ModelConfig, configure
from nanolm.model.device import has_float8
from nanolm.planning.trial import SpeedTrial
from nanolm.training.settings import TrainSettings

SHAPES: dict[str, dict[str, int]] = {
    "gpt2": {"layers": 12, "heads": 12, "dim": 768, "context": 1024, "vocab_size": 50_304},
    "gpt2-medium": {"layers": 24, "heads": 16, "dim": 1024, "context": 1024, "vocab_size": 50_304},
    "gpt2-xl": {"layers": 48, "heads": 25, "dim": 1600, "context": 1024, "vocab_size": 50_304},
    "small": {"layers": 6, "heads": 6, "dim": 384, "context": 256, "vocab_size": 65},
    "cpu": {"layers": 4, "heads": 4, "dim": 128, "context": 64, "vocab_size": 65},
}
ROWS = {"gpt2": 64, "gpt2-medium": 24, "gpt2-xl": 16, "small": 64, "cpu": 12}
# nanoGPT's own model: no biases, and the exact GELU.
CLASSIC: dict[str, Any] = {"bias": False, "feed_forward": "gelu"}
SAME = "nanolm, gpt2, AdamW"  # the model and the optimizer of the peers


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--shape", action="append", choices=list(SHAPES))
    arguments.add_argument("--seconds", type=float, default=10.0, help="time for each variant")
    asked = arguments.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[dict[str, Any]] = []
    for name in asked.shape or (["gpt2", "small"] if device == "cuda" else ["cpu"]):
        rows += compare(name, device, asked.seconds)
        save("training", rows)


def compare(name: str, device: str, seconds: float) -> list[dict[str, Any]]:
    shape, rows = SHAPES[name], ROWS[name]
    dtype = "bfloat16" if device == "cuda" else "float32"  # of the peers
    feed_forward = "gelu_tanh" if device == "cuda" else "gelu"
    classic = configure("gpt2", **{**CLASSIC, "feed_forward": feed_forward}, **shape)
    modern = configure("modern", **shape)
    assert isinstance(classic, GPTConfig)

    def trial(config: ModelConfig, optimizer: str | None, dtype: str = "auto") -> SpeedTrial:
        settings = TrainSettings((), optimizer=optimizer, dtype=dtype)
        return SpeedTrial(config, rows, device, settings=settings)

    trials = {"nanolm": trial(modern, None)}
    float8 = name.startswith("gpt2") and has_float8()
    if float8:
        trials["nanolm, float8"] = trial(modern, None, "float8")
    if name != "gpt2-xl":
        trials |= {"nanolm, AdamW": trial(modern, "adamw"), SAME: trial(classic, "adamw")}
        if float8:
            trials[f"{SAME}, float8"] = trial(classic, "adamw", "float8")
    if device == "cpu":
        trials[f"{SAME}, float32"] = trial(classic, "adamw", "float32")
    plain = Plain(classic, rows, device)
    runners: dict[str, Runner] = {**trials}
    runners["plain PyTorch"] = on_best_threads(plain, device)
    if name != "gpt2-xl":
        theirs = Transformers(configure("gpt2", **shape), rows, device, dtype, print)
        runners["transformers"] = on_best_threads(theirs, device)
    products = None
    if device == "cpu":
        products = product(device, dtype)
        runners["matrix products"] = OnThreads(products, available_threads())
    taken = medians(runners, seconds)
    tokens = rows * shape["context"]
    peak = peak_of(torch.cuda.get_device_name()) if device == "cuda" else None
    if products:
        peak = products.amount / taken.pop("matrix products")
    with torch.device("meta"):
        flops = flops_per_token(build_model(classic))
    found = []
    for what, each in taken.items():
        row: dict[str, Any] = {"what": what, "shape": name, "milliseconds": round(1000 * each, 3)}
        row["tokens_per_second"] = round(tokens / each)
        if peak and (what not in trials or what.startswith(SAME)):
            row["of_peak"] = round(tokens / each * flops / peak, 3)
        if what in trials:
            row["times_plain"] = round(taken["plain PyTorch"] / each, 3)
            if "transformers" in taken:
                row["times_transformers"] = round(taken["transformers"] / each, 3)
            row["how"] = [str(choice) for choice in trials[what].choices]
        elif isinstance(runner := runners[what], OnThreads):
            row["threads"] = runner.threads
        found.append(row)
    if products and peak:
        found.append({"what": "matrix products", "gflops_per_second": round(peak / 1e9, 1)})
    for each_trial in trials.values():
        each_trial.close()
    return found


def on_best_threads(runner: Runner, device: str) -> Runner:
    if device != "cpu":
        return runner
    return fastest([OnThreads(runner, count) for count in sorted({1, available_threads()})])


if __name__ == "__main__":
    main()
