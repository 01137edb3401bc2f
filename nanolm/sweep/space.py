"""The search space of a sweep: values for the settings that `--over` names.

>>> parse("lr,dropout=0:0.1")
({'lr': [], 'dropout': [0.0, 0.1]}, [])
"""

import math
import random
from dataclasses import fields, replace
from itertools import islice, product
from typing import Any, get_args, get_type_hints

from nanolm.errors import UsageError, did_you_mean
from nanolm.model.config import PRESETS, RECURRENT
from nanolm.training.optimizers import OPTIMIZERS
from nanolm.training.settings import RANGES, SIZES, SWITCHES, TrainSettings

SEED = "seed"
MOST_COMBINATIONS = 1_000  # considered in a larger space

# Default values to try: multiples of the planned value, offsets from it, or a fixed list.
MULTIPLES = {
    **dict.fromkeys(("lr", "weight_decay"), (1 / 4, 1 / 2, 1, 2, 4)),
    **dict.fromkeys(("batch", "context", "heads", "dim", "hidden"), (1 / 2, 1, 2)),
}
OFFSETS = {"layers": (-1, 0, 1), SEED: (0, 1, 2)}
USUAL: dict[str, Any] = {"dropout": (0.0, 0.1, 0.2, 0.3), "optimizer": tuple(OPTIMIZERS)}
AROUND: dict[str, tuple[Any, ...]] = {**MULTIPLES, **OFFSETS, **USUAL}

BUDGETS = ("steps", "epochs", "tokens")
SAME_IN_ALL_TRIALS = (
    *("minutes", *BUDGETS, "corpus", "val", "val_fraction", "teachers"),
    *("encoding", "document_separator", "text_field", "text_column"),
)
DEPENDENT = {  # settings that are planned again when the setting they depend on changes
    "preset": (*SIZES, "lr", "early_context"),
    "family": ("kv_heads", "hidden", *SWITCHES, "optimizer", "lr", "early_context"),
    "context": ("early_context",),
    "dim": ("hidden", "lr"),
    "heads": ("kv_heads",),
    "feed_forward": ("hidden",),
    "positions": ("rope_base", "early_context"),
    "optimizer": ("lr",),
    "tokenizer": ("vocab_size", "lowercase"),
}
BOOLEANS = {"true": True, "yes": True, "false": False, "no": False}

Point = dict[str, Any]  # a value for each setting
Space = dict[str, list[Any]]  # the values of each setting; empty: values around the planned one


def parse(over: str) -> tuple[Space, list[str]]:
    """The settings named by `lr,dropout=0:0.1` with their values, and the problems with it."""
    hints = get_type_hints(TrainSettings)
    names = [each.name for each in fields(TrainSettings)]
    space: Space = {}
    problems = []
    for part in filter(None, map(str.strip, over.split(","))):
        word, given, after = part.partition("=")
        name = "start_from" if word == "from" else word.strip().replace("-", "_")
        if name in SAME_IN_ALL_TRIALS:
            problems.append(f"--over {word}: omit it; trials would not be comparable")
        elif name not in names:
            problems.append(f"--over {word}: no such setting" + did_you_mean(name, names))
        elif not given and name not in AROUND:
            problems.append(
                f"--over {word}: give the values to try, as in --over {word}=ONE:ANOTHER"
            )
        else:
            kind, values = (get_args(hints[name]) or (hints[name],))[0], space.setdefault(name, [])
            for value in map(str.strip, after.split(":")) if given else ():
                try:
                    values.append(BOOLEANS[value.lower()] if kind is bool else kind(value))
                except (ValueError, KeyError):
                    what = {bool: "true or false", int: "a whole number"}.get(kind, "a number")
                    problems.append(f"--over {word}: {value!r} is not {what}")
            space[name] = list(dict.fromkeys(values))
    if not space and not problems:
        problems.append("name settings to vary: --over lr,dropout, or --over lr=0.001:0.003:0.01")
    return space, problems


def around(settings: TrainSettings, name: str) -> list[Any]:
    """Values to try, including the planned one."""
    value = getattr(settings, name)
    if value is None:
        raise UsageError(f"--over {name}: this model has no such setting; omit it")
    if name in USUAL:
        return sorted({*USUAL[name], value})
    if name in OFFSETS:
        return sorted({max(RANGES[name][0], value + offset) for offset in OFFSETS[name]})
    values = (value * factor for factor in MULTIPLES[name])
    if isinstance(value, int):
        return sorted({max(1, round(each)) for each in values})
    return sorted({each if each == value else float(f"{each:.2g}") for each in values})


def draw(space: Space, own: Point, count: int, seed: int) -> list[Point]:
    """`count` distinct points of the grid, or all if there are fewer, starting with `own`."""
    size = math.prod(map(len, space.values()))

    def point(index: int) -> Point:
        drawn = {}
        for name, values in space.items():
            index, place = divmod(index, len(values))
            drawn[name] = values[place]
        return drawn

    chosen = range(size) if size <= count else random.Random(seed).sample(range(size), count)
    return [own, *(other for index in chosen if (other := point(index)) != own)][:count]


def misfits(settings: TrainSettings, space: Space) -> list[str]:
    """The problems with the given values, if every combination of them is invalid."""
    problems: list[str] = []
    given = {name: values for name, values in space.items() if values}
    for point in islice(product(*given.values()), MOST_COMBINATIONS):
        tried = replace(settings, **dict(zip(given, point, strict=True)))
        if not (wrong := tried.model_problems()):
            return []
        problems += wrong
    return list(dict.fromkeys(problems))


def settings_at(
    point: Point, plan: TrainSettings, asked: TrainSettings, seconds: float
) -> TrainSettings:
    """The planned settings at a point of the space. Settings the user did not give adapt to it."""
    assert plan.batch and plan.context
    other = {name: value for name, value in point.items() if value != getattr(plan, name)}
    changes: dict[str, Any] = dict.fromkeys(each for n in other for each in DEPENDENT.get(n, ()))
    if "preset" in other:
        names = ("layers", "heads", "dim", "context", "batch")
        changes |= {name: getattr(PRESETS[other["preset"]], name) for name in names}
    if "context" in other:  # keep the number of tokens per step
        changes["batch"] = max(1, plan.batch * plan.context // other["context"])
    if other.get("family") in RECURRENT:
        changes["heads"] = None
    if other.get("dropout"):
        changes["workers"] = 1  # dropout uses one sequence of random numbers
    changes = {name: value for name, value in changes.items() if getattr(asked, name) is None}
    settings = replace(plan, **(changes | point), minutes=seconds / 60)
    if plan.steps:  # at most as many epochs as planned
        share = plan.batch * plan.context / ((settings.batch or 1) * (settings.context or 1))
        settings = replace(settings, steps=max(1, round(plan.steps * share)))
    return settings
