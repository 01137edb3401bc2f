"""What was decided for the user, and why: printed at once, and kept in run.json."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """Something that was chosen automatically."""

    what: str
    value: object
    reason: str

    def __str__(self) -> str:
        value = f"{self.value:,}" if isinstance(self.value, int) else self.value
        return f"{self.what}: {value} ({self.reason})"
