"""`nanolm inspect`: attention, predictions and embeddings of a model on a text."""

import re
import sys
from pathlib import Path

import click

from nanolm.cli.console import note
from nanolm.cli.options import Command, device_option, json_option, unknown, unwritable
from nanolm.errors import UsageError, refuse
from nanolm.training.settings import DEVICES

OUT = "inspect.html"


@click.command("inspect", cls=Command)
@click.argument("run")
@click.argument("text", nargs=-1, metavar="[TEXT]...")
@click.option("--file", metavar="FILE", help="Read the text from a file; - is stdin.")
@click.option("--out", metavar="FILE", help="HTML page.  [default: inspect.html]")
@click.option("--head", metavar="LAYER.HEAD", help="Head to enlarge, such as 3.2.")
@click.option(
    "--top",
    type=click.IntRange(1, 50),
    default=6,
    show_default=True,
    help="Number of predictions to show.",
)
@click.option("--walk", is_flag=True, help="Show every number of one forward pass.")
@click.option("--word", metavar="WORD", help="Compare WORD across the TEXTs, layer by layer.")
@click.option("--neighbours", metavar="WORD", help="List the tokens nearest to WORD.")
@click.option("--positions", is_flag=True, help="Show the position vectors.")
@click.option("--png", metavar="FOLDER", help="Also write PNG figures; needs nanolm[plot].")
@device_option()
@json_option(help="Print the numbers as JSON instead of writing a page.")
def command(
    run: str,
    text: tuple[str, ...],
    file: str | None,
    out: str | None,
    head: str | None,
    top: int,
    walk: bool,
    word: str | None,
    neighbours: str | None,
    positions: bool,
    png: str | None,
    device: str,
    as_json: bool,
) -> None:
    """Visualize attention and the predictions of each layer.

    Writes an HTML page that works offline. For a classifier, the page shows which tokens
    determined the label. RUN can be anything that `nanolm sample` or `nanolm classify` accepts.

    \b
    nanolm inspect runs/novel "It was the best of times"
    nanolm inspect hf://gpt2 "The keys are" --head 5.2
    nanolm inspect runs/novel "Once upon a time" --walk
    nanolm inspect runs/novel --word bank "The bank lent money." "We sat on the bank."
    nanolm inspect runs/novel --neighbours king
    nanolm inspect runs/reviews "A lovely film."       a classifier
    nanolm inspect runs/de-en "Ein Hund bellt."        a model trained on pairs
    """
    flags = {"--word": word, "--neighbours": neighbours, "--positions": positions}
    modes = [flag for flag, value in flags.items() if value]
    problems = unwritable("--out", None if as_json else out or OUT)
    if len(modes) > 1:
        problems.append(f"use only one of {', '.join(modes)}")
    problems += unknown("--device", device, DEVICES)
    if head is not None and not re.fullmatch(r"[1-9][0-9]{0,3}\.[1-9][0-9]{0,3}", head):
        problems.append(f"--head {head}: give a layer and a head, both counted from 1, such as 3.2")
    if head is not None and modes:
        problems.append(f"--head applies to attention; omit {modes[0]}")
    if file is not None and (text or modes):
        problems.append("--file replaces TEXT; omit TEXT, --word, --neighbours and --positions")
    if text and modes and not word:
        problems.append(f"{modes[0]} takes no TEXT")
    elif not text and file is None and (not modes or word):
        problems.append('no text; give "TEXT" or --file FILE')
    elif len(text) > 1 and not word:
        problems.append("only --word takes several texts; quote a text that has spaces")
    if walk and (modes or head or png):
        problems.append(f"--walk cannot be used with {[*modes, '--head' if head else '--png'][0]}")
    if png is not None and neighbours:
        problems.append(
            "--png cannot be used with --neighbours; use --out to write a page with a plot"
        )
    elif png is not None and Path(png).exists() and not Path(png).is_dir():
        problems.append(f"--png {png}: must be a folder")
    refuse(problems)

    from nanolm.cli.inspector import Inspector
    from nanolm.cli.progress import TrainingView
    from nanolm.runs.folder import find_named, is_classifier, is_seq2seq

    with TrainingView() as view:
        folder = find_named(run, note, view.report)
    if modes and (is_classifier(folder) or is_seq2seq(folder)):
        kind = "is a classifier" if is_classifier(folder) else "was trained on pairs"
        raise UsageError(f"{run} {kind}; {modes[0]} needs a language model")
    if file is not None:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        text = (data.decode("utf-8", "replace").strip(),)
    inspector = Inspector(run, Path(out or OUT), Path(png) if png is not None else None, as_json)
    if is_classifier(folder) and walk:
        raise UsageError(f"{run} is a classifier; --walk needs a model that generates text")
    if is_classifier(folder):
        from nanolm.classification.classifier import load as load_classifier

        inspector.attribution(load_classifier(folder, note).on(device, "float32"), text[0], head)
        return
    if is_seq2seq(folder):
        from nanolm.pairs.translator import Translator

        translator = Translator.load(folder, note).on(device, "float32")
        if walk:
            inspector.translation_walk(translator, text[0])
        else:
            inspector.alignment(translator, text[0], head)
        return
    from nanolm.generation.language_model import load
    from nanolm.model.device import choose_device

    loaded = load(folder, note)
    loaded.model.to(choose_device(device)[0])
    if walk:
        inspector.walk(loaded, text[0])
    elif word:
        inspector.word(loaded, word, list(text))
    elif neighbours:
        inspector.neighbours(loaded, neighbours, page=out is not None)
    elif positions:
        inspector.positions(loaded)
    else:
        inspector.text(loaded, text[0], head, top)
