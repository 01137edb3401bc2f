"""How good a model is on held-out text: loss, and bits per byte, by one pass over all of it.

Bits per byte divides by the bytes of the text instead of by its tokens, so models with different
tokenizers can be compared. What stands between documents has no bytes and is not counted.
"""

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from nanolm.choice import Report
from nanolm.machine import cache_folder
from nanolm.model.base import Model
from nanolm.text.corpus import read_corpus
from nanolm.text.documents import Reading
from nanolm.text.sources import find_sources
from nanolm.text.store import encode_corpus, mapped
from nanolm.text.tokenizer import Tokenizer
from nanolm.text.tokens import Store


@dataclass(frozen=True)
class Score:
    loss: float  # nats per token
    bits_per_byte: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        """As if it chose at random among so many tokens."""
        return math.exp(min(self.loss, 700.0))  # e^710 is no float


def evaluate_texts(
    model: Model,
    tokenizer: Tokenizer,
    names: tuple[str, ...],
    reading: Reading,
    window: int,
    report: Report,
) -> Score:
    """Score the texts that `names` stand for: all of them."""
    cache = cache_folder()
    sources = find_sources(names, cache, report, reading.encoding)
    with (
        read_corpus(sources, reading, cache, report) as corpus,
        tempfile.TemporaryDirectory(dir=cache) as folder,
    ):
        file = Path(folder) / "tokens"
        encode_corpus(corpus, (0, corpus.length), tokenizer, file, report)
        return evaluate(model, tokenizer, mapped(file, tokenizer), window, report=report)


@torch.inference_mode()
def evaluate(
    model: Model,
    tokenizer: Tokenizer,
    ids: Store,
    window: int,
    limit: int | None = None,
    report: Report = lambda *how_far: None,
) -> Score:
    """Score `ids` (or its first `limit` tokens) in windows that do not overlap."""
    device = model.head.weight.device
    row = torch.from_numpy(ids[: limit and limit + 1].astype("int64"))
    lengths = torch.from_numpy(tokenizer.byte_lengths())
    targets = row[1:]
    whole = len(targets) // window * window
    # As many windows at a time as keep the logits to 64 MiB.
    rows = max(1, (1 << 24) // (window * model.config.vocab_size))
    batches = list(
        zip(
            row[:whole].view(-1, window).split(rows),  # (rows, context)
            targets[:whole].view(-1, window).split(rows),
            strict=True,
        )
    )
    if whole < len(targets):  # what is left over, a shorter window
        batches.append((row[whole:-1][None], targets[whole:][None]))
    nats, tokens = 0.0, 0
    was_training = model.training
    model.eval()
    for number, (x, y) in enumerate(batches, start=1):
        counted = y != tokenizer.start_of_text
        logits = model(x.to(device)).float()  # (rows, time, vocabulary)
        losses = F.cross_entropy(logits.flatten(0, 1), y.to(device).flatten(), reduction="none")
        nats += (losses.cpu().double() * counted.flatten()).sum().item()
        tokens += int(counted.sum())
        report("evaluating", number, len(batches))
    model.train(was_training)
    size = int(lengths[targets].sum())
    return Score(nats / max(1, tokens), nats / math.log(2) / max(1, size), tokens, size)
