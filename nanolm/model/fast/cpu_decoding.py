"""Decodes one token of one text on a CPU with few operations.

Starting an operation takes longer than what it computes for a single token of a small model. This
computes the same as `GPT.forward`, but each vector is a row of a matrix instead of part of a batch.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanolm.model.cache import KVCache
from nanolm.model.config import Switches, unsupported
from nanolm.model.fast.training import FUSED_ATTENTION, FUSED_BLOCKS
from nanolm.model.gpt import GPT, NONLINEARITIES, Attention, RMSNorm

# Models with other switches use the plain path.
KNOWN: Switches = {**FUSED_BLOCKS, **FUSED_ATTENTION, "positions": ("learned", "rope", "none")}


class OneRow:
    """A step with one new token: ids (1, 1) in, logits (1, vocabulary) out."""

    def __init__(self, model: GPT, cache: KVCache) -> None:
        """For the first row of the cache."""
        self.model, self.cache, self.config = model, cache, model.config
        # Of each layer: (1, kv_heads, length, head_dim)
        self.keys, self.values = (each[:, :1].unbind() for each in (cache.keys, cache.values))

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
        block: Any
        for block in model.blocks:
            x = x + self.attend(block.attention, normed(block.attention_norm, x), rotation)
            y = block.feed_forward.up(normed(block.feed_forward_norm, x))  # (1, hidden)
            x = x + block.feed_forward.out(NONLINEARITIES[block.feed_forward.kind](y))
        self.cache.advance(1)
        logits: Tensor = model.head(normed(model.norm, x))
        return logits

    def attend(self, layer: Attention, x: Tensor, rotation: Any) -> Tensor:
        heads, kv_heads, width = layer.heads, layer.kv_heads, layer.head_dim
        position, parts = self.cache.longest, (heads, kv_heads, kv_heads)
        qkv = layer.qkv(x).view(1, -1, 1, width)  # (1, heads, 1, head_dim), as all of these
        q, k, v = qkv.split(parts, dim=1)
        if layer.qk_norm:
            q, k = normed(layer.query_norm, q), normed(layer.key_norm, k)
        if rotation and layer.rotated:
            cosines, sines, half = rotation
            qk = torch.cat([q, k], dim=1) if layer.qk_norm else qkv[:, : heads + kv_heads]
            qk = (qk * cosines).addcmul_(qk.roll(half, dims=3), sines)
            q, k = qk.split(parts[:2], dim=1)
        keys, values = self.keys[layer.layer], self.values[layer.layer]
        keys.narrow(2, position, 1).copy_(k)
        values.narrow(2, position, 1).copy_(v)
        k, v = keys.narrow(2, 0, position + 1), values.narrow(2, 0, position + 1)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=heads != kv_heads)
        output: Tensor = layer.out(y.view(1, -1))
        return output  # (1, dim)


def normed(norm: Any, x: Tensor) -> Tensor:
    """The norm of each row; that of `RMSNorm` in fewer operations than torch's."""
    if not isinstance(norm, RMSNorm) or norm.eps is None:
        return norm(x)  # type: ignore[no-any-return]
    mean = (x * x).mean(dim=-1, keepdim=True)
    return x * mean.add_(norm.eps).rsqrt_() * norm.weight
