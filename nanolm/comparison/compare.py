"""Compare the models of the lectures within a time budget; resumes after a kill.

    >>> compare(CompareRequest(FinetuneSettings(), minutes=10), out=None, watch=print)

Every model is trained on the same split. With several seeds, all models use the first seed, then
all the next, so that a comparison that ends early is still fair. compare.json has all results.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nanolm.classification.settings import FinetuneSettings
from nanolm.comparison.classifiers import CLASSIFIERS, ClassifierComparison, classifier_kinds
from nanolm.comparison.language_models import LANGUAGE_MODELS, LanguageModelComparison
from nanolm.comparison.pairs import PAIR_MODELS, PairComparison
from nanolm.comparison.step_times import step_times
from nanolm.comparison.training import ModelKind, StopTraining
from nanolm.errors import DataError, did_you_mean, refuse
from nanolm.files import write_atomically
from nanolm.model.device import choose_device, choose_dtype, free_memory
from nanolm.pairs.metrics import LengthScores, length_chart
from nanolm.pairs.settings import PairSettings
from nanolm.pretraining.begin import pipe_problems, reports, run_name, with_absolute_paths
from nanolm.pretraining.ledger import Ledger, LedgerState, opened
from nanolm.report.bars import Bar, draw_bars
from nanolm.report.curves import Chart, Panel, Series, mean_series
from nanolm.report.svg import Drawing
from nanolm.training.events import Event, Note
from nanolm.training.interrupt import StopRequest
from nanolm.training.settings import TrainSettings

MEASURING_SHARE = 0.5  # of the time, at most, to measure steps; training gets the rest
MIN_ROW_SECONDS = 1.0  # however little time is left
RESERVED_SECONDS = 9.0  # at most a tenth of the time, for the work after the last row
NEXT_SEED_SHARE = 0.75  # of the time for one seed must remain to start another


@dataclass(frozen=True)
class CompareRequest:
    settings: FinetuneSettings | TrainSettings | PairSettings
    minutes: float = 10.0
    only: tuple[str, ...] = ()  # rows; empty: all
    seeds: int | None = None  # None: as many as are useful and fit in the time

    def check(self) -> None:
        """Raise one UsageError that lists every problem, with what to type instead."""
        problems, known = self.settings.problems(), list(self.kinds())
        for name in self.only:
            if name == "pretrained" and name not in known:
                problems.append("--only pretrained needs --from RUN, a pretrained model")
            elif name not in known:
                there = ", ".join(known) + did_you_mean(name, known)
                problems.append(f"--only {name}: choose from {there}")
        if not 0 < self.minutes <= 100_000:
            problems.append(
                f"--budget {self.minutes:g}: must be above 0 and at most 100,000 minutes"
            )
        if self.seeds is not None and not 1 <= self.seeds <= 100:
            problems.append(f"--seeds {self.seeds}: must be from 1 to 100")
        if not isinstance(self.settings, FinetuneSettings):
            problems += pipe_problems(self.settings, "a comparison reads its data for every model")
        refuse(problems)

    def kinds(self) -> dict[str, ModelKind]:
        if isinstance(self.settings, TrainSettings):
            return LANGUAGE_MODELS
        if isinstance(self.settings, PairSettings):
            return PAIR_MODELS
        return classifier_kinds(self.settings)


@dataclass
class CompareState(LedgerState):
    """compare.json"""

    data: str = ""  # fingerprint of the data
    measure: str = ""  # as in CompareResult; empty if an older version wrote it
    found: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)  # by row, seed
    lengths: dict[str, list[tuple[int, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class RowTrained:
    row: ModelKind
    seed: int
    result: dict[str, Any]
    seconds_left: float


@dataclass(frozen=True)
class ComparedRow:
    """A row of the table: means over the seeds, and the standard deviation of the main measure."""

    name: str
    title: str
    teaches: str
    seeds: int
    means: dict[str, float]
    spread: dict[str, float]
    results: list[dict[str, Any]]  # one for each seed


@dataclass(frozen=True)
class CompareResult:
    """The output of `nanolm compare --json`."""

    folder: str
    finished: bool
    measure: str  # accuracy, bits_per_byte, exact or bleu
    rows: list[ComparedRow]
    lengths: dict[str, list[tuple[int, float]]]  # seconds per step by family; language models only


Watch = Callable[[Event | RowTrained], None]


def compare(
    request: CompareRequest,
    out: str | Path | None = None,
    watch: Watch = lambda event: None,
    started: float | None = None,
) -> CompareResult:
    """Train all models, or resume an unfinished comparison with these settings."""
    clock = time.monotonic() if started is None else started
    request.check()
    device, _ = choose_device(request.settings.device)
    choose_dtype(request.settings.dtype, device)  # fails early if this machine lacks it
    settings = replace(with_absolute_paths(request.settings), device=device)
    asked = json.loads(json.dumps({**asdict(request), "settings": settings.to_dict()}))
    request = replace(request, settings=settings)
    with opened(CompareState, settings, "compare", out, asked, again=True) as (file, state):
        work = Comparison(file, state, request, watch, clock)
        with work.stop:
            return work.run()


class Comparison(Ledger[CompareState]):
    def __init__(
        self, file: Path, state: CompareState, request: CompareRequest, watch: Watch, clock: float
    ) -> None:
        super().__init__(file, state, request.minutes, clock, watch)
        self.request, self.stop = request, StopRequest()
        self.task: ClassifierComparison | LanguageModelComparison | PairComparison
        if isinstance(request.settings, TrainSettings):
            self.task = LanguageModelComparison(request.settings, self.pass_on, self.stop)
        elif isinstance(request.settings, PairSettings):
            self.task = PairComparison(request.settings, self.pass_on)
        else:
            self.task = ClassifierComparison(request.settings, self.pass_on, self.stop)
        kinds = self.task.kinds
        self.kinds = {name: kinds[name] for name in kinds if name in (request.only or kinds)}

    def run(self) -> CompareResult:
        settings, state = self.request.settings, self.state
        if state.found:
            self.watch(Note(f"resuming {self.folder}"))
        if state.data not in ("", data := self.task.fingerprint()):
            what = f"the data has changed since {self.folder} was started"
            raise DataError(f"{what}; use another --out")
        state.data, state.measure = data, self.task.measure
        if not state.finished:
            self.save()
            try:
                # First, since its time is not known in advance.
                if isinstance(settings, TrainSettings) and not state.lengths:
                    families = ["rnn", "lstm", settings.family or "modern"]
                    how = (reports(self.pass_on)[1], MEASURING_SHARE * self.left())
                    state.lengths = step_times(settings.device, families, *how)
                    self.save()
                self.train_rows()
                state.finished = True
            except StopTraining:
                pass
            self.save()
        result = result_of(self.folder, state, self.kinds)
        if state.finished:
            draw(result, run_name(getattr(settings, settings.texts)[0]))
        return result

    def train_rows(self) -> None:
        first, found = self.request.settings.seed, self.state.found
        count = self.request.seeds or self.task.seeds
        pairs = ((seed, name) for seed in range(first, first + count) for name in self.kinds)
        todo = [(seed, name) for seed, name in pairs if str(seed) not in found.get(name, {})]
        begin = self.left()
        for place, (seed, name) in enumerate(todo):
            if seed != first and name == next(iter(self.kinds)):
                took, begin = begin - self.left(), self.left()
                if self.request.seeds is None and self.left() < NEXT_SEED_SHARE * took:
                    self.watch(Note(f"there is only time for {seed - first} of {count} seeds"))
                    return
            if self.stop.requested:
                raise StopTraining
            left = self.left() - min(RESERVED_SECONDS, 6 * self.request.minutes)
            share = self.kinds[name].share / sum(self.kinds[each].share for _, each in todo[place:])
            seconds = max(MIN_ROW_SECONDS, left * share)
            result = self.task.train(name, seed, seconds, self.folder / name / f"seed-{seed}")
            found.setdefault(name, {})[str(seed)] = result
            self.save()
            self.watch(RowTrained(self.kinds[name], seed, result, self.left()))
            free_memory()


def result_of(folder: Path, state: CompareState, kinds: Mapping[str, ModelKind]) -> CompareResult:
    rows = [
        averaged(name, kind, list(state.found[name].values()), state.measure)
        for name, kind in kinds.items()
        if name in state.found
    ]
    return CompareResult(str(folder), state.finished, state.measure, rows, state.lengths)


def draw(result: CompareResult, name: str) -> None:
    for stem, picture in pictures(result, name).items():
        write_atomically(Path(result.folder) / f"{stem}.svg", picture.svg)


def pictures(result: CompareResult, name: str) -> dict[str, Chart | Drawing]:
    """compare.svg and, for language models, lengths.svg."""
    rows, drawn = result.rows, dict[str, Chart | Drawing]()
    if (key := result.measure) == "accuracy":
        bars = [Bar(row.title, 100 * row.means[key], 100 * row.spread[key]) for row in rows]
        chance = next(
            (bar.value for bar in bars if bar.name == CLASSIFIERS["majority"].title), None
        )
        title = f"{name}: validation accuracy"
        drawn["compare"] = draw_bars(bars, title, "{:.1f}%".format, "accuracy (%)", chance)
    elif key in ("exact", "bleu"):
        groups = {row.title: row.results[0]["by_length"] for row in rows}
        scores = {model: [LengthScores(**each) for each in groups[model]] for model in groups}
        chart = length_chart(f"{name}: validation pairs by length", scores, "characters")
        drawn["compare"] = replace(chart, panels=chart.panels[: 1 if key == "exact" else 2])
    else:
        runs = {row.title: [Series("", each["curve"]) for each in row.results] for row in rows}
        curves = [mean_series(title, of_seeds) for title, of_seeds in runs.items()]
        counts = next(((row.means[key], row.title) for row in rows if row.name == "ngram"), None)
        panels = [Panel("validation bits per byte", curves, baseline=counts)]
        title = f"{name}: validation bits per byte"
        drawn["compare"] = Chart(title, panels, "seconds of training")
    if result.lengths:
        times = result.lengths.items()
        curves = [Series(name, [(n, 1000 * s) for n, s in pairs]) for name, pairs in times]
        panels = [Panel("milliseconds per step", curves)]
        title = "training step time by sequence length"
        drawn["lengths"] = Chart(title, panels, "tokens in the sequence", logarithmic=True)
    return drawn


def averaged(
    name: str, kind: ModelKind, results: list[dict[str, Any]], measure: str
) -> ComparedRow:
    count, names = len(results), [k for k, v in results[0].items() if isinstance(v, int | float)]
    names = [key for key in names if all(key in result for result in results)]
    numbers = {key: [float(result[key]) for result in results] for key in names}
    means = {key: statistics.mean(values) for key, values in numbers.items()}
    measured = [key for key in (measure, f"test_{measure}", f"long_{measure}") if key in numbers]
    spread = {key: statistics.stdev(numbers[key]) if count > 1 else 0.0 for key in measured}
    return ComparedRow(name, kind.title, kind.teaches, count, means, spread, results)
