"""`nanolm tokenizer`: train, use, visualize and compare tokenizers."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanolm.cli.columns import Columns, visible
from nanolm.cli.console import note, print_json, show_text, write_file
from nanolm.cli.options import (
    READING,
    Command,
    CommandGroup,
    Rows,
    json_option,
    options_of,
    special_tokens_option,
)
from nanolm.cli.tables import show_table
from nanolm.errors import DataError, UsageError, refuse
from nanolm.formats import counted
from nanolm.text import NAMED, TRAINABLE, spelled
from nanolm.training.settings import TrainSettings

if TYPE_CHECKING:
    from nanolm.text.tokenizer import Tokenizer

which = click.option(
    "--tokenizer",
    metavar="|".join([*NAMED, "PATH"]),
    help="Tokenizer to use.  [default: that of the newest run, or one trained on embedded:stories]",
)
DEFAULT_VOCAB = 2048  # if no tokenizer is named and there are no runs
DEFAULT_TOKENIZERS = ("byte", "char", "bpe:512", "bpe:4096")
TOKENIZER: Rows = {
    "tokenizer": ("|".join(TRAINABLE), "Type of tokenizer.  [default: bpe]"),
    "vocab_size": ("", "Vocabulary size of a bpe tokenizer.  [default: chosen for the text]"),
}
COLORS = (24, 22, 94, 53, 58)  # backgrounds of the 256-color palette, dark enough for white text


@click.group("tokenizer", cls=CommandGroup)
def command() -> None:
    """Train, use, visualize and compare tokenizers.

    A tokenizer is gpt2, cl100k, o200k, a file (tokenizer.json, *.model or *.tiktoken), or the
    folder of a run or model. The default is the tokenizer of the newest run.
    """


@command.command("train", cls=Command)
@click.argument("corpus", nargs=-1, required=True, metavar="CORPUS...")
@options_of(TrainSettings, {"Tokenizer": TOKENIZER, "Reading": READING})
@click.option("--out", metavar="DIR", required=True, help="Output folder for tokenizer.json.")
@json_option(help="Print one JSON object.")
def train(corpus: tuple[str, ...], out: str, as_json: bool, **options: Any) -> None:
    """Train a tokenizer on text.

    \b
    nanolm tokenizer train novel.txt --vocab-size 4096 --out my-tokenizer
    nanolm train novel.txt --tokenizer my-tokenizer
    """
    settings = TrainSettings(corpus=corpus, **options)
    settings.check()
    if (kind := settings.tokenizer) not in (None, *TRAINABLE):
        raise UsageError(f"--tokenizer {kind} is already trained; choose from bpe, char, byte")
    file = Path(out) / "tokenizer.json"
    if file.exists():
        raise DataError(f"{file} already exists; choose another --out")

    from nanolm import files
    from nanolm.cli.progress import TrainingView
    from nanolm.machine import cache_folder
    from nanolm.text.corpus import read_corpus
    from nanolm.text.documents import plain_json
    from nanolm.text.sources import find_sources
    from nanolm.text.vocabulary import make_tokenizer

    started = time.monotonic()
    with TrainingView() as view:
        sources = find_sources(corpus, cache_folder(), view.report, settings.encoding)
        with read_corpus(sources, settings.reading(), cache_folder(), view.report) as text:
            tokenizer, choices = make_tokenizer(text, kind, settings.vocab_size, view.report)
            size = text.size
        plain = plain_json(sources.files, settings.reading())
        for line in [*sources.notes, *plain, *map(str, choices)]:
            view.line(line)
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomically(file, tokenizer.to_json())
    vocab_size, seconds = tokenizer.vocab_size, round(time.monotonic() - started, 2)
    result = {"tokenizer": str(file), "kind": tokenizer.kind, "vocab_size": vocab_size}
    if as_json:
        print_json({**result, "bytes": size, "seconds": seconds})
    else:
        click.echo(f"{file}: {vocab_size:,} tokens from {size:,} bytes of text in {seconds} s")
        note(f'next: nanolm tokenizer show --tokenizer {out} "..."')


def text_options(function: Any) -> Any:
    file = click.option("--file", metavar="FILE", help="Read the text from a file.")
    return click.argument("text", nargs=-1)(which(file(function)))


@command.command("encode", cls=Command)
@text_options
@json_option(help="Print one JSON object per text.")
@special_tokens_option()
def encode(
    text: tuple[str, ...],
    tokenizer: str | None,
    file: str | None,
    as_json: bool,
    special_tokens: bool,
) -> None:
    """Convert text to token ids. TEXT comes from the arguments, --file or stdin.

    \b
    nanolm tokenizer encode --tokenizer runs/novel "It was a dark night"
    """
    used = load(tokenizer)
    for part in texts(text, file):
        ids = used.encode_special(part) if special_tokens else used.encode(part)
        note_dropped(used, part)
        if as_json:
            print_json({"ids": ids, "tokens": [spelled(used.tokens[id]) for id in ids]})
        else:
            click.echo(" ".join(map(str, ids)))


@command.command("decode", cls=Command)
@click.argument("ids", nargs=-1)
@which
@json_option(help="Print one JSON object.")
def decode(ids: tuple[str, ...], tokenizer: str | None, as_json: bool) -> None:
    """Convert token ids to text. IDS come from the arguments or stdin, as numbers or JSON.

    \b
    nanolm tokenizer encode --tokenizer gpt2 "Hello" | nanolm tokenizer decode --tokenizer gpt2
    """
    used = load(tokenizer)
    numbers = read_ids(" ".join(ids) if ids else sys.stdin.read(), used.vocab_size)
    text = used.decode(numbers)
    if as_json:
        print_json({"text": text, "ids": numbers})
    else:
        show_text(text)
        if sys.stdout.isatty():
            click.echo()


def note_dropped(tokenizer: "Tokenizer", text: str) -> None:
    from nanolm.text.encoding import dropped_characters

    if dropped := dropped_characters(tokenizer, text):
        note(dropped)


def read_ids(source: str, vocab_size: int) -> list[int]:
    """Numbers separated by spaces or commas, or JSON lines with `ids`."""
    numbers: list[int] = []
    for line in source.splitlines():
        try:
            value = json.loads(line) if line.lstrip().startswith(("{", "[")) else None
            ids = value["ids"] if isinstance(value, dict) else value
            numbers += [int(id) for id in (ids or line.replace(",", " ").split())]
        except (ValueError, KeyError, TypeError):
            cure = "give numbers, as in `nanolm tokenizer decode 15496 995`"
            raise UsageError(f"{line[:40]!r} is not a list of ids; {cure}") from None
    wrong = [id for id in numbers if not 0 <= id < vocab_size]
    if wrong:
        raise UsageError(f"id {wrong[0]}: must be from 0 to {vocab_size - 1} for this tokenizer")
    return numbers


@command.command("show", cls=Command)
@text_options
@click.option("--html", metavar="FILE", help="Write an HTML page instead.")
def show(text: tuple[str, ...], tokenizer: str | None, file: str | None, html: str | None) -> None:
    """Show text with colored tokens and their ids.

    \b
    nanolm tokenizer show "Some words."
    nanolm tokenizer show --tokenizer cl100k "Tokenization isn't trivial"
    nanolm tokenizer show --tokenizer runs/novel --file page.txt --html tokens.html
    """
    used = load(tokenizer)
    if html is not None:
        from nanolm.text.page import tokens_page

        page = tokens_page(used, "\n".join(texts(text, file)), tokenizer or "tokens")
        write_file(Path(html), page)
        click.echo(html)
    else:
        for part in texts(text, file):
            show_tokens(used, part)
            note_dropped(used, part)


def show_tokens(tokenizer: "Tokenizer", text: str) -> None:
    """Rows of colored tokens above their ids; in a pipe, one id and token per line."""
    ids = tokenizer.encode(text)
    if not sys.stdout.isatty():
        for id in ids:
            click.echo(f"{id}\t{json.dumps(spelled(tokenizer.tokens[id]), ensure_ascii=False)}")
        return
    columns = Columns()
    for number, id in enumerate(ids):
        columns.add(visible(tokenizer, id), str(id), COLORS[number % len(COLORS)])
    columns.flush()
    size = len(text.encode())
    each = f"{size / max(1, len(ids)):.2f} bytes per token"
    note(f"{counted(len(ids), 'token')}, {counted(size, 'byte')}: {each}")


@command.command("compare", cls=Command)
@click.argument("corpus", nargs=-1, required=True, metavar="CORPUS...")
@click.option(
    "--tokenizer",
    "tokenizers",
    multiple=True,
    metavar="WHICH",
    help="Tokenizer to compare: a name, a path, or byte, char or bpe:SIZE to train one on this "
    "text; can be repeated.  [default: byte, char, bpe:512, bpe:4096]",
)
@options_of(TrainSettings, {"Reading": READING})
@json_option(help="Print one JSON object per tokenizer.")
def compare(
    corpus: tuple[str, ...], tokenizers: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Compare the bytes per token of several tokenizers on a text.

    \b
    nanolm tokenizer compare novel.txt --tokenizer runs/novel --tokenizer gpt2 --tokenizer bpe:4096
    """
    settings = TrainSettings(corpus=corpus, **options)
    refuse(settings.reading().problems())

    from nanolm.cli.progress import TrainingView
    from nanolm.text.check import compare as compare_on

    with TrainingView() as view:
        named = [(name, load_or_make(name)) for name in tokenizers or DEFAULT_TOKENIZERS]
        rows = compare_on(corpus, settings.reading(), named, view.report)
    if as_json:
        for row in rows:
            print_json(vars(row))
        return
    cells = [["tokenizer", "vocabulary", "tokens", "bytes/token", "characters/token"]]
    for row in rows:
        each = [f"{row.bytes_per_token:.3f}", f"{row.characters_per_token:.3f}"]
        cells.append([row.tokenizer, f"{row.vocab_size:,}", f"{row.tokens:,}", *each])
    show_table(cells)


def load_or_make(name: str) -> "Tokenizer | tuple[str, int | None]":
    """An existing tokenizer, or the kind and size of one to train on the text."""
    kind, _, size = name.partition(":")
    if kind not in TRAINABLE:
        return load(name)
    if size and not (kind == "bpe" and size.isdigit() and 258 <= int(size) <= 1 << 20):
        raise UsageError(f"--tokenizer {name}: give bpe:SIZE, with a size from 258 to 1048576")
    return kind, int(size) if size else None


def load(name: str | None) -> "Tokenizer":
    """The named tokenizer, or that of the newest run, or one trained here."""
    from nanolm.runs.folder import find_tokenizer, runs_by_age

    if name is None:
        newest = next(iter(runs_by_age(Path("runs"))), None)
        if newest is None:  # always the same, without a download
            from nanolm.text.sources import EMBEDDED, embedded_file
            from nanolm.text.tokenizer import train_tokenizer

            trained = f"a tokenizer of {DEFAULT_VOCAB:,} tokens trained on embedded:stories"
            note(f"no runs found; using {trained} (choose another with --tokenizer)")
            corpus = embedded_file(EMBEDDED["stories"][0]).read_text(encoding="utf-8")
            return train_tokenizer([corpus], "bpe", DEFAULT_VOCAB)
        note(f"using the tokenizer of {newest}, the newest run (choose another with --tokenizer)")
        name = str(newest)
    if name in TRAINABLE and not Path(name).exists():
        others = "gpt2, a run, or a folder from `nanolm tokenizer train`"
        raise UsageError(
            f"--tokenizer {name} is not trained yet; use a trained one, such as {others}"
        )
    return find_tokenizer(name, note)


def texts(arguments: tuple[str, ...], file: str | None) -> list[str]:
    if file is not None and arguments:
        raise UsageError("give either TEXT or --file, not both")
    if arguments:
        return list(arguments)
    try:
        return [(Path(file).read_bytes() if file else sys.stdin.buffer.read()).decode()]
    except FileNotFoundError:
        raise UsageError(f"--file {file} does not exist") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file or 'stdin'} is not UTF-8: invalid byte at offset {error.start:,}"
        ) from None
