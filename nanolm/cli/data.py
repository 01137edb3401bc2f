"""`nanolm data`: is this text all right to train on?"""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from nanolm.cli.console import complain, note, printable
from nanolm.cli.options import READING, Command, CommandGroup, options_of
from nanolm.errors import UsageError
from nanolm.training.settings import TrainSettings

if TYPE_CHECKING:
    from nanolm.text.check import Survey


@click.group("data", cls=CommandGroup)
def command() -> None:
    """Look at text before training on it."""


@command.command("check", cls=Command)
@click.argument("corpus", nargs=-1, required=True, metavar="CORPUS...")
@options_of(TrainSettings, {"How to read it": READING})
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(corpus: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Say what `nanolm train` would read: documents, duplicates, problems, the tokenizer.

    \b
    nanolm data check texts/ more.jsonl
    nanolm data check reviews.csv --text-column review
    """
    settings = TrainSettings(corpus=corpus, **options)
    if problems := settings.reading().problems():
        raise UsageError("\n".join(problems))

    from nanolm.cli.progress import TrainingView
    from nanolm.text.check import survey

    with TrainingView() as view:
        found = survey(corpus, settings.reading(), view.report)
    if as_json:
        click.echo(json.dumps(asdict(found), ensure_ascii=False))
    else:
        show(found)
    for text in found.notes:
        note(text)
    for problem in found.problems:
        complain(problem)
    return 3 if found.problems or not found.documents else 0


def show(found: "Survey") -> None:
    """The survey as lines for a person."""
    skipped = [f"{count:,} {reason}" for reason, count in found.skipped.items() if count]
    rows = {
        "files": f"{found.files:,}" + (f" (skipped: {', '.join(skipped)})" if skipped else ""),
        "documents": f"{found.documents:,}, the longest {found.longest_document:,} bytes",
        "duplicates": f"{found.duplicates:,} documents are equal to an earlier one",
        "text": f"{found.bytes:,} bytes, {found.characters:,} characters, "
        f"{found.distinct_characters:,} of them distinct",
        "odd characters": f"{found.replacement_characters:,} U+FFFD (lost in an earlier "
        f"conversion), {found.control_characters:,} control characters",
    }
    for choice in found.choices:
        rows[choice.what] = f"{str(choice).partition(': ')[2]}"
    if found.bytes_per_token:
        tokens = round(found.bytes / found.bytes_per_token)
        rows["tokens"] = f"about {tokens:,}, {found.bytes_per_token:.2f} bytes each"
    for what, value in rows.items():
        click.echo(f"{what + ':':<16}{value}")
    for example in found.examples:
        click.echo(f"{'begins:':<16}{printable(example)}")
