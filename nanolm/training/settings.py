"""Every setting of a training run, in one frozen dataclass for each kind of run.

None (or "auto") means that the setting is chosen automatically, with a reason. The config.toml of a
run holds every resolved setting, so the file alone is enough to repeat the run.
Importing this costs nothing (no torch), so the command line can use it for its help.
"""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from nanolm.errors import UsageError, did_you_mean, refuse
from nanolm.formats import joined, readable
from nanolm.model import config
from nanolm.model.config import FAMILIES, PRESETS, RECURRENT
from nanolm.text import mix, tokenizer_problem
from nanolm.text.decoding import Reading
from nanolm.training.optimizers import OPTIMIZERS

DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEFAULT_FAMILY = "modern"
DEFAULT_SPLIT = "spread"
NO_FLOAT8 = "--dtype float8: only for Transformers with pre-norm layers; try --dtype bfloat16"

CHOICES = {  # the values of a setting, besides None
    "family": tuple(FAMILIES),
    "preset": tuple(PRESETS),
    "positions": get_args(config.Positions),
    "norm": get_args(config.Norm),
    "norm_place": ("pre", "post"),
    "feed_forward": get_args(config.FeedForwardKind),
    "device": DEVICES,
    "dtype": (*DTYPES, "float8"),
    "attention": ("cudnn", "flash", "efficient", "math"),  # kernels on a GPU
    "optimizer": tuple(OPTIMIZERS),
    "val_split": ("spread", "end"),  # hold out passages from the whole text, or its end
}
SIZES = ("layers", "heads", "kv_heads", "dim", "hidden")
SWITCHES = (
    *("positions", "rope_base", "norm", "norm_place"),
    *("qk_norm", "feed_forward", "bias", "tied"),
)
ARCHITECTURE = ("preset", "family", *SIZES, *SWITCHES)  # fixed by a model to start from
ATTENTION = {"heads", "kv_heads", "hidden", *SWITCHES} - {"tied"}  # only for Transformers

KINDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
RANGES = {  # possible values, sensible or not
    "max_bytes": (1_000, 10**15),
    **dict.fromkeys(("layers", "heads", "kv_heads"), (1, 1_000)),
    **dict.fromkeys(("dim", "evaluations"), (1, 100_000)),
    **dict.fromkeys(("hidden", "context", "early_context", "batch"), (1, 1_000_000)),
    **dict.fromkeys(("rope_base", "steps", "save_every"), (1, 10**12)),
    **dict.fromkeys(("minutes", "epochs"), (0.001, 10**6)),
    "tokens": (1, 10**15),
    "lr": (1e-9, 10),
    "weight_decay": (0, 1_000),
    "seed": (0, (1 << 63) - 1),
    **dict.fromkeys(("threads", "workers"), (1, 1_024)),
    "teachers": (0, 1_000),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    texts: ClassVar[str]  # the setting that names the training data
    files: ClassVar[tuple[str, ...]] = ("val",)  # settings that name a file, or several
    choices: ClassVar[dict[str, tuple[str, ...]]] = CHOICES

    encoding: str = "utf-8"
    text_column: str | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None
    start_from: str | None = None
    family: str | None = None
    preset: str | None = None
    context: int | None = None
    dropout: float | None = None
    steps: int | None = None
    minutes: float | None = None
    epochs: float | None = None
    batch: int | None = None
    lr: float | None = None
    average: float | None = None
    save_every: int | None = None
    seed: int = 1
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    deterministic: bool | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Settings from names and values, such as those in a config.toml."""
        hints = {n: hint for n, hint in get_type_hints(cls).items() if get_origin(hint) != ClassVar}
        problems: list[str] = []
        lists: dict[str, tuple[str, ...]] = {cls.texts: ()}
        for name in (name for name, hint in hints.items() if get_origin(hint) is tuple):
            texts = values.get(name, ())
            if not isinstance(texts, (str, list, tuple)):
                raise UsageError(f"{name} = {texts!r}: must be a list of files")
            lists[name] = (texts,) if isinstance(texts, str) else tuple(map(str, texts))
        for name, value in values.items():
            kinds = get_args(hints.get(name)) or (hints.get(name),)
            if float in kinds:
                kinds = (*kinds, int)  # 3 minutes are 3.0 minutes
            if name not in hints:
                problems.append(f"{name}: no such setting" + did_you_mean(name, list(hints)))
            elif name in lists:
                continue
            elif not (bool in kinds if isinstance(value, bool) else isinstance(value, kinds)):
                problems.append(f"{name} = {value!r}: must be {KINDS[kinds[0]]}")
        refuse(problems)
        return cls(**{**values, **lists})

    def to_dict(self) -> dict[str, Any]:
        """The settings that have a value, as in config.toml."""
        values = {n: v for n, v in asdict(self).items() if v is not None and v != ()}
        lists = {n: list(value) for n, value in values.items() if isinstance(value, tuple)}
        return {**values, **lists, self.texts: list(getattr(self, self.texts))}

    def check(self) -> None:
        """Raise one UsageError that lists every problem, with what to type instead."""
        refuse(self.problems())

    def problems(self) -> list[str]:
        """Problems that any kind of training can have."""
        problems = []
        for name, known in self.choices.items():
            value = getattr(self, name, None)
            if value is not None and value not in known:
                hint = did_you_mean(value, list(known))
                problems.append(f"{option(name)} {value}: choose from {', '.join(known)}{hint}")
        for name, (least, most) in RANGES.items():
            value = getattr(self, name, None)
            if value is not None and not least <= value <= most:
                bounds = f"must be from {readable(least)} to {readable(most)}"
                problems.append(f"{option(name)} {value}: {bounds}")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            problems.append(f"--dropout {self.dropout}: must be at least 0 and below 1")
        if self.average is not None and not 0 <= self.average < 1:
            problems.append(f"--average {self.average}: must be at least 0 (none) and below 1")
        if self.tokenizer and (problem := tokenizer_problem(self.tokenizer)):
            problems.append(problem)
        if self.vocab_size is not None and self.tokenizer not in (None, "bpe"):
            problem = f"omit it with --tokenizer {self.tokenizer}"
            problems.append(f"--vocab-size applies only to --tokenizer bpe; {problem}")
        if self.vocab_size is not None and not 258 <= self.vocab_size <= 1 << 20:
            bounds = "must be at least 258 (all bytes and two special tokens) and at most 1048576"
            problems.append(f"--vocab-size {self.vocab_size}: {bounds}")
        # Minutes can be combined with the others: whichever is used up first ends the run.
        budgets = [f"--{n}" for n in ("steps", "epochs", "tokens") if getattr(self, n, None)]
        if len(budgets) > 1:
            problems.append(f"use only one of {joined(budgets)}")
        if self.deterministic and self.minutes:
            problems.append("--deterministic needs --steps or --epochs instead of --minutes")
        return problems


@dataclass(frozen=True)
class TrainSettings(Settings):
    texts = "corpus"
    files = ("val", "adapter")
    choices: ClassVar[dict[str, tuple[str, ...]]] = {**CHOICES, "train": ("all", "lora")}

    corpus: tuple[str, ...]
    val: str | None = None
    document_separator: str | None = None
    text_field: str | None = None
    val_fraction: float | None = None
    val_split: str | None = None
    lowercase: bool | None = None
    max_bytes: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    dim: int | None = None
    hidden: int | None = None
    early_context: int | None = None
    positions: str | None = None
    rope_base: float | None = None
    norm: str | None = None
    norm_place: str | None = None
    qk_norm: bool | None = None
    feed_forward: str | None = None
    bias: bool | None = None
    tied: bool | None = None
    tokens: int | None = None
    teachers: int | None = None
    optimizer: str | None = None
    weight_decay: float | None = None
    evaluations: int | None = None
    workers: int | None = None
    attention: str | None = None
    compile: bool | None = None
    shard: bool | None = None
    train: str | None = None
    adapter: str | None = None

    def reading(self) -> Reading:
        number = (self.text_column or "").isdigit()  # of a column, in a table without a header
        field = self.text_field or (None if number else self.text_column)
        column = self.text_column or self.text_field
        return Reading(self.encoding, self.document_separator, field, column)

    def problems(self) -> list[str]:
        problems = super().problems() + mix.problems(self.corpus)
        if self.lowercase and self.tokenizer not in (None, "bpe"):
            problem = f"omit it with --tokenizer {self.tokenizer}"
            problems.append(f"--lowercase applies only to --tokenizer bpe; {problem}")
        if self.val in mix.sources(self.corpus):
            problems.append(f"--val {self.val} is also part of the corpus; give another file")
        fraction = self.val_fraction
        if self.val is None and fraction is not None and not 0 <= fraction <= 0.5:
            hint = "must be from 0 (train on everything) to 0.5; or give a file with --val"
            problems.append(f"--val-fraction {fraction}: {hint}")
        if self.dropout and (self.workers or 1) > 1:  # it draws one sequence of random numbers
            clash = f"--workers {self.workers} cannot be used with --dropout {self.dropout}"
            problems.append(f"{clash}; try --workers 1")
        compiled = {"--compile": bool(self.compile)}
        float8 = {"--dtype float8": self.dtype == "float8"}
        if self.shard:
            recurrent = {f"--family {self.family}": self.family in RECURRENT}
            problems += exclusive("--shard", compiled | float8 | recurrent)
        if self.dtype == "float8" and (self.family in RECURRENT or self.norm_place == "post"):
            problems.append(NO_FLOAT8)
        if self.compile:
            problems += exclusive("--compile", float8)
        if self.train == "lora":
            muon = {f"--optimizer {self.optimizer}": self.optimizer not in (None, "adamw")}
            shard = {"--shard": bool(self.shard)}
            problems += exclusive("--train lora", compiled | float8 | shard | muon)
        problems += needs_base(self.start_from, self.train == "lora", self.adapter)
        if self.teachers:
            others = {f"--from {self.start_from}": self.start_from is not None}
            others |= {f"--family {self.family}": self.family in RECURRENT}
            problems += exclusive(f"--teachers {self.teachers}", others)
        if self.early_context:
            early = f"--early-context {self.early_context}"
            if self.context is None or self.context % self.early_context:
                problems.append(f"{early}: set --context to a multiple of {self.early_context}")
            others = {f"--teachers {self.teachers}": bool(self.teachers)}
            others |= {f"--family {self.family}": self.family in RECURRENT}
            problems += exclusive(early, others)
        if self.deterministic:
            attention = {f"--attention {self.attention}": self.attention in ("cudnn", "efficient")}
            problems += exclusive("--deterministic", compiled | float8 | attention)
            if not (self.steps or self.epochs or self.tokens or self.minutes):
                problems.append("--deterministic needs --steps, --epochs or --tokens")
        problems += self.reading().problems() + self._clashes()
        about_model = tuple(f"{option(name)} " for name in (*ARCHITECTURE, "context"))
        if not any(problem.startswith(about_model) for problem in problems):
            problems += self.model_problems()
        return problems

    def model_problems(self) -> list[str]:
        """Conflicts between the given sizes; open ones are chosen to fit."""
        family = self.family or DEFAULT_FAMILY
        if self.start_from is not None or family in RECURRENT:
            return []
        sizes = [getattr(self, name) for name in (*SIZES, "context")]
        known = family in FAMILIES and self.preset in (None, *PRESETS)
        if not known or any(size is not None and size < 1 for size in sizes):
            return []
        preset = PRESETS[self.preset or "micro"]
        shape = {name: getattr(self, name) for name in (*SIZES, *SWITCHES)}
        shape["layers"] = self.layers or preset.layers
        heads, dim = self.heads or preset.heads, self.dim or preset.dim
        if self.preset is None:
            given = (self.heads, self.dim, self.kv_heads)
            heads, dim = config.complete_shape(preset.heads, preset.dim, *given)
        shape |= {"heads": heads, "dim": dim, "context": self.context or preset.context}
        problems = config.configure(family, vocab_size=1, **shape).problems()
        implied = [f"--{n} {shape[n]}" for n in ("heads", "dim") if getattr(self, n) is None]
        if problems and implied and self.preset is not None:
            problems[-1] += f" (--preset {self.preset} has {' and '.join(implied)})"
        return problems

    def _clashes(self) -> list[str]:
        """Model settings that cannot be combined."""
        names = (*ARCHITECTURE, "tokenizer", "vocab_size", "lowercase")
        given = [name for name in names if getattr(self, name) is not None]
        if self.start_from is not None:
            clash = f"cannot be changed with --from {self.start_from}; omit it"
            return [f"{option(name)} {clash}" for name in given]
        if self.family in RECURRENT:
            clash = f"applies to Transformers only, not to --family {self.family}"
            return [f"{option(name)} {clash}" for name in given if name in ATTENTION]
        switches = FAMILIES.get(self.family or DEFAULT_FAMILY, {})
        positions = self.positions or switches.get("positions")
        if self.rope_base is not None and positions != "rope":
            return [f"--rope-base applies to --positions rope only, not to {positions}"]
        return []


def needs_base(start_from: str | None, lora: bool, adapter: str | None) -> list[str]:
    given = ["--train lora"] * lora + [f"--adapter {adapter}"] * (adapter is not None)
    return [] if start_from else [f"{each} needs --from, the model to adapt" for each in given]


def exclusive(option: str, others: dict[str, bool]) -> list[str]:
    """A problem for each of the others that is given too."""
    both = [other for other, given in others.items() if given]
    return [f"{option} and {other} cannot be combined; use one of them" for other in both]


def option(name: str) -> str:
    return "--from" if name == "start_from" else "--" + name.replace("_", "-")
