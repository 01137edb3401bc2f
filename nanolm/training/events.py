"""The events of a training run: small records, passed to one callable."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanolm.choice import Choice


@dataclass(frozen=True)
class Note:
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Planned:
    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        return "the plan\n" + "\n".join(f"  {choice}" for choice in self.choices)


@dataclass(frozen=True)
class Preparing:
    """Progress before training starts, and after it ends."""

    what: str
    done: int
    total: int  # 0 if unknown


@dataclass(frozen=True)
class Started:
    """Preparation is done; the first step is next."""

    run: Path
    parameters: int
    data: str  # a description of the training data
    step: int  # if more than 0, the run resumes at this step

    def __str__(self) -> str:
        resuming = f"resuming {self.run} at step {self.step:,}"
        begin = resuming if self.step else f"training {self.run}"
        return f"{begin}: {self.parameters:,} parameters, {self.data}"


@dataclass(frozen=True)
class Progressed:
    """A line of metrics.jsonl was written."""

    record: dict[str, Any]
    progress: float  # 0 to 1
    seconds_left: float
    expected: float | None = None  # bits per byte predicted for this point


@dataclass(frozen=True)
class Wrote:
    step: int
    prompt: str
    text: str


Event = Choice | Note | Planned | Preparing | Started | Progressed | Wrote
Notify = Callable[[Event], None]
