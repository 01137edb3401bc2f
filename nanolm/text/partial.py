"""Using a part of a large text: stretches from all over it, without reading the rest.

    >>> take_part(sources, Reading(), max_bytes=4_000_000)

Of plain text and JSON lines, only the chosen stretches are read from the disk. Tables and
compressed files have to be read from their beginning: every few rows are kept, and reading stops
when there is enough. Of many small files, whole ones are kept. The part depends on the files and
`max_bytes` alone, so the same command finds it in the cache.
"""

import codecs
import math
from dataclasses import replace

from nanolm.errors import DataError
from nanolm.text import COMPRESSIONS
from nanolm.text.documents import MAGIC, Reading
from nanolm.text.sources import Source, Sources

STRETCHES = 200  # of a text, at most,
SHORTEST = 4_096  # bytes each: several contexts of a small model
COMPRESSED = 4  # times its size on the disk, about, is the text of a compressed file
SEQUENTIAL = (".csv", ".tsv", ".parquet", ".arrow")  # a row is found only by reading those before
MOST_SKIPPED = 16  # a file that cannot be skipped through is read this many times as far as is kept
SINGLE_BYTE = ("ascii", "iso8859", "cp125", "koi8", "mac")  # encodings that can be cut anywhere


def text_size(sources: Sources) -> int:
    """About how many bytes of text there are."""
    return sum(_size(source) for source in sources.files)


def take_part(sources: Sources, reading: Reading, max_bytes: int | None) -> Sources:
    """At most about `max_bytes` of the text, from all over it."""
    if max_bytes is None or (total := text_size(sources)) <= max_bytes:
        return sources
    stretch = max(SHORTEST, max_bytes // STRETCHES)
    kept: list[Source] = []
    taken, passed = 0.0, 0
    for source in sources.files:
        size = _size(source)
        share = max_bytes * size / total
        passed += size
        if size <= 2 * stretch:
            if taken + size <= max_bytes * passed / total + stretch / 2:
                kept.append(source)
                taken += size
            continue
        taken += share
        name = f"{source.name} (in part)"
        if _can_skip(source, reading):
            ranges = _stretches(source, size, share, stretch)
            kept.append(replace(source, name=name, ranges=ranges))
        else:
            every = min(MOST_SKIPPED, math.ceil(size / share))
            kept.append(replace(source, name=name, every=every, limit=int(share)))
    return replace(sources, files=kept)


def _size(source: Source) -> int:
    try:
        return source.size() * (COMPRESSED if _compressed(source) else 1)
    except OSError as error:
        raise DataError(f"{source.name} cannot be read: {error.strerror}") from None


def _compressed(source: Source) -> bool:
    if source.path.suffix.lower() in COMPRESSIONS:
        return True
    with source.open() as stream:
        return stream.read(6).startswith(tuple(MAGIC))


def _can_skip(source: Source, reading: Reading) -> bool:
    """Can reading begin at any line?"""
    encoding = codecs.lookup(reading.encoding).name
    lines = encoding == "utf-8" or encoding.startswith(SINGLE_BYTE)
    return lines and source.suffix not in SEQUENTIAL and not _compressed(source)


def _stretches(
    source: Source, size: int, share: float, stretch: int
) -> tuple[tuple[int, int], ...]:
    """Evenly spaced, from line to line."""
    count = max(1, round(share / stretch))
    length = share / count
    ranges: list[tuple[int, int]] = []
    with source.open() as stream:

        def line_from(place: float) -> int:
            """Where a line begins; in a line without end, a word, or at least a character."""
            start = min(size, int(place))
            if start in (0, size):
                return start
            stream.seek(start)
            data = stream.read(stretch)
            for end in (b"\n", b" "):
                if (found := data.find(end)) >= 0:
                    return start + found + 1
            whole = (n for n, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80)
            return start + next(whole, 0)

        for number in range(count):
            begin = line_from(number * size / count)
            end = line_from(number * size / count + length)
            if ranges and begin <= ranges[-1][1]:
                begin = ranges.pop()[0] if begin == ranges[-1][1] else ranges[-1][1]
            if end > begin:
                ranges.append((begin, end))
    return tuple(ranges)
