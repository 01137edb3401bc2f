"""Rotary positions in config.json, as newer and older versions of `transformers` write them."""

import math
from typing import Any

from nanolm.model.config import RopeScaling, TransformerConfig
from nanolm.model.json_values import Values

# Our names of the RoPE scaling parameters, by their Hugging Face names.
STRETCHED = {"factor": "factor", "original_max_position_embeddings": "original_context"}
LLAMA3 = {**STRETCHED, "low_freq_factor": "slow", "high_freq_factor": "fast"}
YARN = {**STRETCHED, "beta_slow": "slow", "beta_fast": "fast", "attention_factor": "gain"}
SCALINGS = {"default": {}, "linear": {"factor": "factor"}, "llama3": LLAMA3, "yarn": YARN}
# Top-level fields of older versions, by their names in rope_parameters.
OLD_ROPE = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}
NEOX_ROPE = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}


def write_rope(config: TransformerConfig, older: dict[str, str]) -> dict[str, Any]:
    kind = config.rope_scaling.kind if config.rope_scaling else "default"
    parts = {name: getattr(config.rope_scaling, ours) for name, ours in SCALINGS[kind].items()}
    rope = {"rope_type": kind, "rope_theta": float(config.rope_base), **parts}
    if older is NEOX_ROPE:
        rope["partial_rotary_factor"] = rotary_share(config)
    return {
        "rope_parameters": rope,
        # The same for older versions.
        **{theirs: rope[name] for name, theirs in older.items() if name in rope},
        "rope_scaling": rope if config.rope_scaling else None,
    }


def rotary_share(config: TransformerConfig) -> float:
    """The share of each head that is rotated; transformers multiplies and rounds down."""
    dims = config.rotary_dims or config.head_dim
    share = dims / config.head_dim
    return share if int(config.head_dim * share) == dims else math.nextafter(share, 2)


def read_rope(
    values: Values, context: int, older: dict[str, str], base: float, share: float | None = None
) -> tuple[float, RopeScaling | None, float]:
    """The base and scaling of rotary positions, in the new or the old format, or both, and the
    share of each head that is rotated. `base` and `share` are defaults; None: only whole heads."""
    new, old = values.like("rope_parameters", {}), values.like("rope_scaling", {})
    if "type" in old:
        old = {"rope_type": old["type"]} | {key: old[key] for key in old if key != "type"}
    top = {key: values.get(theirs) for key, theirs in older.items()}
    old = {key: value for key, value in top.items() if value is not None} | old
    for key in new.keys() & old.keys():
        if new[key] != old[key]:
            raise values.wrong("rope_parameters", f"its {key} contradicts the older fields")
    rope = Values({**old, **new}, f"{values.where}: rope_parameters")
    if share is None:
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
    base, share = rope.number("rope_theta", base), rope.number("partial_rotary_factor", share or 1)
    if kind == "default":
        return base, None, share
    parts: dict[str, Any] = {
        ours: rope.number(name, defaults.get(name)) for name, ours in SCALINGS[kind].items()
    }
    if "original_context" in parts:
        original = rope.count("original_max_position_embeddings", context)
        # transformers prefers the top-level field.
        parts["original_context"] = values.count("original_max_position_embeddings", original)
    return base, RopeScaling(kind, **parts), share
