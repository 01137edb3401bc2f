"""Parts of a layer with custom backward passes, which need fewer passes over memory than torch's.

    >>> RMSNormFunction.apply(x, weight, 1e-6), SwiGLUFunction.apply(gate_and_up)

For a CPU; a GPU has the kernels of `fused`, and torch.compile fuses the plain functions itself.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanolm.model import positions
from nanolm.model.gpt import Attention, RMSNorm, causal_attention, swiglu
from nanolm.model.positions import Rotation


class RMSNormFunction(torch.autograd.Function):
    """`F.rms_norm`, whose backward pass on a CPU takes three times as many operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float | None) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = (length.square() / x.shape[-1] + (epsilon or 0.0)).rsqrt()  # (..., 1)
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        unit, scale, weight = ctx.saved_tensors
        inner = grad * weight
        along = (inner * unit).mean(dim=-1, keepdim=True)
        dx = inner.addcmul_(unit, along, value=-1).mul_(scale)
        return dx, (grad * unit).flatten(0, -2).sum(dim=0), None


class SwiGLUFunction(torch.autograd.Function):
    """SwiGLU with a backward pass that writes one tensor instead of concatenating two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        open_ = F.silu(gate)
        ctx.save_for_backward(x, open_)
        return open_ * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, open_ = ctx.saved_tensors
        dx = torch.empty_like(x)
        (gate, up), (to_gate, to_up) = x.chunk(2, dim=-1), dx.chunk(2, dim=-1)
        torch.mul(grad, open_, out=to_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=to_gate)
        return dx


class RoPEFunction(torch.autograd.Function):
    """`rotate` in three operations; the backward pass rotates by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return rotated(x, cosines, sines, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cosines, sines = ctx.saved_tensors
        return rotated(grad, cosines, sines, -1), None, None


def rotated(x: Tensor, cosines: Tensor, sines: Tensor, sign: int) -> Tensor:
    y: Tensor = x * cosines
    half = x.shape[-1] // 2
    y[..., :half].addcmul_(x[..., half:], sines[..., :half], value=-sign)
    y[..., half:].addcmul_(x[..., :half], sines[..., half:], value=sign)
    return y


def rms_norm(self: RMSNorm, x: Tensor) -> Tensor:
    """Replaces `RMSNorm.forward`."""
    if not self.training or x.device.type != "cpu" or torch.compiler.is_compiling():
        return RMSNorm.forward(self, x)
    return RMSNormFunction.apply(x, self.weight.to(x.dtype), self.eps)  # type: ignore[no-any-return, no-untyped-call]


def rotate(self: Attention, x: Tensor, rotation: Rotation) -> Tensor:
    """Replaces `Attention.rotate` if x has the dtype and the width of the table."""
    same = x.dtype == rotation[0].dtype and x.shape[-1] == rotation[0].shape[-1]
    if not same or torch.compiler.is_compiling():
        return positions.rotate(x, rotation)
    return RoPEFunction.apply(x, *rotation)  # type: ignore[no-any-return, no-untyped-call]


def attend(self: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Replaces `Attention.attend`: uses `math_attention` for plain causal attention."""
    if self.training and mask is None and q.shape[2] == k.shape[2]:
        return math_attention(q, k, v)
    return causal_attention(q, k, v, mask)


def math_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as explicit matrix products: faster on some CPUs for short texts, especially
    with bfloat16 products."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    ahead = q.new_full((q.shape[2], k.shape[2]), -torch.inf).triu(1)  # (time, time)
    scores = (q @ k.transpose(2, 3)) * q.shape[3] ** -0.5 + ahead  # (batch, heads, time, time)
    return scores.softmax(dim=-1) @ v  # type: ignore[no-any-return]


def fast_swiglu(x: Tensor) -> Tensor:
    if not x.requires_grad or x.device.type != "cpu" or torch.compiler.is_compiling():
        return swiglu(x)
    return SwiGLUFunction.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def fast_gelu_tanh(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():  # the same function, without the slow tanh
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return F.gelu(x, approximate="tanh")


NONLINEARITIES = {"swiglu": fast_swiglu, "gelu_tanh": fast_gelu_tanh}
