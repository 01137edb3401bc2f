"""The byte-level BPE of a tokenizer.json, encoded by tiktoken where that gives the same ids."""

import hashlib
import unicodedata
from typing import Any

import numpy as np
import regex

from nanolm.text import NAMED
from nanolm.text.tokenizer import ISOLATED, Ids, Tiktoken, utf8
from nanolm.text.tokenizer_files.published import CONTRACTION, GPT2, O200K, PUBLISHED, last_parts
from nanolm.text.tokenizer_files.tokenizer_json import BYTE_OF_CHARACTER, Contents, special_tokens
from nanolm.text.words import SPLIT

MOST_ADDED = 10_000  # tokens that are matched by one pattern; the most in use are 6,400
MOST_ADDED_LETTERS = 200_000  # of their names
MOST_CHECKED = 100_000_000  # squares of their lengths; 200,000 tokens of 7 bytes have 10 million
AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")

# GPT-2's pattern on what remains when each digit has been cut out: white space before a digit
# then stands at an end, where none of it is kept back for the next word.
DIGITS = r"\p{N}|\s++(?=\p{N})|" + GPT2.pattern

# The patterns of other models that are encoded here, with their form for tiktoken. No other will
# do: tiktoken's engine even has errors (there, `b+a*b+` finds a match in "b"). These are tested:
# they match alike in both, leave nothing out, and do not mind where `corpus.SAFE_CUT` cuts a text.
QWEN = SPLIT.replace("{1,3}", "")
QWEN_3_5 = QWEN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
MISTRAL = O200K.pattern.replace(CONTRACTION, "").replace("{1,3}", "")
TIKTOKEN_PATTERNS = {pattern: pattern for pattern in (SPLIT, QWEN, QWEN_3_5, MISTRAL)}
TIKTOKEN_PATTERNS |= {encoding.portable: encoding.pattern for encoding in PUBLISHED.values()}


def byte_level_tokenizer(contents: Contents) -> "ByteLevelFile | None":
    """By way of tiktoken, unless `tokenizers` might give other ids."""
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

    # Each token must be a byte, a union or an added one; and tiktoken merges by the lowest id.
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

    # tiktoken merges any two parts that make a token, `tokenizers` only those listed. So those
    # that come up must be listed; or all there are, with words that are tokens taken whole.
    ranks = {raw[token]: vocabulary[token] for token in made}
    if sum(len(token) ** 2 for token in ranks) > MOST_CHECKED:
        return None
    for token in ranks:
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
    return ByteLevelFile(contents, ranks, pattern)


def split_pattern(pre_tokenizer: Any) -> str | None:
    """The pattern that cuts a text as this part of a tokenizer.json does; None if none will."""
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


class ByteLevelFile(Tiktoken):
    def __init__(self, contents: Contents, ranks: dict[bytes, int], pattern: str) -> None:
        self.kind, self.text, self.pattern, self.ranks = "foreign", contents.text, pattern, ranks
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
        super().__init__(tokens, **special_tokens(contents, contents.ids))

    def encode_array(self, text: str) -> Ids:
        utf8(text)
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
        own = super().fingerprint()
        more = repr((own, self.added, self.normalized)).encode()
        return own if self.kind in NAMED else hashlib.sha256(more).hexdigest()

    def to_json(self) -> str:
        return self.text
