"""A tokenizer by name or path: ours, one of tiktoken's, or that of any model folder.

    >>> tokenizer = named_tokenizer("gpt2")
    >>> tokenizer.decode(tokenizer.encode("the cat"))
    'the cat'
    >>> tokenizer = load_tokenizer(Path("runs/x/last"))  # or a tokenizer.json, or a *.tiktoken

Byte-level BPE, which most models of today have, is encoded by tiktoken here, with the ids that
Hugging Face `tokenizers` gives. Any other kind is left to that library, and so is byte-level BPE
with something in it that might not mean the same in both.
"""

import base64
import hashlib
import json
import math
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import regex
import tiktoken

from nanolm.errors import ModelError, UsageError, did_you_mean
from nanolm.text import NAMED
from nanolm.text import tokenizer as own
from nanolm.text.tokenizer import END_OF_TEXT, PADDING, SPELLING, Ids, Tiktoken, Tokenizer
from nanolm.text.words import SPLIT

LARGEST_FILE = 64_000_000  # bytes; the largest in use, with 260,000 tokens, have 35 million
MOST_VALUES = 5_000_000  # of JSON, which takes memory by their number; the largest have 2 million
LARGEST_ID = 2_000_000  # a file can name any number, and each one below it takes memory
MOST_ADDED = 10_000  # tokens that are matched by one pattern; the most in use are 6,400
MOST_GROWTH = 1000  # times that a text may be made longer before it is encoded
LONGEST_TOKEN = 1024  # bytes; to check it takes the square of that
PATIENCE = 60  # seconds for a download of 4 MB; tiktoken itself would wait for ever

BYTES = {character: byte for byte, character in SPELLING.items()}
BLANK = "\u2581"  # how sentencepiece writes a blank
OPEN_TURN, CLOSE_TURN = "<|im_start|>", "<|im_end|>"
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>")


@dataclass(frozen=True)
class Published:
    """An encoding of OpenAI's, its pattern in two forms that mean the same.

    In Oniguruma, the engine of `tokenizers`, `{1,3}+` is not possessive and `$` ends every line.
    Greedy will do where what follows cannot match what it would have to give back.
    """

    kind: str
    registered: str  # its name in tiktoken
    file: str
    ranks: int
    end_of_text: int
    vocab_size: int
    pattern: str  # tiktoken's
    portable: str  # for tokenizer.json


GPT2 = Published(
    *("gpt2", "gpt2", "r50k_base.tiktoken", 50_256, 50_256, 50_257),
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s",
)
CL100K = Published(
    *("cl100k", "cl100k_base", "cl100k_base.tiktoken", 100_256, 100_257, 100_277),
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s+(?![\s\S])|\s*[\r\n]|\s+(?!\S)|\s",
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = Published(
    *("o200k", "o200k_base", "o200k_base.tiktoken", 199_998, 199_999, 200_019), _O200K, _O200K
)
PUBLISHED = {encoding.kind: encoding for encoding in (GPT2, CL100K, O200K)}

# GPT-2's pattern on what remains when each digit has been cut out: white space before a digit
# then stands at an end, where none of it is kept back for the next word.
DIGITS = r"\p{N}|\s++(?=\p{N})|" + GPT2.pattern

# The patterns of other models that are encoded here, with their form for tiktoken. No other will
# do: tiktoken's engine even has errors (there, `b+a*b+` finds a match in "b"). These are tested:
# they match alike in both, leave nothing out, and do not mind where `corpus.SAFE` cuts a text.
QWEN = SPLIT.replace("{1,3}", "")
QWEN_3_5 = QWEN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
MISTRAL = _O200K.replace(_SHORT, "").replace("{1,3}", "")
PATTERNS = {pattern: pattern for pattern in (SPLIT, QWEN, QWEN_3_5, MISTRAL)}  # SPLIT: Llama 3
PATTERNS |= {encoding.portable: encoding.pattern for encoding in PUBLISHED.values()}


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model folder, of a tokenizer.json or of a *.tiktoken file of ranks."""
    if not path.is_dir():
        return read_ranks(path) if path.suffix == ".tiktoken" else read_json(read(path), path)
    for vocabulary, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        if (path / vocabulary).exists() and not (path / "tokenizer.json").exists():
            return read_merges(path / vocabulary, path / merges)
    return read_json(read(path / "tokenizer.json"), path / "tokenizer.json")


def named_tokenizer(name: str) -> Tokenizer:
    """One of `NAMED`, with the ranks that tiktoken has in its cache or can download."""
    if name not in NAMED:
        hint = did_you_mean(name, list(NAMED))
        raise UsageError(f"no tokenizer is called {name!r}; there are {', '.join(NAMED)}{hint}")
    encoding = PUBLISHED[name]
    outcome: list[tiktoken.Encoding | Exception] = [TimeoutError()]

    def fetch() -> None:
        try:
            outcome.append(tiktoken.get_encoding(encoding.registered))
        except Exception as error:
            outcome.append(error)

    # In a thread of its own: from a server that does not answer one can only walk away.
    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    found = outcome[-1]
    if isinstance(found, OSError | ValueError):  # a requests error is an OSError
        raise UsageError(
            f"the ranks of {name} are not in tiktoken's cache and could not be downloaded "
            f"({type(found).__name__}). On a machine with a network, download "
            f"https://openaipublic.blob.core.windows.net/encodings/{encoding.file} and give its "
            f"path: --tokenizer PATH/{encoding.file} (or copy tiktoken's cache from there and "
            "set TIKTOKEN_CACHE_DIR to it)"
        )
    if isinstance(found, Exception):
        raise found
    return Ranks(encoding, [found.decode_single_token_bytes(id) for id in range(encoding.ranks)])


def read_ranks(file: Path) -> "Ranks":
    """A file with a token in base64 and its rank on each line; their number says which it is."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read(file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            word, rank = line.split()
            token = base64.b64decode(word, validate=True)
            if ranks.setdefault(token, int(rank)) != int(rank):
                raise ValueError
        except ValueError:
            message = f"{file}, line {number}: not a new token in base64 and its rank"
            raise ModelError(message) from None
    encoding = next((known for known in PUBLISHED.values() if known.ranks == len(ranks)), None)
    if encoding is None:
        known = ", ".join(f"{known.kind} has {known.ranks:,}" for known in PUBLISHED.values())
        raise ModelError(f"{file} has {len(ranks):,} ranks, and is none that is known: {known}")
    tokens = sorted(ranks, key=ranks.__getitem__)
    if [ranks[token] for token in tokens] != list(range(len(tokens))):
        raise ModelError(f"{file}: the ranks are not the numbers from 0 to {len(tokens) - 1:,}")
    if sum(len(token) == 1 for token in tokens) < 256:
        raise ModelError(f"{file}: not every byte is a token")
    return Ranks(encoding, tokens)


class Ranks(Tiktoken):
    """One of OpenAI's encodings."""

    def __init__(self, encoding: Published, tokens: list[bytes]) -> None:
        self.kind, self.pattern, self.portable = encoding.kind, encoding.pattern, encoding.portable
        end, unused = encoding.end_of_text, encoding.vocab_size - len(tokens)
        super().__init__([*tokens, *[b""] * unused], end_of_text=end, padding=end)
        self.special = {end: END_OF_TEXT}

    @cached_property
    def _json(self) -> str:
        ranks = {token: id for id, token in enumerate(self.tokens) if token}
        merges = []
        for token in ranks:
            if len(token) > 1:
                parts = last_parts(token, ranks)
                if len(parts) != 2:
                    raise ModelError(f"{token!r} has a rank, but is no union of two lower ones")
                merges.append((ranks[parts[0]], ranks[parts[1]]))
        # `tokenizers` numbers special tokens itself, from the last rank on, so none is left out.
        special = {id: f"<|reserved_{id}|>" for id in range(len(ranks), self.vocab_size)}
        return own.byte_level_json(self.tokens, merges, self.portable, special | self.special)

    def to_json(self) -> str:
        return self._json


def last_parts(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """What byte-pair encoding makes of `token` with the ranks below its own: the two parts that
    it is merged from, if the ranks were learned."""
    limit = ranks[token]
    parts = [token[i : i + 1] for i in range(len(token))]
    unions = [ranks.get(token[i : i + 2], limit) for i in range(len(token) - 1)]
    while len(parts) > 2 and (lowest := min(unions)) < limit:
        at = unions.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del unions[at]
        for i in range(max(at - 1, 0), min(at + 1, len(unions))):
            unions[i] = ranks.get(parts[i] + parts[i + 1], limit)
    return parts


def read_merges(vocabulary_file: Path, merges_file: Path) -> Tokenizer:
    """The two files of GPT-2 and its kin, by way of the tokenizer.json that they make."""
    vocabulary = parse(read(vocabulary_file), vocabulary_file)
    merges = []
    for number, line in enumerate(read(merges_file).split("\n"), start=1):
        pair = line.rstrip("\r").split(" ")
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        if len(pair) != 2:
            raise ModelError(f"{merges_file}, line {number}: a merge is two tokens")
        merges.append(pair)
    made = {*BYTES, *(left + right for left, right in merges)}
    special = {
        id: token for token, id in vocabulary.items() if type(id) is int and token not in made
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    model = {**own.BPE_MODEL, "vocab": vocabulary, "merges": merges}
    parts = {"pre_tokenizer": byte_level, "decoder": byte_level, "model": model}
    return read_json(own.tokenizer_json(parts, special), vocabulary_file)


def read_json(text: str, file: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, by the first of three ways that will do."""
    try:
        contents = check(text, file)
        # Ours are known by their beginning, and each merge makes the next token: with others, a
        # few merges could double a token again and again.
        if PADDING in text[:1000] and contents.merges is not None:
            made = [contents.vocabulary[left + right] for left, right in contents.merges]
            ours = own.own_tokenizer(text) if made == [*range(256, 256 + len(made))] else None
            if ours is not None:
                return ours
        return byte_level(contents) or HuggingFace(contents)
    except RecursionError:  # what could just be parsed may be too deep to look through
        raise ModelError(f"{file} is nested too deeply") from None


@dataclass(frozen=True)
class Contents:
    """A tokenizer.json whose tokens, ids and merges are known to be sound."""

    file: Path
    text: str
    whole: dict[str, Any]
    vocabulary: dict[str, int]
    added: list[dict[str, Any]]
    ids: dict[str, int]  # of both
    merges: list[tuple[str, str]] | None  # None if it is no BPE


def check(text: str, file: Path) -> Contents:
    """What is in a tokenizer.json; ModelError if that cannot be."""
    whole = parse(text, file)
    try:
        model, added = whole["model"], whole.get("added_tokens") or []
        vocabulary, merges = model["vocab"], None
        if isinstance(vocabulary, list):  # Unigram's: each token with its score
            vocabulary = {token: id for id, (token, _) in enumerate(vocabulary)}
        ids = {new["content"]: new["id"] for new in added} | vocabulary
        "".join(ids).encode()  # are they all strings, and proper ones?
        if not all(type(id) is int and 0 <= id < LARGEST_ID for id in ids.values()):
            raise ModelError(f"{file}: not all ids are numbers from 0 to {LARGEST_ID:,}")
        if not ids or len(set(ids.values())) < len(ids):
            raise ModelError(f"{file}: there is no token, or two have the same id")
        if "merges" in model and model.get("type", "BPE") == "BPE":
            pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
            merges = [(left, right) for left, right in pairs]
            prefix = len(model.get("continuing_subword_prefix") or "")
            if not all(left and left + right[prefix:] in vocabulary for left, right in merges):
                raise ModelError(f"{file}: a merge makes no token")
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ModelError(f"{file} is no tokenizer.json: something is missing in it") from None
    return Contents(file, text, whole, vocabulary, added, ids, merges)


def byte_level(contents: Contents) -> "Foreign | None":
    """The same by way of tiktoken, unless `tokenizers` might give other ids."""
    model, vocabulary, merges = contents.whole["model"], contents.vocabulary, contents.merges
    pattern = split_pattern(contents.whole.get("pre_tokenizer"))
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    if (
        merges is None
        or pattern is None
        or len(contents.added) > MOST_ADDED
        or contents.whole.get("normalizer") not in (None, {"type": "NFC"})
        or any(model.get(key) for key in ("unk_token", "dropout", "byte_fallback", *affixes))
    ):
        return None

    # Each token must be a byte, a union or an added one; and tiktoken merges by the lowest id.
    made = dict.fromkeys([*BYTES, *(left + right for left, right in merges)])
    names = {new["content"] for new in contents.added}
    order = [vocabulary[left + right] for left, right in merges]
    if vocabulary.keys() - names != made.keys() or names & made.keys() or order != sorted(order):
        return None
    try:
        raw = {token: bytes(BYTES[character] for character in token) for token in made}
        listed = {(raw[left], raw[right]) for left, right in merges}
    except KeyError:
        return None

    # tiktoken merges any two parts that make a token, `tokenizers` only those listed. So those
    # that come up must be listed; or all there are, with words that are tokens taken whole.
    ranks = {raw[token]: vocabulary[token] for token in made}
    for token in ranks:
        if len(token) > LONGEST_TOKEN:
            return None
        if len(token) > 1 and tuple(last_parts(token, ranks)) not in listed:
            splits = ((token[:at], token[at:]) for at in range(1, len(token)))
            possible = {pair for pair in splits if ranks.keys() >= set(pair)}
            if not model.get("ignore_merges") or not possible <= listed:
                return None

    following = len(vocabulary)  # `tokenizers` itself numbers added tokens, in this way
    flags = ("lstrip", "rstrip", "single_word", "normalized")
    for new in contents.added:
        name = new["content"]
        if not name or new["id"] != vocabulary.get(name, following):
            return None
        following = max(following, new["id"] + 1)
        # One with a blank in it might be cut in two where a long text is.
        cut = any(new.get(flag) for flag in flags) or any(map(str.isspace, name))
        if cut and not new.get("special"):
            return None
    return Foreign(contents, ranks, pattern)


def split_pattern(pre_tokenizer: Any) -> str | None:
    """The pattern that cuts a text as this part of a tokenizer.json does; None if none will."""
    match pre_tokenizer:
        case {"type": "Sequence", "pretokenizers": [*before, last]}:
            pass
        case last:
            before = []
    match last:
        case {"type": "ByteLevel", "add_prefix_space": False, **rest}:
            steps = [*before, rest.get("use_regex", True)]
        case _:
            return None
    isolated = {"behavior": "Isolated", "invert": False}
    match steps:
        case [True]:
            return GPT2.portable
        case [{"type": "Digits", "individual_digits": True}, True]:
            return DIGITS
        case [{"type": "Split", "pattern": {"Regex": str(found)}, **how}, False] if how == isolated:
            return PATTERNS.get(found)
    return None


class Foreign(Tiktoken):
    """The byte-level BPE of a tokenizer.json that is not ours."""

    def __init__(self, contents: Contents, ranks: dict[bytes, int], pattern: str) -> None:
        self.kind, self.text, self.pattern, self._ranks = "foreign", contents.text, pattern, ranks
        for known in PUBLISHED.values():  # written by `Ranks`
            if (known.pattern, known.ranks) == (pattern, len(ranks)):
                self.kind = known.kind
        tokens = [b""] * (max(contents.ids.values()) + 1)
        for token, id in ranks.items():
            tokens[id] = token
        # Special tokens in a text are left as text, the others are matched. Of those that begin
        # first it is the longest, and none inside a special one.
        self.added = {new["content"]: new["id"] for new in contents.added if not new.get("special")}
        for name, id in self.added.items():
            tokens[id] = name.encode()
        names = sorted((new["content"] for new in contents.added), key=len, reverse=True)
        self.matched = regex.compile("|".join(map(regex.escape, names)))
        self.normalized = contents.whole.get("normalizer") is not None
        ends = find_ends(contents, contents.ids)
        super().__init__(tokens, end_of_text=ends.end_of_text, padding=ends.padding)
        self.begin, self.stops, self.special = ends.begin, ends.stops, ends.special
        self.turn = ends.turn

    def ranks(self) -> dict[bytes, int]:
        return self._ranks

    def encode_array(self, text: str) -> Ids:
        own.utf8(text)
        pieces: list[Ids] = []
        start = 0
        for match in self.matched.finditer(text) if self.added else ():
            if match[0] in self.added:
                id = np.array([self.added[match[0]]], dtype=np.uint32)
                pieces += [self._plain(text[start : match.start()]), id]
                start = match.end()
        return np.concatenate([*pieces, self._plain(text[start:])])

    def _plain(self, text: str) -> Ids:
        # `tokenizers` goes by Unicode 9: of two marks on a letter it may leave some rare ones,
        # encoded since, in the wrong order.
        text = unicodedata.normalize("NFC", text) if self.normalized else text
        return super().encode_array(text)

    def fingerprint(self) -> str:
        more = (super().fingerprint(), self.added, self.normalized)
        known = self.kind in NAMED
        return more[0] if known else hashlib.sha256(repr(more).encode()).hexdigest()

    def to_json(self) -> str:
        return self.text


class HuggingFace(Tokenizer):
    """Any other tokenizer.json, by way of Hugging Face `tokenizers`."""

    kind = "foreign"
    cuttable = False  # how far the library looks around itself is not known

    def __init__(self, contents: Contents) -> None:
        self.text, self.file = contents.text, contents.file
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            message = f"{self.file} needs Hugging Face tokenizers: pip install 'nanolm[hf]'"
            raise UsageError(message) from None
        most_of_all = LARGEST_FILE / max(1, sum(map(len, contents.ids)))  # tokens taken together
        for key, most in (("normalizer", MOST_GROWTH), ("decoder", most_of_all)):
            if growth(contents.whole.get(key)) > math.log(most):
                raise ModelError(f"{self.file}: its {key} makes texts many times longer")
        with blamed(f"{self.file} is not for Hugging Face tokenizers"):
            self.library = Library.from_str(self.text)
            self.library.no_truncation()
            self.library.no_padding()
            self.library.encode_special_tokens = True  # which means: as text
            ids: dict[str, int] = self.library.get_vocab(with_added_tokens=True)
        ends = find_ends(contents, ids)
        written = {new["content"]: bool(new.get("special")) for new in contents.added}
        written |= dict.fromkeys(ends.special.values(), True)
        # How the text of a token is to be had from its name shows in the steps before and after.
        keys = ("normalizer", "pre_tokenizer", "decoder")
        steps = str([contents.whole.get(key) for key in keys])
        fallback, blank, spelled = (part in steps for part in ("ByteFallback", BLANK, "ByteLevel"))
        tokens = [b""] * (max(ids.values()) + 1)
        for token, id in ids.items():
            if token in written:
                tokens[id] = b"" if written[token] else token.encode()
            elif fallback and regex.fullmatch(r"<0x[0-9A-F]{2}>", token):
                tokens[id] = bytes.fromhex(token[3:5])
            elif blank:
                tokens[id] = token.replace(BLANK, " ").encode()
            elif spelled and BYTES.keys() >= set(token):
                tokens[id] = bytes(BYTES[character] for character in token)
            else:
                tokens[id] = self.decode([id]).encode()
        super().__init__(tokens, end_of_text=ends.end_of_text, padding=ends.padding)
        self.begin, self.stops, self.special = ends.begin, ends.stops, ends.special
        self.turn = ends.turn

    def encode_array(self, text: str) -> Ids:
        own.utf8(text)
        with blamed(f"{self.file} cannot encode this text"):
            return np.array(self.library.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        with blamed(f"{self.file} cannot decode its tokens"):
            text: str = self.library.decode(list(ids), skip_special_tokens=True)
        return text

    def to_json(self) -> str:
        return self.text


@contextmanager
def blamed(message: str) -> Iterator[None]:
    """What `tokenizers` raises as a ModelError: it is nothing more special than an Exception, and
    a panic in Rust is not even that."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{message}: {str(error)[:300]}") from None


def growth(step: Any) -> float:
    """The logarithm of how many times longer this part of a tokenizer.json can make a text.

    A few small steps could make gigabytes of one letter, each ten of what the last one wrote.
    """
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


@dataclass(frozen=True)
class Ends:
    """The ids of special tokens that have a meaning here, and how they are written."""

    end_of_text: int
    padding: int
    begin: tuple[int, ...]
    stops: set[int]
    special: dict[int, str]
    turn: tuple[int, int] | None


def find_ends(contents: Contents, ids: dict[str, int]) -> Ends:
    """Special tokens by what tokenizer.json puts before a text, and by the files beside it."""
    file = contents.file
    tokens = {id: token for token, id in ids.items()}
    names = ("tokenizer_config.json", "generation_config.json", "config.json")
    files = [file.with_name(name) for name in names]
    settings, *configs = [parse(read(near), near) if near.exists() else {} for near in files]

    def named(key: str) -> list[int]:
        token = settings.get(f"{key}_token")
        token = token.get("content") if isinstance(token, dict) else token
        return [ids[token]] if isinstance(token, str) and token in ids else []

    def numbered(key: str) -> list[int]:
        values = [config.get(f"{key}_token_id") for config in configs]
        lists = [value if isinstance(value, list) else [value] for value in values]
        return [id for part in lists for id in part if type(id) is int and id in tokens]

    usual = [ids[name] for name in ENDS if name in ids]
    ends = [*named("eos"), *numbered("eos"), *usual, *named("bos"), *numbered("bos")]
    if not ends:
        raise ModelError(f"{file}: no token is the end of a text; name it in {files[0].name}")
    end, padding = ends[0], [*named("pad"), ends[0]][0]
    opening = opening_tokens(contents.whole.get("post_processor"))
    begin = tuple(ids[name] for name in opening if name in ids)
    special = {id: tokens[id] for id in (end, padding, *begin)}
    stops = {end, *begin, *numbered("eos")}
    # Only where a model has learned to end its turn so.
    turn = (ids.get(OPEN_TURN, -1), ids.get(CLOSE_TURN, -1))
    known = turn[0] >= 0 and turn[1] in stops
    return Ends(end, padding, begin, stops, special, turn if known else None)


def opening_tokens(processor: Any) -> list[str]:
    """The special tokens that this part of a tokenizer.json puts before a text."""
    match processor:
        case {"type": "Sequence", "processors": [*parts]}:
            return [name for part in parts for name in opening_tokens(part)]
        case {"type": "TemplateProcessing", "single": [*parts]}:
            names = []
            for part in parts:
                match part:
                    case {"SpecialToken": {"id": str(name)}}:
                        names.append(name)
                    case _:
                        break
            return names
    return []


def parse(text: str, file: Path) -> dict[str, Any]:
    if sum(map(text.count, ",[{")) > MOST_VALUES:
        raise ModelError(f"{file} has over {MOST_VALUES:,} values: too many for a tokenizer")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ModelError(f"{file} is not JSON, or no object")
    return values


def read(file: Path) -> str:
    try:
        if not file.is_file():
            raise ModelError(f"{file} {'is no file' if file.exists() else 'does not exist'}")
        if file.stat().st_size > LARGEST_FILE:
            raise ModelError(f"{file} has over {LARGEST_FILE:,} bytes: too large for a tokenizer")
        return file.read_bytes().decode()
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
