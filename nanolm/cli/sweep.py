"""`nanolm sweep`: which settings learn most, by trying them within a time."""

import shlex
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from nanolm.cli.console import note, note_interruption, print_json
from nanolm.cli.options import Command, Option, json_option, options_of
from nanolm.cli.tables import one_line, show_table
from nanolm.cli.train import NO_CORPUS, TABLE
from nanolm.errors import UsageError
from nanolm.formats import counted, printable
from nanolm.training.settings import TrainSettings

if TYPE_CHECKING:
    from nanolm.cli.progress import TrainingView
    from nanolm.sweep.result import SweepResult, SweepTrial
    from nanolm.sweep.sweep import TrialEnded
    from nanolm.training.events import Event

ERROR_LENGTH = 60  # letters of why a trial failed, in the table
FIXED = {heading: part for heading, part in TABLE.items() if heading != "Budget"}
sweep_option = partial(click.option, cls=Option, heading="Sweep")
refused_option = partial(click.option, cls=Option, hidden=True)  # known to say what to type instead


@click.command("sweep", cls=Command)
@click.argument("corpus", nargs=-1, metavar="CORPUS...")
@sweep_option(
    "--over", metavar="NAMES", default="", help="Settings to vary: lr,dropout or lr=0.001:0.003,..."
)
@sweep_option("--minutes", type=float, default=30.0, show_default=True, help="Time for all of it.")
@sweep_option("--trials", type=int, help="At the start.  [default: up to 27, as time permits]")
@sweep_option(
    "--out", metavar="FOLDER", help="Trials, FOLDER/best.  [default: runs/NAME-sweep, runs/NAME]"
)
@json_option(cls=Option, heading="Sweep", help="Print the result as JSON.")
@options_of(TrainSettings, FIXED)
@refused_option("--steps", type=int)
@refused_option("--epochs", type=float)
@refused_option("--tokens", type=int)
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
        outcome = sweep(request, out, partial(show_event, view), started)
    if as_json:
        print_json(asdict(outcome))
    if outcome.run is None:
        return note_interruption()
    if not as_json:
        show_outcome(outcome)
    if outcome.not_tried:
        from nanolm.sweep.result import in_words

        note(f"not tried, for want of time: {in_words(outcome.not_tried)}")
    note(f"picture: {outcome.folder}/sweep.svg")
    note(f'next: nanolm sample {shlex.quote(outcome.run)} --prompt "..."')
    return 0


def show_event(view: "TrainingView", event: "Event | TrialEnded") -> None:
    """A line for each trial; progress within one only where that does not stay."""
    from nanolm.sweep.sweep import TrialEnded

    if not isinstance(event, TrialEnded):
        view.show_within(event)
        return
    result = event.trial.error or f"{event.trial.bits()[-1]:.3f} bits per byte"
    where = f"round {event.round} of {event.rounds}, trial {event.number} of {event.of}"
    view.show_result(f"{where}: {described(event.trial)}: {result}", event.seconds_left)


def described(trial: "SweepTrial") -> str:
    from nanolm.report.sweep import format_value  # which help need not wait for

    values = trial.values.items()
    return ", ".join(f"{name.replace('_', ' ')} {format_value(value)}" for name, value in values)


def show_outcome(outcome: "SweepResult") -> None:
    """By rank: bits per byte in each round; of several seeds, mean and standard deviation."""
    from nanolm.report.sweep import format_value

    combinations = outcome.combinations()
    rounds = max(len(each.rounds()) for each in combinations)
    seeds = any(len(each.trials) > 1 for each in combinations)
    names = [name.replace("_", " ") for name in combinations[0].values] + ["seeds"] * seeds
    rows = [["", *names, *(f"round {n + 1}" for n in range(rounds)), ""]]
    for rank, each in enumerate(combinations, start=1):
        values = [printable(format_value(value)) for value in each.values.values()]
        values += [str(len(each.trials))] * seeds
        bits = [f"{mean:.3f}" + f" ± {spread:.3f}" * seeds for mean, spread in each.rounds()]
        error = next((trial.error for trial in each.trials if trial.error), None) or ""
        end = "best" if rank == 1 else one_line(error)[:ERROR_LENGTH]
        rows.append([str(rank), *values, *bits, *[""] * (rounds - len(bits)), end])
    show_table(rows, left={len(rows[0]) - 1})
    click.echo(
        f"{outcome.run}: {outcome.val_bits_per_byte:.3f} bits per byte on held-out text, the best "
        f"of {counted(len(outcome.trials), 'trial')}: {printable(described(outcome.trials[0]))}"
    )
    if (count := len(combinations[0].trials)) > 1:
        mean, std = combinations[0].rounds()[-1]
        click.echo(f"chosen by the mean over {count} seeds: {mean:.3f} ± {std:.3f} bits per byte")
