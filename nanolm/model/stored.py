"""The contents of a model folder: its config, and the names, shapes and dtypes of its tensors.

    >>> parameters_by_part(load_any_config(folder))
    {'token embedding': 24576, 'norms': 336, 'attention': 27648, ...}

Imports no torch; the weights themselves are read and written by huggingface.py.
"""

import json
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from nanolm.errors import ModelError
from nanolm.model.config import ClassifierConfig, GPTConfig, ModelConfig, RecurrentConfig
from nanolm.model.config_json import config_from_json, model_type

Config = ModelConfig | ClassifierConfig
Shape = tuple[int, ...]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# A partial checkpoint of a classifier: a reference to its base model, and the trained weights.
BASE, TRAINED, ADAPTERS = "base.json", "trained.safetensors", "adapters.safetensors"
# The largest JSON file or safetensors header, in bytes: ten times that of the largest supported
# models. Parsed JSON takes up to thirty times its size in memory.
LARGEST_JSON = 2_000_000
HEAD, SCORE = "lm_head.weight", "score.weight"
PREFIX = {"gpt2": "transformer.", "llama": "model.", "qwen3": "model.", "nanolm": ""}
# Buffers that older versions of transformers saved with the weights, and that all versions ignore.
IGNORED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
# The names on disk of each of our modules; several names make up one fused matrix.
NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2": {
        "token_embedding": ("wte",),
        "position_embedding": ("wpe",),
        "attention_norm": ("ln_1",),
        "attention.qkv": ("attn.c_attn",),
        "attention.out": ("attn.c_proj",),
        "feed_forward_norm": ("ln_2",),
        "feed_forward.up": ("mlp.c_fc",),
        "feed_forward.out": ("mlp.c_proj",),
        "norm": ("ln_f",),
        "head": ("lm_head",),
    },
    "llama": {
        "token_embedding": ("embed_tokens",),
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.query_norm": ("self_attn.q_norm",),
        "attention.key_norm": ("self_attn.k_norm",),
        "attention.out": ("self_attn.o_proj",),
        "feed_forward_norm": ("post_attention_layernorm",),
        "feed_forward.up": ("mlp.gate_proj", "mlp.up_proj"),
        "feed_forward.out": ("mlp.down_proj",),
        "norm": ("norm",),
        "head": ("lm_head",),
    },
}
NAMES["qwen3"] = NAMES["llama"]
LAYERS = {"gpt2": "h", "llama": "layers", "qwen3": "layers"}
LINEAR = ("attention.qkv", "attention.out", "feed_forward.up", "feed_forward.out")
READ = {"F64", "F32", "F16", "BF16"}
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PARTS = {  # names to show instead
    "feed_forward": "feed-forward",
    "layers": "recurrent layers",
    "head": "output layer",
    "score": "classification head",
}
# A plain file name inside the folder.
SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")


@dataclass(frozen=True)
class TensorMapping:
    """One of our parameters, and the tensors on disk that are stacked to form it."""

    name: str
    stored_names: tuple[str, ...]
    sizes: tuple[int, ...]  # rows of each
    transposed: bool = False  # GPT-2 stores (in, out)


def load_any_config(folder: Path) -> Config:
    file = folder / "config.json"
    try:
        return config_from_json(read_json(file), file)
    except RecursionError:  # parsed JSON may still be too deep to compare or show
        raise ModelError(f"{file} is nested too deeply") from None


def load_config(folder: Path) -> ModelConfig:
    """The config of a language model; refuses classifiers."""
    config = load_any_config(folder)
    if isinstance(config, ClassifierConfig):
        advice = f'try `nanolm classify {folder} "..."`'
        raise ModelError(f"{folder} is a classifier, but this needs a language model; {advice}")
    return config


def load_classifier_config(folder: Path) -> ClassifierConfig:
    """The config of a classifier; refuses language models."""
    config = load_any_config(folder)
    if isinstance(config, ModelConfig):
        advice = f"train one with `nanolm finetune DATA --from {folder}`"
        raise ModelError(f"{folder} is a language model, but this needs a classifier; {advice}")
    return config


def parameter_shapes(config: Config) -> dict[str, Shape]:
    """The shape of each parameter by name, in the order of `named_parameters`."""
    if isinstance(config, ClassifierConfig):
        base = parameter_shapes(replace(config.base, tied=True))  # a classifier has no output layer
        inside = {f"base.{name}": shape for name, shape in base.items()}
        return {**inside, SCORE: (len(config.labels), config.base.dim)}
    shapes: dict[str, Shape] = {"token_embedding.weight": (config.vocab_size, config.dim)}
    if isinstance(config, RecurrentConfig):
        rows = (1 if config.cell == "rnn" else 4) * config.dim
        for layer in range(config.layers):
            shapes[f"layers.{layer}.input_weight"] = (rows, config.dim)
            shapes[f"layers.{layer}.state_weight"] = (rows, config.dim)
            shapes[f"layers.{layer}.bias"] = (rows,)
    else:
        assert isinstance(config, GPTConfig)
        if config.positions == "learned":
            shapes["position_embedding.weight"] = (config.context, config.dim)
        block = block_shapes(config)
        for layer in range(config.layers):
            shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
        if config.norm_place == "pre":
            shapes |= with_biases(config, {"norm": (config.dim,)})
    if not config.tied:
        shapes["head.weight"] = (config.vocab_size, config.dim)
    return shapes


def parameters_by_part(config: Config) -> dict[str, int]:
    """The number of parameters of each kind of layer; a tied output layer adds none."""
    parts: dict[str, int] = {}
    for name, shape in parameter_shapes(config).items():
        layer = name.removeprefix("base.").removeprefix("blocks.").lstrip("0123456789.")
        layer = layer.partition(".")[0]
        part = "norms" if layer.endswith("norm") else PARTS.get(layer, layer.replace("_", " "))
        parts[part] = parts.get(part, 0) + math.prod(shape)
    return parts


def block_shapes(config: GPTConfig) -> dict[str, Shape]:
    heads, kv_heads = config.heads * config.head_dim, config.kv_heads * config.head_dim
    inner = config.hidden * (2 if config.feed_forward == "swiglu" else 1)
    weights: dict[str, Shape] = {
        "attention_norm": (config.dim,),
        "attention.qkv": (heads + 2 * kv_heads, config.dim),
        "attention.out": (config.dim, heads),
        "attention.query_norm": (config.head_dim,),
        "attention.key_norm": (config.head_dim,),
        "feed_forward_norm": (config.dim,),
        "feed_forward.up": (inner, config.dim),
        "feed_forward.out": (config.dim, config.hidden),
    }
    if not config.qk_norm:
        del weights["attention.query_norm"], weights["attention.key_norm"]
    return with_biases(config, weights)


def with_biases(config: GPTConfig, weights: dict[str, Shape]) -> dict[str, Shape]:
    """The shapes of weights and biases of linear layers and norms."""
    shapes = {}
    for module, shape in weights.items():
        shapes[f"{module}.weight"] = shape
        if config.bias and (len(shape) == 2 or config.norm == "layer"):
            shapes[f"{module}.bias"] = shape[:1]
    return shapes


class StoredTensor(NamedTuple):
    """A tensor in an open file, not read yet."""

    file: Any
    path: Path
    name: str
    shape: Shape
    dtype: str


@contextmanager
def checked_tensors(
    folder: Path, config: Config, framework: str = "numpy"
) -> Iterator[dict[str, StoredTensor]]:
    """The tensors in `folder`: exactly those that `config` needs, with the right shapes. In a
    partial checkpoint, the trained ones."""
    partial = is_partial(folder)
    with ExitStack() as stack:
        prefix = "" if partial else PREFIX[model_type(config)[0]]
        tensors = open_weights(folder, stack, prefix, framework)
        layers = (config.base if isinstance(config, ClassifierConfig) else config).layers
        if layers > len(tensors) and not partial:  # before building that many
            raise ModelError(f"{folder} does not match its config.json: fewer than {layers} layers")
        if problems := mismatches(config, tensors, partial):
            shown = [problem[:200] for problem in problems[:20]]
            shown += [f"and {len(problems) - 20} more"] * (len(problems) > 20)
            raise ModelError(f"{folder} does not match its config.json:\n  " + "\n  ".join(shown))
        yield tensors


def open_weights(
    folder: Path, stack: ExitStack, prefix: str, framework: str
) -> dict[str, StoredTensor]:
    """Every tensor of the folder, by its name without `prefix`."""
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        try:
            with file.open("rb") as stream:
                header = int.from_bytes(stream.read(8), "little")
            if header > LARGEST_JSON:
                raise ModelError(f"{file} is not a safetensors file: header of {header:,} bytes")
            opened = stack.enter_context(safe_open(file, framework=framework))
            for name in opened.keys():  # noqa: SIM118
                part, short = opened.get_slice(name), name.removeprefix(prefix)
                if short in tensors:
                    raise ModelError(f"{file}: duplicate tensor {name[:200]}")
                if not name.endswith(IGNORED) or prefix == "":
                    shape = tuple(part.get_shape())
                    tensors[short] = StoredTensor(opened, file, name, shape, part.get_dtype())
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read: {str(error)[:300]}") from None
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The single weight file, or those listed in the index."""
    names, index = [TRAINED if is_partial(folder) else WEIGHTS], folder / INDEX
    if not is_partial(folder) and not (folder / WEIGHTS).exists() and index.exists():
        places = read_json(index).get("weight_map")
        names = list(places.values()) if isinstance(places, dict) else []
        if not names or not all(isinstance(name, str) for name in names):
            raise ModelError(f"{index}: weight_map is missing or does not map names to files")
        names = sorted(set(names))
        for name in names:
            if not SHARD_NAME.fullmatch(name):
                raise ModelError(f"{index}: {name[:200]!r} is not a weight file in this folder")
    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            pickles = sorted(each.name for each in folder.glob("*") if each.suffix in PICKLES)
            hints = [f"; nanolm does not load {name}, which could run code" for name in pickles]
            raise ModelError(f"{file} does not exist or is not a file{''.join(hints[:1])}")
    return files


def is_partial(folder: Path) -> bool:
    return (folder / BASE).exists()


def mismatches(config: Config, tensors: dict[str, StoredTensor], partial: bool) -> list[str]:
    """Tensors that are missing or unexpected, or have another shape or an unsupported dtype. In a
    partial checkpoint, names and shapes are those in memory, and none counts as missing."""
    shapes = parameter_shapes(config)
    expected = dict(shapes) if partial else {}
    for mapping in [] if partial else tensor_mappings(config):
        for name, size in zip(mapping.stored_names, mapping.sizes, strict=True):
            part = (size, *shapes[mapping.name][1:])
            expected[name] = part[::-1] if mapping.transposed else part
    found = [f"{name}: missing" for name in expected if name not in tensors and not partial]
    for name, stored in tensors.items():
        if name not in expected:
            if name != HEAD or isinstance(config, ClassifierConfig) or not config.tied:
                found.append(f"{name}: not part of this model")
        elif stored.shape != expected[name]:
            found.append(f"{name}: shape {stored.shape}, but config.json implies {expected[name]}")
        if stored.dtype not in READ:
            found.append(f"{name}: dtype {stored.dtype}; nanolm does not support quantized weights")
    return found


def tensor_mappings(config: Config) -> list[TensorMapping]:
    """Every parameter of a model with its names on disk, without the family's prefix."""
    family, _ = model_type(config)
    if isinstance(config, ClassifierConfig):
        base = replace(config.base, tied=True)  # a classifier has no output layer
        table = [replace(each, name=f"base.{each.name}") for each in base_mappings(base, family)]
        return [*table, TensorMapping(SCORE, (SCORE,), (len(config.labels),))]
    return base_mappings(config, family)


def base_mappings(config: ModelConfig, family: str) -> list[TensorMapping]:
    shapes = parameter_shapes(config)
    if family == "nanolm":
        return [TensorMapping(name, (name,), shape[:1]) for name, shape in shapes.items()]
    assert isinstance(config, GPTConfig)
    kv_rows, table = config.kv_heads * config.head_dim, []
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")  # "blocks.0.attention.qkv", "weight"
        layer = ""
        if module.startswith("blocks."):
            _, number, module = module.split(".", 2)
            layer = f"{LAYERS[family]}.{number}."
        outside = tuple(f"{layer}{there}.{kind}" for there in NAMES[family][module])
        sizes = shape[:1]
        if len(outside) == 3:  # queries, keys, values
            sizes = (config.heads * config.head_dim, kv_rows, kv_rows)
        elif len(outside) == 2:  # gate, up
            sizes = (config.hidden, config.hidden)
        transposed = family == "gpt2" and module in LINEAR and kind == "weight"
        table.append(TensorMapping(name, outside, sizes, transposed))
    return table


def write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def read_json(file: Path) -> dict[str, Any]:
    try:
        if not file.is_file():
            raise ModelError(f"{file} does not exist or is not a file")
        if file.stat().st_size > LARGEST_JSON:
            raise ValueError(f"{file.stat().st_size:,} bytes is too large")
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{file} is not a JSON object")
    return values
