"""The nonlinearities of feed-forward layers."""
# ruff: noqa: N803

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanolm.model.fast.fused.launch import for_row, warps, width
from nanolm.model.fast.fused.rounding import in_float8, room_for_rounded, round_again, row_scale

GELU = 2 * math.sqrt(2 / math.pi)  # of the tanh formula, as tanh(x) = 2 * sigmoid(2 * x) - 1


@triton.jit  # type: ignore[untyped-decorator]
def swiglu_kernel(  # type: ignore[no-untyped-def]
    x, out, low, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr
):
    """out (rows, hidden) = silu(gate) * up, with x (rows, 2 * hidden) the gate, then up."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    x += row * 2 * WIDTH
    gate = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * WIDTH + i, result, mask=inside)
    if ROUND:
        scale = row_scale(tl.max(tl.abs(result), 0))
        tl.store(scales + row, scale)
        tl.store(low + row * WIDTH + i, in_float8(result, scale), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    x, grad, dx, low, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr
):
    """dx (rows, 2 * hidden) from grad (rows, hidden)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    x += row * 2 * WIDTH
    dx += row * 2 * WIDTH
    gate = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad + row * WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    to_gate, to_up = d * up * share * (1 + gate * (1 - share)), d * gate * share
    tl.store(dx + i, to_gate, mask=inside)
    tl.store(dx + WIDTH + i, to_up, mask=inside)
    if ROUND:
        scale = row_scale(tl.max(tl.maximum(tl.abs(to_gate), tl.abs(to_up)), 0))
        tl.store(scales + row, scale)
        low += row * 2 * WIDTH
        tl.store(low + i, in_float8(to_gate, scale), mask=inside)
        tl.store(low + WIDTH + i, in_float8(to_up, scale), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def gelu_kernel(  # type: ignore[no-untyped-def]
    x, out, low, scales, FACTOR: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SPAN: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """One block of a row per program, or a whole row block by block."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros((BLOCK,), tl.float32)
    for first in tl.static_range(0, SPAN, BLOCK):
        column = tl.program_id(1) * BLOCK + first + tl.arange(0, BLOCK)
        i, inside = row * WIDTH + column, column < WIDTH
        part = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
        result = part * tl.sigmoid(FACTOR * (part + 0.044715 * part * part * part))
        tl.store(out + i, result, mask=inside)
        most = tl.maximum(most, tl.abs(result))
    if ROUND:
        round_again(out, low, scales, row, most, WIDTH, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def gelu_backward_kernel(  # type: ignore[no-untyped-def]
    x, grad, dx, low, scales, FACTOR: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SPAN: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros((BLOCK,), tl.float32)
    for first in tl.static_range(0, SPAN, BLOCK):
        column = tl.program_id(1) * BLOCK + first + tl.arange(0, BLOCK)
        i, inside = row * WIDTH + column, column < WIDTH
        part = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(grad + i, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(FACTOR * (part + 0.044715 * part * part * part))
        slope = FACTOR * (1 + 3 * 0.044715 * part * part)
        result = d * share * (1 + part * (1 - share) * slope)
        tl.store(dx + i, result, mask=inside)
        most = tl.maximum(most, tl.abs(result))
    if ROUND:
        round_again(dx, low, scales, row, most, WIDTH, BLOCK)


def shape_of_rows(x: Tensor, whole: bool) -> tuple[tuple[int, int], dict[str, Any]]:
    """The launch grid for all rows of x, in blocks or as whole rows, and compile-time constants."""
    wide = x.shape[-1]
    fits = min(1024, width(wide), max(256, wide & -wide))  # without a remainder if possible
    block = width(wide) if whole else fits
    shape = {"WIDTH": wide, "BLOCK": block, "ROUND": whole}
    shape["num_warps"] = for_row(block) if whole else warps(block)
    return (x.numel() // wide, triton.cdiv(wide, block)), shape


def shape_of_gelu(out: Tensor, whole: bool) -> tuple[tuple[int, int], dict[str, Any]]:
    grid, shape = shape_of_rows(out, False)
    span = shape["WIDTH"] if whole else shape["BLOCK"]
    shape |= {"FACTOR": GELU, "SPAN": span, "ROUND": whole}
    return (grid[0], 1 if whole else grid[1]), shape


class Nonlinearity(NamedTuple):
    forward: Any  # kernels
    backward: Any
    shape_of: Any  # the launch parameters, from the output
    inputs: int  # per output


SWIGLU = Nonlinearity(swiglu_kernel, swiglu_backward_kernel, shape_of_rows, 2)
GELU_TANH = Nonlinearity(gelu_kernel, gelu_backward_kernel, shape_of_gelu, 1)


class Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: Nonlinearity, rounding: bool) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.kind, ctx.rounding = kind, rounding
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // kind.inputs)
        grid, shape = kind.shape_of(out, rounding)
        kind.forward[grid](x, out, *room_for_rounded(out, rounding), **shape)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        grid, shape = ctx.kind.shape_of(grad, ctx.rounding)
        low = room_for_rounded(dx, ctx.rounding)
        ctx.kind.backward[grid](x, grad.contiguous(), dx, *low, **shape)
        return dx, None, None


def swiglu(x: Tensor, rounding: bool = False) -> Tensor:
    """silu(gate) * up: (..., 2 * hidden) in, the gate first, (..., hidden) out."""
    return Activation.apply(x, SWIGLU, rounding)  # type: ignore[no-any-return, no-untyped-call]


def gelu_tanh(x: Tensor, rounding: bool = False) -> Tensor:
    return Activation.apply(x, GELU_TANH, rounding)  # type: ignore[no-any-return, no-untyped-call]
