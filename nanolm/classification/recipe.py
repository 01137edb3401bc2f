"""Settings of a fine-tuning run that were left open, chosen: each choice with its reason."""

from dataclasses import replace
from typing import Any

from nanolm.choice import Choice
from nanolm.classification.distill import FEWEST, MOST, Teacher
from nanolm.classification.settings import FinetuneSettings
from nanolm.formats import counted
from nanolm.machine import available_threads
from nanolm.model.config import PRESETS, ModelConfig, configure
from nanolm.model.device import choose_device, choose_dtype
from nanolm.planning import recipe
from nanolm.training.optimizers import OPTIMIZERS
from nanolm.training.settings import DEFAULT_FAMILY

LARGE = 50_000_000  # parameters; more of them take minutes on a CPU for a thousand texts
HUGE = 1_000_000_000  # parameters; with their moments, more than most GPUs hold
MANY = 50_000  # texts; batches of 64 were measured there (docs/experiments.md)
SMALL = 15_000_000  # parameters; larger models know more of words than labelled texts can teach
SHORT = 300_000  # tokens in all; fitting the n-grams of more takes over a minute
FEW = 10_000  # texts; with fewer, foretelling their tokens too keeps a model from forgetting
LEAST_EVALUATIONS, MOST_EVALUATIONS = 5, 50  # per run
DISTILLED_BATCH, DISTILLED_STEPS = 16, 600  # what it takes to learn most of what a teacher knows
PATIENCE = 5  # evaluations clearly worse than the best
WIDE = 768  # a model; narrower ones knew less, and from many texts they learn it anew


def choose_fraction(settings: FinetuneSettings) -> FinetuneSettings:
    """How much is held out, which has to be known before anything else."""
    if settings.val is not None or settings.val_fraction is not None:
        return settings
    return replace(settings, val_fraction=0.2)


def wants_teacher(settings: FinetuneSettings, parameters: int, lengths: list[int]) -> bool:
    """Whether a linear model is worth fitting: asked for, or left open for a small model and few
    texts."""
    if settings.distill is not None:
        return settings.distill > 0
    few = FEWEST <= len(lengths) <= MOST and sum(lengths) < SHORT
    return few and parameters < SMALL and settings.train in (None, "all")


def choose_settings(
    settings: FinetuneSettings,
    base: ModelConfig | None,
    parameters: int,
    lengths: list[int],
    teacher: Teacher | None = None,
) -> tuple[FinetuneSettings, list[Choice]]:
    """For a model of so many `parameters` and training texts of these `lengths` in tokens.

    `base` is the config of the trained model; None: from scratch. `teacher` was fitted on the
    training texts.
    """
    choices: list[Choice] = []

    def choose(name: str, value: object, reason: str) -> None:
        nonlocal settings
        if getattr(settings, name) in (None, "auto"):
            settings = replace(settings, **{name: value})  # type: ignore[arg-type]
            choices.append(Choice(name, value, reason))

    choose("device", *choose_device(settings.device))
    on_cpu, count = settings.device == "cpu", len(lengths)
    if not on_cpu:  # there it takes a measurement
        choose("dtype", *choose_dtype(settings.dtype, settings.device))
    longest = max(lengths)
    if base is None:
        if settings.preset is None:
            choose("preset", "micro", "a fresh model for labelled text needs no more")
        settings = replace(settings, family=settings.family or DEFAULT_FAMILY)
        # Positions that are computed go on beyond what was seen; learned ones do not.
        most = longest if settings.family == "gpt2" else max(128, longest)
        choose("context", min(most, 512), f"the longest text has {longest:,} tokens")
    else:
        choose("context", min(base.context, 512), f"the model looks back on {base.context:,}")
    assert settings.context
    room = settings.context
    beyond = sum(length > room for length in lengths)
    if beyond:
        reason = f"{beyond:,} of {count:,} texts have more than {room:,} tokens"
        choose("long", "windows", reason)
    settings = replace(settings, long=settings.long or "windows")
    windows = count
    if settings.long == "windows":
        windows = sum(-(-length // room) for length in lengths)
    small = parameters < LARGE
    if settings.train is None:
        if base is None:
            settings = replace(settings, train="all")
        elif parameters > HUGE:
            choose("train", "lora", f"{parameters:,} parameters: all of them take too much memory")
        elif on_cpu and not small:
            choose("train", "last-2", f"{parameters:,} parameters on a CPU: all of them take long")
        else:
            choose("train", "all", f"{parameters:,} parameters can all be trained here")
    width = base.dim if base else PRESETS[settings.preset or "micro"].dim
    if settings.threads is None:
        threads = 1 if width < 96 else available_threads()
        few = "small models gain little from more"
        choose("threads", threads, few if threads == 1 else "as many as this process may use")
    if teacher:
        measured = f"n-grams alone predict {teacher.accuracy:.1%} of held-out training texts"
        reason = f"{measured}, the majority class {teacher.majority:.1%}"
        choose("distill", teacher.weight(), reason)
    if settings.batch is None and settings.distill:
        choose("batch", DISTILLED_BATCH, "labelled texts, and as many synthetic ones")
    if settings.batch is None:
        settings = replace(settings, batch=64 if count >= MANY else 32 if count >= 1000 else 16)
    if base is None:
        config = fresh_config(replace(settings, dropout=0.0), vocab_size=1)
        config = replace(config, context=max(1, sum(lengths) // count))  # what a text fills
        choose("optimizer", *recipe.optimizer(config, settings.batch or 1))
    elif settings.distill:
        choose("optimizer", "muon", "learns what the n-gram model knows in fewer steps")
    settings = replace(settings, optimizer=settings.optimizer or "adamw")
    choose("lr", *learning_rate(settings, base, width, count))
    if small and settings.train == "all" and count < FEW and not settings.distill:
        choose("language_loss", 0.5, f"only {count:,} texts: foretelling their tokens helps")
    if base is not None and settings.train == "all" and not settings.distill:
        choose("layer_decay", 0.8, "layers near the input know what they need already")
    usual = {
        "dropout": 0.1 if settings.train == "all" and base is not None and small else 0.0,
        "weight_decay": 0.1 if base is None else 0.01,
        "layer_decay": 1.0,
        "average": 0.0,
        "language_loss": 0.0,
        "distill": 0.0,
    }
    left = {name: value for name, value in usual.items() if getattr(settings, name) is None}
    settings = replace(settings, **left)  # type: ignore[arg-type]
    if settings.steps is None and settings.epochs is None:  # what was asked for is done
        settings = replace(settings, patience=settings.patience or PATIENCE)
    if settings.steps is None and (settings.epochs or settings.minutes is None):
        epochs = settings.epochs
        reason = counted(epochs, "epoch") if epochs else ""
        if epochs is None:
            epochs = default_epochs(count, base is None, small)
            if settings.distill:
                epochs = round(max(epochs, DISTILLED_STEPS * (settings.batch or 1) / count), 1)
            reason = f"{counted(epochs, 'epoch')}; or say --epochs, --steps or --minutes"
        steps = max(1, round(epochs * windows / (settings.batch or 1)))
        settings = replace(settings, epochs=None)
        what = "texts" if windows == count else "windows of text"
        choose("steps", steps, f"{reason}, of {windows:,} {what}")
        if settings.evaluations is None:
            settings = replace(settings, evaluations=evaluations_for(epochs))
    if settings.evaluations is None:
        settings = replace(settings, evaluations=10)
    return settings, choices


def learning_rate(
    settings: FinetuneSettings, base: ModelConfig | None, width: int, count: int
) -> tuple[float, str]:
    rates = OPTIMIZERS[settings.optimizer or "adamw"]
    if base is None:
        return rates.fresh_lr, f"for fresh weights and {settings.optimizer}"
    if settings.distill:
        return rates.distill_lr, f"for distillation with {settings.optimizer}"
    if settings.train == "head":
        return 1e-4, "for a head that starts from a linear probe"
    if settings.train == "lora":
        return 3e-4, "for thin matrices beside the trained ones"
    rate, reason = 0.05 / width, f"for a trained model of width {width}"
    if count >= FEW and width < WIDE:
        rate, reason = rate * (WIDE / width) ** 0.5, f"{reason} and {count:,} texts"
    return round(min(rate, 2e-3), 7), reason


def default_epochs(count: int, scratch: bool, small: bool) -> float:
    """Fewer texts are seen more often; fresh weights need more."""
    if scratch:
        return float(round(max(3, min(20, 38_000 / count))))
    return float(round(max(3, min(8, 20_000 / count)))) if small else 3.0


def evaluations_for(epochs: float) -> int:
    """Once per epoch; more often within a few epochs, and less often over very many."""
    whole = max(1, round(epochs))
    if whole > MOST_EVALUATIONS:
        return whole // -(-whole // MOST_EVALUATIONS)
    return whole * -(-LEAST_EVALUATIONS // whole)


def fresh_config(settings: FinetuneSettings, vocab_size: int) -> ModelConfig:
    """The model that is trained from scratch."""
    preset = PRESETS[settings.preset or "micro"]
    shape: dict[str, Any] = {name: getattr(preset, name) for name in ("layers", "heads", "dim")}
    assert settings.family and settings.context
    return configure(
        settings.family,
        vocab_size=vocab_size,
        context=settings.context,
        dropout=settings.dropout,
        **shape,
    )
