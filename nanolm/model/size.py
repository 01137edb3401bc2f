"""The number of parameters of a model, and the memory needed to train it.

>>> preset_sizes("modern")[0].parameters
132624
"""

from dataclasses import asdict, dataclass

from nanolm.model.config import PRESETS, GPTConfig, ModelConfig, Preset, RecurrentConfig, configure
from nanolm.model.shapes import parameters_by_part

SCORES = 1 << 30  # logits computed at a time: 2 GB in bfloat16


def non_embedding_parameters(config: GPTConfig) -> int:
    """Parameters of all matrices except the embedding and the head."""
    inner = 3 if config.feed_forward == "swiglu" else 2
    heads = 2 * (config.heads + config.kv_heads) * config.head_dim
    return config.layers * config.dim * (heads + inner * config.hidden)


def training_bytes(config: ModelConfig, parameters: int, tokens: int) -> int:
    """Approximate GPU memory for steps of `tokens` in bfloat16: weights, their bfloat16 copy and
    optimizer state (Muon has one moment, AdamW two), logits and the gradient of the head, and the
    activations. Fitted to measurements on an H200 (docs/benchmarks.md)."""
    known = 14 * parameters
    if isinstance(config, GPTConfig):
        known -= 4 * non_embedding_parameters(config)
        kept = 39.0 if config.feed_forward == "swiglu" else 33.5
    else:
        assert isinstance(config, RecurrentConfig)
        kept = {"rnn": 16.0, "lstm": 30.0}[config.cell]
    scores = 2 * min(SCORES, tokens * config.vocab_size) + 4 * config.vocab_size * config.dim
    return round(known + scores + tokens * kept * config.layers * config.dim)


@dataclass(frozen=True, kw_only=True)
class Size(Preset):
    """A preset, with the sizes to show in a table."""

    preset: str
    parameters: int  # with its typical vocabulary
    training_bytes: int  # with its batch, on a GPU


def preset_sizes(family: str) -> list[Size]:
    sizes = []
    for name, preset in PRESETS.items():
        shape = {name: getattr(preset, name) for name in ("layers", "heads", "dim", "context")}
        config = configure(family, vocab_size=preset.vocab_size, **shape)
        count = sum(parameters_by_part(config).values())
        needed = training_bytes(config, count, preset.batch * preset.context)
        sizes.append(Size(**asdict(preset), preset=name, parameters=count, training_bytes=needed))
    return sizes
