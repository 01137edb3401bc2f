"""Any tokenizer.json (SentencePiece, WordPiece ...), encoded by Hugging Face `tokenizers`."""

import math
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import regex

from nanolm.errors import ModelError, UsageError
from nanolm.text.tokenizer import Ids, Tokenizer, utf8
from nanolm.text.tokenizer_files import tokenizer_json
from nanolm.text.tokenizer_files.tokenizer_json import BYTE_OF_CHARACTER, Contents

MOST_STEPS = 100  # in each part; real ones have at most 20, and each processes all the text
SECONDS, SECONDS_A_CHARACTER = 20.0, 1e-4  # time limit of a call; patterns can take forever
MOST_GROWTH = 1000  # factor by which a normalizer may lengthen a text
BLANK = "\u2581"  # how SentencePiece writes a space


class HuggingFace(Tokenizer):
    kind = "foreign"
    cuttable = False  # how much context the library uses is not known

    def __init__(self, contents: Contents) -> None:
        self.text, self.file = contents.text, contents.file
        try:
            import tokenizers
        except ImportError:
            message = f"{self.file} requires Hugging Face tokenizers: pip install 'nanolm[hf]'"
            raise UsageError(message) from None
        most_of_all = tokenizer_json.LARGEST_FILE / max(1, sum(map(len, contents.ids)))  # tokens
        for key in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if (steps := count_steps(contents.whole.get(key))) > MOST_STEPS:
                raise ModelError(
                    f"{self.file}: its {key} has {steps:,} steps; the limit is {MOST_STEPS}"
                )
        for key, most in (("normalizer", MOST_GROWTH), ("decoder", most_of_all)):
            if growth(contents.whole.get(key)) > math.log(most):
                raise ModelError(f"{self.file}: its {key} expands texts too much")
        with blamed(f"{self.file} is not a Hugging Face tokenizer"):
            self.special_library = tokenizers.Tokenizer.from_str(self.text)
            self.special_library.no_truncation()
            self.special_library.no_padding()
            self.library = deepcopy(self.special_library)
            self.library.encode_special_tokens = True  # treats them as text
            ids: dict[str, int] = self.library.get_vocab(with_added_tokens=True)
        special = tokenizer_json.special_tokens(contents, ids)
        written = {new["content"]: bool(new.get("special")) for new in contents.added}
        written |= dict.fromkeys(special["special"].values(), True)
        # The other parts show how to get the text of a token from its name.
        parts = str([contents.whole.get(k) for k in ("normalizer", "pre_tokenizer", "decoder")])
        fallback, blank, spelled = (part in parts for part in ("ByteFallback", BLANK, "ByteLevel"))
        model = contents.whole["model"]
        suffix = model.get("end_of_word_suffix") or ""
        tokens = [b""] * (max(ids.values()) + 1)
        others: list[int] = []
        for token, id in ids.items():
            if token in written:
                tokens[id] = b"" if written[token] else token.encode()
            elif fallback and regex.fullmatch(r"<0x[0-9A-F]{2}>", token):
                tokens[id] = bytes.fromhex(token[3:5])
            elif blank:
                tokens[id] = token.replace(BLANK, " ").encode()
            elif spelled and BYTE_OF_CHARACTER.keys() >= set(token):
                ends = suffix and token.endswith(suffix)
                name = token.removesuffix(suffix) if ends else token
                tokens[id] = bytes(BYTE_OF_CHARACTER[character] for character in name)
                tokens[id] += b" " if ends else b""
            else:
                others.append(id)
        for id, text in zip(others, self._decode([[id] for id in others]), strict=True):
            tokens[id] = text.encode()
        self.unknown: int | None = ids.get(model.get("unk_token"), model.get("unk_id"))
        super().__init__(tokens, **special)

    def encode_array(self, text: str) -> Ids:
        return np.array(self._encode(self.library, text).ids, np.uint32)

    def encode_special(self, text: str) -> list[int]:
        return list(self._encode(self.special_library, text).ids)

    def _encode(self, library: Any, text: str) -> Any:
        utf8(text)
        encode = partial(library.encode_batch, [text], add_special_tokens=False)
        with blamed(f"{self.file} cannot encode this text"):
            return in_time(encode, len(text))[0]

    def dropped(self, text: str) -> Counter[str]:
        # A normalizer may join characters, and only one of them counts as part of the token.
        forms = dict.fromkeys([text, unicodedata.normalize("NFC", text)])
        return min(map(self._dropped, forms), key=Counter.total)

    def _dropped(self, text: str) -> Counter[str]:
        encoded = self._encode(self.library, text)
        kept = np.zeros(len(text), dtype=bool)
        for id, (start, stop) in zip(encoded.ids, encoded.offsets, strict=True):
            kept[start:stop] |= id != self.unknown
        lost = Counter(text[at] for at in np.flatnonzero(~kept).tolist() if not text[at].isspace())
        for character in [*lost]:  # it may be part of an unknown word
            ids = set(self._encode(self.library, character).ids) - {self.unknown}
            if any(self.tokens[id].strip() for id in ids):
                del lost[character]
        return lost

    def decode(self, ids: Sequence[int]) -> str:
        return self._decode([list(ids)])[0]

    def _decode(self, rows: list[list[int]]) -> list[str]:
        decode = partial(self.library.decode_batch, rows, skip_special_tokens=True)
        with blamed(f"{self.file} cannot decode its tokens"):
            return list(in_time(decode, sum(map(len, rows))))

    def to_json(self) -> str:
        return self.text


@contextmanager
def blamed(message: str) -> Iterator[None]:
    """Turn any error of `tokenizers` into a ModelError, even a Rust panic (not an Exception)."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{message}: {str(error)[:300]}") from None


def in_time(call: Callable[[], Any], size: int) -> Any:
    """The result of `call`, run in a separate thread because Rust code cannot be interrupted. Only
    calls with a batch release the GIL."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.extend((call(), None))
        except BaseException as error:
            outcome.extend((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds := SECONDS + SECONDS_A_CHARACTER * size)
    if not outcome:
        raise TimeoutError(f"it takes more than {seconds:.0f} s; its patterns are too slow")
    if outcome[1]:
        raise outcome[1]
    return outcome[0]


def count_steps(part: Any) -> int:
    """The number of steps in a part of a tokenizer.json, including those in sequences."""
    inside = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return sum(map(count_steps, inside)) + (isinstance(part, dict) and "type" in part)


def growth(step: Any) -> float:
    """The logarithm of the factor by which this part of a tokenizer.json can lengthen a text. A few
    small steps could turn one letter into gigabytes."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(
            new
        ) <= len(old):
            return 0.0
        case dict():
            keys = ("content", "prepend", "suffix", "word_delimiter_token")
            written = [text for key in keys if isinstance(text := step.get(key), str)]
            return sum(math.log1p(len(text)) for text in written) + growth([*step.values()])
        case list():
            return sum(map(growth, step))
    return 0.0
