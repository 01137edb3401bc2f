"""Training speed on pairs of texts, compared with a compiled loop around `MarianMTModel`.

    python benchmarks/pairs.py pairs.tsv
    python benchmarks/pairs.py pairs.tsv --layers 2 --dim 64    # a smaller model, for a CPU

Both train the Transformer of 2017 (`base`: 6 + 6 layers of width 512) on the same batches in
bfloat16 with dropout and fused AdamW. `transformers` is compiled, and measured in two ways: with
dynamic shapes and with one compilation per shape. Tokens per second do not count padding. Results
are medians of alternating rounds after warmup.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from results import save
from torch import Tensor

from nanolm.bench.machine import wait_for
from nanolm.bench.turns import medians
from nanolm.model.config_json import config_to_json
from nanolm.pairs import recipe
from nanolm.pairs.settings import PairSettings
from nanolm.pairs.task import PairJob, PairTask
from nanolm.pairs.train import build, encoded, read_text
from nanolm.runs.folder import Run
from nanolm.training.optim import Optimizers
from nanolm.training.step import Step

LR = 1e-4
# One compilation per layer and shape: beyond the default of 8, layers silently run uncompiled.
RECOMPILE_LIMIT = 512


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("pairs", nargs="?", default="embedded:veltish")
    arguments.add_argument("--layers", type=int, default=6)
    arguments.add_argument("--dim", type=int, default=512)
    arguments.add_argument("--vocab-size", type=int, default=16_384, help="at most")
    arguments.add_argument("--batch", type=int, default=16_384, help="tokens, with padding")
    arguments.add_argument("--batches", type=int, default=4, help="different ones, of all lengths")
    arguments.add_argument("--seconds", type=float, default=10.0, help="time for each variant")
    asked = arguments.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = PairSettings(
        pairs=(asked.pairs,),
        family="encoder-decoder",
        layers=asked.layers,
        dim=asked.dim,
        vocab_size=asked.vocab_size,
        tokenizer="bpe",
        separate_vocabularies=False,
        batch=asked.batch,
        optimizer="adamw",
        dropout=0.1,
        label_smoothing=0.0,
        steps=1,
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
    )
    with tempfile.TemporaryDirectory() as folder:
        task = make_task(settings, Path(folder))
        save("pairs", compare(task, asked.batches, asked.seconds))


def make_task(settings: PairSettings, folder: Path) -> PairTask:
    text = read_text(settings, None, lambda event: None)
    settings = replace(text.settings, context=recipe.MOST_CONTEXT)
    data = encoded(text, settings, lambda *progress: None)
    settings, _ = recipe.choose_settings(settings, None, *data.train.size())
    job = PairJob(settings, Run(folder), data, build(settings, None, None, text), None)
    return PairTask(job, lambda event: None)


def compare(task: PairTask, count: int, seconds: float) -> list[dict[str, Any]]:
    in_epoch = task.batches.in_epoch
    # From the shortest pairs to the longest: an epoch's batches are in random order.
    order = sorted(range(in_epoch), key=lambda index: task.data.train.shape(task.batches[index]))
    chosen = [order[(2 * k + 1) * in_epoch // (2 * count)] for k in range(count)]
    batches, tokens = [], 0
    for index in chosen:
        batches.append(task.batch(index))
        tokens += task.batch_tokens
    runners: dict[str, Any] = {"nanolm": Ours(task, batches)}
    if task.settings.device == "cuda":
        runners["transformers, dynamic shapes"] = Marian(task, batches, dynamic=True)
        runners["transformers, static shapes"] = Marian(task, batches, dynamic=False)
    else:
        runners["transformers"] = Marian(task, batches)
    taken = medians(runners, seconds)
    shapes = [f"{len(batch[0])} x ({batch[0].shape[1]} + {batch[3].shape[1]})" for batch in batches]
    found: list[dict[str, Any]] = [{"batches": shapes, "tokens": tokens}]
    for what, each in taken.items():
        row = {"what": what, "milliseconds": round(1000 * each / count, 3)}
        row |= {"tokens_per_second": round(tokens / each), "parameters": runners[what].count}
        if what == "nanolm":
            best = min(each for name, each in taken.items() if name != what)
            row["times_transformers"] = round(best / each, 3)
        found.append(row)
    return found


class Ours:
    """What `nanolm train-pairs` does in a step, once for each batch."""

    def __init__(self, task: PairTask, batches: list[tuple[Tensor, ...]]) -> None:
        assert task.settings.dtype and task.settings.weight_decay is not None
        self.batches, self.device = batches, task.settings.device
        optimizers = Optimizers(task.parameters(), "adamw", task.settings.weight_decay)
        self.train_step = Step(task.loss, optimizers, task.settings.dtype, task.tokens)
        self.count = task.network.parameter_count()
        task.network.train()

    def step(self) -> None:
        for batch in self.batches:
            self.train_step(batch, lr=LR)

    def wait(self) -> None:
        wait_for(self.device)


class Marian:
    """A plain training loop; its batches are on the device already."""

    def __init__(
        self, task: PairTask, batches: list[tuple[Tensor, ...]], dynamic: bool | None = None
    ) -> None:
        from transformers import AutoConfig, MarianMTModel

        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        self.device = device = task.settings.device
        padding = task.data.tokenizer.padding
        config = AutoConfig.for_model(**config_to_json(task.network.config), pad_token_id=padding)
        model = MarianMTModel(config).to(device).train()
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        self.count = sum(parameter.numel() for parameter in self.parameters)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LR, fused=True)
        self.model: Any = model if dynamic is None else torch.compile(model, dynamic=dynamic)
        self.batches = []
        for source, lengths, target, weights in batches:
            mask = (torch.arange(source.shape[1]) < lengths[:, None]).long()
            labels = target[:, 1:].masked_fill(weights == 0, -100)
            inputs = {"input_ids": source, "attention_mask": mask, "labels": labels}
            inputs["decoder_input_ids"] = target[:, :-1]
            self.batches.append({name: part.to(device) for name, part in inputs.items()})

    def step(self) -> None:
        for batch in self.batches:
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                loss = self.model(**batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def wait(self) -> None:
        wait_for(self.device)


if __name__ == "__main__":
    main()
