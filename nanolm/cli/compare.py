"""`nanolm compare`: the architectures of the lectures, compared on the same data."""

import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanolm.classification.settings import DATA, SCRATCH, FinetuneSettings
from nanolm.cli.console import note, note_interruption, print_json
from nanolm.cli.options import (
    LABELED,
    MACHINE,
    PAIR_COLUMNS,
    Command,
    Option,
    Table,
    json_option,
    options_of,
)
from nanolm.cli.tables import one_line, show_sentence, show_table
from nanolm.errors import UsageError
from nanolm.pairs.settings import PairSettings
from nanolm.text import mix
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
        "val_fraction": "Fraction to hold out for validation.  [default: 0.2 for labeled data, "
        "0.05 for pairs, else 0.1]",
    },
    "Hardware": {
        **{name: MACHINE[name] for name in ("device", "threads")},
        "seed": "First random seed.",
    },
}
AGAIN = "for pairs in two files, repeat the option."
FILES = {
    "val": f"Validation file, used instead of a held-out part of DATA; {AGAIN}",
    "test": f"Test file of labeled texts or pairs, evaluated once at the end; {AGAIN}",
}
OF_PAIRS, OF_LABELS = tuple(PAIR_COLUMNS), ("label_column", "label_file", "start_from")
KINDS = {"labels": "labeled texts", "pairs": "pairs of texts", "text": "plain text"}
UNUSED = {  # options that each kind of data has no use for
    "labels": OF_PAIRS,
    "pairs": ("text_column", *OF_LABELS),
    "text": (*OF_LABELS, *OF_PAIRS, "limit", "test"),
}
COLUMNS = {  # of the table, where they are measured
    "accuracy": "accuracy",
    "test_accuracy": "test",
    "bits_per_byte": "bits/byte",
    "bleu": "BLEU",
    "long_bleu": "longest",
    "exact": "exact",
    "long_exact": "longest",
    "test_bleu": "test BLEU",
    "test_exact": "test exact",
}


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
    help="Number of seeds; for labeled data, each has its own split.  [default: 5 for small "
    "labeled data, else 1]",
)
@own_option(
    "--as",
    "kind",
    type=click.Choice(("labels", "pairs", "text")),
    help="Type of DATA.  [default: labels or pairs for tables, pairs for two files such as "
    "train.de and train.en, labels for folders of folders, else text]",
)
@own_option("--out", metavar="FOLDER", help="Output folder.  [default: runs/NAME-compare]")
@json_option(cls=Option, heading="Comparison", help="Print the full results as JSON.")
@options_of(FinetuneSettings, TABLE)
@options_of(PairSettings, {"Data": {**FILES, **PAIR_COLUMNS}})
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

    On labeled DATA (default: the embedded reviews), the command compares the majority class, bags
    of words, averaged embeddings, a CNN, RNNs, a Transformer trained from scratch and, with --from,
    a pretrained one. It reports the accuracy and time of each model, and what each one illustrates.

    On pairs of texts, it compares a GRU with and without attention, the original Transformer
    (2017) and a modern one. It reports BLEU or exact match, overall and by source length.

    On plain text, it compares n-grams, a convolution, an Elman RNN, an LSTM and a Transformer in
    bits per byte over time, and measures how the time per step grows with sequence length.

    \b
    nanolm compare                             the embedded reviews, ten minutes
    nanolm compare sst2.tsv --from runs/reviews --budget 20
    nanolm compare tweets.csv --only bag,lstm,transformer --seeds 3
    nanolm compare embedded:dates --budget 8
    nanolm compare novel.txt --budget 8

    If the comparison is interrupted, run the same command again to resume it.
    """
    started = time.monotonic()
    data = data or (DATA,)
    settings: FinetuneSettings | TrainSettings | PairSettings
    if data != (plain := tuple(mix.sources(data))):
        raise UsageError(f"nanolm compare takes no weights; try {' '.join(plain)}")
    kind = kind or guess_kind(data, options)
    if given := [option(name) for name in UNUSED[kind] if options.pop(name)]:
        others = " or ".join(f"--as {each}" for each in UNUSED if each != kind)
        text = f"{', '.join(given)} cannot be used with {KINDS[kind]}"
        raise UsageError(f"{text}, which {data[0]} seems to contain; if it does not, add {others}")
    for name in {*FILES} & {*options} if kind != "pairs" else ():
        if len(options[name]) > 1:
            raise UsageError(f"{option(name)}: two files are for pairs of texts; use one")
        options[name] = next(iter(options[name]), None)
    if kind == "labels":
        if options["start_from"] == SCRATCH:
            raise UsageError(
                f"--from {SCRATCH}: omit it; models trained from scratch are always included"
            )
        settings = FinetuneSettings.from_dict({**options, "data": data})
    elif kind == "pairs":
        settings = PairSettings.from_dict({**options, "pairs": data})
    else:
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
    elif outcome.measure == "accuracy" and not options["start_from"]:
        note("to add a pretrained model, run `nanolm train` on similar text, then add --from RUN")
    return 0


def guess_kind(data: tuple[str, ...], options: dict[str, Any]) -> str:
    if any(options[name] for name in OF_PAIRS):
        return "pairs"
    from nanolm.text.documents import TABLES
    from nanolm.text.pairs import look_like_pairs
    from nanolm.text.source import COMPRESSIONS

    if not any(options[name] for name in UNUSED["pairs"]) and look_like_pairs(data):
        return "pairs"
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
    if "bits_per_byte" in result:
        score = f"{result['bits_per_byte']:.3f} bits per byte"
    elif "accuracy" in result:
        score = f"accuracy {result['accuracy']:.1%}"
    else:
        score = f"BLEU {result['bleu']:.1f}, exact match {result['exact']:.1%}"
    text = f"seed {event.seed}, {event.row.title}: {score} after {result['seconds']:.1f} s"
    view.show_result(text, event.seconds_left)


def show(outcome: "CompareResult") -> None:
    labeled = outcome.measure == "accuracy"
    columns = {
        name: heading
        for name, heading in COLUMNS.items()
        if all(name in row.means for row in outcome.rows)
        and not (outcome.measure == "exact" and "bleu" in name)
    }
    rows = [["", *columns.values(), "parameters", "training"] + ["1,000 words"] * labeled]
    for row in outcome.rows:
        cells = [one_line(row.title), *(measured(row, name) for name in columns)]
        count = row.means.get("parameters")
        cells += ["" if count is None else f"{count:,.0f}", f"{row.means['seconds']:,.1f} s"]
        cells += [f"{1000 * row.means['long_seconds']:,.1f} ms"] if labeled else []
        rows.append(cells)
    show_table(rows)
    click.echo()
    for row in outcome.rows:
        show_sentence(f"{row.title}: {row.teaches}.")
    seeds = max(row.seeds for row in outcome.rows)
    if labeled and seeds > 1:
        click.echo()
        show_sentence(f"Mean ± standard deviation over {seeds} seeds, each with its own split.")
    if "long_exact" in columns:
        both = "BLEU and exact match" if "bleu" in columns else "Exact match"
        *_, last = groups = outcome.rows[0].results[0]["by_length"]
        share = last["count"] / sum(group["count"] for group in groups)
        part = f"the {share:.0%} with the longest sources"
        click.echo()
        show_sentence(f"{both} on the validation pairs, and on {part}.")
    for family, times in outcome.lengths.items():
        (first, short), (last, long) = times[0], times[-1]
        text = f"{family}: a step takes {1000 * short:.1f} ms at {first:,} tokens"
        if last > first:
            text += f" and {1000 * long:,.1f} ms at {last:,} ({long / short:.0f} times as long)"
        show_sentence(text)


def measured(row: "ComparedRow", name: str) -> str:
    if name == "bits_per_byte":
        return f"{row.means[name]:.3f}"
    percent = not name.endswith("bleu")  # BLEU is from 0 to 100
    text = f"{row.means[name]:.1%}" if percent else f"{row.means[name]:.1f}"
    spread = row.spread.get(name, 0.0) * (100 if percent else 1)
    return text + (f" ±{spread:.1f}" if row.seeds > 1 and name in row.spread else "")
