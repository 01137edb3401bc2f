"""Load a tokenizer by name or path: nanolm's own, one of tiktoken's, or that of any model folder.

    >>> load_tokenizer(Path("runs/x/last"))  # or a tokenizer.json, or a *.tiktoken

`byte_level` reads a tokenizer.json that tiktoken encodes with the same ids, which covers most
current models. `hugging_face` uses that library for the rest. `merges`, `sentencepiece` and `ranks`
convert other files to a tokenizer.json; OpenAI's ranks (`published`) are used as they are.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanolm.errors import ModelError
from nanolm.gguf.file import is_gguf, read_header
from nanolm.text.tokenizer import PADDING, Tokenizer, own_tokenizer
from nanolm.text.tokenizer_files.byte_level import byte_level_tokenizer
from nanolm.text.tokenizer_files.gguf import tokenizer_of
from nanolm.text.tokenizer_files.hugging_face import HuggingFace
from nanolm.text.tokenizer_files.merges import merges_to_json
from nanolm.text.tokenizer_files.published import Ranks, named_tokenizer
from nanolm.text.tokenizer_files.ranks import read_ranks
from nanolm.text.tokenizer_files.sentencepiece import is_sentencepiece, sentencepiece_to_json
from nanolm.text.tokenizer_files.tokenizer_json import check, read

MODEL_FILES = ("tokenizer.model", "spiece.model", "qwen.tiktoken")  # without a tokenizer.json

__all__ = ["load_tokenizer", "named_tokenizer", "read_json"]


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model folder, a GGUF file, or a tokenizer file."""
    if is_gguf(path):
        text, settings, ids = tokenizer_of(read_header(path))
        tokenizer = read_json(text, path, settings, alone=True)
        if isinstance(tokenizer, HuggingFace) and tokenizer.library.get_vocab() != ids:
            raise ModelError(f"{path}: its special tokens have unusual ids")
        return tokenizer
    if not path.is_dir():
        if path.suffix not in (".tiktoken", ".model"):
            return read_json(read(path), path)
        if path.suffix == ".tiktoken" or not is_sentencepiece(path):
            made = read_ranks(path)
            return made if isinstance(made, Ranks) else read_json(made[0], path, made[1])
        text, defaults = sentencepiece_to_json(path)
        return read_json(text, path, defaults)
    file = path / "tokenizer.json"
    for vocabulary, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        if (path / vocabulary).exists() and not file.exists():
            text, defaults = merges_to_json(path / vocabulary, path / merges)
            return read_json(text, path / vocabulary, defaults)
    others = [path / name for name in MODEL_FILES if (path / name).exists()]
    return read_json(read(file), file) if file.exists() or not others else load_tokenizer(others[0])


def read_json(
    text: str, file: Path, defaults: Mapping[str, Any] | None = None, alone: bool = False
) -> Tokenizer:
    """The tokenizer of a tokenizer.json, in the first of three implementations that supports it."""
    try:
        contents = check(text, file, defaults, alone)
        # nanolm's own files start with PADDING, and each merge makes the next token. In a hostile
        # file, a few merges could double a token's length over and over.
        if PADDING in text[:1000] and contents.merges is not None:
            made = [contents.vocabulary[left + right] for left, right in contents.merges]
            ours = own_tokenizer(text) if made == [*range(256, 256 + len(made))] else None
            if ours is not None:
                return ours
        return byte_level_tokenizer(contents) or HuggingFace(contents)
    except RecursionError:  # a file that barely parsed may be too deep to traverse
        raise ModelError(f"{file} is nested too deeply") from None
