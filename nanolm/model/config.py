"""What a model is: one frozen dataclass, the families, and the sizes that have names.

    >>> configure("modern", vocab_size=1024, layers=3, heads=3, dim=48, context=64).hidden
    128

Importing this costs nothing (no torch), so the command line can show it in its help.
"""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ModelConfig:
    """Everything needed to build a model; saved whole, and the model is rebuilt from it alone."""

    vocab_size: int
    layers: int
    heads: int
    dim: int  # width of the residual stream
    context: int  # tokens the model can look back on
    hidden: int  # width inside the feed-forward layer
    positions: Literal["learned", "rope"]
    norm: Literal["layer", "rms"]
    feed_forward: Literal["gelu_tanh", "swiglu"]
    qk_norm: bool  # normalise queries and keys: attention scores cannot blow up
    bias: bool
    tied: bool  # the output layer is the token embedding
    dropout: float = 0.0
    norm_epsilon: float = 1e-6
    rope_base: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def problems(self) -> list[str]:
        """What keeps this from being a model, each with what to change."""
        found = []
        for name in ("layers", "heads", "dim", "context"):
            if getattr(self, name) < 1:
                found.append(f"--{name} {getattr(self, name)}: must be at least 1")
        if not found and self.dim % self.heads:
            fitting = max(1, round(self.dim / self.heads)) * self.heads
            found.append(
                f"--dim {self.dim} is not a multiple of --heads {self.heads}; try --dim {fitting}"
            )
        elif not found and self.positions == "rope" and self.head_dim % 2:
            found.append(
                f"rotary positions need an even width a head, and --dim {self.dim} / "
                f"--heads {self.heads} is {self.head_dim}; try --dim {self.dim + self.heads}"
            )
        if not 0 <= self.dropout < 1:
            found.append(f"--dropout {self.dropout}: must be at least 0 and below 1")
        return found


# The switches that make a family; its name decides the folder that is written on disk.
FAMILIES: dict[str, dict[str, Any]] = {
    "modern": {  # written as Qwen3
        "positions": "rope",
        "norm": "rms",
        "feed_forward": "swiglu",
        "qk_norm": True,
        "bias": False,
        "tied": False,
    },
    "gpt2": {
        "positions": "learned",
        "norm": "layer",
        "feed_forward": "gelu_tanh",
        "qk_norm": False,
        "bias": True,
        "tied": True,
        "norm_epsilon": 1e-5,
    },
}


@dataclass(frozen=True)
class Preset:
    """A size with a name; `batch` is sequences a step, sized with the model."""

    layers: int
    heads: int
    dim: int
    context: int
    batch: int
    purpose: str


PRESETS = {
    "nano": Preset(3, 3, 48, 64, 16, "for a few kilobytes"),
    "micro": Preset(4, 4, 128, 128, 8, "for a megabyte on a CPU"),
    "mini": Preset(6, 6, 384, 256, 64, "for a megabyte on a GPU"),
    "small": Preset(8, 8, 512, 512, 64, "for tens of megabytes on a GPU"),
    "gpt2": Preset(12, 12, 768, 1024, 64, "for gigabytes on a large GPU"),
}


def configure(family: str, *, vocab_size: int, dim: int, **settings: Any) -> ModelConfig:
    """A model of `family`, its feed-forward width the usual one for its kind."""
    switches = FAMILIES[family]
    if switches["feed_forward"] == "swiglu":
        # Three matrices instead of two, so two thirds of four times the width, rounded up to a
        # multiple of 32 for the hardware.
        hidden = -(-8 * dim // 96) * 32
    else:
        hidden = 4 * dim
    return ModelConfig(vocab_size=vocab_size, dim=dim, hidden=hidden, **switches, **settings)
