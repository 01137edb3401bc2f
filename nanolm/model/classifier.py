"""A classifier: a language model with a linear classification head on the pooled hidden states.

>>> config = ClassifierConfig(base=base_config, labels=("negative", "positive"), window=64)
>>> Classifier(config)(ids, lengths).shape  # (batch, labels)
"""

import torch
from torch import Tensor, nn

from nanolm.model.base import Model
from nanolm.model.build import build_model
from nanolm.model.config import ClassifierConfig, Pool


class Classifier(nn.Module):
    """Ids (batch, time), padded on the right, and lengths in; logits (batch, labels) out. Also
    accepts the output of the `frozen` layers, or the pooled vectors, instead of ids."""

    frozen = 0  # layers

    def __init__(self, config: ClassifierConfig, base: Model | None = None) -> None:
        """With `base`, uses its weights and removes its output layer."""
        super().__init__()
        self.config = config
        self.base = base if base is not None else build_model(config.base)
        self.base.head = nn.Identity()  # type: ignore[assignment]
        self.score = nn.Linear(config.base.dim, len(config.labels), bias=False)
        if not self.score.weight.is_meta:
            nn.init.normal_(self.score.weight, std=0.02)

    @property
    def device(self) -> torch.device:
        return self.base.device

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.score(self.features(ids, lengths))  # type: ignore[no-any-return]

    def hidden(self, x: Tensor) -> Tensor:
        """The vectors of all tokens, (batch, time, dim), from ids or from frozen layers' output."""
        if x.is_floating_point():
            return self.base.hidden_states_from(x, self.frozen)
        return self.base.hidden_states(x)

    def features(self, x: Tensor, lengths: Tensor) -> Tensor:
        """The input of `score`: (batch, dim)."""
        if x.is_floating_point() and x.dim() == 2:
            return x
        return self.pooled(self.hidden(x), lengths)

    def pooled(self, x: Tensor, lengths: Tensor) -> Tensor:
        return pooled(x, lengths, self.config.pool)

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def pooled(x: Tensor, lengths: Tensor, how: Pool) -> Tensor:
    """One vector per text, ignoring padding: (batch, time, dim) to (batch, dim)."""
    if how == "last":
        last = (lengths - 1)[:, None, None].expand(-1, 1, x.shape[2])  # (batch, 1, dim)
        return x.gather(1, last)[:, 0]
    outside = filling(x, lengths)[..., None]
    if how == "max":
        return x.masked_fill(outside, -torch.inf).amax(dim=1)
    return x.masked_fill(outside, 0).sum(dim=1) / lengths[:, None].to(x.dtype)


def prefix_pooled(x: Tensor, how: Pool) -> Tensor:
    """The same for every prefix of a text at once: (batch, time, dim) to (batch, time, dim)."""
    if how == "last":
        return x
    if how == "max":
        return x.cummax(dim=1).values
    return x.cumsum(dim=1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None].to(x.dtype)


def filling(x: Tensor, lengths: Tensor) -> Tensor:
    """A mask of the padding: (batch, time)."""
    return torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
