"""The contents of a model folder: its config, and the names, shapes and dtypes of its tensors.

    >>> tensor_mappings(load_any_config(folder))
    [TensorMapping(name='token_embedding.weight', stored_names=('embed_tokens.weight',), ...

Imports no torch; the weights themselves are read and written by huggingface.py.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from nanolm.errors import ModelError
from nanolm.gguf.blocks import FORMATS
from nanolm.gguf.file import read_header
from nanolm.model.config import (
    ClassifierConfig,
    EncoderDecoderConfig,
    GPTConfig,
    ModelConfig,
    Seq2SeqConfig,
)
from nanolm.model.config_json import config_from_json, model_type
from nanolm.model.families import CLASSES, LLAMA_LIKE
from nanolm.model.gguf import GGUFWeights, gguf_config
from nanolm.model.marian_json import SEQ2SEQ
from nanolm.model.shapes import Config, Shape, parameter_shapes

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SOURCE_TOKENIZER = "source_tokenizer.json"  # if source and target have separate vocabularies
# A partial checkpoint: a reference to its base model, and the trained weights, or for LoRA the
# folder of an adapter. Version 0.1 saved adapters to a file.
BASE, TRAINED, ADAPTER = "base.json", "trained.safetensors", "adapter"
NGRAMS = "ngrams.safetensors"  # a linear model whose logits are added to a classifier's
ADAPTER_CONFIG = "adapter_config.json"
ADAPTERS = "adapters.safetensors"
# The largest JSON file or safetensors header, in bytes: ten times that of the largest supported
# models. Parsed JSON takes up to thirty times its size in memory.
LARGEST_JSON = 2_000_000
HEADS, SCORE = ("lm_head.weight", "embed_out.weight"), "score.weight"  # the second of GPT-NeoX
LOGITS_BIAS = "final_logits_bias"  # of Marian and Pegasus: always zero here
UNPREFIXED = (*HEADS, SCORE, LOGITS_BIAS)
PREFIX = dict.fromkeys((*CLASSES, *SEQ2SEQ), "model.")
PREFIX |= {"gpt2": "transformer.", "gpt_neox": "gpt_neox.", "nanolm": ""}
# Buffers that older versions of transformers saved with the weights, and that all versions ignore.
IGNORED = (
    *(f".{name}.{kind}" for name in ("attn", "attention") for kind in ("bias", "masked_bias")),
    ".rotary_emb.inv_freq",
)
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
NAMES |= dict.fromkeys(LLAMA_LIKE, NAMES["llama"])
NAMES["olmo2"] = NAMES["llama"] | {
    "attention_norm": ("post_attention_layernorm",),
    "feed_forward_norm": ("post_feedforward_layernorm",),
}
NAMES["gpt_neox"] = NAMES["llama"] | {
    "token_embedding": ("embed_in",),
    "attention.qkv": ("attention.query_key_value",),
    "attention.out": ("attention.dense",),
    "feed_forward.up": ("mlp.dense_h_to_4h",),
    "feed_forward.out": ("mlp.dense_4h_to_h",),
    "norm": ("final_layer_norm",),
    "head": ("embed_out",),
}
NAMES["marian"] = NAMES["pegasus"] = {
    "token_embedding": ("shared",),  # or decoder.embed_tokens
    "source_embedding": ("encoder.embed_tokens",),
    "attention_norm": ("self_attn_layer_norm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.out_proj",),
    "cross_attention_norm": ("encoder_attn_layer_norm",),
    "cross_attention.query": ("encoder_attn.q_proj",),
    "cross_attention.key_value": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "cross_attention.out": ("encoder_attn.out_proj",),
    "feed_forward_norm": ("final_layer_norm",),
    "feed_forward.up": ("fc1",),
    "feed_forward.out": ("fc2",),
    "encoder_norm": ("encoder.layer_norm",),
    "norm": ("decoder.layer_norm",),
    "head": ("lm_head",),
}
LAYERS = {**dict.fromkeys(CLASSES, "layers"), "gpt2": "h"}
EMBEDDINGS = {part: f"{part}.embed_tokens.weight" for part in ("encoder", "decoder")}
UNUSED = "shared.weight"  # transformers 5 stores it even if encoder and decoder have their own
POSITIONS = tuple(f"{part}.embed_positions.weight" for part in ("encoder", "decoder"))
LINEAR = ("attention.qkv", "attention.out", "feed_forward.up", "feed_forward.out")
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DTYPES |= {name: name for name in FORMATS if name not in DTYPES}  # GGUF's quantized ones
MOST_BASES = 10  # partial checkpoints that refer to others
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# A plain file name inside the folder.
SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")


@dataclass(frozen=True)
class TensorMapping:
    """One of our parameters, and the tensors on disk that are stacked to form it."""

    name: str
    stored_names: tuple[str, ...]
    sizes: tuple[int, ...]  # rows of each
    transposed: bool = False  # GPT-2 stores (in, out)
    interleaved_heads: int = 0  # GPT-NeoX stores queries, keys and values of a head together
    copies: tuple[str, ...] = ()  # names that it may be stored under again


def config_file(folder: Path) -> Path:
    """The file that describes a model: a GGUF file describes itself."""
    return folder if folder.is_file() else folder / "config.json"


def load_any_config(folder: Path) -> Config:
    file = config_file(folder)
    try:
        if file == folder:
            return gguf_config(file)
        return config_from_json(read_json(file), file)
    except RecursionError:  # parsed JSON may still be too deep to compare or show
        raise ModelError(f"{file} is nested too deeply") from None


def load_config(folder: Path) -> ModelConfig:
    """The config of a language model; refuses classifiers and sequence-to-sequence models."""
    config = load_any_config(folder)
    if isinstance(config, ClassifierConfig | Seq2SeqConfig):
        raise wrong_kind(folder, config, "but this needs a language model")
    return config


def load_classifier_config(folder: Path) -> ClassifierConfig:
    """The config of a classifier; refuses other models."""
    config = load_any_config(folder)
    if isinstance(config, ModelConfig):
        train = f"train one with `nanolm finetune DATA --from {folder}`"
        raise wrong_kind(folder, config, "but this needs a classifier", train)
    return config


def load_seq2seq_config(folder: Path) -> Seq2SeqConfig:
    """The config of a sequence-to-sequence model; refuses other models."""
    config = load_any_config(folder)
    if not isinstance(config, Seq2SeqConfig):
        train = "train one with `nanolm train-pairs PAIRS`"
        raise wrong_kind(folder, config, "but this needs a sequence-to-sequence model", train)
    return config


def wrong_kind(folder: Path, config: Config, needed: str, train: str = "") -> ModelError:
    """The error for a model of another kind: how to use it, or how to train the kind needed."""
    match config:
        case ClassifierConfig():
            kind, advice = "a classifier", f'try `nanolm classify {folder} "..."`'
        case Seq2SeqConfig():
            kind, advice = "a sequence-to-sequence model", f'try `nanolm translate {folder} "..."`'
        case _:
            kind, advice = "a language model", train
    return ModelError(f"{folder} is {kind}, {needed}; {advice}")


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
    partial, problem = is_partial(folder), "does not match its config.json"
    with ExitStack() as stack:
        prefix = "" if partial else PREFIX[family_of(folder, config)]
        if folder.is_file():
            tensors, problem = open_gguf(folder, config), "does not match its header"
        else:
            tensors = open_weights(weight_files(folder), stack, prefix, framework)
        layers = (config.base if isinstance(config, ClassifierConfig) else config).layers
        layers += config.encoder_layers if isinstance(config, Seq2SeqConfig) else 0
        if layers > len(tensors) and not partial:  # before building that many
            raise ModelError(f"{folder} {problem}: fewer than {layers} layers")
        mappings = [] if partial else tensor_mappings(config, family_of(folder, config))
        if problems := mismatches(config, tensors, mappings, partial):
            raise mismatch(f"{folder} {problem}", problems)
        yield tensors


def mismatch(what: str, problems: list[str]) -> ModelError:
    shown = [problem[:200] for problem in problems[:20]]
    shown += [f"and {len(problems) - 20} more"] * (len(problems) > 20)
    return ModelError(f"{what}:\n  " + "\n  ".join(shown))


def open_weights(
    files: list[Path], stack: ExitStack, prefix: str, framework: str
) -> dict[str, StoredTensor]:
    """Every tensor of these files, by its name without `prefix`."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
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


def open_gguf(path: Path, config: Config) -> dict[str, StoredTensor]:
    """Every tensor of a GGUF file, by its name in a model folder."""
    assert isinstance(config, GPTConfig)
    names = [name for mapping in tensor_mappings(config) for name in mapping.stored_names]
    opened = GGUFWeights(path, config, names)
    return {
        name: StoredTensor(opened, path, info.name, shape, info.format)
        for name, info, shape in opened.entries()
    }


def weight_files(folder: Path) -> list[Path]:
    """The single weight file, or those listed in the index."""
    if has_adapter(folder):
        return []
    if folder.is_file():
        return [folder]
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


def has_adapter(folder: Path) -> bool:
    """Whether it is a partial checkpoint whose weights are those of an adapter."""
    return is_partial(folder) and (folder / ADAPTER).is_dir()


def base_folder(folder: Path) -> Path:
    """The model folder that a partial checkpoint refers to."""
    path = read_json(folder / BASE).get("folder")
    if not isinstance(path, str):
        raise ModelError(f"{folder / BASE} does not name the base model")
    return Path(path)


def stored_dtype(folder: Path) -> str:
    """The precision that most weights of a model are stored in, such as "bfloat16"; of a partial
    checkpoint, those of its base model, if that is still there."""
    for _ in range(MOST_BASES):
        if is_partial(folder) and (base := base_folder(folder)).exists():
            folder = base
    sizes: Counter[str] = Counter()
    if folder.is_file():
        for info in read_header(folder).tensors.values():
            sizes[info.format] += math.prod(info.shape)
    else:
        with ExitStack() as stack:
            for tensor in open_weights(weight_files(folder), stack, "", "numpy").values():
                sizes[tensor.dtype] += math.prod(tensor.shape)
    (dtype, _), *_ = sizes.most_common(1) or [("F32", 0)]
    return DTYPES.get(dtype, dtype)


def family_of(folder: Path, config: Config) -> str:
    """The family that the names of tensors follow. An older version may have saved a model in our
    own format that a family has since been added for."""
    if folder.is_file():  # GGUF
        return model_type(config)[0]
    return str(read_json(folder / "config.json")["model_type"])


def mismatches(
    config: Config, tensors: dict[str, StoredTensor], mappings: list[TensorMapping], partial: bool
) -> list[str]:
    """Tensors that are missing or unexpected, or have another shape or an unsupported dtype. In a
    partial checkpoint, names and shapes are those in memory, and none counts as missing."""
    shapes = parameter_shapes(config)
    expected: dict[str, Shape] = dict(shapes) if partial else {}
    optional = constant_shapes(config)
    for mapping in mappings:
        for name, size in zip(mapping.stored_names, mapping.sizes, strict=True):
            part = (size, *shapes[mapping.name][1:])
            expected[name] = part[::-1] if mapping.transposed else part
        optional |= dict.fromkeys(mapping.copies, shapes[mapping.name])
    optional |= expected if partial else {}
    return shape_problems(tensors, {} if partial else expected, optional)


def shape_problems(
    tensors: dict[str, StoredTensor], needed: dict[str, Shape], optional: dict[str, Shape]
) -> list[str]:
    found = [f"{name}: missing" for name in needed if name not in tensors]
    expected = needed | optional
    for name, stored in tensors.items():
        if name not in expected:
            found.append(f"{name}: not part of this model")
        elif stored.shape != expected[name]:
            found.append(f"{name}: shape {stored.shape}, but the config implies {expected[name]}")
        if stored.dtype not in DTYPES:
            found.append(f"{name}: dtype {stored.dtype}; nanolm does not support quantized weights")
    return found


def tensor_mappings(config: Config, family: str | None = None) -> list[TensorMapping]:
    """Every parameter of a model with its names on disk, without the family's prefix. By default,
    those that the model is saved with."""
    family = family or model_type(config)[0]
    if isinstance(config, ClassifierConfig):
        base = replace(config.base, tied=True)  # a classifier has no output layer
        inside = base_mappings(base, family)
        table = [replace(each, name=f"base.{each.name}", copies=()) for each in inside]
        return [*table, TensorMapping(SCORE, (SCORE,), (len(config.labels),))]
    return base_mappings(config, family)


def base_mappings(config: ModelConfig, family: str) -> list[TensorMapping]:
    shapes = parameter_shapes(config)
    if family == "nanolm":
        return [TensorMapping(name, (name,), shape[:1]) for name, shape in shapes.items()]
    assert isinstance(config, GPTConfig | EncoderDecoderConfig)
    kv_rows, table = config.kv_heads * config.head_dim, []
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")  # "blocks.0.attention.qkv", "weight"
        layer = ""
        if inside := re.fullmatch(r"(\w+)\.(\d+)\.(.+)", module):
            stack, number, module = inside.groups()
            layer = f"{LAYERS.get(family, f'{stack}.layers')}.{number}."
        outside = tuple(f"{layer}{there}.{kind}" for there in NAMES[family][module])
        sizes = (shape[0] // len(outside),) * len(outside)  # gate and up, or keys and values
        if len(outside) == 3:  # queries, keys, values
            sizes = (config.heads * config.head_dim, kv_rows, kv_rows)
        transposed = family == "gpt2" and module in LINEAR and kind == "weight"
        interleaved = config.heads if family == "gpt_neox" and module == "attention.qkv" else 0
        table.append(TensorMapping(name, outside, sizes, transposed, interleaved))
    # The first is the embedding.
    copies = HEADS if config.tied else ()
    if isinstance(config, EncoderDecoderConfig):
        if config.source_vocab_size is None:
            copies = (*EMBEDDINGS.values(), *copies)
        else:
            table[0] = replace(table[0], stored_names=(EMBEDDINGS["decoder"],))
    table[0] = replace(table[0], copies=copies)
    return table


def constant_shapes(config: Config) -> dict[str, Shape]:
    """Tensors of Marian and Pegasus that are not parameters here."""
    if not isinstance(config, EncoderDecoderConfig) or model_type(config)[0] == "nanolm":
        return {}
    shapes: dict[str, Shape] = dict.fromkeys(POSITIONS, (config.context, config.dim))
    if config.source_vocab_size is not None and not config.tied:
        shapes[UNUSED] = (config.source_vocab_size, config.dim)
    return {LOGITS_BIAS: (1, config.vocab_size), **shapes}


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
