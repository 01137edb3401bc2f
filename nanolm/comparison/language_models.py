"""Language models on plain text (n-grams, convolution, recurrence, attention): bits per byte over
time.

>>> task = LanguageModelComparison(settings, notify, stop)
>>> task.train("lstm", seed=1, seconds=60, folder=Path("runs/x/lstm"))
"""

import json
import math
import time
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanolm.classification.data import Ints
from nanolm.comparison.networks import CausalConvolution
from nanolm.comparison.training import ModelKind, train_in_run, train_network
from nanolm.planning.tuning import threads_for
from nanolm.pretraining.prepare import prepare_text
from nanolm.pretraining.train import train
from nanolm.report.run_data import read_metrics
from nanolm.runs.folder import Run
from nanolm.runs.info import describe
from nanolm.text.store import Prepared
from nanolm.text.tokens import Store
from nanolm.text.vocabulary import counted_bits
from nanolm.training.events import Notify
from nanolm.training.interrupt import StopRequest
from nanolm.training.settings import TrainSettings

MAX_NGRAM = 5  # tokens
WINDOW, WINDOWS, LAYERS = 128, 8, 4  # of the convolution: tokens, windows per batch, layers
DIM, LR = {"cpu": 128, "cuda": 512, "mps": 128}, 6e-3
NO_TARGET = -100  # ignored by torch's cross-entropy
MANY_EPOCHS = 1e9  # until the time is up


class LanguageModelComparison:
    """A text, and the language models trained on it."""

    measure, seeds = "bits_per_byte", 1

    def __init__(self, settings: TrainSettings, notify: Notify, stop: StopRequest) -> None:
        self.settings, self.notify, self.stop = settings, notify, stop
        self.kinds = LANGUAGE_MODELS

    def fingerprint(self) -> str:
        return json.dumps(self.text.fingerprints)

    @cached_property
    def text(self) -> Prepared:
        return prepare_text(self.settings, None, self.notify)

    def train(self, name: str, seed: int, seconds: float, folder: Path) -> dict[str, Any]:
        return self.kinds[name].train(self, seed, seconds, folder)  # type: ignore[no-any-return]


def count_ngrams(
    task: LanguageModelComparison, seed: int, seconds: float, folder: Path
) -> dict[str, Any]:
    """Count n-grams with longer and longer contexts, while they help."""
    text, curve, best = task.text, [], math.inf
    begin, vocab_size = time.monotonic(), text.tokenizer.vocab_size
    ids, held_out = (np.asarray(part[:]).astype(np.int64) for part in (text.train, text.val))
    size = int(text.tokenizer.byte_lengths()[held_out].sum())
    for bits in islice(counted_bits(ids, held_out, vocab_size), MAX_NGRAM):
        curve.append([time.monotonic() - begin, bits / size])
        if bits / size > best:
            break
        best = bits / size
    seconds = time.monotonic() - begin
    return {"bits_per_byte": best, "seconds": seconds, "steps": len(curve), "curve": curve}


def train_convolution(
    task: LanguageModelComparison, seed: int, seconds: float, folder: Path
) -> dict[str, Any]:
    text, device, begin = task.text, task.settings.device, time.monotonic()
    curve: list[list[float]] = []
    torch.manual_seed(seed)
    network = CausalConvolution(text.tokenizer.vocab_size, DIM[device], LAYERS).to(device)
    sizes = text.tokenizer.byte_lengths()

    @torch.inference_mode()
    def evaluate() -> tuple[float, float]:
        network.eval()
        nats, size, count = 0.0, 0, -(-(len(text.val) - 1) // WINDOW)
        for which in np.split(np.arange(count), range(WINDOWS, count, WINDOWS)):
            ids, _, targets = windows(text.val, which)
            targets[targets == text.tokenizer.start_of_text] = NO_TARGET
            logits = network(ids.to(device)).float()
            nats += F.cross_entropy(logits, targets.to(device), reduction="sum").item()
            size += int(sizes[targets[targets != NO_TARGET].numpy()].sum())
        bits = nats / math.log(2) / max(1, size)
        curve.append([time.monotonic() - begin, bits])
        return bits, bits

    count = max(1, (len(text.train) - 1) // WINDOW)
    rows = partial(windows, text.train)
    with threads_for(task.settings.threads):
        how = (evaluate, LR, seconds, seed, task.stop, WINDOWS, MANY_EPOCHS)
        steps = train_network(network, np.full(count, WINDOW), rows, *how)
    size = sum(parameter.numel() for parameter in network.parameters())
    seconds, best = time.monotonic() - begin, min(bits for _, bits in curve)
    measured = {"bits_per_byte": best, "parameters": size, "seconds": seconds}
    return {**measured, "steps": steps, "curve": curve}


def windows(ids: Store, which: Ints) -> tuple[Tensor, Tensor, Tensor]:
    """Windows of a text by number, how long they are, and the token that follows each token."""
    places = which[:, None] * WINDOW + np.arange(WINDOW + 1)  # (windows, WINDOW + 1)
    found = ids[np.minimum(places, len(ids) - 1)].astype(np.int64)
    targets = np.where(places < len(ids), found, NO_TARGET)[:, 1:]
    lengths = np.full(len(which), WINDOW)
    return torch.from_numpy(found[:, :-1]), torch.from_numpy(lengths), torch.from_numpy(targets)


def train_family(
    task: LanguageModelComparison, seed: int, seconds: float, folder: Path, family: str | None
) -> dict[str, Any]:
    """Train in a run like `nanolm train`."""
    family = family or task.settings.family
    settings = replace(task.settings, seed=seed, family=family, minutes=seconds / 60, teachers=0)
    result = train_in_run(settings, folder, partial(train, notify=task.notify))
    metrics, key = read_metrics(Run(folder).metrics), "val_bits_per_byte"
    return {
        "bits_per_byte": result[key],
        "parameters": describe(str(folder), lambda text: None).parameters,
        "seconds": result["seconds"],
        "steps": result["steps"],
        "curve": [[row["seconds"], row[key]] for row in metrics if key in row],
    }


def family(title: str, teaches: str, name: str | None) -> ModelKind:
    return ModelKind(title, teaches, 1.0, partial(train_family, family=name))


LANGUAGE_MODELS: dict[str, ModelKind] = {
    "ngram": ModelKind(
        "n-gram", "counts of which token followed the last few tokens", 0.2, count_ngrams
    ),
    "convolution": ModelKind(
        "causal convolution",
        "all positions in parallel, but each layer sees only a few tokens",
        1.0,
        train_convolution,
    ),
    "rnn": family("Elman RNN", "one state for all past tokens, updated at every token", "rnn"),
    "lstm": family(
        "LSTM", "gates keep information longer, but tokens are still read one by one", "lstm"
    ),
    "transformer": family("Transformer", "all positions in parallel; learns more per second", None),
}
