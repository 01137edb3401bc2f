"""Rounding to float8 inside other kernels, for float8 products (`float8.py`)."""
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def row_scale(largest):  # type: ignore[no-untyped-def]
    """The divisor of a row that maps its largest value to the largest float8."""
    return tl.maximum(largest, 1e-30) / 448.0


@triton.jit
def in_float8(part, scale):  # type: ignore[no-untyped-def]
    return tl.minimum(tl.maximum(part * (1 / scale), -448.0), 448.0).to(tl.float8e4nv)


@triton.jit  # type: ignore[untyped-decorator]
def round_again(  # type: ignore[no-untyped-def]
    x, low, scales, row, most, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Round a row that this program has just written; each thread reads its own values."""
    scale = row_scale(tl.max(most, 0))
    tl.store(scales + row, scale)
    for first in tl.static_range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        i, inside = row * WIDTH + column, column < WIDTH
        part = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(low + i, in_float8(part, scale), mask=inside)


def room_for_rounded(x: Tensor, rounding: bool) -> tuple[Tensor, Tensor]:
    """Allocate float8 values and a scale for each row of x, or return placeholders. They are
    attached to this tensor object, so a tensor derived from it has to be rounded again."""
    if not rounding:
        return x, x
    scales = x.new_empty(*x.shape[:-1], dtype=torch.float32)
    low = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    x.rounded = low, scales  # type: ignore[attr-defined]
    return low, scales
