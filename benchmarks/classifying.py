"""Speed of fine-tuning and classification, compared with `transformers`.

    python benchmarks/classifying.py                      the embedded reviews
    python benchmarks/classifying.py sst2/train.tsv       your own labeled texts

Both train a GPT-2 with 124M parameters on the same texts. The weights are random, which does not
affect speed. Batches have 32 texts, in bfloat16 on a GPU, with gradient clipping and fused AdamW.
`transformers` uses the usual loop: random batches, each padded to its longest text. Texts are
encoded before timing starts. The two take turns, and the median of each is reported. Classification
is timed from text to probabilities.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from results import save

from nanolm.bench.machine import wait_for
from nanolm.classification.classifier import TextClassifier, in_parts
from nanolm.classification.data import LabelSplit, numbered, sorted_labels, stratified
from nanolm.classification.recipe import choose_settings
from nanolm.classification.settings import FinetuneSettings
from nanolm.classification.task import ClassifierTask
from nanolm.model.classifier import Classifier
from nanolm.model.config import PRESETS, ClassifierConfig, ModelConfig, configure
from nanolm.model.device import choose_device, choose_dtype
from nanolm.text.labeled import LabelReading, read_labeled
from nanolm.text.tokenizer import Tokenizer, train_tokenizer
from nanolm.training.optim import Optimizers
from nanolm.training.step import Step

Steps = Callable[[int], None]  # runs this number of updates
BATCH = 32
LR = 5e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", default="embedded:reviews")
    parser.add_argument("--preset", default="gpt2", help="preset of the model to fine-tune")
    parser.add_argument("--classify", default="small", help="preset of the model that classifies")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    device, _ = choose_device("auto")
    dtype, _ = choose_dtype("auto", device)
    read = read_labeled((options.file,), LabelReading(), lambda *how_far: None)
    labels = sorted_labels(set(read.labels))
    train, val = stratified(numbered(read, labels), 0.05, seed=1)
    split = LabelSplit(labels, train, val, None, read.how, [], [])
    tokenizer = train_tokenizer(train.texts, "bpe", 16_384)
    lengths = [len(tokenizer.encode(text)) for text in train.texts]
    print(f"{options.file}: {len(train):,} texts, {statistics.mean(lengths):.1f} tokens on average")

    ours = nanolm_steps(split, tokenizer, lengths, options.preset, device, dtype)
    theirs = transformers_steps(split, tokenizer, options.preset, device, dtype)
    ours(60), theirs(20)  # warmup: kernels are chosen and updates captured
    speeds: dict[str, list[float]] = {"nanolm": [], "transformers": []}
    for _ in range(options.rounds):
        for name, run in (("nanolm", ours), ("transformers", theirs)):
            started = time.perf_counter()
            run(options.steps)
            seconds = time.perf_counter() - started
            speeds[name].append(BATCH * options.steps / seconds)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    rows: list[dict[str, Any]] = [
        {
            "what": f"fine-tuning, {options.preset}, {name}",
            "texts_per_second": round(medians[name]),
            "rounds": [round(value) for value in values],
        }
        for name, values in speeds.items()
    ]
    rows[0]["times_transformers"] = round(medians["nanolm"] / medians["transformers"], 2)

    config = classifier_config(labels, tokenizer, options.classify, max(lengths))
    classifier = TextClassifier(Classifier(config).eval(), tokenizer).on(device, dtype)
    for _ in classifier.stream(in_parts(train.texts[:10_000])):
        pass
    rates = []
    for _ in range(options.rounds):
        started = time.perf_counter()
        count = sum(1 for _ in classifier.stream(in_parts(train.texts)))
        rates.append(count / (time.perf_counter() - started))
    rows.append(
        {
            "what": f"classifying, {options.classify}",
            "texts_per_second": round(statistics.median(rates)),
            "rounds": [round(value) for value in rates],
        }
    )
    save("classifying", rows)


def classifier_config(
    labels: tuple[str, ...], tokenizer: Tokenizer, preset: str, longest: int
) -> ClassifierConfig:
    return ClassifierConfig(
        base=model_config(preset, tokenizer.vocab_size), labels=labels, window=longest
    )


def model_config(preset: str, vocab_size: int) -> ModelConfig:
    shape = {name: getattr(PRESETS[preset], name) for name in ("layers", "heads", "dim", "context")}
    vocab_size = max(vocab_size, PRESETS[preset].vocab_size)
    return configure("gpt2", vocab_size=vocab_size, dropout=0.1, **shape)


def nanolm_steps(
    split: LabelSplit,
    tokenizer: Tokenizer,
    lengths: list[int],
    preset: str,
    device: str,
    dtype: str,
) -> Steps:
    config = classifier_config(split.labels, tokenizer, preset, max(lengths))
    model = Classifier(config)
    settings = FinetuneSettings(batch=BATCH, lr=LR, dropout=0.1, device=device, dtype=dtype)
    settings, _ = choose_settings(settings, config.base, model.parameter_count(), lengths)
    settings = replace(settings, language_loss=0.0, train="all")
    task = ClassifierTask(settings, split, tokenizer, model, None, None, lambda *how_far: None)
    task.model.train()
    step = Step(task.loss, Optimizers(task.parameters(), weight_decay=0.01), dtype)
    done = 0

    def run(count: int) -> None:
        nonlocal done
        for _ in range(count):
            step(task.batch(done), LR)
            done += 1
        wait_for(device)

    return run


def transformers_steps(
    split: LabelSplit, tokenizer: Tokenizer, preset: str, device: str, dtype: str
) -> Steps:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = model_config(preset, tokenizer.vocab_size)
    theirs = GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.context,
        n_embd=config.dim,
        n_layer=config.layers,
        n_head=PRESETS[preset].heads,
        num_labels=len(split.labels),
        pad_token_id=tokenizer.padding,
    )
    model = GPT2ForSequenceClassification(theirs).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    ids = [tokenizer.encode(text) for text in split.train.texts]
    random = np.random.default_rng(1)

    def run(count: int) -> None:
        for _ in range(count):
            rows = random.choice(len(ids), BATCH, replace=False)
            longest = max(len(ids[row]) for row in rows)
            batch = [ids[row] + [tokenizer.padding] * (longest - len(ids[row])) for row in rows]
            inputs = torch.tensor(batch).to(device)
            truth = torch.from_numpy(split.train.truth[rows]).to(device)
            with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
                mask = (inputs != tokenizer.padding).long()
                loss = model(input_ids=inputs, attention_mask=mask, labels=truth).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


if __name__ == "__main__":
    main()
