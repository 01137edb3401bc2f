"""A tokenizer by name or path: ours, one of tiktoken's, or that of any model folder.

    >>> load_tokenizer(Path("runs/x/last"))  # or a tokenizer.json, or a *.tiktoken

`published` reads tiktoken ranks, and of tokenizer.json `byte_level` what tiktoken encodes with the
same ids, which is most models of today; `hugging_face` leaves the rest to that library.
"""

from pathlib import Path

from nanolm.errors import ModelError
from nanolm.text.tokenizer import PADDING, Tokenizer, own_tokenizer
from nanolm.text.tokenizer_files.byte_level import byte_level_tokenizer
from nanolm.text.tokenizer_files.hugging_face import HuggingFace
from nanolm.text.tokenizer_files.published import named_tokenizer, read_ranks
from nanolm.text.tokenizer_files.tokenizer_json import check, merges_to_json, read

__all__ = ["load_tokenizer", "named_tokenizer", "read_json"]


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model folder, of a tokenizer.json or of a *.tiktoken file of ranks."""
    if not path.is_dir():
        return read_ranks(path) if path.suffix == ".tiktoken" else read_json(read(path), path)
    file = path / "tokenizer.json"
    for vocabulary, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        if (path / vocabulary).exists() and not file.exists():
            return read_json(merges_to_json(path / vocabulary, path / merges), path / vocabulary)
    return read_json(read(file), file)


def read_json(text: str, file: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, by the first of three ways that will do."""
    try:
        contents = check(text, file)
        # Ours are known by their beginning, and each merge makes the next token: with others, a
        # few merges could double a token again and again.
        if PADDING in text[:1000] and contents.merges is not None:
            made = [contents.vocabulary[left + right] for left, right in contents.merges]
            ours = own_tokenizer(text) if made == [*range(256, 256 + len(made))] else None
            if ours is not None:
                return ours
        return byte_level_tokenizer(contents) or HuggingFace(contents)
    except RecursionError:  # what could just be parsed may be too deep to look through
        raise ModelError(f"{file} is nested too deeply") from None
