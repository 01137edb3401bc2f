"""Repeat fine-tuning with several seeds, to show how much of a score is chance.

>>> finetune_seeds(FinetuneSettings(start_from="none"), 5, out=None, notify=print).summary()

Classifiers that were fine-tuned from the same model are close to each other, so the average of
their weights is also a classifier, and often a better one than each of them (docs/experiments.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from nanolm.classification import recipe
from nanolm.classification.data import split_data
from nanolm.classification.finetune import FinetuneResult, finetune, finish, prepare, with_start
from nanolm.classification.settings import SCRATCH, FinetuneSettings
from nanolm.errors import DataError
from nanolm.model.huggingface import load_classifier
from nanolm.planning.tuning import threads_for
from nanolm.pretraining.begin import (
    RunStart,
    numbered,
    reports,
    run_name,
    same_settings,
    with_absolute_paths,
)
from nanolm.runs.folder import Run, find_model, find_or_download
from nanolm.training.events import Event, Note, Notify, Planned
from nanolm.training.interrupt import EvaluationStopped, StopRequest
from nanolm.training.state import State

MEASURES = ("accuracy", "macro_f1", "loss")


@dataclass(frozen=True)
class SeedResults:
    run: str
    results: list[dict[str, Any]]  # from `finetune`, one for each seed
    interrupted: bool
    average: dict[str, Any] | None = None  # the same, for the average of their weights

    def summary(self) -> dict[str, dict[str, dict[str, float]]]:
        """Mean and standard deviation of each measure, on validation and test."""
        summary: dict[str, dict[str, dict[str, float]]] = {}
        for part in ("val", "test"):
            rows = [result[part] for result in self.results if part in result]
            for name in MEASURES if rows else ():
                values = [row[name] for row in rows]
                spread = stdev(values) if len(values) > 1 else 0.0
                summary.setdefault(part, {})[name] = {"mean": mean(values), "spread": spread}
        return summary

    def to_json(self) -> dict[str, Any]:
        average = {"average": self.average} if self.average else {}
        return {"run": self.run, **self.summary(), "results": self.results, **average}


def free_folder(settings: FinetuneSettings) -> Path:
    """A folder under runs/ that is new or has runs with these settings."""
    for folder in numbered(f"{run_name(settings.data[0])}-seeds"):
        run = Run(folder / f"seed-{settings.seed}")
        if not run.exists() or same_settings(run, settings):
            break
    return folder


def finetune_seeds(
    settings: FinetuneSettings, count: int, out: str | Path | None, notify: Notify
) -> SeedResults:
    """Train with `count` seeds, starting at `settings.seed`, and average the weights if
    `can_average`. Finished runs are reused."""
    settings.check()
    settings = with_absolute_paths(with_start(settings, notify))
    folder = Path(out) if out is not None else free_folder(settings)
    seeds = range(settings.seed, settings.seed + count)
    runs = [Run(folder / f"seed-{seed}") for seed in seeds]
    results: list[dict[str, Any]] = []
    for seed, run in zip(seeds, runs, strict=True):
        result = finished_result(run, each := replace(settings, seed=seed), notify)
        result = result or finetune(each, run.path, notify=notify).to_json()
        if result["stopped"] == "interrupted":
            return SeedResults(str(folder), results, interrupted=True)
        results.append(result)
    if count == 1 or not can_average(runs):
        return SeedResults(str(folder), results, interrupted=False)
    if not start_alike(runs):
        notify(Note("no average: the seeds differ in their texts, vocabulary or pretrained model"))
        return SeedResults(str(folder), results, interrupted=False)
    run = Run(folder / f"average-{seeds[0]}-{seeds[-1]}")
    average = finished_result(run, settings, notify)
    average = average or average_runs(settings, runs, run, notify).to_json()
    if average["stopped"] == "interrupted":
        return SeedResults(str(folder), results, interrupted=True)
    return SeedResults(str(folder), results, interrupted=False, average=average)


def finished_result(run: Run, settings: FinetuneSettings, notify: Notify) -> dict[str, Any] | None:
    """The result of a run, if it is finished and has these settings."""
    run.settle(reports(notify)[0])
    if not (run.exists() and run.finished() and same_settings(run, settings)):
        return None
    notify(Note(f"{run.path} is already finished"))
    result: dict[str, Any] = run.facts()["result"]
    return result


def can_average(runs: Sequence[Run]) -> bool:
    """Whether the average of their weights makes sense: all must have started from the same model,
    and none may have been trained on the validation texts of another. Without a validation file,
    the seed decides which texts are held out."""
    settings = runs[0].settings()
    held_out = settings.get("val") and not settings.get("test_fraction")
    adapters = settings.get("train") == "lora"  # averaging factors would not average products
    return bool(held_out and settings.get("start_from") != SCRATCH and not adapters)


def start_alike(runs: Sequence[Run]) -> bool:
    """Whether they have the same texts, pretrained model and vocabulary. The model may have been
    trained again between two runs, and whether words are added to its vocabulary depends on an
    n-gram model, that is, on the seed."""
    first, *others = (run.facts()["fingerprints"] for run in runs)
    return all(other == first for other in others)


def average_runs(
    settings: FinetuneSettings, runs: Sequence[Run], target: Run, notify: Notify
) -> FinetuneResult:
    """Write the average of the classifiers in `runs` as the run `target`."""
    if target.exists() and not target.finished():  # killed
        with target.locked():
            target.clear()

    def quiet(event: Event) -> None:  # the runs have already reported plan and notes
        if not isinstance(event, Note | Planned):
            notify(event)

    start = RunStart(settings, target.path, quiet)
    base = find_or_download(str(start.settings.start_from), *reports(quiet))
    split = split_data(recipe.choose_fraction(start.settings), reports(quiet)[1])
    with start.locked():
        task, state = prepare(start, base, split), State()
        if not start_alike([start.run, *runs]):
            changed = "the texts, or the model to start from, have changed"
            raise DataError(f"{changed} since {runs[0].path} was trained, so there is no average")
        weights: dict[str, torch.Tensor] = {}
        for run in runs:
            result = run.facts()["result"]
            classifier = load_classifier(find_model(run.path, lambda text: None))
            with torch.no_grad():  # undo the calibration, which differs by run
                classifier.score.weight *= result["temperature"]
            for name, value in classifier.state_dict().items():
                weights[name] = weights.get(name, 0) + value / len(runs)
            state.step, state.tokens = state.step + result["steps"], state.tokens + result["tokens"]
            state.seconds += result["seconds"]
        task.classifier.load_state_dict(weights)
        start.run.update(start.run.facts() | {"averaged": [str(run.path) for run in runs]})
        with threads_for(task.settings.threads), StopRequest() as stop:
            task.stop, state.best_step = stop, state.step
            try:
                return finish(task, start.run, state, "steps", start.notify)
            except EvaluationStopped:
                return finish(task, start.run, state, "interrupted", start.notify)
