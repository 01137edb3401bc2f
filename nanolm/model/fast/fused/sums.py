"""Gradients of weights that the programs of a kernel add up.

A kernel of the way forward makes their room empty, where that costs nothing.
"""
# ruff: noqa: N803

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def empty(sums, COUNT: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """For a kernel of the way back to add to; here it costs nothing."""
    lane = tl.arange(0, LANES)
    tl.store(sums + lane, tl.zeros((LANES,), tl.float32), mask=lane < COUNT)


def room_for_sums(x: Tensor, dim: int) -> Tensor:
    """Of two gradients of weights; a kernel of the way forward empties it."""
    return x.new_empty(2, dim, dtype=torch.float32)


def emptied_sums(ctx: Any) -> Tensor:
    """What the way forward has made room for: once, for then it is full."""
    sums: Tensor = ctx.sums
    ctx.sums = None
    if sums is None:
        raise RuntimeError("the way back through a kernel can be gone once")
    return sums
