"""Prepares text, plan and model for `nanolm train`, either new or from a run's last checkpoint.

>>> text = prepare_text(settings, base=None, notify=print)
>>> plan_for(settings, None, text, elapsed, print).choices
"""

import math
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch

from nanolm.choice import Choice
from nanolm.errors import DataError, UsageError
from nanolm.formats import counted
from nanolm.model.base import Model
from nanolm.model.build import build_model
from nanolm.model.config import GPTConfig, ModelConfig
from nanolm.model.device import choose_device
from nanolm.model.huggingface import BaseModel, load_model, suppressed_tokens, weights_fingerprint
from nanolm.model.stored import load_config
from nanolm.planning import recipe
from nanolm.planning.planner import DEFAULT_MINUTES, PLANNING_SHARE, Plan, make_plan, setup_share
from nanolm.planning.scaling_law import Forecast, ngram_bits_per_byte
from nanolm.planning.sizes import TextStats, model_config
from nanolm.planning.tuning import fit_to_machine
from nanolm.pretraining.begin import RunStart, check_context, reports
from nanolm.runs.folder import Run, find_adapter, find_or_download, find_tokenizer, model_tokenizer
from nanolm.text import TRAINABLE, mix
from nanolm.text.store import Prepared, TextRequest, open_tokens, prepare_tokens
from nanolm.text.tokenizer import ByteLevel, Tokenizer
from nanolm.text.vocabulary import doublings
from nanolm.training.events import Notify
from nanolm.training.settings import DEFAULT_SPLIT, TrainSettings

READ_BYTES_PER_SECOND = 50_000  # of text, approximately, on a CPU
PLANNING_SECONDS = 0.5  # for planning, besides PLANNING_SHARE
LEAST_TEXT_SHARE = 0.06  # of the time, at least, for preparing the text
NGRAM_SECONDS = 1.5  # to count n-grams, approximately


@dataclass(frozen=True)
class Job:
    settings: TrainSettings  # resolved: nothing left to choose
    run: Run
    text: Prepared
    model: Model
    checkpoint: Path | None  # to resume from
    fixed_steps: bool  # a number of steps was requested
    base: Path | None = None  # the model that training starts from
    frozen: BaseModel | None = None  # the same with a checksum, for LoRA
    forecast: Forecast | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything that another process needs to join in, if it sees the same files."""
        paths = {"run": self.run.path, "text": self.text.folder}
        saved = {"checkpoint": self.checkpoint, "base": self.base}
        absolute = {name: path and str(path.absolute()) for name, path in (saved | paths).items()}
        return {"settings": self.settings.to_dict(), "fixed_steps": self.fixed_steps, **absolute}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        settings = TrainSettings.from_dict(values["settings"])
        folder, base = (values[name] and Path(values[name]) for name in ("checkpoint", "base"))
        text = open_tokens(Path(values["text"]), corpus=settings.corpus)
        model = build(settings, base, folder, text)
        return cls(settings, Run(Path(values["run"])), text, model, folder, values["fixed_steps"])


def find_base(settings: TrainSettings, notify: Notify) -> Path | None:
    """The folder of the model to start from, or None to train from scratch."""
    if settings.start_from is None:
        return None
    base = find_or_download(settings.start_from, *reports(notify))
    config = load_config(base)
    check_context(settings, config.context)
    if settings.train == "lora" and not isinstance(config, GPTConfig):
        raise UsageError(f"--train lora: only for Transformers, and {base} is recurrent")
    return base


def frozen_base(settings: TrainSettings, base: Path | None) -> BaseModel | None:
    """The frozen weights that LoRA checkpoints refer to."""
    if base is None or settings.train != "lora":
        return None
    adapter = find_adapter(settings.adapter)
    return BaseModel(base.resolve(), weights_fingerprint(base, adapter), adapter)


def time_budget(settings: TrainSettings) -> float | None:
    """Seconds for the whole run, including the default budget; None if there is no time limit."""
    if settings.minutes is None and not (settings.steps or settings.epochs or settings.tokens):
        return 60 * DEFAULT_MINUTES
    return settings.minutes and 60 * settings.minutes


def text_deadline(settings: TrainSettings, elapsed: Callable[[], float]) -> float | None:
    """When the text must be ready, by `time.monotonic`; None if there is no time limit."""
    if (budget := time_budget(settings)) is None:
        return None
    left = budget * (setup_share(settings) - PLANNING_SHARE) - PLANNING_SECONDS - elapsed()
    return time.monotonic() + max(left, budget * LEAST_TEXT_SHARE)


def prepare_text(
    settings: TrainSettings, base: Path | None, notify: Notify, until: float | None = None
) -> Prepared:
    """Tokenize and split the text; with `until`, only as much as can be prepared by then."""
    note, progress = reports(notify)
    tokenizer: str | Tokenizer | None = settings.tokenizer
    if base is not None:
        tokenizer = model_tokenizer(base)
        tokenizer.unseen = suppressed_tokens(base, tokenizer.vocab_size)
    elif settings.tokenizer not in (None, *TRAINABLE):
        tokenizer = find_tokenizer(settings.tokenizer, note)
    budget = time_budget(settings)
    on_cpu = budget and choose_device(settings.device)[0] == "cpu"
    request = TextRequest(
        corpus=settings.corpus,
        val=settings.val,
        val_fraction=settings.val_fraction,
        val_split=settings.val_split or DEFAULT_SPLIT,
        reading=settings.reading(),
        tokenizer=tokenizer,
        vocab_size=settings.vocab_size,
        most_doublings=doublings(budget * READ_BYTES_PER_SECOND) if budget and on_cpu else None,
        # A power of two, so that a text is not prepared again for any other number of minutes.
        seconds=budget and (2 ** round(math.log2(budget)) if on_cpu else math.inf),
        max_bytes=settings.max_bytes,
        lowercase=settings.lowercase,
    )
    return prepare_tokens(request, progress, note, until=until)


def plan_for(
    settings: TrainSettings,
    base: Path | None,
    text: Prepared,
    elapsed: Callable[[], float],
    notify: Notify,
    processes: int = 1,
) -> Plan:
    """The plan for a text, with `elapsed` seconds of the time budget already used."""
    tokenizer, budget = text.tokenizer, time_budget(settings)

    @cache
    def ngram_bits() -> float | None:
        least = NGRAM_SECONDS * max(1, len(text.parts))
        if budget and setup_share(settings) * budget - elapsed() < least:
            return None
        parts = text.validated_parts or [mix.Part("", 1.0, 0, slice(None), slice(None))]
        bits = [ngram_bits_per_byte(text.train[p.train], text.val[p.val], tokenizer) for p in parts]
        return mix.mean(parts, bits)

    shortest = min((part.tokens for part in text.parts), default=None)
    stats = TextStats(
        tokenizer.vocab_size, text.size, text.tokens, ngram_bits, shortest, len(text.train)
    )
    given = load_config(base) if base else None
    plan = make_plan(settings, stats, given, elapsed, reports(notify)[1], processes)
    plan.fill(val_split=DEFAULT_SPLIT, tokenizer=None if given else tokenizer.kind)
    if plan.settings.tokenizer == "bpe" and isinstance(tokenizer, ByteLevel):
        vocab_size, lowercase = tokenizer.vocab_size, tokenizer.lowercase
        plan.settings = replace(plan.settings, vocab_size=vocab_size, lowercase=lowercase)
    plan.settings = replace(plan.settings, max_bytes=text.max_bytes)
    plan.choices[:0] = [*text.choices, *part_choices(text.parts, plan)]
    return plan


def part_choices(parts: Sequence[mix.Part], plan: Plan) -> Iterator[Choice]:
    """The parts of a mix and, if only some are repeated too often, better weights."""
    settings, steps = plan.settings, plan.forecast and plan.forecast.steps
    tokens = (steps or settings.steps or 0) * (settings.batch or 1) * (settings.context or 1)
    for part in parts:
        epochs = f", {counted(part.epochs(tokens), 'epoch')}" if tokens else ""
        yield Choice("part", part.name, f"weight {part.weight:.3g}, {part.size:,} bytes{epochs}")
    limits = [recipe.MOST_PASSES * part.tokens for part in parts]
    often = [part.name for part in parts if round(part.epochs(tokens)) > recipe.MOST_PASSES]
    if often and sum(limits) > tokens:
        shares = mix.share_out(tokens, limits, [part.weight for part in parts])
        named = zip(mix.sources(settings.corpus), shares, strict=True)
        better = " ".join(f"{shlex.quote(name)}:{share / tokens:.3g}" for name, share in named)
        reason = f"more than {recipe.MOST_PASSES} epochs of it do not help; try {better}"
        yield Choice("repeated", ", ".join(often), reason)


def make_job(
    start: RunStart[TrainSettings],
    base: Path | None,
    text: Prepared,
    elapsed: Callable[[], float],
    processes: int = 1,
) -> Job:
    """Plan the open settings and build the model, or resume both."""
    fingerprints, frozen = text.fingerprints, frozen_base(start.settings, base)
    if frozen:
        fingerprints = fingerprints | {"model to start from": frozen.fingerprint}
    run, folder = start.run, start.checkpoint(fingerprints)
    plan = plan_for(start.settings, base, text, elapsed, start.notify, processes)
    own = recipe.student(plan.settings)
    model = build(own, base, folder, text)
    if folder and model.config != wanted_config(own, base, text):
        raise DataError(f"{run.config_file} was changed and no longer matches {folder}")
    share = setup_share(plan.settings)
    spare = max(0.0, 60 * (plan.settings.minutes or math.inf) * share - elapsed())
    settings, measured = fit_to_machine(plan.settings, model, spare)
    forecast = plan.forecast
    more = {"forecast": asdict(forecast)} if forecast else {}
    start.record(settings, plan.choices + measured, fingerprints, model, **more)
    facts = run.facts()
    if not start.fresh and isinstance(facts.get("forecast"), dict):
        with suppress(TypeError):  # from another version
            forecast = Forecast(**facts["forecast"])
    fixed_steps = any(facts["request"].get(name) for name in ("steps", "epochs", "tokens"))
    return Job(settings, run, text, model, folder, fixed_steps, base, frozen, forecast)


def wanted_config(settings: TrainSettings, base: Path | None, text: Prepared) -> ModelConfig:
    if base is None:
        return model_config(settings, text.tokenizer.vocab_size)
    assert settings.dropout is not None
    return replace(load_config(base), dropout=settings.dropout)


def build(settings: TrainSettings, base: Path | None, folder: Path | None, text: Prepared) -> Model:
    """The model from the checkpoint `folder`, or from `base`, or a new one. For LoRA, the frozen
    weights, to which the task adds what is trained."""
    if folder and settings.train != "lora":
        return load_model(folder)
    if base:
        return load_model(base, settings.dropout or 0.0, find_adapter(settings.adapter))
    torch.manual_seed(settings.seed)
    return build_model(wanted_config(settings, None, text))
