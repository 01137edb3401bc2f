"""Settings that were left open, chosen: each choice with its reason.

    >>> plan = make_plan(settings, text)
    >>> plan.settings, plan.choices, plan.forecast

What is set by hand is kept, and the rest is planned around it.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from nanolm.choice import Choice, Report
from nanolm.errors import UsageError
from nanolm.formats import counted, readable
from nanolm.machine import available_threads, is_busy
from nanolm.model.build import build_model
from nanolm.model.config import (
    PRESETS,
    RECURRENT,
    GPTConfig,
    ModelConfig,
    complete_shape,
    configure,
)
from nanolm.model.device import choose_device, choose_dtype
from nanolm.model.size import non_embedding_parameters, training_bytes
from nanolm.planning import recipe
from nanolm.planning.scaling_law import Forecast, Law
from nanolm.planning.sizes import A_TOKEN, CLOSE, FULL, Outlook, Text, pick
from nanolm.planning.tuning import WIDE, fit_to_machine
from nanolm.text.vocabulary import TINY
from nanolm.training.settings import DEFAULT_FAMILY, SIZES, SWITCHES, TrainSettings

MINUTES = 3.0  # a first try
SHORT = 2.0  # seconds; too few to try anything,
HURRY = {"cpu": 12.0}  # and too few to find out more than the size:
HURRY_ON_GPU = 60.0  # trying kernels takes 3 to 4; a step of `mini` is the same with the best two
EVALUATIONS = 10  # of held-out text, in the whole run,
A_FIT = 1.0  # seconds that trying ways to compute takes, about
A_LOOK = 5.0  # seconds from one to the next at least
AFTERWARDS = 0.05  # of the time, for looking at held-out text
BEFORE = 0.25  # of the time may have passed at the first step
OR_SAY = "or say --minutes, --steps, --epochs or --tokens"


@dataclass
class Plan:
    """Everything but the tokenizer."""

    settings: TrainSettings
    choices: list[Choice] = field(default_factory=list)
    forecast: Forecast | None = None
    processes: int = 1  # that share each batch

    def choose(self, name: str, value: object, reason: str, shown: object = None) -> None:
        self.settings = replace(self.settings, **{name: value})  # type: ignore[arg-type]
        self.choices.append(Choice(name, value if shown is None else shown, reason))

    def fill(self, **values: Any) -> None:
        """What needs no reason, where it was left open."""
        left = {name: value for name, value in values.items() if self.open(name)}
        self.settings = replace(self.settings, **left)

    def as_object(self) -> dict[str, Any]:
        """What a program may want to know."""
        return {
            "settings": self.settings.to_dict(),
            "choices": [vars(choice) for choice in self.choices],
            "forecast": self.forecast and asdict(self.forecast),
        }

    def open(self, name: str) -> bool:
        return getattr(self.settings, name) is None


def make_plan(
    settings: TrainSettings,
    text: Text,
    base: ModelConfig | None = None,
    elapsed: Callable[[], float] = lambda: 0.0,
    report: Report = lambda *how_far: None,
    processes: int = 1,
) -> Plan:
    """Choose what is open. `base` is the model that training starts from, if it does not start from
    nothing; `elapsed` are the seconds that were spent already of a time that is asked for."""
    plan = Plan(settings, processes=processes)
    if processes > 1 and settings.batch is not None and settings.batch < processes:
        raise UsageError(
            f"--batch {settings.batch}: {processes} processes share it; give at least {processes}"
        )
    choose_device_and_budget(plan, text)
    outlook = None
    if base is not None:
        choose_reach(plan, base)
    else:
        plan.fill(family=DEFAULT_FAMILY)
        asked = 60 * (1 - AFTERWARDS) * (plan.settings.minutes or 0)
        trying = text.size >= TINY and undecided(plan)
        if trying and asked - elapsed() >= SHORT:
            before = 60 * BEFORE * (plan.settings.minutes or 0)
            outlook = choose_size(
                plan, text, lambda: asked - elapsed(), lambda: before - elapsed(), report
            )
        else:
            if trying and plan.open("preset") and plan.settings.device == "cpu":
                plan.choose("preset", "nano", "the smallest: there is no time to try others")
            choose_preset(plan, text)
        plan.settings = with_switches(plan.settings)
    context, tokens = plan.settings.context, text.tokens
    if context and context >= tokens:
        plan.choose("context", max(1, tokens - 1), f"there are only {tokens:,} training tokens")
    if processes > 1:
        choose_sharding(plan, base or model_config(plan.settings, text.vocab_size))
    choose_learning(plan, text, base, outlook)
    left = 60 * (plan.settings.minutes or math.inf) - elapsed()
    if text.size >= TINY:  # else the time is just a limit
        plan.fill(evaluations=int(max(1, min(EVALUATIONS, left / A_LOOK))))
    plan.fill(evaluations=EVALUATIONS)
    if base is None:
        warn_of_little_text(plan, text)
    return plan


def choose_sharding(plan: Plan, config: ModelConfig) -> None:
    """Whether each process has the whole model, or a share of it."""
    if not plan.open("shard"):
        return
    gpu = plan.settings.device == "cuda"
    with torch.device("meta"):
        parameters = build_model(config).parameter_count()
    # Rows of a batch can go through one after the other, weights and moments cannot.
    needed = training_bytes(config, parameters, config.context)
    room = torch.cuda.mem_get_info()[0] if gpu else math.inf
    wanted = needed > FULL * room and isinstance(config, GPTConfig)
    takes = f"a process needs {readable(needed / 1e9, 2)} GB for the whole model"
    reason = f"{takes}, and its GPU has {readable(room / 1e9)}" if gpu else takes
    plan.choose("shard", wanted, reason, "yes" if wanted else "no")


def warn_of_little_text(plan: Plan, text: Text) -> None:
    config = model_config(plan.settings, text.vocab_size)
    size = f"{text.size:,} bytes"
    if text.size < TINY:
        reason = "tiny: good for seeing how it works, too little for a language"
        plan.choices.append(Choice("text", size, reason))
    elif isinstance(config, GPTConfig):
        parameters = non_embedding_parameters(config)
        if parameters > A_TOKEN * text.tokens:
            reason = f"little for {parameters:,} parameters: they could learn it by heart"
            plan.choices.append(Choice("text", size, reason))


def choose_device_and_budget(plan: Plan, text: Text) -> None:
    device, reason = choose_device(plan.settings.device)
    if device != plan.settings.device:
        plan.choose("device", device, reason)
    if plan.settings.dtype == "auto" and device != "cpu":  # there it is measured
        plan.choose("dtype", *choose_dtype("auto", device))
    if all(plan.open(name) for name in ("steps", "epochs", "tokens")):
        if text.size < TINY:
            plan.choose("steps", recipe.TINY_STEPS, f"enough for a tiny text; {OR_SAY}")
        elif plan.open("minutes"):
            plan.choose("minutes", MINUTES, f"a first try; {OR_SAY}")


def undecided(plan: Plan) -> bool:
    """Is there anything that a trial of the machine could decide?"""
    if plan.settings.family in RECURRENT or plan.settings.minutes is None:
        return False
    return any(plan.open(name) for name in ("layers", "heads", "dim", "batch", "weight_decay"))


def choose_size(
    plan: Plan,
    text: Text,
    seconds: Callable[[], float],
    spare: Callable[[], float],
    report: Report,
) -> Outlook:
    """By trying some: `seconds` are left for training, `spare` of them for measuring."""

    def make(settings: TrainSettings) -> GPTConfig:
        config = model_config(settings, text.vocab_size, check=False)
        assert isinstance(config, GPTConfig)
        return config

    def fit(settings: TrainSettings, config: GPTConfig) -> tuple[TrainSettings, list[Choice]]:
        if seconds() < HURRY.get(settings.device, HURRY_ON_GPU) or spare() < A_FIT:
            return in_a_hurry(settings), []
        batch = -(-(settings.batch or max(1, 2_048 // config.context)) // plan.processes)
        asked = replace(settings, batch=batch, context=config.context)
        found, choices = fit_to_machine(asked, build_model(config), spare() / 2)
        return replace(found, batch=settings.batch, context=settings.context), choices

    asked = plan.settings
    picked = pick(asked, text, make, seconds, fit, report, plan.processes, spare)
    plan.settings, outlook = picked.settings, picked.outlook
    plan.choices += picked.choices
    config = outlook.config
    reason = "there is no time to try others"
    if len(picked.tried) > 1:
        tried = ", ".join(str(found) for found in picked.tried)
        reason = f"layers x width; bits per byte in that time: {tried}"
        if outlook.bits_per_byte > min(found.bits_per_byte for found in picked.tried):
            near = f"{100 * (CLOSE - 1):.1g} %"
            reason += f"; the smallest within {near} of the best, which is faster to use"
        if text.hard() is None:  # then these are only good for comparing them
            shapes = (f"{each.config.layers} x {each.config.dim}" for each in picked.tried)
            reason = f"layers x width; the best in that time of {', '.join(shapes)}"
    if (
        any(getattr(asked, name) is None for name in ("layers", "heads", "dim"))
        and not asked.preset
    ):
        shape = f"{config.layers} x {config.dim}, {config.heads} heads"
        plan.choices.append(Choice("model", shape, reason))
    for name in ("layers", "heads", "dim"):
        plan.fill(**{name: getattr(config, name)})
    if plan.open("context"):
        plan.choose("context", config.context, "suits that size")
    if plan.open("batch"):
        tokens, step = outlook.batch * config.context, readable(1000 * outlook.step)
        plan.choose("batch", outlook.batch, f"{tokens:,} tokens a step, {step} ms")
    return outlook


def in_a_hurry(settings: TrainSettings) -> TrainSettings:
    """What is usually best, where there is no time to see."""
    threads = settings.threads or available_threads()
    if settings.device != "cpu":
        return replace(settings, threads=threads, attention=settings.attention or "flash")
    if settings.dropout and not settings.threads and is_busy():
        threads = 1  # several would wait for each other
    workers = settings.workers or (1 if settings.dropout else threads)
    dtype = "float32" if settings.dtype == "auto" else settings.dtype
    return replace(settings, threads=threads, workers=workers, dtype=dtype)


def choose_preset(plan: Plan, text: Text) -> None:
    """A size with a name, where nothing is tried."""
    small = plan.settings.device == "cpu"
    recurrent = plan.settings.family in RECURRENT
    needed = ("layers", "dim") if recurrent else ("layers", "heads", "dim")
    chosen = plan.open("preset") and any(plan.open(name) for name in needed)
    if chosen:
        if text.size < TINY:
            plan.choose("preset", "nano", f"under {TINY // 1000} kB of text")
        elif small:
            plan.choose("preset", "micro", "the most a CPU can train in minutes")
        else:
            plan.choose("preset", "mini", "a few minutes on a GPU")
    preset = PRESETS[plan.settings.preset or "micro"]
    if text.size < recipe.REPRODUCED and plan.open("context"):
        reason = "more would memorize what stands before each sentence of so small a text"
        plan.choose("context", recipe.TINY_CONTEXT, reason)
        plan.fill(batch=max(plan.processes, recipe.TINY_BATCH))
    narrow = (plan.settings.dim or preset.dim) < WIDE
    if text.size < TINY and small and narrow and plan.open("threads"):
        # The same number on every machine, however busy: the same steps then give the same model.
        plan.choose("threads", 1, "so small a model gains little from more")
        plan.fill(workers=1)
    if chosen and not recurrent:
        given = (plan.settings.heads, plan.settings.dim, plan.settings.kv_heads)
        heads, dim = complete_shape(preset.heads, preset.dim, *given)
        plan.fill(heads=heads, dim=dim)
    plan.fill(**{name: getattr(preset, name) for name in (*needed, "context")})
    # As many tokens a step as the preset has, whatever the context.
    assert plan.settings.context is not None
    batch = preset.batch * preset.context // plan.settings.context
    plan.fill(batch=max(plan.processes, batch))


def choose_reach(plan: Plan, base: ModelConfig) -> None:
    """How far a model that is there is to look back."""
    small = plan.settings.device == "cpu"
    if plan.open("context"):
        context = min(base.context, 256 if small else 1024)
        plan.choose("context", context, f"the model looks back on {base.context:,}")
    preset = PRESETS["micro" if small else "mini"]  # for the tokens a step alone
    assert plan.settings.context is not None
    batch = preset.batch * preset.context // plan.settings.context
    plan.fill(batch=max(plan.processes, batch))


def choose_learning(
    plan: Plan, text: Text, base: ModelConfig | None, outlook: Outlook | None
) -> None:
    """The optimizer, its numbers, and how often the text is seen."""
    settings = plan.settings
    assert settings.batch is not None and settings.context is not None
    each = settings.batch * settings.context
    config = base or model_config(plan.settings, text.vocab_size)
    if plan.open("optimizer"):
        found, reason = recipe.optimizer(config, settings.batch)
        if base is not None:
            found, reason = "adamw", "gentle with what is learned already"
        plan.choose("optimizer", found, reason)
    assert plan.settings.optimizer
    if plan.open("lr"):
        lr = recipe.learning_rate(plan.settings.optimizer, config)
        if base is None:
            plan.choose("lr", lr, f"for width {config.dim}")
        else:
            lr = float(f"{recipe.CONTINUED * lr:.2g}")
            plan.choose("lr", lr, "a seventh of what fresh weights would take")
    count_steps(plan, text, each)
    steps = plan.settings.steps
    if steps is None and outlook is not None:
        steps = outlook.steps
        if outlook.passes >= recipe.MOST_PASSES:
            reason = f"{recipe.MOST_PASSES} passes over the text: more would teach nothing new"
            plan.choose("steps", steps, reason)
    if steps is None:  # nobody knows how many there will be
        if plan.open("weight_decay"):
            most = math.ceil(recipe.MOST_PASSES * text.tokens / each)
            reason = f"{recipe.MOST_PASSES} passes at most, if there is time for them"
            plan.choose("steps", most, reason)
        plan.fill(weight_decay=recipe.LEAST_DECAY, dropout=0.0, average=0.0)
        return
    passes = steps * each / text.tokens
    assert plan.settings.lr
    if plan.open("weight_decay"):
        decay = recipe.LEAST_DECAY
        if base is None:
            decay = recipe.weight_decay(passes, plan.settings.lr, steps, text.size)
        plan.choose("weight_decay", decay, f"for {counted(passes, 'pass')} over the text")
    if plan.open("dropout"):
        alone = base is not None or (plan.settings.workers or 1) > 1
        dropout, reason = recipe.dropout(passes, alone)
        if dropout:
            plan.choose("dropout", dropout, reason)
        plan.fill(dropout=dropout)
    if plan.open("average") and plan.settings.dropout and passes >= recipe.HUNDREDS:
        plan.choose(
            "average", recipe.AVERAGE, "the mean of about 50 steps: dropout makes them jump"
        )
    plan.fill(average=0.0)
    if base is None and isinstance(config, GPTConfig) and text.size >= TINY:
        hard = text.hard()
        if hard is None:
            return
        parameters = non_embedding_parameters(config)
        bits = Law(hard, text.size).bits_per_byte(parameters, passes * text.size, steps)
        seconds = outlook.seconds if outlook else None
        plan.forecast = Forecast(bits, seconds, passes, steps)
        if outlook:
            reason = (
                f"held-out bits per byte, after {counted(steps, 'step')} in {outlook.seconds:.0f} s"
            )
            plan.choices.append(Choice("forecast", f"{bits:.3f}", reason))


def count_steps(plan: Plan, text: Text, each: int) -> None:
    """Epochs and tokens as steps."""
    epochs, tokens = plan.settings.epochs, plan.settings.tokens
    if epochs is None and tokens is None:
        return
    all_ = tokens if tokens is not None else (epochs or 0) * text.tokens
    reason = (
        f"{tokens:,} tokens"
        if tokens
        else f"{counted(epochs or 0, 'epoch')} of {text.tokens:,} tokens"
    )
    plan.settings = replace(plan.settings, epochs=None, tokens=None)
    plan.choose("steps", max(1, round(all_ / each)), reason)


def with_switches(settings: TrainSettings) -> TrainSettings:
    """What is left open about the model, as its family has it."""
    config = model_config(settings, vocab_size=1)
    given = {name: getattr(config, name, None) for name in (*SIZES, *SWITCHES)}
    if given["positions"] != "rope":
        del given["rope_base"]
    return replace(settings, **given)  # type: ignore[arg-type]


def model_config(settings: TrainSettings, vocab_size: int, check: bool = True) -> ModelConfig:
    """The model that resolved settings describe, or a UsageError that says what does not fit."""
    assert settings.family
    names = ("context", "dropout", *SIZES, *SWITCHES)
    asked = {name: getattr(settings, name) for name in names}
    config = configure(settings.family, vocab_size=vocab_size, **asked)
    if check and (problems := config.problems()):
        raise UsageError("\n".join(problems))
    return config
