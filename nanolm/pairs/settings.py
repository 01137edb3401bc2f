"""All settings of `nanolm train-pairs`. As in nanolm.training.settings, None means chosen for you.

This module is cheap to import (no torch), so the command line can use it for its help.
"""

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from nanolm.model import config
from nanolm.model.config import SEQ2SEQ_FAMILIES, complete_shape, configure
from nanolm.text import TRAINABLE
from nanolm.training.settings import CHOICES, Settings, option

if TYPE_CHECKING:
    from nanolm.text.pairs import PairReading

DEFAULT_FAMILY = "modern-encoder-decoder"
RECURRENT = tuple(name for name, switches in SEQ2SEQ_FAMILIES.items() if "cell" in switches)
TRANSFORMER_ONLY = ("heads", "hidden", "norm_place")
SHAPE = ("attention", "layers", "encoder_layers", "dim", *TRANSFORMER_ONLY)
TOKENIZERS = ("tokenizer", "source_tokenizer", "vocab_size", "separate_vocabularies")
FROM_SCRATCH = ("family", *SHAPE, *TOKENIZERS)
LIMITS = {
    "val_fraction": (0.001, 0.5),
    "label_smoothing": (0, 0.9),
    "encoder_layers": (1, 1_000),
    "limit": (2, inf),
}


@dataclass(frozen=True)
class PairSettings(Settings):
    """The settings that determine the result of `nanolm train-pairs`."""

    texts = "pairs"
    files = ("val", "test")
    choices: ClassVar = {
        **CHOICES,
        "family": tuple(SEQ2SEQ_FAMILIES),
        "attention": get_args(config.CrossAttentionKind),
        "source_tokenizer": TRAINABLE,
    }

    pairs: tuple[str, ...]
    source_column: str | None = None
    target_column: str | None = None
    reverse: bool = False
    val: tuple[str, ...] = ()  # one table, or two files line by line
    val_fraction: float | None = None
    test: tuple[str, ...] = ()
    limit: int | None = None
    separate_vocabularies: bool | None = None
    source_tokenizer: str | None = None  # of separate vocabularies
    attention: str | None = None
    layers: int | None = None
    encoder_layers: int | None = None
    heads: int | None = None
    dim: int | None = None
    hidden: int | None = None
    norm_place: str | None = None
    label_smoothing: float | None = None
    optimizer: str | None = None
    weight_decay: float | None = None
    evaluations: int | None = None
    workers: int | None = None

    def reading(self) -> "PairReading":
        from nanolm.text.pairs import PairReading  # not needed to show help

        return PairReading(self.encoding, self.source_column, self.target_column, self.reverse)

    def shape(self) -> dict[str, Any]:
        """What `configure` needs to know, as far as it is decided."""
        recurrent = self.family in RECURRENT
        other = TRANSFORMER_ONLY if recurrent else ("attention",)
        return {name: getattr(self, name) for name in SHAPE if name not in other}

    def problems(self) -> list[str]:
        problems = super().problems()
        given = {name for name in SHAPE if getattr(self, name) is not None}
        family = self.family or DEFAULT_FAMILY
        if family in RECURRENT:
            useless = given & set(TRANSFORMER_ONLY)
            problems += [f"{option(n)} is for Transformers, not for {family}" for n in useless]
        elif "attention" in given and self.start_from is None:
            hint = f"try --family seq2seq-gru --attention {self.attention}"
            problems.append(f"--attention is for recurrent models, not for {family}; {hint}")
        problems += self.model_problems() + self.tokenizer_problems()
        if self.dropout and (self.workers or 1) > 1:  # only a config file can set the latter
            problems.append(f"workers = {self.workers} needs --dropout 0, or workers = 1")
        if self.deterministic and not (self.steps or self.epochs or self.minutes):
            problems.append("--deterministic needs --steps or --epochs")
        if self.dtype == "float8":
            problems.append("--dtype float8 is for `nanolm train`; try --dtype bfloat16")
        if self.start_from is not None:
            problems += [
                f"{option(name)} cannot be used with --from, because {self.start_from} has its own"
                for name in FROM_SCRATCH
                if getattr(self, name) is not None
            ]
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                allowed = f"from {least:g} to {most:g}" if most < inf else f"at least {least:g}"
                problems.append(f"{option(name)} {value}: must be {allowed}")
        for name in ("val", "test"):
            files = getattr(self, name)
            if both := sorted({*files} & {*self.pairs}):
                problems.append(f"--{name} {both[0]} is also training data; use another file")
            if len(files) > 2:
                problems.append(f"--{name}: give one table, or two files whose lines correspond")
        if self.val and self.val_fraction is not None:
            problems.append("use either --val or --val-fraction, not both")
        if self.val and self.val == self.test:
            problems.append(f"--test {' '.join(self.test)} is the same as --val; use another file")
        return problems + self.reading().problems()

    def model_problems(self) -> list[str]:
        """Conflicts between the given sizes; open ones are chosen to fit."""
        family, sizes = self.family or DEFAULT_FAMILY, (self.heads, self.dim)
        transformer = family in SEQ2SEQ_FAMILIES and family not in RECURRENT
        possible = all(size is None or size >= 1 for size in sizes)
        if self.start_from is not None or not transformer or not possible:
            return []
        heads, dim = complete_shape(1, 64, *sizes)
        shape = {"layers": 1, "heads": heads, "dim": dim, "context": 1}
        return configure(family, vocab_size=1, **shape).problems()

    def tokenizer_problems(self) -> list[str]:
        separate = ["--separate-vocabularies"] * bool(self.separate_vocabularies)
        if self.source_tokenizer not in (None, self.tokenizer):
            separate.append(f"--source-tokenizer {self.source_tokenizer}")
        if separate and self.tokenizer not in (None, *TRAINABLE):
            clash = f"cannot be used with --tokenizer {self.tokenizer}, which is for both sides"
            return [f"{separate[0]} {clash}; use one of --tokenizer {', '.join(TRAINABLE)}"]
        if separate and self.separate_vocabularies is False:
            return [f"{separate[0]} and --no-separate-vocabularies contradict; use one of them"]
        return []
