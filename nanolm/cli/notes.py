"""What the server prints: of each kind one line a minute, with the number of those left out.

>>> note = RateLimitedNotes(print)
>>> note("/v1/completions failed: out of memory")
"""

import logging
import threading
import time
from collections.abc import Callable

PERIOD = 60.0  # seconds
MAX_KINDS = 100  # that are remembered
MAX_LENGTH = 500  # characters of a line


class RateLimitedNotes(logging.Handler):
    """For notes of our own, of which all up to a colon is the kind, and those of asyncio."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self.note = note
        self.kinds: dict[str, tuple[float, int]] = {}  # when one was printed, and how many not
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
            more = f" ({left_out:,} more of these were not shown)" if left_out else ""
            self.note(message[:MAX_LENGTH] + more)

    def emit(self, record: logging.LogRecord) -> None:
        problem = record.exc_info[1] if record.exc_info else None
        self(record.getMessage().partition("\n")[0] + (f": {problem!r}" if problem else ""))

    def handle_asyncio(self) -> None:
        """Print what asyncio reports, which else goes to stderr in full each time."""
        logger = logging.getLogger("asyncio")
        logger.addHandler(self)
        logger.propagate = False
