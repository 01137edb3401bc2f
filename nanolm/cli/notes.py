"""Notes of the server: at most one line per kind and minute, with the number suppressed.

>>> note = RateLimitedNotes(print)
>>> note("/v1/completions failed: out of memory")
"""

import logging
import threading
import time
from collections.abc import Callable

PERIOD = 60.0  # seconds
MAX_KINDS = 100  # remembered at once
MAX_LENGTH = 500  # characters of a line


class RateLimitedNotes(logging.Handler):
    """For our own notes, whose kind is the text up to the first colon, and asyncio's."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self.note = note
        self.kinds: dict[
            str, tuple[float, int]
        ] = {}  # time of the last line, number suppressed since
        self.mutex = threading.Lock()

    def __call__(self, message: str) -> None:
        kind, now = message.partition(":")[0], time.monotonic()
        with self.mutex:
            printed, left_out = self.kinds.pop(kind, (now - PERIOD, 0))
            due = now - printed >= PERIOD
            self.kinds[kind] = (now, 0) if due else (printed, left_out + 1)
            if len(self.kinds) > MAX_KINDS:
                del self.kinds[next(iter(self.kinds))]
        if due:
            more = f" ({left_out:,} similar messages suppressed)" if left_out else ""
            self.note(message[:MAX_LENGTH] + more)

    def emit(self, record: logging.LogRecord) -> None:
        problem = record.exc_info[1] if record.exc_info else None
        self(record.getMessage().partition("\n")[0] + (f": {problem!r}" if problem else ""))

    def handle_asyncio(self) -> None:
        """Handle the reports of asyncio, which would otherwise go to stderr in full."""
        logger = logging.getLogger("asyncio")
        logger.addHandler(self)
        logger.propagate = False
