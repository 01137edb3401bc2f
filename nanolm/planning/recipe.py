"""How a model is taught unless somebody knows better: the numbers, each from trials.

>>> weight_decay(passes=8, lr=0.003, steps=400)
4.3

What was tried, and what it gave, is in docs/experiments.md. What matters most on a text that is
seen again and again is weight decay: pulled towards zero the harder the more often it sees the
text, a model can go over it twenty times and still get better at what it has not seen.
"""

import math

from nanolm.model.config import GPTConfig, ModelConfig
from nanolm.model.size import non_embedding_parameters
from nanolm.training.optimizers import OPTIMIZERS

EMBEDDING_RATE = 4.0  # times the learning rate: a token is seen rarely, a matrix always
HEAD_RATE = 0.6  # the last layer would run ahead of what it reads; also where it is the embedding
WIDTH = 384
BY_WIDTH = 0.75  # twice the width, so many halvings of the learning rate
RECURRENT = 2  # times as much
STRONGEST = 0.05  # learning rate * weight decay: a step must not forget what the last ones found
PULL = 0.08  # learning rate * weight decay * steps for one pass; twice the passes, four times it
LEAST_DECAY = 0.1
MOST_PASSES = 20  # more teach nothing new, however hard the pull
MANY_PASSES = 10  # from here on dropout helps too
DROPOUT = 0.1
HUNDREDS = 40  # of passes, as over a tiny text: from here on more dropout helps,
MOST_DROPOUT = 0.4
AVERAGE = 0.98  # which makes single steps jump: the mean of fifty is better than any
TINY_STEPS = 240  # of the smallest model
REPRODUCED = 10_000  # bytes: a text so small is to be reproduced rather than generalized from,
LIGHT_PULL = 1.5  # which weight decay hinders; of a larger one it keeps the model from
STRONG_PULL = 0.1  # memorizing (learning rate * weight decay)
TINY_CONTEXT = 16  # tokens: with more, sentences are memorized with all that stands before them
TINY_BATCH = 64
ITERATIONS = 15  # products that make an update orthogonal
CONTINUED = 0.15  # of the learning rate, for a model that has learned before
DEAR = 1.0  # of what a step takes without them; AdamW is then as good in the same time


def optimizer(config: ModelConfig, batch: int) -> tuple[str, str]:
    """Muon, unless making its updates takes longer than what it saves; and why."""
    if not isinstance(config, GPTConfig):
        return "adamw", "recurrent layers"
    wide = config.hidden / config.dim
    inner = 3 if config.feed_forward == "swiglu" else 2
    products = config.layers * config.dim**3 * (4 + inner * (1 + 2 * wide) / 3) * 2 * ITERATIONS
    share = products / (6 * non_embedding_parameters(config) * batch * config.context)
    if share > DEAR:
        return "adamw", f"muon's updates would take {share:.1f} times the rest of such a step"
    return "muon", f"makes updates orthogonal, {share:.0%} more arithmetic a step"


def learning_rate(optimizer: str, config: ModelConfig) -> float:
    rate = OPTIMIZERS[optimizer].lr * (WIDTH / config.dim) ** BY_WIDTH
    return float(f"{rate * (1 if isinstance(config, GPTConfig) else RECURRENT):.2g}")


def weight_decay(passes: float, lr: float, steps: int, size: float = math.inf) -> float:
    """For so many passes over a text of `size` bytes."""
    pull = min(PULL * passes**2 / steps, STRONGEST)
    if passes >= HUNDREDS:
        pull = STRONG_PULL if size >= REPRODUCED else LIGHT_PULL / steps
    return float(f"{max(LEAST_DECAY, pull / lr):.2g}")


def dropout(passes: float, never: bool) -> tuple[float, str]:
    """`never`, because what drops out is one sequence of numbers, and threads work side by side."""
    if passes < MANY_PASSES or never:
        return 0.0, f"fewer than {MANY_PASSES} passes"
    return DROPOUT if passes < HUNDREDS else MOST_DROPOUT, f"for {shown(passes)} passes"


def shown(passes: float) -> str:
    return f"{passes:,.0f}" if passes >= 10 else f"{passes:.2g}"


def rates(tied: bool) -> dict[str, float]:
    """What to multiply the learning rate of the first and the last layer by."""
    return {
        "token_embedding.weight": HEAD_RATE if tied else EMBEDDING_RATE,
        "head.weight": HEAD_RATE,
    }
