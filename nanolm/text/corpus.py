"""All documents in one plain file, whatever their source: read once, then split anywhere.

    >>> with read_corpus(sources, Reading(), cache) as corpus:
    ...     text = corpus.read(0, corpus.length)

The file is temporary and has no name, so nothing outlives the process. Each document is one byte
0xff, which never occurs in UTF-8, and then its UTF-8. Memory does not grow with the text, and later
passes can work on many parts of it at once.
"""

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from nanolm import files
from nanolm.choice import Report
from nanolm.errors import DataError, DiskFull, NanolmError
from nanolm.formats import listed
from nanolm.text.bounds import ExpansionLimit
from nanolm.text.decoding import Reading
from nanolm.text.documents import TextBlocks, documents
from nanolm.text.source import READ_BYTES, TextSource
from nanolm.text.sources import Sources, raise_all
from nanolm.text.words import MARK, lowered
from nanolm.text.workers import HAS_PREAD, Range

PART_BYTES = 1 << 16  # encoded at once; larger parts fragment the heap
MOST_HELD_OUT = 1_000_000  # bytes: with more, evaluation takes longer and says the same
CUT_WINDOW = 1 << 10  # bytes before the end of a part in which to look for a good place to cut

# Where a text can be cut without affecting any split pattern in use: before a space that follows
# a non-space, and after a single newline between two non-spaces.
SAFE_CUT = re.compile(r"(?<=\S)(?= )|(?<=\S\n)(?=\S)")
_lock = threading.Lock()


@dataclass
class Corpus:
    file: IO[bytes]
    length: int  # of the file
    documents: int

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    @property
    def size(self) -> int:
        """Bytes of text as UTF-8."""
        return self.length - self.documents

    def read(self, start: int, stop: int) -> bytes:
        """The bytes in this range; safe to call from many threads."""
        if HAS_PREAD:
            parts = []
            while start < stop and (part := os.pread(self.file.fileno(), stop - start, start)):
                parts.append(part)
                start += len(part)
            return b"".join(parts)
        with _lock:
            self.file.seek(start)
            return self.file.read(stop - start)

    def parts(self, size: int = PART_BYTES, whole: bool = False, start: int = 0) -> Iterator[Range]:
        """Everything from `start` in parts of about `size` bytes, cut where tokens do not change if
        possible, else between characters; with `whole`, only between documents."""
        while start < self.length:
            end = min(start + size, self.length)
            if end < self.length:
                end = self._mark_from(end, self.length) if whole else self._good_place(start, end)
            yield start, end
            start = end

    def blocks(self, report: Report = lambda *_: None) -> Iterator[tuple[int, bool, bytes]]:
        """Everything, block by block: offset, whether a document begins there, text."""
        for start, stop in self.parts():
            first, *others = self.read(start, stop).split(MARK)
            if first:
                yield start, False, first
            start += len(first)
            for text in others:
                yield start, True, text
                start += 1 + len(text)
            report("scanning the text", stop, self.length)

    def _mark_from(self, start: int, stop: int) -> int:
        for begin in range(start, stop, PART_BYTES):
            part = self.read(begin, min(begin + PART_BYTES, stop))
            if MARK in part:
                return begin + part.index(MARK)
        return stop

    def _good_place(self, start: int, end: int) -> int:
        end = self.between_characters(end)
        for window in (CUT_WINDOW, end - start - 1):
            begin = self.between_characters(max(start + 1, end - window))
            before, mark, after = self.read(begin, end).rpartition(MARK)
            text = after.decode()
            if places := [match.start() for match in SAFE_CUT.finditer(text)]:
                return end - len(text[places[-1] :].encode())
            if mark:
                return begin + len(before)
        return end

    def between_characters(self, place: int) -> int:
        """The first offset from `place` on that does not split a character."""
        tail = self.read(place, place + 4)
        return place + next((n for n, byte in enumerate(tail) if byte & 0xC0 != 0x80), len(tail))

    def split(self, fraction: float | None = None) -> tuple[Range, Range]:
        """Everything before the last `fraction` (default: a tenth) of the text, and that fraction,
        cut between documents if possible near there, else lines, else words, else characters."""
        if fraction is None:
            fraction = min(0.1, MOST_HELD_OUT / max(1, self.length))
        target = round(self.length * (1 - fraction))
        near = round(self.length * fraction / 2)
        low, high = max(1, target - near), min(self.length, target + near + 1)
        after = self._mark_from(target, high)
        before = self._last(MARK, low, target)
        if before is not None and target - before <= after - target:
            cut = before
        elif after < high:
            cut = after
        else:
            end = self._last(b"\n", low, target)
            end = self._last(b" ", low, target) if end is None else end
            cut = self.between_characters(target) if end is None else end + 1
        return (0, cut), (cut, self.length)

    def _last(self, what: bytes, start: int, stop: int) -> int | None:
        while start < stop:
            begin = max(start, stop - PART_BYTES)
            part = self.read(begin, stop)
            if what in part:
                return begin + part.rindex(what)
            stop = begin
        return None


def read_corpus(
    sources: Sources,
    reading: Reading,
    folder: Path,
    report: Report = lambda *_: None,
    lowercase: bool = False,
) -> Corpus:
    """Read every source; `folder` takes a temporary copy of the text."""
    corpus, problems = read_with_problems(sources, reading, folder, report, lowercase)
    raise_all(problems)
    if not corpus.documents:
        names = listed([source.name for source in sources.files], 5)
        raise DataError(f"{names}: no text found; use a file with at least a few sentences")
    return corpus


def read_with_problems(
    sources: Sources, reading: Reading, folder: Path, report: Report, lowercase: bool = False
) -> tuple[Corpus, list[NanolmError]]:
    """The documents, and the problems with files that could not be read completely."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(tempfile.TemporaryFile(dir=folder), 0, 0)  # noqa: SIM115
    problems: list[NanolmError] = []
    total, done = sources.size(), 0
    limit = ExpansionLimit(listed([source.name for source in sources.files], 3), total)

    for source in sources.files:
        whole = corpus.length, corpus.documents
        try:
            for more in _copy(source, reading, corpus, limit, lowercase):
                report("reading", done + more, total)
            done += source.size()
            report("reading", done, total)
        except (NanolmError, OSError) as error:
            if isinstance(error, NanolmError):
                problems.append(error)
            elif problem := files.disk_problem(error):
                cure = f"{problem.cure}, or set NANOLM_CACHE to another folder."
                message = f"{problem.what}: cannot write a copy of the text to {folder}. {cure}"
                raise DiskFull(message) from None
            else:
                missing = isinstance(error, FileNotFoundError)
                why = "no longer exists" if missing else f"cannot be read: {error.strerror}"
                problems.append(DataError(f"{source.name} {why}"))
            corpus.length, corpus.documents = whole  # drop a file that is damaged
            corpus.file.seek(corpus.length)
            corpus.file.truncate()
    corpus.file.flush()
    return corpus, problems


def thinned(blocks: TextBlocks, every: int, limit: int | None) -> TextBlocks:
    """One in `every` documents (of a long one, lines from each block), up to `limit` bytes."""
    if limit is None:
        yield from blocks
        return
    number, kept, long = -1, True, False
    for begins, text in blocks:
        if limit <= 0:
            break
        if begins:
            number, long = number + 1, not text
            kept = long or number % every == 0
        elif long:
            start = text.find("\n") + 1 if every > 1 else 0
            most = start + min(len(text) // every, limit)
            text = text[start : text.rfind("\n", start, most) + 1 or most]
        if kept:
            yield begins, text
            limit -= len(text)


def _copy(
    source: TextSource, reading: Reading, corpus: Corpus, limit: ExpansionLimit, lowercase: bool
) -> Iterator[int]:
    """Copy the documents of a file; yields the progress in bytes now and then."""
    stamp = source.stamp()
    blank, begun = "", False  # leading white space, until the document has other characters
    written, reported = 0, 0
    for begins, text in thinned(documents(source, reading), source.every, source.limit):
        if begins:
            blank, begun = "", False
        if not begun:
            text = blank + text
            if not text or text.isspace():
                blank = text
                continue
            corpus.file.write(MARK)
            corpus.documents += 1
            corpus.length += 1
            begun = True
        try:
            data = (lowered(text) if lowercase else text).encode()
        except UnicodeEncodeError as error:
            where = f"after {text[max(0, error.start - 20) : error.start]!r}; fix that text"
            raise DataError(f"{source.name}: lone surrogate (half a character) {where}") from None
        limit.add(len(data))
        corpus.file.write(data)
        corpus.length += len(data)
        written += len(data)
        if written // READ_BYTES > reported:
            reported = written // READ_BYTES
            yield min(written, stamp[0])
    if source.stamp() != stamp:
        raise DataError(f"{source.name} changed while it was being read; run the command again")
