"""`nanolm inspect`: attention, predictions and embeddings of a model on a text."""

import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanolm.cli.columns import visible
from nanolm.cli.console import note, note_written, print_json, write_page
from nanolm.cli.options import Command, device_option, json_option, unknown, unwritable
from nanolm.errors import UsageError, refuse
from nanolm.files import replacing
from nanolm.formats import counted, printable
from nanolm.text import spelled
from nanolm.training.settings import DEVICES

if TYPE_CHECKING:
    from nanolm.classification.classifier import TextClassifier
    from nanolm.generation.language_model import LanguageModel
    from nanolm.inspect.attribution import Attribution
    from nanolm.inspect.inspection import Inspection
    from nanolm.text.tokenizer import Tokenizer

MOST_TOKENS = 512  # per page; attention grows quadratically


@click.command("inspect", cls=Command)
@click.argument("run")
@click.argument("text", nargs=-1, metavar="[TEXT]...")
@click.option("--file", metavar="FILE", help="Read the text from a file; - is stdin.")
@click.option("--out", metavar="FILE", default="inspect.html", show_default=True, help="HTML page.")
@click.option("--head", metavar="LAYER.HEAD", help="Head to show enlarged, such as 3.2.")
@click.option(
    "--top",
    type=click.IntRange(1, 50),
    default=6,
    show_default=True,
    help="Number of predictions to show.",
)
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
    out: str,
    head: str | None,
    top: int,
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
    nanolm inspect runs/novel --word bank "The bank lent money." "We sat on the bank."
    nanolm inspect runs/novel --neighbours king
    nanolm inspect runs/reviews "A lovely film."       a classifier
    """
    flags = {"--word": word, "--neighbours": neighbours, "--positions": positions}
    modes = [flag for flag, value in flags.items() if value]
    problems = unwritable("--out", None if as_json else out)
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
    if png is not None and (neighbours or (Path(png).exists() and not Path(png).is_dir())):
        problems.append("--png: name a folder, and omit --neighbours, which has no figures")
    refuse(problems)

    from nanolm.cli.progress import TrainingView
    from nanolm.runs.folder import find_named, is_classifier

    with TrainingView() as view:
        folder = find_named(run, note, view.report)
    if is_classifier(folder) and modes:
        raise UsageError(f"{run} is a classifier; {modes[0]} needs a language model")
    if file is not None:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        text = (data.decode("utf-8", "replace").strip(),)
    inspector = Inspector(run, Path(out), Path(png) if png is not None else None, as_json)
    if is_classifier(folder):
        from nanolm.classification.classifier import load as load_classifier

        inspector.attribution(load_classifier(folder, note).on(device, "float32"), text[0], head)
        return
    from nanolm.generation.language_model import load
    from nanolm.model.device import choose_device

    loaded = load(folder, note)
    loaded.model.to(choose_device(device)[0])
    if word:
        inspector.word(loaded, word, list(text))
    elif neighbours:
        inspector.neighbours(loaded, neighbours)
    elif positions:
        inspector.positions(loaded)
    else:
        inspector.text(loaded, text[0], head, top)


class Inspector:
    def __init__(self, run: str, out: Path, png: Path | None, as_json: bool) -> None:
        self.run, self.out, self.png, self.as_json = run, out, png, as_json

    def text(self, loaded: "LanguageModel", text: str, head: str | None, top: int) -> None:
        from nanolm.inspect.inspection import inspect_text
        from nanolm.inspect.png import predictions_png

        ids = cut(loaded.tokenizer.encode_prompt(text), loaded.model.window())
        inspection = inspect_text(loaded.model, ids, top)
        self.attention(loaded.tokenizer, inspection, head)
        self.draw("predictions.png", predictions_png, inspection, partial(shown, loaded.tokenizer))

    def attribution(self, classifier: "TextClassifier", text: str, head: str | None) -> None:
        from nanolm.inspect.attribution import attribute
        from nanolm.inspect.inspection import Inspection

        model, tokenizer = classifier.model, classifier.tokenizer
        window = min(model.base.window() or MOST_TOKENS, model.config.window or MOST_TOKENS)
        attribution = attribute(model, ids := cut(tokenizer.encode_prompt(text.strip()), window))
        inspection = Inspection(ids, attribution.attention, [])
        self.attention(tokenizer, inspection, head, (attribution, classifier.labels))

    def attention(
        self,
        tokenizer: "Tokenizer",
        inspection: "Inspection",
        head: str | None,
        decision: "tuple[Attribution, tuple[str, ...]] | None" = None,
    ) -> None:
        """The attention of each head, with layer predictions or a classifier's attribution."""
        from nanolm.inspect.heads import describe_heads
        from nanolm.inspect.page import inspection_page
        from nanolm.inspect.png import attention_png, head_png

        heads = describe_heads(inspection.attention, inspection.ids)
        chosen = None
        if head is not None:
            layer, number = (int(part) - 1 for part in head.split("."))
            if layer >= len(heads) or number >= len(heads[0]):
                raise UsageError(f"--head {head}: the last head is {len(heads)}.{len(heads[0])}")
            chosen = layer, number
        if self.as_json:
            values: dict[str, Any] = {"model": self.run, "tokens": names(tokenizer, inspection.ids)}
            if decision:
                attribution, labels = decision
                probabilities = rounded(attribution.probabilities)
                values["label"] = labels[attribution.label]
                values["probabilities"] = dict(zip(labels, probabilities, strict=True))
                values["rollout"] = rounded(attribution.rollout)
                values["gradient_x_input"] = rounded(attribution.gradient)
            values["heads"] = [[asdict(h) | {"words": h.words} for h in row] for row in heads]
            values["attention"] = rounded(inspection.attention)
            layers = [
                {
                    "tokens": [names(tokenizer, row) for row in layer.ids.tolist()],
                    "probabilities": rounded(layer.probabilities),
                    "came": rounded(layer.actual),
                    "rank": layer.rank.tolist(),
                }
                for layer in inspection.layers
            ]
            if layers:
                values |= {"predictions": layers[-1], "layers": layers}
            print_json(values)
        else:
            shape = f"{counted(len(heads), 'layer')} of {counted(len(heads[0]), 'head')}"
            facts = {"model": self.run, "tokens": f"{len(inspection.ids):,}", "attention": shape}
            page = inspection_page(tokenizer, inspection, heads, facts, chosen, decision)
            write_page(self.out, page)
        self.draw("attention.png", attention_png, inspection, heads)
        if chosen is not None:
            title = f"head {head} {heads[chosen[0]][chosen[1]].words}"
            spelled = shown(tokenizer, inspection.ids)
            self.draw(f"head-{head}.png", head_png, inspection.attention[chosen], title, spelled)

    def word(self, loaded: "LanguageModel", word: str, texts: list[str]) -> None:
        from nanolm.inspect.page import word_page
        from nanolm.inspect.png import matrices_png
        from nanolm.inspect.vectors import mean_similarities, occurrences, similarities

        places = occurrences(loaded.model, loaded.tokenizer, word, texts)
        cosines = similarities(places.vectors)
        if self.as_json:
            values = {"word": word, "places": places.contexts, "cosines": rounded(cosines)}
            print_json({"model": self.run, **values, "means": rounded(mean_similarities(cosines))})
        else:
            write_page(self.out, word_page(places, {"model": self.run}))
        titles = ["embedding", *(f"after layer {n}" for n in range(1, len(cosines)))]
        self.draw("word.png", matrices_png, list(zip(titles, cosines, strict=True)))

    def neighbours(self, loaded: "LanguageModel", word: str) -> None:
        from nanolm.inspect.vectors import neighbours, token_of

        id = token_of(loaded.tokenizer, word)
        others, cosines = zip(*neighbours(loaded.model, id), strict=True)
        token, *near = names(loaded.tokenizer, [id, *others])
        if self.as_json:
            pairs = zip(near, cosines, strict=True)
            values = [{"token": text, "cosine": round(cosine, 6)} for text, cosine in pairs]
            print_json({"model": self.run, "token": token, "neighbours": values})
            return
        for text, cosine in zip(near, cosines, strict=True):
            click.echo(f"{cosine:6.3f}  {printable(text)}")

    def positions(self, loaded: "LanguageModel") -> None:
        from nanolm.inspect.page import positions_page
        from nanolm.inspect.png import matrices_png
        from nanolm.inspect.vectors import position_vectors, similarities

        kind, vectors = position_vectors(loaded.model)
        if self.as_json:
            print_json({"model": self.run, "kind": kind, "vectors": rounded(vectors)})
        else:
            facts = {"model": self.run, "positions": f"{len(vectors):,}"}
            write_page(self.out, positions_page(kind, vectors, facts))
        largest = float(abs(vectors).max()) or 1.0
        pairs = [(kind, vectors / largest), ("cosines", similarities(vectors))]
        self.draw("positions.png", matrices_png, pairs, "auto")

    def draw(self, name: str, draw: Callable[..., None], *arguments: Any) -> None:
        if self.png is not None:
            self.png.mkdir(parents=True, exist_ok=True)
            with replacing(self.png / name) as temporary:
                draw(temporary, *arguments)
            note_written(self.png / name)


def cut(ids: list[int], window: int | None) -> list[int]:
    """The first tokens, truncated to the limits of the model and the page."""
    most = min(MOST_TOKENS, window or MOST_TOKENS)
    if len(ids) > most:
        note(f"truncated to the first {most:,} of {len(ids):,} tokens")
    return ids[:most]


def names(tokenizer: "Tokenizer", ids: list[int]) -> list[str]:
    return [tokenizer.special.get(id) or spelled(tokenizer.tokens[id]) for id in ids]


def shown(tokenizer: "Tokenizer", ids: list[int]) -> list[str]:
    return [visible(tokenizer, id) for id in ids]


def rounded(values: Any) -> Any:
    import numpy as np

    return np.round(np.asarray(values, dtype=np.float64), 7).tolist()
