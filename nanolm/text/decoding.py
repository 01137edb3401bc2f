"""Bytes as text: UTF-8, with or without a byte-order mark, unless another encoding is named; line
ends become LF. What cannot be decoded is reported with its place and what to do."""

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

Mended = Callable[[int], None]  # told how many broken characters there are


@dataclass(frozen=True)
class Reading:
    encoding: str = "utf-8"
    separator: str | None = None  # a line that is just this parts documents
    text_field: str | None = None  # of JSON lines; dots lead into nested objects
    text_column: str | None = None  # of tables: its name, or its number where there is no header

    def problems(self) -> list[str]:
        try:
            "".encode(self.encoding)  # refuses `hex` and its like, which are no text encodings
            codecs.getincrementaldecoder(self.encoding)
            return []
        except LookupError:
            known = ["utf-8", "utf-16", "latin-1", "cp1252", "cp1251", "shift_jis", "gb18030"]
            hint = did_you_mean(self.encoding, known) or f"; for example {', '.join(known)}"
            return [f"--encoding {self.encoding}: there is no such encoding{hint}"]


def decoded(
    source: TextSource, stream: IO[bytes], encoding: str, mended: Mended | None = None
) -> Iterator[str]:
    """A file as text in blocks; a bad byte is reported by its offset, line and likely cure. With
    `mended`, which is told how many there are, a few bad bytes in plain UTF-8 become U+FFFD."""
    utf8 = codecs.lookup(encoding).name == "utf-8"
    decoder = codecs.getincrementaldecoder(encoding)()
    line_ends = io.IncrementalNewlineDecoder(None, translate=True)
    offset = 0

    def decode(block: bytes, final: bool) -> str:
        waiting = len(decoder.getstate()[0])
        try:
            return decoder.decode(block, final)
        except UnicodeDecodeError as error:
            if utf8 and mended and (broken := broken_characters(source)):
                mended(broken)
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
            text, at_start = text.removeprefix("\ufeff") if utf8 else text, False  # the mark
        yield line_ends.decode(text)
        offset += len(block)
    yield line_ends.decode(decode(b"", final=True), final=True)


def not_text(source: TextSource, start: bytes) -> DataError:
    """What to say of a file that begins with `start`, whatever its encoding is said to be."""
    if known := binary_format(start, source.name):
        return DataError(f"{source.name} is not text ({known.name}); {known.cure}")
    low, high = start[::2].count(0), start[1::2].count(0)
    if 3 * max(low, high) > len(start):  # every second byte, or nearly
        order = "be" if low > high else "le"
        return DataError(f"{source.name} looks like UTF-16; try --encoding utf-16-{order}")
    why = "it is full of control characters, in any encoding; save it as plain text first"
    return DataError(f"{source.name} is not text: {why}")


def broken_characters(source: TextSource) -> int:
    """How many there are in a file that is UTF-8 otherwise: ten whole ones to each; else 0."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    broken, beyond_ascii = 0, 0
    with source.open() as stream:
        for block in chain(decompressed(source, stream), [b""]):
            text = decoder.decode(block, final=not block)
            broken += text.count("\ufffd")
            beyond_ascii += len(re.findall("[^\0-\x7f]", text))
    return broken if beyond_ascii - broken >= 10 * broken else 0


def line_at(source: TextSource, offset: int) -> int:
    """The number of the line that a byte is in, counted anew: it is asked for once at most."""
    line = 1
    with source.open() as stream:
        for block in decompressed(source, stream):
            line += block.count(b"\n", 0, offset)
            offset -= len(block)
            if offset <= 0:
                break
    return line


def likely_encoding(data: bytes) -> str:
    """The first encoding whose characters beyond ASCII are mostly those of its script."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    scripts = {
        "shift_jis": "[\u3000-\u30ff]",  # kana, with the kanji between them
        "gb18030": "[\u3000-\u303f\u4e00-\u9fff]",
        "cp1252": "[À-ÿ\u2018-\u201d\u2013\u2014\u2026]",
    }
    if len(re.findall(rb"[\x80-\xff]", data)) > 4 * len(re.findall(rb"[\x80-\xff]{2}", data)):
        del scripts["gb18030"]  # in Chinese, bytes beyond ASCII come in pairs
    for encoding, script in scripts.items():
        try:
            # Of a long text this is one block, which may end amid a character.
            text = codecs.getincrementaldecoder(encoding)().decode(data, len(data) < READ_BYTES)
        except UnicodeDecodeError:
            continue
        strange = re.sub("[\0-\x7f]", "", text)
        if 3 * len(re.findall(script, strange)) >= len(strange):
            return encoding
    return "latin-1"


def lines(texts: Iterator[str]) -> Iterator[str]:
    """Lines without their ends. Only LF ends a line: U+0085 and its like are characters."""
    for text in whole_lines(texts):
        *ended, last = text.split("\n")
        yield from ended
        if last:
            yield last


def whole_lines(texts: Iterator[str]) -> Iterator[str]:
    """The same text, every piece but the last ending with a line."""
    rest: list[str] = []
    for text in texts:
        if end := text.rfind("\n") + 1:
            yield "".join([*rest, text[:end]])
            rest = []
        rest.append(text[end:])
    yield "".join(rest)
