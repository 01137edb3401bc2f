"""Choose the settings of a fine-tuning run that were not given, each with its reason."""

import math
from dataclasses import replace

from nanolm.choice import Choice, Chosen
from nanolm.classification.distill import FEWEST_TEXTS, MOST_TEXTS, Teacher
from nanolm.classification.settings import FinetuneSettings
from nanolm.formats import counted
from nanolm.machine import available_threads
from nanolm.model.config import PRESETS, ModelConfig, configure
from nanolm.model.device import choose_device, choose_dtype
from nanolm.planning import recipe
from nanolm.planning.tuning import NARROW_DIM
from nanolm.training.optimizers import OPTIMIZERS
from nanolm.training.settings import DEFAULT_FAMILY

DISTILLED_PARAMETERS = 15_000_000  # larger models know more than labeled texts can teach them
LARGE_PARAMETERS = 50_000_000  # larger models take minutes on a CPU for a thousand texts
LORA_PARAMETERS = 1_000_000_000  # with optimizer state, more than most GPUs can hold
# Fitting n-grams takes about 10 s for a million tokens and two labels.
NGRAM_TOKENS, NGRAM_TOKENS_PER_SECOND = 3_000_000, 100_000
NGRAM_SHARE = 0.1  # of the time, at most
DISTILLED_TOKENS = 300_000  # in all; fitting n-grams to more takes over a minute
FEW_TEXTS = 10_000  # with fewer, the language-model loss prevents forgetting
MANY_TEXTS = 50_000  # a batch size of 64 was measured there (docs/experiments.md)
WIDE_DIM = 768  # narrower models learned less in pretraining, and catch up on many texts
LEAST_EVALUATIONS, MOST_EVALUATIONS = 5, 50  # per run
DISTILLED_BATCH, DISTILLED_STEPS = 16, 600  # enough to learn most of what a teacher knows
DEFAULT_PATIENCE = 5  # evaluations clearly worse than the best


def choose_fraction(settings: FinetuneSettings) -> FinetuneSettings:
    """Choose the validation fraction, which is needed before anything else."""
    given = settings.val is not None or settings.val_fraction is not None
    return settings if given else replace(settings, val_fraction=0.2)


def wants_teacher(settings: FinetuneSettings, parameters: int, lengths: list[int]) -> bool:
    """Whether to fit a linear model: on request, or for a small model and few texts."""
    if settings.distill is not None:
        return settings.distill > 0
    few = FEWEST_TEXTS <= len(lengths) <= MOST_TEXTS and sum(lengths) < DISTILLED_TOKENS
    return few and is_small(settings, parameters)


def wants_ngrams(settings: FinetuneSettings, lengths: list[int], labels: int) -> bool:
    """Whether to fit an n-gram model that the finished classifier may be mixed with: on request, or
    for many texts if there is time for it."""
    if settings.ngrams is not None:
        return settings.ngrams
    seconds = NGRAM_SHARE * 60 * (settings.minutes or math.inf)
    most = min(NGRAM_TOKENS, NGRAM_TOKENS_PER_SECOND * seconds)
    few_tokens = sum(lengths) * max(1, labels - 1) <= most
    return len(lengths) >= FEW_TEXTS and few_tokens and not settings.class_weights


def is_small(settings: FinetuneSettings, parameters: int) -> bool:
    """Whether all of a model is trained, and labeled texts teach it more than it knows."""
    return parameters < DISTILLED_PARAMETERS and settings.train in (None, "all")


def choose_settings(
    settings: FinetuneSettings,
    base: ModelConfig | None,
    parameters: int,
    lengths: list[int],
    teacher: Teacher | None = None,
    limit_epochs: bool = True,
) -> tuple[FinetuneSettings, list[Choice]]:
    """Choose settings for a model with this many `parameters` and training texts of these `lengths`
    in tokens. `base` is the config of the pretrained model, or None if training from scratch. With
    `limit_epochs`, a run with a time limit on many texts stops after the default number of epochs
    at the latest."""
    chosen = Chosen(settings)
    choose, fill, count = chosen.choose, chosen.fill, len(lengths)
    choose("device", *choose_device(settings.device))
    device, longest = chosen.settings.device, max(lengths)
    if device != "cpu":  # on a CPU it is measured later
        choose("dtype", *choose_dtype(settings.dtype, device))
    if base is None:
        choose("preset", "micro", "large enough to train on labeled text from scratch")
        fill(family=DEFAULT_FAMILY)
        # Computed positions extend beyond the training length; learned ones do not.
        most = longest if chosen.settings.family == "gpt2" else max(128, longest)
        length = min(most, 512)
        bound = "the maximum; " if length < longest else "the minimum; " if length > longest else ""
        choose("context", length, f"{bound}the longest text has {longest:,} tokens")
    else:
        choose("context", min(base.context, 512), f"the model's context is {base.context:,}")
    context = chosen.settings.context
    assert context
    if beyond := sum(length > context for length in lengths):
        reason = f"{beyond:,} of {count:,} texts have more than {context:,} tokens"
        choose("long", "windows", reason)
    fill(long="windows")
    split = chosen.settings.long == "windows"
    windows = sum(-(-length // context) for length in lengths) if split else count
    small = parameters < LARGE_PARAMETERS
    if base is None:
        fill(train="all")
    elif parameters > LORA_PARAMETERS:
        choose("train", "lora", f"training all {parameters:,} parameters takes too much memory")
    elif device == "cpu" and not small:
        choose("train", "last-2", f"training all {parameters:,} parameters is slow on a CPU")
    else:
        choose("train", "all", f"this machine can train all {parameters:,} parameters")
    dim = base.dim if base else PRESETS[chosen.settings.preset or "micro"].dim
    threads = 1 if dim < NARROW_DIM else available_threads()
    few = "small models gain little from more"
    choose("threads", threads, few if threads == 1 else "all threads that this process may use")
    if teacher:
        right, majority = f"{teacher.accuracy:.1%}", f"{teacher.majority:.1%}"
        reason = f"n-grams alone reach {right} in cross-validation, the majority class {majority}"
        choose("distill", teacher.weight(), reason)
    distill, trains_all = chosen.settings.distill, chosen.settings.train == "all"
    if distill:
        choose("batch", DISTILLED_BATCH, "labeled texts, plus the same number of synthetic ones")
    fill(batch=64 if count >= MANY_TEXTS else 32 if count >= 1000 else 16)
    batch = chosen.settings.batch or 1
    if base is None:
        config = fresh_config(replace(chosen.settings, dropout=0.0), vocab_size=1)
        config = replace(config, context=max(1, sum(lengths) // count))  # the mean length
        choose("optimizer", *recipe.optimizer(config, batch))
    elif distill:
        choose("optimizer", "muon", "distills the n-gram model in fewer steps")
    fill(optimizer="adamw")
    choose("lr", *learning_rate(chosen.settings, base, dim, count))
    if small and trains_all and count < FEW_TEXTS and not distill:
        choose("language_loss", 0.5, f"with only {count:,} texts, an auxiliary LM loss helps")
    if base is not None and trains_all and not distill and not settings.vocab_size:
        choose("layer_decay", 0.8, "layers near the input need less fine-tuning")
    fill(dropout=0.1 if trains_all and base is not None and small else 0.0, layer_decay=1.0)
    fill(weight_decay=0.1 if base is None else 0.01, average=0.0, language_loss=0.0, distill=0.0)
    epochs, minutes = settings.epochs, settings.minutes
    if settings.steps is None and epochs is None:  # no early stopping if the length was given
        fill(patience=DEFAULT_PATIENCE)
    limited = limit_epochs and base is not None and count >= FEW_TEXTS
    if settings.steps is None and (epochs or minutes is None or limited):
        change = ""
        if epochs is None:
            epochs = default_epochs(count, base is None, small)
            if distill:
                epochs = round(max(epochs, DISTILLED_STEPS * batch / count), 1)
            change = "; change with --epochs, --steps or --minutes"
            if minutes is not None:
                change = f", or as many as fit into {counted(minutes, 'minute')}"
        what = "texts" if windows == count else "windows of text"
        reason = f"{counted(epochs, 'epoch')} of {windows:,} {what}{change}"
        choose("steps", max(1, round(epochs * windows / batch)), reason)
        chosen.settings = replace(chosen.settings, epochs=None)
        fill(evaluations=evaluations_for(epochs))
    fill(evaluations=10)
    return chosen.settings, chosen.choices


def learning_rate(
    settings: FinetuneSettings, base: ModelConfig | None, dim: int, count: int
) -> tuple[float, str]:
    rates = OPTIMIZERS[settings.optimizer or "adamw"]
    if base is None:
        return rates.fresh_lr, f"for training from scratch with {settings.optimizer}"
    if settings.distill:
        return rates.distill_lr, f"for distillation with {settings.optimizer}"
    if settings.train == "head":
        return 1e-4, "for a head that starts from a linear probe"
    if settings.train == "lora":
        return recipe.LORA_CLASSIFIER_RATE, "for LoRA adapters"
    rate, reason = 0.05 / dim, f"for a pretrained model with embedding width {dim}"
    if count >= FEW_TEXTS and dim < WIDE_DIM:
        rate, reason = rate * (WIDE_DIM / dim) ** 0.5, f"{reason} and {count:,} texts"
    return round(min(rate, 2e-3), 7), reason


def default_epochs(count: int, scratch: bool, small: bool) -> float:
    """More epochs for fewer texts, and for training from scratch. With many texts, a third epoch
    does not help (docs/experiments.md)."""
    if scratch:
        return float(round(max(3, min(20, 38_000 / count))))
    if count >= MANY_TEXTS:
        return 2.0
    return float(round(max(3, min(8, 20_000 / count)))) if small else 3.0


def evaluations_for(epochs: float) -> int:
    """Once per epoch; more often for few epochs, less often for very many."""
    whole = max(1, round(epochs))
    if whole > MOST_EVALUATIONS:
        return whole // -(-whole // MOST_EVALUATIONS)
    return whole * -(-LEAST_EVALUATIONS // whole)


def fresh_config(settings: FinetuneSettings, vocab_size: int) -> ModelConfig:
    preset = PRESETS[settings.preset or "micro"]
    assert settings.family and settings.context
    shape = {name: getattr(preset, name) for name in ("layers", "heads", "dim")}
    shape |= {"vocab_size": vocab_size, "context": settings.context}
    return configure(settings.family, **shape, dropout=settings.dropout)
