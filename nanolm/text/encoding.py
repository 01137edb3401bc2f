"""Encode a part of a corpus as token ids; also the main module of the worker processes."""

import sys
from functools import partial
from pathlib import Path

import numpy as np

from nanolm.text.tokenizer import Tokenizer, own_tokenizer
from nanolm.text.words import MARK
from nanolm.text.workers import serve


def encode_part(tokenizer: Tokenizer, part: bytes) -> bytes:
    """The stored ids of a part of a corpus file; MARK becomes a start-of-text token."""
    first, *others = part.split(MARK)
    arrays = [tokenizer.encode_array(first.decode())] if first else []
    for other in others:
        arrays += [np.array([tokenizer.start_of_text]), tokenizer.encode_array(other.decode())]
    return np.concatenate(arrays).astype(token_type(tokenizer)).tobytes()


def token_type(tokenizer: Tokenizer) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32


if __name__ == "__main__":
    own = own_tokenizer(Path(sys.argv[2]).read_text(encoding="utf-8"))
    assert own, "workers only get tokenizers trained by nanolm"
    serve(partial(encode_part, own))
