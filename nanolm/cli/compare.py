"""`nanolm compare`: the architectures of the lectures, compared on the same data."""

import textwrap
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanolm.classification.settings import DATA, SCRATCH, FinetuneSettings
from nanolm.cli.console import note, note_interruption, print_json
from nanolm.cli.options import LABELED, MACHINE, Command, Option, Table, json_option, options_of
from nanolm.cli.scores import LABEL_WIDTH
from nanolm.cli.tables import one_line, show_table, terminal_width
from nanolm.errors import UsageError
from nanolm.text.documents import TABLES
from nanolm.text.source import COMPRESSIONS
from nanolm.training.settings import TrainSettings, option

if TYPE_CHECKING:
    from nanolm.cli.progress import TrainingView
    from nanolm.comparison.compare import ComparedRow, CompareResult, RowTrained
    from nanolm.training.events import Event

own_option = partial(click.option, cls=Option, heading="Comparison")
TABLE: Table = {
    "Data": {
        **LABELED,
        "limit": "Use only the first N rows, before splitting.",
        "val": "Validation file, used instead of a held-out part of DATA.",
        "val_fraction": "Fraction to hold out for validation.  [default: 0.2 for labeled data, "
        "else 0.1]",
        "test": "Test file of labeled texts, evaluated once at the end.",
    },
    "Hardware": {
        **{name: MACHINE[name] for name in ("device", "threads")},
        "seed": "First random seed.",
    },
}
ONLY_LABELED = ("label_column", "label_file", "limit", "test", "start_from")


@click.command("compare", cls=Command)
@click.argument("data", nargs=-1, metavar="[DATA]...")
@own_option(
    "--only", metavar="NAMES", default="", help="Models to compare, such as bag,lstm,transformer."
)
@own_option("--from", "start_from", metavar="RUN", help="Also fine-tune this pretrained model.")
@own_option("--budget", type=float, default=10.0, show_default=True, help="Total time in minutes.")
@own_option(
    "--seeds",
    type=int,
    metavar="N",
    help="Number of seeds, each with its own split.  [default: 5 for small data, else 1]",
)
@own_option(
    "--as",
    "kind",
    type=click.Choice(("labels", "text")),
    help="Type of DATA.  [default: labels for tables and folders of folders, else text]",
)
@own_option("--out", metavar="FOLDER", help="Output folder.  [default: runs/NAME-compare]")
@json_option(cls=Option, heading="Comparison", help="Print the full results as JSON.")
@options_of(FinetuneSettings, TABLE)
def command(
    data: tuple[str, ...],
    only: str,
    budget: float,
    seeds: int | None,
    kind: str | None,
    out: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Compare architectures on the same data.

    On labeled DATA (default: the embedded reviews), it compares the majority class, bags of words,
    averaged embeddings, a CNN, RNNs, a Transformer trained from scratch and, with --from, a
    pretrained one. It reports the accuracy and time of each model, and what each one illustrates.

    On plain text, it compares n-grams, an Elman RNN, an LSTM and a Transformer in bits per byte
    over time, and measures how the time per step grows with sequence length.

    \b
    nanolm compare                             the embedded reviews, ten minutes
    nanolm compare sst2.tsv --from runs/reviews --budget 20
    nanolm compare tweets.csv --only bag,lstm,transformer --seeds 3
    nanolm compare novel.txt --budget 8

    If the comparison is interrupted, run the same command again to resume it.
    """
    started = time.monotonic()
    data = data or (DATA,)
    settings: FinetuneSettings | TrainSettings
    if (kind or guess_kind(data)) == "labels":
        if options["start_from"] == SCRATCH:
            raise UsageError(
                f"--from {SCRATCH}: omit it; models trained from scratch are always included"
            )
        settings = FinetuneSettings.from_dict({**options, "data": data})
    else:
        if given := [option(name) for name in ONLY_LABELED if options.pop(name) is not None]:
            text = f"{', '.join(given)}: only for labeled data"
            raise UsageError(f"{text}; if {data[0]} has labels, add --as labels")
        settings = TrainSettings.from_dict({**options, "corpus": data})

    from nanolm.cli.progress import TrainingView
    from nanolm.comparison.compare import CompareRequest, compare

    names = tuple(name.strip() for name in only.split(",") if name.strip())
    with TrainingView() as view:
        request = CompareRequest(settings, budget, names, seeds)
        outcome = compare(request, out, partial(show_event, view), started)
    if as_json:
        print_json(asdict(outcome))
    elif outcome.rows:
        show(outcome)
    if not outcome.finished:
        return note_interruption()
    note(
        f"wrote {outcome.folder}/compare.svg (chart) "
        f"and {outcome.folder}/compare.json (full results)"
    )
    if outcome.lengths:
        note(f"time per step by sequence length: {outcome.folder}/lengths.svg")
    elif outcome.measure == "accuracy" and options["start_from"] is None:
        note("to add a pretrained model, run `nanolm train` on similar text, then add --from RUN")
    return 0


def guess_kind(data: tuple[str, ...]) -> str:
    path = Path(data[0])
    suffixes = ["", *(suffix for suffix in path.suffixes if suffix not in COMPRESSIONS)]
    table = suffixes[-1].lower() in TABLES
    folders = path.is_dir() and any(entry.is_dir() for entry in path.iterdir())
    return "labels" if data[0] == DATA or table or folders else "text"


def show_event(view: "TrainingView", event: "Event | RowTrained") -> None:
    """One line per model; progress within a model only on a terminal."""
    from nanolm.comparison.compare import RowTrained

    if not isinstance(event, RowTrained):
        view.show_within(event)
        return
    result = event.result
    score = f"accuracy {result['accuracy']:.1%}" if "accuracy" in result else ""
    score = score or f"{result['bits_per_byte']:.3f} bits per byte"
    text = f"seed {event.seed}, {event.row.title}: {score} after {result['seconds']:.1f} s"
    view.show_result(text, event.seconds_left)


def show(outcome: "CompareResult") -> None:
    labeled = outcome.measure == "accuracy"
    tested = labeled and all("test_accuracy" in row.means for row in outcome.rows)
    measures = ["accuracy", "test"][: 1 + tested] if labeled else ["bits/byte"]
    rows = [["", *measures, "parameters", "training", *(["1,000 words"] if labeled else [])]]
    for row in outcome.rows:
        cells = [one_line(row.title), measured(row, outcome.measure)]
        cells += [measured(row, "test_accuracy")] if tested else []
        count = row.means.get("parameters")
        cells += ["" if count is None else f"{count:,.0f}", f"{row.means['seconds']:,.1f} s"]
        cells += [f"{1000 * row.means['long_seconds']:,.1f} ms"] if labeled else []
        rows.append(cells)
    width = terminal_width()
    show_table(rows, first_limit=width and LABEL_WIDTH)
    click.echo()
    fill = partial(textwrap.fill, width=width or 100, subsequent_indent="  ")
    for row in outcome.rows:
        click.echo(fill(f"{row.title}: {row.teaches}."))
    seeds = max(row.seeds for row in outcome.rows)
    if labeled and seeds > 1:
        click.echo(f"\nMean ± standard deviation over {seeds} seeds, each with its own split.")
    for family, times in outcome.lengths.items():
        (first, short), (last, long) = times[0], times[-1]
        steps = f"{1000 * short:.1f} ms at {first:,} tokens, {1000 * long:,.1f} ms at {last:,}"
        click.echo(f"{family}: a step takes {steps}, {long / short:.0f} times as long")


def measured(row: "ComparedRow", name: str) -> str:
    if name == "bits_per_byte":
        return f"{row.means[name]:.3f}"
    return f"{row.means[name]:.1%}" + (f" ±{100 * row.spread[name]:.1f}" if row.seeds > 1 else "")
