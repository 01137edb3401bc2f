"""Settings that were left open, chosen: each choice with its reason."""

from dataclasses import replace

from nanolm.choice import Choice
from nanolm.errors import UsageError
from nanolm.model.config import PRESETS, RECURRENT, ModelConfig, configure
from nanolm.model.device import choose_device, choose_dtype
from nanolm.text.tokenizer import Tokenizer
from nanolm.text.vocabulary import TINY
from nanolm.training.settings import DEFAULT_FAMILY, SIZES, SWITCHES, TrainSettings


def choose_settings(
    settings: TrainSettings,
    tokenizer: Tokenizer,
    size: int,
    tokens: int,
    base: ModelConfig | None = None,
) -> tuple[TrainSettings, list[Choice]]:
    """Everything but the tokenizer, for `size` bytes of text that are `tokens` training tokens.

    `base` is the model that training starts from, if it does not start from nothing.
    """
    choices = []

    def choose(name: str, value: object, reason: str) -> None:
        nonlocal settings
        settings = replace(settings, **{name: value})  # type: ignore[arg-type]
        choices.append(Choice(name, value, reason))

    if base is None:
        settings = replace(settings, tokenizer=settings.tokenizer or tokenizer.kind)
    if settings.tokenizer == "bpe":
        settings = replace(settings, vocab_size=tokenizer.vocab_size)
    device, reason = choose_device(settings.device)
    if device != settings.device:
        choose("device", device, reason)
    if settings.dtype == "auto" and settings.device != "cpu":  # there it is measured
        choose("dtype", *choose_dtype(settings.dtype, settings.device))
    small = settings.device == "cpu"
    if base is not None:
        preset = PRESETS["micro" if small else "mini"]  # for the tokens a step alone
        if settings.context is None:
            context = min(base.context, 256 if small else 1024)
            choose("context", context, f"the model looks back on {base.context:,}")
        dim = base.dim
    else:
        family = settings.family or DEFAULT_FAMILY
        needed = ("layers", "dim") if family in RECURRENT else ("layers", "heads", "dim")
        if settings.preset is None and any(getattr(settings, name) is None for name in needed):
            if size < TINY:
                choose("preset", "nano", f"under {TINY // 1000} kB of text")
            elif small:
                choose("preset", "micro", "the most a CPU can train in minutes")
            else:
                choose("preset", "mini", "a few minutes on a GPU")
        preset = PRESETS[settings.preset or "micro"]
        for name in (*needed, "context"):
            if getattr(settings, name) is None:
                settings = replace(settings, **{name: getattr(preset, name)})
        settings = with_switches(replace(settings, family=family))
        assert settings.dim is not None
        dim = settings.dim
    if settings.context and settings.context >= tokens:
        choose("context", max(1, tokens - 1), f"there are only {tokens:,} training tokens")
    if settings.dropout is None:
        settings = replace(settings, dropout=0.0)
    if settings.batch is None:
        # As many tokens a step as the preset has, whatever the context.
        assert settings.context is not None
        batch = max(1, preset.batch * preset.context // settings.context)
        settings = replace(settings, batch=batch)
    if settings.lr is None:
        # Twice as much was worse at width 128 (docs/experiments.md); wider models want less.
        lr = 3e-3 * min(1, 128 / dim) ** 0.5
        if base is None:
            choose("lr", round(lr, 6), f"for width {dim}")
        else:
            choose("lr", round(lr / 10, 7), "a tenth of what fresh weights would take")
    if settings.epochs is not None:
        assert settings.batch is not None and settings.context is not None
        steps = max(1, round(settings.epochs * tokens / (settings.batch * settings.context)))
        reason = f"{settings.epochs:g} epochs of {tokens:,} tokens"
        settings = replace(settings, epochs=None)
        choose("steps", steps, reason)
    elif settings.steps is None and settings.minutes is None:
        if size < TINY:
            choose("steps", 1000, "enough for a tiny corpus; or say --steps, --minutes or --epochs")
        else:
            choose("minutes", 3.0, "a first try; or say --steps, --minutes or --epochs")
    return settings, choices


def with_switches(settings: TrainSettings) -> TrainSettings:
    """What is left open about the model, as its family has it."""
    config = model_config(settings, vocab_size=1)
    given = {name: getattr(config, name, None) for name in (*SIZES, *SWITCHES)}
    if given["positions"] != "rope":
        del given["rope_base"]
    return replace(settings, **given)  # type: ignore[arg-type]


def model_config(settings: TrainSettings, vocab_size: int) -> ModelConfig:
    """The model that resolved settings describe, or a UsageError that says what does not fit."""
    assert settings.family
    names = ("context", "dropout", *SIZES, *SWITCHES)
    asked = {name: getattr(settings, name) for name in names}
    config = configure(settings.family, vocab_size=vocab_size, **asked)
    if problems := config.problems():
        raise UsageError("\n".join(problems))
    return config
