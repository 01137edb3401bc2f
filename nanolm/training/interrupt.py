"""Signals that ask the training loop to stop at its next opportunity: Ctrl-C, SIGTERM, a closed
terminal (SIGHUP), Slurm's warning before the time limit (SIGUSR1), and a CPU limit (SIGXCPU)."""

import signal
import threading
from types import FrameType
from typing import ClassVar, Self

from nanolm.machine import process

# Not all systems have these. Existing handlers are kept, and ignored signals stay ignored, as nohup
# does with SIGHUP.
_OTHERS = ("SIGHUP", "SIGUSR1", "SIGXCPU")
WARNINGS = tuple(getattr(signal, name) for name in _OTHERS if hasattr(signal, name))


class EvaluationStopped(Exception):
    """A stop was requested during an evaluation, which is repeated once the run is resumed."""


def interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C before there is anything to save. Python's own handler is not enough, because some
    compiled modules swallow the exception (numpy, during import) or raise another (torch)."""
    StopRequest.missed = True
    raise KeyboardInterrupt


def stop_signals() -> list[signal.Signals]:
    """The signals to handle: those that nothing else in the process uses."""
    unused = [number for number in WARNINGS if is_unused(signal.getsignal(number))]
    return [signal.SIGINT, signal.SIGTERM, *unused]


def is_unused(handler: object) -> bool:
    return handler is signal.SIG_DFL or isinstance(getattr(handler, "__self__", None), StopRequest)


class StopRequest:
    """While entered, the first signal only sets `requested`; a second Ctrl-C stops at once, except
    under a launcher such as torchrun, which repeats the signal."""

    missed: ClassVar[bool] = False  # Ctrl-C came earlier and was not handled
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
        if isinstance(outer, StopRequest):  # the enclosing job has to stop as well
            outer._request(number)
        elif number in WARNINGS:  # the shell or the system may send it again, even every second
            self._before[number] = signal.SIG_IGN
