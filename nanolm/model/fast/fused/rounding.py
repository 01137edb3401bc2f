"""Rounding to float8 while the numbers are at hand, for products in it (`float8.py`)."""
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def row_scale(largest):  # type: ignore[no-untyped-def]
    """What a row is divided by, so that its largest number becomes the largest there is."""
    return tl.maximum(largest, 1e-30) / 448.0


@triton.jit
def in_float8(part, scale):  # type: ignore[no-untyped-def]
    return tl.minimum(tl.maximum(part * (1 / scale), -448.0), 448.0).to(tl.float8e4nv)


@triton.jit  # type: ignore[untyped-decorator]
def round_again(  # type: ignore[no-untyped-def]
    x, low, scales, row, most, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """A row that this program has just written; each thread reads what it wrote itself."""
    scale = row_scale(tl.max(most, 0))
    tl.store(scales + row, scale)
    for first in tl.static_range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        i, inside = row * WIDTH + column, column < WIDTH
        part = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(low + i, in_float8(part, scale), mask=inside)


def room_for_rounded(x: Tensor, rounding: bool) -> tuple[Tensor, Tensor]:
    """For the same numbers in float8 and a scale for each row, or something in their place. Whoever
    gets this very tensor need not round it; whoever gets another made of it, must."""
    if not rounding:
        return x, x
    scales = x.new_empty(*x.shape[:-1], dtype=torch.float32)
    low = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    x.rounded = low, scales  # type: ignore[attr-defined]
    return low, scales
