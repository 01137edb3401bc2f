"""`nanolm sweep`: which settings learn most, by trying them within a time."""

import json
import shlex
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from nanolm.cli.console import note, printable
from nanolm.cli.options import Command, Option, options_of
from nanolm.cli.train import NO_CORPUS, TABLE
from nanolm.errors import UsageError
from nanolm.formats import counted
from nanolm.training.settings import TrainSettings

if TYPE_CHECKING:
    from nanolm.cli.progress import TrainingView
    from nanolm.sweep.result import SweepResult, SweepTrial
    from nanolm.sweep.sweep import TrialEnded
    from nanolm.training.events import Event

REASON = 60  # letters of why a trial failed, in the table
FIXED = {heading: part for heading, part in TABLE.items() if heading != "Budget"}
own = partial(click.option, cls=Option, heading="Sweep")
refused = partial(click.option, cls=Option, hidden=True)  # known to say what to type instead


@click.command("sweep", cls=Command)
@click.argument("corpus", nargs=-1, metavar="CORPUS...")
@own(
    "--over",
    metavar="NAMES",
    default="",
    help="Settings to vary, by the names they have below: lr,dropout. With values of your own: "
    "lr=0.001:0.003,norm=rms:layer.",
)
@own("--minutes", type=float, default=30.0, show_default=True, help="Time for all of it.")
@own(
    "--trials",
    type=int,
    help="How many to begin with.  [default: up to 27, as many as the time bears]",
)
@own(
    "--out",
    metavar="FOLDER",
    help="Where trials go, and the best as FOLDER/best.  [default: runs/NAME-sweep, and the best "
    "as runs/NAME]",
)
@own("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@options_of(TrainSettings, FIXED)
@refused("--steps", type=int)
@refused("--epochs", type=float)
@refused("--tokens", type=int)
def command(over: str, trials: int | None, out: str | None, as_json: bool, **options: Any) -> int:
    """Try settings, and train the best.

    CORPUS is as for `nanolm train`, and so are the settings below: what is given is the same in
    each trial. All trials get a short time, the best third of them three times as much, and so on;
    the last one is a run as any other. With seeds among --over, a combination is tried with each,
    and chosen by the mean.

    \b
    nanolm sweep novel.txt --over lr,dropout        half an hour, values chosen for you
    nanolm sweep novel.txt --over lr=0.001:0.003:0.01 --minutes 5
    nanolm sweep novel.txt --over positions=learned:rope,seed=1:2:3 --minutes 10
    nanolm sweep novel.txt --over family=modern:gpt2:lstm --preset nano --minutes 10

    Killed, or stopped with Ctrl-C, the same command goes on where it was.
    """
    started = time.monotonic()
    settings = TrainSettings.from_dict(options)
    if not settings.corpus:
        raise UsageError(NO_CORPUS.replace("nanolm train", "nanolm sweep --over lr"))

    from nanolm.cli.progress import TrainingView
    from nanolm.sweep.sweep import SweepRequest, sweep

    with TrainingView() as view:
        request = SweepRequest(settings, over, trials)
        outcome = sweep(request, out, lambda event: show(view, event), started)
    if as_json:
        click.echo(json.dumps(asdict(outcome)))
    if outcome.run is None:
        note("saved; run the same command again to go on")
        return 75
    if not as_json:
        click.echo("\n".join(table(outcome)))
        best = outcome.combinations()[0]
        click.echo(
            f"{outcome.run}: {outcome.val_bits_per_byte:.3f} bits per byte on held-out text, "
            f"the best of {counted(len(outcome.trials), 'trial')}: "
            f"{printable(said(outcome.trials[0]))}"
        )
        if len(best.trials) > 1:
            mean, spread = best.rounds()[-1]
            seeds = counted(len(best.trials), "seed")
            click.echo(f"chosen by the mean over {seeds}: {mean:.3f} ± {spread:.3f} bits per byte")
    if outcome.not_tried:
        from nanolm.sweep.result import in_words

        note(f"not tried, for want of time: {in_words(outcome.not_tried)}")
    note(f"picture: {outcome.folder}/sweep.svg")
    note(f'next: nanolm sample {shlex.quote(outcome.run)} --prompt "..."')
    return 0


def show(view: "TrainingView", event: "Event | TrialEnded") -> None:
    """A line for each trial; how far it is only where that does not stay."""
    from nanolm.cli.progress import clock
    from nanolm.sweep.sweep import TrialEnded

    if isinstance(event, TrialEnded):
        found = event.trial.error or f"{event.trial.bits()[-1]:.3f} bits per byte"
        view.show_end(
            f"round {event.round} of {event.rounds}, trial {event.number} of {event.of}: "
            f"{said(event.trial)}: {found}, {clock(max(0, event.seconds_left))} left"
        )
    else:
        view.show_within(event)


def said(trial: "SweepTrial") -> str:
    return ", ".join(f"{words(name)} {value}" for name, value in typed(trial.values).items())


def typed(values: dict[str, Any]) -> dict[str, str]:
    """As one would type them."""
    from nanolm.report.sweep import format_value  # which help need not wait for

    return {name: format_value(value) for name, value in values.items()}


def words(name: str) -> str:
    return name.replace("_", " ")


def table(outcome: "SweepResult") -> list[str]:
    """By rank: what was tried, and the bits per byte that came of it in each round; of several
    seeds the mean and the standard deviation."""
    found = outcome.combinations()
    rounds = max(len(each.rounds()) for each in found)
    seeds = max(len(each.trials) for each in found) > 1
    names = [*map(words, found[0].values), *(["seeds"] if seeds else [])]
    rows = [["", *names, *(f"round {n + 1}" for n in range(rounds)), ""]]
    for rank, each in enumerate(found, start=1):
        values = [printable(value) for value in typed(each.values).values()]
        values += [str(len(each.trials))] if seeds else []
        bits = [f"{mean:.3f}" + f" ± {spread:.3f}" * seeds for mean, spread in each.rounds()]
        error = next((trial.error for trial in each.trials if trial.error), None) or ""
        end = "best" if rank == 1 else printable(" ".join(error.split()))[:REASON]
        rows.append([str(rank), *values, *bits, *[""] * (rounds - len(bits)), end])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1] = 0  # the last stands to the left
    return [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
