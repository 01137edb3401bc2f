"""Default hyperparameters, each from trials.

>>> weight_decay(passes=8, lr=0.003, steps=400)
4.3

What was tried, and what it gave, is in docs/experiments.md. On a text that is seen again and again,
weight decay matters most: with enough of it, the twentieth pass still helps on unseen text.
"""

import math

from nanolm.model.config import GPTConfig, ModelConfig
from nanolm.model.size import non_embedding_parameters
from nanolm.training.optimizers import OPTIMIZERS

EMBEDDING_RATE = 4.0  # times the learning rate: a token is seen rarely, a matrix always
HEAD_RATE = 0.6  # the last layer would run ahead of what it reads; also where it is the embedding
REFERENCE_DIM = 384  # width for which the registry has the learning rates; wider models want less
WIDTH_EXPONENT = 0.75  # twice the width, so many halvings
RECURRENT_RATE = 2  # times that of a Transformer
MOST_PULL = 0.05  # learning rate * weight decay: a step must not forget what the last ones found
PULL_PER_PASS = 0.08  # learning rate * weight decay * steps; twice the passes, four times it
LEAST_DECAY = 0.1  # weight decay, where the text is seen once
MOST_PASSES = 20  # more teach nothing new, however hard the pull
MANY_PASSES = 10  # from here on dropout helps too
DROPOUT = 0.1
HUNDREDS_OF_PASSES = 40  # as over a tiny text: from here on more dropout helps,
MOST_DROPOUT = 0.4
EMA_DECAY = 0.98  # which makes single steps jump: the mean of fifty is better than any
TINY_STEPS = 240  # of the smallest model
REPRODUCED_BYTES = 10_000  # a text so small is to be reproduced rather than generalized from,
LIGHT_PULL = 1.5  # which weight decay hinders; of a larger one it keeps the model from
STRONG_PULL = 0.1  # memorizing (learning rate * weight decay)
TINY_CONTEXT = 16  # tokens: with more, sentences are memorized with all that stands before them
TINY_BATCH = 64
MUON_PRODUCTS = 15  # matrix multiplications that make an update orthogonal
CONTINUED_RATE = 0.15  # of the learning rate, for a model that has learned before
MOST_MUON_SHARE = 1.0  # of a step without them; beyond, AdamW is as good in the same time


def optimizer(config: ModelConfig, batch: int) -> tuple[str, str]:
    """Muon, unless making its updates takes longer than what it saves; and why."""
    if not isinstance(config, GPTConfig):
        return "adamw", "recurrent layers"
    wide = config.hidden / config.dim
    inner = 3 if config.feed_forward == "swiglu" else 2
    products = config.layers * config.dim**3 * (4 + inner * (1 + 2 * wide) / 3) * 2 * MUON_PRODUCTS
    share = products / (6 * non_embedding_parameters(config) * batch * config.context)
    if share > MOST_MUON_SHARE:
        return "adamw", f"muon's updates would take {share:.1f} times the rest of such a step"
    return "muon", f"makes updates orthogonal, {share:.0%} more arithmetic a step"


def learning_rate(optimizer: str, config: ModelConfig) -> float:
    rate = OPTIMIZERS[optimizer].lr * (REFERENCE_DIM / config.dim) ** WIDTH_EXPONENT
    return float(f"{rate * (1 if isinstance(config, GPTConfig) else RECURRENT_RATE):.2g}")


def weight_decay(passes: float, lr: float, steps: int, size: float = math.inf) -> float:
    """For so many passes over a text of `size` bytes."""
    pull = min(PULL_PER_PASS * passes**2 / steps, MOST_PULL)
    if passes >= HUNDREDS_OF_PASSES:
        pull = STRONG_PULL if size >= REPRODUCED_BYTES else LIGHT_PULL / steps
    return float(f"{max(LEAST_DECAY, pull / lr):.2g}")


def rates(tied: bool) -> dict[str, float]:
    """What to multiply the learning rate of the first and the last layer by."""
    embedding = HEAD_RATE if tied else EMBEDDING_RATE
    return {"token_embedding.weight": embedding, "head.weight": HEAD_RATE}
