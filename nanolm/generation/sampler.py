"""From logits to the next token: the filtered distribution and the draw.

    >>> distribution(torch.tensor([[1.0, 2.0, 3.0]]), Knobs(top_k=1))
    tensor([[0., 0., 1.]], dtype=torch.float64)

The filters come in the order of `transformers`: temperature, then top-k, then top-p.
"""

import random

import torch
from torch import Tensor

from nanolm.generation.knobs import Knobs


class Sampler:
    """Draws one token a row; every row has random numbers of its own, whatever the batch."""

    def __init__(self, knobs: Knobs, rows: int) -> None:
        self.knobs = knobs
        self.randoms = [random.Random(knobs.seed * 1_000_003 + row) for row in range(rows)]

    def draw(self, logits: Tensor) -> Tensor:
        """(rows, vocabulary) in, (rows,) out."""
        if self.knobs.likeliest_only():
            return logits.argmax(dim=-1)
        reached = distribution(logits, self.knobs).cumsum(dim=-1)
        numbers = torch.tensor([[source.random()] for source in self.randoms], dtype=torch.float64)
        # Scaled to the last sum, which rounding leaves a hair beside 1.
        threshold = numbers.to(logits.device) * reached[:, -1:]
        drawn = torch.searchsorted(reached, threshold, right=True).squeeze(-1)
        return drawn.clamp(max=logits.shape[-1] - 1)  # a model that has diverged has no last sum


def distribution(logits: Tensor, knobs: Knobs) -> Tensor:
    """The probabilities that a token is drawn from: (rows, vocabulary), float64."""
    logits = logits.double() / knobs.temperature
    if knobs.top_k is not None:
        smallest = logits.topk(min(knobs.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if knobs.top_p is not None:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities  # reached without this token
        dropped = torch.zeros_like(logits, dtype=torch.bool)
        dropped.scatter_(-1, order, before >= knobs.top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    return logits.softmax(dim=-1)
