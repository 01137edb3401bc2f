"""The decoder-only Transformer: GPT-2, Llama, Qwen3, GPT-NeoX and variants in between.

    >>> config = configure("modern", vocab_size=300, layers=2, heads=2, dim=32, context=16)
    >>> GPT(config)(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 300])

Token ids become vectors. Blocks of attention (each token attends to itself and earlier ones) and
feed-forward layers (each token independently) add to them, and the head maps each vector to logits
for the next token. This is the reference implementation; `fast/` swaps in faster equivalents.
"""

import math
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanolm.model.base import Embedding, Model, StackedLinear
from nanolm.model.cache import KVCache, causal_mask
from nanolm.model.config import GPTConfig, TransformerConfig
from nanolm.model.positions import PositionTables, Rotation, position_mask, rotate


class AttentionInputs(NamedTuple):
    """Inputs that all attention layers share, besides the hidden states."""

    positions: slice | Tensor  # of the tokens: one slice for all rows, or (batch, time)
    kv_length: int  # number of keys: cached and new
    rotation: Rotation | None = None  # RoPE: cosines and sines
    mask: Tensor | None = None  # boolean, or a bias to add; None: causal
    cache: KVCache | None = None  # keys and values of earlier tokens
    attn_weights: list[Tensor] | None = None  # each layer appends its own


class GPT(Model):
    """Ids of shape (batch, time) in, logits of shape (batch, time, vocabulary) out."""

    config: GPTConfig
    allows_padding = True  # causal: padding on the right affects no token before it

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
        if not self.token_embedding.weight.is_meta:  # on the meta device, weights are loaded later
            self.init_weights()

    def forward(
        self, ids: Tensor, cache: KVCache | None = None, attn_weights: list[Tensor] | None = None
    ) -> Tensor:
        logits: Tensor = self.head(self.hidden_states(ids, cache, attn_weights))
        return logits  # (batch, time, vocabulary)

    def hidden_states(
        self, ids: Tensor, cache: KVCache | None = None, attn_weights: list[Tensor] | None = None
    ) -> Tensor:
        """Everything but the head. Each layer appends its attention weights to `attn_weights`."""
        inputs = self.attention_inputs(ids.shape[1], cache, attn_weights)
        x = self.transform(self.dropout(self.embed(ids, inputs)), inputs)
        if cache:
            cache.advance(ids.shape[1])
        return x  # (batch, time, dim)

    def attention_inputs(
        self, time: int, cache: KVCache | None = None, attn_weights: list[Tensor] | None = None
    ) -> AttentionInputs:
        positions = cache.next_positions(time) if cache else slice(0, time)
        kv_length = cache.kv_length(positions) if cache else time
        rotation = self.tables.rotation(positions, kv_length, self.device)
        mask = position_mask(self.config, positions, kv_length, self.token_embedding.weight)
        if mask is None and cache:
            mask = cache.mask(positions)
        return AttentionInputs(positions, kv_length, rotation, mask, cache, attn_weights)

    def embed(self, ids: Tensor, inputs: AttentionInputs) -> Tensor:
        """Token embeddings, plus position embeddings where these are learned or sinusoidal."""
        x: Tensor = self.token_embedding(ids)  # (batch, time, dim)
        match self.config.positions:
            case "learned":
                if inputs.kv_length > (context := self.config.context):
                    raise ValueError(f"{inputs.kv_length} tokens exceed the context of {context}")
                x = x + self.position_embedding.weight[inputs.positions]
            case "sinusoidal":  # scale up embeddings, or the sinusoids would dominate
                (waves,) = self.tables.at_least(inputs.kv_length, self.device)  # (positions, dim)
                x = (x * math.sqrt(self.config.dim) + waves[inputs.positions]).to(x.dtype)
            case "rope" | "alibi" | "none":  # handled by attention, or not at all
                pass
            case other:
                raise ValueError(f"unknown positions: {other}")
        return x

    def transform(self, x: Tensor, inputs: AttentionInputs, first: int = 0) -> Tensor:
        """blocks[first:], then the last norm."""
        for block in islice(self.blocks, first, None):
            x = block(x, inputs)
        y: Tensor = self.norm(x)
        return y  # (batch, time, dim)

    def frozen_states(self, ids: Tensor, layers: int) -> Tensor | None:
        inputs = self.attention_inputs(ids.shape[1])
        x = self.embed(ids, inputs)
        for block in islice(self.blocks, layers):
            x = block(x, inputs)
        return x

    def hidden_states_from(self, x: Tensor, layers: int) -> Tensor:
        return self.transform(x, self.attention_inputs(x.shape[1]), layers)

    def init_cache(self, batch: int, length: int, fixed: bool = False) -> KVCache:
        length = min(length, self.config.context)
        return KVCache(self.config, batch, length, self.token_embedding.weight, fixed)

    def cache_bytes(self, length: int) -> int:
        size = KVCache.size(self.config, min(length, self.config.context))
        return size * self.token_embedding.weight.element_size()

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Attention | FeedForward):
                if self.config.norm == "layer":
                    # GPT-2: the residual stream then does not grow with the number of layers.
                    nn.init.normal_(module.out.weight, std=0.02 / math.sqrt(2 * self.config.layers))
                elif self.config.norm_place != "branch":  # a norm of zeros has huge gradients
                    # Each residual branch starts at zero, which trains faster than small values.
                    nn.init.zeros_(module.out.weight)


class Block(nn.Module):
    """Attention, then feed-forward, each with a residual connection."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.norm_place, self.parallel = config.norm_place, config.parallel_residual
        self.attention_norm = make_norm(config, config.dim)
        self.attention = Attention(config, layer)
        self.feed_forward_norm = make_norm(config, config.dim)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        if self.parallel:
            y: Tensor = self.dropout(self.feed_forward(self.feed_forward_norm(x)))
            return y + self.residual(x, self.attention_norm, self.attention, inputs)
        x = self.residual(x, self.attention_norm, self.attention, inputs)
        return self.residual(x, self.feed_forward_norm, self.feed_forward)

    def residual(self, x: Tensor, norm: nn.Module, layer: nn.Module, *inputs: Any) -> Tensor:
        """x plus what the layer makes of it, with the norm in one of three places."""
        match self.norm_place:
            case "pre":
                x = x + self.dropout(layer(norm(x), *inputs))
            case "post":
                x = norm(x + self.dropout(layer(x, *inputs)))
            case "branch":
                x = x + self.dropout(norm(layer(x, *inputs)))
            case other:
                raise ValueError(f"unknown norm_place: {other}")
        return x  # (batch, time, dim)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """`naive_attention` by PyTorch's fused kernel, which does not return the weights."""
    queries, keys, grouped = q.shape[2], k.shape[2], q.shape[1] != k.shape[1]
    causal = mask is None and queries == keys
    if mask is None and 1 < queries < keys:  # a single query is the last token and attends to all
        mask = causal_mask(queries, keys, q.device)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Textbook attention: the output, and the weights (batch, heads, time, past + time)."""
    groups = q.shape[1] // k.shape[1]  # query heads that share a key and a value
    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    scores = q @ k.transpose(2, 3)  # (batch, heads, time, past + time)
    scores = scores / math.sqrt(q.shape[3])  # otherwise the softmax saturates
    if mask is None:
        mask = causal_mask(q.shape[2], k.shape[2], q.device)
    masked = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = masked.softmax(dim=-1)
    return weights @ v, weights


class Attention(nn.Module):
    """Multi-head causal self-attention: softmax(Q Kᵀ / √head_dim) V.

    A query is what a token looks for, a key what it offers, and a value what it passes on.
    """

    rotate, attend = staticmethod(rotate), staticmethod(causal_attention)

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.rotated = layer, layer not in config.unrotated_layers
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.rows = [part * self.head_dim for part in (self.heads, self.kv_heads, self.kv_heads)]
        self.qkv = StackedLinear(config.dim, self.rows, bias=config.attention_biases[0])
        self.out = nn.Linear(self.rows[0], config.dim, bias=config.attention_biases[1])
        self.qk_norm, self.whole = config.qk_norm, config.qk_norm and config.qk_norm_whole
        if config.qk_norm:
            widths = self.rows if self.whole else [self.head_dim] * 2
            self.query_norm, self.key_norm = (make_norm(config, width) for width in widths[:2])

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        q, k, v = self.qkv(x).split(self.rows, dim=2)  # (batch, time, heads * head_dim)
        if self.whole:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (t.unflatten(2, (-1, self.head_dim)) for t in (q, k, v))
        if self.qk_norm and not self.whole:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (batch, heads, time, head_dim)
        if inputs.rotation and self.rotated:
            q, k = self.rotate(q, inputs.rotation), self.rotate(k, inputs.rotation)
        if inputs.cache:  # (batch, kv_heads, past + time, head_dim)
            k, v = inputs.cache.update(self.layer, k, v, inputs.positions)
        if inputs.attn_weights is None:
            y = self.attend(q, k, v, inputs.mask)
        else:
            y, weights = naive_attention(q, k, v, inputs.mask)
            inputs.attn_weights.append(weights)
        y = y.transpose(1, 2).flatten(2)  # (batch, time, heads * head_dim)
        output: Tensor = self.out(y)  # (batch, time, dim)
        return output


class FeedForward(nn.Module):
    """Two linear layers with a nonlinearity between, applied to each token independently."""

    def __init__(self, config: TransformerConfig) -> None:
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
    "silu": F.silu,
    "swiglu": swiglu,
}


class RMSNorm(nn.RMSNorm):
    """Scales a vector to unit RMS, then each component by a learned weight."""

    def forward(self, x: Tensor) -> Tensor:
        # The fused kernel needs the weight in the input's dtype.
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def make_norm(config: TransformerConfig, dim: int) -> nn.Module:
    if config.norm == "layer":
        return nn.LayerNorm(dim, eps=config.norm_epsilon, bias=config.bias)
    if config.norm == "rms":
        return RMSNorm(dim, eps=config.norm_epsilon)
    raise ValueError(f"unknown norm: {config.norm}")
