"""Generated text as an HTML page, with the probability of each token and its alternatives.

>>> Path("text.html").write_text(samples_page(tokenizer, samples, {"model": "runs/novel"}))
"""

import math
from collections.abc import Sequence
from html import escape

from nanolm.generation.language_model import Sample
from nanolm.generation.words import Word
from nanolm.text import page as text_page
from nanolm.text import spelled
from nanolm.text.page import colored, folded, marked, named, prediction, prediction_legend, shade
from nanolm.text.tokenizer import Tokenizer
from nanolm.webpage import beside, page, table

SIGNS = str.maketrans(text_page.PICTURES)
STYLE = text_page.SURPRISE_STYLE + beside(__file__, "page.css")


def samples_page(
    tokenizer: Tokenizer,
    samples: list[Sample],
    facts: dict[str, str],
    words: Sequence[Sequence[Word]] = (),
) -> str:
    """Every sample, colored by probability, with a table of the most likely tokens if they were
    kept. With `words` of each sample, by word instead of by token."""
    parts = [text_page.legend("probability", lambda bits: f"≥ {2**-bits:.2g}", "lower")]
    for number, sample in enumerate(samples):
        rows = []  # the sampled text, its probability, and cells of the most likely
        if words:
            text = "".join(colored_word(tokenizer, word) for word in words[number])
            for word in words[number]:
                cells = [prediction(marked(other), p, other == word.text) for other, p in word.top]
                rows.append((marked(word.text), word.probability, cells))
        else:
            bits = [-logprob / math.log(2) for logprob in sample.logprobs]
            tokens = ((id, each, "") for id, each in zip(sample.tokens, bits, strict=True))
            text = "".join(colored(tokenizer, tokens))
            for id, logprob, top in zip(sample.tokens, sample.logprobs, sample.top, strict=False):
                cells = [prediction(named(tokenizer, t), math.exp(p), t == id) for t, p in top]
                rows.append((named(tokenizer, id), math.exp(logprob), cells))
        prompt = marked(sample.prompt, keep=" \t\n")
        parts.append(f'<section><div class="text"><b>{prompt}</b>{text}</div>')
        if rows and rows[0][2]:
            most = max(len(cells) for *_, cells in rows)
            lines = (
                f"<th>{place}</th>{prediction(text, p, came=True)}{''.join(cells)}"
                for place, (text, p, cells) in enumerate(rows, start=1)
            )
            ranked = table(["", "sampled", *map(str, range(1, most + 1))], lines)
            parts.append(
                folded(
                    prediction_legend("sampled") + ranked, len(rows), "word" if words else "token"
                )
            )
        parts.append("</section>")
    title = f"{len(samples):,} samples" if len(samples) > 1 else "A sample"
    return page(title, facts, "\n".join(parts), STYLE)


def colored_word(tokenizer: Tokenizer, word: Word) -> str:
    tokens = (spelled(tokenizer.tokens[id]).translate(SIGNS) for id in word.tokens)
    bits = surprisal(word.probability)
    text = marked(word.text, keep=" \t").replace("⏎</i>", "⏎</i>\n")
    title = f"{' + '.join(map(escape, tokens))}  p = {word.probability:.3g}  {bits:.2f} bits"
    return f'<span class="s{shade(bits)}" title="{title}">{text}</span>'


def surprisal(probability: float) -> float:
    """Surprisal in bits."""
    return -math.log2(probability) if probability > 0 else math.inf
