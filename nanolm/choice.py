"""What the user is told: what was decided and why (kept in run.json too), and how far work is."""

from collections.abc import Callable
from dataclasses import dataclass

Report = Callable[[str, int, int], None]  # what is being done, how much of it, of how much or 0


@dataclass(frozen=True)
class Choice:
    """Something that was chosen automatically."""

    what: str
    value: object
    reason: str

    def shown(self) -> str:
        return f"{self.value:,}" if isinstance(self.value, int) else str(self.value)

    def __str__(self) -> str:
        return f"{self.what}: {self.shown()} ({self.reason})"
