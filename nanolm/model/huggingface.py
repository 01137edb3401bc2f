"""The file format: a model folder as Hugging Face `transformers` reads and writes it.

    >>> save_model(model, folder, tokenizer); load_model(folder)

`config.json` (see config_json.py), `generation_config.json` and `model.safetensors`, with the
names and shapes of the model's family. Weights that are fused inside (queries, keys and values;
gate and up) are split on disk where the family splits them. Loading is strict: names and shapes
are compared before a number is read, every fault is named, and nothing in a folder can run.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nanolm.errors import ModelError
from nanolm.model.base import Model
from nanolm.model.build import build_model
from nanolm.model.classifier import Classifier
from nanolm.model.config import ClassifierConfig, GPTConfig, ModelConfig
from nanolm.model.config_json import config_from_json, config_to_json, model_type
from nanolm.text.tokenizer import Tokenizer

M = TypeVar("M", Model, Classifier)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = 5_000_000_000  # bytes; larger weights are written as several files
# Bytes; the largest models that are read here have a tenth of it. Parsed, JSON takes up to thirty
# times its size, so what is small is held to that.
LARGEST_JSON = 2_000_000
LARGEST_HEADER = 2_000_000  # what says which tensors a file has
HEAD, SCORE = "lm_head.weight", "score.weight"
PREFIX = {"gpt2": "transformer.", "llama": "model.", "qwen3": "model.", "nanolm": ""}
# Tables that older versions of transformers saved beside the weights, and every version ignores.
IGNORED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
# Where each module of ours is on disk; several names are one fused matrix of ours.
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
# A name within the folder, and none that the system could choke on.
SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")


@dataclass(frozen=True)
class Row:
    """One parameter here, and the tensors it is on disk: stacked in this order."""

    inside: str
    outside: tuple[str, ...]
    sizes: tuple[int, ...]  # rows of each
    transposed: bool = False  # GPT-2 stores (in, out)


def save_model(
    model: Model | Classifier, folder: Path, tokenizer: Tokenizer, shard: int = SHARD
) -> None:
    """Write everything `AutoModelForCausalLM` (or `...ForSequenceClassification`) and
    `AutoTokenizer` need into `folder`."""
    config = config_to_json(model.config)
    stops = sorted(tokenizer.stops)
    ends = {
        "bos_token_id": tokenizer.start_of_text,
        "eos_token_id": stops if len(stops) > 1 else stops[0],
        "pad_token_id": tokenizer.padding,
    }
    write_json(folder / "config.json", {**config, **ends})
    if isinstance(model, Model):
        write_json(folder / "generation_config.json", {"do_sample": True, **ends})
    save_weights(model, folder, shard)
    tokenizer.save(folder, base_config(model).context)


def copied(model: M, copy_of: Callable[[Tensor], Tensor] = lambda value: value.clone()) -> M:
    """What can be saved while the model itself goes on learning."""
    with torch.device("meta"):  # nothing is drawn or allocated
        copy = type(model)(model.config)
    state = {name: copy_of(value.detach()) for name, value in model.named_parameters()}
    copy.load_state_dict(state, strict=False, assign=True)
    if isinstance(copy, Model) and copy.config.tied:
        copy.head.weight = copy.token_embedding.weight
    return copy


def base_config(model: Model | Classifier) -> ModelConfig:
    """Of the model, or of the one inside a classifier."""
    return model.config.base if isinstance(model, Classifier) else model.config


def save_weights(model: Model | Classifier, folder: Path, shard: int) -> None:
    """All tensors in one file, or in several with an index where they exceed `shard` bytes."""
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, tensor in split_weights(model):
        size += tensor.nbytes
        total += tensor.nbytes
        if size > shard and shards[-1]:
            shards.append({})
            size = tensor.nbytes
        shards[-1][name] = tensor
    # The key is what transformers looks for to know who wrote the numbers.
    metadata = {"format": "pt"}
    if len(shards) == 1:
        save_file(shards[0], folder / WEIGHTS, metadata)
        return
    places: dict[str, str] = {}
    for number, part in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(part, folder / file, metadata)
        places |= dict.fromkeys(part, file)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def split_weights(model: Model | Classifier) -> Iterator[tuple[str, Tensor]]:
    """Each tensor on disk with its name there."""
    prefix = PREFIX[model_type(model.config)[0]]
    parameters = dict(model.named_parameters())
    for row in rows(model):
        parts = parameters[row.inside].detach().cpu().split(row.sizes)
        for name, part in zip(row.outside, parts, strict=True):
            there = name if name in (HEAD, SCORE) else prefix + name
            yield there, (part.T if row.transposed else part).contiguous()


def load_any_config(folder: Path) -> ModelConfig | ClassifierConfig:
    file = folder / "config.json"
    try:
        return config_from_json(read_json(file), file)
    except RecursionError:  # what could just be read may be too deep to compare or show
        raise ModelError(f"{file} is nested too deeply") from None


def load_config(folder: Path) -> ModelConfig:
    """Of a language model; a classifier is refused."""
    config = load_any_config(folder)
    if isinstance(config, ClassifierConfig):
        raise ModelError(
            f"{folder} is a classifier, and this needs a language model; "
            f'try `nanolm classify {folder} "..."`'
        )
    return config


def load_classifier_config(folder: Path) -> ClassifierConfig:
    """Of a classifier; a language model is refused."""
    config = load_any_config(folder)
    if isinstance(config, ModelConfig):
        raise ModelError(
            f"{folder} is a language model, and this needs a classifier; "
            f"make one with `nanolm finetune DATA --from {folder}`"
        )
    return config


def load_model(folder: Path, dropout: float | None = None) -> Model:
    """The model in `folder`, in float32 on the CPU; with another `dropout` if that is given."""
    config = load_config(folder)
    if dropout is not None:
        config = replace(config, dropout=dropout)
    with checked(folder, config) as (model, tensors):
        assert isinstance(model, Model)
        state = {row.inside: joined(row, tensors) for row in rows(model)}
        # Kept from before the weights were tied: transformers passes over it, we make sure.
        if config.tied and HEAD in tensors:
            head = tensors[HEAD].read()
            if not torch.equal(head, state["token_embedding.weight"]):
                raise ModelError(f"{folder}: {HEAD} differs from the embedding it is tied to")
    model.load_state_dict(state, strict=False, assign=True)
    if config.tied:
        model.head.weight = model.token_embedding.weight
    return model.eval()


def load_classifier(folder: Path, dropout: float | None = None) -> Classifier:
    """The classifier in `folder`, in float32 on the CPU."""
    config = load_classifier_config(folder)
    if dropout is not None:
        config = replace(config, base=replace(config.base, dropout=dropout))
    with checked(folder, config) as (model, tensors):
        assert isinstance(model, Classifier)
        state = {row.inside: joined(row, tensors) for row in rows(model)}
    model.load_state_dict(state, assign=True)
    return model.eval()


@contextmanager
def checked(
    folder: Path, config: ModelConfig | ClassifierConfig
) -> Iterator[tuple[Model | Classifier, dict[str, "Stored"]]]:
    """A model of `config` without its numbers, and where in `folder` they are: all that it needs,
    of the right shape, and nothing else."""
    with ExitStack() as stack:
        tensors = open_weights(folder, stack, PREFIX[model_type(config)[0]])
        layers = (config.base if isinstance(config, ClassifierConfig) else config).layers
        if layers > len(tensors):  # before anything is built for so many
            raise ModelError(f"{folder} does not fit its config.json: no {layers} layers")
        try:
            with torch.device("meta"):  # shapes only: nothing is allocated for a config that lies
                if isinstance(config, ClassifierConfig):
                    model: Model | Classifier = Classifier(config)
                else:
                    model = build_model(config)
        except (RuntimeError, TypeError):  # the size of a tensor has more than 63 bits
            file = folder / "config.json"
            raise ModelError(f"{file}: its sizes make a tensor that no memory could hold") from None
        if problems := misfits(model, tensors):
            shown = [problem[:200] for problem in problems[:20]]
            shown += [f"and {len(problems) - 20} more"] * (len(problems) > 20)
            raise ModelError(f"{folder} does not fit its config.json:\n  " + "\n  ".join(shown))
        yield model, tensors


@dataclass(frozen=True)
class Stored:
    """A tensor in an open file; nothing of it is read yet."""

    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> Tensor:
        tensor: Tensor = self.file.get_tensor(self.name).to(torch.float32)
        # The sum is quick to have, and where it is not finite, one of them may be to blame.
        if not tensor.sum().isfinite() and not tensor.isfinite().all():
            raise ModelError(f"{self.name}: its numbers are not finite; the model is broken")
        return tensor


def open_weights(folder: Path, stack: ExitStack, prefix: str) -> dict[str, Stored]:
    """Every tensor of the folder by its name without `prefix`."""
    tensors: dict[str, Stored] = {}
    for file in weight_files(folder):
        try:
            with file.open("rb") as stream:
                header = int.from_bytes(stream.read(8), "little")
            if header > LARGEST_HEADER:
                raise ModelError(f"{file} is no safetensors file: a header of {header:,} bytes")
            opened = stack.enter_context(safe_open(file, framework="pt"))
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                stored = Stored(opened, name, tuple(part.get_shape()), part.get_dtype())
                short = name.removeprefix(prefix)
                if short in tensors:
                    raise ModelError(f"{file}: {name[:200]} is there twice")
                if not name.endswith(IGNORED) or prefix == "":
                    tensors[short] = stored
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read: {str(error)[:300]}") from None
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The one file of weights, or those that the index names."""
    names = [WEIGHTS]
    if not (folder / WEIGHTS).exists() and (folder / INDEX).exists():
        places = read_json(folder / INDEX).get("weight_map")
        names = list(places.values()) if isinstance(places, dict) else []
        if not names or not all(isinstance(name, str) for name in names):
            raise ModelError(f"{folder / INDEX}: its weight_map does not say where the weights are")
        names = sorted(set(names))
        for name in names:
            if not SHARD_NAME.fullmatch(name):
                message = f"{folder / INDEX}: {name[:200]!r} is no weight file of this folder"
                raise ModelError(message)
    for name in names:
        if not (folder / name).is_file():
            others = sorted(file.name for file in folder.glob("*") if file.suffix in PICKLES)
            hint = ""
            if others:
                hint = f"; {others[0]} can run code when it is loaded, so nanolm does not"
            raise ModelError(f"{folder / name} does not exist or is no file{hint}")
    return [folder / name for name in names]


def misfits(model: Model | Classifier, tensors: dict[str, Stored]) -> list[str]:
    """Tensors that are missing, of another shape or kind of number, or too many."""
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    expected: dict[str, tuple[int, ...]] = {}
    for row in rows(model):
        shape = shapes[row.inside]
        for name, size in zip(row.outside, row.sizes, strict=True):
            part = (size, *shape[1:])
            expected[name] = part[::-1] if row.transposed else part
    found = [f"{name}: missing" for name in expected if name not in tensors]
    for name, stored in tensors.items():
        if name not in expected:
            if name != HEAD or isinstance(model, Classifier) or not model.config.tied:
                found.append(f"{name}: not part of this model")
        elif stored.shape != expected[name]:
            found.append(f"{name}: {stored.shape} where config.json says {expected[name]}")
        if stored.dtype not in READ:
            found.append(f"{name}: {stored.dtype} numbers; nanolm reads no quantised weights")
    return found


def joined(row: Row, tensors: dict[str, Stored]) -> Tensor:
    parts = [tensors[name].read() for name in row.outside]
    whole = torch.cat(parts) if len(parts) > 1 else parts[0]
    return (whole.T if row.transposed else whole).contiguous()


def rows(model: Model | Classifier) -> list[Row]:
    """Every parameter of the model with its names on disk, the prefix of the family aside."""
    family, _ = model_type(model.config)
    if isinstance(model, Classifier):
        table = [replace(row, inside=f"base.{row.inside}") for row in base_rows(model.base, family)]
        return [*table, Row(SCORE, (SCORE,), (len(model.config.labels),))]
    return base_rows(model, family)


def base_rows(model: Model, family: str) -> list[Row]:
    config = model.config
    table = []
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")  # "blocks.0.attention.qkv", "weight"
        if family == "nanolm":
            table.append(Row(name, (name,), tuple(parameter.shape[:1])))
            continue
        assert isinstance(config, GPTConfig)
        layer = ""
        if module.startswith("blocks."):
            _, number, module = module.split(".", 2)
            layer = f"{LAYERS[family]}.{number}."
        outside = tuple(f"{layer}{there}.{kind}" for there in NAMES[family][module])
        sizes = tuple(parameter.shape[:1])
        if len(outside) == 3:  # queries, keys, values
            shared = config.kv_heads * config.head_dim
            sizes = (config.heads * config.head_dim, shared, shared)
        elif len(outside) == 2:  # gate, up
            sizes = (config.hidden, config.hidden)
        transposed = family == "gpt2" and module in LINEAR and kind == "weight"
        table.append(Row(name, outside, sizes, transposed))
    return table


def write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def read_json(file: Path) -> dict[str, Any]:
    try:
        if not file.is_file():
            raise ModelError(f"{file} does not exist or is no file")
        if file.stat().st_size > LARGEST_JSON:
            raise ValueError(f"{file.stat().st_size:,} bytes are too many")
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{file} holds no JSON object")
    return values
