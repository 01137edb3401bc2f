"""Statistics of a corpus, before training on it."""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from nanolm.choice import Choice, Report
from nanolm.machine import cache_folder
from nanolm.text.corpus import Corpus, read_corpus, read_with_problems
from nanolm.text.decoding import Reading
from nanolm.text.documents import plain_json
from nanolm.text.sources import find_sources
from nanolm.text.store import encode_corpus
from nanolm.text.tokenizer import Tokenizer
from nanolm.text.vocabulary import make_tokenizer
from nanolm.text.words import MARK

EXAMPLES = 3


@dataclass
class Survey:
    files: int = 0
    skipped: dict[str, int] = field(default_factory=dict)  # reason: files
    notes: list[str] = field(default_factory=list)  # about downloads, with their checksums
    documents: int = 0
    bytes: int = 0
    characters: int = 0
    distinct_characters: int = 0
    longest_document: int = 0  # bytes
    duplicates: int = 0  # documents equal to an earlier one
    replacement_characters: int = 0  # U+FFFD, left by an earlier failed conversion
    control_characters: int = 0
    examples: list[str] = field(default_factory=list)  # the beginnings of some documents
    problems: list[str] = field(default_factory=list)  # files that cannot be read
    choices: list[Choice] = field(default_factory=list)  # for the tokenizer
    bytes_per_token: float | None = None
    vocab_size: int | None = None


def survey(names: tuple[str, ...], reading: Reading, report: Report) -> Survey:
    """Read everything as `nanolm train` would, and collect statistics."""
    cache = cache_folder()
    sources = find_sources(names, cache, report, reading.encoding)
    notes = sources.notes + plain_json(sources.files, reading)
    result = Survey(len(sources.files), dict(sources.skipped), notes)
    corpus, problems = read_with_problems(sources, reading, cache, report)
    result.problems = [str(problem) for problem in problems]
    with corpus:
        result.documents, result.bytes = corpus.documents, corpus.size
        _count(corpus, result, report)
        if result.documents:
            tokenizer, result.choices = make_tokenizer(corpus, None, None, report)
            result.vocab_size = tokenizer.vocab_size
            sample = corpus.read(*next(corpus.parts(1 << 20))).replace(MARK, b"")
            tokens = len(tokenizer.encode_array(sample.decode()))
            result.bytes_per_token = round(len(sample) / tokens, 3)
    return result


def _count(corpus: Corpus, result: Survey, report: Report) -> None:
    characters: Counter[str] = Counter()
    seen: set[bytes] = set()
    digest, length = hashlib.blake2b(digest_size=16), 0
    for _, begins, data in chain(corpus.blocks(report), [(corpus.length, True, b"")]):
        text = data.decode()
        if begins:
            if length:  # a document ends here
                result.longest_document = max(result.longest_document, length)
                result.duplicates += digest.digest() in seen
                seen.add(digest.digest())
            digest, length = hashlib.blake2b(digest_size=16), 0
            if text and len(result.examples) < EXAMPLES:
                result.examples.append(" ".join(text[:200].split())[:100])
        digest.update(data)
        length += len(data)
        characters.update(text)
    result.characters, result.distinct_characters = characters.total(), len(characters)
    result.replacement_characters = characters["\ufffd"]
    result.control_characters = sum(characters[chr(n)] for n in range(32) if chr(n) not in "\n\t")


@dataclass
class EncodedSize:
    tokenizer: str
    vocab_size: int
    tokens: int
    bytes: int
    bytes_per_token: float
    characters_per_token: float


def compare(
    names: tuple[str, ...],
    reading: Reading,
    tokenizers: Sequence[tuple[str, Tokenizer | tuple[str, int | None]]],
    report: Report = lambda *_: None,
) -> list[EncodedSize]:
    """Encode a text with each tokenizer; a (kind, size) pair is first trained on that text."""
    cache = cache_folder()
    sources = find_sources(names, cache, report, reading.encoding)
    rows = []
    with read_corpus(sources, reading, cache, report) as corpus:
        characters = sum(len(text.decode()) for _, _, text in corpus.blocks(report))
        for name, tokenizer in tokenizers:
            if not isinstance(tokenizer, Tokenizer):
                tokenizer, _ = make_tokenizer(corpus, *tokenizer, report)
            tokens = encode_corpus(corpus, tokenizer, Path(os.devnull), report)
            tokens -= corpus.documents  # the start-of-text token of each
            sizes = (tokenizer.vocab_size, tokens, corpus.size)
            rows.append(EncodedSize(name, *sizes, corpus.size / tokens, characters / tokens))
    return rows
