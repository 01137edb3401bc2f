"""`nanolm data`: check text before training on it."""

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from nanolm.cli.console import complain, note, print_json
from nanolm.cli.options import READING, Command, CommandGroup, json_option, options_of
from nanolm.errors import refuse
from nanolm.formats import printable
from nanolm.training.settings import TrainSettings

if TYPE_CHECKING:
    from nanolm.text.check import Survey


@click.group("data", cls=CommandGroup)
def command() -> None:
    """Check text before training on it."""


@command.command("check", cls=Command)
@click.argument("corpus", nargs=-1, required=True, metavar="CORPUS...")
@options_of(TrainSettings, {"Reading": READING})
@json_option(help="Print one JSON object.")
def check(corpus: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Preview what `nanolm train` would read, and report problems before training.

    \b
    nanolm data check texts/ more.jsonl
    nanolm data check reviews.csv --text-column review
    """
    settings = TrainSettings(corpus=corpus, **options)
    refuse(settings.reading().problems())

    from nanolm.cli.progress import TrainingView
    from nanolm.text.check import survey

    with TrainingView() as view:
        result = survey(corpus, settings.reading(), view.report)
    if as_json:
        print_json(asdict(result))
    else:
        show(result)
    for text in result.notes:
        note(text)
    for problem in result.problems:
        complain(problem)
    return 3 if result.problems or not result.documents else 0


def show(survey: "Survey") -> None:
    from nanolm.text.sources import skipped_files

    skipped = f" ({skipped_files(Counter(survey.skipped))})" if any(survey.skipped.values()) else ""
    rows = {
        "files": f"{survey.files:,}{skipped}",
        "documents": f"{survey.documents:,}, the longest {survey.longest_document:,} bytes",
        "duplicates": f"{survey.duplicates:,}",
        "text": f"{survey.bytes:,} bytes, {survey.characters:,} characters "
        f"({survey.distinct_characters:,} distinct)",
        "odd characters": f"{survey.replacement_characters:,} U+FFFD (lost in an earlier "
        f"conversion), {survey.control_characters:,} control characters",
    }
    rows |= {choice.what: str(choice).partition(": ")[2] for choice in survey.choices}
    if survey.bytes_per_token:
        tokens = round(survey.bytes / survey.bytes_per_token)
        rows["tokens"] = f"about {tokens:,}, {survey.bytes_per_token:.2f} bytes each"
    for what, value in rows.items():
        click.echo(f"{what + ':':<16}{value}")
    for example in survey.examples:
        click.echo(f"{'example:':<16}{printable(example)}")
