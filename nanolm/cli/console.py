"""Printing for all commands: results on stdout, everything else on stderr."""

import errno
import io
import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanolm.errors import LONGEST_MESSAGE
from nanolm.files import write_atomically
from nanolm.formats import abridged, printable
from nanolm.machine import process

if TYPE_CHECKING:
    from nanolm.report.curves import Series

WIDEST_PLOT = 100  # characters
INTERRUPTED = 75  # exit code: saved, and the same command resumes


class Output(io.RawIOBase):
    """stdout or stderr. The first failed write is kept as `error`, and raised if `raises`. All
    later output is discarded, so that it cannot fail again."""

    def __init__(self, stream: io.TextIOWrapper, raises: bool) -> None:
        self.stream, self.raises = stream, raises
        self.raw: Any = getattr(stream.buffer, "raw", stream.buffer)  # the same, if unbuffered
        self.terminal = stream.isatty()
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.stream.fileno()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def write(self, data: Any) -> int | None:
        if self.error is None:
            try:
                written: int | None = self.raw.write(data)
                return written
            except OSError as error:
                closed = self.terminal and error.errno == errno.EIO
                self.error = BrokenPipeError() if closed else error
                error.filename = "the output"
                if self.raises:
                    raise self.error from None
        return memoryview(data).nbytes

    def as_text(self) -> io.TextIOWrapper:
        how = (self.stream.line_buffering, self.stream.write_through)
        return io.TextIOWrapper(io.BufferedWriter(self), "utf-8", "backslashreplace", None, *how)


def finite(value: Any) -> Any:
    """`value`, or None for NaN and infinity, which JSON cannot represent."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def styled(text: str, **style: Any) -> str:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else click.style(text, **style)


def complain(message: str, common: bool = False) -> None:
    """Print an error on stderr; if it is `common` to all processes, only the first prints it."""
    rank, _ = process()
    if rank and common:
        return
    message = abridged(f"process {rank}: {message}" if rank else message, LONGEST_MESSAGE)
    text = printable(message).replace("\n", "\n       ")
    click.echo(styled("error:", fg="red", bold=True) + " " + text, err=True)


def note(message: str) -> None:
    click.echo(printable(abridged(message, LONGEST_MESSAGE)), err=True)


def note_interruption(step: int | None = None) -> int:
    """Say how to resume after an interruption; returns the exit code."""
    where = "" if step is None else f" at step {step:,}"
    note(f"saved{where}; run the same command again to resume")
    return INTERRUPTED


def write_page(file: Path, text: str) -> None:
    write_file(file, text)
    note_written(file)


def write_file(file: Path, text: str) -> None:
    """Write atomically, except to special files such as /dev/stdout."""
    if file.exists() and not file.is_file():
        file.write_text(text, encoding="utf-8", newline="")
    else:
        write_atomically(file.resolve(), text)


def note_written(file: Path) -> None:
    note(f"wrote {file} ({file.stat().st_size / 1000:,.0f} kB)")


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False))


def show_rows(rows: Iterable[tuple[str, str]], indent: int = 16) -> None:
    """Titles, each with its text wrapped beside it."""
    width = min(100, shutil.get_terminal_size().columns)
    for title, text in rows:
        first, others = f"{title:<{indent}}", " " * indent
        wrapper = textwrap.TextWrapper(width, initial_indent=first, subsequent_indent=others)
        click.echo(wrapper.fill(printable(text)))


def show_text(text: str, bold: bool = False) -> None:
    """Print generated text without delay: escaped on a terminal, unchanged in a pipe."""
    if sys.stdout.isatty():
        sys.stdout.write(styled(printable(text), bold=True) if bold else printable(text))
    else:
        sys.stdout.buffer.write(text.encode())
    sys.stdout.flush()


def draw(series: "Sequence[Series]", height: int, logarithmic: bool = False) -> None:
    """Print curves, as wide as the terminal."""
    from nanolm.report.terminal import plot

    plain = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    width = min(WIDEST_PLOT, shutil.get_terminal_size().columns)
    click.echo("\n".join(plot(series, width, height, plain, logarithmic)))
