"""`nanolm inspect`: what a model sees in a text."""

import json
import re
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanolm.cli.console import note, printable, tell_of
from nanolm.cli.options import Command, unwritable
from nanolm.errors import DataError, UsageError
from nanolm.formats import counted
from nanolm.training.settings import DEVICES

if TYPE_CHECKING:
    from nanolm.classification.classifier import TextClassifier
    from nanolm.generation.language_model import LanguageModel
    from nanolm.inspect.heads import HeadPattern
    from nanolm.inspect.inspection import Inspection, Predictions
    from nanolm.text.tokenizer import Tokenizer

HEAD = re.compile(r"([1-9][0-9]{0,3})\.([1-9][0-9]{0,3})")
PAGE = "inspect.html"
MOST = 512  # tokens of a page; attention grows with their square


@click.command("inspect", cls=Command)
@click.argument("run")
@click.argument("text", nargs=-1, metavar="[TEXT]...")
@click.option("--file", metavar="FILE", help="The text from a file; - is stdin.")
@click.option("--out", metavar="FILE", default=PAGE, show_default=True, help="The page to write.")
@click.option("--head", metavar="LAYER.HEAD", help="Show this head large at first: 3.2.")
@click.option(
    "--top",
    type=click.IntRange(1, 50),
    default=6,
    show_default=True,
    help="Likeliest tokens at each place.",
)
@click.option("--word", metavar="WORD", help="How WORD differs between the TEXTs, layer by layer.")
@click.option("--neighbours", metavar="WORD", help="The tokens nearest to WORD in embedding space.")
@click.option("--positions", is_flag=True, help="The vectors of positions, as a picture.")
@click.option("--png", metavar="FOLDER", help="Pictures for a paper too; needs nanolm[plot].")
@click.option("--device", metavar="|".join(DEVICES), default="auto", help="Where to run the model.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers; no page is written.")
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
    """Look inside: what the model foretells, where each head looks, what each layer would say.

    It writes one page for a browser, which works offline. Of a classifier it shows which tokens
    decided. RUN is as for `nanolm sample` or `nanolm classify`.

    \b
    nanolm inspect runs/novel "It was the best of times"
    nanolm inspect hf://gpt2 "The keys are" --head 5.2
    nanolm inspect runs/novel --word bank "The bank lent money." "We sat on the bank."
    nanolm inspect runs/novel --neighbours king
    nanolm inspect runs/reviews "A lovely film."       a classifier
    """
    modes = [
        name
        for name, value in (
            ("--word", word),
            ("--neighbours", neighbours),
            ("--positions", positions),
        )
        if value
    ]
    problems = unwritable("--out", None if as_json else out)
    if len(modes) > 1:
        problems.append(f"give one of {', '.join(modes)}")
    if device not in DEVICES:
        problems.append(f"--device {device}: there is {', '.join(DEVICES)}")
    if head is not None and not HEAD.fullmatch(head):
        problems.append(f"--head {head}: give layer and head, from 1.1 on: --head 3.2")
    if head is not None and modes:
        problems.append(f"--head is for attention; leave out {modes[0]}")
    if file is not None and (text or modes):
        problems.append("--file is instead of TEXT, and not for --word, --neighbours, --positions")
    if text and modes and not word:
        problems.append(f"{modes[0]} takes no TEXT")
    elif not text and file is None and (not modes or word):
        problems.append('no text: give one ("..."), or --file FILE')
    elif len(text) > 1 and not word:
        problems.append("several texts are for --word; quote one that has spaces")
    if png is not None and (neighbours or (Path(png).exists() and not Path(png).is_dir())):
        problems.append("--png: give a folder; it has no pictures of --neighbours")
    if problems:
        raise UsageError("\n".join(problems))

    from nanolm.cli.progress import TrainingView
    from nanolm.runs.folder import find_named, is_classifier

    with TrainingView() as view:
        folder = find_named(run, note, view.report)
    if is_classifier(folder) and modes:
        raise UsageError(f"{run} is a classifier; {modes[0]} is for language models")
    inspector = Inspector(run, Path(out), Path(png) if png is not None else None, as_json)
    if is_classifier(folder):
        from nanolm.classification.classifier import load as load_classifier

        classifier = load_classifier(folder, note).on(device, "float32")
        inspector.decided(classifier, one_text(text, file), head)
        return
    from nanolm.generation.language_model import load
    from nanolm.model.device import choose_device

    found = load(folder, note)
    found.model.to(choose_device(device)[0])
    if word:
        inspector.word(found, word, list(text))
    elif neighbours:
        inspector.neighbours(found, neighbours)
    elif positions:
        inspector.positions(found)
    else:
        inspector.text(found, one_text(text, file), head, top)


def one_text(text: tuple[str, ...], file: str | None) -> str:
    if file is None:
        return text[0]
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}") from None
    return data.decode("utf-8", "replace").strip()


class Inspector:
    """Writes what was seen where it was asked for."""

    def __init__(self, run: str, out: Path, png: Path | None, as_json: bool) -> None:
        self.run, self.out, self.png, self.as_json = run, out, png, as_json
        if png is not None:
            png.mkdir(parents=True, exist_ok=True)

    def text(self, found: "LanguageModel", text: str, head: str | None, top: int) -> None:
        from nanolm.inspect.heads import describe_heads
        from nanolm.inspect.inspection import inspect_text
        from nanolm.inspect.page import inspection_page

        ids = cut(found.tokenizer.encode_prompt(text), found.model.window())
        seen = inspect_text(found.model, ids, top)
        heads = describe_heads(seen.attention, ids)
        first = chosen(head, heads)
        if self.as_json:
            values = {"tokens": names(found.tokenizer, ids), **attention_json(seen, heads)}
            layers = [layer_json(found.tokenizer, layer) for layer in seen.layers]
            self.print({**values, "predictions": layers[-1], "layers": layers})
        else:
            facts = self.facts(seen)
            self.write(inspection_page(found.tokenizer, seen, heads, facts, first))
        if self.png is not None:
            from nanolm.inspect.png import predictions_png

            spelled = partial(visible, found.tokenizer)
            self.attention(seen, heads, first, spelled(ids))
            predictions_png(self.png / "predictions.png", seen, spelled)
            tell_of(self.png / "predictions.png")

    def decided(self, found: "TextClassifier", text: str, head: str | None) -> None:
        from nanolm.inspect.attribution import attribute
        from nanolm.inspect.heads import describe_heads
        from nanolm.inspect.inspection import Inspection
        from nanolm.inspect.page import inspection_page

        window = min(found.model.base.window() or MOST, found.model.config.window or MOST)
        ids = cut(found.tokenizer.encode_prompt(text.strip()), window)
        what = attribute(found.model, ids)
        seen = Inspection(ids, what.attention, [])
        heads = describe_heads(seen.attention, ids)
        first = chosen(head, heads)
        spelled = names(found.tokenizer, ids)
        if self.as_json:
            chances = dict(zip(found.labels, rounded(what.probabilities), strict=True))
            self.print(
                {
                    "tokens": spelled,
                    "label": found.labels[what.label],
                    "probabilities": chances,
                    "rollout": rounded(what.rollout),
                    "gradient_x_input": rounded(what.gradient),
                    **attention_json(seen, heads),
                }
            )
        else:
            facts = self.facts(seen)
            both = (what, found.labels)
            self.write(inspection_page(found.tokenizer, seen, heads, facts, first, both))
        if self.png is not None:
            self.attention(seen, heads, first, visible(found.tokenizer, ids))

    def attention(
        self,
        seen: "Inspection",
        heads: "list[list[HeadPattern]]",
        first: tuple[int, int] | None,
        spelled: list[str],
    ) -> None:
        from nanolm.inspect.png import attention_png, head_png

        assert self.png is not None
        attention_png(self.png / "attention.png", seen, heads)
        tell_of(self.png / "attention.png")
        if first is not None:
            layer, number = first
            title = f"head {layer + 1}.{number + 1} {heads[layer][number].words}"
            file = self.png / f"head-{layer + 1}.{number + 1}.png"
            head_png(file, seen.attention[layer, number], title, spelled)
            tell_of(file)

    def word(self, found: "LanguageModel", word: str, texts: list[str]) -> None:
        from nanolm.inspect.page import word_page
        from nanolm.inspect.vectors import mean_similarities, occurrences, similarities

        where = occurrences(found.model, found.tokenizer, word, texts)
        cosines = similarities(where.vectors)
        if self.as_json:
            values = {"word": word, "places": where.contexts, "cosines": rounded(cosines)}
            self.print({**values, "means": rounded(mean_similarities(cosines))})
        else:
            self.write(word_page(where, {"model": self.run}))
        if self.png is not None:
            from nanolm.inspect.png import matrices_png

            titles = ["embedding", *(f"after layer {n}" for n in range(1, len(cosines)))]
            matrices_png(self.png / "word.png", list(zip(titles, cosines, strict=True)))
            tell_of(self.png / "word.png")

    def neighbours(self, found: "LanguageModel", word: str) -> None:
        from nanolm.inspect.vectors import neighbours, token_of

        id = token_of(found.tokenizer, word)
        near = neighbours(found.model, id)
        spelled = names(found.tokenizer, [other for other, _ in near])
        if self.as_json:
            values = [
                {"token": text, "cosine": round(cosine, 6)}
                for text, (_, cosine) in zip(spelled, near, strict=True)
            ]
            self.print({"token": names(found.tokenizer, [id])[0], "neighbours": values})
            return
        for text, (_, cosine) in zip(spelled, near, strict=True):
            click.echo(f"{cosine:6.3f}  {printable(text)}")

    def positions(self, found: "LanguageModel") -> None:
        from nanolm.inspect.page import positions_page
        from nanolm.inspect.vectors import position_vectors, similarities

        kind, vectors = position_vectors(found.model)
        if self.as_json:
            self.print({"kind": kind, "vectors": rounded(vectors)})
        else:
            facts = {"model": self.run, "positions": f"{len(vectors):,}"}
            self.write(positions_page(kind, vectors, facts))
        if self.png is not None:
            from nanolm.inspect.png import matrices_png

            largest = float(abs(vectors).max()) or 1.0
            pairs = [(kind, vectors / largest), ("cosines", similarities(vectors))]
            matrices_png(self.png / "positions.png", pairs, aspect="auto")
            tell_of(self.png / "positions.png")

    def facts(self, seen: "Inspection") -> dict[str, str]:
        layers, heads = seen.attention.shape[:2]
        shape = f"{counted(layers, 'layer')} of {counted(heads, 'head')}"
        return {"model": self.run, "tokens": f"{len(seen.ids):,}", "attention": shape}

    def write(self, page: str) -> None:
        from nanolm.files import write_atomically

        write_atomically(self.out, page)
        tell_of(self.out)

    def print(self, values: dict[str, Any]) -> None:
        click.echo(json.dumps({"model": self.run, **values}, ensure_ascii=False))


def cut(ids: list[int], window: int | None) -> list[int]:
    """As many of the first tokens as the model and a page have room for."""
    most = min(MOST, window or MOST)
    if len(ids) > most:
        note(f"only the first {most:,} of {len(ids):,} tokens are looked at")
    return ids[:most]


def chosen(head: str | None, heads: "list[list[HeadPattern]]") -> tuple[int, int] | None:
    match = HEAD.fullmatch(head or "")
    if not match:
        return None
    layer, number = (int(part) - 1 for part in match.groups())
    if layer >= len(heads) or number >= len(heads[0]):
        raise UsageError(f"--head {head}: the last one is {len(heads)}.{len(heads[0])}")
    return layer, number


def names(tokenizer: "Tokenizer", ids: list[int]) -> list[str]:
    from nanolm.text.page import spelled

    return [tokenizer.special.get(id) or spelled(tokenizer.tokens[id]) for id in ids]


def visible(tokenizer: "Tokenizer", ids: list[int]) -> list[str]:
    """With white space that can be seen."""
    from nanolm.text.page import PICTURES

    return ["".join(PICTURES.get(char, char) for char in name) for name in names(tokenizer, ids)]


def rounded(values: Any) -> Any:
    import numpy as np

    return np.round(np.asarray(values, dtype=np.float64), 7).tolist()


def attention_json(seen: "Inspection", heads: "list[list[HeadPattern]]") -> dict[str, Any]:
    described = [[{**asdict(head), "words": head.words} for head in row] for row in heads]
    return {"heads": described, "attention": rounded(seen.attention)}


def layer_json(tokenizer: "Tokenizer", found: "Predictions") -> dict[str, Any]:
    return {
        "tokens": [names(tokenizer, row) for row in found.ids.tolist()],
        "probabilities": rounded(found.probabilities),
        "came": rounded(found.actual),
        "rank": found.rank.tolist(),
    }
