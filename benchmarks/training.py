"""Training speed, compared with a plain PyTorch loop and `transformers`.

    python benchmarks/training.py            # all shapes for this machine
    python benchmarks/training.py --shape small

On a GPU: GPT-2 with 124 million parameters and 65,536 tokens per step (`gpt2`), and the small model
that nanoGPT trains on the characters of Shakespeare (`small`). On a CPU: the model from nanoGPT's
documentation for CPUs (`cpu`). The plain loop does what nanoGPT does: autocast, fused attention,
fused AdamW and, on a GPU, torch.compile. Like nanoGPT, it returns the logits with the loss. Each
contestant uses its best number of threads. Results are medians of alternating rounds after warmup.
"""

import argparse
from contextlib import closing
from typing import Any

import torch
import torch.nn.functional as F
from results import save
from torch import Tensor, nn

from nanolm.bench.machine import peak_of, product, wait_for
from nanolm.bench.measure import flops_per_token
from nanolm.bench.peers import Transformers
from nanolm.bench.turns import OnThreads, Runner, fastest, medians
from nanolm.machine import available_threads
from nanolm.model.config import GPTConfig, configure
from nanolm.model.device import has_float8
from nanolm.planning.trial import SpeedTrial

SHAPES: dict[str, dict[str, int]] = {
    "gpt2": {"layers": 12, "heads": 12, "dim": 768, "context": 1024, "vocab_size": 50_304},
    "small": {"layers": 6, "heads": 6, "dim": 384, "context": 256, "vocab_size": 65},
    "cpu": {"layers": 4, "heads": 4, "dim": 128, "context": 64, "vocab_size": 65},
}
ROWS = {"gpt2": 64, "small": 64, "cpu": 12}
# nanoGPT's own model: no biases, and the exact GELU.
CLASSIC: dict[str, Any] = {"bias": False, "feed_forward": "gelu"}


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
    assert isinstance(classic, GPTConfig)
    configs = {"nanolm": classic, "nanolm, modern": configure("modern", **shape)}
    trials = {what: SpeedTrial(config, rows, device) for what, config in configs.items()}
    if name == "gpt2" and has_float8():
        trials["nanolm, float8"] = SpeedTrial(classic, rows, device, "float8")
        trials["nanolm, modern, float8"] = SpeedTrial(
            configs["nanolm, modern"], rows, device, "float8"
        )
    if device == "cpu":
        trials["nanolm, float32"] = SpeedTrial(classic, rows, device, "float32")
        modern = configs["nanolm, modern"]
        trials["nanolm, modern, compiled"] = SpeedTrial(modern, rows, device, compiled=True)
    plain = Plain(classic, rows, device)
    theirs = Transformers(configure("gpt2", **shape), rows, device, dtype, print)
    runners: dict[str, Runner] = {**trials}
    runners["plain PyTorch"] = on_best_threads(plain, device)
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
    flops = flops_per_token(trials["nanolm"].model)
    found = []
    for what, each in taken.items():
        row: dict[str, Any] = {"what": what, "shape": name, "milliseconds": round(1000 * each, 3)}
        row["tokens_per_second"] = round(tokens / each)
        if peak and "modern" not in what:
            row["of_peak"] = round(tokens / each * flops / peak, 3)
        if what in trials:
            row["times_plain"] = round(taken["plain PyTorch"] / each, 3)
            row["times_transformers"] = round(taken["transformers"] / each, 3)
            row["how"] = [str(choice) for choice in trials[what].choices]
        elif isinstance(runner := runners[what], OnThreads):
            row["threads"] = runner.threads
        found.append(row)
    if products and peak:
        found.append({"what": "matrix products", "gflops_per_second": round(peak / 1e9, 1)})
    for trial in trials.values():
        with closing(trial):
            pass
    return found


def on_best_threads(runner: Runner, device: str) -> Runner:
    if device != "cpu":
        return runner
    return fastest([OnThreads(runner, count) for count in sorted({1, available_threads()})])


class Plain:
    """One training step as in nanoGPT."""

    def __init__(self, config: GPTConfig, rows: int, device: str) -> None:
        self.device = device
        model = PlainGPT(config).to(device)
        self.parameters = list(model.parameters())
        self.model = torch.compile(model) if device == "cuda" else model
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)
        self.batches = torch.randint(config.vocab_size, (4, rows, config.context + 1))
        self.batches = self.batches.to(device)
        self.count = 0

    def step(self) -> None:
        ids = self.batches[self.count % 4]
        self.count += 1
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            _, loss = self.model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def wait(self) -> None:
        wait_for(self.device)


class PlainGPT(nn.Module):
    """A GPT-2 without biases, as short as PyTorch allows."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.places = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim, bias=False)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # (batch, time, vocabulary)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class PlainBlock(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, dim = config.heads, config.dim
        self.first, self.second = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = (
            nn.Linear(dim, 4 * dim, bias=False),
            nn.Linear(4 * dim, dim, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, dim = x.shape
        parts = self.qkv(self.first(x)).split(dim, dim=2)
        q, k, v = (part.view(batch, time, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, dim))
        y = self.down(F.gelu(self.up(self.second(x))))
        total: Tensor = x + y
        return total


if __name__ == "__main__":
    main()
