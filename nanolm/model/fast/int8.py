"""Weights as 8-bit integers, for a CPU: a token takes as long as its weights take to be read.

    >>> to_int8(model)  # in place; for writing, not for training

Each row of a matrix has a scale of its own. The embedding, of which a token reads one row, stays.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanolm.model.base import Model

MULTIPLE = 32  # of inputs that go through the kernel; with 24 it read what was not there
FEW_ROWS = 8  # with more, unpacking the weights once is faster than the kernel for few


class Int8Linear(nn.Module):
    """A linear layer with integers for weights. What goes in and comes out is rounded to bfloat16;
    the last bit of it depends on how many rows there are."""

    weight: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach()
        largest = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
        scale = (largest / 127).bfloat16()  # as the kernel wants it, and rounded before it is used
        integers = (weight / scale.float()).round().clamp(-127, 127).to(torch.int8)
        self.register_buffer("weight", integers.contiguous())  # (outputs, inputs)
        self.register_buffer("scale", scale[:, 0])  # (outputs,)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)  # (rows, inputs)
        if len(rows) > FEW_ROWS:
            whole = self.weight * self.scale.to(x.dtype)[:, None]
            y = F.linear(rows.bfloat16().to(x.dtype), whole).bfloat16()
        else:
            y = torch._weight_int8pack_mm(rows.bfloat16(), self.weight, self.scale)
        y = y.to(x.dtype).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def to_int8(model: Model) -> None:
    """Change the linear layers of a model, where torch's kernel can take them."""
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear) and layer.in_features % MULTIPLE == 0:
                setattr(module, name, Int8Linear(layer))
