"""Matrix products with low-precision copies of the weights, and embeddings."""
# ruff: noqa: N803

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from nanolm.model.fast.fused.launch import warps

FEW = 512  # rows of a table


class Product(torch.autograd.Function):
    """x @ weight.T + bias with a low-precision copy of the weights; gradients sum in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor) -> Tensor:
        ctx.save_for_backward(x, low)
        ctx.bias = bias is not None
        return F.linear(x, low, None if bias is None else bias.to(low.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        return grad @ low, *weight_gradients(x, grad, ctx.bias), None


def weight_gradients(x: Tensor, grad: Tensor, bias: bool) -> tuple[Tensor, Tensor | None]:
    """The gradients of weight and bias in x @ weight.T + bias."""
    rows = grad.reshape(-1, grad.shape[-1])  # (rows, outputs)
    dweight = torch.mm(rows.T, x.flatten(0, -2), out_dtype=torch.float32)
    dbias = None
    if bias:  # a product is faster than torch's sum; with 8 rows, because 1 is slow
        dbias = torch.mm(rows.new_ones(8, len(rows)), rows, out_dtype=torch.float32)[0]
    return dweight, dbias


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """`layer(x)`, with its low-precision weights if it has them."""
    low = getattr(layer, "low", None)
    if low is None or low.dtype != x.dtype:
        return layer(x)  # type: ignore[no-any-return]
    return Product.apply(x, layer.weight, layer.bias, low)  # type: ignore[no-any-return, no-untyped-call]


def refresh(layers: list[nn.Linear], dtype: torch.dtype) -> None:
    """Copy the current weights to the precision of the matrix products."""
    for layer in layers:
        if getattr(layer, "low", None) is None or layer.low.dtype != dtype:
            layer.low = torch.empty_like(layer.weight, dtype=dtype)
    with torch.no_grad():
        torch._foreach_copy_([layer.low for layer in layers], [layer.weight for layer in layers])  # type: ignore[misc]


@triton.jit  # type: ignore[untyped-decorator]
def multiply_kernel(x, factor, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    part = tl.load(x + i, mask=i < count, other=0.0).to(tl.float32)
    tl.store(x + i, part * tl.load(factor), mask=i < count)


def multiply_(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply by a float32 scalar, for any dtype of x: torch takes three times as long."""
    grid = (triton.cdiv(x.numel(), 1024),)
    multiply_kernel[grid](x, factor, x.numel(), BLOCK=1024, num_warps=warps(1024))
    return x


def padded(weight: Tensor, multiple: int) -> Tensor:
    """Pad with rows of zeros to a multiple, which is faster on a GPU."""
    return F.pad(weight, (0, 0, 0, -len(weight) % multiple)) if len(weight) % multiple else weight


class Lookup(torch.autograd.Function):
    """Rows of a small table. The gradient is a matrix product: sorting the ids would be slower."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = len(table)
        return F.embedding(ids, table.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        flat = grad.flatten(0, -2)  # (positions, dim)
        columns = -(-ctx.rows // 8) * 8  # multiples of 8 are fast on a GPU
        chosen = flat.new_zeros(len(flat), columns).scatter_(1, ids.flatten()[:, None], 1.0)
        return torch.mm(chosen.T, flat, out_dtype=torch.float32)[: ctx.rows], None, None


def embedding(table: nn.Embedding, ids: Tensor) -> Tensor:
    """Replaces `nn.Embedding.forward`: in the precision of the matrix products."""
    few = table.num_embeddings <= FEW
    if not few or not table.training or not torch.is_autocast_enabled("cuda"):
        return nn.Embedding.forward(table, ids)
    return Lookup.apply(table.weight, ids, torch.get_autocast_dtype("cuda"))  # type: ignore[no-any-return, no-untyped-call]
