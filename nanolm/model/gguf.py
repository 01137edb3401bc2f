"""Models in GGUF files: config and tensors, by their names there and those in model folders.

    >>> gguf_config(Path("model.gguf"))  # a GPTConfig
    >>> gguf_values(config)
    {'general.architecture': 'qwen3', 'qwen3.context_length': 1024, ...}

Imports no torch.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanolm.errors import ModelError
from nanolm.gguf.blocks import Floats
from nanolm.gguf.file import Header, TensorInfo, read_header
from nanolm.model.config import GPTConfig, RopeScaling
from nanolm.model.config_json import config_from_json, model_type
from nanolm.model.families import GPT2_SIZES, LLAMA_SIZES
from nanolm.model.json_values import Values
from nanolm.model.rope_json import SCALINGS
from nanolm.model.shapes import Config, Shape

ARCHITECTURES = ("qwen3", "llama", "gpt2")
# The names of modules in GGUF files, by those in model folders.
NAMES = {
    **{"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"},
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"},
    **{"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate"},
    **{"mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"},
    **{"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"},
    **{"ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output"},
    **{"ln_2": "ffn_norm", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
}
TRANSPOSED = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")  # of GPT-2, in model folders
FREQUENCIES = "rope_freqs.weight"  # of the llama3 scaling: what each frequency is divided by
LLAMA3 = RopeScaling("llama3", 1.0, 8192, 1.0, 4.0)  # all but the factor are not in the file
SIZES = {  # our names, by the keys in files
    "block_count": "layers",
    "context_length": "context",
    "embedding_length": "dim",
    "feed_forward_length": "hidden",
    "attention.head_count": "heads",
    "attention.head_count_kv": "kv_heads",
}
HEAD_DIMS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
EPSILONS = dict.fromkeys(ARCHITECTURES, "attention.layer_norm_rms_epsilon")
EPSILONS["gpt2"] = "attention.layer_norm_epsilon"
BASE, KIND, FACTOR = "rope.freq_base", "rope.scaling.type", "rope.scaling.factor"
YARN = {  # likewise
    "rope.scaling.original_context_length": "original_context",
    "rope.scaling.yarn_beta_fast": "fast",
    "rope.scaling.yarn_beta_slow": "slow",
    "rope.scaling.attn_factor": "gain",
}
EXPERTS = ("expert_count", "expert_used_count")
KNOWN = (*SIZES, *HEAD_DIMS, *EPSILONS.values(), BASE, KIND, FACTOR, *YARN, *EXPERTS)
KNOWN += ("vocab_size", "rope.scaling.finetuned")


def why_not(config: Config) -> str:
    """Why llama.cpp cannot run a model; empty if it can."""
    family, why = model_type(config)
    if not isinstance(config, GPTConfig):
        return "it is not a Transformer language model"
    if family not in ARCHITECTURES:
        return why or f"nanolm writes {', '.join(ARCHITECTURES)}, not {family}"
    if config.attention_bias is not None:
        return "its biases are in only some layers"
    if family != "llama" and config.rope_scaling and config.rope_scaling.kind == "llama3":
        return f"its {family} does not support the llama3 scaling of RoPE"
    if config.context >= 1 << 32:
        return f"a context of {config.context:,} is too long"
    if family == "gpt2" and config.feed_forward != "gelu_tanh":
        return f"its gpt2 does not support --feed-forward {config.feed_forward}"
    return ""


def gguf_values(config: GPTConfig) -> dict[str, Any]:
    """The key-value pairs of a config."""
    family, _ = model_type(config)
    values: dict[str, Any] = {key: getattr(config, ours) for key, ours in SIZES.items()}
    values |= {EPSILONS[family]: float(config.norm_epsilon), "vocab_size": config.vocab_size}
    if family != "gpt2":
        values |= {**dict.fromkeys(HEAD_DIMS, config.head_dim), BASE: float(config.rope_base)}
    if (scaling := config.rope_scaling) and scaling.kind != "llama3":
        values |= {KIND: scaling.kind, FACTOR: float(scaling.factor)}
        if scaling.kind == "yarn":
            relative = replace(scaling, gain=scaling.gain / usual_gain(scaling.factor))
            values |= {key: getattr(relative, ours) for key, ours in YARN.items()}
    return {"general.architecture": family, **{f"{family}.{key}": values[key] for key in values}}


def usual_gain(factor: float) -> float:
    """By which llama.cpp itself scales queries and keys for YaRN."""
    return 0.1 * log(factor) + 1


def gguf_config(path: Path) -> Config:
    """The config in a file, read as the config.json with the same meaning."""
    header = read_header(path)
    known = f"it, only {', '.join(ARCHITECTURES)}"
    named = Values(header.values, str(path))
    family = named.only("general.architecture", ARCHITECTURES, None, known)
    own = {key: value for key, value in header.values.items() if key.startswith(f"{family}.")}
    values = Values({key.partition(".")[2]: own[key] for key in own}, f"{path}: {family}")
    values.check_names(*KNOWN)
    for key in EXPERTS:
        values.only(key, [0], 0, "mixtures of experts")
    heads = values.count("attention.head_count")
    sizes = {ours: values.count(key, heads if "kv" in key else None) for key, ours in SIZES.items()}
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{path} has no token_embd.weight with two dimensions")
    json: dict[str, Any] = {"model_type": family, "vocab_size": embedding.shape[0]}
    json["tie_word_embeddings"] = "output.weight" not in header.tensors
    epsilon = number(values, EPSILONS[family])
    if family == "gpt2":
        values.only("attention.head_count_kv", [heads], heads, "fewer keys than heads in gpt2")
        json |= {theirs: sizes[ours] for theirs, ours in GPT2_SIZES.items()}
        return config_from_json({**json, "layer_norm_epsilon": epsilon, "resid_pdrop": 0.0}, path)
    sizes["head_dim"] = values.count(HEAD_DIMS[0], max(1, sizes["dim"] // heads))
    for key in HEAD_DIMS:
        values.only(key, [sizes["head_dim"]], sizes["head_dim"], "another width than that of keys")
    json |= {theirs: sizes[ours] for theirs, ours in LLAMA_SIZES.items()}
    if family == "llama":
        json |= dict.fromkeys(("attention_bias", "mlp_bias"), "blk.0.attn_q.bias" in header.tensors)
    json["rope_parameters"] = rope_parameters(header, values, sizes)
    return config_from_json({**json, "rms_norm_eps": epsilon}, path)


def number(values: Values, key: str, default: float | None = None) -> float:
    """A float32 as the shortest decimal that was probably meant: 1e-05, not 9.99999975e-06."""
    return float(f"{values.number(key, default):.7g}")


def rope_parameters(header: Header, values: Values, sizes: dict[str, int]) -> dict[str, Any]:
    """Those of a config.json. llama3 is stored as factors alone: the usual values must fit."""
    base, factor = number(values, BASE, 10_000.0), number(values, FACTOR, 1.0)
    kind = values.only(KIND, ["none", "linear", "yarn"], "linear", "this RoPE scaling")
    if FREQUENCIES in header.tensors:
        factors = header.read(FREQUENCIES).reshape(-1)
        scaling = replace(LLAMA3, factor=round(float(factors.max()), 4))
        expected = frequency_factors(sizes["head_dim"], max(1.001, base), scaling)
        if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
            raise ModelError(f"{header.path}: nanolm does not support its {FREQUENCIES}")
        names = SCALINGS["llama3"]
    elif kind == "none" or factor == 1:
        return {"rope_theta": base}
    else:
        scaling, names = RopeScaling(kind, factor), SCALINGS[kind]
        if kind == "yarn":
            defaults = (sizes["context"], 32.0, 1.0, 1.0)
            parts: dict[str, Any] = {
                ours: number(values, key, default)
                for (key, ours), default in zip(YARN.items(), defaults, strict=True)
            }
            original = int(parts.pop("original_context"))
            gain = parts.pop("gain") * usual_gain(max(1e-6, factor))
            scaling = replace(scaling, original_context=original, gain=gain, **parts)
    json = {theirs: getattr(scaling, ours) for theirs, ours in names.items()}
    return {"rope_theta": base, "rope_type": scaling.kind, **json}


def frequency_factors(head_dim: int, base: float, scaling: RopeScaling) -> Floats:
    """By which the llama3 scaling divides the frequency of each pair of components."""
    frequencies = base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = scaling.original_context * frequencies / (2 * np.pi)
    kept = np.clip((turns - scaling.slow) / (scaling.fast - scaling.slow), 0, 1)
    return (1 / (kept + (1 - kept) / scaling.factor)).astype(np.float32)


class GGUFTensor(NamedTuple):
    """How a tensor of a model folder is stored in a GGUF file."""

    name: str
    transposed: bool = False
    heads: int = 0  # of queries or keys whose components are in another order

    def shape(self, shape: Shape) -> Shape:
        return shape[::-1] if self.transposed else shape

    def store(self, values: Floats) -> Floats:
        """llama.cpp rotates neighboring components of Llama, transformers those of two halves."""
        if self.heads:
            halves = values.reshape(self.heads, 2, -1, *values.shape[1:])
            return halves.swapaxes(1, 2).reshape(values.shape)
        return values.T if self.transposed else values

    def restore(self, values: Floats) -> Floats:
        if self.heads:
            neighbors = values.reshape(self.heads, -1, 2, *values.shape[1:])
            return neighbors.swapaxes(1, 2).reshape(values.shape)
        return values.T if self.transposed else values


class GGUFWeights:
    """The tensors of a GGUF file as those of a model folder."""

    def __init__(self, path: Path, config: GPTConfig, names: Iterable[str]) -> None:
        self.header = read_header(path)
        self.stored: dict[str, tuple[str, GGUFTensor]] = {}
        for name in names:
            stored = stored_as(name, config)
            self.stored[stored.name] = (name, stored)

    def entries(self) -> Iterator[tuple[str, TensorInfo, Shape]]:
        """The name in a model folder, what is in the file, and the shape in a model folder."""
        for info in self.header.tensors.values():
            if info.name != FREQUENCIES:
                name, stored = self.stored.get(info.name, (info.name, GGUFTensor(info.name)))
                yield name, info, stored.shape(info.shape)

    def get_tensor(self, name: str) -> Floats:
        """Like the method of a safetensors file; `name` is that in the GGUF file."""
        return self.stored[name][1].restore(self.header.read(name))


def stored_as(name: str, config: GPTConfig) -> GGUFTensor:
    """Where a GGUF file has the tensor `name` of a model folder (without prefix)."""
    module, _, kind = name.rpartition(".")
    block = ""
    if inside := re.fullmatch(r"(?:layers|h)\.(\d+)\.(.+)", module):
        block, module = f"blk.{inside[1]}.", inside[2]
    permuted = {"self_attn.q_proj": config.heads, "self_attn.k_proj": config.kv_heads}
    heads = permuted.get(module, 0) if model_type(config)[0] == "llama" else 0
    transposed = module in TRANSPOSED and kind == "weight"
    return GGUFTensor(f"{block}{NAMES[module]}.{kind}", transposed, heads)
