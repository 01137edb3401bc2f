"""Which settings learn most: many are tried for a little while, the better ones for longer.

    >>> sweep(Request(TrainSettings(("novel.txt",), minutes=30.0), over="lr,dropout=0:0.1:0.2"))

This is successive halving, by thirds: all trials get a short time, the best third of them three
times as much, the best third of those three times that. So every round takes about as long, and
most of the time goes to what is good. A trial is a normal run; a longer one goes on from where its
learning rate began to fall. Where seeds are among what is varied, trials that differ in nothing
else are one combination: they go on or end together, and are compared by their mean. What there
was no time for is tried if others end early, or named. All that is known is in sweep.json, so the
same request goes on after a kill.
"""

import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice, product, zip_longest
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, get_args, get_type_hints

from nanolm.errors import DiskFull, NanolmError, UsageError, did_you_mean
from nanolm.formats import counted
from nanolm.model.build import build_model
from nanolm.model.config import PRESETS, RECURRENT
from nanolm.model.device import choose_device, choose_dtype, free_memory
from nanolm.model.huggingface import load_model
from nanolm.planning.planner import model_config
from nanolm.planning.tuning import fit_to_machine
from nanolm.pretraining import prepare
from nanolm.pretraining.extend import extend
from nanolm.pretraining.language import Result, stopwatch, train
from nanolm.report.sweep import Dot, shown, sweep_svg
from nanolm.runs import ledger
from nanolm.runs.folder import Run
from nanolm.runs.ledger import Ledger, read_ledger, working_on
from nanolm.text.sources import STDIN
from nanolm.training.events import Event, Note, Planned, Preparing, Progressed
from nanolm.training.interrupt import StopRequest
from nanolm.training.optimizers import OPTIMIZERS
from nanolm.training.schedule import DECAY
from nanolm.training.settings import RANGES, SIZES, SWITCHES, TrainSettings, option

FILE = "sweep.json"
FACTOR = 3  # one of so many goes on, for so many times as long
COUNTS = (27, 9, 3)  # trials, as many as the time bears; each fills its rounds exactly
LEAST = 10.0  # seconds of a first round: less says little,
ASKED = 3.0  # but may do where all combinations were asked for by their values
MOST = 1_000  # combinations that are looked at
LEFT = 0.1  # of the time; where more is left, it is said why
SEED = "seed"
SHORTEST = 1.0  # where --trials leaves no more; a run takes half of it to begin and end

# What is tried where no values are given: so many times what the plan has, so much more, or these.
TIMES = {
    **dict.fromkeys(("lr", "weight_decay"), (1 / 4, 1 / 2, 1, 2, 4)),
    **dict.fromkeys(("batch", "context", "heads", "dim", "hidden"), (1 / 2, 1, 2)),
}
PLUS = {"layers": (-1, 0, 1), "seed": (0, 1, 2)}
THESE: dict[str, tuple[Any, ...]] = {
    "dropout": (0.0, 0.1, 0.2, 0.3),
    "optimizer": tuple(OPTIMIZERS),
}
AROUND: dict[str, tuple[Any, ...]] = {**TIMES, **PLUS, **THESE}

BUDGETS = ("steps", "epochs", "tokens")
ENOUGH = ("enough", "steps")  # why a trial ended that more time would not help
SAME = (  # in all trials
    *("minutes", *BUDGETS, "corpus", "val", "val_fraction"),
    *("encoding", "document_separator", "text_field", "text_column"),
)
FOLLOWS = {  # what was chosen to go with a setting, and is chosen anew with another value of it
    "preset": (*SIZES, "lr"),
    "family": ("kv_heads", "hidden", *SWITCHES, "optimizer", "lr"),
    "dim": ("hidden", "lr"),
    "heads": ("kv_heads",),
    "feed_forward": ("hidden",),
    "positions": ("rope_base",),
    "optimizer": ("lr",),
    "tokenizer": ("vocab_size",),
}
WORDS = {"true": True, "yes": True, "false": False, "no": False}

Values = dict[str, list[Any]]  # of each setting; none: those around what the plan has


@dataclass(frozen=True)
class Request:
    """What is asked for: `settings.minutes` are for all of it."""

    settings: TrainSettings
    over: str  # lr,dropout=0:0.1
    trials: int | None = None

    def check(self) -> None:
        """Raise one UsageError that names everything that is wrong, with what to type instead."""
        settings = replace(self.settings, **dict.fromkeys(BUDGETS))  # type: ignore[arg-type]
        values, problems = parse(self.over)
        problems = settings.problems() + problems
        for name, each in values.items():
            fixed = getattr(settings, name)
            if each and fixed != getattr(TrainSettings(()), name):
                problems.append(f"{option(name)} {fixed} and --over {name}=: give one of them")
                continue
            for value in each:
                tried = replace(settings, **{name: value})
                misfits = tried.model_problems()  # with another value it may fit
                problems += [p for p in tried.problems() if p not in (*problems, *misfits)]
        if not problems:
            problems += no_model(settings, values)
        for name in BUDGETS:
            if (value := getattr(self.settings, name)) is not None:
                problems.append(f"{option(name)} {value}: a sweep shares out time; say --minutes")
        if self.trials is not None and not 1 <= self.trials <= 1_000:
            problems.append(f"--trials {self.trials}: must be from 1 to 1000")
        for path in settings.corpus:
            if path == STDIN or Path(path).is_fifo():
                reason = "a pipe is read once, and a sweep reads its text for every trial"
                problems.append(f"{path}: {reason}; write it to a file first")
        if problems:
            raise UsageError("\n".join(problems))


@dataclass
class Trial:
    """Some settings, and what they came to in each round."""

    number: int
    values: dict[str, Any]
    results: list[dict[str, Any]] = field(default_factory=list)  # of `train`, by round
    error: str | None = None

    def bits(self) -> list[float]:
        return [result["val_bits_per_byte"] for result in self.results]

    def score(self) -> float:
        """Bits per byte of the model that it has, if it has one."""
        return self.bits()[-1] if self.results and self.error is None else math.inf


@dataclass
class State(ledger.State):
    """sweep.json"""

    base: dict[str, Any] | None = None  # resolved settings
    trials: list[Trial] = field(default_factory=list)
    waiting: list[dict[str, Any]] = field(default_factory=list)  # values there was no time for
    budgets: list[float] = field(default_factory=list)  # seconds for a trial, by round
    run: str | None = None  # the best

    def __post_init__(self) -> None:
        self.trials = [Trial(**each) if isinstance(each, dict) else each for each in self.trials]


@dataclass(frozen=True)
class Combination:
    """Trials that differ in nothing but their seed."""

    values: dict[str, Any]  # without the seed
    trials: list[Trial]

    def score(self) -> float:
        """The mean over seeds; infinite where one of them has failed."""
        return fmean(trial.score() for trial in self.trials)

    def rounds(self) -> list[tuple[float, float]]:
        """The mean and the standard deviation of bits per byte over seeds, by round."""
        by_round = zip_longest(*(trial.bits() for trial in self.trials))
        found = [[bits for bits in each if bits is not None] for each in by_round]
        return [(fmean(each), stdev(each) if len(each) > 1 else 0.0) for each in found]


@dataclass(frozen=True)
class Tried:
    """A trial came to the end of a round."""

    round: int
    rounds: int
    number: int  # in this round
    of: int
    trial: Trial
    seconds_left: float  # of the whole sweep


@dataclass(frozen=True)
class Outcome:
    """What a sweep came to: the last line that `nanolm sweep --json` prints."""

    folder: str
    run: str | None  # None: it was interrupted
    val_bits_per_byte: float | None
    trials: list[Trial]  # the best first
    not_tried: list[dict[str, Any]] = field(default_factory=list)  # for want of time

    def combinations(self) -> list[Combination]:
        """The best first, by the mean over seeds."""
        return combinations(self.trials)


Watch = Callable[[Event | Tried], None]


def sweep(
    request: Request,
    out: str | Path | None = None,
    watch: Watch = lambda event: None,
    started: float | None = None,
) -> Outcome:
    """Try settings, or go on with a sweep that was not finished; the best is a run as any other."""
    clock = time.monotonic() if started is None else started
    request.check()
    settings = prepare.with_absolute_paths(request.settings)
    asked = {"settings": settings.to_dict(), "over": request.over, "trials": request.trials}

    def fits(folder: Path) -> bool | None:
        state = read_ledger(folder / FILE, State)
        return None if state is None else state.asked == asked and not state.finished

    folder = prepare.choose_folder(settings.corpus[0], "sweep", out, fits)
    with working_on(folder):
        state = read_ledger(folder / FILE, State) or State(asked)
        work = Sweep(folder, state, settings, watch, clock)
        if state.base is None:
            work.plan(request)
        else:
            watch(Note(f"going on with {folder}"))
        with StopRequest() as stop:
            done = work.all_rounds(stop)
        if not done:
            return Outcome(str(folder), None, None, ranked(state.trials))
        return work.finish(out is not None)


class Sweep(Ledger[State]):
    """A sweep at work."""

    def __init__(
        self, folder: Path, state: State, asked: TrainSettings, watch: Watch, clock: float
    ) -> None:
        assert asked.minutes
        super().__init__(folder / FILE, state, asked.minutes, clock)
        self.folder, self.asked, self.watch = folder, asked, watch
        seeds = [trial.values.get(SEED) for trial in state.trials]
        self.seeds: list[Any] | None = [s for s in dict.fromkeys(seeds) if s is not None] or None

    def plan(self, request: Request) -> None:
        """Choose the settings that are the same in all trials, and what to try."""
        self.save()
        given, _ = parse(request.over)
        middle = {name: each[(len(each) - 1) // 2] for name, each in given.items() if each}
        settings = replace(self.asked, **middle)
        choose_dtype(settings.dtype, choose_device(settings.device)[0])  # or say what is missing
        base = prepare.find_base(settings, self.watch)
        until = prepare.text_deadline(settings, lambda: 60 * (settings.minutes or 0) - self.left())
        text = prepare.prepare_text(settings, base, self.watch, until)
        sizes = {name: len(each or AROUND[name]) for name, each in given.items()}
        seeds = sizes.pop(SEED, 1)
        size, by_value = math.prod(sizes.values()), all(given.values())
        if request.trials is not None:
            count = min(size, max(1, request.trials // seeds))
        else:
            count = affordable(self.left() / seeds, size, by_value)
        settings = replace(settings, minutes=longest(self.left() / seeds, count) / 60)
        plan = prepare.plan_for(settings, base, text, stopwatch(None), self.watch)
        vocab_size = text.tokenizer.vocab_size
        model = load_model(base) if base else build_model(model_config(plan.settings, vocab_size))
        settings, measured = fit_to_machine(plan.settings, model)
        self.watch(Planned((*plan.choices, *measured)))
        # All trials have the same text, however short they are; and it is prepared.
        settings = replace(settings, max_bytes=text.max_bytes or text.total)
        prepare.prepare_text(settings, base, self.watch)
        values = {name: each or around(settings, name) for name, each in given.items()}
        own = {name: getattr(settings, name) for name in values}
        own = {name: v if v in values[name] else middle[name] for name, v in own.items()}
        self.seeds = values.pop(SEED, None)
        own.pop(SEED, None)
        size = math.prod(map(len, values.values()))
        points = draw(values, own, count, settings.seed)
        self.state.base = settings.to_dict()
        for point in points:
            self.add(point)
        if request.trials is None:
            others = draw(values, own, min(size, MOST), settings.seed)
            self.state.waiting = [point for point in others if point not in points]
        rounds = len(rungs(len(points)))
        begin = f"{counted(len(points), 'combination')} to begin with"
        if self.seeds:
            begin += f", {counted(len(self.seeds), 'seed')} each"
        self.watch(Note(f"{self.folder}: {begin}, {counted(rounds, 'round')}"))
        if size > len(points) and request.trials is None:
            needed = cost(size) * len(self.seeds or [1]) * (ASKED if by_value else LEAST)
            enough = math.ceil(needed / 60 + self.state.seconds / 60)
            why = f"there is time for {len(points):,} of {size:,} combinations"
            if by_value:
                why += f"; the others are tried if time is left: {named(self.state.waiting)}"
            self.watch(Note(f"{why} (--minutes {enough} for all)"))
        self.save()

    def add(self, point: dict[str, Any]) -> None:
        """A trial for each seed of a combination."""
        for seed in self.seeds or [None]:
            values = point if seed is None else {**point, SEED: seed}
            self.state.trials.append(Trial(len(self.state.trials) + 1, values))

    def all_rounds(self, stop: StopRequest) -> bool:
        """False if somebody wants it to stop."""
        state, number = self.state, 0
        alive = combinations(state.trials)
        while alive:
            trials = [trial for each in alive for trial in each.trials]
            if len(state.budgets) == number:
                units = cost(len(alive)) * len(trials) / len(alive)
                state.budgets.append(max(SHORTEST, self.left() / units))
                self.save()
            rounds = number + len(rungs(len(alive)))
            for place, trial in enumerate(trials, start=1):
                if trial.error is not None or len(trial.results) > number:
                    continue
                if stop.requested or not self.attempt(trial, number):
                    return False
                self.watch(Tried(number + 1, rounds, place, len(trials), trial, self.left()))
            if number == 0 and self.time_for_another(alive):
                self.add(state.waiting.pop(0))
                self.save()
                alive = combinations(state.trials)
                continue
            if len(alive) == 1:
                break
            whole = [
                each for each in sorted(alive, key=Combination.score) if each.score() < math.inf
            ]
            alive, number = whole[: max(1, len(alive) // FACTOR)], number + 1
        return True

    def time_for_another(self, tried: list[Combination]) -> bool:
        """Whether one more combination fits in, by what the first round of those took."""
        results = [trial.results[0] for each in tried for trial in each.trials if trial.results]
        if not self.state.waiting or not results:
            return False
        seeds = len(self.seeds or [None])
        longer = sum(result["stopped"] not in ENOUGH for result in results) / len(results)
        count = len(tried) + 1
        units = 1 + longer * (cost(count) - count)  # its first round, and all further rounds
        return self.left() > units * seeds * fmean(result["seconds"] for result in results)

    def attempt(self, trial: Trial, number: int) -> bool:
        """Train it for a round, and save what came of it; False if it was interrupted."""
        start, budget = time.monotonic(), self.state.budgets[number]
        run, begun = Run(self.folder_of(trial)), False
        try:
            facts = run.facts() if run.exists() else {}
            begun = bool(facts) and len(facts.get("earlier", [])) == number
            if begun and "result" in facts:  # killed before that was in sweep.json
                result = Result(**facts["result"])
            elif number == 0:
                result = train(self.settings(trial), run.path, False, self.pass_on, start)
            elif trial.results[-1]["stopped"] in ENOUGH:
                result = Result(**trial.results[-1])  # more would teach nothing new
            else:
                result = extend(run.path, {"minutes": budget / 60}, self.pass_on, start)
            if result.stopped == "interrupted":
                return False
            if math.isfinite(result.val_bits_per_byte or math.nan):
                trial.results.append(asdict(result))
            else:
                trial.error = "its loss on held-out text is no number"
        except DiskFull:
            raise
        except NanolmError as error:
            trial.error = str(error)
        if begun:  # what it took before a kill counts too
            self.state.seconds += max(0.0, budget - (time.monotonic() - start))
        self.save()
        free_memory()
        return True

    def folder_of(self, trial: Trial) -> Path:
        return self.folder / f"trial-{trial.number:02}"

    def pass_on(self, event: Event) -> None:
        """How far a trial is; the rest is in its log.txt."""
        if isinstance(event, Preparing | Progressed):
            self.watch(event)

    def settings(self, trial: Trial) -> TrainSettings:
        """Those of the plan with the values of this trial, and what goes with them."""
        assert self.state.base is not None
        base = TrainSettings.from_dict(self.state.base)
        assert base.batch and base.context
        other = {name: v for name, v in trial.values.items() if v != getattr(base, name)}
        changes: dict[str, Any] = {}
        for name in other:
            changes |= dict.fromkeys(FOLLOWS.get(name, ()))
        if "preset" in other:
            names = ("layers", "heads", "dim", "context", "batch")
            changes |= {name: getattr(PRESETS[other["preset"]], name) for name in names}
        if "context" in other:  # as many tokens a step
            changes["batch"] = max(1, base.batch * base.context // other["context"])
        if other.get("family") in RECURRENT:
            changes["heads"] = None
        if other.get("dropout"):
            changes["workers"] = 1  # what drops out is one sequence of numbers
        changes = {name: v for name, v in changes.items() if getattr(self.asked, name) is None}
        changes |= trial.values
        settings = replace(base, **changes, minutes=self.state.budgets[0] / 60)
        if base.steps:  # as many passes over the text, at most, as the plan has
            share = base.batch * base.context / ((settings.batch or 1) * (settings.context or 1))
            settings = replace(settings, steps=max(1, round(base.steps * share)))
        return settings

    def finish(self, inside: bool) -> Outcome:
        """Let the best be a run of its own, in this folder or under runs/, and draw the picture."""
        state, trials = self.state, ranked(self.state.trials)
        best, name = trials[0], prepare.run_name(self.asked.corpus[0])
        if best.error is not None:
            why = "\n".join(dict.fromkeys(f"  {trial.error}" for trial in trials))
            raise UsageError(f"no trial came to an end; try others with --over:\n{why}")
        if state.run is None:
            free = (path for path in prepare.numbered(name) if not path.exists())
            state.run = str(self.folder / "best" if inside else next(free))
            self.save()
        if self.folder_of(best).exists():
            self.folder_of(best).rename(state.run)
        run = Run(Path(state.run))
        facts = run.facts()
        run.update({**facts, "result": {**facts["result"], "run": state.run}})
        dots = [
            Dot(trial.values, trial.bits()[0], len(trial.results) > 1, trial is best)
            for trial in trials
            if trial.results
        ]
        title = f"{name}: bits per byte of held-out text after {state.budgets[0]:,.1f} s"
        (self.folder / "sweep.svg").write_text(sweep_svg(dots, title), encoding="utf-8")
        if self.left() > LEFT * 60 * self.minutes and not state.waiting:
            why = "all combinations were tried, and longer training would not help the best"
            self.watch(Note(f"{self.left():.0f} s are left: {why}"))
        state.finished = True
        self.save()
        return Outcome(str(self.folder), state.run, best.score(), trials, state.waiting)


def parse(over: str) -> tuple[Values, list[str]]:
    """The settings that `lr,dropout=0:0.1` names, with their values; and what is wrong with it."""
    hints = get_type_hints(TrainSettings)
    names = [each.name for each in fields(TrainSettings)]
    found: Values = {}
    problems = []
    for part in filter(None, (part.strip() for part in over.split(","))):
        word, given, after = part.partition("=")
        name = "start_from" if word == "from" else word.strip().replace("-", "_")
        if name in SAME:
            problems.append(f"--over {word}: leave it out; trials could not be compared")
        elif name not in names:
            problems.append(f"--over {word}: no such setting" + did_you_mean(name, names))
        elif not given and name not in AROUND:
            problems.append(f"--over {word}: which values? Type --over {word}=ONE:ANOTHER")
        else:
            kind = (get_args(hints[name]) or (hints[name],))[0]
            each = found.setdefault(name, [])
            for value in (value.strip() for value in after.split(":")) if given else ():
                try:
                    each.append(WORDS[value.lower()] if kind is bool else kind(value))
                except (ValueError, KeyError):
                    what = {bool: "true or false", int: "a whole number"}.get(kind, "a number")
                    problems.append(f"--over {word}: {value!r} is not {what}")
            found[name] = list(dict.fromkeys(each))
    if not found and not problems:
        problems.append("say what to try: --over lr,dropout, or --over lr=0.001:0.003:0.01")
    return found, problems


def around(settings: TrainSettings, name: str) -> list[Any]:
    """Values to try, what the plan has among them."""
    value = getattr(settings, name)
    if value is None:
        raise UsageError(f"--over {name}: there is no such thing here; leave it out")
    if name in THESE:
        return sorted({*THESE[name], value})
    if name in PLUS:
        return sorted({max(RANGES[name][0], value + more) for more in PLUS[name]})
    if isinstance(value, int):
        return sorted({max(1, round(value * times)) for times in TIMES[name]})
    return sorted({value if times == 1 else float(f"{value * times:.2g}") for times in TIMES[name]})


def draw(values: Values, own: dict[str, Any], count: int, seed: int) -> list[dict[str, Any]]:
    """So many points of the grid, `own` first; no point twice, and all if they are few."""
    size = math.prod(len(each) for each in values.values())

    def point(index: int) -> dict[str, Any]:
        found = {}
        for name, each in values.items():
            index, place = divmod(index, len(each))
            found[name] = each[place]
        return found

    chosen = range(size) if size <= count else random.Random(seed).sample(range(size), count)
    others = [found for index in chosen if (found := point(index)) != own]
    return [own, *others][:count]


def rungs(trials: int) -> list[int]:
    """How many are in each round."""
    counts = [trials]
    while counts[-1] > 1:
        counts.append(max(1, counts[-1] // FACTOR))
    return counts


def cost(trials: int) -> int:
    """Of all rounds, in times that a trial takes in the first."""
    return sum(count * FACTOR**number for number, count in enumerate(rungs(trials)))


def affordable(seconds: float, size: int, by_value: bool) -> int:
    """How many of `size` combinations to begin with, in that time; of those that were asked for
    by their values, as many as possible."""
    if not by_value:
        return min(size, how_many(seconds))
    fitting = (count for count in range(min(size, MOST), 1, -1) if seconds / cost(count) >= ASKED)
    return next(fitting, 1)


def no_model(settings: TrainSettings, values: Values) -> list[str]:
    """What is wrong with all combinations of the values that are given, if one is with each."""
    found: dict[str, None] = {}
    given = {name: each for name, each in values.items() if each}
    for point in islice(product(*given.values()), MOST):
        tried = replace(settings, **dict(zip(given, point, strict=True)))
        if not (misfits := tried.model_problems()):
            return []
        found |= dict.fromkeys(misfits)
    return list(found)


def combinations(trials: list[Trial]) -> list[Combination]:
    """Trials that differ in nothing but their seed, together, in the order they have."""
    found: dict[tuple[Any, ...], Combination] = {}
    for trial in trials:
        values = {name: value for name, value in trial.values.items() if name != SEED}
        key = tuple(values.values()) if SEED in trial.values else (trial.number,)
        found.setdefault(key, Combination(values, [])).trials.append(trial)
    return list(found.values())


def named(points: list[dict[str, Any]], most: int = 10) -> str:
    """Combinations in words."""
    words = [" ".join(f"{name}={shown(value)}" for name, value in each.items()) for each in points]
    more = f"; and {len(words) - most:,} more" if len(words) > most else ""
    return "; ".join(words[:most]) + more


def how_many(seconds: float) -> int:
    """Trials, in that time."""
    return next((count for count in COUNTS if seconds / cost(count) >= LEAST), 1)


def longest(seconds: float, trials: int) -> float:
    """Seconds of training that the best will have: each round goes on from before the decay."""
    each, total = max(SHORTEST, seconds / cost(trials)), 0.0
    for number in range(len(rungs(trials))):
        total = (1 - DECAY) * total + each * FACTOR**number
    return total


def ranked(trials: list[Trial]) -> list[Trial]:
    """The best first: by the mean over seeds, and of one combination by the score itself."""
    order = sorted(combinations(trials), key=Combination.score)
    return [trial for each in order for trial in sorted(each.trials, key=Trial.score)]
