"""config.json of decoder-only models: what each Hugging Face family supports, read and written.

    >>> read_family(Values({"model_type": "qwen2", ...}, "config.json"), "qwen2")
    GPTConfig(vocab_size=151936, ...)

A missing field has the default of `transformers`. Unknown settings that would change the results
are refused by name.
"""

from typing import Any, NamedTuple

from nanolm.model.config import FAMILIES, MOST_LAYERS, PUBLISHED, GPTConfig, Switches
from nanolm.model.json_values import Values
from nanolm.model.marian_json import ACTIVATIONS, SWITCHES
from nanolm.model.rope_json import NEOX_ROPE, OLD_ROPE, read_rope, write_rope

# Prefixes of each family's class names in transformers. The first that fits a model is used.
CLASSES = {
    "gpt2": "GPT2",
    "llama": "Llama",
    "qwen3": "Qwen3",
    "qwen2": "Qwen2",
    "mistral": "Mistral",
    "smollm3": "SmolLM3",
    "olmo2": "Olmo2",
    "gpt_neox": "GPTNeoX",
}
CAUSAL = {family: f"{name}ForCausalLM" for family, name in CLASSES.items()}
CAUSAL["gpt2"] = "GPT2LMHeadModel"
CLASSIFIERS = {family: f"{name}ForSequenceClassification" for family, name in CLASSES.items()}


def switches(ours: str, *free: str, **more: tuple[object, ...]) -> Switches:
    """The values of each switch that a family supports: those of ours, except `free` (any value)
    and `more`."""
    same: Switches = {name: (FAMILIES[ours][name],) for name in SWITCHES} | PUBLISHED | more
    return {name: allowed for name, allowed in same.items() if name not in free}


ALL_OR_NONE = (None, "none", "all")
ANY_ACTIVATION = tuple(ACTIVATIONS.values())
EXPRESSED: dict[str, Switches] = {
    "gpt2": switches("gpt2", feed_forward=ANY_ACTIVATION, head_width=(None,)),
    "llama": switches("llama", "bias", attention_bias=ALL_OR_NONE),
    "qwen3": switches("modern", attention_bias=ALL_OR_NONE),
    "qwen2": switches("llama", attention_bias=("qkv",)),
    "mistral": switches("llama", "sliding_window", attention_bias=(None, "none")),
    "smollm3": switches("llama", "bias", "unrotated_layers", attention_bias=ALL_OR_NONE),
    "olmo2": switches(
        "modern", norm_place=("branch",), qk_norm_whole=(True,), attention_bias=ALL_OR_NONE
    ),
    "gpt_neox": switches(
        *("gpt2", "parallel_residual", "rotary_dims"),
        positions=("rope",),
        feed_forward=ANY_ACTIVATION,
        head_width=(None,),
        attention_bias=ALL_OR_NONE,
    ),
}


class Defaults(NamedTuple):
    """What transformers uses for missing fields of a family that resembles Llama."""

    context: int
    kv_heads: int | None = None  # as many as heads
    head_dim: int | None = None  # hidden_size / heads
    epsilon: float = 1e-6
    base: float = 10_000.0
    tied: bool = False


LLAMA_LIKE = {
    "llama": Defaults(2048),
    "qwen3": Defaults(32768, kv_heads=32, head_dim=128),
    "qwen2": Defaults(32768, kv_heads=32),
    "mistral": Defaults(131072, kv_heads=8),
    "smollm3": Defaults(32768, kv_heads=4, base=2_000_000.0, tied=True),
    "olmo2": Defaults(2048, epsilon=1e-5),
}
# Our names of the sizes, by their Hugging Face names.
GPT2_SIZES = {
    "n_positions": "context",
    "n_embd": "dim",
    "n_layer": "layers",
    "n_head": "heads",
    "n_inner": "hidden",
}
GPT2_ALIASES = {  # other names that transformers accepts, and prefers
    "max_position_embeddings": "n_positions",
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}
NEOX_SIZES = {
    "max_position_embeddings": "context",
    "hidden_size": "dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "hidden",
}
LLAMA_SIZES = {**NEOX_SIZES, "num_key_value_heads": "kv_heads", "head_dim": "head_dim"}
# Families with these fields.
ATTENTION_BIAS = ("llama", "qwen3", "smollm3", "olmo2")
MLP_BIAS = ("llama", "smollm3")
LAYER_TYPES = ("qwen2", "qwen3", "smollm3")


def write_family(config: GPTConfig, family: str) -> dict[str, Any]:
    """The fields of config.json that depend on the family."""
    activations = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    if family == "gpt2":
        dropouts = {"resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": 0.0}
        return {
            **{theirs: getattr(config, ours) for theirs, ours in GPT2_SIZES.items()},
            "activation_function": activations[config.feed_forward],
            "layer_norm_epsilon": config.norm_epsilon,
            **dropouts,
        }
    older = NEOX_ROPE if family == "gpt_neox" else OLD_ROPE
    written = {**write_rope(config, older), "attention_dropout": 0.0}
    if family in (*ATTENTION_BIAS, "gpt_neox"):
        written["attention_bias"] = config.attention_biases[0]
    if family == "gpt_neox":
        return {
            **{theirs: getattr(config, ours) for theirs, ours in NEOX_SIZES.items()},
            "hidden_act": activations[config.feed_forward],
            "layer_norm_eps": config.norm_epsilon,
            "use_parallel_residual": config.parallel_residual,
            "hidden_dropout": config.dropout,
            **written,
        }
    if family in MLP_BIAS:
        written["mlp_bias"] = config.bias
    if family == "mistral":
        written["sliding_window"] = config.sliding_window
    if family == "smollm3":
        layers = range(config.layers)
        written["no_rope_layers"] = [int(n not in config.unrotated_layers) for n in layers]
    return {
        **{theirs: getattr(config, ours) for theirs, ours in LLAMA_SIZES.items()},
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        **written,
        "dropout": config.dropout,  # ours: the residual dropout it was trained with
    }


def read_family(values: Values, family: str) -> GPTConfig:
    values.only("quantization_config", [None], None, "quantized weights")
    values.only("add_cross_attention", [False], False, "cross-attention")
    bodies = [f"{name}Model" for name in CLASSES.values()]  # without a head
    for name in values.like("architectures", []):
        if name not in (CAUSAL[family], CLASSIFIERS[family], *bodies):
            raise values.wrong("architectures", "neither a language model nor a classifier")
    if family == "gpt2":
        return read_gpt2(values)
    return read_gpt_neox(values) if family == "gpt_neox" else read_llama(values, family)


def read_activation(values: Values, name: str, default: str) -> Any:
    return ACTIVATIONS[values.only(name, ACTIVATIONS, default, "this activation function")]


def read_gpt2(values: Values) -> GPTConfig:
    others = {name: values.get(alias) for alias, name in GPT2_ALIASES.items()}
    others = {name: value for name, value in others.items() if value is not None}
    values = Values({**values.values, **others}, values.where)
    values.only("scale_attn_weights", [True], True, "unscaled attention")
    values.only("scale_attn_by_inverse_layer_idx", [False], False, "attention scaled by layer")
    defaults = {"n_positions": 1024, "n_inner": 4 * values.count("n_embd")}
    sizes = read_sizes(values, "gpt2", GPT2_SIZES, defaults)
    return GPTConfig(
        **sizes | {"feed_forward": read_activation(values, "activation_function", "gelu_new")},
        kv_heads=sizes["heads"],
        tied=values.like("tie_word_embeddings", True),
        dropout=values.number("resid_pdrop", 0.1),
        norm_epsilon=values.number("layer_norm_epsilon", 1e-5),
    )


def read_gpt_neox(values: Values) -> GPTConfig:
    sizes = read_sizes(values, "gpt_neox", NEOX_SIZES, {"max_position_embeddings": 2048})
    head_dim = max(1, sizes["dim"] // sizes["heads"])
    values.only("head_dim", [head_dim], head_dim, "this width of heads")
    base, scaling, share = read_rope(values, sizes["context"], NEOX_ROPE, 10_000.0, 0.25)
    dims = int(head_dim * share)
    return GPTConfig(
        **sizes | {"feed_forward": read_activation(values, "hidden_act", "gelu")},
        attention_bias=None if values.like("attention_bias", True) else "none",
        kv_heads=sizes["heads"],
        tied=values.like("tie_word_embeddings", False),
        dropout=values.number("hidden_dropout", 0.0),
        norm_epsilon=values.number("layer_norm_eps", 1e-5),
        parallel_residual=values.like("use_parallel_residual", True),
        rotary_dims=None if dims == head_dim else dims,
        rope_base=base,
        rope_scaling=scaling,
    )


def read_sizes(
    values: Values, family: str, names: dict[str, str], defaults: dict[str, int]
) -> dict[str, Any]:
    """The sizes, and the switches that are fixed for a family."""
    fixed = {name: allowed[0] for name, allowed in EXPRESSED[family].items() if len(allowed) == 1}
    sizes = {ours: values.count(theirs, defaults.get(theirs)) for theirs, ours in names.items()}
    return {**fixed, **sizes, "vocab_size": values.count("vocab_size")}


def read_llama(values: Values, family: str) -> GPTConfig:
    values.only("hidden_act", ["silu", "swish"], "silu", "this activation function")
    if family in LAYER_TYPES:
        values.only("use_sliding_window", [False], False, "a sliding window")
        if any(kind != "full_attention" for kind in values.like("layer_types", [])):
            raise values.wrong("layer_types", "nanolm does not support a sliding window")
    usual = LLAMA_LIKE[family]
    dim, heads = values.count("hidden_size"), values.count("num_attention_heads")
    kv_heads = heads if "num_key_value_heads" in values.values else usual.kv_heads or heads
    defaults = {
        "max_position_embeddings": usual.context,
        "num_key_value_heads": kv_heads,  # null: as many as heads
        "head_dim": usual.head_dim or max(1, dim // heads),
    }
    found = read_sizes(values, family, LLAMA_SIZES, defaults)
    head_dim = found.pop("head_dim")
    base, scaling, _ = read_rope(values, found["context"], OLD_ROPE, usual.base)
    found["bias"] = family in MLP_BIAS and values.like("mlp_bias", False)
    if family in ATTENTION_BIAS and values.like("attention_bias", False) != found["bias"]:
        found["attention_bias"] = "none" if found["bias"] else "all"
    if family == "smollm3":
        found["unrotated_layers"] = read_unrotated(values, found["layers"])
    if family == "mistral" and values.values.get("sliding_window", 0) is not None:
        window = values.count("sliding_window", 4096)
        found["sliding_window"] = window if window < found["context"] else None
    return GPTConfig(
        **found,
        head_width=None if head_dim * heads == dim else head_dim,
        tied=values.like("tie_word_embeddings", usual.tied),
        dropout=values.number("dropout", 0.0),
        norm_epsilon=values.number("rms_norm_eps", usual.epsilon),
        rope_base=base,
        rope_scaling=scaling,
    )


def read_unrotated(values: Values, layers: int) -> tuple[int, ...]:
    """The layers without rotary positions: those with a 0, or every fourth."""
    layers = min(layers, MOST_LAYERS)
    interval = values.count("no_rope_layer_interval", 4)
    usual = [int((layer + 1) % interval != 0) for layer in range(layers)]
    flags = values.like("no_rope_layers", usual)
    if len(flags) < layers or any(flag not in (0, 1) for flag in flags):
        raise values.wrong("no_rope_layers", "must have a 0 or a 1 for each layer")
    return tuple(layer for layer, flag in enumerate(flags[:layers]) if not flag)
