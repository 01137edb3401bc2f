"""LayerNorm and RMSNorm, fused with the residual addition before them."""
# ruff: noqa: N803

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanolm.model.fast.fused import launch
from nanolm.model.fast.fused.launch import STAGES, width
from nanolm.model.fast.fused.rounding import in_float8, room_for_rounded, row_scale


@triton.jit  # type: ignore[untyped-decorator]
def empty(sums, COUNT: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zero the sums of weight gradients for the backward kernel; in the forward pass it is free."""
    lane = tl.arange(0, LANES)
    tl.store(sums + lane, tl.zeros((LANES,), tl.float32), mask=lane < COUNT)


def emptied_sums(ctx: Any) -> Tensor:
    """The buffer zeroed in the forward pass, which can be used only once."""
    sums: Tensor = ctx.sums
    ctx.sums = None
    if sums is None:
        raise RuntimeError("cannot run backward through a fused kernel twice")
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def norm_kernel(  # type: ignore[no-untyped-def]
    x,  # (rows, width)
    y, weight, bias,
    total,  # x + y
    out,
    low, scales,  # of out
    sums,  # (2 * width,), for the backward pass
    rows, epsilon, WIDTH: tl.constexpr,
    LAYER: tl.constexpr,  # LayerNorm, else RMSNorm
    ADD: tl.constexpr, BIAS: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """A few rows per program."""
    if tl.program_id(0) == 0:
        empty(sums, 2 * WIDTH, 2 * BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    i = tl.arange(0, BLOCK)
    place = row.to(tl.int64) * WIDTH + i[None, :]
    inside = (row < rows) & (i < WIDTH)[None, :]
    part = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        part += tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
        rounded = part.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        part = rounded.to(tl.float32)  # as the backward kernel will read it
    gain = tl.load(weight + i, mask=i < WIDTH, other=0.0).to(tl.float32)[None, :]
    if LAYER:
        part = tl.where(inside, part - tl.sum(part, 1)[:, None] / WIDTH, 0.0)
    part = part / tl.sqrt(tl.sum(part * part, 1)[:, None] / WIDTH + epsilon) * gain
    if BIAS:
        part += tl.load(bias + i, mask=i < WIDTH, other=0.0).to(tl.float32)[None, :]
    tl.store(out + place, part, mask=inside)
    if ROUND:
        scale = row_scale(tl.max(tl.abs(part), 1))[:, None]
        tl.store(scales + row, scale, mask=row < rows)
        tl.store(low + place, in_float8(part, scale), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def norm_backward_kernel(  # type: ignore[no-untyped-def]
    x,  # the input of the norm, (rows, width)
    weight,
    grad,  # of the norm
    later,  # the gradient of x from the residual path, added to the result
    dx,
    low, scales,  # of dx
    sums,  # of the gradients of weight and bias, (2, width), float32, initially zero
    rows, epsilon, WIDTH: tl.constexpr, LAYER: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    ROUND: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program for many rows, a few at a time."""
    i = tl.arange(0, BLOCK)
    gain = tl.load(weight + i, mask=i < WIDTH, other=0.0).to(tl.float32)[None, :]
    weight_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    bias_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, rows, step, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        place = row.to(tl.int64) * WIDTH + i[None, :]
        inside = (row < rows) & (i < WIDTH)[None, :]
        part = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            more = tl.load(later + place, mask=inside, other=0.0).to(tl.float32)
        if LAYER:
            part = tl.where(inside, part - tl.sum(part, 1)[:, None] / WIDTH, 0.0)
        scaled = d * gain
        along = tl.sum(scaled * part, 1)[:, None] / WIDTH
        scale = 1 / tl.sqrt(tl.sum(part * part, 1)[:, None] / WIDTH + epsilon)
        weight_sum += d * part * scale
        if BIAS:
            bias_sum += d
        if LAYER:
            scaled -= tl.sum(scaled, 1)[:, None] / WIDTH
        result = (scaled - part * (along * scale * scale)) * scale
        if ADD:
            result += more
        tl.store(dx + place, result, mask=inside)
        if ROUND:
            size = row_scale(tl.max(tl.abs(result), 1))[:, None]
            tl.store(scales + row, size, mask=row < rows)
            tl.store(low + place, in_float8(result, size), mask=inside)
    tl.atomic_add(sums + i, tl.sum(weight_sum, 0), mask=i < WIDTH)
    if BIAS:
        tl.atomic_add(sums + WIDTH + i, tl.sum(bias_sum, 0), mask=i < WIDTH)


def shape_of_norm(ctx: Any, dim: int, add: bool) -> dict[str, Any]:
    """Compile-time constants of the norm kernels."""
    kind = {"LAYER": ctx.layer, "BIAS": ctx.bias, "ROUND": ctx.rounding}
    return {"WIDTH": dim, "BLOCK": width(dim), "ADD": add, **kind}


class AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        layer: bool,
        rounding: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # after the last norm, the sum is unused
        ctx.epsilon, ctx.layer, ctx.rounding = epsilon, layer, rounding
        ctx.add, ctx.bias = y is not None, bias is not None
        x, dim = x.contiguous(), x.shape[-1]
        rows = x.numel() // dim
        total = x if y is None else torch.empty_like(x)
        out, ctx.sums = torch.empty_like(x), x.new_empty(2, dim, dtype=torch.float32)
        shape = shape_of_norm(ctx, dim, y is not None)
        together, warps = 2, max(2, min(16, width(dim) // 512))
        # Without y or bias, the kernel still needs a pointer.
        inputs = (x, x if y is None else y.contiguous(), weight, weight if bias is None else bias)
        norm_kernel[(triton.cdiv(rows, together),)](
            *(*inputs, total, out, *room_for_rounded(out, rounding), ctx.sums, rows, epsilon),
            **(shape | {"ROWS": together, "num_warps": warps}),
        )
        ctx.save_for_backward(total, weight)
        return total, out

    @staticmethod
    def backward(ctx: Any, later: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:  # the norm is unused
            return later, later if ctx.add else None, None, None, None, None, None
        x, weight = ctx.saved_tensors
        grad, dim = grad.contiguous(), x.shape[-1]
        rows = x.numel() // dim
        shape = shape_of_norm(ctx, dim, later is not None)
        together, warps = max(1, 4096 // width(dim)), max(2, min(16, width(dim) // 128))
        dx, sums = torch.empty_like(x), emptied_sums(ctx)
        low, later = room_for_rounded(dx, ctx.rounding), grad if later is None else later
        norm_backward_kernel[(min(launch.PROCESSORS * 2, triton.cdiv(rows, together)),)](
            *(x, weight, grad, later.contiguous(), dx, *low, sums, rows, ctx.epsilon),
            **(shape | {"ROWS": together, "num_warps": warps}),
        )
        dweight, dbias = sums.to(weight.dtype).unbind()
        return dx, dx if ctx.add else None, dweight, dbias if ctx.bias else None, None, None, None


def add_norm(
    x: Tensor, y: Tensor | None, *rest: Any, rounding: bool = False
) -> tuple[Tensor, Tensor]:
    """x + y (or x if y is None) and its norm, both in the precision of `x`. `rest` is the weight,
    the bias or None, epsilon, and whether it is a LayerNorm rather than an RMSNorm."""
    return AddNorm.apply(x, y, *rest, rounding)  # type: ignore[no-any-return, no-untyped-call]
