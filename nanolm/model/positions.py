"""Computed positions: sinusoidal, rotary (RoPE) and ALiBi.

    >>> sinusoidal_table(3, 4).shape
    torch.Size([3, 4])

Sinusoidal positions add a pattern of waves to each token. Rotary positions rotate queries and keys,
so that their product depends on their distance. ALiBi (Press et al., 2022) subtracts a penalty from
attention scores that grows with the distance, at a different rate in each head.
"""

import math

import torch
from torch import Tensor

from nanolm.model.config import RopeScaling, Seq2SeqConfig, TransformerConfig

Rotation = tuple[Tensor, Tensor]  # cosines and sines, (time, head_dim) each
TABLE_STEP = 1024  # tables grow by this many positions at a time


class PositionTables:
    """The tables of a model's computed positions, built on demand."""

    def __init__(self, config: TransformerConfig) -> None:
        self.config = config
        self.tables: tuple[Tensor, ...] = ()

    def at_least(self, length: int, device: torch.device) -> tuple[Tensor, ...]:
        """Tables for at least the first `length` positions."""
        if not self.tables or length > len(self.tables[0]) or self.tables[0].device != device:
            length = -(-length // TABLE_STEP) * TABLE_STEP
            with torch.inference_mode(False):  # may be built while sampling and used in training
                if self.config.positions == "rope":
                    tables: tuple[Tensor, ...] = rotation_table(length, self.config)
                else:
                    halves = isinstance(self.config, Seq2SeqConfig)
                    tables = (sinusoidal_table(length, self.config.dim, halves),)
                self.tables = tuple(table.to(device) for table in tables)
        return self.tables

    def rotation(
        self, positions: slice | Tensor, length: int, device: torch.device
    ) -> Rotation | None:
        """The rotation at `positions`, all below `length`; None if positions are not rotary."""
        if self.config.positions != "rope":
            return None
        cosines, sines = (table[positions] for table in self.at_least(length, device))
        if isinstance(positions, Tensor):  # (batch, 1, time, head_dim): the same for all heads
            return cosines[:, None], sines[:, None]
        return cosines, sines


def sinusoidal_table(length: int, dim: int, halves: bool = False) -> Tensor:
    """PE(t, 2i) = sin(t / 10000^(2i/dim)), PE(t, 2i+1) = cos of the same: (length, dim). With
    `halves`, first all sines, then all cosines, as in MarianMT."""
    positions = torch.arange(length, dtype=torch.float64)[:, None]  # (length, 1)
    frequencies = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = positions * frequencies  # (length, dim / 2)
    if halves:
        return torch.cat([angles.sin(), angles.cos()[:, : dim // 2]], dim=-1).float()
    waves = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)  # interleaved
    return waves[:, :dim].float()


def rotation_table(length: int, config: TransformerConfig) -> Rotation:
    """Cosine and sine of the rotation angle of each component at each position."""
    dim = config.rotary_dims or config.head_dim
    pairs = torch.arange(0, dim, 2, dtype=torch.float32)
    frequencies = config.rope_base ** (-pairs / dim)  # radians per position
    gain = 1.0
    if config.rope_scaling:
        frequencies = stretched(frequencies, config.rope_base, config.rope_scaling)
        gain = config.rope_scaling.gain
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    angles = torch.cat([angles, angles], dim=-1)  # (length, dim)
    return angles.cos() * gain, angles.sin() * gain


def stretched(frequencies: Tensor, base: float, scaling: RopeScaling) -> Tensor:
    """Slower rotations for a longer context."""
    slowed = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slowed
    turns = scaling.original_context * frequencies / (2 * math.pi)
    if scaling.kind == "llama3":  # interpolates by number of turns
        kept = (turns - scaling.slow) / (scaling.fast - scaling.slow)
    else:  # YaRN interpolates by component, from the last fast one to the first slow one
        pairs = len(frequencies)

        def component(turns: float) -> float:
            """The component that makes this many turns within the original context."""
            return pairs * math.log(scaling.original_context / (turns * 2 * math.pi), base)

        first = max(math.floor(component(scaling.fast)), 0)
        last = min(math.ceil(component(scaling.slow)), 2 * pairs - 1)
        kept = 1 - (torch.arange(pairs) - first) / max(last - first, 0.001)
    kept = kept.clamp(0, 1)
    return kept * frequencies + (1 - kept) * slowed


def alibi_slopes(heads: int, device: torch.device | None = None) -> Tensor:
    """2^(-8 i / heads) for head i, starting at 1. If the number of heads is not a power of two: the
    slopes of the next lower power, then every other slope of the next higher one."""
    lower = 1 << (heads.bit_length() - 1)
    slopes = torch.arange(1, lower + 1, device=device) / lower
    between = torch.arange(1, 2 * lower, 2, device=device)[: heads - lower] / (2 * lower)
    return torch.exp2(-8 * torch.cat([slopes, between]))


def distances(positions: slice | Tensor, kv_length: int, device: torch.device) -> Tensor:
    """How far each key is behind each query: (batch or 1, 1, time, kv_length)."""
    if isinstance(positions, slice):
        positions = torch.arange(positions.start, positions.stop, device=device)[None]
    return positions[:, None, :, None] - torch.arange(kv_length, device=device)


def position_mask(
    config: TransformerConfig, positions: slice | Tensor, kv_length: int, like: Tensor
) -> Tensor | None:
    """The mask of ALiBi or of a sliding window; None if there is neither, or no key is outside."""
    if config.positions == "alibi":
        return alibi_mask(positions, kv_length, config.heads, like)
    if (window := config.sliding_window) is None or kv_length <= window:
        return None
    behind = distances(positions, kv_length, like.device)
    return (behind >= 0) & (behind < window)


def alibi_mask(positions: slice | Tensor, kv_length: int, heads: int, like: Tensor) -> Tensor:
    """-slope * distance where a query sees a key, else -inf: (batch or 1, heads, time, kv_length),
    to be added to the scores."""
    behind = distances(positions, kv_length, like.device)
    biases = -alibi_slopes(heads, like.device)[:, None, None] * behind
    return biases.masked_fill(behind < 0, -torch.inf).to(like.dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """RoPE: rotate components i and i + dim / 2 by the angle of their position. `dim` is head_dim,
    unless the tables are narrower; then the rest is unchanged."""
    cosines, sines = rotation
    dim = cosines.shape[-1]
    x, rest = x[..., :dim], x[..., dim:]
    left, right = x.chunk(2, dim=-1)  # (batch, heads, time, dim / 2) each
    partner = torch.cat([-right, left], dim=-1)  # (batch, heads, time, dim)
    rotated = (x * cosines + partner * sines).to(x.dtype)
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated
