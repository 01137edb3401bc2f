"""Automatic choices with their reasons, as printed and saved in run.json."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

Report = Callable[[str, int, int], None]  # activity, amount done, total amount or 0
S = TypeVar("S")  # a dataclass of settings


@dataclass(frozen=True)
class Choice:
    what: str
    value: object
    reason: str

    def shown(self) -> str:
        return f"{self.value:,}" if isinstance(self.value, int) else str(self.value)

    def __str__(self) -> str:
        return f"{self.what}: {self.shown()} ({self.reason})"


@dataclass
class Chosen(Generic[S]):
    """Settings whose open values are chosen one after the other."""

    settings: S
    choices: list[Choice] = field(default_factory=list)

    def open(self, name: str) -> bool:
        return getattr(self.settings, name) in (None, "auto")

    def choose(self, name: str, value: object, reason: str, shown: object = None) -> None:
        """Choose a value unless the user gave one."""
        if self.open(name):
            self.set(name, value, reason, shown)

    def set(self, name: str, value: object, reason: str, shown: object = None) -> None:
        """Set a value even if the user gave another."""
        self.settings = replace(self.settings, **{name: value})  # type: ignore[type-var]
        self.choices.append(Choice(name, value if shown is None else shown, reason))

    def fill(self, **values: Any) -> None:
        """Fill in open values that need no reason."""
        left = {name: value for name, value in values.items() if self.open(name)}
        self.settings = replace(self.settings, **left)  # type: ignore[type-var]
