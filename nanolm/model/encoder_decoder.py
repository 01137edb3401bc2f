"""The encoder-decoder Transformer: "Attention is all you need" (2017), and a modern variant.

    >>> config = configure("encoder-decoder", vocab_size=300, layers=2, heads=2, dim=32, context=64)
    >>> EncoderDecoder(config)(source, mask, target).shape  # (batch, target, 300)

The encoder's blocks are those of GPT without the causal mask: every source token attends to all
others. Each decoder block has one more layer: cross-attention from the target to the source.
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from nanolm.model.base import StackedLinear
from nanolm.model.cache import KVCache
from nanolm.model.config import EncoderDecoderConfig
from nanolm.model.gpt import (
    Attention,
    AttentionInputs,
    Block,
    FeedForward,
    make_norm,
    naive_attention,
)
from nanolm.model.positions import PositionTables
from nanolm.model.seq2seq import Memory, Seq2Seq


class EncoderDecoder(Seq2Seq):
    config: EncoderDecoderConfig

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__(config)
        self.tables = PositionTables(config)
        self.encoder = nn.ModuleList(Block(config, n) for n in range(config.encoder_layers))
        self.decoder = nn.ModuleList(DecoderBlock(config, n) for n in range(config.layers))
        post_norm = config.norm_place == "post"  # the last block ends in a norm already
        self.encoder_norm = nn.Identity() if post_norm else make_norm(config, config.dim)
        self.norm = nn.Identity() if post_norm else make_norm(config, config.dim)
        if not self.token_embedding.weight.is_meta:  # on the meta device, weights are loaded later
            self.init_weights()

    def encode(self, source: Tensor, mask: Tensor) -> Memory:
        inputs = self.attention_inputs(source.shape[1])._replace(mask=mask[:, None, None])
        x = self.dropout(self.with_positions(self.embed_source(source), inputs))
        for block in self.encoder:
            x = block(x, inputs)
        return Memory(self.encoder_norm(x), mask)

    def decode(
        self,
        target: Tensor,
        memory: Memory,
        cache: KVCache | None = None,
        cross_weights: list[Tensor] | None = None,
    ) -> Tensor:
        inputs = self.attention_inputs(target.shape[1], cache)
        x = self.dropout(self.with_positions(self.token_embedding(target), inputs))
        for block in self.decoder:
            x = block(x, inputs, memory, cross_weights)
        if cache:
            cache.advance(target.shape[1])
        y: Tensor = self.norm(x)
        return y  # (batch, target, dim)

    def attention_inputs(self, time: int, cache: KVCache | None = None) -> AttentionInputs:
        positions = cache.next_positions(time) if cache else slice(0, time)
        kv_length = cache.kv_length(positions) if cache else time
        rotation = self.tables.rotation(positions, kv_length, self.device)
        mask = cache.mask(positions) if cache else None
        return AttentionInputs(positions, kv_length, rotation, mask, cache)

    def with_positions(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """Add sinusoidal positions; rotary ones are applied in self-attention."""
        if self.config.positions != "sinusoidal":
            return x
        (waves,) = self.tables.at_least(inputs.kv_length, self.device)  # (positions, dim)
        return (x * math.sqrt(self.config.dim) + waves[inputs.positions]).to(x.dtype)

    def init_cache(self, batch: int, length: int, fixed: bool = False) -> KVCache:
        return KVCache(self.config, batch, length, self.token_embedding.weight, fixed)

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):  # of unit size once it is scaled up
                nn.init.normal_(module.weight, std=1 / math.sqrt(self.config.dim))
        for module in self.modules() if self.config.norm == "rms" else ():
            if isinstance(module, Attention | CrossAttention | FeedForward):
                nn.init.zeros_(module.out.weight)  # each residual branch starts at zero
        if self.config.tied:
            nn.init.normal_(self.head.weight, std=1 / math.sqrt(self.config.dim))


class DecoderBlock(Block):
    """Causal self-attention, cross-attention to the source, then feed-forward."""

    def __init__(self, config: EncoderDecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.cross_attention_norm = make_norm(config, config.dim)
        self.cross_attention = CrossAttention(config, layer)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        inputs: AttentionInputs,
        memory: Memory,
        cross_weights: list[Tensor] | None = None,
    ) -> Tensor:
        cross = (memory, cross_weights)
        x = self.residual(x, self.attention_norm, self.attention, inputs)
        x = self.residual(x, self.cross_attention_norm, self.cross_attention, *cross)
        x = self.residual(x, self.feed_forward_norm, self.feed_forward)
        return x  # (batch, target, dim)


def cross_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """`naive_attention` by PyTorch's fused kernel, which does not return the weights."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


class CrossAttention(nn.Module):
    """Multi-head attention whose queries come from the target, and keys and values from the source:
    each target token looks up what it needs from all source tokens."""

    attend = staticmethod(cross_attend)

    def __init__(self, config: EncoderDecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.query = nn.Linear(config.dim, self.heads * self.head_dim, bias=config.bias)
        rows = [self.kv_heads * self.head_dim] * 2
        self.key_value = StackedLinear(config.dim, rows, bias=config.bias)
        self.out = nn.Linear(self.heads * self.head_dim, config.dim, bias=config.bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.query_norm = make_norm(config, config.head_dim)
            self.key_norm = make_norm(config, config.head_dim)

    def forward(
        self, x: Tensor, memory: Memory, cross_weights: list[Tensor] | None = None
    ) -> Tensor:
        batch, time, _ = x.shape
        q = self.query(x).view(batch, time, self.heads, self.head_dim)
        if self.qk_norm:
            q = self.query_norm(q)
        q = q.transpose(1, 2)  # (batch, heads, target, head_dim)
        if self.layer not in memory.keys_values:
            memory.keys_values[self.layer] = self.keys_values(memory.states)
        k, v = memory.keys_values[self.layer]
        mask = memory.mask[:, None, None]  # (batch, 1, 1, source)
        if cross_weights is None:
            y = self.attend(q, k, v, mask)
        else:
            y, weights = naive_attention(q, k, v, mask)
            cross_weights.append(weights)
        output: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return output  # (batch, target, dim)

    def keys_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of the source: (batch, kv_heads, source, head_dim) each."""
        both = self.key_value(states).unflatten(2, (2, self.kv_heads, self.head_dim))
        k, v = both.unbind(dim=2)  # (batch, source, kv_heads, head_dim)
        if self.qk_norm:
            k = self.key_norm(k)
        return k.transpose(1, 2), v.transpose(1, 2)
