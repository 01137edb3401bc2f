"""The KV cache: keys and values that attention has computed for earlier tokens."""

import math
from typing import Self

import numpy as np
import torch
from torch import Tensor

from nanolm.model.config import TransformerConfig


class KVCache:
    """Keys and values of up to `length` tokens per row for every layer, allocated once. Rows may
    differ in length, and a step may use only the first few (`use`). With `fixed`, every step uses
    tensors of the same size and address, as CUDA graphs require."""

    def __init__(
        self, config: TransformerConfig, batch: int, length: int, like: Tensor, fixed: bool = False
    ) -> None:
        shape = (config.layers, batch, config.kv_heads, length, config.head_dim)
        self.keys, self.values = (zeros(shape, like.dtype, like.device) for _ in range(2))
        self.fixed = fixed
        self.lengths = torch.zeros(batch, dtype=torch.long, device=like.device)  # in tokens
        self.active = torch.ones_like(self.lengths)  # 0: the row does not advance
        self.host_lengths = [0] * batch  # the lengths on the CPU, to avoid a device sync
        self.use(batch)

    @staticmethod
    def size(config: TransformerConfig, length: int) -> int:
        """The number of elements for `length` tokens of one row: keys and values."""
        return 2 * config.layers * config.kv_heads * config.head_dim * length

    def use(self, rows: int) -> None:
        """Use only the first `rows` rows from now on."""
        self.rows = rows
        if not self.fixed:
            self.longest = max(self.host_lengths[:rows])
            self.even = min(self.host_lengths[:rows]) == self.longest

    def next_positions(self, time: int) -> slice | Tensor:
        """Positions of the next `time` tokens: one slice for all rows, or (batch, time)."""
        if not self.fixed and self.even:
            return slice(self.longest, self.longest + time)
        lengths = self.lengths[: self.rows, None]
        return lengths if time == 1 else lengths + torch.arange(time, device=lengths.device)

    def mask(self, positions: slice | Tensor) -> Tensor | None:
        """The keys that each new token sees, (batch, 1, time, kv_length); None if causal."""
        if isinstance(positions, slice):
            return None
        keys = torch.arange(self.kv_length(positions), device=positions.device)
        return keys <= positions[:, None, :, None]

    def kv_length(self, positions: slice | Tensor) -> int:
        """The number of keys and values that these tokens attend to."""
        if isinstance(positions, slice):
            return int(positions.stop)
        return self.keys.shape[3] if self.fixed else self.longest + positions.shape[1]

    def update(
        self, layer: int, keys: Tensor, values: Tensor, positions: slice | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values, (batch, kv_heads, time, head_dim). Returns all so far."""
        every = (self.keys[layer, : self.rows], self.values[layer, : self.rows])
        for kept, new in zip(every, (keys, values), strict=True):
            if isinstance(positions, slice):
                kept[:, :, positions] = new
            else:
                kept.scatter_(2, positions[:, None, :, None].expand_as(new), new)
        length = self.kv_length(positions)
        return every[0][:, :, :length], every[1][:, :, :length]

    def advance(self, time: int) -> None:
        """Advance all active rows by `time` tokens."""
        active = self.active[: self.rows]
        self.lengths[: self.rows] += active if time == 1 else time * active
        if not self.fixed:  # if fixed, a graph replays the lines above but not these
            for row in range(self.rows):
                self.host_lengths[row] += time
            self.longest += time

    def put(self, rows: list[int], other: Self, lengths: list[int]) -> None:
        """Copy the first `lengths` tokens of each row of `other` into `rows`."""
        self.keys[:, rows, :, : other.longest] = other.keys
        self.values[:, rows, :, : other.longest] = other.values
        self.lengths[rows] = torch.tensor(lengths, device=self.lengths.device)
        self.active[rows] = 1
        for row, length in zip(rows, lengths, strict=True):
            self.host_lengths[row] = length
        self.use(self.rows)

    def select(self, rows: Tensor) -> None:
        """Replace row i by row rows[i], which is equally long."""
        places = slice(None if self.fixed else self.longest)
        for whole in (self.keys, self.values):
            whole[:, : len(rows), :, places] = whole[:, rows, :, places]
        self.lengths[: len(rows)] = self.lengths[rows]

    def move(self, source: int, target: int) -> None:
        """Copy one row to another."""
        places = slice(None if self.fixed else self.host_lengths[source])
        for whole in (self.keys, self.values):
            whole[:, target, :, places] = whole[:, source, :, places]
        for each in (self.lengths, self.active):
            each[target] = each[source]
        self.host_lengths[target] = self.host_lengths[source]

    def forget(self, row: int) -> None:
        """Empty a row and deactivate it."""
        self.lengths[row] = self.active[row] = self.host_lengths[row] = 0


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU, memory pages are allocated only when they are written to."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """The keys that each of the last `queries` tokens may see: itself and earlier ones."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
