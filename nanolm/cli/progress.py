"""Training as it is seen: a live line on a terminal, plain lines in a file or pipe."""

import sys
import time
from typing import Self

from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from nanolm.cli.console import error_console, printable
from nanolm.training.events import Event, Progressed, Started, Wrote

PLAIN_SECONDS = 5.0  # between two lines when nobody watches live


class TrainingView:
    """Shows the events of a run on stderr."""

    def __init__(self) -> None:
        self.console = error_console()
        self.live = sys.stderr.isatty()
        self.bar: Progress | None = None
        self.values: dict[str, float] = {}
        self.last_line = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar:
            self.bar.stop()

    def show(self, event: Event) -> None:
        match event:
            case Started():
                self.started(event)
            case Progressed():
                self.progressed(event)
            case Wrote():
                self.wrote(event)
            case _:
                self.line(str(event))

    def started(self, event: Started) -> None:
        self.line(str(event))
        if self.live:
            self.bar = Progress(
                BarColumn(bar_width=None),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[status]}"),
                console=self.console,
                transient=True,
            )
            self.bar.add_task("", total=1.0, status="")
            self.bar.start()

    def progressed(self, event: Progressed) -> None:
        numbers = {k: v for k, v in event.record.items() if isinstance(v, int | float)}
        self.values.update(numbers)
        status = self.status(event)
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=event.progress, status=status)
        measured = "val_loss" in event.record
        if measured and self.live:
            self.line(f"step {event.record['step']:,}: {self.measures()}")
        elif not self.live and (measured or time.monotonic() - self.last_line > PLAIN_SECONDS):
            self.line(f"{event.progress:4.0%}  step {event.record['step']:,}  {status}")
            self.last_line = time.monotonic()

    def status(self, event: Progressed) -> str:
        parts = [self.measures()]
        if "tokens_per_second" in self.values:
            parts.append(f"{self.values['tokens_per_second']:,.0f} tokens/s")
        parts.append(f"{clock(self.values['seconds'])} gone, {clock(event.seconds_left)} left")
        return "  ".join(part for part in parts if part)

    def measures(self) -> str:
        parts = []
        if "loss" in self.values:
            parts.append(f"loss {self.values['loss']:.3f}")
        if "val_bits_per_byte" in self.values:
            parts.append(f"val {self.values['val_bits_per_byte']:.3f} bits/byte")
        return "  ".join(parts)

    def wrote(self, event: Wrote) -> None:
        if self.live:
            sample = Text(" ".join(printable(event.prompt + event.text).split()), style="dim")
            sample.truncate(2 * self.console.width - 4, overflow="ellipsis")
            self.console.print(sample)

    def line(self, text: str) -> None:
        self.console.print(Text(printable(text)), soft_wrap=not self.live)


def clock(seconds: float) -> str:
    """90 -> 1:30."""
    if seconds == float("inf"):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
