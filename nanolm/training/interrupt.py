"""Ctrl-C and SIGTERM ask the loop to stop; the loop decides when."""

import signal
import threading
from types import FrameType
from typing import ClassVar, Self

from nanolm.machine import process


def interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C before there is anything to save. Python's own handler would do, but for compiled
    modules that swallow the exception (numpy, while it is loaded) or raise another (torch)."""
    StopRequest.missed = True
    raise KeyboardInterrupt


class StopRequest:
    """While entered, the first signal only sets `requested`; a second Ctrl-C is immediate, except
    where it comes from what started this process as one of several, after the first one."""

    missed: ClassVar[bool] = False  # a Ctrl-C came before, and nobody took notice
    used: ClassVar[bool] = False  # there has been something to save

    def __init__(self) -> None:
        self.requested = self.missed
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        StopRequest.used = True
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT and process()[0] is None:
            raise KeyboardInterrupt
        self.requested = True
        outer = getattr(self._before.get(signal.Signals(number)), "__self__", None)
        if isinstance(outer, StopRequest):  # what this is a part of has to stop as well
            outer.requested = True
