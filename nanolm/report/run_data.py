"""What a run folder says about its run.

>>> data = read_run(Run(Path("runs/novel")))
>>> data.series("loss", "training")
"""

import contextlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanolm.errors import DataError
from nanolm.report.curves import Series
from nanolm.runs.folder import Run

SAMPLE_HEADING = re.compile(r"^## Step ([0-9,]+): ([0-9.]+) bits per byte$", re.MULTILINE)


@dataclass(frozen=True)
class RunData:
    """The contents of a run folder, but for its checkpoints."""

    run: Run
    settings: dict[str, Any]
    facts: dict[str, Any]
    metrics: list[dict[str, Any]]
    samples: list[tuple[str, str]] = field(default_factory=list)  # heading and text

    @property
    def name(self) -> str:
        return self.run.path.name

    @property
    def result(self) -> dict[str, Any]:
        return dict(self.facts.get("result", {}))

    @property
    def is_classifier(self) -> bool:
        return "data" in self.settings

    @property
    def steps_per_epoch(self) -> float | None:
        """None for a run of a version that did not record epochs."""
        rows = (row for row in reversed(self.metrics) if row.get("epoch"))
        return next((row["step"] / row["epoch"] for row in rows), None)

    def series(self, key: str, name: str, x: str = "step") -> Series:
        return Series(name, [(row.get(x), row.get(key)) for row in self.metrics])


def read_run(run: Run) -> RunData:
    samples = read_samples(run.samples.read_text(encoding="utf-8")) if run.samples.exists() else []
    return RunData(run, run.settings(), run.facts(), read_metrics(run.metrics), samples)


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The objects of a metrics.jsonl; a last line that is incomplete is skipped."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        row = None
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
        if isinstance(row, dict):
            rows.append(row)
        elif number < len(lines):
            raise DataError(f"{file}, line {number}: no JSON object; remove that line")
    return rows


def read_samples(text: str) -> list[tuple[str, str]]:
    """The samples written during training, each with a heading that says when."""
    parts = iter(SAMPLE_HEADING.split(text)[1:])
    samples = []
    for step, bits, sample in zip(parts, parts, parts, strict=True):
        lines = (line.removeprefix(">").removeprefix(" ") for line in sample.strip().splitlines())
        samples.append((f"step {step}, {bits} bits per byte", "\n".join(lines)))
    return samples
