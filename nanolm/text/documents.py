"""Read a file as documents: decompress it, decode it and extract the text of each table row.

Plain text is one document, or many if a separator line is given. In a table (JSON lines, CSV, TSV,
Parquet, Arrow) each row is one. A new file format is a reader and a line in `FORMATS`.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from nanolm.errors import DataError, UsageError
from nanolm.formats import abridged, listed
from nanolm.text.bounds import (
    MOST_COLUMNS,
    ROW_BYTES,
    ExpansionLimit,
    check_arrow_buffers,
    parquet_batch_rows,
)
from nanolm.text.decoding import Reading, decoded, lines, whole_lines
from nanolm.text.json_rows import (
    Rows,
    is_json_table,
    json_lines,
    json_list,
    json_objects,
    json_rows,
)
from nanolm.text.source import COMPRESSIONS, TextSource, decompressed

TextBlocks = Iterator[tuple[bool, str]]  # (does a document begin here?, its text or a part of it)


def documents(source: TextSource, reading: Reading) -> TextBlocks:
    separator = reading.separator or source.separator
    with source.open() as stream:
        if read := corpus_format(source, reading).read:
            yield from ((True, text) for text in read(source, stream, reading))
            return
        texts = decoded(source, stream, reading.encoding)
        yield True, ""
        if separator is None:
            yield from ((False, text) for text in texts)
            return
        pattern = re.compile(rf"(?m)^[ \t]*{re.escape(separator)}[ \t]*(?:\n|\Z)")
        for text in whole_lines(texts):
            first, *others = pattern.split(text)
            yield False, first
            yield from ((True, other) for other in others)


def separated_values(source: TextSource, stream: IO[bytes], reading: Reading) -> Iterator[str]:
    text_lines = lines(decoded(source, stream, reading.encoding))
    plain = source.suffix == ".tsv"  # the TSV format has no quotes
    column = None
    for number, row in csv_rows(source, text_lines, "\t" if plain else ",", quoted=not plain):
        place = f"{source.name}, line {number:,}"
        if column is None:
            column = csv_column(row, place, reading.text_column)
            if not (reading.text_column or "").isdigit():
                continue  # the first row was the header
        if 0 < len(row) <= column:
            few = f"has only {len(row)} columns, but the text is in column {column + 1}"
            raise DataError(f"{place} {few}")
        if row:
            yield row[column]


def csv_rows(source: TextSource, lines: Iterable[str], delimiter: str, quoted: bool) -> Rows:
    """The cells of each row, and the number of the line on which it ends."""
    csv.field_size_limit(1 << 31)  # a cell can be a whole book
    how: Any = {"quoting": csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE, "strict": quoted}
    rows = csv.reader((line + "\n" for line in lines), delimiter=delimiter, **how)
    try:
        for row in rows:
            if len(row) > MOST_COLUMNS:
                many = f"{len(row):,} columns; the limit is {MOST_COLUMNS:,}"
                raise DataError(f"{source.name}, line {rows.line_num:,} has {many}")
            yield rows.line_num, row
    except csv.Error as error:
        raise DataError(f"{source.name}, line {rows.line_num:,}: {error}; fix that row") from None


def csv_column(header: list[str], place: str, asked: str | None) -> int:
    """The index of the text column: the one named or numbered by the user, or the obvious one."""
    if asked is not None and asked.isdigit():
        return max(0, int(asked) - 1)
    names = [name.strip().lower() for name in header]
    wanted = (asked or "text").lower()
    if wanted in names:
        return names.index(wanted)
    if asked is None and len(header) == 1:
        return 0
    cure = "Choose one with --text-column NAME, or by number if this row is not a header"
    there = f"the columns are {listed(header, 30)}. {cure}"
    raise UsageError(f"{place}: no column {asked or 'text'!r}; {there}")


def columns(source: TextSource, stream: IO[bytes], reading: Reading) -> Iterator[str]:
    steps: list[str] = []  # the path of the text

    def pick(schema: Any) -> list[str]:
        steps[:] = arrow_column(schema, source, reading).split(".")
        return steps[:1]

    for batch in arrow_batches(source, stream, pick):
        for cell in batch.column(0):  # one by one: with a dictionary, each can be large
            value = cell.as_py()
            for step in steps[1:]:
                value = (value or {}).get(step)
            if isinstance(value, list | dict | bytes):
                what = f"{'.'.join(steps)} holds {type(value).__name__} values, not text"
                raise DataError(f"{source.name}: {what}; choose another with --text-column NAME")
            if value is not None:
                yield str(value)


def arrow_batches(
    source: TextSource, stream: IO[bytes], pick: Callable[[Any], list[str]]
) -> Iterator[Any]:
    """Parquet, and the Arrow files in which Hugging Face datasets are saved, batch by batch. `pick`
    gets the schema and returns the columns to read."""
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError:
        message = f"reading {source.name} requires pyarrow: pip install 'nanolm[data]'"
        raise UsageError(message) from None
    if source.path.suffix.lower() in COMPRESSIONS:  # the formats need random access
        stream = io.BytesIO(b"".join(decompressed(source, stream)))
    limit = ExpansionLimit(source.name, source.size())
    try:
        if source.suffix == ".parquet":
            file = parquet.ParquetFile(stream)
            names, rows = pick(file.schema_arrow), parquet_batch_rows(file.metadata, limit)
            reader = file.iter_batches(batch_size=rows, columns=names)
        else:
            check_arrow_buffers(stream, limit)
            reader = ipc.open_stream(stream)
            names = pick(reader.schema)
        for batch in reader:
            limit.add(ROW_BYTES * batch.num_rows)  # even if they are empty
            batch = batch.select(names)
            batch.validate(full=True)
            limit.add(batch.nbytes)
            yield batch
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = abridged(str(error).partition("\n")[0], 300)
        what = f"{source.name} is damaged, or not a {source.suffix[1:]} file"
        raise DataError(f"{what}: {reason}") from None


def arrow_column(schema: Any, source: TextSource, reading: Reading) -> str:
    asked = reading.text_column or reading.text_field
    texts = [field.name for field in schema if str(field.type) in ("string", "large_string")]
    name = asked or ("text" if "text" in texts or len(texts) != 1 else texts[0])
    if name.split(".")[0] in schema.names:
        return name
    there = f"the columns are {listed(schema.names, 30)}; choose one with --text-column"
    raise UsageError(f"{source.name}: no column {name!r}; {there}")


def arrow_rows(source: TextSource, stream: IO[bytes], lines: Iterable[str]) -> Rows:
    limit = ExpansionLimit(source.name, source.size())
    number = 0
    for batch in arrow_batches(source, stream, lambda schema: schema.names):
        for cells in zip(*batch.columns, strict=True):
            values = [cell.as_py() for cell in cells]
            limit.add(sum(len(value) for value in values if isinstance(value, str | bytes | list)))
            number += 1
            yield number, dict(zip(batch.schema.names, values, strict=True))


@dataclass(frozen=True)
class CorpusFormat:
    name: str
    suffixes: str
    read: Callable[[TextSource, IO[bytes], Reading], Iterator[str]] | None = None  # its documents
    rows: Callable[[TextSource, IO[bytes], Iterator[str]], Rows] | None = None  # with named fields
    any_line: bool = False  # whether reading can start at any line
    table: bool = True  # with `read`: whether its documents are rows of a table


PLAIN_SUFFIXES = ".txt .md .markdown .text .rst .tex .html .htm .xml .srt"
PLAIN_TEXT = CorpusFormat("plain text", PLAIN_SUFFIXES, any_line=True)
FORMATS = (
    CorpusFormat("JSON lines", ".jsonl .ndjson", json_lines, json_rows, any_line=True),
    CorpusFormat("csv", ".csv", separated_values),
    CorpusFormat("tsv", ".tsv", separated_values),
    CorpusFormat("parquet", ".parquet", columns, arrow_rows),
    CorpusFormat("arrow", ".arrow", columns, arrow_rows),
    CorpusFormat("JSON", ".json", json_list, json_objects, table=False),
    PLAIN_TEXT,
)
TABLES = tuple(
    suffix for each in FORMATS if each.read and each.table for suffix in each.suffixes.split()
)
KNOWN_SUFFIXES = tuple(suffix for each in FORMATS for suffix in each.suffixes.split())


def format_of(suffix: str) -> CorpusFormat:
    """The format of a file by its suffix; plain text if the suffix is unknown."""
    return next((each for each in FORMATS if suffix in each.suffixes.split()), PLAIN_TEXT)


def corpus_format(source: TextSource, reading: Reading) -> CorpusFormat:
    """The format in which the documents of a file are read: plain text also for other `.json`."""
    known = format_of(source.suffix)
    plain = known.read is json_list and not is_json_table(source, reading)
    return PLAIN_TEXT if plain else known


def plain_json(sources: Iterable[TextSource], reading: Reading) -> list[str]:
    """A note on the `.json` files that are read as plain text."""
    some = [source for source in sources if format_of(source.suffix).read is json_list]
    names = [s.name for s in some if corpus_format(s, reading) is PLAIN_TEXT]
    are = "is no list of texts" if len(names) == 1 else "are no lists of texts"
    return [f"{listed(names, 3)} {are}; read as plain text"] if names else []
