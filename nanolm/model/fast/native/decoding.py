"""Decodes one token of one text on a CPU in a single call of a C function (`decoding.c`).

It reads the weights where they are: in float32, or with 8 or 4 bits in quantized layers.
"""

from typing import Any

import torch
from torch import Tensor, nn

from nanolm.model.cache import KVCache
from nanolm.model.fast import native
from nanolm.model.fast.quantized import Int8Linear, NativeInt4Linear, QuantizedLinear, is_plain
from nanolm.model.gpt import GPT, NONLINEARITIES

VECTOR = 64  # floats; vectors end in zeros up to a multiple of it


class NativeOneRow:
    """A step with one new token: ids (1, 1) in, logits (1, vocabulary) out."""

    def __init__(self, model: GPT, cache: KVCache) -> None:
        """For the first row of the cache."""
        config, self.model, self.cache = model.config, model, cache
        length, width, threads = cache.keys.shape[3], config.head_dim, torch.get_num_threads()
        tables: tuple[Tensor | None, ...] = (None, None, None)  # learned positions, cosines, sines
        if config.positions == "learned":
            tables = (model.position_embedding.weight, None, None)
        elif config.positions == "rope":
            tables = (None, *model.tables.at_least(length, model.device))
        layers = torch.tensor([self.layer(block) for block in model.blocks])
        q, kv = config.heads * width, config.kv_heads * width
        shared = sum(map(padded, (config.dim, q + 2 * kv, q, config.hidden)))
        room = padded(config.dim) + padded(length)  # of each thread
        scratch = torch.zeros(shared + threads * room)
        tensors = native.pointers(layers, model.token_embedding.weight, *tables)
        numbers = [
            *(*tensors, *norm(model.norm), *matrix(model.head), *native.pointers(scratch)),
            *(room, threads, config.layers, config.dim, config.heads, config.kv_heads, width),
            *(config.hidden, length, list(NONLINEARITIES).index(config.feed_forward)),
            config.norm == "layer",
            native.as_integer(config.norm_epsilon),
        ]
        self.length, self.vocab_size = length, config.vocab_size
        self.numbers, self.kept = torch.tensor(numbers), (layers, scratch, tables)

    @staticmethod
    def supports(model: GPT) -> bool:
        """Of the models that `OneRow` supports."""
        linear = (m for m in model.modules() if isinstance(m, nn.Linear | QuantizedLinear))
        return native.available() and all(map(bits, linear))

    def __call__(self, ids: Tensor) -> Tensor:
        id, position, logits = int(ids), self.cache.longest, torch.empty(1, self.vocab_size)
        assert 0 <= id < self.vocab_size and position < self.length  # C would read on
        native.call("decode", self.numbers, id, position, logits)
        self.cache.advance(1)
        return logits

    def layer(self, block: Any) -> list[int]:
        """The fields of `struct layer`."""
        attention, feed_forward = block.attention, block.feed_forward
        of_heads = [getattr(attention, f"{name}_norm", None) for name in ("query", "key")]
        norms = [block.attention_norm, *of_heads, block.feed_forward_norm]
        linear = (attention.qkv, attention.out, feed_forward.up, feed_forward.out)
        cached = (each[attention.layer, 0] for each in (self.cache.keys, self.cache.values))
        return [
            *(number for each in norms for number in norm(each)),
            *(number for each in linear for number in matrix(each)),
            *(*native.pointers(*cached), attention.rotated),
        ]


def norm(layer: Any) -> list[int]:
    """The fields of `struct norm`."""
    return native.pointers(*(getattr(layer, name, None) for name in ("weight", "bias")))


def matrix(layer: Any) -> list[int]:
    outputs = layer.outputs if isinstance(layer, QuantizedLinear) else layer.out_features
    scale = getattr(layer, "scale", None)
    return native.matrix(layer.weight, scale, layer.bias, outputs, bits(layer))


def bits(layer: nn.Module) -> int:
    """Per weight; 0 if C cannot read them."""
    if isinstance(layer, Int8Linear | NativeInt4Linear):
        return 8 if isinstance(layer, Int8Linear) else 4
    return 32 if is_plain(layer) else 0


def padded(size: int) -> int:
    return -(-size // VECTOR) * VECTOR
