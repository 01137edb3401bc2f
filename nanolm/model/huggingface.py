"""The file format: a model folder as Hugging Face `transformers` reads and writes it.

    >>> save_model(model, folder, tokenizer); load_model(folder)

`config.json` (see config_json.py), `generation_config.json` and `model.safetensors`, with the
names and shapes of the model's family (see stored.py). Weights that are fused inside (queries,
keys and values; gate and up) are split on disk where the family splits them. Loading is strict:
names and shapes are compared before a number is read, every fault is named, and nothing in a
folder can run.

A checkpoint of a classifier whose model stays frozen holds only what is trained: `trained` and, for
LoRA, `adapters.safetensors`, with `base.json` saying where the rest is and what its checksum was.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanolm.errors import ModelError
from nanolm.model.base import Model
from nanolm.model.build import build_model
from nanolm.model.classifier import Classifier, merge_adapters
from nanolm.model.config import ClassifierConfig, ModelConfig
from nanolm.model.config_json import config_to_json, model_type
from nanolm.model.stored import (
    ADAPTERS,
    BASE,
    HEAD,
    INDEX,
    PREFIX,
    SCORE,
    TRAINED,
    WEIGHTS,
    StoredTensor,
    TensorMapping,
    checked_tensors,
    is_partial,
    load_any_config,
    load_classifier_config,
    load_config,
    read_json,
    tensor_mappings,
    weight_files,
    write_json,
)
from nanolm.text.tokenizer import Tokenizer

__all__ = [
    "ADAPTERS",
    "INDEX",
    "TRAINED",
    "WEIGHTS",
    "checked",
    "load_any_config",
    "load_classifier",
    "load_classifier_config",
    "load_config",
    "load_model",
    "read_json",
    "save_model",
    "save_weights",
    "snapshot",
    "weight_files",
]

M = TypeVar("M", Model, Classifier)
SHARD = 5_000_000_000  # bytes; larger weights are written as several files


@dataclass(frozen=True)
class BaseModel:
    """The model folder that a partial checkpoint refers to."""

    folder: Path
    fingerprint: str  # of its weights


def save_model(
    model: Model | Classifier, folder: Path, tokenizer: Tokenizer, shard: int = SHARD
) -> None:
    """Write everything `AutoModelForCausalLM` (or `...ForSequenceClassification`) and
    `AutoTokenizer` need into `folder`."""
    save_config(model, folder, tokenizer)
    save_weights(model, folder, shard)


def save_partial(
    model: Classifier,
    base: BaseModel,
    trained: dict[str, Tensor],
    adapters: dict[str, Tensor],
    folder: Path,
    tokenizer: Tokenizer,
) -> None:
    """Write `trained` parameters of the model, and refer to `base` for all others."""
    save_config(model, folder, tokenizer)
    save_file(trained, folder / TRAINED)
    if adapters:
        save_file(adapters, folder / ADAPTERS)
    reference = {"folder": str(base.folder), "fingerprint": base.fingerprint}
    write_json(folder / BASE, reference)


def save_config(model: Model | Classifier, folder: Path, tokenizer: Tokenizer) -> None:
    """All but the weights."""
    config = config_to_json(model.config)
    stops = sorted(tokenizer.stops)
    ends = {
        "bos_token_id": tokenizer.start_of_text,
        "eos_token_id": stops if len(stops) > 1 else stops[0],
        "pad_token_id": tokenizer.padding,
    }
    write_json(folder / "config.json", {**config, **ends})
    if isinstance(model, Model):
        # A tokenizer has a token for every byte, most of which never occur in the training text.
        # Their probability is small, but adds up over thousands of tokens of a small model.
        never = {"suppress_tokens": sorted(tokenizer.unseen)} if tokenizer.unseen else {}
        write_json(folder / "generation_config.json", {"do_sample": True, **ends, **never})
    tokenizer.save(folder, base_config(model).context)


def suppressed_tokens(folder: Path, vocab_size: int) -> frozenset[int]:
    """The tokens that a model folder says are never to be generated."""
    file = folder / "generation_config.json"
    listed = (read_json(file) if file.exists() else {}).get("suppress_tokens")
    ids = listed if isinstance(listed, list) else []
    found = frozenset(id for id in ids if type(id) is int and 0 <= id < vocab_size)
    return found if len(found) < vocab_size else frozenset()


def snapshot(model: M, copy_of: Callable[[Tensor], Tensor] = lambda value: value.clone()) -> M:
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
    for mapping in tensor_mappings(model.config):
        parts = parameters[mapping.name].detach().cpu().split(mapping.sizes)
        for name, part in zip(mapping.stored_names, parts, strict=True):
            there = name if name in (HEAD, SCORE) else prefix + name
            yield there, (part.T if mapping.transposed else part).contiguous()


def load_model(folder: Path, dropout: float | None = None) -> Model:
    """The model in `folder`, in float32 on the CPU; with another `dropout` if that is given."""
    config = load_config(folder)
    if dropout is not None:
        config = replace(config, dropout=dropout)
    with checked(folder, config) as (model, tensors):
        assert isinstance(model, Model)
        state = {mapping.name: joined(mapping, tensors) for mapping in tensor_mappings(config)}
        # Kept from before the weights were tied: transformers passes over it, we make sure.
        if config.tied and HEAD in tensors:
            head = read_tensor(tensors[HEAD])
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
    if is_partial(folder):
        return load_partial(folder, config)
    with checked(folder, config) as (model, tensors):
        assert isinstance(model, Classifier)
        state = {mapping.name: joined(mapping, tensors) for mapping in tensor_mappings(config)}
    model.load_state_dict(state, assign=True)
    return model.eval()


def load_partial(folder: Path, config: ClassifierConfig) -> Classifier:
    """The base model that `folder` refers to, with what was trained in its place."""
    base = base_of(folder)
    problem = ""
    if not (base.folder / "config.json").is_file():
        problem = "is not there any more"
    elif weights_fingerprint(base.folder) != base.fingerprint:
        problem = "has other weights now"
    if problem:
        raise ModelError(
            f"{folder} holds only what was trained; the rest is in {base.folder}, which {problem}. "
            "Put it back there, or fine-tune again."
        )
    dropout = config.base.dropout
    found = load_any_config(base.folder)
    if isinstance(found, ClassifierConfig):
        inside = load_classifier(base.folder, dropout).base
    else:
        inside = load_model(base.folder, dropout)
    if inside.config != config.base:
        raise ModelError(f"{folder} does not fit the model it refers to, {base.folder}")
    model = Classifier(config, inside)
    with checked(folder, config) as (_, tensors):
        state = {name: read_tensor(stored) for name, stored in tensors.items()}
    model.load_state_dict(state, strict=False)
    if (folder / ADAPTERS).exists():
        merge_adapters(model.base, read_adapters(folder))
    return model.eval()


def read_adapters(folder: Path) -> dict[str, Tensor]:
    file = folder / ADAPTERS
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {str(error)[:300]}") from None


def base_of(folder: Path) -> BaseModel:
    values = read_json(folder / BASE)
    names = (values.get("folder"), values.get("fingerprint"))
    if not all(isinstance(name, str) for name in names):
        raise ModelError(f"{folder / BASE} does not say where the base model is")
    return BaseModel(Path(str(names[0])), str(names[1]))


def weights_fingerprint(folder: Path) -> str:
    """Of everything that decides what the model computes, but for its config."""
    digest = hashlib.sha256()
    parts = [TRAINED, ADAPTERS, BASE]
    partial = [folder / name for name in parts if (folder / name).exists()]
    for file in partial if is_partial(folder) else weight_files(folder):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


@contextmanager
def checked(
    folder: Path, config: ModelConfig | ClassifierConfig
) -> Iterator[tuple[Model | Classifier, dict[str, StoredTensor]]]:
    """A model of `config` without its numbers, and where in `folder` they are: all that it needs,
    of the right shape, and nothing else. In a partial checkpoint, those that were trained."""
    with ExitStack() as stack:
        tensors = checked_tensors(folder, config, stack, "pt")
        with torch.device("meta"):  # shapes only: nothing is allocated
            if isinstance(config, ClassifierConfig):
                model: Model | Classifier = Classifier(config)
            else:
                model = build_model(config)
        yield model, tensors


def read_tensor(stored: StoredTensor) -> Tensor:
    tensor: Tensor = stored.file.get_tensor(stored.name).to(torch.float32)
    # The sum is quick to have, and where it is not finite, one of them may be to blame.
    if not tensor.sum().isfinite() and not tensor.isfinite().all():
        raise ModelError(f"{stored.name}: its numbers are not finite; the model is broken")
    return tensor


def joined(mapping: TensorMapping, tensors: dict[str, StoredTensor]) -> Tensor:
    parts = [read_tensor(tensors[name]) for name in mapping.stored_names]
    whole = torch.cat(parts) if len(parts) > 1 else parts[0]
    return (whole.T if mapping.transposed else whole).contiguous()
