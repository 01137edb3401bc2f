"""`nanolm classify`: labels and probabilities for texts."""

import codecs
import csv
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import click

from nanolm.cli.console import note, print_json, styled
from nanolm.cli.options import (
    Command,
    adapter_option,
    device_option,
    dtype_option,
    json_option,
    unknown,
)
from nanolm.cli.tables import cell_width, one_line, shortened, terminal_width
from nanolm.errors import refuse
from nanolm.formats import counted
from nanolm.training.settings import DEVICES, DTYPES

UNSURE = "unsure"
READ_BYTES = 1 << 20  # of stdin that are read and classified at once


@click.command("classify", cls=Command)
@click.argument("run")
@click.argument("text", nargs=-1, metavar="[TEXT]...")
@click.option(
    "--file",
    "files",
    multiple=True,
    metavar="FILE",
    help="File of texts, as lines or a table; can be repeated.",
)
@click.option(
    "--text-column", metavar="NAME", help="Column that holds the text.  [default: detected]"
)
@click.option(
    "--label-column", metavar="NAME", help="Column that holds the true label.  [default: detected]"
)
@click.option("--encoding", metavar="NAME", default="utf-8", help="Encoding of the file or stdin.")
@click.option("--top", type=click.IntRange(1), metavar="N", help="Show the N most likely labels.")
@click.option(
    "--min-probability",
    type=click.FloatRange(0, 1),
    help=f"Answer `{UNSURE}` below this probability.",
)
@adapter_option()
@device_option()
@dtype_option(help="Precision of matrix multiplications.")
@json_option(help="Print one JSON object per text.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, with true labels if known.")
def command(
    run: str,
    text: tuple[str, ...],
    files: tuple[str, ...],
    top: int | None,
    min_probability: float | None,
    adapter: str | None,
    device: str,
    dtype: str,
    as_json: bool,
    as_csv: bool,
    **columns: Any,
) -> None:
    """Classify texts with a fine-tuned model.

    RUN is a run of `nanolm finetune`, or a Hugging Face folder of a model for sequence
    classification. Without TEXT or --file, each nonblank line of stdin is a text. Use `--file -` to
    read a table from stdin.

    \b
    nanolm classify runs/reviews "A lovely film." "I want my money back."
    nanolm classify runs/reviews --file tweets.csv --text-column text --csv > labeled.csv
    tail -f comments.txt | nanolm classify runs/reviews --min-probability 0.8
    """
    from nanolm.text.labeled import LabelReading

    reading = LabelReading(**columns)
    problems = reading.problems()
    problems += unknown("--device", device, DEVICES) + unknown("--dtype", dtype, DTYPES)
    if as_json and as_csv:
        problems.append("use only one of --json and --csv")
    if text and files:
        problems.append("give either TEXT or --file, not both")
    if (reading.text_column or reading.label_column) and not files:
        problems.append("--text-column and --label-column need --file (`--file -` for stdin)")
    if not text and not files and sys.stdin.isatty():
        problems.append('no text; give "TEXT" or --file FILE, or pipe lines to stdin')
    refuse(problems)

    from nanolm.classification.classifier import TrueLabels, in_parts, load
    from nanolm.text.labeled import read_texts

    classifier = load(run, note, adapter=adapter).on(device, dtype)
    true_labels = TrueLabels(classifier.labels, ", ".join(files[:5]))
    read: deque[str | None] = deque()  # true labels of the texts being classified
    labeled = False
    if text:
        parts = iter([list(text)])
    elif files:
        rows = read_texts(files, reading, lambda *how_far: None, true_labels.are_known)
        first = next(rows, None)
        labeled = first is not None and first[1] is not None
        parts = in_parts(texts_of(chain([first] if first else [], rows), read))
    else:
        parts = arriving_lines(reading.encoding)
    table = csv.writer(sys.stdout, lineterminator="\n")
    if as_csv:
        truth_columns = ["true_label", "correct"] if labeled else []
        table.writerow(["text", "label", "probability", *classifier.labels, *truth_columns])
        sys.stdout.flush()
    count = compared = right = 0
    for each, probabilities in classifier.stream(parts):
        count += 1
        pairs = zip(classifier.labels, probabilities.tolist(), strict=True)
        ranked = sorted(pairs, key=lambda pair: -pair[1])
        label, probability = ranked[0]
        truth = true_labels[read.popleft() or ""] if read else ""
        if min_probability is not None and not probability >= min_probability:
            label = UNSURE
        compare = bool(truth) and label != UNSURE
        correct = label == truth
        compared, right = compared + compare, right + (compare and correct)
        if as_json:
            values = {"text": each, "label": label, "probability": probability}
            known = {"true_label": truth, "correct": correct if compare else None} if truth else {}
            print_json({**values, "probabilities": dict(ranked[:top]), **known})
        elif as_csv:
            numbers = (f"{value:.6f}" for value in probabilities.tolist())
            answer = [truth, str(correct).lower() if compare else ""] if labeled else []
            table.writerow([each, label, f"{probability:.6f}", *numbers, *answer])
            sys.stdout.flush()
        else:
            show(each, label, ranked[: top or 1])
    if not count:
        note("no texts found")
    if compared:
        note(f"accuracy {right / compared:.1%} ({right:,} of {compared:,} labeled texts)")


def texts_of(rows: Iterable[tuple[str, str | None]], labels: deque[str | None]) -> Iterator[str]:
    for text, label in rows:
        labels.append(label)
        yield text


def arriving_lines(encoding: str, blank: bool = False) -> Iterator[list[str]]:
    """The lines of stdin, also `blank` ones if asked, as soon as they arrive."""
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    rest, broken, first = "", 0, True
    while data := os.read(sys.stdin.fileno(), READ_BYTES):
        text = decoder.decode(data)
        broken += text.count("\ufffd")
        *whole, rest = (rest + text).removeprefix("\ufeff" if first else "").split("\n")
        first = False
        yield [line.strip() for line in whole if blank or line.strip()]
    rest = (rest + decoder.decode(b"", final=True)).strip()
    yield [rest] if rest else []
    if broken:
        found = f"{counted(broken, 'character')} of stdin"
        note(f"{found} could not be decoded as {encoding}; try another --encoding")


def show(text: str, label: str, ranked: list[tuple[str, float]]) -> None:
    shown = ", ".join(f"{name} {value:.1%}" for name, value in ranked)
    if label == UNSURE:
        shown = f"{UNSURE}: {shown}" if len(ranked) > 1 else f"{UNSURE} {ranked[0][1]:.1%}"
    width = terminal_width()
    if width is None:
        click.echo("\t".join(" ".join(part.split()) for part in (shown, text)))
        return
    shown, text = one_line(shown), one_line(text)
    room = max(1, width - cell_width([shown]) - 2)
    click.echo(f"{styled(shown, bold=True)}  {shortened(text, room)}")
