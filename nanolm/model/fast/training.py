"""Faster training of the plain model: fused kernels, custom backward passes, torch.compile.

    >>> speed_up(model, recompute=True)  # in place: the same parameters, names and modules
    >>> plain(model)  # as it was built

Faster functions replace those of `gpt.py` on individual modules, as attributes of the instance,
wherever they support the config's switches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import islice
from types import MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanolm.model import gpt
from nanolm.model.base import Model
from nanolm.model.config import Switches, unsupported
from nanolm.model.fast import cpu_ops, native
from nanolm.model.fast.native import blocks
from nanolm.model.gpt import GPT, Attention, AttentionInputs, Block, FeedForward, RMSNorm

# The switches that the kernels support. Other nonlinearities use plain functions.
FUSED_BLOCKS: Switches = {
    "norm_place": ("pre",),
    "norm": ("layer", "rms"),
    "parallel_residual": (False,),
}
FUSED_ATTENTION: Switches = {
    "positions": ("learned", "sinusoidal", "rope", "none"),
    "norm": ("layer", "rms"),
    "qk_norm_whole": (False,),
    "rotary_dims": (None,),
    "sliding_window": (None,),
}
ADDED = ("forward", "transform", "rotate", "attend", "scores", "speedups", "compiled_blocks")
COPIES = ("low", "rounded")  # of a layer's weights, in lower precision


@dataclass(frozen=True)
class Speedups:
    """The optimizations in use, besides the functions of `cpu_ops`."""

    kernels: Any = None  # the module `fused`, `float8` or `native`
    math_attention: bool = False
    recompute: bool = False  # save memory: keep only block inputs, recompute the rest
    compiled: bool = False  # use torch.compile for blocks, instead of our kernels

    def __deepcopy__(self, memo: object) -> Self:
        return self


def speed_up(model: Model, **changes: Any) -> Model:
    """Change the `Speedups` of `model`; those not named are kept."""
    if not isinstance(model, GPT):
        return model
    speedups = replace(speedups_of(model), **changes)
    plain(model)
    model.speedups = speedups  # type: ignore[assignment]
    kernels = None if speedups.compiled else speedups.kernels
    for module in model.modules():
        match module:
            case RMSNorm():
                override(module, "forward", cpu_ops.rms_norm)
            case Attention():
                override(module, "rotate", cpu_ops.rotate)
                if speedups.math_attention:
                    override(module, "attend", cpu_ops.attend)
                if kernels and not unsupported(model.config, FUSED_ATTENTION):
                    override(module, "forward", fused_attention(kernels))
            case FeedForward():
                override(module, "forward", fused_feed_forward(kernels, module.kind))
    override(model, "transform", fast_transform)
    if kernels := block_kernels(model):
        override(model.token_embedding, "forward", kernels.embedding)
        if hasattr(kernels, "Scores"):
            model.head.scores = kernels.Scores
    if speedups.compiled:
        # A second handle, so that the plain model is saved. All blocks are alike, so one compiled
        # function serves them all.
        compiled = [torch.compile(block, dynamic=False) for block in model.blocks]
        model.compiled_blocks = compiled  # type: ignore[assignment]
    return model


def plain(model: Model) -> Model:
    """Remove all speedups."""
    for module in model.modules():
        for name in (*ADDED, *COPIES):
            module.__dict__.pop(name, None)
    return model


def speedups_of(model: Model) -> Speedups:
    return getattr(model, "speedups", Speedups())


def block_kernels(model: GPT) -> Any:
    """The fused kernels for whole blocks of the model, or None."""
    speedups = speedups_of(model)
    known = not unsupported(model.config, FUSED_BLOCKS)
    return speedups.kernels if known and not speedups.compiled else None


def override(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    setattr(module, name, MethodType(function, module))


def training_kernels(device: torch.device, dtype: torch.dtype, float8: bool = False) -> Any:
    """The module of kernels for training there with products in `dtype`, or None."""
    if device.type == "cuda":
        return kernels_for_gpu(float8)
    usable = device.type == "cpu" and dtype == torch.float32 and native.available()
    return native if usable else None


def usable(kernels: Any, x: Tensor, training: bool = True) -> bool:
    """Whether the kernels of a model support `x`, which autocast may have converted. Those for a
    GPU are for training only."""
    known = x.is_cuda or x.dtype == torch.float32
    return kernels is not None and known and (training or kernels is native)


def is_watched(inputs: AttentionInputs) -> bool:
    """Whether generation or `inspect` needs more of attention than its output."""
    return bool(inputs.cache) or inputs.attn_weights is not None


def kernels_for_gpu(float8: bool = False) -> Any:
    try:
        kernels = import_module("nanolm.model.fast." + ("float8" if float8 else "fused"))
    except ImportError:  # no Triton
        return None
    return kernels if kernels.available() else None


def fast_transform(self: GPT, x: Tensor, inputs: AttentionInputs, first: int = 0) -> Tensor:
    """Replaces `GPT.transform`."""
    speedups, kernels = speedups_of(self), block_kernels(self)
    if is_watched(inputs) or not (self.training or usable(kernels, x, training=False)):
        return GPT.transform(self, x, inputs, first)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))  # the dtype of the block outputs
        if usable(kernels, x):
            modules = self.blocks.modules()
            kernels.refresh([each for each in modules if isinstance(each, nn.Linear)], x.dtype)
    kernels = kernels if usable(kernels, x) else None
    if speedups.recompute:
        random = self.config.dropout > 0  # recomputing must repeat the same dropout
        for block in islice(self.blocks, first, None):
            x = checkpoint(block, x, inputs, use_reentrant=False, preserve_rng_state=random)
    elif kernels:
        return fused_transform(kernels, self, x, inputs, first)
    else:
        layers: Any = getattr(self, "compiled_blocks", self.blocks)
        for layer in islice(layers, first, None):
            x = layer(x, inputs)
    return self.norm(x)  # type: ignore[no-any-return]


def fused_transform(
    kernels: Any, model: GPT, x: Tensor, inputs: AttentionInputs, first: int
) -> Tensor:
    """In one call if `blocks` can; else each norm kernel adds the output of the layer before."""
    known = not speedups_of(model).math_attention and not unsupported(model.config, FUSED_ATTENTION)
    if kernels is native and known:
        y = blocks.transform(model, x, inputs, first)
        if y is not None:
            return y
    y = None
    for block in islice(model.blocks, first, None):
        assert isinstance(block, Block)
        x, z = add_and_norm(kernels, block.attention_norm, x, y)
        y = block.dropout(block.attention(z, inputs))
        x, z = add_and_norm(kernels, block.feed_forward_norm, x, y)
        y = block.dropout(block.feed_forward(z))
    return add_and_norm(kernels, model.norm, x, y)[1]


def add_and_norm(kernels: Any, norm: Any, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    """x + y (or x if y is None) and its norm, in one kernel."""
    bias, layer = getattr(norm, "bias", None), isinstance(norm, nn.LayerNorm)
    return kernels.add_norm(x, y, norm.weight, bias, norm.eps, layer)  # type: ignore[no-any-return]


def fused_attention(kernels: Any) -> Callable[..., Tensor]:
    def forward(self: Attention, x: Tensor, inputs: AttentionInputs) -> Tensor:
        if is_watched(inputs) or not usable(kernels, x, self.training):
            return Attention.forward(self, x, inputs)
        qkv = kernels.linear(self.qkv, x)
        rotation, heads = inputs.rotation if self.rotated else None, (self.heads, self.kv_heads)
        if rotation and (not self.qk_norm or isinstance(self.query_norm, RMSNorm)):
            norms: tuple[Any, ...] = (None, None, 0.0)
            if self.qk_norm:
                norms = (self.query_norm.weight, self.key_norm.weight, self.query_norm.eps)
            # (batch, time, heads or kv_heads, head_dim)
            q, k, v = kernels.qk_norm_rope(qkv, *rotation, *heads, *norms)
            rotation = None
        else:
            q, k, v = kernels.split(qkv, *heads)
            if self.qk_norm:
                q, k = self.query_norm(q), self.key_norm(k)
        if rotation:
            q, k = (self.rotate(t.transpose(1, 2), rotation).transpose(1, 2) for t in (q, k))
        own = hasattr(kernels, "attention") and "attend" not in vars(self)
        if own and kernels.attends(q, k):
            y = kernels.attention(q, k, v)  # (batch, time, heads, head_dim)
        else:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (batch, heads, time, head_dim)
            y = self.attend(q, k, v, None).transpose(1, 2)  # (batch, time, heads, head_dim)
        y = y.flatten(2)  # (batch, time, heads * head_dim)
        return kernels.linear(self.out, y)  # type: ignore[no-any-return]

    return forward


def fused_feed_forward(kernels: Any, kind: str) -> Callable[..., Tensor]:
    """With fused kernels, or else a nonlinearity with a custom backward pass."""
    linear: Any = kernels.linear if kernels else nn.Module.__call__
    plain = cpu_ops.NONLINEARITIES.get(kind, gpt.NONLINEARITIES[kind])
    nonlinearity: Any = getattr(kernels, kind, plain)

    def forward(self: FeedForward, x: Tensor) -> Tensor:
        if kernels and not usable(kernels, x, self.training):
            return FeedForward.forward(self, x)
        return linear(self.out, nonlinearity(linear(self.up, x)))  # type: ignore[no-any-return]

    return forward
