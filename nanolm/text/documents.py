"""A file as documents: decompressed, decoded, and taken out of its table.

    >>> for begins, text in documents(source, Reading()):   # a long document comes in pieces
    ...     ...

Plain text is one document, or many where a separator line is named. In a table (JSON lines, CSV,
TSV, Parquet, Arrow) each row is one. Text is UTF-8, with or without a byte-order mark, unless
another encoding is named; line ends become LF. What cannot be read is reported with its place and
what to do.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import IO, Any

from nanolm.errors import DataError, NanolmError, UsageError, did_you_mean
from nanolm.text import COMPRESSIONS
from nanolm.text.binary import binary_format, looks_binary
from nanolm.text.sources import Source

BLOCK = 1 << 20  # bytes that are read at once
MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}

Pieces = Iterator[tuple[bool, str]]  # (does a document begin here?, its text or a part of it)


@dataclass(frozen=True)
class Reading:
    """How files are to be read."""

    encoding: str = "utf-8"
    separator: str | None = None  # a line that is just this parts documents
    text_field: str | None = None  # of JSON lines; dots lead into nested objects
    text_column: str | None = None  # of tables: its name, or its number where there is no header

    def problems(self) -> list[str]:
        try:
            "".encode(self.encoding)  # refuses `hex` and its like, which are no text encodings
            codecs.getincrementaldecoder(self.encoding)
        except LookupError:
            known = ["utf-8", "utf-16", "latin-1", "cp1252", "cp1251", "shift_jis", "gb18030"]
            hint = did_you_mean(self.encoding, known) or f"; for example {', '.join(known)}"
            return [f"--encoding {self.encoding}: there is no such encoding{hint}"]
        return []


def documents(source: Source, reading: Reading) -> Pieces:
    """The text of `source`, document by document."""
    rows = {
        ".jsonl": json_lines,
        ".ndjson": json_lines,
        ".csv": separated_values,
        ".tsv": separated_values,
        ".parquet": columns,
        ".arrow": columns,
    }.get(source.suffix)
    with source.open() as stream:
        if rows is not None:
            for text in rows(source, stream, reading):
                yield True, text
        else:
            yield from plain_text(source, stream, reading)


def plain_text(source: Source, stream: IO[bytes], reading: Reading) -> Pieces:
    separator = reading.separator or source.separator
    texts = decoded(source, decompressed(source, stream), reading.encoding)
    if separator is None:
        yield True, ""
        for text in texts:
            yield False, text
        return
    pattern = re.compile(rf"(?m)^[ \t]*{re.escape(separator)}[ \t]*(?:\n|\Z)")
    yield True, ""
    for text in whole_lines(texts):
        first, *others = pattern.split(text)
        yield False, first
        for other in others:
            yield True, other


def json_lines(source: Source, stream: IO[bytes], reading: Reading) -> Iterator[str]:
    texts = decoded(source, decompressed(source, stream), reading.encoding)
    for number, row in json_rows(source, lines(texts)):
        if isinstance(row, str):
            yield row
        else:
            yield json_text(row, f"{source.name}, line {number:,}", reading.text_field)


def json_rows(source: Source, lines: Iterable[str]) -> Iterator[tuple[int, Any]]:
    """What each line says, and its number."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{source.name}, line {number:,} is not JSON ({error}); remove or mend that line"
            ) from None
        yield number, row


def json_text(row: Any, place: str, field: str | None) -> str:
    """The text of one object: its `text`, or what `field` leads to."""
    value = row
    for name in (field or "text").split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, str):
        return value
    if not isinstance(row, dict):
        raise DataError(f"{place}: neither an object nor a string")
    texts = [".".join(path) for path in text_paths(row)]
    if field is None and len(texts) == 1:
        return json_text(row, place, texts[0])
    hint = f"its texts are {', '.join(texts[:10])}" if texts else "it holds no text"
    raise DataError(
        f"{place}: no text in the field {field or 'text'!r}; {hint} (--text-field NAME)"
    )


def text_paths(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, value in row.items():
        if isinstance(value, str):
            yield (name,)
        elif isinstance(value, dict):
            yield from ((name, *path) for path in text_paths(value))


def separated_values(source: Source, stream: IO[bytes], reading: Reading) -> Iterator[str]:
    texts = decoded(source, decompressed(source, stream), reading.encoding)
    plain = source.suffix == ".tsv"  # by its definition a tab-separated file quotes nothing
    column = None
    for number, row in csv_rows(source, lines(texts), "\t" if plain else ",", quoted=not plain):
        place = f"{source.name}, line {number:,}"
        if column is None:
            column = csv_column(row, place, reading.text_column)
            if not (reading.text_column or "").isdigit():
                continue  # the first row was the header
        if not row:
            continue
        if len(row) <= column:
            raise DataError(f"{place} has only {len(row)} columns; the text is number {column + 1}")
        yield row[column]


def csv_rows(
    source: Source, lines: Iterable[str], delimiter: str, quoted: bool
) -> Iterator[tuple[int, list[str]]]:
    """The cells of each row, and the number of the line that it ends on."""
    csv.field_size_limit(1 << 31)  # a cell may be a whole book
    rows = csv.reader(
        (line + "\n" for line in lines),
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE,
        strict=quoted,
    )
    try:
        for row in rows:
            yield rows.line_num, row
    except csv.Error as error:
        raise DataError(f"{source.name}, line {rows.line_num:,}: {error}; mend that row") from None


def csv_column(header: list[str], place: str, asked: str | None) -> int:
    """Where the text stands: in the column named or numbered, or the obvious one."""
    if asked is not None and asked.isdigit():
        return max(0, int(asked) - 1)
    names = [name.strip().lower() for name in header]
    wanted = (asked or "text").lower()
    if wanted in names:
        return names.index(wanted)
    if asked is None and len(header) == 1:
        return 0
    raise UsageError(
        f"{place}: no column {asked or 'text'!r}; its columns are {', '.join(header)}. Say which "
        "with --text-column NAME, or its number if this is no header"
    )


def columns(source: Source, stream: IO[bytes], reading: Reading) -> Iterator[str]:
    """One column of a Parquet or Arrow file."""
    name = ""

    def pick(schema: Any) -> list[str]:
        nonlocal name
        name = arrow_column(schema, source, reading)
        return name.split(".")[:1]

    for batch in arrow_batches(source, stream, pick):
        for value in batch.column(0).to_pylist():
            for step in name.split(".")[1:]:
                value = (value or {}).get(step)
            if value is not None:
                yield str(value)


def arrow_batches(
    source: Source, stream: IO[bytes], pick: Callable[[Any], list[str]]
) -> Iterator[Any]:
    """Parquet, and the Arrow files that Hugging Face data sets are saved as, batch by batch.

    `pick` is given the schema and says which columns to read.
    """
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError:
        raise UsageError(
            f"{source.name} needs pyarrow to be read: pip install 'nanolm[data]'"
        ) from None
    if source.path.suffix.lower() in COMPRESSIONS:  # these are read from their end
        stream = io.BytesIO(b"".join(decompressed(source, stream)))
    try:
        if source.suffix == ".parquet":
            file = parquet.ParquetFile(stream)
            yield from file.iter_batches(batch_size=1024, columns=pick(file.schema_arrow))
            return
        try:
            reader = ipc.open_stream(stream)
        except pyarrow.ArrowInvalid:  # the other of the two Arrow layouts
            stream.seek(0)
            file = ipc.open_file(stream)
            names = pick(file.schema)
            reader = (file.get_batch(number) for number in range(file.num_record_batches))
        else:
            names = pick(reader.schema)
        for batch in reader:
            yield batch.select(names)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{source.name} is damaged or no {source.suffix[1:]}: {reason}") from None


def arrow_column(schema: Any, source: Source, reading: Reading) -> str:
    asked = reading.text_column or reading.text_field
    texts = [field.name for field in schema if str(field.type) in ("string", "large_string")]
    name = asked or ("text" if "text" in texts or len(texts) != 1 else texts[0])
    if name.split(".")[0] in schema.names:
        return name
    raise UsageError(
        f"{source.name}: no column {name!r}; its columns are {', '.join(schema.names)} "
        "(--text-column NAME)"
    )


def decompressed(source: Source, stream: IO[bytes]) -> Iterator[bytes]:
    """The bytes of a file, unpacked if it begins like an archive."""
    start = stream.read(6)
    stream.seek(0)
    kind = next((name for magic, name in MAGIC.items() if start.startswith(magic)), None)
    named = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}.get(
        source.path.suffix.lower()
    )
    if named not in (None, kind):
        raise DataError(f"{source.name} is no {named} file, though its name says so; rename it")
    buffered: Any = stream
    if kind == "gzip":
        buffered = gzip.GzipFile(fileobj=stream)
    elif kind == "bzip2":
        buffered = bz2.BZ2File(stream)
    elif kind == "xz":
        buffered = lzma.LZMAFile(stream)  # noqa: SIM115
    elif kind == "zstd":
        buffered = zstd_stream(source, stream)
    try:
        while block := buffered.read(BLOCK):
            yield block
    except Exception as error:  # each kind of archive has its own
        if isinstance(error, NanolmError):
            raise
        what = f"{kind} file" if kind else "file"
        raise DataError(f"{source.name} is a damaged {what}: {error}") from None


def zstd_stream(source: Source, stream: IO[bytes]) -> Any:
    try:
        from compression import zstd  # Python 3.14 and later
    except ImportError:
        try:
            from backports import zstd
        except ImportError:
            raise UsageError(
                f"{source.name} needs backports.zstd to be unpacked: pip install 'nanolm[data]'"
            ) from None
    return zstd.ZstdFile(stream)


def decoded(
    source: Source,
    blocks: Iterator[bytes],
    encoding: str,
    mended: Callable[[int], None] | None = None,
) -> Iterator[str]:
    """Bytes as text with LF line ends; a bad byte is told by its offset, line and likely cure.

    With `mended`, what is plainly UTF-8 but for a few bytes is read with U+FFFD for those; it is
    told how many there are in the whole file.
    """
    utf8 = codecs.lookup(encoding).name == "utf-8"
    decoder = codecs.getincrementaldecoder(encoding)()
    line_ends = io.IncrementalNewlineDecoder(None, translate=True)
    offset = 0

    def decode(block: bytes, final: bool) -> str:
        waiting = len(decoder.getstate()[0])
        try:
            return decoder.decode(block, final)
        except UnicodeDecodeError as error:
            broken = broken_characters(source) if utf8 and mended else 0
            if broken and mended:
                mended(broken)
                decoder.errors = "replace"
                return decoder.decode(block, final)
            if looks_binary(error.object.decode("latin-1")):
                raise not_text(source, error.object) from None
            place = offset - waiting + error.start
            cure = f"--encoding {likely_encoding(error.object)}" if utf8 else "another --encoding"
            raise DataError(
                f"{source.name} is not {'UTF-8' if utf8 else encoding}: "
                f"byte 0x{error.object[error.start]:02x} at offset {place:,} "
                f"(line {line_at(source, place):,}); try {cure}"
            ) from None

    at_start = True
    for block in blocks:
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


def not_text(source: Source, start: bytes) -> DataError:
    """What to say of a file that begins with `start`, whatever its encoding is said to be."""
    if known := binary_format(start, source.name):
        return DataError(f"{source.name} is not text ({known.name}); {known.cure}")
    low, high = start[::2].count(0), start[1::2].count(0)
    if 3 * max(low, high) > len(start):  # every second byte, or nearly
        encoding = "utf-16-be" if low > high else "utf-16-le"
        return DataError(f"{source.name} looks like UTF-16; try --encoding {encoding}")
    return DataError(
        f"{source.name} is not text: it is full of control characters, in any encoding; save what "
        "it holds as plain text first"
    )


def broken_characters(source: Source) -> int:
    """How many there are in a file that is UTF-8 otherwise: ten whole ones to each; else 0."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    broken, beyond_ascii = 0, 0
    with source.open() as stream:
        for block in chain(decompressed(source, stream), [b""]):
            text = decoder.decode(block, final=not block)
            broken += text.count("\ufffd")
            beyond_ascii += len(re.findall("[^\0-\x7f]", text))
    return broken if beyond_ascii - broken >= 10 * broken else 0


def line_at(source: Source, offset: int) -> int:
    """The number of the line that a byte is in, counted anew: it is asked for once at most."""
    line = 1
    with source.open() as stream:
        for block in decompressed(source, stream):
            line += block.count(b"\n", 0, max(0, offset))
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
    pairs = len(re.findall(rb"[\x80-\xff]{2}", data))
    if len(re.findall(rb"[\x80-\xff]", data)) > 4 * pairs:
        del scripts["gb18030"]  # in Chinese, bytes beyond ASCII come in pairs
    for encoding, script in scripts.items():
        try:
            # Of a long text this is one block, which may end amid a character.
            text = codecs.getincrementaldecoder(encoding)().decode(data, len(data) < BLOCK)
        except UnicodeDecodeError:
            continue
        strange = re.sub("[\0-\x7f]", "", text)
        if 3 * len(re.findall(script, strange)) >= len(strange):
            return encoding
    return "latin-1"


def lines(texts: Iterator[str]) -> Iterator[str]:
    """Lines without their ends. Only LF ends a line: U+0085 and its like are characters."""
    rest: list[str] = []
    for text in texts:
        first, *others = text.split("\n")
        rest.append(first)
        if others:
            yield "".join(rest)
            *whole, last = others
            yield from whole
            rest = [last]
    if any(rest):
        yield "".join(rest)


def whole_lines(texts: Iterator[str]) -> Iterator[str]:
    """The same text, every piece but the last ending with a line."""
    rest: list[str] = []
    for text in texts:
        end = text.rfind("\n") + 1
        if end:
            yield "".join([*rest, text[:end]])
            rest = [text[end:]]
        else:
            rest.append(text)
    yield "".join(rest)
