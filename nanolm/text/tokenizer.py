"""Convert text to token ids and back: characters, bytes, or byte-pair encoding.

    >>> tokenizer = train_tokenizer(["the cat sat. the cat ran."], "bpe")
    >>> tokenizer.decode(tokenizer.encode("the cat"))

Every text can be encoded: in each kind, the bytes are tokens with the ids 0 to 255. The two special
tokens come last. Hugging Face `tokenizers` reads tokenizer.json and gives the same ids.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import regex
import tiktoken

from nanolm.errors import DataError
from nanolm.text.bpe import Pair, learn
from nanolm.text.saving import (
    BPE_MODEL,
    LOWERCASE,
    byte_level_json,
    tokenizer_config,
    tokenizer_json,
    with_end,
)
from nanolm.text.words import SPLIT, count_words, lowered

END_OF_TEXT = "<|endoftext|>"  # before every document; also the start of an empty prompt
PADDING = "<|padding|>"
SPECIAL = 2  # special tokens

Ids = npt.NDArray[np.integer[Any]]
LONG_STRETCH = 100_000  # spaces in a row that tiktoken can surely encode


class Tokenizer(ABC):
    """Common to all kinds: the raw bytes of each token, the special tokens, decoding."""

    kind: str
    cuttable: ClassVar[bool] = True  # whether text can be cut at `SAFE_CUT` with the same ids

    def __init__(
        self,
        tokens: list[bytes],  # by id; empty for special tokens, which stand for no text
        end_of_text: int,
        padding: int,
        begin: tuple[int, ...] = (),  # tokens that some models expect before every text
        stops: set[int] | None = None,  # tokens that end generation
        special: dict[int, str] | None = None,  # the names of special tokens
        turn: tuple[int, int] | None = None,  # before and after a chat message (ChatML)
        spelled: dict[str, int] | None = None,  # special tokens that a prompt may contain
        config: dict[str, Any] | None = None,  # to keep in tokenizer_config.json
    ) -> None:
        self.tokens, self.end_of_text, self.padding = tokens, end_of_text, padding
        self.begin, self.turn, self.stops = begin, turn, stops or {end_of_text}
        self.special = special or {end_of_text: END_OF_TEXT, padding: PADDING}
        self.spelled = spelled or {name: id for id, name in self.special.items()}
        self.config = config or {}
        self.unseen: frozenset[int] = frozenset()  # ids that the model never saw in training
        self.parse_special = False  # whether special tokens in a prompt are tokens, not text

    @property
    def start_of_text(self) -> int:
        return self.begin[0] if self.begin else self.end_of_text

    def encode_prompt(self, text: str) -> list[int]:
        if self.parse_special:
            ids = self.encode_special(text)
            spelled = tuple(ids[: len(self.begin)]) == self.begin
            return (ids if spelled else [*self.begin, *ids]) or [self.end_of_text]
        ids = self.encode(text)
        if self.unseen.intersection(ids):
            # A prompt starts without a space. In a one-line text, almost every word follows one.
            spaced = self.encode(f" {text}")
            ids = min(ids, spaced, key=lambda each: sum(id in self.unseen for id in each))
        return [*self.begin, *ids] or [self.end_of_text]

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @abstractmethod
    def encode_array(self, text: str) -> Ids:
        """The ids of `text`. Special tokens spelled out in it are plain text."""

    @abstractmethod
    def to_json(self) -> str:
        """The contents of tokenizer.json."""

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def encode_special(self, text: str) -> list[int]:
        """The ids of `text`, in which special tokens can be spelled out."""
        names = sorted(self.spelled, key=len, reverse=True)
        parts = regex.split(f"({'|'.join(map(regex.escape, names))})", text)
        rows = (
            [self.spelled[part]] if number % 2 else self.encode(part)
            for number, part in enumerate(parts)
        )
        return [id for row in rows for id in row]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens; invalid UTF-8 becomes U+FFFD."""
        return b"".join(self.tokens[id] for id in ids).decode(errors="replace")

    def dropped(self, text: str) -> Counter[str]:
        """The characters of `text` that no token stands for; some tokenizers of other models have
        a limited set of characters."""
        return Counter()

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of text of each token, to convert a loss to bits per byte."""
        return np.array([len(token) for token in self.tokens], dtype=np.int64)

    def fingerprint(self) -> str:
        """A hash of everything that determines the ids and their meaning."""
        return hashlib.sha256(f"{self.to_json()}{self.special}".encode()).hexdigest()

    def with_end(self) -> str:
        """The contents of a tokenizer.json that adds the end-of-text token to every text."""
        return with_end(self.to_json(), self.special[self.end_of_text], self.end_of_text)

    def save(self, folder: Path, context: int, end: bool = False) -> None:
        """Write tokenizer.json, and tokenizer_config.json for `transformers`. With `end`, these add
        the end-of-text token to every text."""
        text = self.with_end() if end else self.to_json()
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        ids = {"bos": self.start_of_text, "eos": self.end_of_text, "pad": self.padding}
        special = {f"{key}_token": self.special[id] for key, id in ids.items()}
        config = tokenizer_config(special, context, self.config, end)
        (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")


class Tiktoken(Tokenizer):
    """Byte-pair encoding by tiktoken: `pattern` splits the text into words, and in each word the
    pair whose merged token has the lowest id is merged, repeatedly."""

    pattern: str

    @cached_property
    def ranks(self) -> dict[bytes, int]:  # bytes and merged tokens
        return {token: id for id, token in enumerate(self.tokens) if token}

    @cached_property
    def encoding(self) -> tiktoken.Encoding:
        return tiktoken.Encoding(
            "nanolm",
            pat_str=self.pattern,
            mergeable_ranks=self.ranks,
            # Never matched in a text, but without any, tiktoken searches for an empty pattern.
            special_tokens={self.special[self.end_of_text]: self.end_of_text},
        )

    def fingerprint(self) -> str:
        # From the tokens themselves, since writing tokenizer.json can be slow.
        digest = hashlib.sha256(repr((self.pattern, self.special)).encode())
        for token in self.tokens:
            digest.update(len(token).to_bytes(4, "little") + token)
        return digest.hexdigest()

    def encode_array(self, text: str) -> Ids:
        utf8(text)  # tiktoken would silently replace a lone surrogate
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        except BaseException as error:
            # Its regex engine fails on a few hundred thousand spaces in a row, so they are split
            # and encoded in parts. (Older versions panic, which is not an Exception.)
            if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
                raise
            stretch = regex.search(rf"\s{{{LONG_STRETCH}}}(?=.)", text, regex.DOTALL)
            if not stretch:
                raise DataError(f"tiktoken cannot encode this text: {error}") from None
            parts = (text[: stretch.end()], text[stretch.end() :])
            return np.concatenate([self.encode_array(part) for part in parts])


class ByteLevel(Tiktoken):
    """Byte-pair encoding over UTF-8 bytes, trained by nanolm; without merges, plain bytes. With
    `lowercase`, capital letters become small ones first."""

    pattern = SPLIT

    def __init__(self, merges: list[Pair], lowercase: bool = False) -> None:
        tokens = [bytes([byte]) for byte in range(256)]
        for left, right in merges:
            tokens.append(tokens[left] + tokens[right])
        super().__init__([*tokens, b"", b""], len(tokens), len(tokens) + 1)
        self.kind = "bpe" if merges else "byte"
        self.merges, self.lowercase = merges, lowercase

    def extended(self, texts: Iterable[str], vocab_size: int) -> "ByteLevel":
        """This tokenizer with more merges, learned from `texts`. Existing tokens keep their ids."""
        texts = map(lowered, texts) if self.lowercase else texts
        merges = learn(count_words(texts), vocab_size - SPECIAL, known=self.merges)
        return ByteLevel(merges, self.lowercase)

    def parts(self, smaller: "ByteLevel") -> list[list[int]]:
        """For each token, the ids it consists of in `smaller`, the tokenizer this one extends."""
        parts = [[id] for id in range(256 + len(smaller.merges))]
        for left, right in self.merges[len(smaller.merges) :]:
            parts.append(parts[left] + parts[right])
        return [*parts, [smaller.end_of_text], [smaller.padding]]

    def fingerprint(self) -> str:
        return super().fingerprint() + (" lowercase" if self.lowercase else "")

    def encode_array(self, text: str) -> Ids:
        text = lowered(text) if self.lowercase else text
        if not self.merges:
            return np.frombuffer(utf8(text), dtype=np.uint8)
        return super().encode_array(text)

    def to_json(self) -> str:
        normalizer = LOWERCASE if self.lowercase else None
        return byte_level_json(self.tokens, self.merges, SPLIT, self.special, normalizer=normalizer)


class Characters(Tokenizer):
    """One token per character seen in training; any other character as its UTF-8 bytes."""

    kind = "char"

    def __init__(self, characters: list[str]) -> None:
        tokens = [bytes([byte]) for byte in range(256)] + [char.encode() for char in characters]
        super().__init__([*tokens, b"", b""], end_of_text=len(tokens), padding=len(tokens) + 1)
        self.characters = characters
        self._lookup = np.full(0x110000, -1, dtype=np.int32)  # code point -> id
        self._lookup[[*map(ord, characters)]] = range(256, 256 + len(characters))

    def encode_array(self, text: str) -> Ids:
        utf8(text)
        ids: Ids = self._lookup[np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)]
        pieces: list[Ids] = []
        start = 0
        for index in np.flatnonzero(ids < 0).tolist():
            pieces += [ids[start:index], np.array(list(text[index].encode()))]
            start = index + 1
        return np.concatenate([*pieces, ids[start:]])

    def to_json(self) -> str:
        spelled = [f"<0x{byte:02X}>" for byte in range(256)] + self.characters
        vocabulary = {token: id for id, token in enumerate(spelled)}
        decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
        model = {**BPE_MODEL, "byte_fallback": True, "vocab": vocabulary, "merges": []}
        parts = {"pre_tokenizer": None, "decoder": decoder, "model": model}
        return tokenizer_json(parts, self.special)


def train_tokenizer(texts: Iterable[str], kind: str, vocab_size: int | None = None) -> Tokenizer:
    """Train a tokenizer of this kind; `vocab_size` (including special tokens) is for bpe."""
    if kind == "byte":
        return ByteLevel([])
    if kind == "char":
        return Characters(sorted(set().union(*texts)))
    return ByteLevel(learn(count_words(texts), vocab_size and vocab_size - SPECIAL))


def own_tokenizer(text: str) -> Tokenizer | None:
    """The tokenizer of a tokenizer.json written by nanolm; None if it was not."""
    try:
        whole = json.loads(text)
        model = whole["model"]
        vocab: dict[str, int] = model["vocab"]
        if model["byte_fallback"] and not model["merges"]:
            tokenizer: Tokenizer = Characters(list(vocab)[256:])
        else:
            merges = [(vocab[left], vocab[right]) for left, right in model["merges"]]
            tokenizer = ByteLevel(merges, whole["normalizer"] == LOWERCASE)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
    ours = tokenizer.to_json() == text or tokenizer.with_end() == text
    return tokenizer if ours else None


def utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        wrong = f"a lone surrogate at character {error.start:,}"
        raise DataError(f"the text is not valid Unicode: {wrong}") from None
