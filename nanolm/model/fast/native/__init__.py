"""Kernels in C for a CPU: for training, everything between matrix products, or all blocks of a
small model in one call (`blocks`); for generating, a step of decoding.

    >>> swiglu(torch.randn(2, 5, 96, requires_grad=True)).shape
    torch.Size([2, 5, 48])

They have the interface of `fused`, the kernels for a GPU. A whole row stays in the cache while it
is worked on, where torch would write every intermediate result to memory and read it again. They
are for float32; any other dtype is left to torch.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from nanolm.model.fast.native.build import library

LANES = 16  # floats in the widest vectors; `attention` needs a multiple of it as head_dim


def available() -> bool:
    return library() is not None


def call(name: str, *arguments: Any) -> None:
    """Call a C function with tensors, numbers, and None for a null pointer."""
    given: list[Any] = []
    for value in arguments:
        if isinstance(value, Tensor):
            assert value.device.type == "cpu" and value.dtype in (torch.float32, torch.int64)
            given.append(ctypes.c_void_p(value.data_ptr()))
        elif isinstance(value, float):
            given.append(ctypes.c_float(value))
        else:
            given.append(None if value is None else ctypes.c_int64(value))
    kernels = library()
    assert kernels
    kernels[name](*given, ctypes.c_int(torch.get_num_threads()))


def pointers(*tensors: Tensor | None) -> list[int]:
    """For fields of a C structure; 0 is a null pointer."""
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def as_integer(number: float) -> int:
    """For a field of type double."""
    return int(torch.tensor(number, dtype=torch.float64).view(torch.int64))


def matrix(
    weight: Tensor, scale: Tensor | None, bias: Tensor | None, outputs: int, bits: int
) -> list[int]:
    """The fields of `struct matrix`, for weights of 32, 8 or 4 bits."""
    inputs = weight.shape[1] * weight.itemsize * 8 // bits
    return [*pointers(weight, scale, bias), inputs, outputs, bits]


def empty_sums(like: Tensor, width: int) -> Tensor:
    """Room for the gradients of two weights, of each thread."""
    return like.new_empty(torch.get_num_threads(), 2, width)


def scratch(x: Tensor, width: int) -> tuple[Tensor, int]:
    """Memory for the attention of one head in each thread, and how many floats each may use, for
    x (batch, time, ...)."""
    room = 2 * LANES * (x.shape[1] + width)
    return x.new_empty(torch.get_num_threads(), room), room


class NativeAddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        layer: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # after the last norm, the sum is unused
        ctx.layer, ctx.add, ctx.bias = layer, y is not None, bias is not None
        x, dim = x.contiguous(), x.shape[-1]
        rows, y = x.numel() // dim, None if y is None else y.contiguous()
        total = x if y is None else torch.empty_like(x)
        out, stats = torch.empty_like(x), x.new_empty(rows, 2)
        given = (x, y, weight, bias, float(epsilon), layer, rows, dim, total, out, stats)
        call("add_norm", *given)
        ctx.save_for_backward(total, weight, stats)
        return total, out

    @staticmethod
    def backward(ctx: Any, later: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:  # the norm is unused
            return later, later if ctx.add else None, None, None, None, None
        total, weight, stats = ctx.saved_tensors
        grad, later = grad.contiguous(), None if later is None else later.contiguous()
        dim, rows, dx = total.shape[-1], len(stats), torch.empty_like(total)
        sums = empty_sums(total, dim)
        given = (total, weight, stats, grad, later, ctx.layer, rows, dim, dx, sums)
        call("add_norm_backward", *given)
        dweight, dbias = sums.sum(dim=0).unbind()
        return dx, dx if ctx.add else None, dweight, dbias if ctx.bias else None, None, None


class NativeQKNormRoPE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cosines: Tensor,
        sines: Tensor,
        heads: int,
        kv_heads: int,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        epsilon: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tables = (cosines.contiguous(), sines.contiguous())
        qkv, weights = qkv.contiguous(), (query_weight, key_weight)
        ctx.save_for_backward(qkv, *weights, *tables)
        (batch, time), width = qkv.shape[:2], cosines.shape[-1]
        ctx.shape = (float(epsilon), batch * time, time, heads, kv_heads, width)
        q = qkv.new_empty(batch, time, heads, width)
        k = qkv.new_empty(batch, time, kv_heads, width)
        call("qk_norm_rope", qkv, *weights, *tables, *ctx.shape, q, k)
        return q, k, qkv[:, :, -kv_heads * width :].view(batch, time, kv_heads, width)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        qkv, query_weight, _, cosines, _ = saved = ctx.saved_tensors
        dqkv, sums = torch.empty_like(qkv), empty_sums(qkv, cosines.shape[-1])
        gradients = (dq.contiguous(), dk.contiguous(), dv.contiguous())
        call("qk_norm_rope_backward", *saved, *ctx.shape, *gradients, dqkv, sums)
        weights = (None, None) if query_weight is None else sums.sum(dim=0).unbind()
        return dqkv, None, None, None, None, *weights, None


class NativeSplit(torch.autograd.Function):
    """Queries, keys and values, whose gradients are concatenated."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
        parts = (heads, kv_heads, kv_heads)
        return qkv.unflatten(2, (sum(parts), -1)).split(parts, dim=2)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return torch.cat(gradients, dim=2).flatten(2), None, None


class NativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q.contiguous(), k.contiguous()
        if v.stride()[2:] != (v.shape[3], 1) or v.stride(0) != v.shape[1] * v.stride(1):
            v = v.contiguous()
        batch, time, heads, width = q.shape
        ctx.shape = (k.stride(1), v.stride(1), batch, time, heads, k.shape[2], width)
        out, sizes = torch.empty_like(q), q.new_empty(batch, heads, 2, time)
        call("attention", q, k, v, *ctx.shape, out, sizes, *scratch(q, q.shape[3]))
        ctx.save_for_backward(q, k, v, sizes)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, sizes = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
        given = (*ctx.shape, sizes, grad.contiguous(), dq, dk, dv, *scratch(q, q.shape[3]))
        call("attention_backward", q, k, v, *given)
        return dq, dk, dv


class NativeActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, inputs: int) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        width = x.shape[-1] // inputs
        ctx.name, ctx.shape = name, (x.numel() // x.shape[-1], width)
        out = x.new_empty(*x.shape[:-1], width)
        call(name, x, *ctx.shape, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        call(f"{ctx.name}_backward", x, grad.contiguous(), *ctx.shape, dx)
        return dx, None, None


def add_norm(x: Tensor, y: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    return NativeAddNorm.apply(x, y, *rest)  # type: ignore[no-any-return, no-untyped-call]


def qk_norm_rope(qkv: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return NativeQKNormRoPE.apply(qkv, *rest)  # type: ignore[no-any-return, no-untyped-call]


def attends(q: Tensor, k: Tensor) -> bool:
    """Whether `attention` supports these shapes, and has work for all threads."""
    return q.shape[3] % LANES == 0 and k.shape[0] * k.shape[2] >= torch.get_num_threads()


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention: all are (batch, time, heads or kv_heads, head_dim)."""
    return NativeAttention.apply(q, k, v)  # type: ignore[no-any-return, no-untyped-call]


def split(qkv: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return NativeSplit.apply(qkv, *rest)  # type: ignore[no-any-return, no-untyped-call]


def swiglu(x: Tensor) -> Tensor:
    return NativeActivation.apply(x, "swiglu", 2)  # type: ignore[no-any-return, no-untyped-call]


def gelu_tanh(x: Tensor) -> Tensor:
    return NativeActivation.apply(x, "gelu_tanh", 1)  # type: ignore[no-any-return, no-untyped-call]


def gelu(x: Tensor) -> Tensor:
    return NativeActivation.apply(x, "gelu", 1)  # type: ignore[no-any-return, no-untyped-call]


class NativeLinear(torch.autograd.Function):
    """A linear layer whose weight gradient is computed in the faster of two layouts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.shape, ctx.bias = x.shape, bias is not None
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x, grad = x.flatten(0, -2), grad.flatten(0, -2)  # (rows, inputs), (rows, outputs)
        dx = (grad @ weight).view(*ctx.shape) if ctx.needs_input_grad[0] else None
        tall = len(weight) > weight.shape[1]  # a product with few rows and many columns is faster
        dweight = (x.T @ grad).T.contiguous() if tall else grad.T @ x
        return dx, dweight, grad.sum(dim=0) if ctx.bias else None


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return NativeLinear.apply(x, layer.weight, layer.bias)  # type: ignore[no-any-return, no-untyped-call]


def embedding(table: nn.Embedding, ids: Tensor) -> Tensor:
    return nn.Embedding.forward(table, ids)


def cross_entropy_(logits: Tensor, targets: Tensor, columns: int) -> Tensor:
    """The loss of each row. Overwrites `logits` with softmax(logits) - onehot(targets)."""
    losses = logits.new_empty(len(logits))
    width = logits.stride(0)
    call("cross_entropy", logits, targets.contiguous(), len(logits), width, columns, losses)
    return losses
