"""Encode a part of a corpus as token ids; also the main module of the worker processes."""

import sys
from functools import partial
from pathlib import Path

import numpy as np

from nanolm.text.tokenizer import Tokenizer, own_tokenizer
from nanolm.text.words import MARK
from nanolm.text.workers import serve

SAMPLED = 100_000  # characters that are searched for ones without a token


def encode_part(tokenizer: Tokenizer, part: bytes) -> bytes:
    """The stored ids of a part of a corpus file; MARK becomes a start-of-text token."""
    first, *others = part.split(MARK)
    arrays = [tokenizer.encode_array(first.decode())] if first else []
    for other in others:
        arrays += [np.array([tokenizer.start_of_text]), tokenizer.encode_array(other.decode())]
    return np.concatenate(arrays).astype(token_type(tokenizer)).tobytes()


def dropped_characters(tokenizer: Tokenizer, text: str, more: bool = False) -> str:
    """A note about the characters of a text that its tokens do not contain; empty if all do."""
    start = text[:SAMPLED]
    dropped = tokenizer.dropped(start)
    if not dropped:
        return ""
    part = f"{'the first ' if more or len(text) > SAMPLED else ''}{len(start):,} characters"
    example = dropped.most_common(1)[0][0]
    lost = f"{dropped.total():,} of {part} have no token in this tokenizer and are dropped"
    return f"{lost}, for example {example!r}"


def token_type(tokenizer: Tokenizer) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32


if __name__ == "__main__":
    own = own_tokenizer(Path(sys.argv[2]).read_text(encoding="utf-8"))
    assert own, "workers only get tokenizers trained by nanolm"
    serve(partial(encode_part, own))
