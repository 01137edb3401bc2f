"""One input file: open, measure and decompress it, whatever its format and the part to use.

>>> TextSource("news.jsonl.gz", Path("news.jsonl.gz")).suffix
'.jsonl'
"""

import bz2
import contextlib
import gzip
import hashlib
import io
import lzma
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from nanolm.errors import DataError, NanolmError, UsageError
from nanolm.text.bounds import ExpansionLimit

READ_BYTES = 1 << 20  # per read


@dataclass(frozen=True)
class TextSource:
    name: str  # shown in messages
    path: Path
    separator: str | None = None  # between documents, if it is known to have one
    copy: IO[bytes] | None = None  # of a stream, as a temporary file
    # If only a part is used (`nanolm.text.partial`):
    ranges: tuple[tuple[int, int], ...] | None = None  # the bytes to read
    every: int = 1  # or: one in this many documents,
    limit: int | None = None  # up to this many bytes

    def open(self) -> IO[bytes]:
        """Open it at the beginning; the caller closes it."""
        if self.copy is not None:
            self.copy.seek(0)
            whole = io.FileIO(os.dup(self.copy.fileno()))
        else:
            whole = io.FileIO(self.path)
        return whole if self.ranges is None else FileRanges(whole, self.ranges)  # type: ignore[return-value]

    def stamp(self) -> tuple[int, int]:
        if self.copy is not None:
            return 0, 0
        status = self.path.stat()
        return status.st_size, status.st_mtime_ns

    def size(self) -> int:
        if self.ranges is not None:
            return sum(stop - start for start, stop in self.ranges)
        return os.fstat(self.copy.fileno()).st_size if self.copy else self.path.stat().st_size

    def digest(self) -> str:
        """SHA-256 of the part of the file that is used; with a limit, of its beginning and size."""
        with self.open() as stream:
            if self.limit is None:
                return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
            digest = hashlib.sha256(f"{self.size()} {self.every} {self.limit}".encode())
            for _ in range(0, self.every * self.limit, READ_BYTES):
                digest.update(stream.read(READ_BYTES))
            return digest.hexdigest()

    @property
    def suffix(self) -> str:
        """The suffix without compression: `.jsonl` for `news.jsonl.gz`."""
        name = self.path.name.lower()
        for ending in COMPRESSIONS:
            name = name.removesuffix(ending)
        return Path(name).suffix

    def compressed(self) -> bool:
        if self.path.suffix.lower() in COMPRESSIONS:
            return True
        with self.open() as stream:
            return compression_of(stream) is not None


class FileRanges(io.RawIOBase):
    """Some ranges of a file, read as if they were one file."""

    def __init__(self, file: io.FileIO, ranges: tuple[tuple[int, int], ...]) -> None:
        self.file, self.ranges = file, ranges
        self.seek(0)

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Only to the beginning, which is all that text readers need."""
        if offset or whence != io.SEEK_SET:
            raise io.UnsupportedOperation("seek")
        self.left = list(self.ranges)
        return 0

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while self.left:
            start, stop = self.left.pop(0)
            self.file.seek(start)
            if count := self.file.readinto(memoryview(buffer)[: stop - start]) or 0:
                self.left.insert(0, (start + count, stop))
                return count
        return 0

    def close(self) -> None:
        self.file.close()
        super().close()


@contextlib.contextmanager
def blamed_on(name: str) -> Iterator[None]:
    """Turn an operating-system error into one that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}") from None


def zstd_file(stream: IO[bytes]) -> Any:
    try:
        from compression import zstd  # Python 3.14 and later
    except ImportError:
        from backports import zstd
    return zstd.ZstdFile(stream)


class Compression(NamedTuple):
    name: str
    magic: bytes  # the first bytes of such a file
    open: Callable[[IO[bytes]], Any]


COMPRESSIONS = {
    ".gz": Compression("gzip", b"\x1f\x8b", lambda stream: gzip.GzipFile(fileobj=stream)),
    ".zst": Compression("zstd", b"\x28\xb5\x2f\xfd", zstd_file),
    ".bz2": Compression("bzip2", b"BZh", bz2.BZ2File),
    ".xz": Compression("xz", b"\xfd7zXZ\0", lzma.LZMAFile),
}


def compression_of(stream: IO[bytes]) -> Compression | None:
    start = stream.read(6)
    stream.seek(0)
    return next((each for each in COMPRESSIONS.values() if start.startswith(each.magic)), None)


def decompressed(source: TextSource, stream: IO[bytes]) -> Iterator[bytes]:
    """The bytes of a file, decompressed if its first bytes show a known format."""
    compression, named = None, COMPRESSIONS.get(source.path.suffix.lower())
    try:
        compression = compression_of(stream)
        if named not in (None, compression):
            raise DataError(f"{source.name} is not a {named.name} file; rename it")
        unpacked = compression.open(stream) if compression else stream
        limit = ExpansionLimit(source.name, source.size())
        while block := unpacked.read(READ_BYTES):
            limit.add(len(block))
            yield block
    except ImportError:
        message = f"reading {source.name} requires backports.zstd: pip install 'nanolm[data]'"
        raise UsageError(message) from None
    except NanolmError:
        raise
    except Exception as error:  # each format has its own exceptions
        what = f"{compression.name} file" if compression else "file"
        raise DataError(f"{source.name} is a damaged {what}: {error}") from None
