"""Write flat settings as TOML; the standard library reads it (`tomllib`) and cannot write it."""

import json
from collections.abc import Mapping

from nanolm.formats import VISIBLE

_ESCAPED = {code: f"\\u{code:04x}" for code in VISIBLE if code >= 0x7F}


def dump_toml(settings: Mapping[str, object]) -> str:
    """One `name = value` a line; None, which TOML has no word for, is left out."""
    return "".join(f"{name} = {_value(v)}\n" for name, v in settings.items() if v is not None)


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, str):
        # A JSON string is a TOML string but for DEL, which TOML wants escaped; as is, for those who
        # look at the file, whatever else a terminal would obey.
        return json.dumps(value, ensure_ascii=False).translate(_ESCAPED)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    raise TypeError(f"no TOML for {value!r}")
