"""Inspections as HTML pages that work offline.

>>> Path("inspect.html").write_text(inspection_page(tokenizer, inspection, heads, {"model": "x"}))
"""

import base64
import json
import math
import zlib
from collections.abc import Sequence
from html import escape
from string import Template

import numpy as np

from nanolm import webpage
from nanolm.formats import counted
from nanolm.inspect.attribution import Attribution
from nanolm.inspect.heads import MIXED, HeadPattern
from nanolm.inspect.inspection import Floats, Inspection, Predictions
from nanolm.inspect.vectors import Occurrences, mean_similarities, pca, similarities
from nanolm.report.curves import Chart, Panel, Series
from nanolm.text.page import SURPRISE_STYLE, folded, marked, named, prediction, prediction_legend
from nanolm.text.tokenizer import Tokenizer

ATTENTION_LEVELS = (255, 63, 31, 15, 7)  # the most that fit
MAX_ATTENTION_BYTES = 650_000  # per page
TINTS = 10  # of each color, in page.css
STYLE_SHEET = webpage.beside(__file__, "page.css")
DRAWING = webpage.beside(__file__, "drawing.js")
SCRIPT = DRAWING + webpage.beside(__file__, "page.js")
WITHOUT_NGRAMS = {"n-gram scores": "not included"}  # a remark for classifiers that have them


def inspection_page(
    tokenizer: Tokenizer,
    inspection: Inspection,
    heads: list[list[HeadPattern]],
    facts: dict[str, str],
    first: tuple[int, int] | None = None,
    attribution: tuple[Attribution, tuple[str, ...]] | None = None,
) -> str:
    """Tokens, attention, and the predictions of each layer or the attribution of a label. The head
    `first` is enlarged initially."""
    tokens = [named(tokenizer, id) for id in inspection.ids]
    triangles = inspection.attention[:, :, *np.tril_indices(len(tokens))]
    body = attribution_section(*attribution, tokens) if attribution else ""
    body += filled("attention", tokens=buttons(tokens))
    body += head_maps(triangles, len(tokens), None, first, heads)
    body += f"<h2>Heads with a clear pattern</h2>{pattern_table(heads)}"
    if inspection.layers:
        body += filled(
            "predictions",
            scale=prediction_legend(actual=""),
            layers=layer_table(tokenizer, inspection.layers, tokens),
            predictions=prediction_table(tokenizer, inspection.layers[-1], inspection.ids),
        )
    facts = facts | {"attention": shape(inspection.attention)}
    return webpage.page("What the model sees", facts, body, SURPRISE_STYLE + STYLE_SHEET, SCRIPT)


def filled(template: str, **parts: str) -> str:
    return Template(webpage.beside(__file__, f"templates/{template}.html")).substitute(parts)


def alignment_page(
    weights: Floats,
    source_tokens: list[str],
    target_tokens: list[str],
    facts: dict[str, str],
    first: tuple[int, int] | None = None,
) -> str:
    """Cross-attention from each target token to the source: `weights` are (layers, heads, target,
    source)."""
    sources, targets = (
        [marked(token) for token in side] for side in (source_tokens, target_tokens)
    )
    spans = "".join(f"<span>{token}</span>" for token in sources)
    body = filled("alignment", source=spans, target=buttons(targets))
    body += head_maps(weights, len(targets), len(sources), first)
    facts = facts | {"attention": shape(weights)}
    return webpage.page("Alignment", facts, body, STYLE_SHEET, SCRIPT)


def shape(attention: Floats) -> str:
    layers, heads = attention.shape[:2]
    return f"{counted(layers, 'layer')} of {counted(heads, 'head')}"


def buttons(tokens: list[str]) -> str:
    return "".join(f"<button>{token}</button>" for token in tokens)


def head_maps(
    weights: Floats,
    time: int,
    source: int | None,
    first: tuple[int, int] | None,
    patterns: Sequence[Sequence[HeadPattern]] = (),
) -> str:
    """The maps of all heads: `weights` are (layers, heads, ...). The head `first` is enlarged
    initially, beside the one with the clearest pattern."""
    (layers, heads), roots = weights.shape[:2], np.sqrt(weights)  # most weights are small
    for levels in ATTENTION_LEVELS:
        packed = compressed(np.rint(levels * roots).astype(np.uint8))
        if len(packed) <= MAX_ATTENTION_BYTES:
            break
    labels = [[(head.words, head.kind) for head in row] for row in patterns]
    clear = [head.shares.get(head.kind, 0.0) for row in patterns for head in row]
    second = divmod(clear.index(max(clear)) if clear else 0, heads)
    chosen = (first, None if second == first else second)
    # In the grid, the averages come first.
    shown = [2 + head[0] * (heads + 1) + head[1] if head else 0 for head in chosen]
    sizes = {"time": time, "source": source, "heads": heads, "levels": levels}
    data = json.dumps({**sizes, "shown": shown, "packed": packed})
    return filled("heads", grid=head_grid(labels or [[("", "")] * heads] * layers), data=data)


def compressed(array: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(array.tobytes(), 9)).decode()


def attribution_section(result: Attribution, labels: tuple[str, ...], tokens: list[str]) -> str:
    ranked = sorted(zip(result.probabilities.tolist(), labels, strict=True), reverse=True)
    return filled(
        "attribution",
        probabilities=", ".join(f"{escape(label)} {share:.1%}" for share, label in ranked[:6]),
        label=escape(labels[result.label]),
        rollout=tinted_tokens(tokens, result.rollout),
        gradient=tinted_tokens(tokens, result.gradient),
    )


def tinted_tokens(tokens: list[str], values: Floats) -> str:
    largest = float(np.abs(values).max()) or 1.0
    spans = "".join(
        f'<span class="{tint(value / largest)}" title="{value:+.4f}">{token}</span>'
        for token, value in zip(tokens, values.tolist(), strict=True)
    )
    return f'<div class="tokens">{spans}</div>'


def tint(value: float) -> str:
    """The color of a number between -1 and 1."""
    level = round(TINTS * abs(value)) if math.isfinite(value) else 0
    return f"{'pos' if value > 0 else 'neg'} w{min(TINTS, level)}"


def head_grid(heads: list[list[tuple[str, str]]]) -> str:
    """A map for each head, one row per layer, with the averages first. Of each head, the pattern in
    a sentence and in a word."""
    rows = [f"<th>all</th>{head_button(-1, -1, 'Average of all heads', 'average')}"]
    for layer, row in enumerate(heads):
        cells = head_button(layer, -1, f"Layer {layer + 1}, average of its heads", "average")
        for number, (words, kind) in enumerate(row):
            title = f"Head {layer + 1}.{number + 1} {words}".strip()
            cells += head_button(layer, number, title, f"{number + 1} {kind}")
        rows.append(f"<th>layer {layer + 1}</th>{cells}")
    return webpage.table([], rows, "grid")


def head_button(layer: int, head: int, title: str, label: str) -> str:
    data = f'data-layer="{layer}" data-head="{head}" title="{title}"'
    inside = f'<canvas aria-hidden="true"></canvas><span>{label}</span><span class="looks"></span>'
    return f"<td><button {data}>{inside}</button></td>"


def pattern_table(heads: list[list[HeadPattern]]) -> str:
    rows = [
        f"<td>{layer}.{number}</td><td>{head.words}</td>"
        for layer, row in enumerate(heads, start=1)
        for number, head in enumerate(row, start=1)
        if head.kind != MIXED
    ]
    rest = sum(map(len, heads)) - len(rows)
    table = webpage.table(["head", "pattern on this text"], rows, "habits") if rows else ""
    table = folded(table, len(rows), "head") if rows else ""
    return table + (f"<p>Heads without a clear pattern: {rest:,}.</p>" if rest else "")


def layer_table(tokenizer: Tokenizer, layers: list[Predictions], tokens: list[str]) -> str:
    """Each layer's most likely next token, colored by its probability; the last layer first."""
    rows = []
    for number, layer in enumerate(layers):
        best = zip(layer.ids[:, 0], layer.probabilities[:, 0], strict=True)
        cells = (prediction(named(tokenizer, int(id)), p) for id, p in best)
        rows.append(f"<th>{f'layer {number}' if number else 'embedding'}</th>{''.join(cells)}")
    return webpage.table(["", *tokens], rows[::-1], "lens")


def prediction_table(tokenizer: Tokenizer, predictions: Predictions, ids: list[int]) -> str:
    """For each token: the actual next token and the most likely ones."""
    tokens = [named(tokenizer, id) for id in ids]
    came = zip(tokens[1:], predictions.actual, predictions.rank, strict=True)
    actual = [prediction(token, p, True, f", rank {rank:,}") for token, p, rank in came]
    rows = []
    for place, cell in enumerate([*actual, "<td></td>"]):
        best = zip(predictions.ids[place], predictions.probabilities[place], strict=True)
        next_id = ids[place + 1] if place < len(actual) else None
        cells = (prediction(named(tokenizer, int(id)), p, id == next_id) for id, p in best)
        rows.append(f"<th>{place + 1}</th><td>{tokens[place]}</td>{cell}{''.join(cells)}")
    ranks = map(str, range(1, predictions.ids.shape[1] + 1))
    table = webpage.table(["", "after", "actual", *ranks], rows)
    return folded(prediction_legend() + table, len(rows), "token")


def word_page(word: Occurrences, facts: dict[str, str]) -> str:
    """How similar the vectors of a word's occurrences are, layer by layer."""
    cosines = similarities(word.vectors)  # (layers + 1, occurrences, occurrences)
    count = len(word.contexts)
    name = "mean cosine similarity of all pairs"
    panel = Panel(name, [Series(name, list(enumerate(mean_similarities(cosines))))])
    chart = Chart("Similarity by layer", [panel], "layer (0 is the embedding)")
    layers = ""
    for matrix in cosines.tolist():
        rows = []
        for number, row in enumerate(matrix, start=1):
            cells = "".join(f'<td class="{tint(value)}">{value:.2f}</td>' for value in row)
            rows.append(f"<th>{number}</th>{cells}")
        table = webpage.table(["", *map(str, range(1, count + 1))], rows)
        layers += f'<section class="layer">{table}</section>'
    contexts = "".join(f"<li>{escape(text)}</li>" for text in word.contexts)
    labels = [f"{number} {text}" for number, text in enumerate(word.contexts, start=1)]
    pairs = {"map": vector_map(word.vectors, labels), "chart": chart.svg, "layers": layers}
    shown = pairs if count > 1 else dict.fromkeys(pairs, "")
    body = filled("word", contexts=contexts, **shown)
    title = f"“{word.word}”: {counted(count, 'occurrence')}"
    return webpage.page(title, facts, body, STYLE_SHEET, SCRIPT)


def vector_map(vectors: Floats, labels: list[str]) -> str:
    """Vectors (layers, count, dim) in two dimensions; phones show the first word of each label."""
    points, shares = (each.round(4).tolist() for each in pca(vectors))
    data = json.dumps({"points": points, "shares": shares, "labels": labels})
    return filled("map", last=str(len(points) - 1), data=data.replace("<", r"\u003c"))


def neighbours_page(
    names: list[str], vectors: Floats, cosines: Sequence[float], facts: dict[str, str]
) -> str:
    """A token and those nearest to it, by the cosine similarity of their embeddings. `names` have
    no spaces."""
    rows = (
        f'<td>{escape(text)}</td><td class="{tint(cosine)}">{cosine:.3f}</td>'
        for text, cosine in zip(names[1:], cosines, strict=True)
    )
    body = vector_map(vectors[None], [f"[{names[0]}]", *names[1:]])
    body += webpage.table(["token", "cosine similarity"], rows)
    title = f"Tokens nearest to “{names[0]}”"
    return webpage.page(title, facts, body, STYLE_SHEET, SCRIPT)


def positions_page(kind: str, vectors: Floats, facts: dict[str, str]) -> str:
    cosines = heat_map(similarities(vectors), "position,position")
    shown = heat_map(vectors, "position,dimension")
    body = filled("positions", kind=kind, vectors=shown, cosines=cosines)
    return webpage.page("Positions", facts, body, STYLE_SHEET, SCRIPT)


def heat_map(matrix: Floats, names: str) -> str:
    """A picture of a matrix; `names` are those of its axes."""
    matrix = np.nan_to_num(matrix)
    most = float(np.abs(matrix).max()) or 1.0
    packed = compressed(np.rint(127 * (matrix / most)).astype(np.int8))
    sizes = dict(zip(("height", "width"), map(str, matrix.shape), strict=True))
    return filled("heat", **sizes, packed=packed, names=names, most=f"{most:.3g}")
