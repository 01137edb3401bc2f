"""Hyperparameter search: try many settings briefly, and train the better ones for longer.

    >>> sweep(SweepRequest(TrainSettings(("a.txt",), minutes=30.0), over="lr,dropout=0:0.1:0.2"))

Every trial gets a short time, the best third of them three times as much, and so on (halving.py),
so each round takes about equally long. A trial is a normal run. A longer one resumes from where its
learning rate began to decay. Trials that differ only in their seed advance or stop together, by
their mean. Combinations that did not fit are tried if others end early, or listed. All state is in
sweep.json, so the same request resumes after a kill.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from nanolm.errors import DataError, DiskFull, ModelError, NanolmError, UsageError, refuse
from nanolm.files import write_atomically
from nanolm.formats import counted
from nanolm.model.build import build_model
from nanolm.model.device import choose_device, choose_dtype, free_memory
from nanolm.model.huggingface import load_model
from nanolm.planning.sizes import model_config
from nanolm.planning.tuning import fit_to_machine
from nanolm.pretraining.begin import numbered, pipe_problems, run_name, with_absolute_paths
from nanolm.pretraining.extend import extend
from nanolm.pretraining.ledger import Ledger, opened
from nanolm.pretraining.prepare import find_base, plan_for, prepare_text, text_deadline
from nanolm.pretraining.session import stopwatch
from nanolm.pretraining.train import TrainResult, train
from nanolm.report.sweep import Dot, draw_sweep
from nanolm.runs.folder import Run
from nanolm.sweep import halving, space
from nanolm.sweep.halving import cost, rungs
from nanolm.sweep.result import SweepResult, SweepState, SweepTrial, combinations, in_words, ranked
from nanolm.sweep.space import AROUND, BUDGETS, SEED, Point
from nanolm.training.events import Event, Note, Planned
from nanolm.training.interrupt import StopRequest
from nanolm.training.settings import TrainSettings, option

TIME_LEFT = 0.1  # of the budget; if more remains at the end, a note says why
CONVERGED = ("enough", "steps")  # reasons a trial stopped that more time would not change


@dataclass(frozen=True)
class SweepRequest:
    settings: TrainSettings  # `minutes` is for the whole sweep
    over: str  # lr,dropout=0:0.1
    trials: int | None = None

    def check(self) -> None:
        """Raise one UsageError that lists every problem, with what to type instead."""
        settings = replace(self.settings, **dict.fromkeys(BUDGETS))  # type: ignore[arg-type]
        values, mistakes = space.parse(self.over)
        problems = settings.problems() + mistakes
        for name, each in values.items():
            fixed = getattr(settings, name)
            if each and fixed != getattr(TrainSettings(()), name):
                both = f"{option(name)} {fixed} and --over {name}="
                problems.append(f"{both}: give only one of them")
                continue
            for value in each:
                tried = replace(settings, **{name: value})
                misfits = tried.model_problems()  # with another value it may fit
                problems += [p for p in tried.problems() if p not in (*problems, *misfits)]
        if not problems:
            problems += space.misfits(settings, values)
        for name in BUDGETS:
            if (value := getattr(self.settings, name)) is not None:
                cure = "a sweep is limited by time; use --minutes"
                problems.append(f"{option(name)} {value}: {cure}")
        if self.trials is not None and not 1 <= self.trials <= 1_000:
            problems.append(f"--trials {self.trials}: must be from 1 to 1000")
        problems += pipe_problems(settings, "a sweep reads its text for every trial")
        refuse(problems)


@dataclass(frozen=True)
class TrialEnded:
    round: int
    rounds: int
    number: int  # in this round
    of: int
    trial: SweepTrial
    seconds_left: float  # for the whole sweep


Watch = Callable[[Event | TrialEnded], None]


def sweep(
    request: SweepRequest,
    out: str | Path | None = None,
    watch: Watch = lambda event: None,
    started: float | None = None,
) -> SweepResult:
    """Try settings, or resume an unfinished sweep; the best trial becomes a normal run."""
    clock = time.monotonic() if started is None else started
    request.check()
    settings = with_absolute_paths(request.settings)
    asked = {"settings": settings.to_dict(), "over": request.over, "trials": request.trials}
    with opened(SweepState, settings, "sweep", out, asked) as (file, state):
        work = Sweep(file, state, settings, watch, clock)
        if state.base is None:
            work.plan(request)
        else:
            watch(Note(f"resuming {work.folder}"))
        with StopRequest() as stop:
            done = state.run is not None or work.all_rounds(stop)
        interrupted = SweepResult(str(work.folder), None, None, ranked(state.trials))
        return work.finish(out is not None) if done else interrupted


class Sweep(Ledger[SweepState]):
    def __init__(
        self, file: Path, state: SweepState, asked: TrainSettings, watch: Watch, clock: float
    ) -> None:
        assert asked.minutes
        super().__init__(file, state, asked.minutes, clock, watch)
        self.asked = asked
        # [None] if the seed is not varied.
        self.seeds: list[Any] = list(dict.fromkeys(t.values.get(SEED) for t in state.trials))

    def plan(self, request: SweepRequest) -> None:
        """Choose the settings that all trials share, and the combinations to try."""
        self.save()
        given, _ = space.parse(request.over)
        sizes = {name: len(each or AROUND[name]) for name, each in given.items()}
        seeds = sizes.pop(SEED, 1)
        size, by_value = math.prod(sizes.values()), all(given.values())
        middle = {name: each[(len(each) - 1) // 2] for name, each in given.items() if each}
        settings = replace(self.asked, teachers=0, **middle)
        choose_dtype(settings.dtype, choose_device(settings.device)[0])  # fails early
        base = find_base(settings, self.watch)
        until = text_deadline(settings, lambda: 60 * self.minutes - self.left())
        text = prepare_text(settings, base, self.watch, until)
        seconds = self.left() / seeds
        count = halving.affordable(seconds, size, by_value)
        if request.trials is not None:
            count = min(size, max(1, request.trials // seeds))
        settings = replace(settings, minutes=halving.longest(seconds, count) / 60)
        plan = plan_for(settings, base, text, stopwatch(None), self.watch)
        vocab_size = text.tokenizer.vocab_size
        model = load_model(base) if base else build_model(model_config(plan.settings, vocab_size))
        settings, measured = fit_to_machine(plan.settings, model)
        self.watch(Planned((*plan.choices, *measured)))
        # All trials use the same text, however short they are, and it is prepared now.
        settings = replace(settings, max_bytes=text.max_bytes or text.total)
        prepare_text(settings, base, self.watch)
        self.state.base = settings.to_dict()
        values = {name: each or space.around(settings, name) for name, each in given.items()}
        planned = {name: getattr(settings, name) for name in values}
        own = {name: v if v in values[name] else middle[name] for name, v in planned.items()}
        self.seeds = values.pop(SEED, [None])
        own.pop(SEED, None)
        size = math.prod(map(len, values.values()))
        points = space.draw(values, own, count, settings.seed)
        for point in points:
            self.add(point)
        if request.trials is None:
            others = space.draw(values, own, min(size, space.MOST_COMBINATIONS), settings.seed)
            self.state.waiting = [point for point in others if point not in points]
        first = f"starting with {counted(len(points), 'combination')}"
        each = f", {counted(len(self.seeds), 'seed')} each" if SEED in given else ""
        rounds = counted(len(rungs(len(points))), "round")
        self.watch(Note(f"{self.folder}: {first}{each}, {rounds}"))
        if size > len(points) and request.trials is None:
            least = halving.FIRST_ROUND_SECONDS
            why = f"there is only time for {len(points):,} of {size:,} combinations"
            if by_value:
                least = halving.FIRST_ROUND_SECONDS_BY_VALUE
                why += f"; the others are tried if time remains: {in_words(self.state.waiting)}"
            needed = cost(size) * len(self.seeds) * least + self.state.seconds
            self.watch(Note(f"{why} (use --minutes {math.ceil(needed / 60)} to try all)"))
        self.save()

    def add(self, point: Point) -> None:
        """Add a trial for each seed of a combination."""
        for seed in self.seeds:
            values = point if seed is None else {**point, SEED: seed}
            self.state.trials.append(SweepTrial(len(self.state.trials) + 1, values))

    def all_rounds(self, stop: StopRequest) -> bool:
        """Returns False if it was interrupted."""
        state, number = self.state, 0
        alive = combinations(state.trials)
        while alive:
            trials = [trial for each in alive for trial in each.trials]
            if len(state.budgets) == number:
                units = cost(len(alive)) * len(trials) / len(alive)
                state.budgets.append(max(halving.SHORTEST_TRIAL, self.left() / units))
                self.save()
            rounds = number + len(rungs(len(alive)))
            for place, trial in enumerate(trials, start=1):
                if trial.error is not None or len(trial.results) > number:
                    continue
                if stop.requested or not self.attempt(trial, number):
                    return False
                self.watch(TrialEnded(number + 1, rounds, place, len(trials), trial, self.left()))
            if number == 0 and self.time_for_another(len(alive) + 1, trials):
                self.add(state.waiting.pop(0))
                self.save()
                alive = combinations(state.trials)
                continue
            if len(alive) == 1:
                break
            # Rank by this round, even if later ones have results from before a kill.
            order = sorted((each.score(number), place) for place, each in enumerate(alive))
            best = order[: max(1, len(alive) // halving.FACTOR)]
            alive, number = [alive[place] for score, place in best if score < math.inf], number + 1
        return True

    def time_for_another(self, count: int, tried: list[SweepTrial]) -> bool:
        """Whether one more combination, `count` in all, fits, judging by the first round so far."""
        results = [trial.results[0] for trial in tried if trial.results]
        if not self.state.waiting or not results:
            return False
        longer = fmean(result["stopped"] not in CONVERGED for result in results)
        seconds = fmean(result["seconds"] for result in results)
        units = 1 + longer * (cost(count) - count)  # its first round, and all further rounds
        return self.left() > units * len(self.seeds) * seconds

    def attempt(self, trial: SweepTrial, number: int) -> bool:
        """Train a trial for one round and save the result; False if it was interrupted."""
        start, budget = time.monotonic(), self.state.budgets[number]
        run, begun = Run(self.folder_of(trial)), False
        run.settle(lambda text: self.watch(Note(text)))
        try:
            facts = run.facts() if run.exists() else {}
            begun = bool(facts) and len(facts.get("earlier", [])) == number
            if begun and "result" in facts:  # killed before sweep.json had the result
                result = TrainResult(**facts["result"])
                run.extending.unlink(missing_ok=True)
            elif number == 0:
                assert self.state.base is not None
                plan = TrainSettings.from_dict(self.state.base)
                settings = space.settings_at(trial.values, plan, self.asked, budget)
                result = train(settings, run.path, self.pass_on, start)
            elif trial.results[-1]["stopped"] in CONVERGED:
                result = TrainResult(**trial.results[-1])  # training longer changes nothing
            else:
                result = extend(run.path, {"minutes": budget / 60}, self.pass_on, start)
            if result.stopped == "interrupted":
                return False
            if math.isfinite(result.val_bits_per_byte or math.nan):
                trial.results.append(asdict(result))
            else:
                trial.error = "its validation loss is not finite"
        except DiskFull:
            raise
        except NanolmError as error:
            if number and isinstance(error, DataError | ModelError):  # not due to the settings
                self.watch(Note(f"{error}; using the previous result of {run.path}"))
                trial.results.append(trial.results[-1])
            else:
                trial.error = str(error)
        if begun:  # the time before a kill counts too
            self.state.seconds += max(0.0, budget - (time.monotonic() - start))
        self.save()
        free_memory()
        return True

    def folder_of(self, trial: SweepTrial) -> Path:
        return self.folder / f"trial-{trial.number:02}"

    def finish(self, inside: bool) -> SweepResult:
        """Move the best trial to its own run, in this folder or under runs/, and draw the chart."""
        state, trials = self.state, ranked(self.state.trials)
        best, name = trials[0], run_name(self.asked.corpus[0])
        if best.error is not None:
            why = "\n".join(dict.fromkeys(f"  {trial.error}" for trial in trials))
            raise UsageError(f"no trial finished:\n{why}\nTry other values with --over")
        if self.folder_of(best).exists():
            if state.run is None or Path(state.run).exists():  # the name was taken meanwhile
                free = (path for path in numbered(name) if not path.exists())
                state.run = str(self.folder / "best" if inside else next(free))
                self.save()
            self.folder_of(best).rename(state.run)
        assert state.run is not None
        facts = Run(Path(state.run)).facts()
        facts["result"]["run"] = state.run
        Run(Path(state.run)).update(facts)
        ended = [trial for trial in trials if trial.results]
        dots = [Dot(t.values, t.bits()[0], len(t.results) > 1, t is best) for t in ended]
        title = f"{name}: validation bits per byte after {state.budgets[0]:,.1f} s"
        write_atomically(self.folder / "sweep.svg", draw_sweep(dots, title).svg)
        if self.left() > TIME_LEFT * 60 * self.minutes and not state.waiting:
            why = "all combinations were tried, and longer training would not improve the best"
            self.watch(Note(f"finished with {self.left():.0f} s remaining: {why}"))
        state.finished = True
        self.save()
        return SweepResult(str(self.folder), state.run, best.score(), trials, state.waiting)
