"""Decode bytes as text: UTF-8, with or without a byte-order mark, or a given encoding. Line ends
become LF. Bytes that cannot be decoded are reported with their location and what to do."""

import codecs
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import IO

from nanolm.errors import DataError, did_you_mean
from nanolm.text.binary import binary_format, looks_binary
from nanolm.text.source import READ_BYTES, TextSource, decompressed

Replaced = Callable[[int], None]  # called with the number of invalid characters


@dataclass(frozen=True)
class Reading:
    encoding: str = "utf-8"
    separator: str | None = None  # a line with just this separates documents
    text_field: str | None = None  # of JSON lines; dots select nested fields
    text_column: str | None = None  # of tables: its name, or its number if there is no header

    def problems(self) -> list[str]:
        try:
            "".encode(self.encoding)  # rejects codecs such as `hex`, which do not encode text
            codecs.getincrementaldecoder(self.encoding)
            return []
        except LookupError:
            known = ["utf-8", "utf-16", "latin-1", "cp1252", "cp1251", "shift_jis", "gb18030"]
            hint = did_you_mean(self.encoding, known) or f"; try one such as {', '.join(known)}"
            return [f"--encoding {self.encoding}: unknown encoding{hint}"]


def decoded(
    source: TextSource, stream: IO[bytes], encoding: str, replaced: Replaced | None = None
) -> Iterator[str]:
    """A file as text in blocks; an invalid byte is reported with its offset, line and a likely fix.
    With `replaced`, which gets their number, a few invalid bytes in UTF-8 become U+FFFD."""
    utf8 = codecs.lookup(encoding).name == "utf-8"
    decoder = codecs.getincrementaldecoder(encoding)()
    line_ends = io.IncrementalNewlineDecoder(None, translate=True)
    offset, ascii_only = 0, True

    def decode(block: bytes, final: bool) -> str:
        waiting = len(decoder.getstate()[0])
        try:
            return decoder.decode(block, final)
        except UnicodeDecodeError as error:
            if utf8 and final and not ascii_only:
                return ""  # the file was cut in the middle of its last character
            if utf8 and replaced and (invalid := invalid_characters(source)):
                replaced(invalid)
                decoder.errors = "replace"
                return decoder.decode(block, final)
            if looks_binary(error.object.decode("latin-1")):
                raise not_text(source, error.object) from None
            place = offset - waiting + error.start
            cure = f"--encoding {likely_encoding(error.object)}" if utf8 else "another --encoding"
            where = f"at offset {place:,} (line {line_at(source, place):,}); try {cure}"
            byte = f"byte 0x{error.object[error.start]:02x}"
            name = "UTF-8" if utf8 else encoding
            raise DataError(f"{source.name} is not {name}: {byte} {where}") from None

    at_start = True
    for block in decompressed(source, stream):
        if at_start and binary_format(block, source.path.name):
            raise not_text(source, block)
        text = decode(block, final=False)
        if at_start and text:
            if looks_binary(text):
                raise not_text(source, block)
            text, at_start = text.removeprefix("\ufeff"), False  # the byte-order mark
        yield line_ends.decode(text)
        offset, ascii_only = offset + len(block), ascii_only and text.isascii()
    yield line_ends.decode(decode(b"", final=True), final=True)


def not_text(source: TextSource, start: bytes) -> DataError:
    """The error for a file that begins with `start`, whatever encoding was given."""
    if known := binary_format(start, source.name):
        return DataError(f"{source.name} is not text ({known.name}); {known.cure}")
    low, high = start[::2].count(0), start[1::2].count(0)
    if 3 * max(low, high) > len(start):  # every second byte, or nearly
        order = "-be" if low > high else "-le"
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            order = ""  # given by the mark
        return DataError(f"{source.name} looks like UTF-16; try --encoding utf-16{order}")
    why = "it is full of control characters; save it as plain text first"
    return DataError(f"{source.name} is not text: {why}")


def invalid_characters(source: TextSource) -> int:
    """How many a file has, if it is otherwise UTF-8 (ten valid non-ASCII ones for each); else 0."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    invalid, beyond_ascii = 0, 0
    with source.open() as stream:
        for block in chain(decompressed(source, stream), [b""]):
            text = decoder.decode(block, final=not block)
            invalid += text.count("\ufffd")
            beyond_ascii += len(re.findall("[^\0-\x7f]", text))
    return invalid if beyond_ascii - invalid >= 10 * invalid else 0


def line_at(source: TextSource, offset: int) -> int:
    """The line number of a byte, counted from the start: it is needed at most once."""
    line = 1
    with source.open() as stream:
        for block in decompressed(source, stream):
            line += block.count(b"\n", 0, offset)
            offset -= len(block)
            if offset <= 0:
                break
    return line


def likely_encoding(data: bytes) -> str:
    """The first encoding whose non-ASCII characters are mostly from its script."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    scripts = {
        "shift_jis": "[\u3000-\u30ff]",  # kana, with the kanji between them
        "gb18030": "[\u3000-\u303f\u4e00-\u9fff]",
        "cp1252": "[À-ÿ\u2018-\u201d\u2013\u2014\u2026]",
    }
    if len(re.findall(rb"[\x80-\xff]", data)) > 4 * len(re.findall(rb"[\x80-\xff]{2}", data)):
        del scripts["gb18030"]  # in Chinese, non-ASCII bytes come in pairs
    for encoding, script in scripts.items():
        try:
            # In a long text this is one block, which may end in the middle of a character.
            text = codecs.getincrementaldecoder(encoding)().decode(data, len(data) < READ_BYTES)
        except UnicodeDecodeError:
            continue
        strange = re.sub("[\0-\x7f]", "", text)
        if 3 * len(re.findall(script, strange)) >= len(strange):
            return encoding
    return "latin-1"


def lines(texts: Iterator[str]) -> Iterator[str]:
    """Lines without their ends. Only LF ends a line; U+0085 and the like are characters."""
    for text in whole_lines(texts):
        *ended, last = text.split("\n")
        yield from ended
        if last:
            yield last


def whole_lines(texts: Iterator[str]) -> Iterator[str]:
    """The same text in pieces; every piece but the last ends at a line end."""
    rest: list[str] = []
    for text in texts:
        if end := text.rfind("\n") + 1:
            yield "".join([*rest, text[:end]])
            rest = []
        rest.append(text[end:])
    yield "".join(rest)
