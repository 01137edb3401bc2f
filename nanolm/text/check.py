"""What a corpus holds, before anything is trained on it.

>>> survey(("embedded:stories",), Reading()).documents
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nanolm.choice import Choice, Report
from nanolm.machine import cache_folder
from nanolm.text.corpus import Corpus, read_corpus, read_what_can_be_read
from nanolm.text.documents import Reading
from nanolm.text.sources import find_sources
from nanolm.text.store import encode_corpus
from nanolm.text.tokenizer import Tokenizer
from nanolm.text.vocabulary import make_tokenizer
from nanolm.text.words import MARK

EXAMPLES = 3


@dataclass
class Survey:
    """What would be read."""

    files: int = 0
    skipped: dict[str, int] = field(default_factory=dict)  # reason: files
    notes: list[str] = field(default_factory=list)  # of downloads, with their checksums
    documents: int = 0
    bytes: int = 0
    characters: int = 0
    distinct_characters: int = 0
    longest_document: int = 0  # bytes
    duplicates: int = 0  # documents that an earlier one equals
    replacement_characters: int = 0  # U+FFFD: where an earlier conversion went wrong
    control_characters: int = 0
    examples: list[str] = field(default_factory=list)  # how some documents begin
    problems: list[str] = field(default_factory=list)  # files that cannot be read
    choices: list[Choice] = field(default_factory=list)  # of the tokenizer
    bytes_per_token: float | None = None
    vocab_size: int | None = None


def survey(
    names: tuple[str, ...],
    reading: Reading,
    report: Report = lambda *_: None,
    cache: Path | None = None,
) -> Survey:
    """Read everything as `nanolm train` would, and say what is there."""
    cache = cache or cache_folder()
    sources = find_sources(names, cache, report, reading.encoding)
    found = Survey(len(sources.files), dict(sources.skipped), sources.notes)
    corpus, problems = read_what_can_be_read(sources, reading, cache, report)
    found.problems = [str(problem) for problem in problems]
    with corpus:
        found.documents, found.bytes = corpus.documents, corpus.size
        _count(corpus, found, report)
        if found.documents:
            whole = (0, corpus.length)
            tokenizer, found.choices = make_tokenizer(corpus, whole, None, None, report)
            found.vocab_size = tokenizer.vocab_size
            start, stop = next(corpus.parts(*whole, size=1 << 20))
            sample = corpus.read(start, stop).replace(MARK, b"")
            found.bytes_per_token = round(
                len(sample) / len(tokenizer.encode_array(sample.decode())), 3
            )
    return found


def _count(corpus: Corpus, found: Survey, report: Report) -> None:
    characters: Counter[str] = Counter()
    seen: set[bytes] = set()
    digest, length = hashlib.blake2b(digest_size=16), 0

    def document_ends() -> None:
        nonlocal length
        found.longest_document = max(found.longest_document, length)
        found.duplicates += digest.digest() in seen
        seen.add(digest.digest())
        length = 0

    for begins, text in pieces(corpus, report):
        if begins:
            if length:
                document_ends()
            digest = hashlib.blake2b(digest_size=16)
            if len(found.examples) < EXAMPLES:
                found.examples.append(" ".join(text[:200].split())[:100])
        data = text.encode()
        digest.update(data)
        length += len(data)
        characters.update(text)
    if length:
        document_ends()
    found.characters = characters.total()
    found.distinct_characters = len(characters)
    found.replacement_characters = characters["\ufffd"]
    found.control_characters = sum(
        count for char, count in characters.items() if ord(char) < 32 and char not in "\n\t"
    )


def pieces(corpus: Corpus, report: Report) -> Iterator[tuple[bool, str]]:
    """(does a document begin here?, its text or a part of it), through the whole corpus."""
    for start, stop in corpus.parts(0, corpus.length):
        first, *others = corpus.read(start, stop).split(MARK)
        if first:
            yield False, first.decode()
        for other in others:
            yield True, other.decode()
        report("looking through the text", stop, corpus.length)


@dataclass(frozen=True)
class Compression:
    """How one tokenizer does on a text."""

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
    cache: Path | None = None,
) -> list[Compression]:
    """Encode a text with each tokenizer; a (kind, size) is first made for that text."""
    cache = cache or cache_folder()
    sources = find_sources(names, cache, report, reading.encoding)
    rows = []
    with read_corpus(sources, reading, cache, report) as corpus:
        characters = sum(len(text) for _, text in pieces(corpus, report))
        for name, wanted in tokenizers:
            if isinstance(wanted, Tokenizer):
                tokenizer = wanted
            else:
                tokenizer, _ = make_tokenizer(corpus, (0, corpus.length), *wanted, report)
            tokens = encode_corpus(corpus, (0, corpus.length), tokenizer, Path(os.devnull), report)
            tokens -= corpus.documents  # what stands before each
            rows.append(
                Compression(
                    tokenizer=name,
                    vocab_size=tokenizer.vocab_size,
                    tokens=tokens,
                    bytes=corpus.size,
                    bytes_per_token=corpus.size / tokens,
                    characters_per_token=characters / tokens,
                )
            )
    return rows
