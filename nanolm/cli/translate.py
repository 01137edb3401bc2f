"""`nanolm translate`: texts in, the targets of a sequence-to-sequence model out."""

import secrets
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from nanolm.cli.classify import arriving_lines
from nanolm.cli.columns import fitted, visible_text
from nanolm.cli.console import finite, note, print_json, show_text, styled
from nanolm.cli.options import (
    Command,
    Option,
    combined,
    device_option,
    dtype_option,
    json_option,
    unknown,
)
from nanolm.cli.tables import cell_width, terminal_width
from nanolm.errors import refuse
from nanolm.formats import counted, joined
from nanolm.generation.sampling_params import DECLARATIONS
from nanolm.text.decoding import Reading
from nanolm.training.settings import DEVICES, DTYPES

if TYPE_CHECKING:
    from nanolm.pairs.translator import Alignment, Translation, Translator

FIRST_PART = 16  # lines that are translated first, so that the first results appear soon
SHADES = " ░▒▓█"  # of attention from 0 to 1
WIDEST_TOKEN = 12  # columns of a table of attention

search_option = partial(click.option, cls=Option, heading="Search")
search_options = combined(
    search_option("--beams", type=int, help="Number of beams for beam search.  [default: 4]"),
    search_option(
        "--length-penalty",
        type=float,
        default=1.0,
        show_default=True,
        help="Beam search divides log probabilities by the length raised to this power. Values "
        "above 1 favor longer translations, and values below 1 shorter ones.",
    ),
    search_option("--greedy", is_flag=True, help="Always choose the most likely token."),
    search_option("--temperature", type=float, help="Sample with this temperature."),
    search_option("--top-k", type=int, help=DECLARATIONS["top_k"].help),
    search_option("--top-p", type=float, help=DECLARATIONS["top_p"].help),
    search_option("--seed", type=int, help=f"{DECLARATIONS['seed'].help}  [default: random]"),
    search_option(
        "--max-tokens",
        type=int,
        help="Maximum number of tokens per translation.  [default: the context length]",
    ),
    search_option(
        "--batch",
        type=int,
        help="Number of texts to translate at a time.  [default: depends on their length]",
    ),
)


@click.command("translate", cls=Command)
@click.argument("run")
@click.argument("text", nargs=-1, metavar="[TEXT]...")
@click.option(
    "--file",
    "files",
    multiple=True,
    metavar="FILE",
    help="File with one text per line, compressed or not; can be repeated.",
)
@click.option("--encoding", metavar="NAME", default="utf-8", help="Encoding of the file or stdin.")
@click.option(
    "--show",
    metavar="attention",
    help="Show how much each target token (row) attended to each source token (column): the mean "
    "of all cross-attention heads, in a table for each part of the text.",
)
@json_option(help="Print one JSON object per text.")
@device_option()
@dtype_option()
@search_options
def command(
    run: str,
    text: tuple[str, ...],
    files: tuple[str, ...],
    encoding: str,
    show: str | None,
    as_json: bool,
    device: str,
    dtype: str,
    beams: int | None,
    greedy: bool,
    seed: int | None,
    **options: Any,
) -> None:
    """Translate texts with a model trained on pairs.

    RUN is a run of `nanolm train-pairs`, a checkpoint, or a Hugging Face folder of a Marian or
    Pegasus model with a tokenizer.json; SentencePiece files, as in opus-mt models, are not read.
    Without TEXT or --file, each line of stdin is translated as soon as possible, in order. A text
    that exceeds the model's context is translated in parts.

    \b
    nanolm translate runs/de-en "Ein Hund rennt durch den Schnee."
    nanolm translate runs/de-en --file test.de --json > test.jsonl
    nanolm translate runs/de-en "Guten Morgen." --show attention
    echo "Guten Morgen." | nanolm translate runs/de-en --temperature 0.8
    """
    problems = unknown("--device", device, DEVICES) + unknown("--dtype", dtype, DTYPES)
    problems += Reading(encoding=encoding).problems()
    problems += unknown("--show", show, ("attention",)) if show is not None else []
    if text and files:
        problems.append("give either TEXT or --file, not both")
    if not text and not files and sys.stdin.isatty():
        problems.append('no text; give "TEXT" or --file FILE, or pipe lines to stdin')
    sampling = [name for name in ("temperature", "top_k", "top_p") if options[name] is not None]
    ways = [f"--{name.replace('_', '-')}" for name in sampling[:1]]
    ways += ["--greedy"] * greedy + ["--beams"] * (beams not in (None, 1))
    if len(ways) > 1:
        problems.append(f"use only one of {joined(ways)}")
    refuse(problems)

    from nanolm.classification.classifier import in_parts
    from nanolm.pairs.translator import TranslateParams, Translator

    chosen = secrets.randbelow(1_000_000) if seed is None else seed
    beams = 1 if greedy else TranslateParams.beams if beams is None else beams
    params = TranslateParams(beams=beams, seed=chosen, **options)
    refuse(params.problems())
    translator = Translator.load(run, note).on(device, dtype)
    attention = show is not None and translator.model.attends
    if show is not None and not attention:
        note("this model has no attention: its decoder sees only the encoder's last state")
    if sampling:
        note(f"seed {chosen}")
    if text:
        arriving = iter([list(text)])
    elif files:
        arriving = in_parts(file_lines(files, encoding), FIRST_PART)
    else:
        stdin = arriving_lines(encoding, blank=True)
        arriving = (part for lines in stdin for part in in_parts(lines, FIRST_PART))
    count = 0
    for count, translation in enumerate(translator.stream(arriving, params), start=1):
        for each in translation.notes:
            note(f"text {count:,}: {each}")
        show_translation(translator, translation, as_json, attention)
    if not count:
        note("no texts found")


def file_lines(files: tuple[str, ...], encoding: str) -> Iterator[str]:
    from nanolm.machine import cache_folder
    from nanolm.text.decoding import decoded, lines
    from nanolm.text.source import blamed_on
    from nanolm.text.sources import find_sources

    for source in find_sources(files, cache_folder(), lambda *_: None, encoding).files:
        invalid = f"replaced by U+FFFD in {source.name}"

        def replaced(number: int, where: str = invalid) -> None:
            note(f"{counted(number, 'invalid UTF-8 character')} {where}")

        with blamed_on(source.name), source.open() as stream:
            yield from lines(decoded(source, stream, encoding, replaced))


def show_translation(
    translator: "Translator", translation: "Translation", as_json: bool, attention: bool
) -> None:
    parts = translation.parts if attention else []
    alignments = [translator.alignment(*part) for part in parts]
    if as_json:
        values = {
            "source": translation.source,
            "translation": translation.text,
            "score": finite(translation.score),
            "notes": translation.notes,
        }
        if attention:
            values["attention"] = [alignment_json(each) for each in alignments]
        print_json(values)
        sys.stdout.flush()
    else:
        show_text(" ".join(translation.text.splitlines()) + "\n")
        for each in alignments:
            show_alignment(each)


def alignment_json(alignment: "Alignment") -> dict[str, Any]:
    weights = [[round(weight, 4) for weight in row] for row in alignment.mean()]
    tokens = {"source": alignment.source_tokens, "target": alignment.target_tokens}
    return {**tokens, "weights": weights}


def show_alignment(alignment: "Alignment") -> None:
    """A row for each target token and a column for each source token, in several blocks if the
    terminal is narrow."""
    width = terminal_width() or sys.maxsize
    widest = min(WIDEST_TOKEN, max(2, width // 4))
    sources = [visible_text(token) for token in alignment.source_tokens]
    targets = [visible_text(token) for token in alignment.target_tokens]
    lead = min(widest, cell_width(targets))
    sizes = [min(widest, max(2, cell_width([token]))) for token in sources]
    first = 0
    while first < len(sources):
        end = first + 1
        while end < len(sources) and lead + sum(n + 1 for n in sizes[first : end + 1]) <= width:
            end += 1
        block = range(first, end)
        header = [fitted(sources[n], sizes[n]) for n in block]
        click.echo(styled(" ".join([" " * lead, *header]).rstrip(), bold=True))
        for token, row in zip(targets, alignment.mean(), strict=True):
            cells = [shade(row[n]) * sizes[n] for n in block]
            click.echo(" ".join([fitted(token, lead), *cells]).rstrip())
        click.echo()
        first = end


def shade(weight: float) -> str:
    return SHADES[min(len(SHADES) - 1, int(weight * len(SHADES)))]
