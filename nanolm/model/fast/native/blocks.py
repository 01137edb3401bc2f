"""All blocks of a GPT in one call of a C function (`blocks.c`), forward or backward.

In a small model, calling an operation takes longer than computing it. Also, threads that share an
operation wait for each other after it; here, each thread takes its own texts through all layers.
"""

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nanolm.model.config import GPTConfig
from nanolm.model.fast import native
from nanolm.model.fast.native.build import library
from nanolm.model.gpt import GPT, AttentionInputs

NONLINEARITIES = ("swiglu", "gelu_tanh", "gelu")
WEIGHTS = 14  # per block, including those that it may lack
MAX_GRADIENTS = 1 << 26  # floats, of all threads; in larger models, the time of a call is small
MOST_WORK = 1.25  # of one thread, relative to the mean
Weights = Sequence[Tensor | None]


def transform(model: GPT, x: Tensor, inputs: AttentionInputs, first: int) -> Tensor | None:
    """`GPT.transform`, or None if the C function does not support it."""
    layers: list[Any] = list(islice(model.blocks, first, None))
    if not layers or not all(isinstance(each, nn.Linear) for each in linear_layers(layers[0])):
        return None
    weights = [weight for block in layers for weight in weights_of(block)]
    weights += [model.norm.weight, getattr(model.norm, "bias", None)]  # type: ignore[list-item]
    if not supports(model, x, inputs, [each for each in weights if each is not None]):
        return None
    keep = torch.is_grad_enabled()
    return NativeBlocks.apply(x, model, inputs, keep, *weights)  # type: ignore[no-any-return, no-untyped-call]


def linear_layers(block: Any) -> list[nn.Module]:
    attention, feed_forward = block.attention, block.feed_forward
    return [feed_forward.out, feed_forward.up, attention.out, attention.qkv]


def weights_of(block: Any) -> Weights:
    """In the order of their gradients, and None for those that a block lacks."""
    pairs: list[Any] = [block.attention_norm, block.feed_forward_norm, *linear_layers(block)]
    weights = [weight for each in pairs for weight in (each.weight, getattr(each, "bias", None))]
    of_heads = (getattr(block.attention, name, None) for name in ("query_norm", "key_norm"))
    weights[4:4] = [getattr(norm, "weight", None) for norm in of_heads]
    return weights


def supports(model: GPT, x: Tensor, inputs: AttentionInputs, weights: Sequence[Tensor]) -> bool:
    config, threads = model.config, torch.get_num_threads()
    rotated = inputs.rotation is not None and not config.unrotated_layers
    learns_all = all(weight.requires_grad for weight in weights) or not torch.is_grad_enabled()
    products = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return (
        sgemm() is not None
        and (threads == 1 or one_openmp())
        and products != "bf16"
        and config.feed_forward in NONLINEARITIES
        and config.head_dim % native.LANES == 0
        and not (config.qk_norm and (config.norm != "rms" or not rotated))
        and learns_all
        and all(weight.dtype == x.dtype and weight.is_contiguous() for weight in weights)
        and -(-len(x) // threads) * threads <= MOST_WORK * len(x)
        and threads * sum(weight.numel() for weight in weights) <= MAX_GRADIENTS
    )


@cache
def torch_library() -> ctypes.CDLL | None:
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        with suppress(OSError):
            return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
    return None


@cache
def sgemm() -> int | None:
    """The address of the matrix product in the library that torch itself uses, or None."""
    return address(torch_library(), "sgemm_")


@cache
def one_openmp() -> bool:
    """Whether torch and our kernels share their threads. If not, a product in one of our threads
    would start threads of its own."""
    ours, theirs = (address(each, "omp_get_max_threads") for each in (library(), torch_library()))
    return ours is not None and ours == theirs


def address(of: ctypes.CDLL | None, name: str) -> int | None:
    """Of a function in a library or those that it uses; None if there is none."""
    function = getattr(of, name, None)
    return function and ctypes.cast(function, ctypes.c_void_p).value


def floats_per_token(config: GPTConfig) -> tuple[int, int]:
    """What each block keeps (`struct kept`), and what the backward pass needs besides."""
    dim, hidden, heads = config.dim, config.hidden, config.heads
    q, kv = heads * config.head_dim, config.kv_heads * config.head_dim
    up = 2 * hidden if config.feed_forward == "swiglu" else hidden
    kept = 4 * (dim + 1) + 3 * (q + kv) + 2 * heads + up + hidden
    return kept, 3 * dim + 3 * q + 4 * kv + up + hidden


def dropout_factors(probability: float, shape: Sequence[int]) -> Tensor:
    """0 with this probability, else what keeps the mean at 1."""
    factors = torch.empty(shape, dtype=torch.float32).bernoulli_(1 - probability)
    return factors if probability == 1 else factors.div_(1 - probability)


@dataclass(frozen=True)
class Stack:
    """What `struct stack` has besides weights and what blocks keep."""

    config: GPTConfig
    shape: torch.Size  # of x: (batch, time, dim)
    rotation: Sequence[Tensor]  # cosines and sines, or nothing
    factors: Tensor | None  # of dropout, (2 per block, batch, time, dim)

    def fields(self, weights: Weights, kept: Sequence[Tensor], last: Tensor) -> tuple[Tensor, ...]:
        """The structure, and the array of blocks that it points to."""
        config, count = self.config, len(weights) // WEIGHTS
        factors = [None] * (2 * count) if self.factors is None else self.factors.unbind()
        numbers = []
        for block in range(count):
            its = weights[block * WEIGHTS : (block + 1) * WEIGHTS]
            rotated = self.rotation and config.layers - count + block not in config.unrotated_layers
            numbers += native.pointers(*its, *factors[2 * block : 2 * block + 2])
            numbers += [*native.pointers(kept[block % len(kept)]), bool(rotated)]
        blocks = torch.tensor(numbers)
        stack = [
            *native.pointers(blocks, *(self.rotation or (None, None))),
            *(sgemm(), *native.pointers(*weights[-2:], last), count, *self.shape),
            *(config.heads, config.kv_heads, config.head_dim, config.hidden),
            *(config.feed_forward == "swiglu", NONLINEARITIES.index(config.feed_forward)),
            *(config.norm == "layer", native.as_integer(config.norm_epsilon)),
        ]
        return torch.tensor(stack), blocks


class NativeBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, model: GPT, inputs: AttentionInputs, keep: bool, *weights: Any
    ) -> Tensor:
        config, x, count = model.config, x.contiguous(), len(weights) // WEIGHTS
        rows, factors = x.shape[0] * x.shape[1], None
        if model.training and config.dropout:
            factors = dropout_factors(config.dropout, (2 * count, *x.shape))
        rotation = [table.contiguous() for table in inputs.rotation or ()]
        ctx.stack = Stack(config, x.shape, rotation, factors)
        # Without a backward pass, all blocks can use the same memory.
        floats = rows * floats_per_token(config)[0]
        kept = [x.new_empty(floats) for _ in range(count if keep else 1)]
        last, y = x.new_empty(rows * (x.shape[2] + 2)), torch.empty_like(x)
        stack, _alive = ctx.stack.fields(weights, kept, last)
        native.call("transform", stack, x, y, *native.scratch(x, config.head_dim))
        if keep:
            ctx.save_for_backward(*weights, *kept, last)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        config, dy = ctx.stack.config, dy.contiguous()
        count = len(ctx.needs_input_grad) - 4  # the first four are not weights
        saved = ctx.saved_tensors
        weights, (*kept, last) = saved[:count], saved[count:]
        sizes = [0 if weight is None else weight.numel() for weight in weights]
        of_norms = [config.dim] * 4 + [config.head_dim] * 2  # used or not
        for first in range(0, count - 2, WEIGHTS):
            sizes[first : first + len(of_norms)] = of_norms
        sizes[-2:] = of_norms[:2]
        total, threads, dx = sum(sizes), torch.get_num_threads(), torch.empty_like(dy)
        temporary = dy.new_empty(dy.shape[0] * dy.shape[1] * floats_per_token(config)[1])
        gradients, others = dy.new_empty(total), dy.new_empty(threads - 1, total)
        stack, _alive = ctx.stack.fields(weights, kept, last)
        given = (stack, dy, dx, temporary, gradients, others, total)
        native.call("transform_backward", *given, *native.scratch(dy, config.head_dim))
        pairs = zip(gradients.split(sizes), weights, strict=True)
        return dx, None, None, None, *(None if w is None else part.view_as(w) for part, w in pairs)
