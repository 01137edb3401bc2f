"""Probabilities of words instead of tokens, with the most likely alternatives.

    >>> for word in score_words(language_model, sample, top=6):
    ...     print(word.text, word.probability, word.top)

A word is a piece that `nanolm.text.words.SPLIT` produces before byte-pair encoding (letters or
punctuation), or a whole number, with all preceding spaces. It may have several tokens, so its
probability is the product of theirs, times the probability that the word ends there. Without the
latter, " cat" would also include texts that continue as " cats". Every word but the first is known
to begin where it does, so its probability is divided by that of a new word beginning there. The
product over all words is then the probability of the text (Pimentel and Meister 2024, How to
Compute the Probability of a Word).
"""

import codecs
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import regex
import torch
from torch import Tensor

from nanolm.generation.decoding import CachedDecoder, Decoder
from nanolm.generation.language_model import LanguageModel, Sample
from nanolm.text import spelled
from nanolm.text.tokenizer import Tokenizer
from nanolm.text.words import SPLIT

SEARCH_WIDTH = 32  # word prefixes that are extended at once
MAX_WORD_TOKENS = 24  # per word in the search
NEGLIGIBLE = 0.01  # relative to the last shown word; less likely prefixes are dropped
BOUNDARY_CHARS = 4  # first characters of a token, which decide whether it continues a word

WORD_PATTERN = SPLIT.replace(r"\p{N}{1,3}", r"\p{N}+")
# Character classes of WORD_PATTERN, each with a representative; space and apostrophe are separate.
CHARACTER_CLASSES = ((r"[\r\n]", "\n"), (r"\s", "\t"), (r"\p{L}", "a"), (r"\p{N}", "0"))


@dataclass(frozen=True)
class Word:
    text: str
    probability: float
    tokens: list[int]
    top: list[tuple[str, float]] = field(default_factory=list)  # the most likely words in its place


class WordPrefix(NamedTuple):
    path: tuple[int, ...]
    logprob: float
    row: int  # of the batch that has read all but its last token


class WordBoundaries:
    def __init__(self, tokenizer: Tokenizer, device: torch.device) -> None:
        self.tokenizer, self.device = tokenizer, device
        self.heads: dict[str, list[int]] = {}  # tokens by the classes of their first characters
        self.inner: list[int] = []  # tokens that begin inside a character
        for id, token in enumerate(tokenizer.tokens):
            if token and 0x80 <= token[0] < 0xC0:
                self.inner.append(id)
            elif token:
                text = token.decode(errors="surrogateescape")
                self.heads.setdefault(simplified(text)[:BOUNDARY_CHARS], []).append(id)
        self.known: dict[str | None, Tensor] = {}

    def continuing(self, word: bytes) -> Tensor:
        """(vocabulary,): True for tokens that continue `word`."""
        key = None if unfinished(word) else simplified(word.decode(errors="surrogateescape"))
        if key not in self.known:
            ids = list(self.inner) if key is None else []
            for head, tokens in self.heads.items():
                if key and (key.strip(" \t") == "" or not boundary(key, head)):
                    ids += tokens
            mask = torch.zeros(self.tokenizer.vocab_size, dtype=torch.bool)
            mask[ids] = True
            self.known[key] = mask.to(self.device)
        return self.known[key]


def simplified(text: str) -> str:
    """`text` with each character replaced by its class, and long runs shortened."""
    parts = regex.split(r"('\p{L}*)", text)  # odd parts may be contractions, where letters matter
    for place in range(0, len(parts), 2):
        kinds = "".join(map(kind, parts[place]))
        parts[place] = regex.sub("!{3,}", "!!", regex.sub("([a0])\\1+", r"\1", kinds))
    return "".join(parts)


@cache
def kind(char: str) -> str:
    if char in " '":
        return char
    return next((sign for pattern, sign in CHARACTER_CLASSES if regex.match(pattern, char)), "!")


def boundary(word: str, following: str) -> bool:
    return any(part.end() == len(word) for part in regex.finditer(WORD_PATTERN, word + following))


def unfinished(word: bytes) -> bool:
    """Whether the last character of `word` lacks some of its bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(word)
    return bool(decoder.getstate()[0])


@torch.inference_mode()
def score_words(
    language_model: LanguageModel, sample: Sample, top: int = 0, path: type[Decoder] = CachedDecoder
) -> list[Word]:
    """The words of a sample with their probabilities and the `top` most likely alternatives."""
    with language_model.model.eval_mode():
        return WordScorer(language_model, sample, top, path).words()


class WordScorer:
    """Scores the words of one sample, with a decoder that has a row for each word prefix."""

    def __init__(
        self, language_model: LanguageModel, sample: Sample, top: int, path: type[Decoder]
    ) -> None:
        model, self.tokenizer = language_model.model, language_model.tokenizer
        self.sample, self.top = sample, top
        self.boundaries = WordBoundaries(self.tokenizer, model.device)
        prompt = self.tokenizer.encode_prompt(sample.prompt)
        self.prompt_length = self.read = len(prompt)
        written = [*prompt, *sample.tokens]
        self.width = min(SEARCH_WIDTH, self.tokenizer.vocab_size) if top else 1
        length = len(written) + MAX_WORD_TOKENS + 1
        self.decoder = path(model, self.width, length)
        self.ids = torch.zeros(self.width, length, dtype=torch.long, device=model.device)
        self.ids[:, : len(written)] = torch.tensor(written, device=model.device)
        pieces = regex.findall(WORD_PATTERN, sample.prompt)
        self.prompt_end = pieces[-1].encode() if pieces else b""  # the first token may continue it

    def words(self) -> list[Word]:
        tokens, logprobs = self.sample.tokens, self.sample.logprobs
        before, begins = self.prompt_end, 1.0  # the probability that a word begins there
        first = self.next_logprobs(0)
        words = []
        for start, end in self.spans():
            path = tuple(tokens[start:end])
            paths = self.search(first, start, before) if self.top else {}
            next_logprobs = self.next_logprobs(end)
            begins_next = ~self.boundaries.continuing(self.extended(before, path))
            ends = float(next_logprobs[begins_next].exp().sum())
            paths[path] = math.exp(sum(logprobs[start:end])) / begins * ends
            text, totals = self.text(path), self.totals(paths)
            top = sorted(totals.items(), key=lambda pair: -pair[1])[: self.top]
            words.append(Word(text, totals[text], list(path), top))
            before, begins = b"", ends
            first = next_logprobs.masked_fill(~begins_next, -math.inf) - math.log(max(ends, 1e-30))
        return words

    def spans(self) -> list[tuple[int, int]]:
        starts, word = [], self.prompt_end
        for number, id in enumerate(self.sample.tokens):
            if not number or not self.boundaries.continuing(word)[id]:
                starts.append(number)
            word = self.extended(word, (id,))
        return list(zip(starts, [*starts[1:], len(self.sample.tokens)], strict=True))

    def extended(self, word: bytes, tokens: Sequence[int]) -> bytes:
        """The unfinished word after `tokens`, if it was `word` before them."""
        for id in tokens:
            begun = word if self.boundaries.continuing(word)[id] else b""
            word = b"" if id in self.tokenizer.special else begun + self.tokenizer.tokens[id]
        return word

    def next_logprobs(self, place: int) -> Tensor:
        """(vocabulary,): log probabilities after the first `place` tokens of the sample."""
        length = self.prompt_length + place
        if self.top:  # the search has left other tokens in this row
            self.decoder.forget(0)
            self.read = length
        for each in range(self.read, length):
            self.logprobs(self.ids[:1], each)
        self.read = length + 1
        return self.logprobs(self.ids[:1], length)[0]

    def logprobs(self, ids: Tensor, length: int) -> Tensor:
        """(rows, vocabulary): log probabilities after the first `length` of `ids`."""
        self.decoder.prepare(ids, [length] * len(ids))
        lengths = torch.full((len(ids),), length, device=ids.device)
        logits = self.decoder.logits(ids, lengths)[:, : self.tokenizer.vocab_size]
        return logits.float().log_softmax(dim=-1)

    def search(self, first: Tensor, start: int, before: bytes) -> dict[tuple[int, ...], float]:
        """Token paths that spell the most likely words, with probabilities. `first` has the log
        probabilities of the first token. Only prefixes that can change the result are extended."""
        length, ids = self.prompt_length + start, self.ids.clone()
        special, vocabulary = self.tokenizer.special, self.tokenizer.vocab_size
        complete: dict[tuple[int, ...], float] = {}
        best = first.topk(self.width)
        prefixes = [
            WordPrefix((id,), logprob, 0)
            for id, logprob in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        for row in range(1, self.width):
            self.decoder.move(0, row)
        for depth in range(MAX_WORD_TOKENS):
            ended = (prefix for prefix in prefixes if prefix.path[-1] in special)
            complete |= {prefix.path: math.exp(prefix.logprob) for prefix in ended}
            shown = sorted(self.totals(complete).values(), reverse=True)[: self.top]
            least = NEGLIGIBLE * shown[-1] if len(shown) == self.top else 0.0
            prefixes = [
                prefix
                for prefix in prefixes
                if prefix.path[-1] not in special and math.exp(prefix.logprob) > least
            ]
            if not prefixes:
                break
            # Unused rows repeat the first prefix, so that all have the same length.
            rows = prefixes + prefixes[:1] * (self.width - len(prefixes))
            if depth:
                from_rows = [prefix.row for prefix in rows]
                self.decoder.select(torch.tensor(from_rows, device=ids.device))
            paths = torch.tensor([prefix.path for prefix in rows], device=ids.device)
            ids[:, length : length + depth + 1] = paths
            own = self.logprobs(ids, length + depth + 1)[: len(prefixes)]  # (prefixes, vocabulary)
            words = (self.extended(before, prefix.path) for prefix in prefixes)
            continuing = torch.stack([self.boundaries.continuing(word) for word in words])
            ends = own.exp().masked_fill(continuing, 0).sum(dim=1).tolist()
            for prefix, end in zip(prefixes, ends, strict=True):
                complete[prefix.path] = math.exp(prefix.logprob) * end
            sums = own + torch.tensor([[prefix.logprob] for prefix in prefixes], device=own.device)
            best = sums.masked_fill(~continuing, -math.inf).flatten().topk(self.width)
            places = (divmod(place, vocabulary) for place in best.indices.tolist())
            prefixes = [
                WordPrefix((*prefixes[row].path, id), logprob, row)
                for (row, id), logprob in zip(places, best.values.tolist(), strict=True)
            ]
        return complete

    def totals(self, paths: dict[tuple[int, ...], float]) -> dict[str, float]:
        """The probability of each word, summed over all tokenizations."""
        totals: dict[str, float] = defaultdict(float)
        for path, probability in paths.items():
            totals[self.text(path)] += probability
        return totals

    def text(self, path: Sequence[int]) -> str:
        special = self.tokenizer.special
        return special.get(path[-1]) or spelled(b"".join(self.tokenizer.tokens[id] for id in path))
