"""The values of an untrusted config.json, with type checks and errors that name the field."""

from collections.abc import Iterable
from typing import Any

from nanolm.errors import ModelError

AROUND = (  # fields of any config.json that do not affect the model
    *("model_type", "kind", "architectures", "dtype", "transformers_version"),
    *(f"{name}_token_id" for name in ("bos", "eos", "pad", "decoder_start")),
)
LARGEST = 1 << 40  # of any count in the file: far above real values, far below an overflow


class Values:
    """The values of a JSON object, with type checks."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def get(self, name: str, default: Any = None) -> Any:
        """A null means the default, as it does for transformers."""
        value = self.values.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise self.wrong(name, f"must be an integer from 1 to {LARGEST:,}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if type(value) not in (int, float) or not 0 <= value <= LARGEST:
            raise self.wrong(name, f"must be a number from 0 to {LARGEST:,}")
        return float(value)

    def like(self, name: str, default: Any) -> Any:
        """A value of the same type as the default."""
        value = self.get(name, default)
        if type(value) is not type(default):
            names = {bool: "true or false", list: "a list", dict: "an object"}
            raise self.wrong(name, f"must be {names[type(default)]}")
        return value

    def only(self, name: str, allowed: Iterable[object], default: Any, what: str) -> Any:
        """A setting of which nanolm supports only some values."""
        value = self.get(name, default)
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise self.wrong(name, f"nanolm does not support {what}")
        return value

    def check_names(self, *known: str) -> None:
        for name in self.values:
            if name not in {*known, *AROUND}:
                raise self.wrong(name, "this version of nanolm does not support it")

    def wrong(self, name: str, why: str) -> ModelError:
        shown = repr(self.values[name]) if name in self.values else "missing"
        return ModelError(f"{self.where}: {name} is {shown[:200]}: {why}")
