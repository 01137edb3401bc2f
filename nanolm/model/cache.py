"""The key/value cache: what attention has already computed for the tokens behind."""

import torch
from torch import Tensor

from nanolm.model.config import GPTConfig


class Cache:
    """Keys and values of up to `length` tokens for every layer, allocated once."""

    def __init__(self, config: GPTConfig, batch: int, length: int, like: Tensor) -> None:
        shape = (config.layers, batch, config.kv_heads, length, config.head_dim)
        self.keys = like.new_zeros(shape)
        self.values = like.new_zeros(shape)
        self.length = 0  # tokens behind; the model moves it on after its last layer

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put the new keys and values behind the old ones; all of them so far."""
        end = self.length + keys.shape[2]
        self.keys[layer, :, :, self.length : end] = keys
        self.values[layer, :, :, self.length : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def forget(self) -> None:
        self.length = 0


def look_back(queries: int, keys: int, device: torch.device) -> Tensor:
    """Which of all keys each of the last `queries` may see: itself and what is behind it."""
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return visible.tril(keys - queries)
