"""What a model wrote as a page for a browser: each token by how likely it was, and what else was.

>>> Path("text.html").write_text(samples_page(tokenizer, samples, {"model": "runs/novel"}))
"""

import math
from collections.abc import Iterator

from nanolm.generation.language_model import Sample
from nanolm.text.page import SURPRISE_STYLE, coloured, legend, marked, named, page, shade
from nanolm.text.tokenizer import Tokenizer

STYLE = """
section { margin: 0 0 3rem; }
.scroll { overflow-x: auto; margin-top: 1.5rem; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.15rem 0.5rem; text-align: left; white-space: nowrap; }
th { font-weight: normal; opacity: 0.7; }
tbody tr { border-top: 1px solid light-dark(#ddd, #444); }
td small { opacity: 0.75; }
td.drawn { font-weight: bold; }
"""


def samples_page(tokenizer: Tokenizer, samples: list[Sample], facts: dict[str, str]) -> str:
    """Every sample, coloured by probability; where the likeliest tokens were kept, their table."""
    parts = [legend("probability", lambda bits: f"≥ {2**-bits:.2g}", "less")]
    for sample in samples:
        bits = [-logprob / math.log(2) for logprob in sample.logprobs]
        rows = ((id, each, "") for id, each in zip(sample.tokens, bits, strict=True))
        prompt = marked(sample.prompt, keep=" \t\n")
        text = "".join(coloured(tokenizer, rows))
        parts.append(f'<section><div class="text"><b>{prompt}</b>{text}</div>')
        if sample.top:
            parts += table(tokenizer, sample)
        parts.append("</section>")
    title = f"{len(samples):,} samples" if len(samples) > 1 else "A sample"
    return page(title, facts, "\n".join(parts), SURPRISE_STYLE + STYLE)


def table(tokenizer: Tokenizer, sample: Sample) -> Iterator[str]:
    """The likeliest tokens at each place; the one that was drawn is bold."""
    numbers = "".join(f"<th>{number}</th>" for number in range(1, len(sample.top[0]) + 1))
    yield '<div class="scroll"><table><thead><tr><th></th><th>written</th><th></th>'
    yield f"{numbers}</tr></thead><tbody>"
    for number, (id, logprob, top) in enumerate(
        zip(sample.tokens, sample.logprobs, sample.top, strict=True), start=1
    ):
        cells = "".join(cell(tokenizer, other, chance, other == id) for other, chance in top)
        chance = math.exp(logprob)
        yield (
            f"<tr><th>{number}</th><td>{named(tokenizer, id)}</td>"
            f"<td><small>{chance:.3f}</small></td>{cells}</tr>"
        )
    yield "</tbody></table></div>"


def cell(tokenizer: Tokenizer, id: int, logprob: float, drawn: bool) -> str:
    kinds = f"s{shade(-logprob / math.log(2))}" + " drawn" * drawn
    shown = f"{named(tokenizer, id)} <small>{math.exp(logprob):.3f}</small>"
    return f'<td class="{kinds}">{shown}</td>'
