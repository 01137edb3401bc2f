"""Refuses models whose weights are not finite, or so large that computing with them overflows."""

import math
from contextlib import ExitStack
from typing import TypeVar

import torch
from torch import Tensor, nn

from nanolm.errors import NOT_FINITE, ModelError
from nanolm.model.base import Model
from nanolm.model.classifier import Classifier
from nanolm.model.seq2seq import Seq2Seq

M = TypeVar("M", Model, Classifier, Seq2Seq)
LARGE = 30.0  # root mean square of a tensor; above it, a few tokens are run to detect overflow


def root_mean_square(tensor: Tensor, where: str) -> float:
    """The root mean square of weights, which must be finite, like the sum of their squares."""
    squares = torch.linalg.vector_norm(tensor).item() ** 2 if tensor.numel() else 0.0
    if not squares < torch.finfo(torch.float32).max:
        kind = "too large to compute with" if tensor.isfinite().all() else "not finite"
        raise ModelError(f"{where}: its values are {kind}; the model is damaged")
    return math.sqrt(squares / max(1, tensor.numel()))


def checked(model: M, large: str) -> M:
    """Return the model, or refuse it if it has `large` weights and its activations overflow. Norms
    turn overflow into zeros, so their inputs are checked as well as the outputs."""
    if not large:
        return model
    seen: list[Tensor] = []
    norms = [each for each in model.modules() if isinstance(each, nn.LayerNorm | nn.RMSNorm)]
    base = model.base if isinstance(model, Classifier) else model
    longest = min(base.config.context, 16)
    target = largest_rows(base.token_embedding, longest)
    with torch.no_grad(), ExitStack() as hooks:
        for norm in norms:
            hook = norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
            hooks.enter_context(hook)
        if isinstance(base, Seq2Seq):
            separate = base.config.source_vocab_size is not None
            source = largest_rows(base.source_embedding, longest) if separate else target
            seen.append(base(source, torch.ones_like(source, dtype=torch.bool), target))
        else:
            seen.append(base(target))
        if isinstance(model, Classifier):
            seen.append(model.score(seen[-1]))
    if not all(torch.linalg.vector_norm(x, dim=-1).square().isfinite().all() for x in seen):
        raise ModelError(f"{NOT_FINITE} ({large})")
    return model


def largest_rows(embedding: nn.Embedding, most: int) -> Tensor:
    """The ids of the tokens with the largest values in their embeddings, (1, time)."""
    largest = embedding.weight.abs().amax(dim=1)
    return largest.topk(min(len(largest), most)).indices[None]
