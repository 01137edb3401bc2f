"""The file format: a model folder as Hugging Face `transformers` reads and writes it.

    >>> save_model(model, folder, tokenizer); load_model(folder)

`config.json`, `generation_config.json` and `model.safetensors`, with the names and shapes of
the model's family: `modern` is written as Qwen3, `gpt2` as GPT-2. Weights that are fused inside
(queries, keys and values; gate and up) are split on disk where the family splits them. Loading
is strict: every fault is named.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanolm.errors import ModelError
from nanolm.model.config import FAMILIES, ModelConfig
from nanolm.model.gpt import GPT
from nanolm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Row:
    """One parameter here, and the tensors it is on disk: stacked in this order."""

    inside: str
    outside: tuple[str, ...]
    transposed: bool = False  # GPT-2 stores (in, out)


def save_model(model: GPT, folder: Path, tokenizer: Tokenizer) -> None:
    """Write everything `AutoModelForCausalLM` and `AutoTokenizer` need into `folder`."""
    config = config_to_json(model.config)
    ends = {
        "bos_token_id": tokenizer.end_of_text,
        "eos_token_id": tokenizer.end_of_text,
        "pad_token_id": tokenizer.padding,
    }
    _write_json(folder / "config.json", {**config, **ends})
    _write_json(folder / "generation_config.json", {"do_sample": True, **ends})
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for row in rows(model.config):
        parts = parameters[row.inside].detach().cpu().chunk(len(row.outside))
        for name, part in zip(row.outside, parts, strict=True):
            tensors[name] = (part.T if row.transposed else part).contiguous()
    # The key is what transformers looks for to know who wrote the numbers.
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(folder, model.config.context)


def load_model(folder: Path) -> GPT:
    """The model in `folder`, in float32 on the CPU."""
    config = config_from_json(_read_json(folder / "config.json"), folder)
    file = folder / "model.safetensors"
    try:
        tensors = load_file(file)
    except FileNotFoundError:
        raise ModelError(f"{file} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
    if config.layers > len(tensors):
        raise ModelError(f"{file} does not fit its config.json: no {config.layers} layers in it")
    with torch.device("meta"):  # shapes only: nothing is allocated for a config that lies
        model = GPT(config)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    state: dict[str, Tensor] = {}
    problems = []
    for row in rows(config):
        parts = [tensors.pop(name, None) for name in row.outside]
        found = [part.T if row.transposed else part for part in parts if part is not None]
        if len(found) < len(parts):
            problems.append(f"{', '.join(row.outside)}: missing")
            continue
        shape = shapes[row.inside]
        each = (shape[0] // len(parts), *shape[1:])
        if any(tuple(part.shape) != each for part in found):
            is_now = ", ".join(str(tuple(part.shape)) for part in found)
            problems.append(f"{', '.join(row.outside)}: {is_now} where config.json says {each}")
            continue
        state[row.inside] = torch.cat(found).to(torch.float32).contiguous()
    problems += [f"{name}: not part of this model" for name in tensors]
    if problems:
        raise ModelError(f"{file} does not fit its config.json:\n  " + "\n  ".join(problems))
    model.load_state_dict(state, strict=False, assign=True)
    if config.tied:
        model.head.weight = model.token_embedding.weight
    return model.eval()


def family_of(config: ModelConfig) -> str:
    """The family whose switches this config has."""
    for family, switches in FAMILIES.items():
        if all(getattr(config, name) == value for name, value in switches.items()):
            return family
    raise ModelError("this combination of switches belongs to no family that can be saved")


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    if family_of(config) == "gpt2":
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": config.vocab_size,
            "n_positions": config.context,
            "n_embd": config.dim,
            "n_layer": config.layers,
            "n_head": config.heads,
            "n_inner": config.hidden,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": config.norm_epsilon,
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": 0.0,
            "tie_word_embeddings": config.tied,
            "dtype": "float32",
        }
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_base,  # read by transformers 4; version 5 reads the next line
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "attention_bias": config.bias,
        "attention_dropout": 0.0,
        "dropout": config.dropout,  # ours: the residual dropout it was trained with
        "tie_word_embeddings": config.tied,
        "dtype": "float32",
    }


def config_from_json(values: dict[str, Any], folder: Path) -> ModelConfig:
    try:
        kind = values["model_type"]
        if kind == "gpt2":
            config = ModelConfig(
                vocab_size=values["vocab_size"],
                layers=values["n_layer"],
                heads=values["n_head"],
                dim=values["n_embd"],
                context=values["n_positions"],
                hidden=values["n_inner"],
                dropout=values["resid_pdrop"],
                **{**FAMILIES["gpt2"], "norm_epsilon": values["layer_norm_epsilon"]},
            )
        elif kind == "qwen3":
            config = ModelConfig(
                vocab_size=values["vocab_size"],
                layers=values["num_hidden_layers"],
                heads=values["num_attention_heads"],
                dim=values["hidden_size"],
                context=values["max_position_embeddings"],
                hidden=values["intermediate_size"],
                dropout=values["dropout"],
                norm_epsilon=values["rms_norm_eps"],
                rope_base=values["rope_parameters"]["rope_theta"],
                **FAMILIES["modern"],
            )
        else:
            raise ModelError(f"{folder}: nanolm does not read models of type {kind!r}")
    except (KeyError, TypeError) as error:
        raise ModelError(f"{folder / 'config.json'}: {error} is missing or wrong") from None
    for name in ("vocab_size", "layers", "heads", "dim", "context", "hidden"):
        value = getattr(config, name)
        # No tensor answers for the context: its bound keeps the table of rotations small.
        if type(value) is not int or value < 1 or (name == "context" and value > 1_000_000):
            raise ModelError(f"{folder / 'config.json'}: {name} is {value!r}")
    for name in ("dropout", "norm_epsilon", "rope_base"):
        if not isinstance(getattr(config, name), int | float):
            raise ModelError(f"{folder / 'config.json'}: {name} is {getattr(config, name)!r}")
    if problems := config.problems():
        raise ModelError(f"{folder / 'config.json'}: {'; '.join(problems)}")
    # What else the file says must be what we would have said: nothing is passed over in silence.
    for name, value in config_to_json(config).items():
        if values.get(name) != value:
            raise ModelError(
                f"{folder / 'config.json'}: {name} is {values.get(name)!r}, "
                f"and nanolm reads only {value!r}"
            )
    return config


def rows(config: ModelConfig) -> list[Row]:
    """Every parameter of the model with its names on disk."""
    table = []
    if family_of(config) == "gpt2":
        for n in range(config.layers):
            here, there = f"blocks.{n}", f"transformer.h.{n}"
            for inside, name in [
                ("attention_norm", "ln_1"),
                ("attention.qkv", "attn.c_attn"),
                ("attention.out", "attn.c_proj"),
                ("feed_forward_norm", "ln_2"),
                ("feed_forward.up", "mlp.c_fc"),
                ("feed_forward.out", "mlp.c_proj"),
            ]:
                matrix = not inside.endswith("norm")
                table.append(Row(f"{here}.{inside}.weight", (f"{there}.{name}.weight",), matrix))
                table.append(Row(f"{here}.{inside}.bias", (f"{there}.{name}.bias",)))
        return [
            Row("token_embedding.weight", ("transformer.wte.weight",)),
            Row("position_embedding.weight", ("transformer.wpe.weight",)),
            *table,
            Row("norm.weight", ("transformer.ln_f.weight",)),
            Row("norm.bias", ("transformer.ln_f.bias",)),
        ]
    for n in range(config.layers):
        here, there = f"blocks.{n}", f"model.layers.{n}"
        for inside, names in [
            ("attention_norm", ["input_layernorm"]),
            ("attention.qkv", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            ("attention.query_norm", ["self_attn.q_norm"]),
            ("attention.key_norm", ["self_attn.k_norm"]),
            ("attention.out", ["self_attn.o_proj"]),
            ("feed_forward_norm", ["post_attention_layernorm"]),
            ("feed_forward.up", ["mlp.gate_proj", "mlp.up_proj"]),
            ("feed_forward.out", ["mlp.down_proj"]),
        ]:
            outside = tuple(f"{there}.{name}.weight" for name in names)
            table.append(Row(f"{here}.{inside}.weight", outside))
    return [
        Row("token_embedding.weight", ("model.embed_tokens.weight",)),
        *table,
        Row("norm.weight", ("model.norm.weight",)),
        Row("head.weight", ("lm_head.weight",)),
    ]


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file} does not exist") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{file} holds no JSON object")
    return values
