"""The byte-level BPE of a tokenizer.json, encoded by tiktoken if that gives the same ids."""

import hashlib
import unicodedata
from typing import Any

import numpy as np
import regex

from nanolm.text import NAMED
from nanolm.text.saving import ISOLATED
from nanolm.text.tokenizer import Ids, Tiktoken, utf8
from nanolm.text.tokenizer_files.published import CONTRACTION, GPT2, O200K, PUBLISHED, last_parts
from nanolm.text.tokenizer_files.tokenizer_json import BYTE_OF_CHARACTER, Contents, special_tokens
from nanolm.text.words import SPLIT

MOST_ADDED = 10_000  # added tokens, matched by one pattern; real models have up to 6,400
MOST_ADDED_LETTERS = 200_000  # of their names
MOST_CHECKED = 100_000_000  # sum of squared token lengths; 200,000 tokens of 7 bytes: 10 million
AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")

# GPT-2's pattern on the pieces between digits, which are split off one by one. White space before
# a digit is then at the end of a piece, where no space is left for the next word.
DIGITS = r"\p{N}|\s++(?=\p{N})|" + GPT2.pattern

# The supported patterns of other models, in their form for tiktoken. Others are not accepted,
# because tiktoken's engine has bugs (there, `b+a*b+` matches "b"). Tests show that these match the
# same text in both engines, cover every character, and allow cuts at `corpus.SAFE_CUT`.
QWEN = SPLIT.replace("{1,3}", "")
QWEN_3_5 = QWEN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
MISTRAL = O200K.pattern.replace(CONTRACTION, "").replace("{1,3}", "")
TIKTOKEN_PATTERNS = {pattern: pattern for pattern in (SPLIT, QWEN, QWEN_3_5, MISTRAL)}
TIKTOKEN_PATTERNS |= {encoding.portable: encoding.pattern for encoding in PUBLISHED.values()}


def byte_level_tokenizer(contents: Contents) -> "ByteLevelFile | None":
    """A tokenizer that uses tiktoken; None if `tokenizers` might give different ids."""
    model, vocabulary, merges = contents.whole["model"], contents.vocabulary, contents.merges
    pattern = split_pattern(contents.whole.get("pre_tokenizer"))
    if merges is None or pattern is None or len(contents.added) > MOST_ADDED:
        return None
    if sum(len(new["content"]) for new in contents.added) > MOST_ADDED_LETTERS:
        return None
    options = ("unk_token", "dropout", "byte_fallback", *AFFIXES)
    normalizer = contents.whole.get("normalizer")
    if normalizer not in (None, {"type": "NFC"}) or any(model.get(key) for key in options):
        return None

    # Each token must be a byte, a merge or an added token, and tiktoken merges by lowest id.
    made = dict.fromkeys([*BYTE_OF_CHARACTER, *(left + right for left, right in merges)])
    names = {new["content"] for new in contents.added}
    order = [vocabulary[left + right] for left, right in merges]
    if vocabulary.keys() - names != made.keys() or names & made.keys() or order != sorted(order):
        return None
    try:
        raw = {token: bytes(BYTE_OF_CHARACTER[character] for character in token) for token in made}
        listed = {(raw[left], raw[right]) for left, right in merges}
    except KeyError:
        return None

    # tiktoken merges any two parts that form a token, `tokenizers` only the listed pairs. So the
    # pairs tiktoken uses must be listed; or, with `ignore_merges`, all possible pairs.
    ranks = {raw[token]: vocabulary[token] for token in made}
    if sum(len(token) ** 2 for token in ranks) > MOST_CHECKED:
        return None
    for token in ranks:
        if len(token) > 1 and tuple(last_parts(token, ranks)) not in listed:
            splits = ((token[:at], token[at:]) for at in range(1, len(token)))
            possible = {pair for pair in splits if ranks.keys() >= set(pair)}
            if not model.get("ignore_merges") or not possible <= listed:
                return None

    following = len(vocabulary)  # `tokenizers` numbers added tokens itself, in this way
    flags = ("lstrip", "rstrip", "single_word", "normalized")
    for new in contents.added:
        name = new["content"]
        if not name or new["id"] != vocabulary.get(name, following):
            return None
        following = max(following, new["id"] + 1)
        # A token with a space in it might be split where a long text is cut.
        cut = any(new.get(flag) for flag in flags) or any(map(str.isspace, name))
        if cut and not new.get("special"):
            return None
    return ByteLevelFile(contents, ranks, pattern)


def split_pattern(pre_tokenizer: Any) -> str | None:
    """The pattern that splits text like this part of a tokenizer.json; None if unsupported."""
    match pre_tokenizer:
        case {"type": "Sequence", "pretokenizers": [*before, last]}:
            pass
        case last:
            before = []
    match last:
        case {"type": "ByteLevel", "add_prefix_space": False}:
            steps = [*before, last.get("use_regex", True)]
        case _:
            return None
    match steps:
        case [True]:
            return GPT2.portable
        case [{"type": "Digits", "individual_digits": True}, True]:
            return DIGITS
        case [{"type": "Split", "pattern": {"Regex": str(split)}, **how}, False] if how == ISOLATED:
            return TIKTOKEN_PATTERNS.get(split)
    return None


def added_pattern(new: dict[str, Any]) -> str:
    """A pattern for an added token, with the white space around it that its flags include."""
    name = f"({regex.escape(new['content'])})"
    name = rf"(?<!\w){name}(?!\w)" if new.get("single_word") else name
    return (r"\s*+" if new.get("lstrip") else "") + name + (r"\s*+" if new.get("rstrip") else "")


class ByteLevelFile(Tiktoken):
    def __init__(self, contents: Contents, ranks: dict[bytes, int], pattern: str) -> None:
        self.kind, self.text, self.pattern, self.ranks = "foreign", contents.text, pattern, ranks
        for known in PUBLISHED.values():  # written by `Ranks`
            if (known.pattern, known.ranks) == (pattern, len(ranks)):
                self.kind = known.kind
        tokens = [b""] * (max(contents.ids.values()) + 1)
        for token, id in ranks.items():
            tokens[id] = token
        # Special tokens in a text stay text, other added tokens are matched: the first, then the
        # longest, and never inside a special one.
        self.added = {new["content"]: new["id"] for new in contents.added if not new.get("special")}
        for name, id in self.added.items():
            tokens[id] = name.encode()
        found = sorted(contents.added, key=lambda new: len(new["content"]), reverse=True)
        self.matched = regex.compile("|".join(regex.escape(new["content"]) for new in found))
        self.typed = regex.compile("|".join(map(added_pattern, found))) if found else None
        self.normalized = contents.whole.get("normalizer") is not None
        super().__init__(tokens, **special_tokens(contents, contents.ids))

    def encode_array(self, text: str) -> Ids:
        return self._between(self.matched if self.added else None, self.added, text)

    def encode_special(self, text: str) -> list[int]:
        ids: list[int] = self._between(self.typed, self.added | self.spelled, text).tolist()
        return ids

    def _between(self, pattern: Any, ids: dict[str, int], text: str) -> Ids:
        """The ids of `text`, in which `pattern` matches added tokens."""
        utf8(text)
        pieces: list[Ids] = []
        start = 0
        for match in pattern.finditer(text) if pattern else ():
            if (name := match[match.lastindex or 0]) in ids:
                id = np.array([ids[name]], dtype=np.uint32)
                pieces += [self._plain(text[start : match.start()]), id]
                start = match.end()
        return np.concatenate([*pieces, self._plain(text[start:])])

    def _plain(self, text: str) -> Ids:
        # `tokenizers` uses Unicode 9: it may leave two marks on a letter in the wrong order if
        # they were added to Unicode later.
        text = unicodedata.normalize("NFC", text) if self.normalized else text
        return super().encode_array(text)

    def fingerprint(self) -> str:
        own = super().fingerprint()
        more = repr((own, self.added, self.normalized)).encode()
        return own if self.kind in NAMED else hashlib.sha256(more).hexdigest()

    def to_json(self) -> str:
        return self.text
