"""Use part of a large text: passages spread over all of it, without reading the rest.

For plain text and JSON lines, only the chosen passages are read from disk. For tables and
compressed files, every nth row is used until there is enough; among many small files, whole ones.
The part depends only on the files and `max_bytes`, so the same command finds it in the cache.
"""

import codecs
import math
from dataclasses import replace

from nanolm.text.decoding import Reading
from nanolm.text.documents import corpus_format
from nanolm.text.source import TextSource, blamed_on
from nanolm.text.sources import Sources
from nanolm.text.workers import Range

MOST_STRETCHES = 200  # passages
SHORTEST_STRETCH = 4_096  # bytes: several contexts of a small model
COMPRESSION_RATIO = 4  # typical size of the text relative to its compressed file
MOST_SKIPPED = 16  # in a file without random access, read at most this many times the kept bytes
SINGLE_BYTE = ("ascii", "iso8859", "cp125", "koi8", "mac")  # encodings that can be cut anywhere


def text_size(sources: Sources) -> int:
    return sum(_size(source) for source in sources.files)


def take_part(sources: Sources, reading: Reading, max_bytes: int | None) -> Sources:
    """About `max_bytes` of the text at most, spread over all of it."""
    if max_bytes is None or (total := text_size(sources)) <= max_bytes:
        return sources
    encoding = codecs.lookup(reading.encoding).name
    lines = encoding == "utf-8" or encoding.startswith(SINGLE_BYTE)  # can be found from any byte
    stretch = max(SHORTEST_STRETCH, max_bytes // MOST_STRETCHES)
    kept: list[TextSource] = []
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
        part = replace(source, name=f"{source.name} (in part)")
        if lines and corpus_format(source, reading).any_line and not source.compressed():
            kept.append(replace(part, ranges=_stretches(source, size, share, stretch)))
        else:
            every = min(MOST_SKIPPED, math.ceil(size / share))
            kept.append(replace(part, every=every, limit=int(share)))
    return replace(sources, files=kept)


def _size(source: TextSource) -> int:
    with blamed_on(source.name):
        return source.size() * (COMPRESSION_RATIO if source.compressed() else 1)


def _stretches(source: TextSource, size: int, share: float, stretch: int) -> tuple[Range, ...]:
    """Evenly spaced passages of whole lines."""
    count = max(1, round(share / stretch))
    length = share / count
    ranges: list[Range] = []
    with source.open() as stream:

        def line_from(place: float) -> int:
            """The next start of a line; in a very long line, of a word or at least a character."""
            start = min(size, int(place))
            if start in (0, size):
                return start
            stream.seek(start)
            data = stream.read(stretch)
            if end := data.find(b"\n") + 1 or data.find(b" ") + 1:
                return start + end
            return start + next((n for n, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), 0)

        for number in range(count):
            place = number * size / count
            begin, end = line_from(place), line_from(place + length)
            if ranges and begin <= ranges[-1][1]:
                begin = ranges.pop()[0] if begin == ranges[-1][1] else ranges[-1][1]
            if end > begin:
                ranges.append((begin, end))
    return tuple(ranges)
