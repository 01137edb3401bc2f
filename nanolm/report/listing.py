"""What has been trained: a summary of each run.

>>> [run.state for run in list_runs(Path("runs"), note=print)]
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nanolm import files
from nanolm.errors import DataError
from nanolm.report.run_data import read_metrics
from nanolm.runs.folder import STOPPED_EARLY, Run, ending

UNREADABLE = (KeyError, TypeError, ValueError, AttributeError)  # raised by files edited by hand


@dataclass(frozen=True)
class RunSummary:
    """One run; what is not known, or not yet, is None."""

    run: str
    corpus: str  # what it was trained on
    parameters: int | None
    steps: int | None
    bits_per_byte: float | None
    accuracy: float | None  # on the test set where there is one, else on the validation set
    val_accuracy: float | None
    test_accuracy: float | None
    minutes: float | None
    state: str  # finished, training (by some process now), stopped, stopped early, stopped: REASON
    started: str


def list_runs(root: Path, note: Callable[[str], None]) -> list[RunSummary]:
    """Of the runs right under `root`; what cannot be read is noted and skipped."""
    summaries = []
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        run = Run(folder)
        if run.exists():
            try:
                summaries.append(summarize(run))
            except (DataError, *UNREADABLE) as error:
                note(f"{folder} is passed over: {error}")
    return summaries


def summarize(run: Run) -> RunSummary:
    facts, settings = run.facts(), run.settings()
    result = facts.get("result") or {}
    rows = [] if result else read_metrics(run.metrics)
    last = {key: value for row in rows for key, value in row.items()}  # of an unfinished run
    texts = settings.get("corpus") or settings.get("data") or []
    val = (result.get("val") or {}).get("accuracy", last.get("val_accuracy"))
    test = (result.get("test") or {}).get("accuracy")
    seconds = result.get("seconds", last.get("seconds"))
    if files.in_use(run.path / ".lock"):
        state = "training"
    elif result.get("stopped") == "enough":
        state = STOPPED_EARLY
    else:
        state = ending(result) if result else "stopped"
    return RunSummary(
        run=str(run.path),
        corpus=", ".join(Path(str(text)).name for text in texts),
        parameters=facts.get("parameters"),
        steps=result.get("steps", last.get("step", 0)),
        bits_per_byte=result.get("val_bits_per_byte", last.get("val_bits_per_byte")),
        accuracy=val if test is None else test,
        val_accuracy=val,
        test_accuracy=test,
        minutes=None if seconds is None else float(seconds) / 60,
        state=state,
        started=str(facts.get("started", "")),
    )
