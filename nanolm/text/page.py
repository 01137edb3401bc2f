"""Text and its tokens as HTML pages."""

import codecs
from collections.abc import Callable, Iterable, Iterator
from html import escape
from typing import TYPE_CHECKING

from nanolm.formats import counted
from nanolm.text import spelled
from nanolm.webpage import beside, page

if TYPE_CHECKING:  # reports need no tokenizer and should not import one
    from nanolm.text.tokenizer import Tokenizer

COLORS = "abcde"
STEPS = (0.5, 1, 2, 4, 6, 8, 12)  # upper bounds of the colors in bits; the last is unbounded
LIKELY = (0.9, 0.5, 0.2, 0.05, 0.01)  # lower bounds of the shades of predictions, in surprise.css
FOLDED_ROWS = 24  # longer tables are collapsed at first
TOKENS_STYLE, SURPRISE_STYLE = (beside(__file__, f"{name}.css") for name in ("tokens", "surprise"))

# Invisible characters, and those that change the direction of the text (U+202A and later).
_UNSEEN = (*range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
PICTURES = {chr(code): chr(0x2400 + code) for code in range(0x20)}
PICTURES |= {chr(code): f"\\u{code:04x}" for code in _UNSEEN} | {" ": "·", "\n": "⏎", "\t": "⇥"}
SIGNS = str.maketrans(PICTURES)


def tokens_page(tokenizer: "Tokenizer", text: str, name: str = "tokens") -> str:
    """`text` with colors that separate the tokens and ids below them, as one HTML file."""
    ids = tokenizer.encode(text)
    size = len(text.encode())
    facts = {
        "tokenizer": name,
        "vocabulary": f"{tokenizer.vocab_size:,}",
        "characters": f"{len(text):,}",
        "bytes": f"{size:,}",
        "tokens": f"{len(ids):,}",
        "bytes per token": f"{size / max(1, len(ids)):.2f}",
    }
    spans = "".join(
        f'<span class="token {COLORS[number % len(COLORS)]}">'
        f"{marked(spelled(tokenizer.tokens[id]))}<small>{id}</small></span>"
        + ("<br>" if b"\n" in tokenizer.tokens[id] else "")
        for number, id in enumerate(ids)
    )
    title = f"{name}: {len(ids):,} tokens"
    return page(title, facts, f'<div class="tokens">{spans}</div>', TOKENS_STYLE)


def surprise_page(
    tokenizer: "Tokenizer",
    tokens: Iterable[tuple[int, float, int]],
    facts: dict[str, str],
    name: str,
) -> str:
    """Running text, colored by the bits of its `tokens`, each (id, bits, rank)."""
    scale = legend("surprisal in bits", lambda bits: f"≤ {bits:g}", "more")
    rows = ((id, bits, f"  rank {rank:,}") for id, bits, rank in tokens)
    text = "".join(colored(tokenizer, rows))
    return page(name, facts, f'{scale}\n<div class="text">{text}</div>', SURPRISE_STYLE)


def legend(what: str, label: Callable[[float], str], last: str) -> str:
    labels = [*map(label, STEPS), last]
    scale = "".join(f'<span class="s{step}">{text}</span>' for step, text in enumerate(labels))
    return f'<p class="legend">{what}: {scale}</p>'


def shade(bits: float) -> int:
    """The number of the color for this many bits; the last for NaN."""
    return sum(not bits <= limit for limit in STEPS)


def prediction(text: str, probability: float, came: bool = False, more: str = "") -> str:
    """A table cell in one hue, stronger for likely tokens. The token that actually `came` is red if
    it was unlikely."""
    shown = "&lt;0.001" if probability < 0.001 else f"{probability:.3f}"
    level = sum(probability >= limit for limit in LIKELY)
    kind = ("unlikely" if came and not level else f"p{level}") + (" came" if came else "")
    return f'<td class="{kind}">{text} <small>{shown}{more}</small></td>'


def prediction_legend(actual: str = "actual") -> str:
    """`actual` names the token that is red if it was unlikely; empty if there is no such token."""
    bounds = [*(f"≥ {limit:g}" for limit in LIKELY), "lower"]
    spans = (f'<span class="p{5 - place}">{text}</span>' for place, text in enumerate(bounds))
    red = f'<span class="unlikely">{actual} token below {LIKELY[-1]:g}</span>' if actual else ""
    return f'<p class="legend">probability: {"".join(spans)} {red}</p>'


def folded(table: str, rows: int, of: str) -> str:
    """A table that can be collapsed, and is if it is long. `of` is what each row stands for."""
    opened = " open" * (rows <= FOLDED_ROWS)
    return f"<details{opened}><summary>{counted(rows, of)}</summary>{table}</details>"


def colored(tokenizer: "Tokenizer", tokens: Iterable[tuple[int, float, str]]) -> Iterator[str]:
    """One span for each token (id, bits, extra text for the tooltip). Tokens that form a character
    together share a span, which shows the sum of their bits."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    text, titles, sum_of_bits = "", list[str](), 0.0

    def span(text: str) -> str:
        shown = marked(text, keep=" \t").replace("⏎</i>", "⏎</i>\n")
        title = "&#10;".join(titles)
        return f'<span class="s{shade(sum_of_bits)}" title="{title}">{shown}</span>'

    for id, bits, more in tokens:
        token = tokenizer.tokens[id]
        text += decoder.decode(token, final=not token)
        if token:
            shown = spelled(token).translate(SIGNS)
            titles.append(f"{escape(shown)}  p = {2**-bits:.3g}  {bits:.2f} bits{escape(more)}")
            sum_of_bits += bits
        if text and not decoder.getstate()[0]:
            yield span(text)
            text, titles, sum_of_bits = "", [], 0.0
        if id == tokenizer.start_of_text:
            yield "<hr>"
    if titles:  # the page ends in the middle of a character
        yield span(text + decoder.decode(b"", final=True))


def named(tokenizer: "Tokenizer", id: int) -> str:
    """One token, escaped: its text with all white space marked, or its name."""
    name = tokenizer.special.get(id)
    return f"<i>{escape(name)}</i>" if name else marked(spelled(tokenizer.tokens[id]))


def marked(text: str, keep: str = "") -> str:
    """White space (except `keep`) and control characters made visible, the rest escaped."""
    return "".join(
        f"<i>{PICTURES[char]}</i>" if char in PICTURES and char not in keep else escape(char)
        for char in text
    )
