"""What all verbs print with: results on stdout, everything else on stderr."""

import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from nanolm.files import write_atomically
from nanolm.machine import process

INTERRUPTED = 75  # exit code: saved, and the same command goes on

# Control characters, as pictures of themselves: text may come from anywhere, and an escape code
# could rewrite the terminal, as others turn around the text beside them. Line ends and tabs stay.
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
_VISIBLE |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)


def printable(text: str) -> str:
    """`text` with nothing in it that a terminal would obey."""
    return text.translate(_VISIBLE)


def finite(value: Any) -> Any:
    """`value` for JSON, which has no word for what a broken model may give."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def styled(text: str, **style: Any) -> str:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else click.style(text, **style)


def complain(message: str, common: bool = False) -> None:
    """An error, on stderr; one that is `common` to all processes only by the first of them."""
    rank, _ = process()
    if rank and common:
        return
    text = printable(f"process {rank}: {message}" if rank else message).replace("\n", "\n       ")
    click.echo(styled("error:", fg="red", bold=True) + " " + text, err=True)


def note(message: str) -> None:
    click.echo(printable(message), err=True)


def note_interruption(step: int | None = None) -> int:
    """Say that what was interrupted can go on; gives the exit code of that."""
    where = "" if step is None else f" at step {step:,}"
    note(f"saved{where}; run the same command again to go on")
    return INTERRUPTED


def write_output(file: Path, text: str) -> None:
    """Write it whole or not at all; a link stays a link, and a pipe or device is written to."""
    target = file.resolve()
    if target.exists() and not target.is_file():
        file.write_text(text, encoding="utf-8", newline="")
    else:
        write_atomically(target, text)


def write_page(file: Path, text: str) -> None:
    write_output(file, text)
    note_written(file)


def note_written(file: Path) -> None:
    note(f"{file} is written ({file.stat().st_size / 1000:,.0f} kB)")


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False))


def show_rows(rows: Iterable[tuple[str, str]], indent: int = 16) -> None:
    """A title and a text each, the text wrapped beside its title."""
    width = min(100, shutil.get_terminal_size().columns)
    for title, text in rows:
        first, others = f"{title:<{indent}}", " " * indent
        wrapper = textwrap.TextWrapper(width, initial_indent=first, subsequent_indent=others)
        click.echo(wrapper.fill(printable(text)))


def show_text(text: str, bold: bool = False) -> None:
    """Generated text, at once: made safe for a terminal, untouched for a pipe."""
    if sys.stdout.isatty():
        sys.stdout.write(styled(printable(text), bold=True) if bold else printable(text))
    else:
        sys.stdout.buffer.write(text.encode())
    sys.stdout.flush()
