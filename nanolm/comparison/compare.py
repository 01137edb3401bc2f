"""The lectures' models side by side, within a time; what is done is kept.

    >>> compare(Request(FinetuneSettings(), minutes=10), out=None, watch=print)

Every model learns from the same split; with several seeds, all models with the first one, then all
with the next, so that a comparison that ends early is still one. All that is known is in
compare.json, so the same request goes on after a kill with the row that it was at.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nanolm.classification.settings import FinetuneSettings
from nanolm.comparison.corpus import Corpus
from nanolm.comparison.labelled import ROWS, Labelled
from nanolm.comparison.learning import Row, Stopped
from nanolm.comparison.lengths import step_times
from nanolm.errors import DataError, UsageError, did_you_mean
from nanolm.model.device import choose_device, choose_dtype, free_memory
from nanolm.pretraining.begin import choose_folder, reports, run_name, with_absolute_paths
from nanolm.report.bars import Bar, bars_svg
from nanolm.report.curves import Chart, Panel, Series, curves_svg
from nanolm.runs.ledger import Ledger, LedgerState, read_ledger, working_on
from nanolm.training.events import Event, Note, Preparing, Progressed
from nanolm.training.interrupt import StopRequest
from nanolm.training.settings import TrainSettings

FILE = "compare.json"
LEAST = 1.0  # seconds for a row, however little time is left
ENDING = 9.0  # seconds, but not more than a tenth, for what comes after the last row has learned
AGAIN = 0.75  # of the time of a round has to be left for another seed


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    settings: FinetuneSettings | TrainSettings
    minutes: float = 10.0
    only: tuple[str, ...] = ()  # rows; none: all there are
    seeds: int | None = None  # None: as many as are worth it, in the time

    def check(self) -> None:
        """Raise one UsageError that names everything that is wrong, with what to type instead."""
        problems = self.settings.problems()
        known = list(self.rows())
        for name in self.only:
            if name == "pretrained" and name not in known:
                problems.append("--only pretrained needs --from RUN, a trained model")
            elif name not in known:
                there = f"there is {', '.join(known)}"
                problems.append(f"--only {name}: {there}{did_you_mean(name, known)}")
        if not 0 < self.minutes <= 100_000:
            problems.append(f"--budget {self.minutes:g}: must be above 0, in minutes")
        if self.seeds is not None and not 1 <= self.seeds <= 100:
            problems.append(f"--seeds {self.seeds}: must be from 1 to 100")
        if problems:
            raise UsageError("\n".join(problems))

    def rows(self) -> dict[str, Row]:
        """Those that these settings can have."""
        if isinstance(self.settings, TrainSettings):
            return Corpus(self.settings, lambda event: None).rows
        without = ("pretrained",) if self.settings.start_from is None else ()
        return {name: row for name, row in ROWS.items() if name not in without}


@dataclass
class State(LedgerState):
    """compare.json"""

    data: str = ""  # its fingerprint
    found: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)  # by row and seed
    lengths: dict[str, list[tuple[int, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Learned:
    """A row came to its end."""

    row: Row
    seed: int
    result: dict[str, Any]
    seconds_left: float


@dataclass(frozen=True)
class Compared:
    """A row of the table: means over the seeds, and for what is measured its standard deviation."""

    name: str
    title: str
    teaches: str
    seeds: int
    means: dict[str, float]
    spread: dict[str, float]
    results: list[dict[str, Any]]  # one for each seed


@dataclass(frozen=True)
class Outcome:
    """What it came to: what `nanolm compare --json` prints."""

    folder: str
    finished: bool
    measure: str  # accuracy, or bits_per_byte
    rows: list[Compared]
    lengths: dict[str, list[tuple[int, float]]]  # seconds of a step by family, on a plain text


Watch = Callable[[Event | Learned], None]


def compare(
    request: Request,
    out: str | Path | None = None,
    watch: Watch = lambda event: None,
    started: float | None = None,
) -> Outcome:
    """Train all that is to be compared, or go on with what is not finished."""
    clock = time.monotonic() if started is None else started
    request.check()
    settings = with_absolute_paths(request.settings)
    device, _ = choose_device(settings.device)
    choose_dtype(settings.dtype, device)  # one that is not there is better told at once
    settings = replace(settings, device=device)
    asked = json.loads(json.dumps({**asdict(request), "settings": settings.to_dict()}))

    def fits(folder: Path) -> bool | None:
        state = read_ledger(folder / FILE, State)
        return None if state is None else state.asked == asked

    text = getattr(settings, settings.texts)[0]
    folder = choose_folder(text, "compare", out, fits)
    with working_on(folder), StopRequest() as stop:
        state = read_ledger(folder / FILE, State) or State(asked)
        request = replace(request, settings=settings)
        return Comparison(folder, state, request, watch, clock).run(stop)


class Comparison(Ledger[State]):
    """One at work."""

    def __init__(
        self, folder: Path, state: State, request: Request, watch: Watch, clock: float
    ) -> None:
        super().__init__(folder / FILE, state, request.minutes, clock)
        self.folder, self.request, self.watch = folder, request, watch

    def run(self, stop: StopRequest) -> Outcome:
        settings = self.request.settings
        subject: Labelled | Corpus
        if isinstance(settings, TrainSettings):
            subject = Corpus(settings, self.pass_on)
        else:
            subject = Labelled(settings, self.pass_on, stop)
        chosen = self.request.only or tuple(subject.rows)
        rows = {name: row for name, row in subject.rows.items() if name in chosen}
        if self.state.found:
            self.watch(Note(f"going on with {self.folder}"))
        if self.state.data not in ("", data := subject.fingerprint()):
            raise DataError(f"the data is not what {self.folder} was begun with; try another --out")
        self.state.data = data
        if not self.state.finished:
            self.save()
            try:
                if isinstance(settings, TrainSettings):
                    self.measure_lengths(settings)
                self.all_rows(subject, rows, stop)
            except Stopped:
                self.save()
                return self.outcome(subject.measure, rows)
            self.state.finished = True
            self.save()
        outcome = self.outcome(subject.measure, rows)
        self.draw(outcome, run_name(getattr(settings, settings.texts)[0]))
        return outcome

    def all_rows(self, subject: Labelled | Corpus, rows: dict[str, Row], stop: StopRequest) -> None:
        first = self.request.settings.seed
        count = self.request.seeds or subject.seeds()
        todo = [(seed, name) for seed in range(first, first + count) for name in rows]
        todo = [(seed, name) for seed, name in todo if str(seed) not in self.results(name)]
        begin = self.left()
        for place, (seed, name) in enumerate(todo):
            if seed != first and name == next(iter(rows)):
                took, begin = begin - self.left(), self.left()
                if self.request.seeds is None and self.left() < AGAIN * took:
                    self.watch(Note(f"no time for more than {seed - first} of {count} seeds"))
                    return
            if stop.requested:
                raise Stopped
            ahead = sum(rows[each].share for _, each in todo[place:])
            left = self.left() - min(ENDING, 6 * self.request.minutes)
            seconds = max(LEAST, left * rows[name].share / ahead)
            folder = self.folder / name / f"seed-{seed}"
            result = subject.learn(name, seed, seconds, folder)
            self.state.found.setdefault(name, {})[str(seed)] = result
            self.save()
            self.watch(Learned(rows[name], seed, result, self.left()))
            free_memory()

    def measure_lengths(self, settings: TrainSettings) -> None:
        """First: what it takes is not known before, and the rows share what is left."""
        if not self.state.lengths:
            families = ["rnn", "lstm", settings.family or "modern"]
            _, report = reports(self.pass_on)
            self.state.lengths = step_times(settings.device, families, report)
            self.save()

    def results(self, name: str) -> dict[str, dict[str, Any]]:
        return self.state.found.get(name, {})

    def pass_on(self, event: Event) -> None:
        """How far a row is; what else it has to say is in the log of its run."""
        if isinstance(event, Preparing | Progressed):
            self.watch(event)

    def outcome(self, measure: str, rows: dict[str, Row]) -> Outcome:
        compared = [
            summed_up(name, row, list(self.results(name).values()), measure)
            for name, row in rows.items()
            if self.results(name)
        ]
        state = self.state
        return Outcome(str(self.folder), state.finished, measure, compared, state.lengths)

    def draw(self, outcome: Outcome, name: str) -> None:
        if outcome.measure == "accuracy":
            bars = [
                Bar(row.title, 100 * row.means["accuracy"], 100 * row.spread["accuracy"])
                for row in outcome.rows
            ]
            picture = bars_svg(bars, f"{name}: held-out texts told right", "{:.1f} %".format)
        else:
            lines = [Series(row.title, row.results[0]["curve"]) for row in outcome.rows]
            panel = Panel("bits per byte", lines)
            picture = curves_svg(Chart(f"{name}: what is learned in the time", [panel], "seconds"))
        (self.folder / "compare.svg").write_text(picture, encoding="utf-8")
        if outcome.lengths:
            lines = [
                Series(family, [(length, 1000 * each) for length, each in times])
                for family, times in outcome.lengths.items()
            ]
            panel = Panel("milliseconds a step", lines)
            title = "one sequence a step, the longer it is"
            picture = curves_svg(Chart(title, [panel], "tokens", logarithmic=True))
            (self.folder / "lengths.svg").write_text(picture, encoding="utf-8")


def summed_up(name: str, row: Row, results: list[dict[str, Any]], measure: str) -> Compared:
    """Means over the seeds; of what is measured also the standard deviation."""
    numbers = {
        key: [float(result[key]) for result in results]
        for key, value in results[0].items()
        if isinstance(value, int | float)
    }
    return Compared(
        name,
        row.title,
        row.teaches,
        len(results),
        {key: statistics.mean(values) for key, values in numbers.items()},
        {
            key: statistics.stdev(values) if len(values) > 1 else 0.0
            for key, values in numbers.items()
            if key in (measure, f"test_{measure}")
        },
        results,
    )
