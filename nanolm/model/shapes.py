"""The shapes of a model's parameters, from its config alone.

    >>> parameters_by_part(load_any_config(folder))
    {'token embedding': 24576, 'norms': 432, 'attention': 27648, ...}

Imports no torch.
"""

import math
import re
from dataclasses import replace

from nanolm.model.config import (
    ClassifierConfig,
    EncoderDecoderConfig,
    GPTConfig,
    ModelConfig,
    RecurrentConfig,
    RecurrentSeq2SeqConfig,
    Seq2SeqConfig,
    TransformerConfig,
)

Config = ModelConfig | ClassifierConfig
Shape = tuple[int, ...]

PARTS = {  # names to show instead
    "feed_forward": "feed-forward",
    **dict.fromkeys(("layers", "rightward", "leftward"), "recurrent layers"),
    **dict.fromkeys(("out", "bridge"), "projections"),
    "combine": "attention",
    "head": "output layer",
    "score": "classification head",
}
CELL = ("input_weight", "state_weight", "bias")


def parameter_shapes(config: Config) -> dict[str, Shape]:
    """The shape of each parameter by name, in the order of `named_parameters`."""
    if isinstance(config, ClassifierConfig):
        base = parameter_shapes(replace(config.base, tied=True))  # a classifier has no output layer
        inside = {f"base.{name}": shape for name, shape in base.items()}
        return {**inside, "score.weight": (len(config.labels), config.base.dim)}
    shapes: dict[str, Shape] = {"token_embedding.weight": (config.vocab_size, config.dim)}
    if isinstance(config, Seq2SeqConfig):
        return shapes | seq2seq_shapes(config)
    if isinstance(config, RecurrentConfig):
        for layer in range(config.layers):
            shapes |= cell_shapes(f"layers.{layer}", config.cell, config.dim)
    else:
        assert isinstance(config, GPTConfig)
        if config.positions == "learned":
            shapes["position_embedding.weight"] = (config.context, config.dim)
        block = block_shapes(config)
        for layer in range(config.layers):
            shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
        if config.norm_place != "post":
            shapes |= with_biases(config, {"norm": (config.dim,)})
    if not config.tied:
        shapes["head.weight"] = (config.vocab_size, config.dim)
    return shapes


def cell_shapes(name: str, cell: str, dim: int) -> dict[str, Shape]:
    rows = {"rnn": 1, "gru": 3, "lstm": 4}[cell] * dim
    weights = {f"{name}.{which}_weight": (rows, dim) for which in ("input", "state")}
    return {**weights, f"{name}.bias": (rows,)}


def seq2seq_shapes(config: Seq2SeqConfig) -> dict[str, Shape]:
    """All but the target's embedding."""
    dim, layers = config.dim, range(config.layers)
    shapes: dict[str, Shape] = {}
    if config.source_vocab_size is not None:
        shapes["source_embedding.weight"] = (config.source_vocab_size, dim)
    if not config.tied:
        shapes["head.weight"] = (config.vocab_size, dim)
    if isinstance(config, RecurrentSeq2SeqConfig):
        out = {"out.weight": (dim, 2 * dim), "out.bias": (dim,)}
        for n in range(config.encoder_layers):
            for way in ("rightward", "leftward"):
                shapes |= cell_shapes(f"encoder.{n}.{way}", config.cell, dim)
            shapes |= {f"encoder.{n}.{name}": shape for name, shape in out.items()}
        rows = (2 if config.cell == "lstm" else 1) * config.layers * dim
        shapes |= {"bridge.weight": (rows, dim), "bridge.bias": (rows,)}
        for n in layers:
            shapes |= cell_shapes(f"decoder.{n}", config.cell, dim)
        if config.attention == "additive":
            scores = {"query": (dim, dim), "key": (dim, dim), "score": (1, dim)}
            shapes |= {f"attention.{name}.weight": shape for name, shape in scores.items()}
        if config.attention != "none":
            shapes["combine.weight"] = (dim, 2 * dim)
        return shapes
    assert isinstance(config, EncoderDecoderConfig)
    block = block_shapes(config)
    for n in range(config.encoder_layers):
        shapes |= {f"encoder.{n}.{name}": shape for name, shape in block.items()}
    block |= cross_attention_shapes(config)
    for n in layers:
        shapes |= {f"decoder.{n}.{name}": shape for name, shape in block.items()}
    if config.norm_place != "post":
        shapes |= with_biases(config, {"encoder_norm": (dim,), "norm": (dim,)})
    return shapes


def parameters_by_part(config: Config) -> dict[str, int]:
    """The number of parameters of each kind of layer; a tied output layer adds none."""
    parts: dict[str, int] = {}
    for name, shape in parameter_shapes(config).items():
        layer = re.sub(r"^(base\.)?((blocks|encoder|decoder)\.\d+\.)?", "", name)
        layer = "layers" if layer in CELL else layer.partition(".")[0]
        part = "norms" if layer.endswith("norm") else PARTS.get(layer, layer.replace("_", " "))
        parts[part] = parts.get(part, 0) + math.prod(shape)
    return parts


def block_shapes(config: TransformerConfig) -> dict[str, Shape]:
    heads, kv_heads = config.heads * config.head_dim, config.kv_heads * config.head_dim
    inner = config.hidden * (2 if config.feed_forward == "swiglu" else 1)
    weights: dict[str, Shape] = {
        "attention_norm": (config.dim,),
        "attention.qkv": (heads + 2 * kv_heads, config.dim),
        "attention.out": (config.dim, heads),
        "attention.query_norm": (heads if config.qk_norm_whole else config.head_dim,),
        "attention.key_norm": (kv_heads if config.qk_norm_whole else config.head_dim,),
        "feed_forward_norm": (config.dim,),
        "feed_forward.up": (inner, config.dim),
        "feed_forward.out": (config.dim, config.hidden),
    }
    if not config.qk_norm:
        del weights["attention.query_norm"], weights["attention.key_norm"]
    return with_biases(config, weights)


def cross_attention_shapes(config: TransformerConfig) -> dict[str, Shape]:
    heads, kv_heads = config.heads * config.head_dim, config.kv_heads * config.head_dim
    weights: dict[str, Shape] = {
        "cross_attention_norm": (config.dim,),
        "cross_attention.query": (heads, config.dim),
        "cross_attention.key_value": (2 * kv_heads, config.dim),
        "cross_attention.out": (config.dim, heads),
    }
    if config.qk_norm:
        weights |= dict.fromkeys(
            ("cross_attention.query_norm", "cross_attention.key_norm"), (config.head_dim,)
        )
    return with_biases(config, weights)


def with_biases(config: TransformerConfig, weights: dict[str, Shape]) -> dict[str, Shape]:
    """The shapes of weights and biases of linear layers and norms."""
    shapes = {}
    attention = dict(zip(("attention.qkv", "attention.out"), config.attention_biases, strict=True))
    for module, shape in weights.items():
        shapes[f"{module}.weight"] = shape
        if attention.get(module, config.bias) and (len(shape) == 2 or config.norm == "layer"):
            shapes[f"{module}.bias"] = shape[:1]
    return shapes
