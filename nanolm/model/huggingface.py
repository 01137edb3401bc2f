"""Reads and writes model folders in the format of Hugging Face `transformers`.

    >>> save_model(model, folder, tokenizer); load_model(folder)

Loading is strict: names and shapes are checked before any weights are read, every problem is
reported, and nothing in a folder can run code. The checkpoint of a model with a frozen base model
holds only the trained weights or a LoRA adapter; `base.json` has the path and checksum of the rest.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanolm.errors import ModelError
from nanolm.model import peft, stored
from nanolm.model.adapters import LowRank, merge_adapters
from nanolm.model.base import Model, Network
from nanolm.model.build import build_model, build_seq2seq
from nanolm.model.classifier import Classifier
from nanolm.model.config import ClassifierConfig, GPTConfig, ModelConfig
from nanolm.model.config_json import config_to_json, model_type
from nanolm.model.finite import LARGE, checked, root_mean_square
from nanolm.model.positions import sinusoidal_table
from nanolm.model.seq2seq import Seq2Seq
from nanolm.model.shapes import Config
from nanolm.text.tokenizer import Tokenizer

M = TypeVar("M", Model, Classifier, Seq2Seq)
N = TypeVar("N", Model, Seq2Seq)
C = TypeVar("C", bound=ModelConfig)
SHARD = 5_000_000_000  # bytes; larger models are split into several files
BEAMS = 4  # of beam search by default, as in the paper of 2017
PRECISION = 0.004  # of positions between -1 and 1 that are stored in bfloat16


@dataclass(frozen=True)
class BaseModel:
    """The model folder that a partial checkpoint refers to."""

    folder: Path
    fingerprint: str  # of its weights
    adapter: Path | None = None  # that was merged first

    def __str__(self) -> str:
        """What an adapter for this model has to be used with."""
        return f"{self.folder} with {self.adapter} merged" if self.adapter else str(self.folder)


def save_model(
    model: Model | Classifier, folder: Path, tokenizer: Tokenizer, shard: int = SHARD
) -> None:
    """Write everything that `AutoModelForCausalLM` (or `...ForSequenceClassification`) and
    `AutoTokenizer` need into `folder`."""
    save_config(model, folder, tokenizer)
    save_weights(model, folder, shard)


def save_seq2seq(
    model: Seq2Seq,
    folder: Path,
    tokenizer: Tokenizer,
    source_tokenizer: Tokenizer | None = None,
    shard: int = SHARD,
) -> None:
    """The same for `AutoModelForSeq2SeqLM`. `AutoTokenizer` encodes a text with its end token. If
    source and target have separate vocabularies, it is the tokenizer of the target; the other is
    `PreTrainedTokenizerFast(tokenizer_file="source_tokenizer.json")`."""
    end, config = tokenizer.end_of_text, model.config
    ends = {"bos_token_id": end, "eos_token_id": end}
    ends["decoder_start_token_id"] = tokenizer.start_of_text
    # transformers needs a padding id that is in both vocabularies, or none.
    both = min(config.vocab_size, config.source_vocab_size or config.vocab_size)
    padding = tokenizer.padding if tokenizer.padding < both else None
    values = {**config_to_json(config), **ends, "pad_token_id": padding}
    stored.write_json(folder / "config.json", values)
    search = {"num_beams": BEAMS, "max_length": config.context, "pad_token_id": tokenizer.padding}
    never = {"suppress_tokens": sorted(tokenizer.unseen)} if tokenizer.unseen else {}
    stored.write_json(folder / "generation_config.json", {**search, **ends, **never})
    tokenizer.save(folder, config.context, end=True)
    if source_tokenizer is not None:
        source = source_tokenizer.with_end()
        (folder / stored.SOURCE_TOKENIZER).write_text(source, encoding="utf-8")
    save_weights(model, folder, shard)


def save_partial(
    model: Model | Classifier,
    base: BaseModel,
    trained: dict[str, Tensor],
    low_rank: dict[str, LowRank],
    folder: Path,
    tokenizer: Tokenizer,
) -> None:
    """Write `trained` parameters of the model, and refer to `base` for all others. With LoRA's
    matrices, write both as an adapter."""
    save_config(model, folder, tokenizer)
    if low_rank:
        where = folder / stored.ADAPTER
        peft.save_adapter(model.config, low_rank, trained, where, str(base))
    else:
        save_file(trained, folder / stored.TRAINED)
    reference = {"folder": str(base.folder), "fingerprint": base.fingerprint}
    if base.adapter:
        reference["adapter"] = str(base.adapter)
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
    values = stored.read_json(file) if file.exists() else {}
    lists = [values.get(name) for name in ("suppress_tokens", "bad_words_ids")]
    listed = [each for part in lists if isinstance(part, list) for each in part]
    ids = [each[0] if isinstance(each, list) and len(each) == 1 else each for each in listed]
    never = frozenset(id for id in ids if type(id) is int and 0 <= id < vocab_size)
    return never if len(never) < vocab_size else frozenset()


def snapshot(model: M, copy_of: Callable[[Tensor], Tensor] = lambda value: value.clone()) -> M:
    """A copy that can be saved while the model is trained further."""
    with torch.device("meta"):  # no initialization, no allocation
        copy = type(model)(model.config)
    state = {name: copy_of(value.detach()) for name, value in model.named_parameters()}
    copy.load_state_dict(state, strict=False, assign=True)
    if isinstance(copy, Network) and copy.config.tied:
        copy.head.weight = copy.token_embedding.weight
    return copy


def save_weights(model: Model | Classifier | Seq2Seq, folder: Path, shard: int) -> None:
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


def split_weights(model: Model | Classifier | Seq2Seq) -> Iterator[tuple[str, Tensor]]:
    """The tensors as they are stored, with their names on disk."""
    family = model_type(model.config)[0]
    prefix = stored.PREFIX[family]
    parameters = dict(model.named_parameters())

    def named(name: str, tensor: Tensor) -> tuple[str, Tensor]:
        return name if name in stored.UNPREFIXED else prefix + name, tensor.contiguous()

    for mapping in stored.tensor_mappings(model.config):
        whole = parameters[mapping.name].detach().cpu()
        if heads := mapping.interleaved_heads:
            whole = whole.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
        parts = whole.split(mapping.sizes)
        for name, part in zip(mapping.stored_names, parts, strict=True):
            yield named(name, part.T if mapping.transposed else part)
        # If the head is not tied, transformers 5 does not tie the source embedding either.
        for name in mapping.copies if not {*stored.HEADS} & {*mapping.copies} else ():
            yield named(name, parts[0].clone())
    for name in stored.constant_shapes(model.config):
        if name == stored.LOGITS_BIAS or (name in stored.POSITIONS and family == "pegasus"):
            yield named(name, constant(name, model.config))


def constant(name: str, config: Config) -> Tensor:
    """A tensor of Marian or Pegasus that is not a parameter here."""
    shape = stored.constant_shapes(config)[name]
    if name in stored.POSITIONS:
        return sinusoidal_table(shape[0], shape[1], halves=True)
    return torch.zeros(shape)


def load_model(folder: Path, dropout: float | None = None, adapter: Path | None = None) -> Model:
    """Load the model in `folder`, in float32 on the CPU, optionally with another `dropout`, and
    merge the LoRA `adapter` into it."""
    config = stored.load_config(folder)
    if stored.is_partial(folder):
        config = config if dropout is None else replace(config, dropout=dropout)
        model = peft.merge_adapter(load_base(folder, config), folder / stored.ADAPTER, folder)
    else:
        model = load_network(folder, config, build_model, dropout)
    return peft.merge_adapter(model, adapter, folder) if adapter else model


def load_seq2seq(folder: Path, dropout: float | None = None) -> Seq2Seq:
    """The same for a sequence-to-sequence model."""
    return load_network(folder, stored.load_seq2seq_config(folder), build_seq2seq, dropout)


def load_network(
    folder: Path, config: C, build: Callable[[C], N], dropout: float | None = None
) -> N:
    if dropout is not None:
        config = replace(config, dropout=dropout)
    state, large = read_state(folder, config)
    with torch.device("meta"):  # shapes only: nothing is allocated
        model = build(config)
    model.load_state_dict(state, strict=False, assign=True)
    if config.tied:
        model.head.weight = model.token_embedding.weight
    return checked(model.eval(), large)


def load_classifier(
    folder: Path, dropout: float | None = None, adapter: Path | None = None
) -> Classifier:
    """Load the classifier in `folder`, in float32 on the CPU, and merge the LoRA `adapter` into it.
    If `folder` is a language model, the adapter has the classification head."""
    if adapter and isinstance(base := stored.load_any_config(folder), GPTConfig):
        config = peft.classifier_config(adapter, base)
        model = Classifier(config, load_model(folder, dropout)).eval()
        return peft.merge_adapter(model, adapter, folder)
    config = stored.load_classifier_config(folder)
    if dropout is not None:
        config = replace(config, base=replace(config.base, dropout=dropout))
    if stored.is_partial(folder):
        model = load_partial(folder, config)
    else:
        state, large = read_state(folder, config)
        with torch.device("meta"):
            model = Classifier(config)
        model.load_state_dict(state, assign=True)
        model = checked(model.eval(), large)
    return peft.merge_adapter(model, adapter, folder) if adapter else model


def load_partial(folder: Path, config: ClassifierConfig) -> Classifier:
    """Load the base model that `folder` refers to, and replace the trained weights."""
    model = Classifier(config, load_base(folder, config.base)).eval()
    if stored.has_adapter(folder):
        return peft.merge_adapter(model, folder / stored.ADAPTER, folder)
    state, large = read_state(folder, config)
    model.load_state_dict(state, strict=False)
    if (file := folder / stored.ADAPTERS).exists():
        merge_adapters(model.base, load_tensors(file))
    return checked(model, large)


def load_base(folder: Path, config: ModelConfig) -> Model:
    """Load the base model that the partial checkpoint `folder` refers to."""
    match {"adapter": None, **stored.read_json(folder / stored.BASE)}:
        case {"folder": str(path), "fingerprint": str(known), "adapter": str() | None as adapter}:
            base, problem = BaseModel(Path(path), known, Path(adapter) if adapter else None), ""
        case _:
            raise ModelError(f"{folder / stored.BASE} does not name the base model")
    if not stored.config_file(base.folder).is_file():
        problem = "no longer exists"
    elif weights_fingerprint(base.folder, base.adapter) != base.fingerprint:
        problem = "now has different weights"
    if problem:
        raise ModelError(
            f"{folder} has only the fine-tuned weights; the others are in {base.folder}, which "
            f"{problem}. Restore that folder, or fine-tune again."
        )
    if isinstance(stored.load_any_config(base.folder), ClassifierConfig):
        model = load_classifier(base.folder, config.dropout, base.adapter).base
    else:
        model = load_model(base.folder, config.dropout, base.adapter)
    if model.config != config:
        raise ModelError(f"{folder} does not match its base model, {base.folder}")
    return model


def weights_fingerprint(folder: Path, adapter: Path | None = None) -> str:
    """A checksum of all weights, without the config, and of an adapter that is merged into them."""
    digest = hashlib.sha256()
    partial = [folder / name for name in (stored.TRAINED, stored.ADAPTERS, stored.BASE)]
    files = partial if stored.is_partial(folder) else stored.weight_files(folder)
    for place in (folder / stored.ADAPTER if stored.has_adapter(folder) else None, adapter):
        files += [place / name for name in peft.FILES] if place else []
    for file in files:
        if file.exists():
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def read_state(folder: Path, config: Config) -> tuple[dict[str, Tensor], str]:
    """The parameters of `config` by our names (in a partial checkpoint, the trained ones), and the
    location of the first unusually large tensor."""
    large = ""

    def read_tensor(source: stored.StoredTensor) -> Tensor:
        nonlocal large
        tensor = torch.as_tensor(source.file.get_tensor(source.name)).to(torch.float32)
        where = f"{source.path}: {source.name}"
        if root_mean_square(tensor, where) > LARGE:
            large = large or where
        return tensor

    with stored.checked_tensors(folder, config, "pt") as tensors:
        if stored.is_partial(folder):
            return {name: read_tensor(each) for name, each in tensors.items()}, large
        state = {}
        for mapping in stored.tensor_mappings(config, stored.family_of(folder, config)):
            parts = [read_tensor(tensors[name]) for name in mapping.stored_names]
            whole = torch.cat(parts) if len(parts) > 1 else parts[0]
            if heads := mapping.interleaved_heads:
                whole = whole.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
            state[mapping.name] = (whole.T if mapping.transposed else whole).contiguous()
            # Tied weights that are stored anyway: transformers ignores them, we check them.
            for name in filter(tensors.__contains__, mapping.copies):
                if not torch.equal(read_tensor(tensors[name]), state[mapping.name]):
                    raise ModelError(f"{folder}: {name} differs from the embedding")
        for name in tensors.keys() & stored.constant_shapes(config).keys() - {stored.UNUSED}:
            close = PRECISION if name in stored.POSITIONS else 0.0
            found = read_tensor(tensors[name])
            if not torch.allclose(found, constant(name, config), rtol=0, atol=close):
                wrong = "holds non-sinusoidal positions" if close else "is not zero"
                raise ModelError(f"{folder}: {name} {wrong}, which nanolm does not support")
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
