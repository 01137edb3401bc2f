"""What a training run tells whoever watches it: small records, passed to one callable."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanolm.training.planner import Choice


@dataclass(frozen=True)
class Note:
    """Something the user should know."""

    text: str


@dataclass(frozen=True)
class Started:
    """Preparation is over and the first step comes next."""

    run: Path
    parameters: int
    tokens: int
    step: int  # more than 0: resumed there


@dataclass(frozen=True)
class Progressed:
    """A line of metrics.jsonl was written."""

    record: dict[str, Any]
    progress: float  # 0 to 1
    seconds_left: float


@dataclass(frozen=True)
class Wrote:
    """The model wrote a sample."""

    step: int
    prompt: str
    text: str


Event = Choice | Note | Started | Progressed | Wrote
Notify = Callable[[Event], None]
