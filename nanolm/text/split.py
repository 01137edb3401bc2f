"""Choose the part of a corpus to hold out for validation: text like the rest, whatever its order.

    >>> validation = take_out(corpus, spread(corpus).ranges, cache)  # leaves the rest in `corpus`

Many documents are split as a whole, by a hash of their beginning, so duplicates stay on one side. A
single text is split into passages spread over all of it, since files are often sorted. The split
depends only on the text: every run has the same one.
"""

import hashlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from nanolm.text.corpus import MOST_HELD_OUT, PART_BYTES, Corpus
from nanolm.text.words import MARK
from nanolm.text.workers import Range

LEAST_TO_SPLIT = 1_000  # bytes; with less, nothing is held out
SMALL_TEXT = 10_000  # bytes; a smaller text can hardly spare any
REPEATED_SHARE = 0.8  # of held-out words must occur in the rest of such a small text
LONG_WORD = 40  # bytes on average; longer "words" come from text without spaces
TO_CHOOSE_BY = 1_000  # bytes of validation text; with less, a run keeps its final weights
MANY_DOCUMENTS = 20  # with fewer, one may be unlike the others, so all of them are sampled
HASHED_BYTES = 4_000  # at the beginning of a document; less than partial.SHORTEST_STRETCH
HELD_OUT_STRETCHES = 32  # passages
SAMPLE_BYTES = 1 << 16  # per read, to measure how long paragraphs, lines and sentences are
# Where a text can be cut, best first, and how many of these units must fit into the held-out part.
# A space belongs to the word after it, as in tokenizers.
CUTS = {
    "paragraphs": (re.compile(rb"\n(?:[ \t]*\n)+"), 8),
    "lines": (re.compile(rb"\n"), 3),
    "sentences": (re.compile(rb"[.!?][\"')\]]*\s*(?=\s)|\xe3\x80\x82|\xef\xbc[\x81\x9f]"), 3),
    "words": (re.compile(rb"(?<=\S)(?=\s)"), 3),
    "characters": (re.compile(rb"(?=[\x00-\x7f\xc0-\xff])"), 0),
}


class HeldOut(NamedTuple):
    ranges: list[Range]  # of the corpus file, in order
    origin: str

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


NOTHING = HeldOut([], "nothing")


def spread(corpus: Corpus, fraction: float | None = None) -> HeldOut:
    """Whole documents if there are many, else passages spread over the text. Unless a `fraction` is
    given, nothing from a small text (such as a poem) whose words rarely repeat, since they could
    not be predicted."""
    if fraction is None:
        held_out = spread(corpus, min(0.1, MOST_HELD_OUT / max(1, corpus.size)))
        few = corpus.size < SMALL_TEXT and not repeats(corpus, held_out.ranges)
        return NOTHING if few or corpus.size < LEAST_TO_SPLIT else held_out
    size = round(fraction * corpus.size)
    if not size:
        return NOTHING
    if corpus.documents >= MANY_DOCUMENTS and (ranges := documents_by_hash(corpus, fraction, size)):
        return HeldOut(ranges, f"{len(ranges):,} of {corpus.documents:,} documents, chosen by hash")
    return stretches(corpus, size)


def repeats(corpus: Corpus, ranges: list[Range]) -> bool:
    """Whether the words in `ranges` also occur elsewhere in the text."""
    text, held_out, end = b"", b"", 0
    for start, stop in [*ranges, (corpus.length, corpus.length)]:
        text, end = text + corpus.read(end, start) + b" ", stop
        held_out += corpus.read(start, stop) + b" "
    known: Sequence[object] = text.split()
    words: Sequence[object] = held_out.split()
    if len(text) > LONG_WORD * len(known):  # for example Chinese: no spaces between words
        known, words = text.decode(errors="ignore"), held_out.decode(errors="ignore")
    distinct = set(known)
    return sum(word in distinct for word in words) >= REPEATED_SHARE * len(words)


def at_the_end(corpus: Corpus, fraction: float | None = None) -> HeldOut:
    return NOTHING if fraction == 0 else HeldOut([corpus.split(fraction)[1]], "the end of the text")


def documents_by_hash(corpus: Corpus, fraction: float, size: int) -> list[Range]:
    """About `size` bytes of documents with the smallest hashes; none if they are too long."""
    groups: dict[bytes, list[Range]] = {}  # duplicates together
    # In a large corpus, only the smallest hashes can be chosen.
    most = min(1.0, 4 * fraction) if corpus.documents > 1_000 else 1.0
    limit = int(most * 255).to_bytes(1) + b"\xff" * 7
    for digest, range_ in hashed_documents(corpus):
        if digest <= limit:
            groups.setdefault(digest, []).append(range_)
    chosen: list[Range] = []
    left = size
    for _, ranges in sorted(groups.items()):
        needed = sum(stop - start for start, stop in ranges)
        if needed <= 1.1 * left:
            chosen += ranges
            left -= needed
    enough = left <= size / 2 and 2 < len(chosen) < corpus.documents
    return sorted(chosen) if enough else []


def hashed_documents(corpus: Corpus) -> Iterator[tuple[bytes, Range]]:
    """The hash of each document's beginning (so a part of it has the same hash), and its range."""
    head, start = b"", 0
    for place, begins, text in chain(corpus.blocks(), [(corpus.length, True, b"")]):
        if begins:
            if place > 0:
                yield hashlib.blake2b(head.rstrip(), digest_size=8).digest(), (start, place)
            head, start = b"", place
        if len(head) < HASHED_BYTES:
            head = (head + text).lstrip()[:HASHED_BYTES]


def stretches(corpus: Corpus, size: int) -> HeldOut:
    """About `size` bytes in evenly spaced passages, cut between the largest units that fit."""
    kind, unit = cut_between(corpus, size)
    pattern = CUTS[kind][0]
    count = max(1, min(HELD_OUT_STRETCHES, round(size / unit)))
    ranges: list[Range] = []
    for number in range(count):
        # At the end of each of `count` equal parts, so that every text begins with training text.
        end = corpus.between_characters(round(corpus.length * (number + 1) / count))
        begin = ranges[-1][1] if ranges else 1
        start = next_cut(corpus, max(begin + 1, end - round(1.5 * size / count)), end, pattern)
        stop = next_cut(corpus, start + round(size / count - unit / 2), corpus.length, pattern)
        mark = corpus.read(start, stop).find(MARK)  # a document keeps its beginning
        stop = stop if mark < 0 else start + mark
        if begin < start < stop:
            ranges.append((start, stop))
    return HeldOut(ranges, f"{len(ranges)} passages spread over the text, cut between {kind}")


def cut_between(corpus: Corpus, size: int) -> tuple[str, float]:
    """The kind of unit to cut a text between, and the mean length of such a unit in bytes."""
    places = range(0, corpus.length, max(SAMPLE_BYTES, corpus.length // HELD_OUT_STRETCHES))
    parts = [corpus.read(place, min(place + SAMPLE_BYTES, corpus.length)) for place in places]
    length = sum(map(len, parts))
    for kind, (pattern, least) in CUTS.items():
        unit = length / (1 + sum(len(pattern.findall(part)) for part in parts))
        if least * unit <= size:
            return kind, unit
    raise AssertionError("a text can be cut between any two characters")


def next_cut(corpus: Corpus, place: int, stop: int, pattern: re.Pattern[bytes]) -> int:
    """The first place to cut at or after `place`, at most `stop`."""
    while place < stop:
        # From the byte before, since a match may end exactly at `place`.
        text = corpus.read(place - 1, min(place - 1 + PART_BYTES, stop))
        if end := next((match.end() for match in pattern.finditer(text) if match.end()), 0):
            return place - 1 + end
        place += max(1, len(text) - 16)
    return stop


def take_out(corpus: Corpus, ranges: list[Range], folder: Path) -> Corpus:
    """Move `ranges` into a new corpus; the rest of `corpus` is compacted in place."""
    taken = Corpus(tempfile.TemporaryFile(dir=folder), 0, 0)  # noqa: SIM115
    end, copied = 0, 0
    for start, stop in [*ranges, (corpus.length, corpus.length)]:
        copied += move(corpus, (end, start), corpus, copied)
        taken.length += move(corpus, (start, stop), taken, taken.length)
        end = stop
    corpus.length = corpus.file.truncate(copied)
    for part in (corpus, taken):
        part.file.flush()
        places = range(0, part.length, PART_BYTES)
        part.documents = sum(part.read(at, at + PART_BYTES).count(MARK) for at in places)
    return taken


def concatenated(parts: Sequence[Corpus], folder: Path) -> Corpus:
    whole = Corpus(tempfile.TemporaryFile(dir=folder), 0, 0)  # noqa: SIM115
    for part in parts:
        whole.length += move(part, (0, part.length), whole, whole.length)
        whole.documents += part.documents
    return whole


def move(source: Corpus, range_: Range, target: Corpus, place: int) -> int:
    """Copy a range to `place` in `target` (in one file never forwards); returns its length."""
    start, stop = range_
    if source is target and start == place:
        return stop - start
    for begin in range(start, stop, PART_BYTES):
        block = source.read(begin, min(begin + PART_BYTES, stop))
        target.file.seek(place + begin - start)
        target.file.write(block)
        target.file.flush()  # `read` does not see buffered bytes
    return stop - start
