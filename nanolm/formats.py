"""Numbers, counts and untrusted text, formatted for people.

>>> readable(1040.3), readable(0.01234), readable(1e6), counted(1, "step"), counted(2500, "pass")
('1,040', '0.0123', '1,000,000', '1 step', '2,500 passes')
"""

import math
from collections.abc import Collection, Sequence
from itertools import islice

SMALLEST = 1e-4  # smaller numbers are easier to read with an exponent
# Control characters are replaced by visible symbols: text may come from anywhere, and escape codes
# or direction marks could change what the terminal shows. Newlines and tabs stay.
VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
VISIBLE |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
VISIBLE |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)


def readable(value: float, digits: int = 3) -> str:
    """With `digits` significant digits, but never fewer than the integer part has."""
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value) or 0 < abs(value) < SMALLEST:
        return f"{value:.{digits}g}"
    before = math.floor(math.log10(abs(value))) + 1 if value else 1
    text = f"{value:,.{max(0, digits - before)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def abridged(text: str, most: int = 80) -> str:
    """`text`, or its beginning and end if it has more than `most` characters."""
    if len(text) <= most:
        return text
    omitted = f" ... ({len(text):,} characters) ... "
    return text[: most // 2] + omitted + text[len(text) - most // 2 :]


def listed(names: Collection[str], most: int = 10) -> str:
    """The first of `names`, separated by commas, and their number if there are more."""
    shown = ", ".join(abridged(name, 300) for name in islice(names, most))
    return shown + (f", ... ({len(names):,} in all)" if len(names) > most else "")


def joined(names: Sequence[str], word: str = "and") -> str:
    """`a`, `a and b`, or `a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last


def counted(count: float, what: str) -> str:
    """`count` and `what`, in the plural unless the count is one."""
    shown = readable(count)
    plural = "es" if what.endswith("s") else "s"
    return f"{shown} {what}" + plural * (shown != "1")


def printable(text: str) -> str:
    """`text` without characters that control a terminal."""
    return text.translate(VISIBLE)
