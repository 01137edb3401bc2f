"""Parts of a layer whose gradient torch would compute in many more steps than it takes.

    >>> RMSNormFunction.apply(x, weight, 1e-6), SwiGLUFunction.apply(gate_and_up)

On a CPU each step is a pass over memory. On a GPU `fused` has kernels for the same.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNormFunction(torch.autograd.Function):
    """What `F.rms_norm` does, which on a CPU goes back in three times as many steps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float | None) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = (length.square() / x.shape[-1] + (epsilon or 0.0)).rsqrt()  # (..., 1)
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight)
        y: Tensor = unit * weight
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        unit, scale, weight = ctx.saved_tensors
        inner = grad * weight
        along = (inner * unit).mean(dim=-1, keepdim=True)
        dx = inner.addcmul_(unit, along, value=-1).mul_(scale)
        return dx, (grad * unit).flatten(0, -2).sum(dim=0), None


class SwiGLUFunction(torch.autograd.Function):
    """SwiGLU whose way back writes into one piece, instead of pasting two together."""

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
    """`rotate` in three steps; the way back is to turn by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return turned(x, cosines, sines, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cosines, sines = ctx.saved_tensors
        return turned(grad, cosines, sines, -1), None, None


def turned(x: Tensor, cosines: Tensor, sines: Tensor, sign: int) -> Tensor:
    y: Tensor = x * cosines
    half = x.shape[-1] // 2
    y[..., :half].addcmul_(x[..., half:], sines[..., :half], value=-sign)
    y[..., half:].addcmul_(x[..., :half], sines[..., half:], value=sign)
    return y
