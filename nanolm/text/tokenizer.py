"""Text to token ids and back: characters, bytes, or byte-pair encoding.

    >>> tokenizer = train_tokenizer(["the cat sat. the cat ran."], "bpe")
    >>> tokenizer.decode(tokenizer.encode("the cat"))
    'the cat'

All kinds share one interface, and no text fails to encode: bytes are tokens in each of them.
The file is `tokenizer.json`, the format of Hugging Face `tokenizers`, written and read directly,
so that `transformers.AutoTokenizer` gives the same ids. Ids 0 to 255 are the single bytes; the
two special tokens come last, after everything learned.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tiktoken

from nanolm.errors import DataError, ModelError
from nanolm.text.bpe import SPLIT, Pair, count_words, learn

END_OF_TEXT = "<|endoftext|>"  # stands before every document; an empty prompt starts here
PADDING = "<|padding|>"

Ids = npt.NDArray[np.int64]


class Tokenizer(ABC):
    """What every kind shares: the raw bytes of each token, the special tokens, decoding."""

    kind: str

    def __init__(self, tokens: list[bytes]) -> None:
        # Special tokens stand for no text, so their bytes are empty.
        self.tokens = [*tokens, b"", b""]
        self.end_of_text = len(tokens)
        self.padding = len(tokens) + 1

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @abstractmethod
    def encode_array(self, text: str) -> Ids:
        """The ids of `text`. Special tokens written out in it are plain text."""

    @abstractmethod
    def _model_json(self) -> dict[str, Any]:
        """The parts of tokenizer.json that differ between kinds."""

    def encode(self, text: str) -> list[int]:
        """The ids of `text`. Special tokens written out in it are plain text."""
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens vanish, bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.tokens[id] for id in ids).decode(errors="replace")

    def byte_lengths(self) -> Ids:
        """Bytes of text each token stands for: what a loss is divided by for bits per byte."""
        return np.array([len(token) for token in self.tokens], dtype=np.int64)

    def to_json(self) -> str:
        """The contents of tokenizer.json."""
        special = [(self.end_of_text, END_OF_TEXT), (self.padding, PADDING)]
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        parts = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": id, "content": text, **flags, "special": True} for id, text in special
            ],
            "normalizer": None,
            "post_processor": None,
            **self._model_json(),
        }
        return json.dumps(parts, ensure_ascii=False, indent=1) + "\n"

    def fingerprint(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def save(self, folder: Path, context: int) -> None:
        """Write tokenizer.json, and tokenizer_config.json for `transformers`."""
        (folder / "tokenizer.json").write_text(self.to_json(), encoding="utf-8")
        config = {
            # Without the class, transformers 5 puts a tokenizer of the model's family in place.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "pad_token": PADDING,
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            # A special token written out in a text is that text, there as here.
            "split_special_tokens": True,
        }
        text = json.dumps(config, indent=1) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


class ByteLevel(Tokenizer):
    """Byte-pair encoding over UTF-8 bytes; without merges, plain bytes."""

    def __init__(self, merges: list[Pair]) -> None:
        tokens = [bytes([byte]) for byte in range(256)]
        for left, right in merges:
            tokens.append(tokens[left] + tokens[right])
        super().__init__(tokens)
        self.kind = "bpe" if merges else "byte"
        self.merges = merges

    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        ranks = {token: id for id, token in enumerate(self.tokens[: self.end_of_text])}
        return tiktoken.Encoding("nanolm", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})

    def encode_array(self, text: str) -> Ids:
        if not self.merges:
            return np.frombuffer(_utf8(text), dtype=np.uint8).astype(np.int64)
        _utf8(text)  # tiktoken would replace a lone surrogate in silence
        try:
            return np.array(self._encoding.encode_ordinary(text), dtype=np.int64)
        except BaseException as error:
            # The panic of a compiled library is no Exception: here, a million blanks in a row.
            if type(error).__name__ != "PanicException":
                raise
            raise DataError(
                "a stretch of white space is too long for --tokenizer bpe; shorten it, or use byte"
            ) from None

    def _model_json(self) -> dict[str, Any]:
        spelled = [_spell(token) for token in self.tokens[: self.end_of_text]]
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        }
        split = {
            "type": "Split",
            "pattern": {"Regex": SPLIT},
            "behavior": "Isolated",
            "invert": False,
        }
        return {
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
            "decoder": byte_level,
            "model": {
                **_BPE_MODEL,
                "vocab": {token: id for id, token in enumerate(spelled)},
                "merges": [[spelled[left], spelled[right]] for left, right in self.merges],
            },
        }


class Characters(Tokenizer):
    """One token a character seen in training; any other character as its UTF-8 bytes."""

    kind = "char"

    def __init__(self, characters: list[str]) -> None:
        super().__init__(
            [bytes([byte]) for byte in range(256)] + [char.encode() for char in characters]
        )
        self.characters = characters
        self._lookup = np.full(0x110000, -1, dtype=np.int64)  # code point -> id
        for id, char in enumerate(characters, start=256):
            self._lookup[ord(char)] = id

    def encode_array(self, text: str) -> Ids:
        _utf8(text)
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        ids: Ids = self._lookup[points]
        unknown = np.flatnonzero(ids < 0)
        if not len(unknown):
            return ids
        pieces: list[Ids] = []
        start = 0
        for index in unknown.tolist():
            pieces += [ids[start:index], np.array(list(text[index].encode()))]
            start = index + 1
        return np.concatenate([*pieces, ids[start:]]).astype(np.int64)

    def _model_json(self) -> dict[str, Any]:
        spelled = [f"<0x{byte:02X}>" for byte in range(256)] + self.characters
        return {
            "pre_tokenizer": None,
            "decoder": {
                "type": "Sequence",
                "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}],
            },
            "model": {
                **_BPE_MODEL,
                "byte_fallback": True,
                "vocab": {token: id for id, token in enumerate(spelled)},
                "merges": [],
            },
        }


def train_tokenizer(texts: Sequence[str], kind: str, vocab_size: int | None = None) -> Tokenizer:
    """A tokenizer of `kind` for these texts; `vocab_size` (special tokens included) is for bpe."""
    if kind == "byte":
        return ByteLevel([])
    if kind == "char":
        return Characters(sorted(set().union(*texts)))
    learned = None if vocab_size is None else vocab_size - 2
    return ByteLevel(learn(count_words(texts), learned))


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read `folder/tokenizer.json`, or the file itself."""
    file = folder / "tokenizer.json" if folder.is_dir() else folder
    try:
        parts = json.loads(file.read_text(encoding="utf-8"))
        model = parts["model"]
        vocab: dict[str, int] = model["vocab"]
        if model["byte_fallback"] and not model["merges"]:
            tokenizer: Tokenizer = Characters(list(vocab)[256:])
        else:
            tokenizer = ByteLevel([(vocab[left], vocab[right]) for left, right in model["merges"]])
    except FileNotFoundError:
        raise ModelError(f"{file} does not exist") from None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelError(f"{file} is not a tokenizer that nanolm reads ({error!r})") from None
    if tokenizer.to_json() != json.dumps(parts, ensure_ascii=False, indent=1) + "\n":
        raise ModelError(f"{file} is a kind of tokenizer that nanolm does not read")
    return tokenizer


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text is not valid Unicode: a lone surrogate at character {error.start:,}"
        ) from None


# tokenizer.json spells bytes as printable characters: printable Latin-1 as itself, the other 68
# bytes as the characters from U+0100 on, in order.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_SPELLING = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + n) for n, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))
}

_BPE_MODEL: dict[str, Any] = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}


def _spell(token: bytes) -> str:
    return "".join(_SPELLING[byte] for byte in token)
