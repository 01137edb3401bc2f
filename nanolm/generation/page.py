"""What a model wrote as a page for a browser: each token by how likely it was, and what else was.

>>> Path("text.html").write_text(samples_page(tokenizer, samples, {"model": "runs/novel"}))
"""

import math
from collections.abc import Sequence
from html import escape

from nanolm.generation.language_model import Sample
from nanolm.generation.words import Word
from nanolm.text.page import (
    PICTURES,
    SURPRISE_STYLE,
    coloured,
    legend,
    marked,
    named,
    shade,
    spelled,
)
from nanolm.text.tokenizer import Tokenizer
from nanolm.webpage import beside, page, table

SIGNS = str.maketrans(PICTURES)
STYLE = beside(__file__, "page.css")
Cell = tuple[str, float]  # a token or word as HTML, and its log-probability


def samples_page(
    tokenizer: Tokenizer,
    samples: list[Sample],
    facts: dict[str, str],
    words: Sequence[Sequence[Word]] = (),
) -> str:
    """Every sample, coloured by probability, and a table of the likeliest tokens if they were kept;
    with `words` of each sample, by words instead."""
    parts = [legend("probability", lambda bits: f"≥ {2**-bits:.2g}", "less")]
    for number, sample in enumerate(samples):
        prompt = marked(sample.prompt, keep=" \t\n")
        if words:
            text = "".join(coloured_word(tokenizer, word) for word in words[number])
            rows = [word_row(word) for word in words[number]]
        else:
            bits = [-logprob / math.log(2) for logprob in sample.logprobs]
            tokens = ((id, each, "") for id, each in zip(sample.tokens, bits, strict=True))
            text = "".join(coloured(tokenizer, tokens))
            rows = token_rows(tokenizer, sample)
        parts.append(f'<section><div class="text"><b>{prompt}</b>{text}</div>')
        if rows and rows[0][1]:
            parts.append(likeliest_table(rows))
        parts.append("</section>")
    title = f"{len(samples):,} samples" if len(samples) > 1 else "A sample"
    return page(title, facts, "\n".join(parts), SURPRISE_STYLE + STYLE)


def token_rows(tokenizer: Tokenizer, sample: Sample) -> list[tuple[Cell, list[tuple[Cell, bool]]]]:
    """Each token, and the likeliest in its place with whether it is that token."""
    return [
        (
            (named(tokenizer, id), logprob),
            [((named(tokenizer, other), chance), other == id) for other, chance in top],
        )
        for id, logprob, top in zip(sample.tokens, sample.logprobs, sample.top, strict=False)
    ]


def word_row(word: Word) -> tuple[Cell, list[tuple[Cell, bool]]]:
    top = [((marked(text), log(chance)), text == word.text) for text, chance in word.top]
    return (marked(word.text), log(word.probability)), top


def coloured_word(tokenizer: Tokenizer, word: Word) -> str:
    pieces = " + ".join(
        escape(spelled(tokenizer.tokens[id]).translate(SIGNS)) for id in word.tokens
    )
    bits = -log(word.probability) / math.log(2)
    text = marked(word.text, keep=" \t").replace("⏎</i>", "⏎</i>\n")
    title = f"{pieces}  p = {word.probability:.3g}  {bits:.2f} bits"
    return f'<span class="s{shade(bits)}" title="{title}">{text}</span>'


def log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -math.inf


def likeliest_table(rows: list[tuple[Cell, list[tuple[Cell, bool]]]]) -> str:
    """The likeliest in each place; what was sampled is bold."""
    most = max(len(top) for _, top in rows)
    lines = (
        f"<th>{number}</th><td>{text}</td><td><small>{math.exp(logprob):.3f}</small></td>"
        + "".join(cell(*other, sampled) for other, sampled in top)
        for number, ((text, logprob), top) in enumerate(rows, start=1)
    )
    return table(["", "written", "", *map(str, range(1, most + 1))], lines)


def cell(text: str, logprob: float, drawn: bool) -> str:
    kinds = f"s{shade(-logprob / math.log(2))}" + " drawn" * drawn
    return f'<td class="{kinds}">{text} <small>{math.exp(logprob):.3f}</small></td>'
