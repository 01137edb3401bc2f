"""GGUF, the file format of llama.cpp: key-value pairs, then a table of tensors, then their data.

    >>> header = read_header(Path("model.gguf"))
    >>> header.values["general.architecture"], header.tensors["token_embd.weight"].shape

Files may come from strangers: every count and offset is checked against the size of the file before
anything is allocated, and header and table are limited.
"""

import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from nanolm.errors import ModelError
from nanolm.gguf.blocks import FORMATS, NAMES, UNSUPPORTED, Bytes, Floats, dequantize

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
VERSIONS = (2, VERSION)  # 1 is obsolete; 3 only added big-endian files, which are not supported
# The codes of the types of values: those in one `struct` format, strings and arrays.
PLAIN = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
# Limits, a few times those of the largest real files: 20 MB, 800,000 values, 2,000 tensors.
LARGEST_HEADER, MOST_VALUES, MOST_TENSORS, MOST_KEYS = 64_000_000, 2_000_000, 20_000, 2_000
LONGEST_NAME = 200  # bytes; llama.cpp allows 63
LARGEST_ALIGNMENT = 1 << 16


class TensorInfo(NamedTuple):
    name: str
    shape: tuple[int, ...]  # (out, in), as in PyTorch; the file has it the other way around
    format: str
    offset: int  # from the start of the data

    @property
    def bytes(self) -> int:
        size = FORMATS[self.format]
        return math.prod(self.shape) // size.numbers * size.bytes


class Header(NamedTuple):
    path: Path
    values: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: int  # where the tensor data starts in the file

    def read(self, name: str) -> Floats:
        """A tensor in float32."""
        info = self.tensors[name]
        try:
            with self.path.open("rb") as stream:
                stream.seek(self.data + info.offset)
                stored = np.fromfile(stream, dtype=np.uint8, count=info.bytes)
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {error}") from None
        if stored.size != info.bytes:
            raise ModelError(f"{self.path} was truncated while it was being read")
        return dequantize(stored, info.format).reshape(info.shape)


def is_gguf(path: Path) -> bool:
    """Whether it is a GGUF file by its name or its first bytes."""
    try:
        return path.is_file() and (path.suffix.lower() == ".gguf" or has_magic(path))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


def has_magic(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def read_header(path: Path) -> Header:
    """Everything but the tensors. Raises ModelError if any part of the file is not as it should
    be."""
    try:
        with path.open("rb") as stream:
            return Reader(path, stream, path.stat().st_size).header()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


class Reader:
    """Reads a header from beginning to end."""

    def __init__(self, path: Path, stream: BinaryIO, size: int) -> None:
        self.path, self.stream, self.size = path, stream, size
        self.place = self.count = 0  # bytes and values so far

    def header(self) -> Header:
        if self.size < len(MAGIC) or self.take(len(MAGIC)) != MAGIC:
            raise ModelError(f"{self.path} is not a GGUF file")
        if (version := self.number("I")) not in VERSIONS:
            big = " (big-endian)" if version << 24 & 0xFF000000 == 0 and version else ""
            raise self.wrong(f"it has version {version}{big}; nanolm reads 2 and 3")
        tensor_count = self.counted("tensors", MOST_TENSORS, 24)
        key_count = self.counted("keys", MOST_KEYS, 13)
        values: dict[str, Any] = {}
        for _ in range(key_count):
            key = self.name("key")
            if key in values:
                raise self.wrong(f"duplicate key {key}")
            values[key] = self.value(self.number("I"), key)
        alignment = values.get("general.alignment", ALIGNMENT)
        known = type(alignment) is int and 0 < alignment <= LARGEST_ALIGNMENT
        if not known or alignment & (alignment - 1):
            raise self.wrong(f"general.alignment is {alignment!r:.80}: must be a power of two")
        tensors: dict[str, TensorInfo] = {}
        end = 0
        for _ in range(tensor_count):
            info = self.tensor_info()
            if info.name in tensors:
                raise self.wrong(f"duplicate tensor {info.name}")
            if info.offset != end:  # so tensors cannot overlap
                raise self.wrong(f"{info.name}: offset {info.offset:,} instead of {end:,}")
            tensors[info.name] = info
            end = aligned(info.offset + info.bytes, alignment)
        start = aligned(self.place, alignment)
        last = max((info.offset + info.bytes for info in tensors.values()), default=0)
        if start + last > self.size:
            missing = start + last - self.size
            raise self.wrong(f"it is truncated: the last {missing:,} bytes are missing")
        if self.size > start + aligned(last, alignment):
            raise self.wrong(f"{self.size - start - last:,} bytes follow the last tensor")
        return Header(self.path, values, tensors, start)

    def take(self, length: int) -> bytes:
        self.place += length
        if self.place > self.size:
            raise self.wrong("it is truncated")
        if self.place > LARGEST_HEADER:
            raise self.wrong(f"its header has over {LARGEST_HEADER:,} bytes")
        taken = self.stream.read(length)
        if len(taken) != length:
            raise self.wrong("it was truncated while it was being read")
        return taken

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack(f"<{kind}", self.take(struct.calcsize(kind)))
        return value

    def counted(self, what: str, most: int, least_bytes: int) -> int:
        count: int = self.number("Q")
        if count > most:
            raise self.wrong(f"{count:,} {what}; the limit is {most:,}")
        if count * least_bytes > self.size - self.place:
            raise self.wrong(f"it is truncated: it has no room for {count:,} {what}")
        return count

    def text(self, what: str, most: int = LARGEST_HEADER) -> str:
        if (length := self.number("Q")) > min(most, self.size - self.place):
            raise self.wrong(f"{what} has {length:,} bytes, which is too long")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.wrong(f"{what} is not valid UTF-8") from None

    def name(self, what: str) -> str:
        if not (name := self.text(f"the name of a {what}", LONGEST_NAME)).isprintable() or not name:
            raise self.wrong(f"the name of a {what} is {name!r}")
        return name

    def value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self.text(key)
        if kind == ARRAY:
            return self.array(key)
        if kind not in PLAIN:
            raise self.wrong(f"{key} has the unknown type {kind}")
        if kind == BOOL:
            if (byte := self.number("B")) > 1:
                raise self.wrong(f"{key} is {byte} instead of true or false")
            return bool(byte)
        return self.number(PLAIN[kind])

    def array(self, key: str) -> list[Any]:
        kind = self.number("I")
        if kind != STRING and kind not in PLAIN:
            what = "an array of arrays" if kind == ARRAY else f"an array of the unknown type {kind}"
            raise self.wrong(f"{key} is {what}, which nanolm does not support")
        size = 8 if kind == STRING else struct.calcsize(PLAIN[kind])
        count = self.counted(f"values in {key}", MOST_VALUES - self.count, size)
        self.count += count
        if kind == STRING:
            return [self.text(key) for _ in range(count)]
        return list(struct.unpack(f"<{count}{PLAIN[kind]}", self.take(count * size)))

    def tensor_info(self) -> TensorInfo:
        name = self.name("tensor")
        if not 1 <= (dimensions := self.number("I")) <= 4:
            raise self.wrong(f"{name} has {dimensions:,} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        code, offset = self.number("I"), self.number("Q")
        if code not in NAMES:
            kind = UNSUPPORTED.get(code, f"number {code}")
            raise self.wrong(f"{name} has type {kind}; nanolm reads {', '.join(FORMATS)}")
        if min(shape) < 1 or math.prod(shape) > 8 * self.size:
            raise self.wrong(f"{name} has shape {shape}, which does not fit in the file")
        if shape[-1] % FORMATS[NAMES[code]].numbers:
            raise self.wrong(f"{name}: its rows of {shape[-1]} are not whole {NAMES[code]} blocks")
        return TensorInfo(name, shape, NAMES[code], offset)

    def wrong(self, why: str) -> ModelError:
        return ModelError(f"{self.path}: {why}")


def aligned(offset: int, alignment: int = ALIGNMENT) -> int:
    return -(-offset // alignment) * alignment


def write_gguf(
    stream: BinaryIO,
    values: dict[str, Any],
    tensors: list[tuple[str, tuple[int, ...], str]],  # name, shape, format
    data: Iterable[Bytes],  # of each tensor, in this order
) -> None:
    header = MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(values))
    header += b"".join(packed_text(key) + packed(value) for key, value in values.items())
    offset = 0
    for name, shape, kind in tensors:
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        header += packed_text(name) + dimensions
        header += struct.pack("<IQ", FORMATS[kind].code, offset)
        offset = aligned(offset + TensorInfo(name, shape, kind, offset).bytes)
    stream.write(header.ljust(aligned(len(header)), b"\0"))
    for stored in data:
        stream.write(stored.data)
        stream.write(bytes(aligned(stored.size) - stored.size))


def packed_text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def packed(value: Any) -> bytes:
    """A value with its type, as llama.cpp expects it."""
    match value:
        case bool():
            return struct.pack("<I?", BOOL, value)
        case int():
            return struct.pack("<II", UINT32, value)
        case float():
            return struct.pack("<If", FLOAT32, value)
        case str():
            return struct.pack("<I", STRING) + packed_text(value)
        case [int(), *_]:
            return struct.pack(f"<IIQ{len(value)}i", ARRAY, INT32, len(value), *value)
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(value)}f", ARRAY, FLOAT32, len(value), *value)
        case list():  # of strings, perhaps none
            start = struct.pack("<IIQ", ARRAY, STRING, len(value))
            return start + b"".join(map(packed_text, value))
    raise TypeError(f"no GGUF type for {value!r:.80}")
