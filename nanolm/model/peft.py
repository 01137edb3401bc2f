"""Reads and writes LoRA adapters in the format of Hugging Face `peft`.

    >>> save_adapter(model.config, adapters.low_rank(), {}, folder, base="gpt2")
    >>> merge_adapter(model, folder)  # or PeftModel.from_pretrained(gpt2, folder)

What is one stacked matrix here can be several modules there: each gets a copy of `lora_A` and its
rows of `lora_B`. As with models, names and shapes are checked before any tensor is read, every
problem is reported, and nothing in a folder can run code.
"""

import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nanolm.errors import ModelError
from nanolm.model import stored
from nanolm.model.adapters import LORA_SCALE, Adapters, LowRank
from nanolm.model.base import Model
from nanolm.model.classifier import Classifier
from nanolm.model.config import ClassifierConfig, GPTConfig
from nanolm.model.config_json import model_type
from nanolm.model.finite import LARGE, checked, root_mean_square
from nanolm.model.json_values import Values
from nanolm.model.shapes import Config, Shape, parameter_shapes

M = TypeVar("M", Model, Classifier)
CONFIG, WEIGHTS = stored.ADAPTER_CONFIG, "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
FILES = (CONFIG, WEIGHTS)
ROOT = "base_model.model."  # before the names of all tensors
DOWN, UP = "lora_A.weight", "lora_B.weight"
# Parts of names that some versions write and others omit.
OPTIONAL = re.compile(r"\.(modules_to_save|default)(?=\.)")
PLAIN = re.compile(r"[\w.]+")  # a name of modules, and no other pattern
# Fields that are read, or that do not affect the merged weights.
READ = (
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"),
    *("modules_to_save", "base_model_name_or_path", "revision", "task_type", "auto_mapping"),
    *("inference_mode", "lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size"),
    *("peft_version", "ephemeral_gpu_offload", "runtime_config", "eva_config"),
)
# Fields of which only these values are supported; of all other fields, only empty values are.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # others change W
}


MOST_LABELS = 100_000


class Module(NamedTuple):
    """A module of the model that an adapter is for: some rows of one of our parameters."""

    parameter: str
    rows: slice
    shape: Shape  # (outputs, inputs)
    transposed: bool
    heads: int  # if queries, keys and values of a head are stored together

    def stored_order(self, rows: Tensor) -> Tensor:
        shape = (3, self.heads, -1, rows.shape[1])
        return rows.view(shape).transpose(0, 1).reshape(rows.shape) if self.heads else rows

    def our_order(self, rows: Tensor) -> Tensor:
        shape = (self.heads, 3, -1, rows.shape[1])
        return rows.view(shape).transpose(0, 1).reshape(rows.shape) if self.heads else rows


@dataclass(frozen=True)
class Adapter:
    updates: list[tuple[Module, float, LowRank]] = field(default_factory=list)  # with their scale
    replaced: list[tuple[Module, Tensor]] = field(default_factory=list)  # modules saved whole

    def replace_in(self, parameters: dict[str, nn.Parameter]) -> None:
        for module, tensor in self.replaced:
            parameters[module.parameter][module.rows] = tensor.T if module.transposed else tensor

    def low_rank(self) -> dict[str, LowRank]:
        """The matrices of an adapter that was saved here, by parameter."""
        parts: dict[str, list[LowRank]] = {}
        for module, _, matrices in self.updates:
            parts.setdefault(module.parameter, []).append(matrices)
        return {
            name: (both[0][0], torch.cat([up for _, up in both])) for name, both in parts.items()
        }


def save_adapter(
    config: Config,
    low_rank: dict[str, LowRank],
    whole: Mapping[str, Tensor],
    folder: Path,
    base: str,
) -> None:
    """Write the matrices of each parameter in `low_rank`, and the parameters in `whole`."""
    folder.mkdir()
    tensors, targets, saved = dict[str, Tensor](), set[str](), set[str]()
    for name, module in modules_of(config).items():
        if module.parameter in low_rank:
            down, up = low_rank[module.parameter]
            tensors[f"{ROOT}{name}.{DOWN}"] = down.cpu().clone()
            tensors[f"{ROOT}{name}.{UP}"] = module.stored_order(up[module.rows]).cpu().clone()
            targets.add(name.rpartition(".")[2])
        elif module.parameter in whole:
            tensors[f"{ROOT}{name}.weight"] = whole[module.parameter].detach().cpu()
            saved.add(name.rpartition(".")[2])
    rank = next(len(down) for down, _ in low_rank.values())
    values = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if isinstance(config, ClassifierConfig) else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": round(LORA_SCALE * rank),
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(targets),
        "modules_to_save": sorted(saved) or None,
        "fan_in_fan_out": model_type(config)[0] == "gpt2",
        "inference_mode": True,
    }
    stored.write_json(folder / CONFIG, values)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def modules_of(config: Config) -> dict[str, Module]:
    """Every module with a weight, by the name it has in `peft`."""
    prefix, shapes = stored.PREFIX[model_type(config)[0]], parameter_shapes(config)
    modules = {}
    for mapping in stored.tensor_mappings(config):
        first = 0
        for name, size in zip(mapping.stored_names, mapping.sizes, strict=True):
            rows, shape = slice(first, first + size), (size, *shapes[mapping.name][1:])
            full = name if name in stored.UNPREFIXED else prefix + name
            if full.endswith(".weight"):
                module = Module(
                    mapping.name, rows, shape, mapping.transposed, mapping.interleaved_heads
                )
                modules[full.removesuffix(".weight")] = module
            first += size
    return modules


@torch.no_grad()
def load_trained(model: Model | Classifier, adapters: Adapters, folder: Path) -> None:
    """Load everything that is trained with LoRA from the partial checkpoint `folder`."""
    adapter = read_adapter(folder / stored.ADAPTER, model.config, folder)
    adapters.load_low_rank(adapter.low_rank(), "base." if isinstance(model, Classifier) else "")
    adapter.replace_in(dict(model.named_parameters()))


@torch.no_grad()
def merge_adapter(model: M, folder: Path, base: Path) -> M:
    """Merge the adapter in `folder` into the model loaded from `base`."""
    adapter: Adapter = read_adapter(folder, model.config, base)
    parameters = dict(model.named_parameters())
    for module, scale, (down, up) in adapter.updates:
        parameters[module.parameter][module.rows] += scale * (up @ down)
    adapter.replace_in(parameters)
    changed, large = [module for module, _ in adapter.replaced], ""
    changed += [module for module, _, _ in adapter.updates]
    for name in {module.parameter for module in changed}:
        where = f"{folder}: {name}"
        if root_mean_square(parameters[name], where) > LARGE:
            large = where
    return checked(model, large)


def read_adapter(folder: Path, config: Config, base: Path) -> Adapter:
    """The adapter in `folder` for the model in `base`, which has this config."""
    file = folder / CONFIG
    values = Values(stored.read_json(file), str(file))
    try:
        refuse_unsupported(values)
        scales, shapes = expected_tensors(values, config)
    except RecursionError:  # parsed JSON may still be too deep to compare or show
        raise ModelError(f"{file} is nested too deeply") from None
    modules, adapter = modules_of(config), Adapter()
    with ExitStack() as stack:
        tensors = open_adapter(folder, stack, stored.PREFIX[model_type(config)[0]])
        problems = stored.shape_problems(tensors, shapes, {})
        if problems or not scales:
            trained = f"trained on {str(values.get('base_model_name_or_path'))[:200]}"
            problems += [] if scales else ["target_modules: none of them is in this model"]
            raise stored.mismatch(f"{folder}, {trained}, does not fit {base}", problems)

        def read(name: str) -> Tensor:
            source = tensors[name]
            tensor: Tensor = source.file.get_tensor(source.name).float()
            root_mean_square(tensor, f"{source.path}: {source.name}")
            return tensor

        for name, scale in scales.items():
            both = read(f"{name}.{DOWN}"), modules[name].our_order(read(f"{name}.{UP}"))
            adapter.updates.append((modules[name], scale, both))
        for name in shapes.keys() & {f"{module}.weight" for module in modules}:
            module = modules[name.removesuffix(".weight")]
            adapter.replaced.append((module, module.our_order(read(name))))
    return adapter


def open_adapter(
    folder: Path, stack: ExitStack, prefix: str = ""
) -> dict[str, stored.StoredTensor]:
    """The tensors of an adapter by the names in `modules_of`, however they are spelled."""
    if not (folder / WEIGHTS).is_file():
        why = "does not exist or is not a file"
        if (folder / PICKLE).exists():
            why += f"; nanolm does not load {PICKLE}, which could run code"
        raise ModelError(f"{folder / WEIGHTS} {why}")
    tensors = {}
    for name, tensor in stored.open_weights([folder / WEIGHTS], stack, ROOT, "pt").items():
        name = OPTIONAL.sub("", name)
        if not name.startswith((prefix, "lm_head.", "score.")):
            name = prefix + name
        if name in tensors:
            raise ModelError(f"{folder / WEIGHTS}: duplicate tensor {name[:200]}")
        tensors[name] = tensor
    return tensors


def classifier_config(folder: Path, base: GPTConfig) -> ClassifierConfig:
    """The config of a language model with the classification head of an adapter."""
    with ExitStack() as stack:
        score = open_adapter(folder, stack).get(stored.SCORE)
        rows = score.shape[0] if score and len(score.shape) == 2 else 0
        if not 2 <= rows <= MOST_LABELS:
            why = f"it has no {stored.SCORE} of two labels or more"
            raise ModelError(f"{folder} is not an adapter of a classifier: {why}")
    labels = tuple(f"LABEL_{number}" for number in range(rows))
    return ClassifierConfig(base=base, labels=labels, window=base.context)


def describe_adapter(folder: Path, config: Config, base: Path) -> dict[str, Any]:
    """Facts about an adapter that fits the model in `base`."""
    values = stored.read_json(folder / CONFIG)
    if isinstance(config, GPTConfig) and values.get("task_type") == "SEQ_CLS":
        config = classifier_config(folder, config)
    adapter = read_adapter(folder, config, base)
    tensors = [matrix for _, _, both in adapter.updates for matrix in both]
    count = sum(each.numel() for each in (*tensors, *(each for _, each in adapter.replaced)))
    names = ("r", "lora_alpha", "target_modules", "base_model_name_or_path")
    return {
        "folder": str(folder),
        "parameters": count,
        **{name: values.get(name) for name in names},
    }


def refuse_unsupported(values: Values) -> None:
    problems = []
    for name, value in values.values.items():
        if name in SUPPORTED:
            fits = any(type(value) is type(one) and value == one for one in SUPPORTED[name])
        else:
            fits = name in READ or not value
        if not fits:
            problems.append(f"{name[:80]} is {value!r:.80}, which nanolm does not support")
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern in values.like(name, {}):
            if not PLAIN.fullmatch(pattern):
                problems.append(f"{name}: {pattern[:80]!r} is a pattern; only names are supported")
    targets = values.get("target_modules")
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        problems.append(f"target_modules is {targets!r:.80}: must be a list of names")
    if "peft_type" not in values.values:
        problems.append("peft_type is missing")
    if problems:
        raise stored.mismatch(f"{values.where} cannot be used", problems)


def expected_tensors(values: Values, config: Config) -> tuple[dict[str, float], dict[str, Shape]]:
    """The scale of each module with LoRA, and the shape of every tensor of the adapter."""
    ranks = Values(values.like("rank_pattern", {}), values.where)
    alphas = Values(values.like("alpha_pattern", {}), values.where)
    targets, saved = values.like("target_modules", []), values.like("modules_to_save", [])
    rank, alpha = values.count("r", 8), values.number("lora_alpha", 8)
    tied = not isinstance(config, ClassifierConfig) and config.tied
    scales, shapes = dict[str, float](), dict[str, Shape]()
    for name, module in modules_of(config).items():
        embedding = module.parameter.endswith("embedding.weight")
        if (field := named_by(name, saved)) and embedding and tied:
            raise values.wrong("modules_to_save", f"{field} is tied to the output layer")
        if field:
            shapes[f"{name}.weight"] = module.shape[::-1] if module.transposed else module.shape
        elif (target := named_by(name, targets)) and embedding:
            raise values.wrong("target_modules", f"nanolm does not support LoRA for {target}")
        elif target and len(module.shape) == 2:
            r = ranks.count(key) if (key := named_by(name, ranks.values)) else rank
            factor = alphas.number(key) if (key := named_by(name, alphas.values)) else alpha
            scales[name] = factor / (math.sqrt(r) if values.like("use_rslora", False) else r)
            outputs, inputs = module.shape
            shapes |= {f"{name}.{DOWN}": (r, inputs), f"{name}.{UP}": (outputs, r)}
    return scales, shapes


def named_by(module: str, names: Any) -> str | None:
    """The first of the names that is the module's own, or the end of it."""
    return next((name for name in names if f".{module}".endswith(f".{name}")), None)
