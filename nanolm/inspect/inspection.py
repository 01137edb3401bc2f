"""Attention on a text, and the predictions of each layer.

>>> inspection = inspect_text(model, [0, 17, 4, 98])
>>> inspection.attention.shape  # (layers, heads, time, time)
"""

import contextlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanolm.errors import NOT_FINITE, ModelError, UsageError
from nanolm.model.base import Model
from nanolm.model.gpt import GPT

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Predictions:
    """For each position: the most likely next tokens, and how likely the actual one was."""

    ids: Ints  # (time, top)
    probabilities: Floats  # (time, top)
    actual: Floats  # (time - 1,), the probability of the actual token
    rank: Ints  # (time - 1,), rank of that token, from 1


@dataclass(frozen=True)
class Inspection:
    ids: list[int]
    attention: Floats  # (layers, heads, time, time): from each position to those before it
    layers: list[Predictions]  # after the embedding and each layer; empty for a classifier


def inspect_text(model: Model, ids: list[int], top: int = 6) -> Inspection:
    if not isinstance(model, GPT):
        raise UsageError("a recurrent model has no attention to inspect")
    weights: list[Tensor] = []
    layers = [logit_lens(model, x, ids, top) for x in residual_stream(model, ids, weights)]
    if not np.isfinite(layers[-1].probabilities).all():
        raise ModelError(NOT_FINITE)
    return Inspection(ids, torch.cat(weights).float().cpu().numpy(), layers)


@torch.inference_mode()
def residual_stream(gpt: GPT, ids: list[int], weights: list[Tensor] | None = None) -> list[Tensor]:
    """The vectors (time, dim) after the embedding and after each layer."""
    stream: list[Tensor] = []
    first = gpt.blocks[0].register_forward_pre_hook(lambda _, x: stream.append(x[0][0]))
    with gpt.eval_mode(), first, contextlib.ExitStack() as hooks:
        for block in gpt.blocks:
            hook = block.register_forward_hook(lambda _, inputs, y: stream.append(y[0]))
            hooks.enter_context(hook)
        gpt.hidden_states(torch.tensor([ids], device=gpt.device), attn_weights=weights)
    return stream


@torch.inference_mode()
def logit_lens(model: GPT, x: Tensor, ids: list[int], top: int) -> Predictions:
    """Apply the final norm and the head to a layer's vectors (time, dim)."""
    probabilities = model.head(model.norm(x)).float().softmax(dim=1)  # (time, vocabulary)
    best, best_ids = probabilities.topk(min(top, probabilities.shape[1]), dim=1)
    next_ids = torch.tensor(ids[1:], device=x.device)[:, None]
    actual = probabilities[:-1].gather(1, next_ids)  # (time - 1, 1)
    rank = 1 + (probabilities[:-1] > actual).sum(dim=1)
    return Predictions(*(each.cpu().numpy() for each in (best_ids, best, actual[:, 0], rank)))
