"""Writes flat settings as TOML, which the standard library can only read (`tomllib`)."""

import json
from collections.abc import Mapping

from nanolm.formats import VISIBLE

_ESCAPED = {code: f"\\u{code:04x}" for code in VISIBLE if code >= 0x7F}


def dump_toml(settings: Mapping[str, object]) -> str:
    """One `name = value` per line; None, which TOML does not have, is omitted."""
    return "".join(f"{name} = {_value(v)}\n" for name, v in settings.items() if v is not None)


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, str):
        # JSON strings are TOML strings, except that TOML requires DEL to be escaped. Everything
        # else that controls a terminal is escaped too.
        return json.dumps(value, ensure_ascii=False).translate(_ESCAPED)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    raise TypeError(f"no TOML for {value!r}")
