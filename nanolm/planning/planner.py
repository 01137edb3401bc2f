"""Fills in the settings that the user left open, and records the reason for each choice.

    >>> plan = make_plan(settings, text)
    >>> plan.settings, plan.choices, plan.forecast

Settings given by the user are kept; the rest is planned around them.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from nanolm.choice import Choice, Chosen, Report
from nanolm.errors import UsageError
from nanolm.formats import counted, readable
from nanolm.model.build import build_model
from nanolm.model.config import PRESETS, RECURRENT, GPTConfig, ModelConfig, complete_shape
from nanolm.model.device import choose_device, choose_dtype
from nanolm.model.size import non_embedding_parameters, training_bytes
from nanolm.planning import recipe, sizes
from nanolm.planning.scaling_law import Forecast, Law
from nanolm.planning.sizes import Clock, SizeEstimate, TextStats, model_config
from nanolm.planning.tuning import NARROW_DIM
from nanolm.text.vocabulary import TINY_CORPUS
from nanolm.training.settings import DEFAULT_FAMILY, SIZES, SWITCHES, TrainSettings

DEFAULT_MINUTES = 3.0  # a first try
LEAST_SECONDS_TO_SEARCH = 2.0  # of training time; with less, no sizes are timed
EVALUATIONS = 10  # on the validation set, in the whole run
SECONDS_PER_EVALUATION = 5.0  # at least this long between two evaluations
EVALUATION_SHARE = 0.05  # of the time budget
# Of the time budget, at most, before the first step. A GPU soon sees a text many times, so it is
# worth the time to prepare more of it.
SETUP_SHARE, SETUP_SHARE_ON_GPU = 0.25, 0.45
PLANNING_SHARE = 0.07  # for planning, at least
TO_CHANGE = "set --minutes, --steps, --epochs or --tokens to change it"


@dataclass
class Plan(Chosen[TrainSettings]):
    forecast: Forecast | None = None
    processes: int = 1  # that share each batch

    def as_object(self) -> dict[str, Any]:
        return {
            "settings": self.settings.to_dict(),
            "choices": [vars(choice) for choice in self.choices],
            "forecast": self.forecast and asdict(self.forecast),
        }


def make_plan(
    settings: TrainSettings,
    text: TextStats,
    base: ModelConfig | None = None,
    elapsed: Callable[[], float] = lambda: 0.0,
    report: Report = lambda *progress: None,
    processes: int = 1,
) -> Plan:
    """Choose all open settings. `base` is the model to start from, or None to train from scratch.
    `elapsed` returns the seconds of the time budget used so far."""
    if processes > 1 and settings.batch is not None and settings.batch < processes:
        problem = f"--batch {settings.batch} is shared by {processes} processes"
        raise UsageError(f"{problem}; use at least {processes}")
    if processes > 1 and settings.teachers:
        raise UsageError(f"--teachers {settings.teachers}: only for one process, not for torchrun")
    if processes > 1 and settings.early_context:
        problem = f"--early-context {settings.early_context}: only for one process"
        raise UsageError(f"{problem}, not for torchrun")
    plan = Plan(settings, processes=processes)
    choose_device_and_budget(plan, text)
    tokens, device = text.all_tokens or text.tokens, plan.settings.device
    columns = sizes.soft_target_columns(text.vocab_size, tokens, device)
    if settings.teachers and columns < recipe.LEAST_COLUMNS:
        problem = "the text is too large to keep the predictions of the teachers"
        raise UsageError(f"--teachers {settings.teachers}: {problem}; omit it")
    estimate = None
    if base is not None:
        choose_context(plan, base)
    else:
        plan.fill(family=DEFAULT_FAMILY)
        minutes = plan.settings.minutes or 0
        share = (1 - recipe.STUDENT_SHARE) / settings.teachers if settings.teachers else 1.0
        until = max(setup_share(settings) * 60 * minutes, elapsed() + PLANNING_SHARE * 60 * minutes)
        clock = Clock(
            lambda: share * (60 * (1 - EVALUATION_SHARE) * minutes - elapsed()),
            lambda: until - elapsed(),
        )
        names = ("layers", "heads", "dim", "batch", "weight_decay")
        undecided = text.size >= TINY_CORPUS and any(plan.open(name) for name in names)
        undecided = undecided and plan.settings.family not in RECURRENT and minutes > 0
        if undecided and clock.training() >= LEAST_SECONDS_TO_SEARCH:
            estimate = choose_size(plan, text, clock, report)
        else:
            if undecided and plan.settings.device == "cpu":
                plan.choose("preset", "nano", "the smallest preset: no time to try others")
            choose_preset(plan, text)
        config = model_config(plan.settings, vocab_size=1)  # includes the family's defaults
        given = {name: getattr(config, name, None) for name in (*SIZES, *SWITCHES)}
        if given["positions"] != "rope":
            del given["rope_base"]
        plan.settings = replace(plan.settings, **given)  # type: ignore[arg-type]
    if (plan.settings.context or 0) > text.longest_context:
        few = f"{text.longest_context + 1:,} training tokens"
        what = "the smallest part of the mix" if text.shortest else "the corpus"
        plan.set("context", text.longest_context, f"{what} has only {few}")
        plan.settings = replace(plan.settings, early_context=None)
    if processes > 1 and plan.open("shard") and settings.train != "lora":
        choose_sharding(plan, base or model_config(plan.settings, text.vocab_size))
    left = 60 * (plan.settings.minutes or math.inf) - elapsed()
    choose_optimizer(plan, text, base, estimate, left)
    if plan.settings.teachers:
        left *= recipe.STUDENT_SHARE
    if text.size < TINY_CORPUS:
        left = math.inf  # the time is only an upper limit
    plan.fill(evaluations=int(max(1, min(EVALUATIONS, left / SECONDS_PER_EVALUATION))))
    if base is None:
        warn_of_little_text(plan, text)
    return plan


def setup_share(settings: TrainSettings) -> float:
    return SETUP_SHARE_ON_GPU if choose_device(settings.device)[0] == "cuda" else SETUP_SHARE


def choose_sharding(plan: Plan, config: ModelConfig) -> None:
    """Choose whether each process holds the whole model or a shard of it."""
    on_gpu = plan.settings.device == "cuda"
    with torch.device("meta"):
        parameters = build_model(config).parameter_count()
    # A batch can be split into micro-batches; weights and optimizer state cannot.
    needed = training_bytes(config, parameters, config.context)
    room = torch.cuda.mem_get_info()[0] if on_gpu else math.inf
    wanted = needed > sizes.GPU_MEMORY_SHARE * room and isinstance(config, GPTConfig)
    reason = f"the whole model needs {readable(needed / 1e9, 2)} GB per process"
    reason += f", and the GPU has {readable(room / 1e9)} GB free" if on_gpu else ""
    plan.choose("shard", wanted, reason, "yes" if wanted else "no")


def warn_of_little_text(plan: Plan, text: TextStats) -> None:
    config = model_config(plan.settings, text.vocab_size)
    parameters = non_embedding_parameters(config) if isinstance(config, GPTConfig) else 0
    if text.size < TINY_CORPUS:
        reason = "a tiny text: enough to see how training works, too little to learn a language"
    elif parameters > sizes.PARAMETERS_PER_TOKEN * text.tokens:
        reason = f"a small text for {parameters:,} parameters: the model may overfit"
    else:
        return
    plan.choices.append(Choice("text", f"{text.size:,} bytes", reason))


def choose_device_and_budget(plan: Plan, text: TextStats) -> None:
    plan.choose("device", *choose_device(plan.settings.device))
    device = plan.settings.device
    if plan.open("dtype") and device != "cpu":  # on a CPU it is measured
        plan.choose("dtype", *choose_dtype("auto", device))
    if all(plan.open(name) for name in ("steps", "epochs", "tokens")):
        if text.size < TINY_CORPUS:
            plan.choose("steps", recipe.TINY_STEPS, f"enough for a tiny text; {TO_CHANGE}")
        else:
            plan.choose("minutes", DEFAULT_MINUTES, f"a quick first run; {TO_CHANGE}")


def choose_size(plan: Plan, text: TextStats, clock: Clock, report: Report) -> SizeEstimate:
    """Choose the model size by timing a few."""
    estimate, tried = sizes.search_sizes(plan, text, clock, report, plan.processes)
    config = estimate.config
    if not plan.settings.preset and any(plan.open(name) for name in ("layers", "heads", "dim")):
        reason = "no time to try other sizes"
        if len(tried) > 1 and text.ngram_bits() is None:  # estimates are only relative then
            shapes = ", ".join(f"{each.config.layers} x {each.config.dim}" for each in tried)
            reason = f"layers x width; the best of {shapes} for this budget"
        elif len(tried) > 1:
            reason = f"layers x width; predicted bits per byte: {', '.join(map(str, tried))}"
            best = min(tried, key=lambda each: each.bits_per_byte)
            if estimate.teachers > best.teachers == 0:
                reason += "; small enough to train several and distill them"
            elif estimate.bits_per_byte > best.bits_per_byte:
                near = f"{100 * (sizes.AS_GOOD - 1):.1g}%"
                reason += f"; the smallest within {near} of the best, because it is faster"
        shape = f"{config.layers} x {config.dim}, {config.heads} heads"
        plan.choices.append(Choice("model", shape, reason))
    plan.fill(layers=config.layers, heads=config.heads, dim=config.dim)
    context, batch, reason = config.context, estimate.batch, "suits this model size"
    tokens, step = batch * context, readable(1000 * estimate.step)
    if grows_context(plan, text, estimate):
        plan.fill(early_context=context)
        reason = f"{context} until the learning rate decays, which is faster"
        context, batch = 2 * context, batch // 2
    plan.choose("context", context, reason)
    plan.choose("batch", batch, f"{tokens:,} tokens per step, {step} ms")
    return estimate


def grows_context(plan: Plan, text: TextStats, estimate: SizeEstimate) -> bool:
    """Whether to train on windows twice as long as soon as the learning rate decays. Most of the
    time, a CPU learns more from twice as many short ones."""
    settings, context, batch = plan.settings, estimate.config.context, estimate.batch
    planned = all(plan.open(name) for name in ("context", "early_context", "batch"))
    return (
        planned
        and settings.device == "cpu"
        and estimate.config.positions == "rope"
        and context < recipe.LONG_CONTEXT
        and 2 * context <= text.longest_context
        and batch % (2 * (settings.workers or 1)) == 0
        and estimate.passes < recipe.MOST_PASSES
        and not (settings.teachers or estimate.teachers)  # which see the same windows as students
        and not settings.compile  # which would compile twice
        and plan.processes == 1
    )


def choose_preset(plan: Plan, text: TextStats) -> None:
    """Choose a preset, without timing any sizes."""
    on_cpu = plan.settings.device == "cpu"
    recurrent = plan.settings.family in RECURRENT
    needed = ("layers", "dim") if recurrent else ("layers", "heads", "dim")
    chosen = plan.open("preset") and any(plan.open(name) for name in needed)
    if chosen and text.size < TINY_CORPUS:
        plan.choose("preset", "nano", f"under {TINY_CORPUS // 1000} kB of text")
    elif chosen and on_cpu:
        plan.choose("preset", "micro", "the largest that a CPU trains in minutes")
    elif chosen:
        plan.choose("preset", "mini", "trains in a few minutes on a GPU")
    preset = PRESETS[plan.settings.preset or "micro"]
    if text.size < recipe.REPRODUCED_BYTES and plan.open("context"):
        reason = "with a longer context, the model would memorize such a small text"
        plan.choose("context", recipe.TINY_CONTEXT, reason)
        plan.fill(batch=max(plan.processes, recipe.TINY_BATCH))
    narrow = (plan.settings.dim or preset.dim) < NARROW_DIM
    if text.size < TINY_CORPUS and on_cpu and narrow and plan.open("threads"):
        # The same number on every machine, however busy, so that results are reproducible.
        plan.choose("threads", 1, "such a small model gains little from more threads")
        plan.fill(workers=1)
    if chosen and not recurrent:
        given = (plan.settings.heads, plan.settings.dim, plan.settings.kv_heads)
        heads, dim = complete_shape(preset.heads, preset.dim, *given)
        plan.fill(heads=heads, dim=dim)
    plan.fill(**{name: getattr(preset, name) for name in (*needed, "context")})
    tokens = preset.batch * preset.context  # per step
    plan.fill(batch=max(plan.processes, tokens // (plan.settings.context or 1)))


def choose_context(plan: Plan, base: ModelConfig) -> None:
    """Choose the context length for a pretrained model."""
    on_cpu = plan.settings.device == "cpu"
    context = min(base.context, 256 if on_cpu else 1024)
    plan.choose("context", context, f"the model's context length is {base.context:,}")
    preset = PRESETS["micro" if on_cpu else "mini"]
    tokens = preset.batch * preset.context  # per step
    plan.fill(batch=max(plan.processes, tokens // (plan.settings.context or 1)))


def choose_optimizer(
    plan: Plan,
    text: TextStats,
    base: ModelConfig | None,
    estimate: SizeEstimate | None,
    left: float,
) -> None:
    """Choose the optimizer, its hyperparameters and the number of steps; predict the loss."""
    assert plan.settings.batch is not None and plan.settings.context is not None
    step_tokens = plan.settings.batch * plan.settings.context
    config = base or model_config(plan.settings, text.vocab_size)
    if base is not None:
        plan.choose("optimizer", "adamw", "gentler on pretrained weights")
    plan.choose("optimizer", *recipe.optimizer(config, plan.settings.batch))
    assert plan.settings.optimizer
    lr, reason = recipe.learning_rate(plan.settings.optimizer, config), f"for width {config.dim}"
    if base is not None:
        lr = float(f"{recipe.CONTINUED_RATE * lr:.2g}")
        reason = "a seventh of the learning rate for training from scratch"
    if plan.settings.train == "lora":
        lr, reason = recipe.LORA_RATE, "for LoRA adapters"
    plan.choose("lr", lr, reason)
    tokens, epochs = plan.settings.tokens, plan.settings.epochs
    plan.settings = replace(plan.settings, epochs=None, tokens=None)
    if tokens is not None:
        plan.set("steps", max(1, round(tokens / step_tokens)), f"{tokens:,} tokens")
    elif epochs is not None:
        reason = f"{counted(epochs, 'epoch')} of {text.tokens:,} tokens"
        plan.set("steps", max(1, round(epochs * text.tokens / step_tokens)), reason)
    steps = plan.settings.steps
    if steps is None and estimate is not None:
        steps = estimate.steps
        if count := estimate.teachers:
            reason = f"{estimate.passes:.0f} epochs take {estimate.seconds:.0f} s of {left:.0f} s"
            gain = f"should lower the loss by about {recipe.distillation_gain(count):.0%}"
            reason += f"; distilling {count} models into one {gain}"
            plan.choose("teachers", count, reason)
        if plan.settings.teachers:
            capped = estimate.passes >= recipe.MOST_PASSES
            reason = f"{recipe.MOST_PASSES} epochs; more would hardly help"
            plan.choose("steps", steps, reason if capped else "for each teacher")
        elif estimate.passes >= recipe.MANY_PASSES:  # the machine may become faster
            plan.choose("steps", *most_steps(text, step_tokens))
    plan.fill(teachers=0)
    if steps is None:  # unknown: the clock ends the run
        if plan.open("weight_decay"):
            plan.choose("steps", *most_steps(text, step_tokens))
        plan.fill(weight_decay=recipe.LEAST_DECAY, dropout=0.0, average=0.0)
        return
    passes = steps * step_tokens / text.tokens
    parameters = non_embedding_parameters(config) if isinstance(config, GPTConfig) else math.inf
    decay = recipe.weight_decay(passes, plan.settings.lr or lr, steps, parameters, text.size)
    decay = recipe.LEAST_DECAY if base else decay
    plan.choose("weight_decay", decay, f"for {counted(passes, 'epoch')}")
    # Dropout draws one sequence of random numbers, so a batch cannot be split among workers.
    if passes >= recipe.MANY_PASSES and base is None and (plan.settings.workers or 1) == 1:
        dropout = recipe.DROPOUT if passes < recipe.HUNDREDS_OF_PASSES else recipe.MOST_DROPOUT
        plan.choose("dropout", dropout, f"for {passes:,.0f} epochs")
    plan.fill(dropout=0.0)
    if plan.settings.dropout and passes >= recipe.HUNDREDS_OF_PASSES:
        reason = "EMA of the weights over about 50 steps, because dropout makes single steps noisy"
        plan.choose("average", recipe.EMA_DECAY, reason)
    plan.fill(average=0.0 if base else recipe.ema_decay(steps, passes, step_tokens))
    if base is not None or not isinstance(config, GPTConfig) or text.size < TINY_CORPUS:
        return
    if (ngram_bits := text.ngram_bits()) is None:
        return  # no time to compute it
    law = Law(ngram_bits, text.size)
    bits = law.bits_per_byte(parameters, passes * text.size, steps)
    seconds, after = estimate.seconds if estimate else None, f"after {counted(steps, 'step')}"
    if teachers := plan.settings.teachers:  # how many steps the student takes is not known
        bits *= 1 - recipe.distillation_gain(teachers)
        plan.forecast = Forecast(bits, seconds, passes)
        seconds, after = left, f"after distillation of {counted(teachers, 'teacher')}"
    else:
        plan.forecast = Forecast(bits, seconds, passes, steps)
    if estimate:
        reason = f"validation bits per byte, {after} in {seconds:.0f} s"
        plan.choices.append(Choice("forecast", f"{bits:.3f}", reason))


def most_steps(text: TextStats, step_tokens: int) -> tuple[int, str]:
    steps = math.ceil(recipe.SPARE_PASSES * text.tokens / step_tokens)
    return steps, f"at most {recipe.SPARE_PASSES} epochs, if time allows"
