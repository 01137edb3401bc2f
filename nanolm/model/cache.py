"""The key/value cache: what attention has already computed for the tokens behind."""

import torch
from torch import Tensor

from nanolm.model.config import ModelConfig


class Cache:
    """Keys and values of up to `context` tokens for every layer, allocated once."""

    def __init__(self, config: ModelConfig, batch: int, like: Tensor) -> None:
        shape = (config.layers, batch, config.heads, config.context, config.head_dim)
        self.keys = like.new_zeros(shape)
        self.values = like.new_zeros(shape)
        self.length = 0  # tokens behind; the model moves it on after its last layer

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put the new keys and values behind the old ones; all of them so far."""
        end = self.length + keys.shape[2]
        self.keys[layer, :, :, self.length : end] = keys
        self.values[layer, :, :, self.length : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def mask(self, time: int) -> Tensor | None:
        """Which of all keys each of `time` new queries may see; None for one query: all."""
        if time == 1:
            return None
        visible = torch.ones(time, self.length + time, dtype=torch.bool, device=self.keys.device)
        return visible.tril(self.length)
