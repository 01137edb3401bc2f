"""Validation bits per byte after the same training time, compared with other trainers.

    python benchmarks/learning.py novel.txt letters.txt --minutes 1
    python benchmarks/learning.py shakespeare.txt --match 1.898

- nanolm: the command `nanolm train FILE --minutes M` without further options.
- nanogpt: nanoGPT's documented configuration for the device, in plain PyTorch, on characters.
- transformers: a Hugging Face GPT-2 of about that size, with a BPE vocabulary of 2,048.

Each trainer runs in a separate process with empty caches, so reading, tokenizing, measuring and
compiling count. For the peers the clock starts after their imports and stops before the final
evaluation. For nanolm it covers the whole command. All are evaluated on the same bytes, the last
tenth as nanolm splits it. They use non-overlapping windows of their own context length and their
best weights on that text. The peers' learning rate schedule follows the clock and ends with it.

`--match` runs on a CPU. It times nanoGPT's 2,000 steps alone, then gives nanolm an eighth of that
time. LOSS is the published result of those steps in nats per character. The result here should be
close to that.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from results import save
from torch import Tensor, nn

from nanolm.bench.machine import wait_for
from nanolm.bench.plain import PlainBlock, PlainGPT
from nanolm.bench.turns import OnThreads, Runner, medians
from nanolm.machine import available_threads, cache_folder
from nanolm.model.config import GPTConfig, configure
from nanolm.text.corpus import read_corpus
from nanolm.text.decoding import Reading
from nanolm.text.sources import find_sources
from nanolm.text.store import TextRequest, prepare_tokens
from nanolm.text.words import MARK

Row = dict[str, Any]
CONTESTANTS = ("nanolm", "nanogpt", "transformers")
CACHES = ("NANOLM_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
HELD_OUT = 0.1  # fraction of each text
SEPARATOR = "\uffff"  # between documents: a character that occurs in no text
LR, WARM_UP = 1e-3, 100  # steps
EVERY = 250  # steps between evaluations
SCORED = {"cuda": 1 << 16, "cpu": 1 << 13}  # tokens at once
COMPILED_FROM = 0.5  # minutes: in less, compiling would use up nearly all of the time
MATCHED_STEPS, PART_OF_TIME = 2_000, 8


@dataclass(frozen=True)
class Recipe:
    layers: int
    heads: int
    dim: int
    context: int
    batch: int
    dropout: float
    evaluated: int  # at most this number of validation batches to select the best weights
    steps: float = math.inf  # at most


RECIPES = {
    ("nanogpt", "cpu"): Recipe(4, 4, 128, 64, 12, 0.0, evaluated=20),
    ("nanogpt", "cuda"): Recipe(6, 6, 384, 256, 64, 0.2, evaluated=200, steps=5_000),
    ("transformers", "cpu"): Recipe(4, 4, 128, 128, 8, 0.0, evaluated=20),
    ("transformers", "cuda"): Recipe(6, 6, 384, 256, 64, 0.1, evaluated=200),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--only", default=",".join(CONTESTANTS), help="comma-separated names")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--match", type=float, metavar="LOSS")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    device = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if asked.peer:
        found = peer(asked.peer, asked.files[0], asked.minutes, device, asked.match is not None)
        return print(json.dumps(found))
    names = asked.only.split(",")
    if unknown := set(names) - set(CONTESTANTS):
        parser.error(f"--only {','.join(sorted(unknown))}: choose from {', '.join(CONTESTANTS)}")
    rows: list[Row] = []
    for file in asked.files:
        if asked.match is None:
            rows += [contest(name, file, asked.minutes, device) for name in names]
        else:
            rows += match(file, asked.match)
        save("learning" if asked.match is None else "matching", rows)
    width = max(len(row["file"]) for row in rows)
    print(f"\n{'text':<{width}}  {'':<12}  bits/byte  nats/char    steps  training s   total s")
    for row in rows:
        print(
            f"{row['file']:<{width}}  {row['what']:<12}  {row['bits_per_byte']:>9.4f}  "
            f"{row['nats_per_character']:>9.4f}  {row['steps']:>7,}  "
            f"{row['training_seconds']:>10.1f}  {row['seconds']:>8.1f}  {row.get('note', '')}"
        )


def match(file: str, known: float) -> list[Row]:
    theirs = contest("nanogpt", file, math.inf, "cpu", "--match", str(known))
    taken = theirs["training_seconds"]
    theirs |= {"minutes": round(taken / 60, 4), "note": f"published: {known} nats/char"}
    ours = contest("nanolm", file, taken / 60 / PART_OF_TIME, "cpu")
    times, of_all = taken / ours["training_seconds"], taken / ours["seconds"]
    ours["note"] = f"{times:.2f} times as fast in training, {of_all:.2f} times as fast overall"
    return [theirs, ours]


def contest(name: str, file: str, minutes: float, device: str, *more: str) -> Row:
    """Train and evaluate one of them in a separate process."""
    asked = [file, "--minutes", f"{minutes:.4f}", "--device", device]
    with tempfile.TemporaryDirectory() as folder:
        if name == "nanolm":
            # The peers also hold out the end of the text.
            asked += ["--val-fraction", str(HELD_OUT), "--val-split", "end"]
            asked += ["--out", f"{folder}/run", "--json"]
            asked = ["-m", "nanolm", "train", *asked]
        else:
            asked = [__file__, *asked, "--peer", name, *more]
        environment = os.environ | {cache: f"{folder}/{cache}" for cache in CACHES}
        command = [sys.executable, *asked]
        started = time.perf_counter()
        shown = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        seconds = time.perf_counter() - started
        answer: Row = json.loads(shown.stdout.splitlines()[-1])
        text = read(file, Path(folder))[1].replace(SEPARATOR, "")
    size = len(text.encode())
    if name == "nanolm":
        nats = answer["val_bits_per_byte"] * size * math.log(2)
        facts = {"seconds": round(seconds, 1), "training_seconds": round(answer["seconds"], 1)}
        facts |= {"steps": answer["steps"], "best_step": answer["best_step"]}
    else:
        nats, scored, facts = answer["nats"], answer["bytes"], answer["facts"]
        if scored != size:
            raise SystemExit(f"{name} was scored on {scored:,} bytes of {file} instead of {size:,}")
    return {
        "what": name,
        "file": Path(file).name,
        "device": device,
        "minutes": round(minutes, 4),
        "bits_per_byte": round(nats / math.log(2) / size, 4),
        "nats_per_character": round(nats / len(text), 4),
        **facts,
    }


def read(file: str, folder: Path) -> tuple[str, str]:
    """The training and validation text, split as nanolm splits them."""
    sources = find_sources([file], folder, lambda *how_far: None)
    with read_corpus(sources, Reading(), folder) as corpus:
        parts = [corpus.read(*part) for part in corpus.split(HELD_OUT)]
    train, held_out = (part.replace(MARK, SEPARATOR.encode()).decode() for part in parts)
    return train.removeprefix(SEPARATOR), held_out


def peer(name: str, file: str, minutes: float, device: str, exact: bool) -> Row:
    """Train and evaluate a peer; if `exact`, for MATCHED_STEPS steps without evaluations."""
    recipe = RECIPES[name, device]
    if exact:
        recipe = replace(recipe, evaluated=0, steps=MATCHED_STEPS)
    make, prepare = (NanoGPT, characters) if name == "nanogpt" else (GPT2, tokens)
    make(recipe, 2)  # so that its imports are not timed
    torch.manual_seed(1)
    started = time.perf_counter()
    train, held_out, sizes = prepare(file)
    model = make(recipe, len(sizes)).to(device)
    learner = Learner(model, train, recipe, started + 60 * minutes)
    if device == "cuda" and minutes >= COMPILED_FROM:
        learner.compile(least=12 * minutes)
    threads = choose_threads(learner) if device == "cpu" else None
    scorer = Scorer(model, held_out, sizes, recipe)
    begun, before = time.perf_counter(), learner.count
    while not learner.ended():
        learner.step()
        if recipe.evaluated and learner.count % EVERY == 0:
            scorer.keep_best(learner.count)
    learner.wait()
    ended = time.perf_counter()
    if recipe.evaluated:
        scorer.keep_best(learner.count)
        model.load_state_dict(scorer.weights)
    nats, size = scorer.score(scorer.everything)
    training = ended - begun
    if exact:  # as if all steps ran at the speed with the chosen number of threads
        training *= learner.count / (learner.count - before)
    facts = {
        "seconds": round(ended - started, 1),
        "training_seconds": round(training, 1),
        "steps": learner.count,
        "best_step": scorer.best_step or learner.count,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "vocabulary": len(sizes),
        "threads": threads,
        "compiled": learner.network is not model,
    }
    return {"nats": nats, "bytes": size, "facts": facts}


def characters(file: str) -> tuple[Tensor, Tensor, Tensor]:
    """Training ids, validation ids (after one id of context), and the number of bytes per id."""
    train, held_out = read(file, cache_folder())
    vocabulary = sorted(set(train) | set(held_out))
    ids_of = np.zeros(sys.maxunicode + 1, np.int64)
    ids_of[[ord(character) for character in vocabulary]] = np.arange(len(vocabulary))
    codes = np.frombuffer((train + held_out).encode("utf-32-le"), np.uint32)
    ids = torch.from_numpy(ids_of[codes])
    sizes = [0 if each == SEPARATOR else len(each.encode()) for each in vocabulary]
    return ids[: len(train)], ids[len(train) - 1 :], torch.tensor(sizes)


def tokens(file: str) -> tuple[Tensor, Tensor, Tensor]:
    """The same in tokens; the validation ids start with a start-of-text token."""
    prepared = prepare_tokens(
        TextRequest((file,), None, HELD_OUT, "end", tokenizer="bpe", vocab_size=2048)
    )
    parts = (prepared.train, prepared.val, prepared.tokenizer.byte_lengths())
    train, held_out, sizes = (torch.from_numpy(part.astype(np.int64)) for part in parts)
    return train, held_out, sizes


def choose_threads(learner: "Learner") -> int:
    """The faster number of threads, measured on steps that count toward training."""
    counts = sorted({1, available_threads()})
    runners: dict[str, Runner] = {str(count): OnThreads(learner, count) for count in counts}
    taken = medians(runners, seconds=1.0)
    best = int(min(taken, key=lambda count: taken[count]))
    torch.set_num_threads(best)
    return best


class Learner:
    """AdamW, gradient clipping, and a cosine schedule that ends with the steps or the time."""

    def __init__(self, model: nn.Module, ids: Tensor, recipe: Recipe, end: float) -> None:
        self.model, self.recipe, self.end = model.train(), recipe, end
        self.network: Any = model
        self.weights = list(model.parameters())
        self.device = self.weights[0].device.type
        self.ids = ids.to(self.device)
        self.window = torch.arange(recipe.context + 1, device=self.device)
        decayed = [weight for weight in self.weights if weight.dim() > 1]
        others = [weight for weight in self.weights if weight.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.99), fused=True)
        self.count, self.begun = 0, time.perf_counter()
        self.warm = 0, 0.0  # step and time at which warmup ended

    def compile(self, least: float) -> None:
        """Compile, and keep at least this number of seconds for training."""
        self.network = torch.compile(self.model)
        try:
            self.step()
        except Exception as error:  # torch.compile can fail with many exception types
            print(f"not compiled: {type(error).__name__}: {error}", file=sys.stderr)
            self.network = self.model
            self.optimizer.zero_grad()
        self.wait()
        self.begun = time.perf_counter()
        self.end = max(self.end, self.begun + least)

    def step(self) -> None:
        last = len(self.ids) - self.recipe.context
        starts = torch.randint(last, (self.recipe.batch, 1), device=self.device)
        ids = self.ids[starts + self.window]  # (batch, context + 1)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            _, loss = self.network(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.count += 1

    def rate(self) -> float:
        """Warmup over 100 steps or a tenth of the time, whichever is shorter, then decay to 0.1."""
        now = time.perf_counter()
        tenth = (self.end - self.begun) / 10
        warm = max((self.count + 1) / (WARM_UP + 1), (now - self.begun) / tenth)
        if warm < 1:
            self.warm = self.count + 1, now
            return LR * warm
        step, when = self.warm
        of_steps = (self.count - step) / (self.recipe.steps - step)
        of_time = (now - when) / (self.end - when)
        done = min(1.0, max(of_steps, of_time))
        return LR * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    def ended(self) -> bool:
        return self.count >= self.recipe.steps or time.perf_counter() >= self.end

    def wait(self) -> None:
        wait_for(self.device)


class Scorer:
    """Evaluates a model on the validation text and keeps its best weights."""

    def __init__(self, model: nn.Module, ids: Tensor, sizes: Tensor, recipe: Recipe) -> None:
        self.model, self.sizes, self.context = model, sizes, recipe.context
        starts = torch.arange(0, len(ids) - 1, recipe.context)[:, None]  # (windows, 1)
        places = starts + torch.arange(recipe.context + 1)  # (windows, context + 1)
        # The last window may extend beyond the text. The padding is not counted.
        self.windows = ids[places.clamp(max=len(ids) - 1)]
        self.inside = places[:, 1:] < len(ids)
        # The same sample every time, so that weights are compared on equal terms.
        self.everything = torch.randperm(len(starts))
        self.sample = self.everything[: recipe.evaluated * recipe.batch]
        self.best, self.best_step = math.inf, 0
        self.weights: dict[str, Tensor] = {}

    def keep_best(self, step: int) -> None:
        nats, _ = self.score(self.sample)
        if nats < self.best:
            self.best, self.best_step = nats, step
            state = self.model.state_dict()
            self.weights = {name: weight.clone() for name, weight in state.items()}

    @torch.inference_mode()
    def score(self, which: Tensor) -> tuple[float, int]:
        """Total nats of these windows, and the number of bytes in their text."""
        device = next(self.model.parameters()).device.type
        nats, size = 0.0, 0
        self.model.eval()
        for rows in which.split(SCORED[device] // self.context):
            ids = self.windows[rows].to(device)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                logits, _ = self.model(ids[:, :-1], ids[:, 1:])
            truth = ids[:, 1:].flatten()
            losses = F.cross_entropy(logits.flatten(0, 1).float(), truth, reduction="none").cpu()
            sizes = self.sizes[truth.cpu()] * self.inside[rows].flatten()
            nats += losses[sizes > 0].double().sum().item()
            size += int(sizes.sum())
        self.model.train()
        return nats, size


class NanoGPT(PlainGPT):
    """PlainGPT with dropout and GPT-2's initialization (small residual projections)."""

    def __init__(self, recipe: Recipe, vocabulary: int) -> None:
        shape = {name: getattr(recipe, name) for name in ("layers", "heads", "dim", "context")}
        config = configure("gpt2", **shape, vocab_size=vocabulary)
        assert isinstance(config, GPTConfig)
        super().__init__(config)
        blocks = (NanoBlock(config, recipe.dropout) for _ in range(recipe.layers))
        self.blocks = nn.ModuleList([nn.Dropout(recipe.dropout), *blocks])
        for name, weight in self.blocks.named_parameters():
            if weight.dim() > 1:
                adds = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * recipe.layers if adds else 1))


class NanoBlock(PlainBlock):
    def __init__(self, config: GPTConfig, dropout: float) -> None:
        super().__init__(config)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, time, dim = x.shape
        dropout = self.dropout if self.training else 0.0
        parts = self.qkv(self.first(x)).split(dim, dim=2)
        # (batch, heads, time, head_dim)
        q, k, v = (part.view(batch, time, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(batch, time, dim)), dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), dropout)


class GPT2(nn.Module):
    """The GPT-2 of `transformers`, with the interface of PlainGPT."""

    def __init__(self, recipe: Recipe, vocabulary: int) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        shape = {"n_layer": recipe.layers, "n_head": recipe.heads, "n_embd": recipe.dim}
        shape |= {"n_positions": recipe.context, "vocab_size": vocabulary}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), recipe.dropout)
        ids = {"bos_token_id": None, "eos_token_id": None}  # defaults are GPT-2's
        self.model = GPT2LMHeadModel(GPT2Config(**shape, **dropout, **ids))

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(input_ids=ids, use_cache=False).logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    main()
