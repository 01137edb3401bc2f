"""How good a model is on held-out text: loss, and bits per byte, by one pass over all of it.

Bits per byte divides by the bytes of the text instead of by its tokens, so models with different
tokenizers can be compared. What stands between documents has no bytes and is not counted.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanolm.model.base import Model
from nanolm.text.tokenizer import Tokenizer
from nanolm.text.tokens import Store


@dataclass(frozen=True)
class Score:
    loss: float  # nats per token
    bits_per_byte: float
    tokens: int
    bytes: int


@torch.inference_mode()
def evaluate(
    model: Model, tokenizer: Tokenizer, ids: Store, window: int, limit: int | None = None
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
    for x, y in batches:
        counted = y != tokenizer.start_of_text
        logits = model(x.to(device)).float()  # (rows, time, vocabulary)
        losses = F.cross_entropy(logits.flatten(0, 1), y.to(device).flatten(), reduction="none")
        nats += (losses.cpu().double() * counted.flatten()).sum().item()
        tokens += int(counted.sum())
    model.train(was_training)
    size = int(lengths[targets].sum())
    return Score(nats / max(1, tokens), nats / math.log(2) / max(1, size), tokens, size)
