"""All settings of a fine-tuning run. As in nanolm.training.settings, None means chosen for you.

This module is cheap to import (no torch), so the command line can use it for its help.
"""

import re
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, get_args

from nanolm.model.config import Long, Pool
from nanolm.training.settings import Settings, needs_base, option

if TYPE_CHECKING:
    from nanolm.text.labeled import LabelReading

DATA = "embedded:reviews"
SCRATCH = "none"  # as `start_from`: train from scratch
TRAINED = re.compile(r"head|all|lora|last-[1-9][0-9]{0,2}")
LIMITS = {
    "val_fraction": (0.001, 0.8),
    "test_fraction": (0, 0.8),
    "language_loss": (0, 10),
    "distill": (0, 1),
    "weight_decay": (0, 10),
    "layer_decay": (0, 1),
    **dict.fromkeys(("limit", "patience", "evaluations"), (1, inf)),
}
FROM_SCRATCH = ("family", "preset", "tokenizer", "vocab_size")  # fixed in a pretrained model


@dataclass(frozen=True)
class FinetuneSettings(Settings):
    """The settings that determine the result of `nanolm finetune`."""

    texts = "data"
    files = ("val", "test", "label_file", "adapter")

    data: tuple[str, ...] = (DATA,)
    label_column: str | None = None
    label_file: str | None = None
    limit: int | None = None
    val: str | None = None
    test: str | None = None
    val_fraction: float | None = None
    test_fraction: float = 0.0
    sentiment: bool = False
    pool: str = "last"
    train: str | None = None
    long: str | None = None
    class_weights: bool = False
    layer_decay: float | None = None
    language_loss: float | None = None
    distill: float | None = None
    ngrams: bool | None = None
    optimizer: str | None = None
    weight_decay: float | None = None
    evaluations: int | None = None
    patience: int | None = None
    adapter: str | None = None

    def reading(self) -> "LabelReading":
        from nanolm.text.labeled import LabelReading  # not needed to show help

        return LabelReading(self.encoding, self.text_column, self.label_column, self.label_file)

    def problems(self) -> list[str]:
        problems, trains_all = super().problems(), self.train in (None, "all")
        for name, known in (("pool", get_args(Pool)), ("long", get_args(Long))):
            value = getattr(self, name)
            if value is not None and value not in known:
                problems.append(f"{option(name)} {value}: choose from {', '.join(known)}")
        if self.dtype == "float8":
            problems.append("--dtype float8 is for `nanolm train`; try --dtype bfloat16")
        if self.train is not None and not TRAINED.fullmatch(self.train):
            choices = "head, all, lora, or last-N for the last N layers, such as last-2"
            problems.append(f"--train {self.train}: choose {choices}")
        elif self.start_from == SCRATCH and not trains_all:
            problems.append(f"--train {self.train} needs --from; from scratch, use --train all")
        scratch = self.start_from in (None, SCRATCH)
        problems += needs_base(None if scratch else self.start_from, False, self.adapter)
        if self.language_loss and self.train == "head":
            problems.append("--language-loss has no effect with --train head; omit one of them")
        if self.start_from not in (None, SCRATCH):
            problems += [
                f"{option(name)} cannot be changed with --from {self.start_from}; omit it"
                for name in FROM_SCRATCH
                if name != "vocab_size" and getattr(self, name) is not None
            ]
            if self.vocab_size is not None and not trains_all:
                problems.append(f"--vocab-size with --from needs --train all, not {self.train}")
        if self.distill and not trains_all:
            problems.append(f"--distill needs --train all, not --train {self.train}")
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                allowed = f"from {least:g} to {most:g}" if most < inf else f"at least {least:g}"
                problems.append(f"{option(name)} {value}: must be {allowed}")
        for name in ("val", "test"):
            if (file := getattr(self, name)) in self.data:
                problems.append(f"--{name} {file} is also training data; use another file")
        if self.test is not None and self.test_fraction:
            problems.append("use either --test or --test-fraction, not both")
        if self.val is not None and self.val_fraction is not None:
            problems.append("use either --val or --val-fraction, not both")
        if self.test is not None and self.test == self.val:
            problems.append(f"--test {self.test} is the same as --val; use another file")
        return problems + self.reading().problems()
