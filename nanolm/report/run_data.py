"""Reads run folders.

>>> read_run(Run(Path("runs/novel"))).series("loss", "training")
>>> [run.state for run in list_runs(Path("runs"), note=print)]
"""

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanolm import files
from nanolm.errors import DataError
from nanolm.report.curves import Series
from nanolm.runs.folder import STOPPED_EARLY, Run, ending
from nanolm.text.mix import bits_by_part

SAMPLE_HEADING = re.compile(r"^## Step ([0-9,]+): (.+)$", re.MULTILINE)
TEXTS = ("corpus", "data", "pairs")  # the settings that name the training data
# Raised by files that were edited by hand.
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class RunData:
    run: Run
    settings: dict[str, Any]
    facts: dict[str, Any]
    metrics: list[dict[str, Any]]
    samples: list[tuple[str, str]]  # heading and text

    @property
    def result(self) -> dict[str, Any]:
        return dict(self.facts.get("result", {}))

    @property
    def is_classifier(self) -> bool:
        return "data" in self.settings

    @property
    def verb(self) -> str:
        """The command that trained it."""
        if "pairs" in self.settings:
            return "train-pairs"
        return "finetune" if self.is_classifier else "train"

    @property
    def texts(self) -> list[str]:
        """What it was trained on."""
        return next((self.settings[name] for name in TEXTS if name in self.settings), [])

    @property
    def steps_per_epoch(self) -> float | None:
        """None for runs of old versions, which did not record epochs."""
        rows = (row for row in reversed(self.metrics) if row.get("epoch"))
        return next((row["step"] / row["epoch"] for row in rows), None)

    @property
    def parts(self) -> list[str]:
        """The parts of a mix."""
        return list(bits_by_part({key: 0.0 for row in self.metrics for key in row}))

    def series(self, key: str, name: str, x: str = "step") -> Series:
        return Series(name, [(row.get(x), row.get(key)) for row in self.metrics])


def read_run(run: Run) -> RunData:
    text = run.samples.read_text("utf-8", "replace") if run.samples.exists() else ""
    parts = iter(SAMPLE_HEADING.split(text)[1:])
    samples = []
    for step, measured, sample in zip(parts, parts, parts, strict=True):
        lines = (line.removeprefix(">").removeprefix(" ") for line in sample.strip().splitlines())
        samples.append((f"step {step}, {measured}", "\n".join(lines)))
    return RunData(run, run.settings(), run.facts(), read_metrics(run.metrics), samples)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; an incomplete last line is skipped."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        row = None
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
        if isinstance(row, dict):
            rows.append(row)
        elif number < len(lines):
            raise DataError(f"{file}, line {number}: not a JSON object; remove that line")
    return rows


@dataclass(frozen=True)
class RunSummary:
    """One run. Values that are unknown, or not known yet, are None."""

    run: str
    corpus: str  # what it was trained on
    parameters: int | None
    steps: int | None
    bits_per_byte: float | None
    accuracy: float | None  # on the test set if there is one, else on the validation set
    val_accuracy: float | None
    test_accuracy: float | None
    bleu: float | None  # as for accuracy, of a model trained on pairs
    minutes: float | None
    state: str  # finished, training (a process is running), stopped, stopped early, stopped: REASON
    started: str


def list_runs(root: Path, note: Callable[[str], None]) -> list[RunSummary]:
    """Summaries of the runs in `root`; unreadable ones are reported and skipped."""
    summaries = []
    for run in map(Run, sorted(root.iterdir()) if root.is_dir() else []):
        if run.path.name.startswith(files.TRASH):
            continue
        run.settle(note)
        if run.exists():
            try:
                summaries.append(summarize(run))
            except DataError as error:
                note(f"{run.path} skipped: {error}")
            except UNREADABLE as error:
                note(f"{run.path} skipped: {run.facts_file}: {error!r}")
        elif run.is_rest():
            note(f"{run.path} has no run.json; `nanolm runs rm {run.path}` deletes what is left")
    return summaries


def summarize(run: Run) -> RunSummary:
    facts, settings = run.facts(), run.settings()
    result = facts.get("result") or {}
    rows = [] if result else read_metrics(run.metrics)
    last = {key: value for row in rows for key, value in row.items()}  # of an unfinished run
    texts: list[Any] = next((settings[name] for name in TEXTS if name in settings), [])
    val = (result.get("val") or {}).get("accuracy", last.get("val_accuracy"))
    test = (result.get("test") or {}).get("accuracy")
    pairs = result.get("test") or result.get("val") or {"bleu": last.get("val_bleu")}
    seconds = result.get("seconds", last.get("seconds"))
    if files.in_use(run.path / ".lock"):
        state = "training"
    elif result.get("stopped") == "enough":
        state = STOPPED_EARLY
    else:
        state = ending(result) if result else "stopped"
    summary = RunSummary(
        run=str(run.path),
        corpus=", ".join(Path(str(text)).name for text in texts),
        parameters=facts.get("parameters"),
        steps=result.get("steps", last.get("step", 0)),
        bits_per_byte=result.get("val_bits_per_byte", last.get("val_bits_per_byte")),
        accuracy=val if test is None else test,
        val_accuracy=val,
        test_accuracy=test,
        bleu=pairs.get("bleu"),
        minutes=None if seconds is None else float(seconds) / 60,
        state=state,
        started=str(facts.get("started", "")),
    )
    try:
        files.check_fields(summary)
    except ValueError as error:
        raise DataError(f"{run.facts_file} was not written by nanolm: {error}") from None
    return summary
