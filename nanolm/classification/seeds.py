"""Repeat fine-tuning with several seeds, to show how much of a score is chance.

>>> finetune_seeds(FinetuneSettings(start_from="none"), 5, out=None, notify=print).summary()
"""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from nanolm.classification.finetune import finetune, with_start
from nanolm.classification.settings import FinetuneSettings
from nanolm.pretraining.begin import numbered, run_name, same_settings, with_absolute_paths
from nanolm.runs.folder import Run
from nanolm.training.events import Note, Notify

MEASURES = ("accuracy", "macro_f1", "loss")


@dataclass(frozen=True)
class SeedResults:
    run: str
    results: list[dict[str, Any]]  # from `finetune`, one for each seed
    interrupted: bool

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
        return {"run": self.run, **self.summary(), "results": self.results}


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
    """Train with `count` seeds, starting at `settings.seed`; finished runs are reused."""
    settings.check()
    settings = with_absolute_paths(with_start(settings, notify))
    folder = Path(out) if out is not None else free_folder(settings)
    results: list[dict[str, Any]] = []
    for seed in range(settings.seed, settings.seed + count):
        run, each = Run(folder / f"seed-{seed}"), replace(settings, seed=seed)
        if run.exists() and run.finished() and same_settings(run, each):
            notify(Note(f"{run.path} is already finished"))
            results.append(run.facts()["result"])
            continue
        result = finetune(each, run.path, notify=notify)
        if result.stopped == "interrupted":
            return SeedResults(str(folder), results, interrupted=True)
        results.append(result.to_json())
    return SeedResults(str(folder), results, interrupted=False)
