"""Limits on decompressed sizes: a few bytes of gzip or Parquet can expand to terabytes.

>>> limit = ExpansionLimit("news.jsonl.gz", size=404)
>>> limit.add(1_000_000)  # DataError once the sum is too large for 404 bytes
"""

import os
import struct
from typing import IO, Any

from nanolm.errors import DataError, UsageError

# Prose expands to 3 to 10 times its compressed size, logs to 200. ALWAYS_ALLOWED bytes are fine.
MOST_EXPANSION, ALWAYS_ALLOWED = 250, 256_000_000
VARIABLE = "NANOLM_MAX_UNPACKED"
BATCH_ROWS, BATCH_BYTES = (16, 1024), 64_000_000  # of Parquet, per read
ROW_BYTES = 64  # memory for a value, however short it is
MOST_COLUMNS = 10_000
MOST_NESTED = 100  # levels of objects and lists


class ExpansionLimit:
    """Counts the bytes read from the file or files called `name`, with `size` bytes on disk."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size, self.total = name, size, 0
        self.most = max(always_allowed(), MOST_EXPANSION * size)

    def add(self, count: int) -> None:
        self.total += count
        self.check(self.total)

    def check(self, count: int) -> None:
        if count > self.most:
            expands = f"{self.name} ({self.size:,} bytes) expands to more than {self.most:,} bytes"
            cure = f"if you trust it, raise the limit: {VARIABLE}={10 * self.most} nanolm ..."
            raise DataError(f"{expands}; {cure}")


def always_allowed() -> int:
    given = os.environ.get(VARIABLE) or str(ALWAYS_ALLOWED)
    if not given.isdecimal():
        raise UsageError(f"{VARIABLE}={given}: must be a number of bytes")
    return int(given)


def parquet_batch_rows(metadata: Any, limit: ExpansionLimit) -> int:
    """How many rows to read at once. With a dictionary, each can be as large as its column."""
    limit.check(ROW_BYTES * metadata.num_rows)
    largest = 1
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            limit.check(max(column.total_uncompressed_size, ROW_BYTES * column.num_values))
            largest = max(largest, column.total_uncompressed_size)
    least, most = BATCH_ROWS
    return max(least, min(most, BATCH_BYTES // largest))


def check_arrow_buffers(stream: IO[bytes], limit: ExpansionLimit) -> None:
    """Refuse an Arrow file whose compressed buffers would take too much memory, since pyarrow
    decompresses a batch of any size at once. Leaves `stream` at the first message. ValueError if
    the layout is not that of https://arrow.apache.org/docs/format/Columnar.html."""
    start = 8 if stream.read(8) == b"ARROW1\0\0" else 0  # a file is a stream between two markers
    place = start
    try:
        while len(head := _read(stream, place, 8)) == 8:
            mark, length = struct.unpack("<ii", head)
            if mark != -1:  # Arrow before 0.15 had no marker
                place, length = place - 4, mark
            if length == 0:  # the end
                break
            if not 0 < length <= limit.most:
                raise ValueError
            message = Flatbuffer(_read(stream, place + 8, length))
            place += 8 + length
            for offset in message.compressed_buffers():
                (size,) = struct.unpack("<q", _read(stream, place + offset, 8))
                limit.add(max(0, size))  # -1: not compressed
            if message.body < 0:
                raise ValueError
            place += message.body
    except (ValueError, IndexError, struct.error):
        raise ValueError("its messages cannot be parsed") from None
    stream.seek(start)


def _read(stream: IO[bytes], place: int, size: int) -> bytes:
    stream.seek(place)
    return stream.read(size)


class Flatbuffer:
    """The metadata of an Arrow message; reads only the sizes of its buffers."""

    BATCH_OF_DICTIONARY, DICTIONARY, BATCH = 1, 2, 3

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.message = self.follow(0)
        body = self.field(self.message, 3)
        self.body: int = self.number("<q", body) if body else 0

    def number(self, kind: str, place: int) -> Any:
        return struct.unpack_from(kind, self.data, place)[0]

    def follow(self, place: int) -> int:
        return place + int(self.number("<I", place))

    def field(self, table: int, number: int) -> int:
        """The offset of a field of a table; 0 if it is absent."""
        fields = table - self.number("<i", table)
        inside = 4 + 2 * number < self.number("<H", fields)
        offset = int(self.number("<H", fields + 4 + 2 * number)) if inside else 0
        return table + offset if offset else 0

    def compressed_buffers(self) -> list[int]:
        """Their offsets in the body; each buffer starts with its decompressed size."""
        kind = self.data[self.field(self.message, 1)]
        if kind not in (self.DICTIONARY, self.BATCH):
            return []
        table = self.follow(self.field(self.message, 2))
        if kind == self.DICTIONARY:
            table = self.follow(self.field(table, self.BATCH_OF_DICTIONARY))
        if not self.field(table, 3):  # no compression
            return []
        buffers = self.follow(self.field(table, 2))
        places = (buffers + 4 + 16 * n for n in range(self.number("<I", buffers)))
        pairs = (struct.unpack_from("<qq", self.data, place) for place in places)
        return [offset for offset, length in pairs if length >= 8]
