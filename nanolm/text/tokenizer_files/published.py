"""OpenAI's encodings, which tiktoken knows by name."""

import threading
from functools import cached_property
from typing import NamedTuple

import tiktoken

from nanolm.errors import UsageError, did_you_mean
from nanolm.text import NAMED
from nanolm.text.saving import byte_level_json
from nanolm.text.tokenizer import END_OF_TEXT, Tiktoken

DOWNLOAD_TIMEOUT = 60  # seconds for 4 MB; tiktoken itself would wait forever


class Published(NamedTuple):
    """An OpenAI encoding with its pattern in two equivalent forms: in Oniguruma, the engine of
    `tokenizers`, `{1,3}+` is not possessive and `$` matches at every line end. Greedy quantifiers
    are equivalent if the rest of the pattern cannot match what backtracking would give up."""

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
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = Published(
    *("o200k", "o200k_base", "o200k_base.tiktoken", 199_998, 199_999, 200_019), _O200K, _O200K
)
PUBLISHED = {encoding.kind: encoding for encoding in (GPT2, CL100K, O200K)}


def named_tokenizer(name: str) -> "Ranks":
    """One of `NAMED`, with ranks that tiktoken has cached or can download."""
    if name not in NAMED:
        hint = did_you_mean(name, list(NAMED))
        raise UsageError(f"there is no tokenizer {name!r}; choose from {', '.join(NAMED)}{hint}")
    published = PUBLISHED[name]
    outcome: list[tiktoken.Encoding | Exception] = [TimeoutError()]

    def fetch() -> None:
        try:
            outcome.append(tiktoken.get_encoding(published.registered))
        except Exception as error:
            outcome.append(error)

    # In a separate thread, since there is no other way to abandon a server that does not answer.
    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(DOWNLOAD_TIMEOUT)
    encoding = outcome[-1]
    if isinstance(encoding, OSError | ValueError):  # a requests error is an OSError
        raise UsageError(
            f"tokenizer {name} is not in tiktoken's cache and could not be downloaded "
            f"({type(encoding).__name__}). On a machine with network access, download "
            f"https://openaipublic.blob.core.windows.net/encodings/{published.file} and pass its "
            f"path: --tokenizer PATH/{published.file} (or copy that machine's TIKTOKEN_CACHE_DIR)"
        )
    if isinstance(encoding, Exception):
        raise encoding
    tokens = [encoding.decode_single_token_bytes(id) for id in range(published.ranks)]
    return Ranks(published, tokens)


class Ranks(Tiktoken):
    def __init__(self, encoding: Published, tokens: list[bytes]) -> None:
        self.kind, self.pattern, self.portable = encoding.kind, encoding.pattern, encoding.portable
        end, unused = encoding.end_of_text, encoding.vocab_size - len(tokens)
        super().__init__([*tokens, *[b""] * unused], end, end, special={end: END_OF_TEXT})

    @cached_property
    def _json(self) -> str:
        # `tokenizers` numbers special tokens itself, after the last rank, so there are no gaps.
        special = {id: f"<|reserved_{id}|>" for id in range(len(self.ranks), self.vocab_size)}
        return ranks_json(self.tokens, self.portable, special | self.special)

    def to_json(self) -> str:
        return self._json


def ranks_json(
    tokens: list[bytes], pattern: str, special: dict[int, str], whole_words: bool = False
) -> str:
    """tokenizer.json for ranks: a merge for each token. If merges do not reach some tokens, these
    are used for whole words only (`whole_words`), and all possible merges are listed."""
    ranks = {token: id for id, token in enumerate(tokens) if token}
    parts = [] if whole_words else [last_parts(each, ranks) for each in ranks if len(each) > 1]
    if whole_words or any(len(pair) != 2 for pair in parts):
        splits = ([token[:at], token[at:]] for token in ranks for at in range(1, len(token)))
        parts = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
        whole_words = True
    merges = [(ranks[left], ranks[right]) for left, right in parts]
    return byte_level_json(tokens, merges, pattern, special, ignore_merges=whole_words)


def last_parts(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The parts that byte-pair encoding splits `token` into, using lower ranks only: the two parts
    it was merged from, if the ranks were learned."""
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
