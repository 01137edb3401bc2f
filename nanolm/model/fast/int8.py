"""int8 weights for a CPU, where decoding a token takes as long as reading the weights.

    >>> to_int8(model)  # in place; for sampling, not for training

Each row of a matrix has its own scale. The embedding is unchanged: a token reads only one row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanolm.model.base import Model

MULTIPLE = 32  # of inputs that the kernel supports; with 24 it read out of bounds
FEW_ROWS = 8  # with more, unpacking the weights once is faster than the kernel


class Int8Linear(nn.Module):
    """A linear layer with int8 weights. Inputs and outputs are rounded to bfloat16; their last bit
    depends on the number of rows."""

    weight: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach()
        largest = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
        scale = (largest / 127).bfloat16()  # the kernel's dtype, rounded before use
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
    """Convert the linear layers of a model that torch's kernel supports."""
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear) and layer.in_features % MULTIPLE == 0:
                setattr(module, name, Int8Linear(layer))
