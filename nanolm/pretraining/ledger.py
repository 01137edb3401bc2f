"""The progress and elapsed time of a job of many runs, in a file that survives a kill.

>>> with opened(SweepState, settings, "sweep", out, asked) as (file, state):
...     ledger = Ledger(file, state, minutes=30, clock=time.monotonic(), watch=print)
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
from nanolm.pretraining.begin import choose_folder
from nanolm.training.events import Event, Preparing, Progressed
from nanolm.training.settings import Settings


@dataclass
class LedgerState:
    """The fields common to all such jobs; each kind adds its own."""

    asked: dict[str, Any]
    seconds: float = 0.0  # spent
    finished: bool = False


S = TypeVar("S", bound=LedgerState)


class Ledger(Generic[S]):
    """Counts the time since `clock`, plus the time spent before an interruption."""

    def __init__(
        self, file: Path, state: S, minutes: float, clock: float, watch: Callable[[Any], None]
    ) -> None:
        self.file, self.folder, self.state = file, file.parent, state
        self.minutes, self.clock, self.watch = minutes, clock, watch

    def save(self) -> None:
        if not self.folder.is_dir():
            cure = "if you moved it, resume it there with --out"
            raise DataError(f"{self.folder} was moved or deleted during training; {cure}")
        now = time.monotonic()
        self.state.seconds += now - self.clock
        self.clock = now
        values = {"format": files.FORMAT, **asdict(self.state)}
        files.write_atomically(self.file, json.dumps(values, indent=1) + "\n")

    def left(self) -> float:
        """Seconds remaining."""
        return 60 * self.minutes - self.state.seconds - (time.monotonic() - self.clock)

    def pass_on(self, event: Event) -> None:
        """Forward the progress of a run; its other events are in its log.txt."""
        if isinstance(event, Preparing | Progressed):
            self.watch(event)


@contextlib.contextmanager
def opened(
    make: Callable[..., S],
    settings: Settings,
    what: str,
    out: str | Path | None,
    asked: dict[str, Any],
    again: bool = False,
) -> Iterator[tuple[Path, S]]:
    """The file and state of a job: one to resume, or a new one. Locks its folder against other
    processes. With `again`, resumes a finished job too."""

    def fits(folder: Path) -> bool | None:
        state = read_state(folder / f"{what}.json", make)
        return None if state is None else state.asked == asked and (again or not state.finished)

    folder = choose_folder(getattr(settings, settings.texts)[0], what, out, fits)
    file = folder / f"{what}.json"
    try:
        with files.locked(folder / ".lock"):
            yield file, read_state(file, make) or make(asked)
    except files.InUse as owner:
        raise DataError(f"{folder} is in use by another process ({owner})") from None


def read_state(file: Path, make: Callable[..., S]) -> S | None:
    if not file.is_file():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8-sig"))
        files.check_format(file, values)
        values.pop("format", None)
        state = make(**values)
        files.check_fields(state)
        return state
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        cure = "restore it, or choose another --out"
        raise DataError(f"{file} cannot be read: {error!r}; {cure}") from None
