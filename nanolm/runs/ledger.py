"""The progress of a job of many runs, and the time it took, in a file that survives a kill.

>>> with working_on(folder):
...     ledger = Ledger(folder / "sweep.json", state, minutes=30, clock=time.monotonic())
...     ledger.left()  # seconds
...     ledger.save()
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from nanolm import files
from nanolm.errors import DataError


@dataclass
class LedgerState:
    """What every such job saves; each kind has more fields."""

    asked: dict[str, Any]
    seconds: float = 0.0  # spent
    finished: bool = False


S = TypeVar("S", bound=LedgerState)


class Ledger(Generic[S]):
    """Counts the time from `clock` on, and all that was spent before a kill."""

    def __init__(self, file: Path, state: S, minutes: float, clock: float) -> None:
        self.file, self.state, self.minutes, self.clock = file, state, minutes, clock

    def save(self) -> None:
        now = time.monotonic()
        self.state.seconds += now - self.clock
        self.clock = now
        text = json.dumps(asdict(self.state), indent=1) + "\n"
        files.write_atomically(self.file, text)

    def left(self) -> float:
        """Seconds."""
        return 60 * self.minutes - self.state.seconds - (time.monotonic() - self.clock)


def read_ledger(file: Path, make: Callable[..., S]) -> S | None:
    """The state in `file`; None if there is none."""
    if not file.is_file():
        return None
    try:
        return make(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{file} cannot be read: {error!r}; remove {file.parent}") from None


@contextlib.contextmanager
def working_on(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`: no other process works on it meanwhile."""
    try:
        with files.locked(folder / ".lock"):
            yield
    except files.InUse as owner:
        raise DataError(f"{folder} is worked on by another process ({owner})") from None
