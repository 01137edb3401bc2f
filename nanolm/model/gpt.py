"""The decoder-only Transformer, read top to bottom: GPT-2, llama, Qwen3 and what lies between.

    >>> config = configure("modern", vocab_size=300, layers=2, heads=2, dim=32, context=16)
    >>> GPT(config)(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 300])

Token ids become vectors; blocks of attention (positions exchange what they know, each looking
only back) and feed-forward layers (each position thinks by itself) add to them; a last linear
layer turns each into a score for every token that could come next.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanolm.model.base import Embedding, Model
from nanolm.model.cache import KVCache, causal_mask
from nanolm.model.config import GPTConfig
from nanolm.model.cpu_ops import RMSNormFunction, SwiGLUFunction
from nanolm.model.positions import Rotation, rotate, rotation_table, sinusoidal_table

TABLE_STEP = 1024  # computed positions are made so many at a time, as they are needed


class Past(NamedTuple):
    """What attention needs to look at the tokens behind."""

    cache: KVCache
    here: slice | Tensor  # where the new tokens stand
    visible: Tensor | None  # what they may look at; None: everything behind


class GPT(Model):
    """Ids of shape (batch, time) in, logits of shape (batch, time, vocabulary) out."""

    config: GPTConfig
    allows_padding = True  # no token sees what stands behind it
    tables: tuple[Tensor, ...]
    compiled: Sequence[Callable[..., Tensor]] = ()  # what does the work of the blocks in training
    recompute = False  # save memory in training: keep what blocks are given, compute the rest twice
    kernels: Any = None  # for training on a GPU

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
        if not self.token_embedding.weight.is_meta:  # a shape that waits for its numbers
            self.init_weights()

    def forward(
        self, ids: Tensor, cache: KVCache | None = None, weights: list[Tensor] | None = None
    ) -> Tensor:
        """With a list as `weights`, attention is written out and leaves its weights there."""
        logits: Tensor = self.head(
            self.hidden_states(ids, cache, weights)
        )  # (batch, time, vocabulary)
        return logits

    def hidden_states(
        self, ids: Tensor, cache: KVCache | None = None, weights: list[Tensor] | None = None
    ) -> Tensor:
        here = cache.next_positions(ids.shape[1]) if cache else slice(0, ids.shape[1])
        x, rotation = self.embed(ids, here, cache.kv_length(here) if cache else ids.shape[1])
        x = self.dropout(x)
        past = Past(cache, here, cache.visible(here)) if cache else None
        if self.training and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # what blocks add to it is, too
        if self.training and past is None and weights is None:
            return self.learning(x, rotation)
        for block in self.blocks:
            x = block(x, rotation, past, weights)
        if cache:
            cache.advance(ids.shape[1])
        y: Tensor = self.norm(x)  # (batch, time, dim)
        return y

    def frozen_states(self, ids: Tensor, layers: int) -> Tensor | None:
        x, rotation = self.embed(ids, slice(0, ids.shape[1]), ids.shape[1])
        for block in self.blocks[:layers]:
            x = block(x, rotation, None, None)
        return x

    def hidden_states_from(self, x: Tensor, layers: int) -> Tensor:
        length, rotation = x.shape[1], None
        if self.config.positions == "rope":
            cosines, sines = (table[:length] for table in self.position_tables(length))
            rotation = cosines, sines
        if self.training and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for block in self.blocks[layers:]:
            x = block(x, rotation, None, None)
        y: Tensor = self.norm(x)  # (batch, time, dim)
        return y

    def learning(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """The blocks and the last norm, in the way that is fastest, or takes least memory."""
        if self.kernels and torch.is_autocast_enabled(x.device.type):
            layers = [module for module in self.blocks.modules() if isinstance(module, nn.Linear)]
            self.kernels.refresh(layers, x.dtype)
        if self.recompute:
            keep = self.config.dropout > 0  # the same numbers have to fall out again
            for block in self.blocks:
                given = (block, x, rotation, None, None)
                x = checkpoint(*given, use_reentrant=False, preserve_rng_state=keep)
        elif self.kernels:
            return self.chained(x, rotation)
        else:
            for layer in self.compiled or self.blocks:
                x = layer(x, rotation, None, None)
        y: Tensor = self.norm(x)
        return y

    def chained(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """Each norm also adds what the layer before it has found."""
        y = None
        for block in self.blocks:
            assert isinstance(block, Block)
            x, z = add_and_norm(self.kernels, block.attention_norm, x, y)
            y = block.dropout(block.attention(z, rotation, None, None))
            x, z = add_and_norm(self.kernels, block.feed_forward_norm, x, y)
            y = block.dropout(block.feed_forward(z))
        return add_and_norm(self.kernels, self.norm, x, y)[1]

    def use_written_attention(self, wanted: bool) -> None:
        for module in self.modules():
            if isinstance(module, Attention):
                module.written = wanted

    def use_kernels(self, kernels: Any) -> None:
        """Train through those of `fused`, as far as they can do what this model does."""
        if self.config.norm_place == "pre":
            self.kernels = kernels
        if hasattr(kernels, "Scores"):
            self.head.scores = kernels.Scores
        for module in self.modules():
            if isinstance(module, Attention | FeedForward):
                module.kernels = kernels

    def embed(
        self, ids: Tensor, here: slice | Tensor, reach: int
    ) -> tuple[Tensor, Rotation | None]:
        """The vectors of tokens that stand `here`, within the first `reach` places, and, where
        positions are rotations, those."""
        if self.kernels and self.training:
            x = self.kernels.embedding(self.token_embedding, ids)
        else:
            x = self.token_embedding(ids)  # (batch, time, dim)
        match self.config.positions:
            case "learned":
                if reach > self.config.context:
                    raise ValueError(f"{reach} tokens, and positions for {self.config.context}")
                return x + self.position_embedding.weight[here], None  # one vector per index, added
            case "sinusoidal":
                (waves,) = self.position_tables(reach)  # (places, dim)
                # Scaled up, or the waves drown it.
                return (x * math.sqrt(self.config.dim) + waves[here]).to(x.dtype), None
            case "rope":
                cosines, sines = (table[here] for table in self.position_tables(reach))
                if isinstance(here, Tensor):  # (batch, time, head_dim): the same for all heads
                    cosines, sines = cosines[:, None], sines[:, None]
                return x, (cosines, sines)
        return x, None

    def position_tables(self, length: int) -> tuple[Tensor, ...]:
        """The computed positions of at least `length` places."""
        device = self.device
        if not self.tables or length > len(self.tables[0]) or self.tables[0].device != device:
            length = -(-length // TABLE_STEP) * TABLE_STEP
            with torch.inference_mode(False):  # they may be made while sampling, and trained with
                if self.config.positions == "rope":
                    tables: tuple[Tensor, ...] = rotation_table(length, self.config)
                else:
                    tables = (sinusoidal_table(length, self.config.dim),)
                self.tables = tuple(table.to(device) for table in tables)
        return self.tables

    def init_cache(self, batch: int, length: int, fixed: bool = False) -> KVCache:
        length = min(length, self.config.context)
        return KVCache(self.config, batch, length, self.token_embedding.weight, fixed)

    def cache_bytes(self, length: int) -> int:
        config = self.config
        numbers = 2 * config.layers * config.kv_heads * config.head_dim  # keys and values
        return numbers * min(length, config.context) * self.token_embedding.weight.element_size()

    def muon_parameters(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for name, module in self.blocks.named_modules(prefix="blocks"):
            if isinstance(module, Attention):
                rows = [part * module.head_dim for part in module.parts]
                found |= {f"{name}.qkv.weight": rows, f"{name}.out.weight": [self.config.dim]}
            if isinstance(module, FeedForward):
                hidden = self.config.hidden
                rows = [hidden] * (len(module.up.weight) // hidden)
                found |= {f"{name}.up.weight": rows, f"{name}.out.weight": [self.config.dim]}
        return found

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
        past: Past | None,
        weights: list[Tensor] | None,
    ) -> Tensor:
        if self.norm_first:
            y = self.attention(self.attention_norm(x), rotation, past, weights)
            x = x + self.dropout(y)  # (batch, time, dim)
            x = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        else:
            y = self.attention(x, rotation, past, weights)
            x = self.attention_norm(x + self.dropout(y))
            x = self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
        return x


class Attention(nn.Module):
    """Multi-head causal self-attention: softmax(Q Kᵀ / √head_dim) V, each position looking back.

    A query says what a position looks for, a key what it offers, a value what is then taken.
    """

    kernels: Any = None
    written = False  # train by `math_attention`

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.parts = [self.heads, self.kv_heads, self.kv_heads]  # of one product, for speed
        self.qkv = nn.Linear(config.dim, sum(self.parts) * self.head_dim, bias=config.bias)
        self.out = nn.Linear(self.heads * self.head_dim, config.dim, bias=config.bias)
        self.qk_norm = config.qk_norm
        self.turnable = not config.qk_norm or config.norm == "rms"  # by one kernel
        if config.qk_norm:
            self.query_norm = make_norm(config, config.head_dim)
            self.key_norm = make_norm(config, config.head_dim)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        past: Past | None,
        weights: list[Tensor] | None,
    ) -> Tensor:
        batch, time, _ = x.shape
        if self.kernels and self.training and past is None and weights is None:
            return self.learning(x, rotation)
        qkv = self.qkv(x).view(batch, time, sum(self.parts), self.head_dim)
        q, k, v = qkv.split(self.parts, dim=2)  # (batch, time, heads or kv_heads, head_dim)
        if self.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (batch, heads, time, head_dim)
        if rotation:
            q, k = rotate(q, rotation), rotate(k, rotation)
        visible = None
        if past:  # (batch, kv_heads, past + time, head_dim)
            k, v = past.cache.update(self.layer, k, v, past.here)
            visible = past.visible
        if self.written and self.training and past is None and weights is None:
            y = math_attention(q, k, v)
        elif weights is None:
            y = causal_attention(q, k, v, visible)
        else:
            y, seen = naive_attention(q, k, v, visible)
            weights.append(seen)
        y = y.transpose(1, 2).flatten(2)  # (batch, time, dim): the heads side by side again
        output: Tensor = self.out(y)
        return output

    def learning(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """`forward` by the kernels for training."""
        qkv = self.kernels.linear(self.qkv, x)
        if rotation and self.turnable:
            norms: tuple[Any, ...] = (None, None, 0.0)
            if self.qk_norm:
                norms = (self.query_norm.weight, self.key_norm.weight, self.query_norm.eps)
            *gains, epsilon = norms
            q, k, v = self.kernels.turned(
                qkv, *gains, *rotation, self.heads, self.kv_heads, epsilon
            )  # (batch, time, heads or kv_heads, head_dim)
        else:
            q, k, v = self.kernels.split(qkv, self.heads, self.kv_heads)
            if self.qk_norm:
                q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (batch, heads, time, head_dim)
        if rotation and not self.turnable:
            q, k = rotate(q, rotation), rotate(k, rotation)
        y = causal_attention(q, k, v).transpose(1, 2).flatten(2)  # (batch, time, dim)
        output: Tensor = self.kernels.linear(self.out, y)
        return output


def causal_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """`naive_attention` in one kernel, which keeps no weights."""
    queries, keys = q.shape[2], k.shape[2]
    shared = q.shape[1] != k.shape[1]
    if visible is None and queries == keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
    if visible is None and queries > 1:  # one alone is the last, and sees all
        visible = causal_mask(queries, keys, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=shared)


def math_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by three products of torch's, each position looking back: faster on some CPUs for
    short texts, where products can be in bfloat16 above all."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    ahead = q.new_full((q.shape[2], k.shape[2]), -torch.inf).triu(1)  # (time, time)
    scores = (q @ k.transpose(2, 3)) * q.shape[3] ** -0.5 + ahead  # (batch, heads, time, time)
    y: Tensor = scores.softmax(dim=-1) @ v
    return y


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention as on the slides: the result, and the weights (batch, heads, time, past + time).

    `q` is (batch, heads, time, head_dim), `k` and `v` are (batch, kv_heads, past + time, head_dim);
    what each may look at is `visible`, or everything behind it.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))  # each serves `group` heads
    scores = q @ k.transpose(2, 3)  # (batch, heads, time, past + time)
    scores = scores / math.sqrt(q.shape[3])  # or the softmax would be all 0 and 1
    if visible is None:
        visible = causal_mask(q.shape[2], k.shape[2], q.device)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return weights @ v, weights


class FeedForward(nn.Module):
    """Two linear layers with a nonlinearity between, at every position by itself."""

    kernels: Any = None

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.kind = config.feed_forward
        inner = config.hidden * (2 if self.kind == "swiglu" else 1)  # gate and up, fused
        self.up = nn.Linear(config.dim, inner, bias=config.bias)
        self.out = nn.Linear(config.hidden, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kernels and self.training:
            return self.learning(x)
        output: Tensor = self.out(nonlinearity(self.kind, self.up(x)))  # (batch, time, dim)
        return output

    def learning(self, x: Tensor) -> Tensor:
        """`forward` by the kernels for training."""
        y = self.kernels.linear(self.up, x)
        fast = {"swiglu": self.kernels.swiglu, "gelu_tanh": self.kernels.gelu_tanh}
        y = fast[self.kind](y) if self.kind in fast else nonlinearity(self.kind, y)
        output: Tensor = self.kernels.linear(self.out, y)
        return output


def nonlinearity(kind: str, x: Tensor) -> Tensor:
    """(batch, time, hidden) in and out; "swiglu" takes twice that, its gate first."""
    match kind:
        case "relu":
            return F.relu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            if torch.compiler.is_compiling():  # the same function, without the slow tanh
                return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
            return F.gelu(x, approximate="tanh")
        case "relu2":
            return F.relu(x).square()
        case "swiglu":
            if x.requires_grad and x.device.type == "cpu" and not torch.compiler.is_compiling():
                y: Tensor = SwiGLUFunction.apply(x)  # type: ignore[no-untyped-call]
                return y
            gate, up = x.chunk(2, dim=-1)  # (batch, time, hidden) each
            return F.silu(gate) * up
    raise ValueError(kind)


class RMSNorm(nn.RMSNorm):
    """Scales a vector to length √dim, then each component by a learned weight."""

    def forward(self, x: Tensor) -> Tensor:
        # In the precision of the input: torch has a fused kernel only where the two agree.
        weight = self.weight.to(x.dtype)
        if self.training and x.device.type == "cpu" and not torch.compiler.is_compiling():
            y: Tensor = RMSNormFunction.apply(x, weight, self.eps)  # type: ignore[no-untyped-call]
            return y
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def add_and_norm(
    kernels: Any, norm: nn.Module, x: Tensor, y: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x + y, or x, and its norm, in one kernel."""
    if isinstance(norm, nn.LayerNorm):
        rest: tuple[Any, ...] = (norm.weight, norm.bias, norm.eps, True)
    else:
        assert isinstance(norm, RMSNorm)
        rest = (norm.weight, None, norm.eps, False)
    found: tuple[Tensor, Tensor] = kernels.add_norm(x, y, *rest)
    return found


def make_norm(config: GPTConfig, dim: int) -> nn.Module:
    if config.norm == "rms":
        return RMSNorm(dim, eps=config.norm_epsilon)
    return nn.LayerNorm(dim, eps=config.norm_epsilon, bias=config.bias)
