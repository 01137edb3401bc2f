"""`nanolm sweep`: a hyperparameter search within a time budget."""

import shlex
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from nanolm.cli.console import note, note_interruption, print_json
from nanolm.cli.options import Command, Option, json_option, options_of
from nanolm.cli.tables import one_line, show_sentence, show_table
from nanolm.cli.train import NO_CORPUS, TABLE
from nanolm.errors import UsageError
from nanolm.formats import counted, printable
from nanolm.training.settings import TrainSettings

if TYPE_CHECKING:
    from nanolm.cli.progress import TrainingView
    from nanolm.sweep.result import SweepResult, SweepTrial
    from nanolm.sweep.sweep import TrialEnded
    from nanolm.training.events import Event

ERROR_LENGTH = 60  # characters of a trial's error message in the table
FIXED = {heading: part for heading, part in TABLE.items() if heading != "Budget"}
COMMON = {
    *("over", "minutes", "trials", "out", "as_json", "val", "tokenizer"),
    *("preset", "family", "start_from", "context", "batch", "lr", "device"),
}
sweep_option = partial(click.option, cls=Option, heading="Sweep")
refused_option = partial(click.option, cls=Option, hidden=True)  # refused with what to type instead


@click.command("sweep", cls=Command, common=COMMON)
@click.argument("corpus", nargs=-1, metavar="CORPUS...")
@sweep_option(
    "--over",
    metavar="NAMES",
    default="",
    help="Settings to vary, such as lr,dropout or lr=0.001:0.003.",
)
@sweep_option("--minutes", type=float, default=30.0, show_default=True, help="Total time.")
@sweep_option(
    "--trials", type=int, help="Trials in the first round.  [default: up to 27, as time permits]"
)
@sweep_option(
    "--out",
    metavar="FOLDER",
    help="Folder for the trials; the best run goes to FOLDER/best.  [default: runs/NAME-sweep, and "
    "runs/NAME for the best run]",
)
@json_option(cls=Option, heading="Sweep", help="Print the result as JSON.")
@options_of(TrainSettings, FIXED)
@refused_option("--steps", type=int)
@refused_option("--epochs", type=float)
@refused_option("--tokens", type=int)
def command(over: str, trials: int | None, out: str | None, as_json: bool, **options: Any) -> int:
    """Search hyperparameters and train the best model.

    CORPUS and the training options are those of `nanolm train`; options apply to every trial. The
    search uses successive halving: all trials train briefly, the best third train three times as
    long, and so on. The winner becomes an ordinary run. If --over includes seed, each
    combination is trained with every seed and ranked by its mean score.

    \b
    nanolm sweep novel.txt --over lr,dropout        half an hour, values chosen for you
    nanolm sweep novel.txt --over lr=0.001:0.003:0.01 --minutes 5
    nanolm sweep novel.txt --over positions=learned:rope,seed=1:2:3 --minutes 10
    nanolm sweep novel.txt --over family=modern:gpt2:lstm --preset nano --minutes 10

    If the sweep is interrupted, run the same command again to resume it.
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

        note(f"skipped for lack of time: {in_words(outcome.not_tried)}")
    note(f"chart: {outcome.folder}/sweep.svg")
    note(f'next: nanolm sample {shlex.quote(outcome.run)} --prompt "..."')
    return 0


def show_event(view: "TrainingView", event: "Event | TrialEnded") -> None:
    """One line per trial; progress within a trial only on a terminal."""
    from nanolm.sweep.sweep import TrialEnded

    if not isinstance(event, TrialEnded):
        view.show_within(event)
        return
    result = event.trial.error or f"{event.trial.bits()[-1]:.3f} bits per byte"
    where = f"round {event.round} of {event.rounds}, trial {event.number} of {event.of}"
    view.show_result(f"{where} ({described(event.trial)}): {result}", event.seconds_left)


def described(trial: "SweepTrial") -> str:
    from nanolm.report.sweep import format_value  # slow to import; help does not need it

    values = trial.values.items()
    return ", ".join(f"{name.replace('_', ' ')} {format_value(value)}" for name, value in values)


def show_outcome(outcome: "SweepResult") -> None:
    """Ranked: bits per byte in each round; with several seeds, mean and standard deviation."""
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
    show_sentence(
        f"{outcome.run}: {outcome.val_bits_per_byte:.3f} bits per byte on the validation set, best "
        f"of {counted(len(outcome.trials), 'trial')} ({printable(described(outcome.trials[0]))})"
    )
    if (count := len(combinations[0].trials)) > 1:
        mean, std = combinations[0].rounds()[-1]
        click.echo(f"ranked by the mean over {count} seeds: {mean:.3f} ± {std:.3f} bits per byte")
