"""config.json: a model's config in the format of its Hugging Face family.

    >>> config_to_json(configure("modern", vocab_size=300, layers=2, heads=2, dim=32, context=16))
    {'model_type': 'qwen3', ...}

Models that fit no family (recurrent, ALiBi, ...) are saved as "model_type": "nanolm", with the
fields of our own config. Unknown settings that would change the results are refused by name.
"""

import math
import types
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from nanolm.errors import ModelError
from nanolm.model.config import (
    FAMILIES,
    ClassifierConfig,
    EncoderDecoderConfig,
    GPTConfig,
    Long,
    ModelConfig,
    Pool,
    RecurrentConfig,
    RecurrentSeq2SeqConfig,
    RopeScaling,
    Seq2SeqConfig,
    Switches,
    unsupported,
)
from nanolm.model.json_values import LARGEST, Values
from nanolm.model.marian_json import (
    ACTIVATIONS,
    EXPRESSED_SEQ2SEQ,
    SEQ2SEQ,
    SWITCHES,
    marian_to_json,
    read_marian,
    separate_source,
)

# Prefixes of each family's class names in transformers.
CLASSES = {"gpt2": "GPT2", "llama": "Llama", "qwen3": "Qwen3"}
CAUSAL = {family: f"{name}ForCausalLM" for family, name in CLASSES.items()}
CAUSAL["gpt2"] = "GPT2LMHeadModel"
CLASSIFIERS = {family: f"{name}ForSequenceClassification" for family, name in CLASSES.items()}
# The values of each switch that a family supports.
EXPRESSED: dict[str, Switches] = {
    family: {name: (FAMILIES[ours][name],) for name in SWITCHES}
    for family, ours in {"gpt2": "gpt2", "llama": "llama", "qwen3": "modern"}.items()
}
EXPRESSED["gpt2"] |= {"feed_forward": tuple(ACTIVATIONS.values()), "head_width": (None,)}
EXPRESSED["llama"]["bias"] = (False, True)
EXPRESSED |= EXPRESSED_SEQ2SEQ
# Our names of the sizes, by their Hugging Face names.
GPT2_SIZES = {
    "n_positions": "context",
    "n_embd": "dim",
    "n_layer": "layers",
    "n_head": "heads",
    "n_inner": "hidden",
}
LLAMA_SIZES = {
    "max_position_embeddings": "context",
    "hidden_size": "dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "hidden",
}
# Our names of the RoPE scaling parameters, by their Hugging Face names.
STRETCHED = {"factor": "factor", "original_max_position_embeddings": "original_context"}
LLAMA3 = {**STRETCHED, "low_freq_factor": "slow", "high_freq_factor": "fast"}
YARN = {**STRETCHED, "beta_slow": "slow", "beta_fast": "fast", "attention_factor": "gain"}
SCALINGS = {"default": {}, "linear": {"factor": "factor"}, "llama3": LLAMA3, "yarn": YARN}
KINDS: dict[str, type[ModelConfig]] = {
    "transformer": GPTConfig,
    "recurrent": RecurrentConfig,
    "encoder-decoder": EncoderDecoderConfig,
    "recurrent-seq2seq": RecurrentSeq2SeqConfig,
}


def model_type(config: ModelConfig | ClassifierConfig) -> tuple[str, str]:
    """The family that `config` is saved as; for "nanolm", the reason that no other fits."""
    if isinstance(config, ClassifierConfig):
        if config.pool != "last":
            return "nanolm", f"--pool {config.pool}"
        return model_type(config.base)
    if not isinstance(config, GPTConfig | EncoderDecoderConfig):
        return "nanolm", "it is recurrent"
    reasons = []
    seq2seq = isinstance(config, EncoderDecoderConfig)
    for family in SEQ2SEQ if seq2seq else CLASSES:
        missing = [
            as_option(name, getattr(config, name))
            for name in unsupported(config, EXPRESSED[family])
        ]
        if (seq2seq or family == "gpt2") and config.kv_heads != config.heads:
            missing.append(as_option("kv_heads", config.kv_heads))
        if family == "pegasus" and separate_source(config):
            missing.append("--separate-vocabularies")
        if not missing:
            return family, ""
        reasons.append((len(missing), f"{family} does not support {' or '.join(missing)}"))
    return "nanolm", min(reasons)[1]


def as_option(name: str, value: object) -> str:
    """A switch as a command-line option."""
    word = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{word}" if value else f"--no-{word}"
    return f"--{word} {value}"


def config_to_json(config: ModelConfig | ClassifierConfig) -> dict[str, Any]:
    family, _ = model_type(config)
    if isinstance(config, ClassifierConfig):
        looked_at = {"window": config.window, "long_texts": config.long}
        names = list(config.labels)
        if family == "nanolm":
            own = {"kind": "classifier", "labels": names, "pool": config.pool, **looked_at}
            return {"model_type": family, **own, "base": own_to_json(config.base)}
        return {
            **config_to_json(config.base),
            "architectures": [CLASSIFIERS[family]],
            "id2label": {str(id): name for id, name in enumerate(names)},
            "label2id": {name: id for id, name in enumerate(names)},
            "problem_type": "single_label_classification",
            **looked_at,  # ours
        }
    if family == "nanolm":
        return {"model_type": "nanolm", **own_to_json(config)}
    assert isinstance(config, GPTConfig | EncoderDecoderConfig)
    shared = {
        "model_type": family,
        "architectures": [(CAUSAL | SEQ2SEQ)[family]],
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
        "dtype": "float32",
    }
    if isinstance(config, EncoderDecoderConfig):
        return {**shared, **marian_to_json(config, family)}
    if family == "gpt2":
        activations = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
        dropouts = {"resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": 0.0}
        return {
            **shared,
            **{theirs: getattr(config, ours) for theirs, ours in GPT2_SIZES.items()},
            "activation_function": activations[config.feed_forward],
            "layer_norm_epsilon": config.norm_epsilon,
            **dropouts,
        }
    kind = config.rope_scaling.kind if config.rope_scaling else "default"
    parts = {name: getattr(config.rope_scaling, ours) for name, ours in SCALINGS[kind].items()}
    rope = {"rope_type": kind, "rope_theta": float(config.rope_base), **parts}
    written = {
        **shared,
        **{theirs: getattr(config, ours) for theirs, ours in LLAMA_SIZES.items()},
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "rope_parameters": rope,
        # The same for older versions of transformers.
        "rope_theta": rope["rope_theta"],
        "rope_scaling": rope if config.rope_scaling else None,
        "attention_bias": config.bias,
        "attention_dropout": 0.0,
        "dropout": config.dropout,  # ours: the residual dropout it was trained with
    }
    return {**written, "mlp_bias": config.bias} if family == "llama" else written


def own_to_json(config: ModelConfig) -> dict[str, Any]:
    kind = next(name for name, made in KINDS.items() if isinstance(config, made))
    return {"kind": kind, **asdict(config)}


def config_from_json(values: dict[str, Any], file: Path) -> ModelConfig | ClassifierConfig:
    """The config described by the contents of `file`, or a ModelError that says what is wrong."""
    found = Values(values, str(file))
    match family := values.get("model_type"):
        case "gpt2":
            config: ModelConfig | ClassifierConfig = read_gpt2(found)
        case "llama" | "qwen3":
            config = read_llama(found, family)
        case "marian" | "pegasus":
            config = read_marian(found, family)
        case "nanolm" if values.get("kind") == "classifier":
            config = read_own_classifier(found, file)
        case "nanolm":
            config = read_own(found)
        case _:
            known = ", ".join([*CLASSES, *SEQ2SEQ, "nanolm"])
            raise ModelError(f"{file}: nanolm supports models of type {known}, not {family!r:.100}")
    if isinstance(config, GPTConfig) and CLASSIFIERS.get(family) in found.like("architectures", []):
        config = read_classifier(found, config, read_labels(found))
    if problems := config.problems():
        raise ModelError(f"{file}: {'; '.join(problems)}")
    return config


def read_shared(values: Values, family: str) -> None:
    values.only("quantization_config", [None], None, "quantized weights")
    values.only("add_cross_attention", [False], False, "cross-attention")
    bodies = [f"{name}Model" for name in CLASSES.values()]  # without a head
    for name in values.like("architectures", []):
        if name not in (CAUSAL[family], CLASSIFIERS[family], *bodies):
            raise values.wrong("architectures", "neither a language model nor a classifier")


def read_gpt2(values: Values) -> GPTConfig:
    read_shared(values, "gpt2")
    values.only("scale_attn_weights", [True], True, "unscaled attention")
    values.only("scale_attn_by_inverse_layer_idx", [False], False, "attention scaled by layer")
    what = "this activation function"
    activation = values.only("activation_function", ACTIVATIONS, "gelu_new", what)
    defaults = {"n_positions": 1024, "n_inner": 4 * values.count("n_embd")}
    sizes = read_sizes(values, "gpt2", GPT2_SIZES, defaults)
    return GPTConfig(
        **sizes | {"feed_forward": ACTIVATIONS[activation]},
        kv_heads=sizes["heads"],
        tied=values.like("tie_word_embeddings", True),
        dropout=values.number("resid_pdrop", 0.1),
        norm_epsilon=values.number("layer_norm_epsilon", 1e-5),
    )


def read_sizes(
    values: Values, family: str, names: dict[str, str], defaults: dict[str, int]
) -> dict[str, Any]:
    """The sizes, and the switches that are fixed for a family."""
    fixed = {name: allowed[0] for name, allowed in EXPRESSED[family].items() if len(allowed) == 1}
    sizes = {ours: values.count(theirs, defaults.get(theirs)) for theirs, ours in names.items()}
    return {**fixed, **sizes, "vocab_size": values.count("vocab_size")}


def read_llama(values: Values, family: Literal["llama", "qwen3"]) -> GPTConfig:
    read_shared(values, family)
    values.only("hidden_act", ["silu", "swish"], "silu", "this activation function")
    bias = family == "llama" and values.like("mlp_bias", False)
    values.only("attention_bias", [bias], False, "biases in only some layers")
    if family == "qwen3":
        values.only("use_sliding_window", [False], False, "a sliding window")
        if any(kind != "full_attention" for kind in values.like("layer_types", [])):
            raise values.wrong("layer_types", "nanolm does not support a sliding window")
    dim, heads = values.count("hidden_size"), values.count("num_attention_heads")
    defaults = {  # of transformers
        "max_position_embeddings": 2048 if family == "llama" else 32768,
        "num_key_value_heads": heads if family == "llama" else 32,
        "head_dim": max(1, dim // heads) if family == "llama" else 128,
    }
    sizes = read_sizes(values, family, LLAMA_SIZES, defaults)
    head_dim = sizes.pop("head_dim")
    base, scaling = read_rope(values, sizes["context"])
    return GPTConfig(
        **sizes | {"bias": bias},
        head_width=None if head_dim * heads == dim else head_dim,
        tied=values.like("tie_word_embeddings", False),
        dropout=values.number("dropout", 0.0),
        norm_epsilon=values.number("rms_norm_eps", 1e-6),
        rope_base=base,
        rope_scaling=scaling,
    )


def read_rope(values: Values, context: int) -> tuple[float, RopeScaling | None]:
    """The base and scaling of rotary positions, in the new or the old format, or both."""
    new, old = values.like("rope_parameters", {}), values.like("rope_scaling", {})
    if "type" in old:
        old = {"rope_type": old["type"]} | {key: old[key] for key in old if key != "type"}
    outside = ("rope_theta", "partial_rotary_factor")  # top-level fields in older versions
    old = {key: values.values[key] for key in outside if values.get(key) is not None} | old
    for key in new.keys() & old.keys():
        if new[key] != old[key]:
            raise values.wrong("rope_parameters", f"its {key} contradicts the older fields")
    rope = Values({**old, **new}, f"{values.where}: rope_parameters")
    rope.only("partial_rotary_factor", [1, 1.0], 1.0, "partial rotary embeddings")
    kind = rope.only("rope_type", SCALINGS, "default", "this RoPE scaling")
    known = {"rope_type", "rope_theta", "partial_rotary_factor", *SCALINGS[kind]}
    defaults: dict[str, float] = {"original_max_position_embeddings": context}
    if kind == "yarn":
        known.add("truncate")
        rope.only("truncate", [True], True, "this variant of YaRN")
        gain = 0.1 * math.log(max(1, rope.number("factor"))) + 1
        defaults |= {"beta_slow": 1, "beta_fast": 32, "attention_factor": gain}
    for key, value in rope.values.items():
        if value is not None and key not in known:
            raise rope.wrong(key, f"nanolm does not support this parameter of {kind!r} scaling")
    base = rope.number("rope_theta", 10_000.0)
    if kind == "default":
        return base, None
    parts: dict[str, Any] = {
        ours: rope.number(name, defaults.get(name)) for name, ours in SCALINGS[kind].items()
    }
    if "original_context" in parts:
        original = rope.count("original_max_position_embeddings", context)
        parts["original_context"] = original
        if values.get("original_max_position_embeddings", original) != original:
            raise values.wrong("original_max_position_embeddings", "contradicts rope_parameters")
    return base, RopeScaling(kind, **parts)


def read_labels(values: Values) -> tuple[str, ...]:
    """The label names in order; transformers omits the default, two unnamed labels."""
    single = ["single_label_classification", None]
    values.only("problem_type", single, None, "regression or multi-label classification")
    names = values.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})
    order = [str(id) for id in range(len(names))] if isinstance(names, dict) else []
    if order and set(names) == set(order) and are_labels(labels := [names[id] for id in order]):
        return tuple(labels)
    raise values.wrong("id2label", "must name at least two labels, numbered from 0")


def read_classifier(
    values: Values, base: ModelConfig, labels: tuple[str, ...], pool: Pool = "last"
) -> ClassifierConfig:
    window = values.count("window", base.context)
    long = values.only("long_texts", get_args(Long), "head", "this strategy for long texts")
    return ClassifierConfig(base=base, labels=labels, pool=pool, window=window, long=long)


def are_labels(names: list[Any]) -> bool:
    return all(isinstance(name, str) for name in names) and len(set(names)) == len(names) >= 2


def read_own_classifier(values: Values, file: Path) -> ClassifierConfig:
    labels = values.like("labels", [])
    if not are_labels(labels):
        raise values.wrong("labels", "must name at least two labels")
    pool = values.only("pool", get_args(Pool), None, "this kind of pooling")
    values.check_names("labels", "pool", "window", "long_texts", "base")
    config = config_from_json({**values.like("base", {}), "model_type": "nanolm"}, file)
    if isinstance(config, ClassifierConfig | Seq2SeqConfig):
        raise values.wrong("base", "must be a language model")
    return read_classifier(values, config, tuple(labels), pool)


def read_own(values: Values) -> ModelConfig:
    """Our own format: exactly the fields of the config, each of its type."""
    made = KINDS[values.only("kind", KINDS, None, "this kind of model")]
    hints = get_type_hints(made)
    values.check_names(*hints)
    taken = {}
    for field in fields(made):
        value = values.values.get(field.name, ...)
        if field.name == "rope_scaling" and isinstance(value, dict):
            try:
                value = RopeScaling(**value)
            except TypeError:
                raise values.wrong("rope_scaling", "not in nanolm's format") from None
        hint = hints[field.name]
        if not fits(value, hint):
            whole = (f"of type {getattr(hint, '__name__', hint)}",)
            words = map(str, get_args(hint) if get_origin(hint) is Literal else whole)
            raise values.wrong(field.name, f"must be {' or '.join(words)}")
        taken[field.name] = value
    return made(**taken)


def fits(value: object, hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(fits(value, part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return any(type(value) is type(one) and value == one for one in get_args(hint))
    if hint in (int, float):
        return type(value) in (int, hint) and abs(value) <= LARGEST  # type: ignore[arg-type]
    if type(value) is RopeScaling is hint:
        inside = get_type_hints(RopeScaling).items()
        return all(fits(getattr(value, name), part) for name, part in inside)
    return type(value) is hint
