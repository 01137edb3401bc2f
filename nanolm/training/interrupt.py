"""Signals ask the loop to stop; the loop decides when. Ctrl-C and SIGTERM do, a terminal that is
closed (SIGHUP), Slurm's warning before the time is over (SIGUSR1) and a CPU limit (SIGXCPU)."""

import signal
import threading
from types import FrameType
from typing import ClassVar, Self

from nanolm.machine import process

# Not all systems have these. Whoever has a handler of their own keeps it, and what is ignored
# stays so: that is what nohup does to SIGHUP.
_OTHERS = ("SIGHUP", "SIGUSR1", "SIGXCPU")
WARNINGS = tuple(getattr(signal, name) for name in _OTHERS if hasattr(signal, name))


def interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C before there is anything to save. Python's own handler would do, but for compiled
    modules that swallow the exception (numpy, while it is loaded) or raise another (torch)."""
    StopRequest.missed = True
    raise KeyboardInterrupt


def stop_signals() -> list[signal.Signals]:
    """The signals that end a process which has no other use for them."""
    unused = [number for number in WARNINGS if is_unused(signal.getsignal(number))]
    return [signal.SIGINT, signal.SIGTERM, *unused]


def is_unused(handler: object) -> bool:
    return handler is signal.SIG_DFL or isinstance(getattr(handler, "__self__", None), StopRequest)


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
            for number in stop_signals():
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT and process()[0] is None:
            raise KeyboardInterrupt
        self._request(signal.Signals(number))

    def _request(self, number: signal.Signals) -> None:
        self.requested = True
        outer = getattr(self._before.get(number), "__self__", None)
        if isinstance(outer, StopRequest):  # what this is a part of has to stop as well
            outer._request(number)
        elif number in WARNINGS:  # the shell, or the system every second, sends it again
            self._before[number] = signal.SIG_IGN
