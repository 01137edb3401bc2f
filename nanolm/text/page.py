"""Tokens as a page for a browser: self-contained, offline, nothing in it can run.

>>> Path("tokens.html").write_text(tokens_page(tokenizer, "Some text."))
"""

import base64
import hashlib
from html import escape

from nanolm.text.tokenizer import Tokenizer

STYLE = """
:root { color-scheme: light dark; font-family: system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; line-height: 1.4; }
dl { display: flex; flex-wrap: wrap; gap: 0.25rem 2rem; margin: 0 0 1.5rem; }
dl div { display: flex; gap: 0.5rem; }
dt { opacity: 0.7; }
dd { margin: 0; font-variant-numeric: tabular-nums; }
.tokens { font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
.token { display: inline-block; vertical-align: top; padding: 0.1rem 0.15rem; margin: 0.1rem 1px;
  border-radius: 0.25rem; white-space: pre-wrap; max-width: 100%; text-align: center; }
.token small { display: block; font-size: 0.65em; opacity: 0.75; }
.token i { font-style: normal; opacity: 0.45; }
.a { background: light-dark(#cfe5ff, #1d4570); }
.b { background: light-dark(#d6f2cd, #265a1c); }
.c { background: light-dark(#ffe3c2, #6b420f); }
.d { background: light-dark(#f4d3ee, #5f2555); }
.e { background: light-dark(#fff3b0, #5c5200); }
"""
COLOURS = "abcde"
VISIBLE = {" ": "·", "\n": "⏎", "\t": "⇥"}


def tokens_page(tokenizer: Tokenizer, text: str, name: str = "tokens") -> str:
    """`text` with each token in a colour of its own, its id below, as one HTML file."""
    ids = tokenizer.encode(text)
    style_hash = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    facts = {
        "tokenizer": name,
        "vocabulary": f"{tokenizer.vocab_size:,}",
        "characters": f"{len(text):,}",
        "bytes": f"{len(text.encode()):,}",
        "tokens": f"{len(ids):,}",
        "bytes per token": f"{len(text.encode()) / max(1, len(ids)):.2f}",
    }
    rows = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd></div>"
        for what, value in facts.items()
    )
    spans = "".join(
        f'<span class="token {COLOURS[number % len(COLOURS)]}">'
        f"{_marked(spelled(tokenizer.tokens[id]))}<small>{id}</small></span>"
        + ("<br>" if b"\n" in tokenizer.tokens[id] else "")
        for number, id in enumerate(ids)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"style-src 'sha256-{style_hash}'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(name)}: {len(ids):,} tokens</title><style>{STYLE}</style></head>\n"
        f'<body><h1>{len(ids):,} tokens</h1><dl>{rows}</dl>\n<div class="tokens">{spans}</div>\n'
        "</body></html>\n"
    )


def spelled(token: bytes) -> str:
    """The bytes of a token as text; bytes that are no whole character as \\xe2."""
    return token.decode(errors="backslashreplace")


def _marked(text: str) -> str:
    """White space and control characters made visible, everything else harmless."""
    return "".join(
        f"<i>{VISIBLE.get(char) or chr(0x2400 + ord(char))}</i>" if char <= " " else escape(char)
        for char in text
    )
