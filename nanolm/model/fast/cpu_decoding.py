"""Decodes one token of one text on a CPU with few operations.

Starting an operation takes longer than what it computes for a single token of a small model, and so
does everything around it: reading the weights evicts the interpreter from the processor's caches.
This computes the same as `GPT.forward`, but each vector is a row of a matrix instead of part of a
batch, and layers are functions that have everything at hand.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanolm.model.cache import KVCache
from nanolm.model.config import Switches, unsupported
from nanolm.model.fast.quantized import Function, QuantizedLinear, is_plain
from nanolm.model.fast.training import FUSED_ATTENTION, FUSED_BLOCKS
from nanolm.model.gpt import GPT, NONLINEARITIES, Attention, RMSNorm

# Models with other switches use the plain path.
KNOWN: Switches = {**FUSED_BLOCKS, **FUSED_ATTENTION, "positions": ("learned", "rope", "none")}


class OneRow:
    """A step with one new token: ids (1, 1) in, logits (1, vocabulary) out."""

    def __init__(self, model: GPT, cache: KVCache) -> None:
        """For the first row of the cache."""
        self.model, self.cache, self.config = model, cache, model.config
        self.blocks = [block_step(block) for block in model.blocks]
        self.norm, self.head = norm_step(model.norm), product(model.head)

    @staticmethod
    def supports(model: Any, cache: Any) -> bool:
        if not (isinstance(model, GPT) and isinstance(cache, KVCache)) or cache.fixed:
            return False
        plain = model.token_embedding.weight.dtype == torch.float32
        return plain and not unsupported(model.config, KNOWN)

    def __call__(self, ids: Tensor) -> Tensor:
        model, position = self.model, self.cache.longest
        x = model.token_embedding(ids[0])  # (1, dim)
        rotation = None
        if self.config.positions == "learned":
            x = x + model.position_embedding.weight[position]
        elif self.config.positions == "rope":
            tables = model.tables.at_least(position + 1, model.device)
            cosines, sines = (table[position] for table in tables)  # (head_dim,)
            half = len(sines) // 2
            rotation = cosines, torch.cat([-sines[:half], sines[half:]]), half
        # Of each layer: keys and values so far and the new ones, (1, kv_heads, time, head_dim)
        every = [part[:, :1] for part in (self.cache.keys, self.cache.values)]
        news = (part.narrow(3, position, 1).unbind() for part in every)
        olds = (part.narrow(3, 0, position + 1).unbind() for part in every)
        for block, *memory in zip(self.blocks, *news, *olds, strict=True):
            block(x, rotation, *memory)
        self.cache.advance(1)
        return self.head(self.norm(x))


def block_step(block: Any) -> Callable[..., None]:
    """A function that computes the output of the block in place."""
    attend, feed_forward = attention_step(block.attention), block.feed_forward
    up, out = product(feed_forward.up), product(feed_forward.out)
    nonlinearity = NONLINEARITIES[feed_forward.kind]
    attention_norm, feed_forward_norm = (
        norm_step(norm) for norm in (block.attention_norm, block.feed_forward_norm)
    )

    def step(x: Tensor, *context: Any) -> None:
        x += attend(attention_norm(x), *context)
        x += out(nonlinearity(up(feed_forward_norm(x))))

    return step


def attention_step(layer: Attention) -> Callable[..., Tensor]:
    heads, kv_heads, width, rotated = layer.heads, layer.kv_heads, layer.head_dim, layer.rotated
    both, every = (heads, kv_heads), (heads, kv_heads, kv_heads)
    qkv_of, out, attention = product(layer.qkv), product(layer.out), F.scaled_dot_product_attention
    query_norm = norm_step(layer.query_norm) if layer.qk_norm else None
    key_norm = norm_step(layer.key_norm) if layer.qk_norm else None

    def step(
        x: Tensor, rotation: Any, new_key: Tensor, new_value: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        qkv = qkv_of(x).view(1, -1, 1, width)  # (1, heads, 1, head_dim), as all of these
        q, k, v = qkv.split_with_sizes(every, dim=1)
        if query_norm and key_norm:
            q, k = query_norm(q), key_norm(k)
        if rotation and rotated:
            cosines, sines, half = rotation
            qk = torch.cat([q, k], dim=1) if query_norm else qkv[:, : heads + kv_heads]
            qk = (qk * cosines).addcmul_(qk.roll(half, dims=3), sines)
            q, k = qk.split_with_sizes(both, dim=1)
        new_key.copy_(k)
        new_value.copy_(v)
        y = attention(q, keys, values, enable_gqa=heads != kv_heads)
        return out(y.view(1, -1))  # (1, dim)

    return step


def product(layer: nn.Module) -> Function:
    if isinstance(layer, QuantizedLinear) and not layer.is_padded:
        return layer.product()
    if is_plain(layer):
        return partial(F.linear, weight=layer.weight, bias=layer.bias)
    return layer


def norm_step(norm: nn.Module) -> Function:
    """The norm of each row; that of `RMSNorm` in fewer operations than torch's."""
    if isinstance(norm, nn.LayerNorm):
        how = (list(norm.normalized_shape), norm.weight, norm.bias, norm.eps, False)
        return lambda x: torch.layer_norm(x, *how)
    if not isinstance(norm, RMSNorm) or norm.eps is None:
        return norm
    weight, epsilon = norm.weight, norm.eps

    def step(x: Tensor) -> Tensor:
        mean = (x * x).mean(dim=-1, keepdim=True)
        return x * mean.add_(epsilon).rsqrt_() * weight

    return step
