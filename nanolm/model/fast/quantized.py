"""8-bit and 4-bit weights for a CPU, where generating a token takes as long as reading the weights.

    >>> quantize(model, bits=4)  # in place; for sampling, not for training

With 8 bits, each row of a matrix has its own scale. With 4 bits, every 32 weights have one, and the
head keeps 8 bits. The embedding is unchanged: a token reads only one row. All kernels are torch's.
"""

import platform
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanolm.errors import UsageError
from nanolm.model.base import Model

GROUP = 32  # weights that share a 4-bit scale
# The sizes of a matrix are padded with zeros: the 8-bit kernel reads out of bounds with 24 inputs,
# and on Arm the 4-bit one uses a single thread unless each thread has a multiple of 8 outputs.
INPUTS, OUTPUTS = 32, 64
FEW_ROWS = 64  # with more, unpacking 8-bit weights once is faster than the kernel (measured)
SMALLEST = 1e-30  # scale
LARGEST_ERROR = 0.3  # of a kernel that works, relative to the output; about 0.1 is normal


class QuantizedLinear(nn.Module):
    """A linear layer that multiplies in bfloat16 or 8 bits. The last bits of its output depend on
    the number of rows."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach().float()
        self.outputs, self.bias = layer.out_features, layer.bias
        self.padding = -weight.shape[1] % INPUTS
        self.pack(F.pad(weight, (0, self.padding, 0, -len(weight) % OUTPUTS)))

    def pack(self, weight: Tensor) -> None:
        raise NotImplementedError

    def multiply(self, rows: Tensor) -> Tensor:
        """(rows, inputs) times the weights, (rows, outputs), both padded."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """In few operations: starting one takes as long as multiplying by a small matrix."""
        if x.dim() != 2:
            return self(x.flatten(0, -2)).view(*x.shape[:-1], -1)  # type: ignore[no-any-return]
        rows = F.pad(x, (0, self.padding)) if self.padding else x.contiguous()
        y = self.multiply(rows)
        if y.shape[1] > self.outputs:
            y = y[:, : self.outputs]
        if self.bias is None:
            return y.to(x.dtype)
        return self.bias + (y if x.dtype == torch.float32 else y.to(x.dtype))


class Int8Linear(QuantizedLinear):
    """Weights from -127 to 127 times the scale of their row."""

    weight: Tensor
    scale: Tensor

    def pack(self, weight: Tensor) -> None:
        largest = weight.abs().amax(dim=1, keepdim=True).clamp(min=SMALLEST)
        scale = (largest / 127).bfloat16()  # the kernel's dtype, rounded before use
        integers = (weight / scale.float()).round().clamp(-127, 127).to(torch.int8)
        self.register_buffer("weight", integers.contiguous())  # (outputs, inputs)
        self.register_buffer("scale", scale[:, 0].contiguous())  # (outputs,)

    def multiply(self, rows: Tensor) -> Tensor:
        if len(rows) <= FEW_ROWS:
            return torch._weight_int8pack_mm(rows.bfloat16(), self.weight, self.scale)
        whole = self.weight * self.scale.to(rows.dtype)[:, None]
        return F.linear(rows.bfloat16().to(rows.dtype), whole)


class Int4Linear(QuantizedLinear):
    """Weights from 0 to 15 times the scale of their group, plus its minimum."""

    weight: Tensor
    scale: Tensor

    def pack(self, weight: Tensor) -> None:
        groups = weight.unflatten(1, (-1, GROUP))  # (outputs, groups, GROUP)
        low, high = groups.amin(dim=2), groups.amax(dim=2)
        scale = ((high - low) / 15).clamp(min=SMALLEST).bfloat16()  # the kernel's dtype
        middle = (low + 8 * scale.float()).bfloat16()  # what the kernel adds to scale * (n - 8)
        integers = (groups - middle.float()[..., None]) / scale.float()[..., None] + 8
        integers = integers.round().clamp(0, 15).int().flatten(1)
        packed = torch._convert_weight_to_int4pack_for_cpu(integers, 1)
        self.register_buffer("weight", packed)
        both = torch.stack([scale, middle], dim=2).transpose(0, 1)  # (groups, outputs, 2)
        self.register_buffer("scale", both.contiguous())

    def multiply(self, rows: Tensor) -> Tensor:
        return torch._weight_int4pack_mm_for_cpu(rows.bfloat16(), self.weight, GROUP, self.scale)


class DynamicInt4Linear(QuantizedLinear):
    """Weights from -8 to 7 times the scale of their group; inputs are rounded to 8 bits. Fast on
    Arm processors."""

    weight: Tensor

    def pack(self, weight: Tensor) -> None:
        self.sizes = GROUP, weight.shape[1], len(weight)
        groups = weight.unflatten(1, (-1, GROUP))  # (outputs, groups, GROUP)
        scale = (groups.abs().amax(dim=2) / 7).clamp(min=SMALLEST).bfloat16()
        integers = (groups / scale.float()[..., None]).round().clamp(-8, 7) + 8
        integers = integers.to(torch.uint8).flatten(1)  # (outputs, inputs)
        pairs = (integers[:, ::2] | integers[:, 1::2] << 4).contiguous()
        packed = torch.ops.aten._dyn_quant_pack_4bit_weight(pairs, scale, None, *self.sizes)
        self.register_buffer("weight", packed)

    def multiply(self, rows: Tensor) -> Tensor:
        return torch.ops.aten._dyn_quant_matmul_4bit(rows.float(), self.weight, *self.sizes)  # type: ignore[no-any-return]


def quantize(model: Model, bits: int) -> None:
    """Convert all linear layers."""
    kind = int4_kind() if bits == 4 else Int8Linear
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                # 4 bits would harm the logits most, and llama.cpp does the same.
                setattr(module, name, (Int8Linear if layer is model.head else kind)(layer))


@cache
def int4_kind() -> type[QuantizedLinear]:
    """The fastest 4-bit layer that works here."""
    kinds = [Int4Linear, DynamicInt4Linear]
    on_arm = platform.machine().lower() in ("aarch64", "arm64")
    for kind in reversed(kinds) if on_arm else kinds:
        if works(kind):
            return kind
    raise UsageError("--int4: torch has no kernel for this processor; try --int8")


@torch.no_grad()
def works(kind: type[QuantizedLinear]) -> bool:
    """Whether torch's kernel exists and gives nearly the right result."""
    numbers = torch.Generator().manual_seed(1)
    layer, x = nn.Linear(128, 256), torch.randn(1, 128, generator=numbers)
    layer.weight.copy_(torch.randn(256, 128, generator=numbers))
    try:
        error = kind(layer)(x) - layer(x)
    except RuntimeError:  # not in every build of torch
        return False
    return bool(error.norm() < LARGEST_ERROR * layer(x).norm())
