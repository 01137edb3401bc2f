"""The decoder-only Transformer, read top to bottom: GPT-2, llama, Qwen3 and what lies between.

    >>> config = configure("modern", vocab_size=300, layers=2, heads=2, dim=32, context=16)
    >>> GPT(config)(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 300])

Token ids become vectors; blocks of attention (tokens exchange what they know, each looking only
back) and feed-forward layers (each token by itself) add to them; a last linear layer turns each
vector into a score for every token that could come next. What computes the same faster is put on
from outside (`fast/`).
"""

import math
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanolm.model.base import Embedding, Model, StackedLinear
from nanolm.model.cache import KVCache, causal_mask
from nanolm.model.config import GPTConfig
from nanolm.model.positions import PositionTables, Rotation, alibi_mask, rotate


class AttentionInputs(NamedTuple):
    """What every attention layer is given besides the vectors."""

    positions: slice | Tensor  # where the tokens stand: the same in all rows, or (batch, time)
    kv_length: int  # tokens that can be looked at, these included
    rotation: Rotation | None = None  # RoPE: cosines and sines for the positions
    mask: Tensor | None = None  # keys each query sees, or biases; None: its own and all before it
    cache: KVCache | None = None  # keys and values of the tokens before these
    weights: list[Tensor] | None = None  # each layer appends its attention weights


class GPT(Model):
    """Ids of shape (batch, time) in, logits of shape (batch, time, vocabulary) out."""

    config: GPTConfig
    allows_padding = True  # no token sees what comes after it

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = Embedding(config.vocab_size, config.dim)
        if config.positions == "learned":
            self.position_embedding = Embedding(config.context, config.dim)
        self.tables = PositionTables(config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        post_norm = config.norm_place == "post"  # the last block ends in a norm already
        self.norm = nn.Identity() if post_norm else make_norm(config, config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        if not self.token_embedding.weight.is_meta:  # else its weights are still to be loaded
            self.init_weights()

    def forward(
        self, ids: Tensor, cache: KVCache | None = None, weights: list[Tensor] | None = None
    ) -> Tensor:
        logits: Tensor = self.head(self.hidden_states(ids, cache, weights))
        return logits  # (batch, time, vocabulary)

    def hidden_states(
        self, ids: Tensor, cache: KVCache | None = None, weights: list[Tensor] | None = None
    ) -> Tensor:
        """All but the head; with a list as `weights`, each layer appends its attention weights."""
        given = self.attention_inputs(ids.shape[1], cache, weights)
        x = self.transform(self.dropout(self.embed(ids, given)), given)
        if cache:
            cache.advance(ids.shape[1])
        return x  # (batch, time, dim)

    def attention_inputs(
        self, time: int, cache: KVCache | None = None, weights: list[Tensor] | None = None
    ) -> AttentionInputs:
        positions = cache.next_positions(time) if cache else slice(0, time)
        kv_length = cache.kv_length(positions) if cache else time
        rotation = self.tables.rotation(positions, kv_length, self.device)
        mask = cache.mask(positions) if cache else None
        if self.config.positions == "alibi":
            mask = alibi_mask(positions, kv_length, self.config.heads, self.token_embedding.weight)
        return AttentionInputs(positions, kv_length, rotation, mask, cache, weights)

    def embed(self, ids: Tensor, given: AttentionInputs) -> Tensor:
        """The tokens' vectors; where positions are vectors too, these are added."""
        x: Tensor = self.token_embedding(ids)  # (batch, time, dim)
        match self.config.positions:
            case "learned":
                if given.kv_length > (context := self.config.context):
                    raise ValueError(f"{given.kv_length} tokens, and positions for {context}")
                x = x + self.position_embedding.weight[given.positions]
            case "sinusoidal":  # the tokens are scaled up, or the waves drown them
                (waves,) = self.tables.at_least(given.kv_length, self.device)  # (positions, dim)
                x = (x * math.sqrt(self.config.dim) + waves[given.positions]).to(x.dtype)
            case "rope" | "alibi" | "none":  # attention knows them, or does without
                pass
            case other:
                raise ValueError(f"unknown positions: {other}")
        return x

    def transform(self, x: Tensor, given: AttentionInputs, first: int = 0) -> Tensor:
        """The blocks from the `first` on, then the last norm."""
        for block in islice(self.blocks, first, None):
            x = block(x, given)
        y: Tensor = self.norm(x)
        return y  # (batch, time, dim)

    def frozen_states(self, ids: Tensor, layers: int) -> Tensor | None:
        given = self.attention_inputs(ids.shape[1])
        x = self.embed(ids, given)
        for block in islice(self.blocks, layers):
            x = block(x, given)
        return x

    def hidden_states_from(self, x: Tensor, layers: int) -> Tensor:
        return self.transform(x, self.attention_inputs(x.shape[1]), layers)

    def init_cache(self, batch: int, length: int, fixed: bool = False) -> KVCache:
        length = min(length, self.config.context)
        return KVCache(self.config, batch, length, self.token_embedding.weight, fixed)

    def cache_bytes(self, length: int) -> int:
        length = min(length, self.config.context)
        return KVCache.size(self.config, length) * self.token_embedding.weight.element_size()

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Attention | FeedForward):
                if self.config.norm == "layer":
                    # GPT-2: the sum of 2 * layers residual branches starts at the size of one.
                    nn.init.normal_(module.out.weight, std=0.02 / math.sqrt(2 * self.config.layers))
                else:
                    # Every block starts as the identity: learns faster than small random values.
                    nn.init.zeros_(module.out.weight)


class Block(nn.Module):
    """Attention, then feed-forward; each adds its result to its input."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.norm_first = {"pre": True, "post": False}[config.norm_place]
        self.attention_norm = make_norm(config, config.dim)
        self.attention = Attention(config, layer)
        self.feed_forward_norm = make_norm(config, config.dim)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, given: AttentionInputs) -> Tensor:
        if self.norm_first:
            x = x + self.dropout(self.attention(self.attention_norm(x), given))
            x = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        else:
            x = self.attention_norm(x + self.dropout(self.attention(x, given)))
            x = self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
        return x  # (batch, time, dim)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """`naive_attention` in one kernel of torch's, which does not keep the weights."""
    queries, keys = q.shape[2], k.shape[2]
    shared = q.shape[1] != k.shape[1]
    if mask is None and queries == keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
    if mask is None and queries > 1:  # one alone is the last, and sees all
        mask = causal_mask(queries, keys, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=shared)


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention as on the slides: the result, and the weights (batch, heads, time, past + time)."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))  # each serves `group` heads
    scores = q @ k.transpose(2, 3)  # (batch, heads, time, past + time)
    scores = scores / math.sqrt(q.shape[3])  # or the softmax would be all 0 and 1
    if mask is None:
        mask = causal_mask(q.shape[2], k.shape[2], q.device)
    seen = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = seen.softmax(dim=-1)
    return weights @ v, weights


class Attention(nn.Module):
    """Multi-head causal self-attention: softmax(Q Kᵀ / √head_dim) V, each token looking back.

    A query says what a token looks for, a key what it offers, a value what is then passed on.
    """

    rotate, attend = staticmethod(rotate), staticmethod(causal_attention)

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.parts = [self.heads, self.kv_heads, self.kv_heads]
        rows = [part * self.head_dim for part in self.parts]
        self.qkv = StackedLinear(config.dim, rows, bias=config.bias)
        self.out = nn.Linear(self.heads * self.head_dim, config.dim, bias=config.bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.query_norm = make_norm(config, config.head_dim)
            self.key_norm = make_norm(config, config.head_dim)

    def forward(self, x: Tensor, given: AttentionInputs) -> Tensor:
        batch, time, _ = x.shape
        qkv = self.qkv(x).view(batch, time, sum(self.parts), self.head_dim)
        q, k, v = qkv.split(self.parts, dim=2)  # (batch, time, heads or kv_heads, head_dim)
        if self.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (batch, heads, time, head_dim)
        if given.rotation:
            q, k = self.rotate(q, given.rotation), self.rotate(k, given.rotation)
        if given.cache:  # (batch, kv_heads, past + time, head_dim)
            k, v = given.cache.update(self.layer, k, v, given.positions)
        if given.weights is None:
            y = self.attend(q, k, v, given.mask)
        else:
            y, weights = naive_attention(q, k, v, given.mask)
            given.weights.append(weights)
        y = y.transpose(1, 2).flatten(2)  # (batch, time, heads * head_dim)
        output: Tensor = self.out(y)  # (batch, time, dim)
        return output


class FeedForward(nn.Module):
    """Two linear layers with a nonlinearity between, for every token by itself."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.kind = config.feed_forward
        rows = [config.hidden] * (2 if self.kind == "swiglu" else 1)  # gate and up, or up alone
        self.up = StackedLinear(config.dim, rows, bias=config.bias)
        self.out = nn.Linear(config.hidden, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = NONLINEARITIES[self.kind](self.up(x))  # (batch, time, hidden)
        output: Tensor = self.out(y)  # (batch, time, dim)
        return output


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)  # (batch, time, hidden) each
    return F.silu(gate) * up


NONLINEARITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),  # GPT-2's approximation
    "relu2": lambda x: F.relu(x).square(),
    "swiglu": swiglu,
}


class RMSNorm(nn.RMSNorm):
    """Scales a vector to length √dim, then each component by a learned weight."""

    def forward(self, x: Tensor) -> Tensor:
        # In the precision of the input: torch has a fused kernel only where the two agree.
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def make_norm(config: GPTConfig, dim: int) -> nn.Module:
    if config.norm == "layer":
        return nn.LayerNorm(dim, eps=config.norm_epsilon, bias=config.bias)
    if config.norm == "rms":
        return RMSNorm(dim, eps=config.norm_epsilon)
    raise ValueError(f"unknown norm: {config.norm}")
