"""Model configs: frozen dataclasses, model families, and named sizes (presets).

    >>> configure("modern", vocab_size=1024, layers=3, heads=3, dim=48, context=64).hidden
    128

Imports no torch, so that the command line shows its help quickly.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

Positions = Literal["learned", "sinusoidal", "rope", "alibi", "none"]
Norm = Literal["layer", "rms"]
NormPlace = Literal["pre", "post", "branch"]
FeedForwardKind = Literal["relu", "gelu", "gelu_tanh", "relu2", "silu", "swiglu"]
CrossAttentionKind = Literal["none", "additive", "dot"]
Pool = Literal["last", "mean", "max"]
Long = Literal["head", "tail", "windows"]

MOST_LAYERS = 1000  # each takes 40 kB even without weights; real models have fewer than 200


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The fields of every model. A model can be rebuilt from its config alone."""

    vocab_size: int
    layers: int
    dim: int  # embedding width
    context: int  # context length in tokens
    tied: bool  # the output layer is the token embedding
    dropout: float = 0.0

    def problems(self) -> list[str]:
        """Errors in this config, each with what to change."""
        found = [
            f"--{field.name.replace('_', '-')} {value}: must be at least 1"
            for field in fields(self)
            if field.type is int and (value := getattr(self, field.name)) < 1
        ]
        if self.layers > MOST_LAYERS:
            found.append(f"--layers {self.layers}: must be at most {MOST_LAYERS:,}")
        if not 0 <= self.dropout < 1:
            found.append(f"--dropout {self.dropout}: must be at least 0 and below 1")
        return found


@dataclass(frozen=True)
class RopeScaling:
    """Stretches rotary positions to a longer context than the original one. Slow rotations are
    slowed down by `factor`, fast ones are unchanged, and those in between are interpolated. The
    limits are in turns within the original context. "linear" slows down all rotations."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_context: int = 0
    slow: float = 0.0  # turns; rotations below are slowed down
    fast: float = 0.0  # turns; rotations above are unchanged
    gain: float = 1.0  # YaRN also sharpens attention by scaling queries and keys

    def problems(self) -> list[str]:
        numbers = [self.factor, self.gain]
        if self.kind != "linear":
            numbers += [self.original_context, self.slow, self.fast - self.slow]
        # Far below any sensible value, and far above where dividing by it overflows.
        return [] if min(numbers) > 1e-6 else [f"invalid {self}"]


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """A stack of Transformer blocks, with all architecture options of the lectures."""

    heads: int
    kv_heads: int  # fewer than heads: grouped-query attention
    head_width: int | None = None  # dim / heads unless given
    hidden: int  # width inside the feed-forward layer
    positions: Positions
    norm: Norm
    norm_place: NormPlace  # before each layer, after the residual addition, or before it
    feed_forward: FeedForwardKind
    qk_norm: bool  # normalize queries and keys, which bounds attention scores
    bias: bool  # in linear layers, and in layer norms
    norm_epsilon: float = 1e-6
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    # Switches of published models.
    attention_bias: Literal["none", "qkv", "all"] | None = None  # if not the same as `bias`
    qk_norm_whole: bool = False  # `qk_norm` of all heads together (OLMo 2)
    parallel_residual: bool = False  # attention and feed-forward have the same input (GPT-NeoX)
    rotary_dims: int | None = None  # components of each head that are rotated, if not all
    unrotated_layers: tuple[int, ...] = ()  # layers without rotary positions (SmolLM3)
    sliding_window: int | None = None  # tokens that each token attends to, if not all (Mistral)

    @property
    def head_dim(self) -> int:
        return self.head_width or self.dim // self.heads

    @property
    def attention_biases(self) -> tuple[bool, bool]:
        """Whether there are biases of queries, keys and values, and of the output projection."""
        which = self.attention_bias or ("all" if self.bias else "none")
        return which != "none", which == "all"

    def problems(self) -> list[str]:
        found = super().problems()
        if self.head_width is not None and self.head_width < 1:
            found.append(f"the head width is {self.head_width}: must be at least 1")
        if self.norm_epsilon < 0:
            found.append(f"the epsilon of the norms is {self.norm_epsilon}: must be at least 0")
        if self.rope_base < 1.001:  # closer to 1, dividing by its logarithm overflows
            found.append(f"--rope-base {self.rope_base}: must be above 1")
        if self.rope_scaling:
            found += self.rope_scaling.problems()
        if found:
            return found
        if self.heads % self.kv_heads:
            found.append(
                f"--heads {self.heads} is not a multiple of --kv-heads {self.kv_heads}; "
                f"try --kv-heads {math.gcd(self.heads, self.kv_heads)}"
            )
        if self.head_width is None and self.dim % self.heads:
            _, dim = complete_shape(self.heads, self.dim, heads=self.heads)
            heads, _ = complete_shape(self.heads, self.dim, dim=self.dim)
            found.append(
                f"--dim {self.dim} is not a multiple of --heads {self.heads}; "
                f"try --dim {dim} or --heads {heads}"
            )
        elif self.positions == "rope" and self.rotary_dims is None and self.head_dim % 2:
            found.append(
                f"rotary positions need an even width per head, but --dim {self.dim} / "
                f"--heads {self.heads} is {self.head_dim}; try --dim {self.dim + self.heads}"
            )
        dims, window, skipped = self.rotary_dims, self.sliding_window, self.unrotated_layers
        width, last = self.head_dim, self.layers - 1
        wrong = {
            "parallel_residual needs --norm-place pre": (
                self.parallel_residual and self.norm_place != "pre"
            ),
            f"rotary_dims is {dims}: must be even, from 2 to the width of a head, {width}": (
                dims is not None and (dims % 2 or not 2 <= dims <= width)
            ),
            f"unrotated_layers is {skipped}: must be from 0 to {last}": (
                any(not 0 <= layer <= last for layer in skipped)
            ),
            f"sliding_window is {window}: must be at least 1, and without ALiBi": (
                window is not None and (window < 1 or self.positions == "alibi")
            ),
        }
        return found + [problem for problem, is_wrong in wrong.items() if is_wrong]


@dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
    """A decoder-only Transformer."""


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig(ModelConfig):
    """A model that reads a source and generates a target. `vocab_size` is that of the target,
    `layers` those of the decoder."""

    encoder_layers: int
    source_vocab_size: int | None = None  # None: the source uses the target's embedding

    def problems(self) -> list[str]:
        found = super().problems()
        if self.encoder_layers > MOST_LAYERS:
            found.append(f"--encoder-layers {self.encoder_layers}: must be at most {MOST_LAYERS:,}")
        if self.source_vocab_size is not None and self.source_vocab_size < 1:
            found.append(f"a source_vocab_size of {self.source_vocab_size}: must be at least 1")
        return found


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(Seq2SeqConfig, TransformerConfig):
    """An encoder-decoder Transformer."""

    def problems(self) -> list[str]:
        found = super().problems()
        if self.positions in ("learned", "alibi"):
            found.append(
                f"--positions {self.positions}: encoder-decoders do not support it; try rope"
            )
        found += [
            f"{name}: encoder-decoders do not support it" for name in unsupported(self, PUBLISHED)
        ]
        return found


@dataclass(frozen=True, kw_only=True)
class RecurrentSeq2SeqConfig(Seq2SeqConfig):
    """A recurrent encoder and decoder, with or without attention between them."""

    cell: Literal["rnn", "lstm", "gru"]
    attention: CrossAttentionKind  # of the decoder to the encoder's states


Switches = dict[
    str, tuple[object, ...]
]  # fields of a TransformerConfig, each with its allowed values


# The switches of published models, with their usual values.
PUBLISHED: Switches = {
    "attention_bias": (None,),
    "qk_norm_whole": (False,),
    "parallel_residual": (False,),
    "rotary_dims": (None,),
    "unrotated_layers": ((),),
    "sliding_window": (None,),
}


def unsupported(config: TransformerConfig, switches: Switches) -> list[str]:
    """The switches with a value in `config` that is not allowed."""
    return [name for name, allowed in switches.items() if getattr(config, name) not in allowed]


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(ModelConfig):
    """A stack of recurrent layers: the baseline for Transformers."""

    cell: Literal["rnn", "lstm"]


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """A language model with a classification head."""

    base: ModelConfig
    labels: tuple[str, ...]
    pool: Pool = "last"  # pooling: the last token's vector, or the mean or max of all
    window: int  # tokens of a text that are classified together
    long: Long = "head"  # for longer texts: use the beginning, the end, or several windows
    ngrams: bool = False  # whether the logits of a linear model are added; it has its own file

    def problems(self) -> list[str]:
        found = self.base.problems()
        if not 1 <= self.window <= self.base.context:
            found.append(f"a window of {self.window}: must be from 1 to {self.base.context}")
        return found


# The switches of each family.
LLAMA = {
    "positions": "rope",
    "norm": "rms",
    "norm_place": "pre",
    "feed_forward": "swiglu",
    "qk_norm": False,
    "bias": False,
    "tied": False,
    "norm_epsilon": 1e-5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "modern": {**LLAMA, "qk_norm": True, "norm_epsilon": 1e-6},  # saved as Qwen3
    "llama": LLAMA,
    "gpt2": {
        **LLAMA,
        "positions": "learned",
        "norm": "layer",
        "feed_forward": "gelu_tanh",
        "bias": True,
        "tied": True,
    },
    "rnn": {"cell": "rnn", "tied": False},
    "lstm": {"cell": "lstm", "tied": False},
}
RECURRENT = ("rnn", "lstm")
SEQ2SEQ_FAMILIES: dict[str, dict[str, Any]] = {
    "encoder-decoder": {  # Vaswani et al., 2017; saved as MarianMT
        "positions": "sinusoidal",
        "norm": "layer",
        "norm_place": "post",  # with "pre", saved as Pegasus
        "feed_forward": "relu",
        "qk_norm": False,
        "bias": True,
        "tied": True,
        "norm_epsilon": 1e-5,
    },
    "modern-encoder-decoder": {**FAMILIES["modern"], "tied": True},
    "seq2seq-rnn": {"cell": "rnn", "tied": True},
    "seq2seq-lstm": {"cell": "lstm", "tied": True},
    "seq2seq-gru": {"cell": "gru", "tied": True},
}


@dataclass(frozen=True)
class Preset:
    """A named size; `batch` is the number of sequences per step."""

    layers: int
    heads: int
    dim: int
    context: int
    batch: int
    vocab_size: int  # a typical one, to count parameters with
    purpose: str


PRESETS = {
    "nano": Preset(3, 3, 48, 64, 16, 512, "a few kB; used in the course"),
    "micro": Preset(4, 4, 128, 128, 8, 2_048, "a megabyte, on a CPU"),
    "mini": Preset(6, 6, 384, 256, 64, 2_048, "a megabyte, on a GPU"),
    "small": Preset(8, 8, 512, 512, 64, 16_384, "tens of MB, on a GPU"),
    "gpt2": Preset(12, 12, 768, 1024, 64, 50_257, "gigabytes, on a large GPU"),
    "gpt2-medium": Preset(24, 16, 1024, 1024, 32, 50_257, "the size of GPT-2 medium"),
    "gpt2-large": Preset(36, 20, 1280, 1024, 16, 50_257, "the size of GPT-2 large"),
    "gpt2-xl": Preset(48, 25, 1600, 1024, 8, 50_257, "the size of GPT-2 XL"),
}


def complete_shape(
    usual_heads: int,
    usual_dim: int,
    heads: int | None = None,
    dim: int | None = None,
    kv_heads: int | None = None,
) -> tuple[int, int]:
    """Complete the shape of a model. If only heads or width is given, the other is the closest to
    the usual shape that fits, with an even width per head, as rotary positions require."""
    groups = kv_heads or 1
    if dim is None:
        if heads is None:
            heads = max(1, round(usual_heads / groups)) * groups
        fits = usual_dim % (2 * heads) == 0
        return heads, usual_dim if fits else max(1, round(usual_dim / heads / 2)) * 2 * heads
    if heads is None:
        possible = [n for n in range(groups, dim + 1, groups) if dim % n == 0]
        possible = [n for n in possible if dim // n % 2 == 0] or possible or [groups]
        heads = min(possible, key=lambda n: abs(math.log(n * usual_dim / (dim * usual_heads))))
    return heads, dim


def configure(family: str, **asked: Any) -> ModelConfig:
    """A config of `family`; values that are given (and not None) override the family's."""
    given = {name: value for name, value in asked.items() if value is not None}
    values = (FAMILIES | SEQ2SEQ_FAMILIES)[family] | given
    if family in SEQ2SEQ_FAMILIES:
        values.setdefault("encoder_layers", values["layers"])
    if "cell" in values:
        values.pop("heads", None)  # presets have them for every family
        return RecurrentConfig(**values) if family in RECURRENT else recurrent_seq2seq(values)
    values.setdefault("kv_heads", values["heads"])
    if values["feed_forward"] == "swiglu":
        # Three matrices instead of two, so two thirds of four times the width, rounded up to a
        # multiple of 32 for the hardware.
        values.setdefault("hidden", -(-8 * values["dim"] // 96) * 32)
    values.setdefault("hidden", 4 * values["dim"])
    return (EncoderDecoderConfig if family in SEQ2SEQ_FAMILIES else GPTConfig)(**values)


def recurrent_seq2seq(values: dict[str, Any]) -> RecurrentSeq2SeqConfig:
    return RecurrentSeq2SeqConfig(**{"attention": "additive", **values})
