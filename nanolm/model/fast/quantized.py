"""8-bit and 4-bit weights for a CPU, where generating a token takes as long as reading the weights.

    >>> quantize(model, bits=4)  # in place; for sampling, not for training

With 8 bits, each row of a matrix has its own scale. With 4 bits, every 32 weights have one, and the
head keeps 8 bits. The embedding is unchanged: a token reads only one row. The kernels are torch's,
or ours for 4 bits if there is a C compiler.
"""

import platform
from collections.abc import Callable
from functools import cache
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanolm.errors import UsageError
from nanolm.model.base import Model, StackedLinear
from nanolm.model.fast import native

GROUP = 32  # weights that share a 4-bit scale
# The sizes of a matrix are padded with zeros: the 8-bit kernel reads out of bounds with 24 inputs,
# and on Arm the 4-bit one uses a single thread unless each thread has a multiple of 8 outputs.
INPUTS, OUTPUTS = 32, 64
FEW_ROWS = 64  # with more, unpacking 8-bit weights once is faster than the kernel (measured)
OUR_FEW_ROWS = 16  # the same for our 4-bit kernel (measured)
SMALLEST = 1e-30  # scale
LARGEST_ERROR = 0.3  # of a kernel that works, relative to the output; about 0.1 is normal

Function = Callable[[Tensor], Tensor]


class QuantizedLinear(nn.Module):
    """A linear layer that multiplies in bfloat16 or 8 bits. The last bits of its output depend on
    the number of rows."""

    bias: Tensor | None

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach().float()
        self.outputs, self.padding = layer.out_features, -weight.shape[1] % INPUTS
        extra = -len(weight) % OUTPUTS
        self.is_padded = bool(self.padding or extra)
        bias = None if layer.bias is None else F.pad(layer.bias.detach().float(), (0, extra))
        self.register_buffer("bias", bias)
        self.pack(F.pad(weight, (0, self.padding, 0, extra)))

    def pack(self, weight: Tensor) -> None:
        raise NotImplementedError

    def kernel(self) -> Function:
        """(rows, inputs) times the weights: (rows, outputs), both padded, in float32."""
        raise NotImplementedError

    def product(self) -> Function:
        """The product of padded rows and the weights, plus the bias, as a function: looking up the
        attributes of a module at each step would take longer than some operations."""
        kernel, bias = self.kernel(), self.bias
        return kernel if bias is None else lambda rows: kernel(rows).add_(bias)

    def multiply(self, rows: Tensor) -> Tensor:
        return self.product()(rows)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2:
            return self(x.flatten(0, -2)).view(*x.shape[:-1], -1)  # type: ignore[no-any-return]
        y = self.multiply(F.pad(x, (0, self.padding)) if self.padding else x.contiguous())
        if y.shape[1] > self.outputs:
            y = y[:, : self.outputs]
        return y.to(x.dtype)


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

    def kernel(self) -> Function:
        weight, scale, kernel = self.weight, self.scale, torch._weight_int8pack_mm
        return lambda rows: kernel(rows.bfloat16(), weight, scale).float()

    def multiply(self, rows: Tensor) -> Tensor:
        if len(rows) <= FEW_ROWS:
            return super().multiply(rows)
        whole = self.weight * self.scale.float()[:, None]
        return F.linear(rows.bfloat16().float(), whole, self.bias)


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

    def kernel(self) -> Function:
        weight, scale, kernel = self.weight, self.scale, torch._weight_int4pack_mm_for_cpu
        return lambda rows: kernel(rows.bfloat16(), weight, GROUP, scale).float()


class NativeInt4Linear(QuantizedLinear):
    """Weights from 0 to 15 times the scale of their group, plus its minimum, for our own kernel."""

    weight: Tensor
    scale: Tensor

    def pack(self, weight: Tensor) -> None:
        groups = weight.unflatten(1, (-1, GROUP))  # (outputs, groups, GROUP)
        low, high = groups.amin(dim=2), groups.amax(dim=2)
        both = torch.stack([((high - low) / 15).clamp(min=SMALLEST), low], dim=2).bfloat16()
        scale, low = (part[..., None].float() for part in both.unbind(dim=2))
        integers = ((groups - low) / scale).round().clamp(0, 15).to(torch.uint8)
        first, second = integers.chunk(2, dim=2)
        self.register_buffer("weight", (first | second << 4).flatten(1))  # (outputs, inputs / 2)
        self.register_buffer("scale", both)  # (outputs, groups, 2)

    def kernel(self) -> Function:
        outputs = len(self.weight)
        matrix = torch.tensor(native.matrix(self.weight, self.scale, None, outputs, bits=4))

        def multiply(rows: Tensor) -> Tensor:
            rows = rows.float()
            if len(rows) > OUR_FEW_ROWS:
                whole = rows.new_empty(outputs, rows.shape[1])
                native.call("unpack", matrix, whole)
                return F.linear(rows, whole)
            out = rows.new_empty(len(rows), outputs)
            native.call("multiply", matrix, rows, len(rows), out)
            return out

        return multiply


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

    def kernel(self) -> Function:
        weight, sizes, kernel = self.weight, self.sizes, torch.ops.aten._dyn_quant_matmul_4bit
        return lambda rows: kernel(rows.float(), weight, *sizes)


def quantize(model: Model, bits: int) -> None:
    """Convert all linear layers."""
    kind = int4_kind() if bits == 4 else Int8Linear
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                # 4 bits would harm the logits most, and llama.cpp does the same.
                setattr(module, name, (Int8Linear if layer is model.head else kind)(layer))


def is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether this is a linear layer in float32 that does nothing else."""
    changed = "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks
    return type(layer) in (nn.Linear, StackedLinear) and not changed


@cache
def int4_kind() -> type[QuantizedLinear]:
    """The fastest 4-bit layer that works here."""
    kinds: list[type[QuantizedLinear]] = [Int4Linear, DynamicInt4Linear]
    if platform.machine().lower() in ("aarch64", "arm64"):
        kinds.reverse()
    if native.available():
        kinds.insert(0, NativeInt4Linear)
    for kind in kinds:
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
