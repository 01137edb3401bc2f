"""All blocks of a GPT in one call of a C function (`blocks.c`), forward or backward.

In a small model, calling an operation takes longer than computing it. And each thread takes its
texts through all layers, where threads that share an operation would wait for each other after it.
"""

import ctypes
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanolm.model.config import GPTConfig
from nanolm.model.fast import native
from nanolm.model.gpt import GPT, AttentionInputs

NONLINEARITIES = ("swiglu", "gelu_tanh", "gelu")
WEIGHTS = 14  # per block, with those that it may not have
MAX_GRADIENTS = 1 << 26  # of all threads: in larger models, calls take no time to speak of
MAPS = Path("/proc/self/maps")  # files that this process has mapped
MOST_WORK = 1.25  # of one thread, relative to the mean


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


def weights_of(block: Any) -> list[Tensor | None]:
    """In the order of their gradients, and None for those that a block does not have."""
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
        and not (model.training and config.dropout)
        and learns_all
        and all(weight.dtype == x.dtype and weight.is_contiguous() for weight in weights)
        and -(-len(x) // threads) * threads <= MOST_WORK * len(x)
        and threads * sum(weight.numel() for weight in weights) <= MAX_GRADIENTS
    )


@cache
def sgemm() -> int | None:
    """The address of the matrix product in the library that torch itself uses, or None."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        with suppress(OSError, AttributeError):  # no such file, or no such function
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
            return ctypes.cast(library.sgemm_, ctypes.c_void_p).value
    return None


@cache
def one_openmp() -> bool:
    """Whether torch and our kernels share their threads. If not, a product in one of our threads
    would start threads of its own."""
    files: set[str] = set()
    with suppress(OSError):  # not on every system
        files = set(
            re.findall(r"(/.*/lib(?:gomp|omp|iomp)[^/\n]*)$", MAPS.read_text(), re.MULTILINE)
        )
    return len(files) == 1


def floats_per_token(config: GPTConfig) -> tuple[int, int]:
    """What each block keeps (`struct kept`), and what the backward pass needs besides."""
    dim, hidden, heads = config.dim, config.hidden, config.heads
    q, kv = heads * config.head_dim, config.kv_heads * config.head_dim
    up = 2 * hidden if config.feed_forward == "swiglu" else hidden
    kept = 4 * (dim + 1) + 3 * (q + kv) + 2 * heads + up + hidden
    return kept, 2 * dim + 3 * q + 4 * kv + up + hidden


class NativeBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        model: GPT,
        inputs: AttentionInputs,
        keep: bool,
        *weights: Tensor | None,
    ) -> Tensor:
        config, x = model.config, x.contiguous()
        (batch, time, dim), count = x.shape, len(weights) // WEIGHTS
        floats, ctx.temporary = (batch * time * each for each in floats_per_token(config))
        # Without a backward pass, all blocks can use the same memory.
        kept = [x.new_empty(floats) for _ in range(count if keep else 1)]
        last = x.new_empty(batch * time * (dim + 2))
        rotation = [table.contiguous() for table in inputs.rotation or ()]
        blocks = []
        for number in range(count):
            its = weights[number * WEIGHTS : (number + 1) * WEIGHTS]
            rotated = rotation and config.layers - count + number not in config.unrotated_layers
            blocks += [*native.pointers(*its, kept[number % len(kept)]), bool(rotated)]
        fields = torch.tensor(blocks)
        stack = [
            *native.pointers(fields, *(rotation or (None, None))),
            *(sgemm(), *native.pointers(*weights[-2:], last)),
            *(count, batch, time, dim, config.heads, config.kv_heads, config.head_dim),
            *(config.hidden, config.feed_forward == "swiglu"),
            *(NONLINEARITIES.index(config.feed_forward), config.norm == "layer"),
            native.as_integer(config.norm_epsilon),
        ]
        ctx.stack, ctx.alive, ctx.width = torch.tensor(stack), (fields, rotation), config.head_dim
        y = torch.empty_like(x)
        native.call("transform", ctx.stack, x, y, *native.scratch(x, ctx.width))
        if keep:
            ctx.kept = count + 1
            ctx.save_for_backward(*kept, last, *weights)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weights, dy = ctx.saved_tensors[ctx.kept :], dy.contiguous()
        dx = torch.empty_like(dy)
        of_norms = [dy.shape[2]] * 4 + [ctx.width] * 2  # used or not
        sizes = [0 if weight is None else weight.numel() for weight in weights]
        for first in range(0, len(sizes) - 2, WEIGHTS):
            sizes[first : first + len(of_norms)] = of_norms
        sizes[-2:] = of_norms[:2]
        gradients = dy.new_empty(torch.get_num_threads(), sum(sizes))
        given = (dy, dx, dy.new_empty(ctx.temporary), gradients, sum(sizes))
        native.call("transform_backward", ctx.stack, *given, *native.scratch(dy, ctx.width))
        pairs = zip(gradients[0].split(sizes), weights, strict=True)
        return dx, None, None, None, *(None if w is None else part.view_as(w) for part, w in pairs)
