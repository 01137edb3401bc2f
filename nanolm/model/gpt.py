"""The decoder-only Transformer, read top to bottom: GPT-2, llama, Qwen3 and what lies between.

    >>> config = configure("modern", vocab_size=300, layers=2, heads=2, dim=32, context=16)
    >>> GPT(config)(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 300])

Token ids become vectors; blocks of attention (positions exchange what they know, each looking
only back) and feed-forward layers (each position thinks by itself) add to them; a last linear
layer turns each into a score for every token that could come next.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanolm.model.base import Embedding, Model
from nanolm.model.cache import Cache, look_back
from nanolm.model.config import GPTConfig
from nanolm.model.positions import Rotation, rotate, rotation_table, sinusoidal_table

TABLE_STEP = 1024  # computed positions are made so many at a time, as they are needed


class GPT(Model):
    """Ids of shape (batch, time) in, logits of shape (batch, time, vocabulary) out."""

    config: GPTConfig
    tables: tuple[Tensor, ...]

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = Embedding(config.vocab_size, config.dim)
        if config.positions == "learned":
            self.position_embedding = Embedding(config.context, config.dim)
        self.tables = ()  # of computed positions
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        # With the norms behind, the last block ends in one already.
        norm_first = config.norm_place == "pre"
        self.norm = make_norm(config, config.dim) if norm_first else nn.Identity()
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        if not self.head.weight.is_meta:  # a shape that waits for its numbers
            self.initialise()

    def forward(
        self, ids: Tensor, cache: Cache | None = None, weights: list[Tensor] | None = None
    ) -> Tensor:
        """With a list as `weights`, attention is written out and leaves its weights there."""
        past = cache.length if cache else 0
        here = slice(past, past + ids.shape[1])
        x = self.token_embedding(ids)  # (batch, time, dim)
        rotation = None
        match self.config.positions:
            case "learned":
                if here.stop > self.config.context:
                    raise ValueError(f"{here.stop} tokens, and positions for {self.config.context}")
                x = x + self.position_embedding.weight[here]  # one vector per index, added
            case "sinusoidal":
                (waves,) = self.position_tables(here)  # (time, dim)
                x = x * math.sqrt(self.config.dim) + waves  # scaled up, or the waves drown it
            case "rope":
                cosines, sines = self.position_tables(here)  # (time, head_dim) each
                rotation = cosines, sines
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, rotation, cache, weights)
        if cache:
            cache.length = here.stop
        logits: Tensor = self.head(self.norm(x))  # (batch, time, vocabulary)
        return logits

    def position_tables(self, here: slice) -> tuple[Tensor, ...]:
        """The rows `here` of the computed positions."""
        device = self.head.weight.device
        if not self.tables or here.stop > len(self.tables[0]) or self.tables[0].device != device:
            length = -(-here.stop // TABLE_STEP) * TABLE_STEP
            with torch.inference_mode(False):  # they may be made while sampling, and trained with
                if self.config.positions == "rope":
                    tables: tuple[Tensor, ...] = rotation_table(length, self.config)
                else:
                    tables = (sinusoidal_table(length, self.config.dim),)
                self.tables = tuple(table.to(device) for table in tables)
        return tuple(table[here] for table in self.tables)

    def remember(self, batch: int, length: int) -> Cache:
        return Cache(self.config, batch, min(length, self.config.context), like=self.head.weight)

    def initialise(self) -> None:
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
    """Attention, then feed-forward; each adds its result to what it was given."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.norm_first = config.norm_place == "pre"
        self.attention_norm = make_norm(config, config.dim)
        self.attention = Attention(config, layer)
        self.feed_forward_norm = make_norm(config, config.dim)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        cache: Cache | None,
        weights: list[Tensor] | None,
    ) -> Tensor:
        if self.norm_first:
            y = self.attention(self.attention_norm(x), rotation, cache, weights)
            x = x + self.dropout(y)  # (batch, time, dim)
            x = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        else:
            y = self.attention(x, rotation, cache, weights)
            x = self.attention_norm(x + self.dropout(y))
            x = self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
        return x


class Attention(nn.Module):
    """Multi-head causal self-attention: softmax(Q Kᵀ / √head_dim) V, each position looking back.

    A query says what a position looks for, a key what it offers, a value what is then taken.
    """

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.parts = [self.heads, self.kv_heads, self.kv_heads]  # of one product, for speed
        self.qkv = nn.Linear(config.dim, sum(self.parts) * self.head_dim, bias=config.bias)
        self.out = nn.Linear(self.heads * self.head_dim, config.dim, bias=config.bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.query_norm = make_norm(config, config.head_dim)
            self.key_norm = make_norm(config, config.head_dim)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        cache: Cache | None,
        weights: list[Tensor] | None,
    ) -> Tensor:
        batch, time, _ = x.shape
        qkv = self.qkv(x).view(batch, time, sum(self.parts), self.head_dim)
        q, k, v = qkv.split(self.parts, dim=2)  # (batch, time, heads or kv_heads, head_dim)
        if self.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (batch, heads, time, head_dim)
        if rotation:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if cache:
            k, v = cache.extend(self.layer, k, v)  # (batch, kv_heads, past + time, head_dim)
        if weights is None:
            y = fused_attention(q, k, v)
        else:
            y, seen = written_out_attention(q, k, v)
            weights.append(seen)
        y = y.transpose(1, 2).flatten(2)  # (batch, time, dim): the heads side by side again
        output: Tensor = self.out(y)
        return output


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`written_out_attention` in one kernel, which keeps no weights."""
    queries, keys = q.shape[2], k.shape[2]
    shared = q.shape[1] != k.shape[1]
    if queries == keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
    mask = look_back(queries, keys, q.device) if queries > 1 else None  # the last one sees all
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=shared)


def written_out_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention as on the slides: the result, and the weights (batch, heads, time, past + time).

    `q` is (batch, heads, time, head_dim), `k` and `v` are (batch, kv_heads, past + time, head_dim).
    """
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))  # each serves `group` heads
    scores = q @ k.transpose(2, 3)  # (batch, heads, time, past + time)
    scores = scores / math.sqrt(q.shape[3])  # or the softmax would be all 0 and 1
    hidden = ~look_back(q.shape[2], k.shape[2], q.device)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return weights @ v, weights


class FeedForward(nn.Module):
    """Two linear layers with a nonlinearity between, at every position by itself."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.kind = config.feed_forward
        inner = config.hidden * (2 if self.kind == "swiglu" else 1)  # gate and up, fused
        self.up = nn.Linear(config.dim, inner, bias=config.bias)
        self.out = nn.Linear(config.hidden, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(nonlinearity(self.kind, self.up(x)))  # (batch, time, dim)
        return output


def nonlinearity(kind: str, x: Tensor) -> Tensor:
    """(batch, time, hidden) in and out; "swiglu" takes twice that, its gate first."""
    match kind:
        case "relu":
            return F.relu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu2":
            return F.relu(x).square()
        case "swiglu":
            gate, up = x.chunk(2, dim=-1)  # (batch, time, hidden) each
            return F.silu(gate) * up
    raise ValueError(kind)


class RMSNorm(nn.RMSNorm):
    """Scales a vector to length √dim, then each component by a learned weight."""

    def forward(self, x: Tensor) -> Tensor:
        # In the precision of the input: torch has a fused kernel only where the two agree.
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def make_norm(config: GPTConfig, dim: int) -> nn.Module:
    if config.norm == "rms":
        return RMSNorm(dim, eps=config.norm_epsilon)
    return nn.LayerNorm(dim, eps=config.norm_epsilon, bias=config.bias)
