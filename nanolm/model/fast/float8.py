"""Matrix products in float8, twice as fast on some GPUs (compute capability 8.9 and up).

    >>> speed_up(model, kernels=float8)  # instead of `fused`

Each row of the inputs and each weight matrix is scaled to the range of float8, inside the kernels
of `fused` where possible. Weight gradients use bfloat16, because they add up over all tokens.
Layers whose sides are not multiples of 16 stay in bfloat16.
"""
# ruff: noqa: N803

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from nanolm.model.fast import fused
from nanolm.model.fast.fused.launch import for_row, width
from nanolm.model.fast.fused.matrices import padded, weight_gradients
from nanolm.model.fast.fused.rounding import in_float8, room_for_rounded, row_scale

embedding, qk_norm_rope = fused.embedding, fused.qk_norm_rope
add_norm = partial(fused.add_norm, rounding=True)
gelu_tanh = partial(fused.gelu_tanh, rounding=True)
split = partial(fused.split, rounding=True)
swiglu = partial(fused.swiglu, rounding=True)

TILE = 64
STEEP = 2.0**15  # scale of logit gradients, which are from -1 to 1; float8_e5m2 reaches 57,344


def available() -> bool:
    return fused.available() and torch.cuda.get_device_capability() >= (8, 9)


class Rounded(NamedTuple):
    """A weight matrix in float8, (outputs, inputs), and its transpose, with one scale."""

    weight: Tensor
    sideways: Tensor
    scale: Tensor
    scales: Tensor  # the same for every row


@triton.jit  # type: ignore[untyped-decorator]
def weight_kernel(  # type: ignore[no-untyped-def]
    weight, largest, low, sideways, scale, scales, rows, columns, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]
    inside = (row < rows) & (column < columns)
    part = tl.load(weight + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    size = row_scale(tl.load(largest))
    tl.store(low + row * columns + column, in_float8(part, size), mask=inside)
    # Load again: Triton stores bytes in the wrong places if a block of them is transposed.
    turned = tl.load(weight + row.T * columns + column.T, mask=inside.T, other=0.0).to(tl.float32)
    tl.store(sideways + column.T * rows + row.T, in_float8(turned, size), mask=inside.T)
    one = tl.zeros((TILE, 1), tl.float32) + size
    if tl.program_id(1) == 0:
        tl.store(scales + row, one, mask=row < rows)
    if tl.program_id(0) == 0:
        other = tl.zeros((1, TILE), tl.float32) + size
        tl.store(scales + column, other, mask=column < columns)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, size)


@triton.jit  # type: ignore[untyped-decorator]
def rows_kernel(x, low, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row per program."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    part = tl.load(x + row * WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    scale = row_scale(tl.max(tl.abs(part), 0))
    tl.store(scales + row, scale)
    tl.store(low + row * WIDTH + i, in_float8(part, scale), mask=i < WIDTH)


@torch.no_grad()
def rounded_weights(weights: list[Tensor], kept: list[Rounded | None]) -> list[Rounded]:
    """Round the current weights, reusing the memory of `kept`."""
    found, norms = [], torch._foreach_norm(weights, torch.inf)
    for weight, largest, place in zip(weights, norms, kept, strict=True):
        rows, columns = weight.shape
        if place is None:
            low = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
            scales = weight.new_empty(max(rows, columns), dtype=torch.float32)
            place = Rounded(low, low.new_empty(columns, rows), scales.new_empty(()), scales)
        grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))
        weight_kernel[grid](weight, largest, *place, rows, columns, TILE=TILE)
        found.append(place)
    return found


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as (rows, width) in float8 and (rows, 1) scales: from the kernel that made x, or now."""
    if "rounded" not in x.__dict__:
        x, wide = x.contiguous(), x.shape[-1]
        shape = {"WIDTH": wide, "BLOCK": width(wide), "num_warps": for_row(width(wide))}
        rows_kernel[(x.numel() // wide,)](x, *room_for_rounded(x, True), **shape)
    low, scales = x.__dict__.pop("rounded")
    return low.flatten(0, -2), scales.view(-1, 1)


def product(
    x: Tensor, weight: Tensor, *scales: Tensor, exact: bool = False, out: Tensor | None = None
) -> Tensor:
    """x @ weight.T, with one scale for each tensor or one for each row. Unless `exact`, sums have
    fewer bits than float32. This is enough in the forward pass, but in the backward pass it would
    make the loss 1.3% worse."""
    kind = {"out_dtype": torch.bfloat16, "use_fast_accum": not exact}
    return torch._scaled_mm(x, weight.T, *scales, **kind, out=out)  # type: ignore


class Float8Product(torch.autograd.Function):
    """x @ weight.T + bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, low: Rounded) -> Tensor:
        ctx.save_for_backward(x)
        ctx.low, ctx.bias = low, bias is not None
        rows, scales = rounded_rows(x)
        y = product(rows, low.weight, scales, low.scales[None, : len(weight)])
        if bias is not None:
            y += bias.to(y.dtype)
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        rows, scales = rounded_rows(grad)
        columns = ctx.low.scales[None, : x.shape[-1]]
        dx = product(rows, ctx.low.sideways, scales, columns, exact=True)
        return dx.view_as(x), *weight_gradients(x, grad, ctx.bias), None


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """`layer(x)`, in float8 if possible."""
    low = getattr(layer, "rounded", None)
    if low is None or x.dtype != torch.bfloat16:
        return fused.linear(layer, x)
    return Float8Product.apply(x, layer.weight, layer.bias, low)  # type: ignore[no-any-return, no-untyped-call]


def refresh(layers: list[nn.Linear], dtype: torch.dtype) -> None:
    """Round the current weights of the layers."""
    able = [layer for layer in layers if not any(side % 16 for side in layer.weight.shape)]
    if len(able) < len(layers):
        fused.refresh([layer for layer in layers if layer not in able], dtype)
    kept = [getattr(layer, "rounded", None) for layer in able]
    found = rounded_weights([layer.weight for layer in able], kept)
    for layer, low in zip(able, found, strict=True):
        layer.rounded = low  # type: ignore[assignment]


class Scores:
    """The matrix products of the last layer: logits = x @ weight.T, and back."""

    def __init__(self, x: Tensor, weight: Tensor) -> None:
        self.x, self.weight = rounded_weights([x, padded(weight, 16)], [None, None])
        self.gradients: Tensor | None = None  # of a chunk of logits, in float8

    def of(self, part: slice) -> Tensor:
        """The logits of some rows of x: (rows, vocabulary), possibly padded."""
        return product(self.x.weight[part], self.weight.weight, self.x.scale, self.weight.scale)

    def turn(self, scores: Tensor, targets: Tensor, columns: int) -> Tensor:
        """The losses; overwrites the logits with their gradients."""
        if self.gradients is None:
            new = torch.empty_like if scores.shape[1] == columns else torch.zeros_like
            self.gradients = new(scores, dtype=torch.float8_e5m2)
        return fused.cross_entropy_(scores, targets, columns, self.gradients, STEEP)

    def back(self, scores: Tensor, out: Tensor) -> None:
        """The gradients of the rows, from those of the logits."""
        assert self.gradients is not None
        low, scale = self.gradients[: len(scores)], self.weight.scale
        scales = (torch.full_like(scale, 1 / STEEP), scale)
        product(low, self.weight.sideways, *scales, exact=True, out=out)
