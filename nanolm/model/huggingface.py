"""Reads and writes model folders in the format of Hugging Face `transformers`.

    >>> save_model(model, folder, tokenizer); load_model(folder)

Loading is strict: names and shapes are checked before any weights are read, every problem is
reported, and nothing in a folder can run code. The checkpoint of a classifier with a frozen base
model holds only the trained weights; `base.json` has the path and checksum of the rest.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nanolm.errors import NOT_FINITE, ModelError
from nanolm.model import stored
from nanolm.model.base import Model
from nanolm.model.build import build_model
from nanolm.model.classifier import Classifier, merge_adapters
from nanolm.model.config import ClassifierConfig
from nanolm.model.config_json import config_to_json, model_type
from nanolm.text.tokenizer import Tokenizer

M = TypeVar("M", Model, Classifier)
SHARD = 5_000_000_000  # bytes; larger models are split into several files
LARGE = 30.0  # root mean square of a tensor; above it, a few tokens are run to detect overflow


@dataclass(frozen=True)
class BaseModel:
    """The model folder that a partial checkpoint refers to."""

    folder: Path
    fingerprint: str  # of its weights


def save_model(
    model: Model | Classifier, folder: Path, tokenizer: Tokenizer, shard: int = SHARD
) -> None:
    """Write everything that `AutoModelForCausalLM` (or `...ForSequenceClassification`) and
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
    save_file(trained, folder / stored.TRAINED)
    if adapters:
        save_file(adapters, folder / stored.ADAPTERS)
    reference = {"folder": str(base.folder), "fingerprint": base.fingerprint}
    stored.write_json(folder / stored.BASE, reference)


def save_config(model: Model | Classifier, folder: Path, tokenizer: Tokenizer) -> None:
    """Write everything except the weights."""
    stops = sorted(tokenizer.stops)
    ends = {
        "bos_token_id": tokenizer.start_of_text,
        "eos_token_id": stops if len(stops) > 1 else stops[0],
        "pad_token_id": tokenizer.padding,
    }
    stored.write_json(folder / "config.json", {**config_to_json(model.config), **ends})
    if isinstance(model, Model):
        # The vocabulary has a token for every byte, but most never occur in the training text. A
        # small model gives each a small probability, which adds up over thousands of tokens.
        never = {"suppress_tokens": sorted(tokenizer.unseen)} if tokenizer.unseen else {}
        stored.write_json(folder / "generation_config.json", {"do_sample": True, **ends, **never})
    base = model.config.base if isinstance(model, Classifier) else model.config
    tokenizer.save(folder, base.context)


def suppressed_tokens(folder: Path, vocab_size: int) -> frozenset[int]:
    """The tokens that a model folder lists as never to be generated."""
    file = folder / "generation_config.json"
    listed = (stored.read_json(file) if file.exists() else {}).get("suppress_tokens")
    ids = listed if isinstance(listed, list) else []
    never = frozenset(id for id in ids if type(id) is int and 0 <= id < vocab_size)
    return never if len(never) < vocab_size else frozenset()


def snapshot(model: M, copy_of: Callable[[Tensor], Tensor] = lambda value: value.clone()) -> M:
    """A copy that can be saved while the model is trained further."""
    with torch.device("meta"):  # no initialization, no allocation
        copy = type(model)(model.config)
    state = {name: copy_of(value.detach()) for name, value in model.named_parameters()}
    copy.load_state_dict(state, strict=False, assign=True)
    if isinstance(copy, Model) and copy.config.tied:
        copy.head.weight = copy.token_embedding.weight
    return copy


def save_weights(model: Model | Classifier, folder: Path, shard: int) -> None:
    """Write all tensors to one file, or to several with an index if they exceed `shard` bytes."""
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, tensor in split_weights(model):
        size += tensor.nbytes
        total += tensor.nbytes
        if size > shard and shards[-1]:
            shards.append({})
            size = tensor.nbytes
        shards[-1][name] = tensor
    metadata = {"format": "pt"}  # required by transformers
    if len(shards) == 1:
        save_file(shards[0], folder / stored.WEIGHTS, metadata)
        return
    places: dict[str, str] = {}
    for number, part in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(part, folder / file, metadata)
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    stored.write_json(folder / stored.INDEX, index)


def split_weights(model: Model | Classifier) -> Iterator[tuple[str, Tensor]]:
    """The tensors as they are stored, with their names on disk."""
    prefix = stored.PREFIX[model_type(model.config)[0]]
    parameters = dict(model.named_parameters())
    for mapping in stored.tensor_mappings(model.config):
        parts = parameters[mapping.name].detach().cpu().split(mapping.sizes)
        for name, part in zip(mapping.stored_names, parts, strict=True):
            there = name if name in (stored.HEAD, stored.SCORE) else prefix + name
            yield there, (part.T if mapping.transposed else part).contiguous()


def load_model(folder: Path, dropout: float | None = None) -> Model:
    """Load the model in `folder`, in float32 on the CPU, optionally with another `dropout`."""
    config = stored.load_config(folder)
    if dropout is not None:
        config = replace(config, dropout=dropout)
    state, large = read_state(folder, config)
    with torch.device("meta"):  # shapes only: nothing is allocated
        model = build_model(config)
    model.load_state_dict(state, strict=False, assign=True)
    if config.tied:
        model.head.weight = model.token_embedding.weight
    return checked(model.eval(), large)


def load_classifier(folder: Path, dropout: float | None = None) -> Classifier:
    """Load the classifier in `folder`, in float32 on the CPU."""
    config = stored.load_classifier_config(folder)
    if dropout is not None:
        config = replace(config, base=replace(config.base, dropout=dropout))
    if stored.is_partial(folder):
        return load_partial(folder, config)
    state, large = read_state(folder, config)
    with torch.device("meta"):
        model = Classifier(config)
    model.load_state_dict(state, assign=True)
    return checked(model.eval(), large)


def load_partial(folder: Path, config: ClassifierConfig) -> Classifier:
    """Load the base model that `folder` refers to, and replace the trained weights."""
    match stored.read_json(folder / stored.BASE):
        case {"folder": str(path), "fingerprint": str(fingerprint)}:
            base, problem = BaseModel(Path(path), fingerprint), ""
        case _:
            raise ModelError(f"{folder / stored.BASE} does not name the base model")
    if not (base.folder / "config.json").is_file():
        problem = "no longer exists"
    elif weights_fingerprint(base.folder) != base.fingerprint:
        problem = "now has different weights"
    if problem:
        raise ModelError(
            f"{folder} has only the fine-tuned weights; the others are in {base.folder}, which "
            f"{problem}. Restore that folder, or fine-tune again."
        )
    if isinstance(stored.load_any_config(base.folder), ClassifierConfig):
        inside = load_classifier(base.folder, config.base.dropout).base
    else:
        inside = load_model(base.folder, config.base.dropout)
    if inside.config != config.base:
        raise ModelError(f"{folder} does not match its base model, {base.folder}")
    model = Classifier(config, inside)
    state, large = read_state(folder, config)
    model.load_state_dict(state, strict=False)
    if (file := folder / stored.ADAPTERS).exists():
        merge_adapters(model.base, load_tensors(file))
    return checked(model.eval(), large)


def weights_fingerprint(folder: Path) -> str:
    """A checksum of all weights, without the config."""
    digest = hashlib.sha256()
    partial = [folder / name for name in (stored.TRAINED, stored.ADAPTERS, stored.BASE)]
    for file in partial if stored.is_partial(folder) else stored.weight_files(folder):
        if file.exists():
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def read_state(folder: Path, config: stored.Config) -> tuple[dict[str, Tensor], str]:
    """The parameters of `config` by our names (in a partial checkpoint, the trained ones), and the
    location of the first unusually large tensor."""
    large = ""

    def read_tensor(source: stored.StoredTensor) -> Tensor:
        nonlocal large
        tensor: Tensor = source.file.get_tensor(source.name).to(torch.float32)
        where = f"{source.path}: {source.name}"
        if root_mean_square(tensor, where) > LARGE:
            large = large or where
        return tensor

    with stored.checked_tensors(folder, config, "pt") as tensors:
        if stored.is_partial(folder):
            return {name: read_tensor(each) for name, each in tensors.items()}, large
        state = {}
        for mapping in stored.tensor_mappings(config):
            parts = [read_tensor(tensors[name]) for name in mapping.stored_names]
            whole = torch.cat(parts) if len(parts) > 1 else parts[0]
            state[mapping.name] = (whole.T if mapping.transposed else whole).contiguous()
        # A tied head that is stored anyway: transformers ignores it, we check that it is equal.
        if stored.HEAD in tensors and "head.weight" not in state:
            head = read_tensor(tensors[stored.HEAD])
            if not torch.equal(head, state["token_embedding.weight"]):
                raise ModelError(f"{folder}: {stored.HEAD} differs from the embedding")
        return state, large


def load_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of one of our own files."""
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {str(error)[:300]}") from None
    for name, tensor in tensors.items():
        root_mean_square(tensor.float(), f"{file}: {name}")
    return tensors


def root_mean_square(tensor: Tensor, where: str) -> float:
    """The root mean square of weights, which must be finite, like the sum of their squares."""
    squares = torch.linalg.vector_norm(tensor).item() ** 2 if tensor.numel() else 0.0
    if not squares < torch.finfo(torch.float32).max:
        kind = "too large to compute with" if tensor.isfinite().all() else "not finite"
        raise ModelError(f"{where}: its values are {kind}; the model is damaged")
    return math.sqrt(squares / max(1, tensor.numel()))


def checked(model: M, large: str) -> M:
    """Return the model, or refuse it if it has `large` weights and its activations overflow. Norms
    turn overflow into zeros, so their inputs are checked as well as the outputs."""
    if not large:
        return model
    seen: list[Tensor] = []
    norms = [each for each in model.modules() if isinstance(each, nn.LayerNorm | nn.RMSNorm)]
    base = model.base if isinstance(model, Classifier) else model
    largest = base.token_embedding.weight.abs().amax(dim=1)
    ids = largest.topk(min(len(largest), base.window() or 16, 16)).indices[None]  # (1, time)
    with torch.no_grad(), ExitStack() as hooks:
        for norm in norms:
            hook = norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
            hooks.enter_context(hook)
        seen.append(base(ids))
        if isinstance(model, Classifier):
            seen.append(model.score(seen[-1]))
    if not all(torch.linalg.vector_norm(x, dim=-1).square().isfinite().all() for x in seen):
        raise ModelError(f"{NOT_FINITE} ({large})")
    return model
