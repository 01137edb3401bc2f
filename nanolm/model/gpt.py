"""The decoder-only Transformer, classic (GPT-2) or modern (Qwen3), read top to bottom.

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

from nanolm.model.cache import Cache
from nanolm.model.config import ModelConfig

Rotation = tuple[Tensor, Tensor]  # cosines and sines, (time, head_dim) each


class GPT(nn.Module):
    """Ids of shape (batch, time) in, logits of shape (batch, time, vocabulary) out."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.dim)
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.context, config.dim)
        else:
            cosines, sines = rotation_table(config)
            self.register_buffer("cosines", cosines, persistent=False)
            self.register_buffer("sines", sines, persistent=False)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = make_norm(config, config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        self.apply(self._initialise)

    def forward(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        past = cache.length if cache else 0
        here = slice(past, past + ids.shape[1])
        x = self.token_embedding(ids)  # (batch, time, dim)
        rotation = None
        if self.config.positions == "learned":
            x = x + self.position_embedding.weight[here]  # one vector per index, added
        else:
            rotation = self.cosines[here], self.sines[here]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, rotation, cache)
        if cache:
            cache.length = here.stop
        logits: Tensor = self.head(self.norm(x))  # (batch, time, vocabulary)
        return logits

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Attention | FeedForward):
            if self.config.positions == "learned":
                # GPT-2: the sum of 2 * layers residual branches starts at the size of one.
                nn.init.normal_(module.out.weight, std=0.02 / math.sqrt(2 * self.config.layers))
            else:
                # Every block starts as the identity: learns faster than small random values.
                nn.init.zeros_(module.out.weight)


class Block(nn.Module):
    """Attention, then feed-forward; each reads a normalised copy and adds its result."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, config.dim)
        self.attention = Attention(config, layer)
        self.feed_forward_norm = make_norm(config, config.dim)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotation: Rotation | None, cache: Cache | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation, cache))
        x = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return x


class Attention(nn.Module):
    """Multi-head causal self-attention: softmax(Q Kᵀ / √head_dim) V, each position looking back.

    A query says what a position looks for, a key what it offers, a value what is then taken.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=config.bias)  # fused for speed
        self.out = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.query_norm = make_norm(config, config.head_dim)
            self.key_norm = make_norm(config, config.head_dim)

    def forward(self, x: Tensor, rotation: Rotation | None, cache: Cache | None) -> Tensor:
        batch, time, dim = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, dim // self.heads)
        q, k, v = qkv.unbind(2)  # (batch, time, heads, head_dim) each
        if self.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (batch, heads, time, head_dim)
        if rotation:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if cache is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = cache.mask(time)
            k, v = cache.extend(self.layer, k, v)  # (batch, heads, past + time, head_dim)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = y.transpose(1, 2).reshape(batch, time, dim)  # heads side by side again
        output: Tensor = self.out(y)
        return output


class FeedForward(nn.Module):
    """Two linear layers with a nonlinearity between, at every position by itself."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gated = config.feed_forward == "swiglu"
        inner = 2 * config.hidden if self.gated else config.hidden  # gate and up, fused
        self.up = nn.Linear(config.dim, inner, bias=config.bias)
        self.out = nn.Linear(config.hidden, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)  # (batch, time, hidden), or twice that
        if self.gated:
            gate, up = hidden.chunk(2, dim=-1)  # (batch, time, hidden) each
            hidden = F.silu(gate) * up
        else:
            hidden = F.gelu(hidden, approximate="tanh")
        output: Tensor = self.out(hidden)
        return output


class RMSNorm(nn.RMSNorm):
    """Scales a vector to length √dim, then each component by a learned weight."""

    def forward(self, x: Tensor) -> Tensor:
        # In the precision of the input: torch has a fused kernel only where the two agree.
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def make_norm(config: ModelConfig, dim: int) -> nn.Module:
    if config.norm == "rms":
        return RMSNorm(dim, eps=config.norm_epsilon)
    return nn.LayerNorm(dim, eps=config.norm_epsilon)


def rotation_table(config: ModelConfig) -> Rotation:
    """Rotary positions: the angle of each pair of components at each position."""
    # On the CPU also where a model is built without numbers (device "meta"): no file holds these.
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    frequencies = config.rope_base ** (-pairs / config.head_dim)
    positions = torch.arange(config.context, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, frequencies)
    angles = torch.cat([angles, angles], dim=-1)  # (context, head_dim)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn component i and its partner i + head_dim / 2 by the angle of their position."""
    cosines, sines = rotation
    left, right = x.chunk(2, dim=-1)  # (batch, heads, time, head_dim / 2) each
    turned = torch.cat([-right, left], dim=-1)
    return (x * cosines + turned * sines).to(x.dtype)
