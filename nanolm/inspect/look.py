"""What a model does with a text: what it foretells, where it looks, what each layer would say.

>>> seen = look(model, [0, 17, 4, 98])
>>> seen.attention.shape  # (layers, heads, time, time)
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanolm.errors import UsageError
from nanolm.model.base import Model
from nanolm.model.gpt import GPT

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Foretold:
    """At each place: the likeliest tokens; how likely, and of which rank, the one is that came."""

    ids: Ints  # (time, top)
    chances: Floats  # (time, top)
    came: Floats  # (time - 1,)
    rank: Ints  # (time - 1,), from 1


@dataclass(frozen=True)
class Seen:
    """Of one text."""

    ids: list[int]
    attention: Floats  # (layers, heads, time, time): how much each place looks at each before it
    layers: list[Foretold]  # what would be foretold after the embedding and after each layer

    @property
    def foretold(self) -> Foretold:
        """By the model itself."""
        return self.layers[-1]


def look(model: Model, ids: list[int], top: int = 6) -> Seen:
    if not isinstance(model, GPT):
        raise UsageError("a recurrent model has no attention to look at")
    weights: list[Tensor] = []
    given = streams(model, ids, weights)
    attention = torch.cat(weights).float().cpu().numpy()
    return Seen(ids, attention, [foretold(model, x, ids, top) for x in given])


@torch.inference_mode()
def streams(model: GPT, ids: list[int], weights: list[Tensor] | None = None) -> list[Tensor]:
    """The vectors (time, dim) that the first layer is given, and those after each layer."""
    given: list[Tensor] = []
    handles = [
        block.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0][0]))
        for block in model.blocks
    ]
    last = model.blocks[-1]
    handles.append(last.register_forward_hook(lambda _, arguments, y: given.append(y[0])))
    try:
        with model.eval_mode():
            model.hidden_states(torch.tensor([ids], device=model.device), weights=weights)
    finally:
        for handle in handles:
            handle.remove()
    return given


@torch.inference_mode()
def foretold(model: GPT, x: Tensor, ids: list[int], top: int) -> Foretold:
    """What the last norm and the last layer make of the vectors at each place, (time, dim)."""
    chances = model.head(model.norm(x)).float().softmax(dim=1)  # (time, vocabulary)
    best, places = chances.topk(min(top, chances.shape[1]), dim=1)
    came = torch.tensor(ids[1:], device=x.device)[:, None]
    real = chances[:-1].gather(1, came)  # (time - 1, 1)
    rank = 1 + (chances[:-1] > real).sum(dim=1)
    return Foretold(*(each.cpu().numpy() for each in (places, best, real[:, 0], rank)))
