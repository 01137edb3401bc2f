"""What a model does with a text, as one page for a browser: offline, and nothing in it but our own
script can run.

>>> Path("inspect.html").write_text(inspection_page(tokenizer, seen, heads, {"model": "runs/x"}))
"""

import base64
import json
import math
import zlib
from collections.abc import Iterator
from html import escape
from pathlib import Path

import numpy as np

from nanolm.inspect.decided import Decided
from nanolm.inspect.heads import MIXED, Head
from nanolm.inspect.look import Floats, Foretold, Seen
from nanolm.inspect.vectors import Occurrences, between, similarities
from nanolm.report.curves import Chart, Panel, Series, curves_svg
from nanolm.text.page import SURPRISE_STYLE, legend, named, page, shade
from nanolm.text.tokenizer import Tokenizer

HERE = Path(__file__).parent
LEVELS = (63, 31, 15, 7)  # of attention: as many as there is room for; more are not seen
ROOM = 650_000  # bytes of a page, for attention
SHADES = 10  # of what is coloured without a script
STYLE = (HERE / "page.css").read_text(encoding="utf-8") + "".join(
    f".p{n} {{ background: color-mix(in srgb, var(--ink) {7 * n}%, transparent); }}\n"
    f".n{n} {{ background: color-mix(in srgb, var(--against) {7 * n}%, transparent); }}\n"
    for n in range(1, SHADES + 1)
)
SCRIPT = (HERE / "page.js").read_text(encoding="utf-8")
INKS = '<span id="ink"></span><span id="against"></span>'


def inspection_page(
    tokenizer: Tokenizer,
    seen: Seen,
    heads: list[list[Head]],
    facts: dict[str, str],
    first: tuple[int, int] | None = None,
    decided: tuple[Decided, tuple[str, ...]] | None = None,
) -> str:
    """Tokens, foretelling, attention and layers of one text; of a classifier (with its labels)
    what decided instead of what was foretold. `first` is the head that is shown large at first."""
    spelled = [named(tokenizer, id) for id in seen.ids]
    levels, attention = packed(seen)
    data = {
        "time": len(seen.ids),
        "heads": len(heads[0]),
        "levels": levels,
        "packed": attention,
        "first": 0 if first is None else 2 + first[0] * (len(heads[0]) + 1) + first[1],
    }
    parts: list[str] = []
    if decided:
        parts += verdict(*decided, spelled)
    parts += [
        "<h2>The text</h2>",
        '<p class="say">Point at a token, or touch it: the darker another one, the more the chosen '
        "head looks at it from there.</p>",
        '<div id="tokens">' + "".join(f"<button>{token}</button>" for token in spelled) + "</div>",
        f'<p id="about"></p>{INKS}',
        "<h2>Where each head looks</h2>",
        '<p class="say">From each token (a row) to those before it (columns). Below each map: what '
        "the head does in the mean, and where it looks most from the token above. Choose one to "
        "see it large and on the text.</p>",
        '<div class="maps">',
        *grid(heads),
        '<canvas id="large"></canvas></div>',
        "<h2>Heads with a habit</h2>",
        *habits(heads),
    ]
    if seen.layers:
        parts += [
            "<h2>What each layer would say</h2>",
            '<p class="say">The likeliest next token, if the last norm and the last layer came '
            "right after a layer. The top row is what the model says.</p>",
            *lens(tokenizer, seen, spelled),
            "<h2>What was foretold</h2>",
            '<p class="say">After each token: what came, how likely that was, and the likeliest '
            "tokens.</p>",
            *predictions(tokenizer, seen.foretold, spelled),
        ]
    parts.append(f'<script type="application/json" id="data">{json.dumps(data)}</script>')
    style = SURPRISE_STYLE + STYLE
    return page("What the model sees", facts, "\n".join(parts), style, SCRIPT)


def packed(seen: Seen) -> tuple[int, str]:
    """Attention as bytes up to a level, by its root, since most of it is near 0; each row as far
    as it goes."""
    rows, columns = np.tril_indices(len(seen.ids))
    roots = np.sqrt(seen.attention[:, :, rows, columns])
    for levels in LEVELS:
        text = shrunk(np.rint(levels * roots).astype(np.uint8).tobytes())
        if len(text) <= ROOM:
            break
    return levels, text


def shrunk(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


def verdict(found: Decided, labels: tuple[str, ...], spelled: list[str]) -> Iterator[str]:
    """Which tokens decided, by both measures."""
    ranked = sorted(zip(found.chances.tolist(), labels, strict=True), reverse=True)
    chances = ", ".join(f"{escape(label)} {chance:.1%}" for chance, label in ranked[:6])
    label = escape(labels[found.label])
    yield f"<h2>What decided</h2><p>{chances}</p>"
    yield (
        '<div class="side"><div><h3>attention, rolled out</h3><p class="say">How much of what the '
        "label is read off has come from each token, if looking were all that layers do.</p>"
        f"{shaded(spelled, found.attention)}</div>"
        '<div><h3>gradient times input</h3><p class="say">What speaks for '
        f'<span class="p{SHADES // 2}">{label}</span> and what <span class="n{SHADES // 2}">against'
        "</span> it: how its score would change with the token's vector.</p>"
        f"{shaded(spelled, found.gradient)}</div></div>"
    )


def shaded(spelled: list[str], values: Floats) -> str:
    """The tokens, coloured by a number each."""
    most = float(np.abs(values).max()) or 1.0
    spans = (
        f'<span class="{tint(value / most)}" title="{value:+.4f}">{token}</span>'
        for token, value in zip(spelled, values.tolist(), strict=True)
    )
    return f'<div class="tokens">{"".join(spans)}</div>'


def tint(value: float) -> str:
    """The colour of a number between -1 and 1."""
    step = round(SHADES * abs(value)) if math.isfinite(value) else 0
    return f"{'p' if value > 0 else 'n'}{min(SHADES, step)}"


def grid(heads: list[list[Head]]) -> Iterator[str]:
    """A map for each head, the layers below each other; the means first."""
    yield '<div class="scroll"><table class="grid"><tbody>'
    yield f"<tr><th>all</th><td>{button(-1, -1, 'the mean of all heads', 'mean')}</td></tr>"
    for layer, row in enumerate(heads):
        cells = [button(layer, -1, f"layer {layer + 1}, the mean of its heads", "mean")]
        for number, head in enumerate(row):
            name = f"head {layer + 1}.{number + 1}"
            cells.append(button(layer, number, f"{name} {head.words}", f"{number + 1} {head.kind}"))
        yield f"<tr><th>layer {layer + 1}</th>"
        yield "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</tbody></table></div>"


def button(layer: int, head: int, words: str, short: str) -> str:
    return (
        f'<button data-layer="{layer}" data-head="{head}" title="{words}">'
        f'<canvas></canvas><span>{short}</span><span class="looks"></span></button>'
    )


def habits(heads: list[list[Head]]) -> Iterator[str]:
    """Those that can be named, in words."""
    rows = [
        f"<tr><td>{layer}.{number}</td><td>{head.words}</td></tr>"
        for layer, row in enumerate(heads, start=1)
        for number, head in enumerate(row, start=1)
        if head.kind != MIXED
    ]
    rest = sum(map(len, heads)) - len(rows)
    yield '<div class="scroll"><table id="habits"><thead>'
    yield "<tr><th>head</th><th>on this text</th></tr></thead>"
    yield f"<tbody>{''.join(rows)}</tbody></table></div>"
    if rest:
        yield f"<p>{rest:,} others look here and there.</p>"


def lens(tokenizer: Tokenizer, seen: Seen, spelled: list[str]) -> Iterator[str]:
    """The likeliest next token by each layer, coloured by its probability; the last layer first."""
    yield legend("probability", lambda bits: f"≥ {2**-bits:.2g}", "less")
    yield '<div class="scroll"><table class="lens"><thead><tr><th></th>'
    yield "".join(f"<th>{token}</th>" for token in spelled) + "</tr></thead><tbody>"
    for number in reversed(range(len(seen.layers))):
        yield f"<tr><th>{f'layer {number}' if number else 'embedding'}</th>"
        found = seen.layers[number]
        for id, chance in zip(found.ids[:, 0], found.chances[:, 0], strict=True):
            yield f'<td class="s{shade(bits(chance))}">{named(tokenizer, int(id))}</td>'
        yield "</tr>"
    yield "</tbody></table></div>"


def predictions(tokenizer: Tokenizer, found: Foretold, spelled: list[str]) -> Iterator[str]:
    """After each token, the likeliest ones, and what really came."""
    yield '<div class="scroll"><table><thead><tr><th></th><th>after</th><th>came</th>'
    yield "".join(f"<th>{number}</th>" for number in range(1, found.ids.shape[1] + 1))
    yield "</tr></thead><tbody>"
    for place, token in enumerate(spelled):
        came = "<td></td>"
        next_ = spelled[place + 1] if place + 1 < len(spelled) else None
        if next_ is not None:
            chance = float(found.came[place])
            came = f"<td>{next_} <small>{chance:.3f}, rank {found.rank[place]:,}</small></td>"
        yield f"<tr><th>{place + 1}</th><td>{token}</td>{came}"
        for id, chance in zip(found.ids[place], found.chances[place], strict=True):
            shown = named(tokenizer, int(id))
            kinds = f"s{shade(bits(chance))}" + " came" * (shown == next_)
            yield f'<td class="{kinds}">{shown} <small>{chance:.3f}</small></td>'
        yield "</tr>"
    yield "</tbody></table></div>"


def bits(chance: float) -> float:
    return -math.log2(max(float(chance), 1e-30))


def word_page(found: Occurrences, facts: dict[str, str]) -> str:
    """How alike the vectors of a word are where it stands, layer by layer."""
    cosines = similarities(found.vectors)  # (layers + 1, occurrences, occurrences)
    rows = "".join(f"<li>{escape(text)}</li>" for text in found.around)
    means = between(cosines)
    panel = Panel("mean of all pairs", [Series("mean of all pairs", list(enumerate(means)))])
    parts = [
        f"<ol>{rows}</ol>",
        '<p class="say">The cosine between the vectors of the word at each two places: 1 is the '
        "same direction, 0 nothing in common. Before the first layer a word is the same "
        "everywhere, but for its position; what it means comes from where it stands.</p>",
    ]
    if len(found.around) > 1:
        parts.append(curves_svg(Chart("Similarity by layer", [panel], "layer; 0 is the embedding")))
    for number, matrix in enumerate(cosines):
        parts.append(f"<h2>{f'After layer {number}' if number else 'Embedding'}</h2>")
        parts += cosine_table(matrix)
    return page(f"“{found.word}” in {len(found.around):,} places", facts, "\n".join(parts), STYLE)


def cosine_table(matrix: Floats) -> Iterator[str]:
    yield '<div class="scroll"><table><thead><tr><th></th>'
    yield (
        "".join(f"<th>{number}</th>" for number in range(1, len(matrix) + 1))
        + "</tr></thead><tbody>"
    )
    for number, row in enumerate(matrix.tolist(), start=1):
        cells = "".join(f'<td class="{tint(value)}">{value:.2f}</td>' for value in row)
        yield f"<tr><th>{number}</th>{cells}</tr>"
    yield "</tbody></table></div>"


def positions_page(kind: str, vectors: Floats, facts: dict[str, str]) -> str:
    """The vectors of positions, and how alike they are."""
    parts = [
        f"<h2>The vectors: {kind}</h2>",
        '<p class="say">A row for each position, the first on top; a column for each number of its '
        "vector. Blue is above 0, orange below.</p>",
        heat(vectors / (float(np.abs(vectors).max()) or 1.0)),
        "<h2>How alike they are</h2>",
        '<p class="say">The cosine between each two of them. Where the diagonal is broad, '
        "neighbours look alike to the model.</p>",
        heat(similarities(vectors)),
        INKS,
    ]
    return page("Positions", facts, "\n".join(parts), STYLE, SCRIPT)


def heat(matrix: Floats) -> str:
    """A picture of numbers between -1 and 1."""
    height, width = matrix.shape
    levels = np.rint(127 * np.clip(np.nan_to_num(matrix), -1, 1)).astype(np.int8)
    return (
        f'<canvas class="heat" data-width="{width}" data-height="{height}" '
        f'data-packed="{shrunk(levels.tobytes())}"></canvas>'
    )
