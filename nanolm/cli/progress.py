"""Training progress: a live line on a terminal, plain lines in a file or pipe."""

import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text

from nanolm.choice import Choice
from nanolm.cli.tables import one_line
from nanolm.formats import printable
from nanolm.text.mix import bits_by_part
from nanolm.training.events import Event, Note, Planned, Preparing, Progressed, Started, Wrote

PLAIN_SECONDS = 5.0  # between two lines in a file or pipe
LIVE_SECONDS = 0.1  # between two updates of the bar
SHORTEST_BAR, LONGEST_BAR = 8, 40  # columns
SAMPLE_LINES = 2  # of a text that the model generated
HIGHER_IS_BETTER = ("val_accuracy", "val_bleu")  # if measured, else the loss decides


class TrainingView(AbstractContextManager["TrainingView"]):
    def __init__(self) -> None:
        # Print text literally: no markup, no automatic highlighting.
        self.console = Console(file=sys.stderr, markup=False, highlight=False, emoji=False)
        self.live = Live(console=self.console, transient=True) if sys.stderr.isatty() else None
        self.values: dict[str, float] = {}  # the latest of each metric
        self.best: float | None = None  # the highest score of an evaluation
        self.expected: float | None = None  # planned bits per byte at the last evaluation
        self.last_line = 0.0
        self.phase, self.phase_start = "", 0.0  # of preparation

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def show(self, event: Event) -> None:
        match event:
            case Progressed():
                self.progressed(event)
            case Preparing():
                self.preparing(event)
            case Wrote():
                if self.live:
                    self.sample(one_line(event.prompt + event.text))
            case Planned() if self.live:
                self.line(printable("\n".join(plan_lines(event.choices, self.console.width))))
            case _:
                self.line(printable(str(event)))
                if self.live and isinstance(event, Started):
                    self.best = None
                    self.live.start()

    def show_within(self, event: Event) -> None:
        """For one run of many: its progress is shown only on a terminal."""
        if not isinstance(event, Progressed):
            self.show(event)
        elif self.live:
            self.live.start()
            record = {name: value for name, value in event.record.items() if name != "val_loss"}
            self.show(replace(event, record=record))

    def show_result(self, text: str, seconds_left: float) -> None:
        """Show the result of one run of many, and reset for the next."""
        self.values.clear()
        self.phase = ""
        self.show(Note(f"{text}, {clock(max(0, seconds_left))} remaining"))

    def report(self, what: str, done: int, total: int) -> None:
        self.show(Preparing(what, done, total))

    def preparing(self, event: Preparing) -> None:
        """Work before the first step; shown only if it takes long."""
        now = time.monotonic()
        if event.what != self.phase:
            self.phase, self.phase_start, self.last_line = event.what, now, now
        if now - self.last_line < (LIVE_SECONDS if self.live else PLAIN_SECONDS):
            return
        self.last_line = now
        share = min(1, event.done / event.total) if event.total else 0
        left = (now - self.phase_start) * (1 / share - 1) if share else float("inf")
        text = f"{share:4.0%}  {printable(event.what)}  {clock(left)} remaining"
        if self.live:
            self.live.start()
            self.live.update(self.with_bar(share, text))
        else:
            self.line(text)

    def progressed(self, event: Progressed) -> None:
        self.values.update(event.record)
        self.expected = event.expected or self.expected
        measured, measures = "val_loss" in event.record, self.measures()
        step = f"step {event.record['step']:,}"
        step += f" (epoch {event.record['epoch']:.1f})" if "epoch" in event.record else ""
        share, speed = f"{event.progress:4.0%}", self.values.get("tokens_per_second")
        times = ["" if speed is None else f"{speed:,} tokens/s"]
        times += [f"{clock(self.values['seconds'])} elapsed"]
        remaining = f"{clock(event.seconds_left)} remaining"
        if self.live:
            if measured:
                color = "green" if self.improved(event.record) else ""
                first, rest = "  ".join(measures[:1]), "".join(f"  {each}" for each in measures[1:])
                self.line(Text.assemble(f"{step}: {first}", (rest, color)))
            short = self.measures(plan=False)
            # Drop the least important parts until there is room for a bar.
            for parts in (measures + times, measures + times[1:], measures, short[:2], short[1:2]):
                text = "  ".join([share, *filter(None, parts), remaining])
                if cell_len(text) + SHORTEST_BAR < self.console.width:
                    break
            else:
                text = f"{share}  {remaining}"
            self.live.update(self.with_bar(event.progress, text))
        elif measured or time.monotonic() - self.last_line > PLAIN_SECONDS:
            self.line("  ".join(filter(None, [share, step, *measures, *times, remaining])))
            self.last_line = time.monotonic()

    def improved(self, record: dict[str, Any]) -> bool:
        """Whether an evaluation is the best so far, and not the first."""
        name = next((name for name in HIGHER_IS_BETTER if name in record), "val_loss")
        score = record[name]
        if score is None:  # not finite
            return False
        score = score if name in HIGHER_IS_BETTER else -score
        before, self.best = self.best, score if self.best is None else max(score, self.best)
        return before is not None and score > before

    def with_bar(self, progress: float, text: str) -> Text:
        width = min(LONGEST_BAR, self.console.width - cell_len(text) - 2)
        if width < SHORTEST_BAR:
            return Text(text)
        full = round(width * progress)
        return Text.assemble(("━" * full, "cyan"), ("─" * (width - full), "dim"), f" {text}")

    def measures(self, plan: bool = True) -> list[str]:
        planned = f" (plan {self.expected:.2f})" if plan and self.expected else ""
        shown = {"loss": "loss {:.3f}", "val_bits_per_byte": "val {:.3f} bits/byte" + planned}
        shown |= {"val_accuracy": "val accuracy {:.1%}", "val_bleu": "val BLEU {:.1f}"}
        shown["val_exact"] = "{:.1%} exact"
        known = (name for name in shown if name in self.values)
        parts = [f"{name} {bits:.3f}" for name, bits in bits_by_part(self.values).items()]
        return [*(shown[name].format(self.values[name]) for name in known), *map(printable, parts)]

    def sample(self, text: str) -> None:
        """Print a sample, dimmed and beside a vertical line, without incomplete characters."""
        width = self.console.width - 2
        lines = Text(text.replace("\ufffd", "")).wrap(self.console, width)
        for number, line in enumerate(lines[:SAMPLE_LINES], start=1):
            line.rstrip()
            if number == SAMPLE_LINES < len(lines):
                line.truncate(width - 1)
                line.append("…")
            self.console.print(Text.assemble("│ ", line, style="dim"))

    def line(self, text: str | Text) -> None:
        """Print text, wrapped between words on a terminal and unwrapped elsewhere."""
        self.console.print(text, soft_wrap=self.live is None)


def plan_lines(choices: Sequence[Choice], width: int) -> list[str]:
    """Choices and their reasons, as a table that fits the width."""
    rows = [(choice.what.replace("_", " "), choice.shown(), choice.reason) for choice in choices]
    names, values = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    before = names + values + 4
    lines = []
    for name, value, reason in rows:
        if width - before < 30:  # too narrow for the reason on the same line
            lines += [f"{name:<{names}}  {value}"]
            lines += ["    " + line for line in textwrap.wrap(reason, width - 4)]
            continue
        first, *rest = textwrap.wrap(reason, width - before) or [""]
        lines += [f"{name:<{names}}  {value:<{values}}  {first}"]
        lines += [" " * before + line for line in rest]
    return lines


def clock(seconds: float) -> str:
    """90 -> 1:30."""
    if seconds == float("inf"):
        return "?"
    text = str(timedelta(seconds=round(seconds)))
    return text[3:] if text.startswith("0:0") else text.removeprefix("0:")
