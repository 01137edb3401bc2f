"""Read a file as a table in any format; the separator is detected.

JSON lines, Parquet and Arrow are recognized by their suffix. Everything else is lines, with tabs,
commas or semicolons between cells, or a space or `@` between a text and its label.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import IO, Any

from nanolm.errors import DataError
from nanolm.text.bounds import MOST_COLUMNS
from nanolm.text.columns import NUMBER, Row, TextTable, is_column_name, repeats
from nanolm.text.documents import csv_rows, format_of
from nanolm.text.json_rows import Rows, leaves
from nanolm.text.source import TextSource

SAMPLE_LINES, SAMPLE_CHARACTERS = 20_000, 1 << 24  # to detect the format of a file
SAMPLE_ROWS, SAMPLE_CELLS = 10_000, 2_000_000  # to find its columns
MOST_CLASSES = 100  # more are unlikely as words before each text
FEW_CLASSES, TEXTS_EACH = 6, 10  # this many in any file; more if each has TEXTS_EACH texts
PROSE_SHARE = 0.03  # of all words; at least 0.06 in prose, at most 0.004 in labeled data

SEPARATOR_LINE = re.compile(r"\s*sep=[,;|\t]\s*", re.I)  # Excel's first line
QUOTED = re.compile(r'"(?:[^"]|"")*"')
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
FASTTEXT = "__label__"
WORD_AND_TEXT = re.compile(r"[ \t]*([^ \t]+)[ \t]*(.*)")
TEXT_AT_LABEL = re.compile(r"(.*)@([^\s@]+)[ \t]*")


def read_table(
    source: TextSource, stream: IO[bytes], text_lines: Iterator[str], certain: bool, cautious: bool
) -> TextTable:
    """`source` as a table; `text_lines` are its lines, if it has any. If `certain`, it is known
    to have columns; if `cautious`, an ambiguous file is treated as plain text."""
    known = format_of(source.suffix)
    if known.rows:
        return _object_table(source, known.name, known.rows(source, stream, text_lines))
    sample, cut = _first(text_lines)
    if sample and SEPARATOR_LINE.fullmatch(sample[0]):
        sample[0] = ""
    everything = chain(sample, text_lines)
    full = [line for line in sample if line.strip()]
    fasttext = bool(full) and all(line.lstrip().startswith(FASTTEXT) for line in full)
    if fasttext and source.suffix != ".csv":
        rows = _fasttext_rows(source, everything)
        return _table(source, "lines that begin with __label__", ["label", "text"], rows, True)
    separator = _separator(source, sample, cut, 5 if cautious else 2, certain)
    if separator:
        delimiter, quoted = separator
        kinds = {"\t": "quoted tsv" if quoted else "tsv", ",": "csv"}
        rows = _separated_rows(source, everything, delimiter, quoted)
        return _with_header(_table(source, kinds.get(delimiter, f"{delimiter!r} csv"), None, rows))
    return _line_table(source, full, everything, cautious)


def _table(
    source: TextSource, kind: str, names: list[str] | None, rows: Iterator[Row], *obvious: bool
) -> TextTable:
    sample, room = list[Row](), SAMPLE_CELLS
    for row in islice(rows, SAMPLE_ROWS):
        sample.append(row)
        room -= len(row[1])
        if room < 0:
            break
    return TextTable(source, kind, names, sample, rows, *obvious)


def _object_table(source: TextSource, kind: str, objects: Rows) -> TextTable:
    def flattened(number: int, value: Any) -> dict[str, str]:
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            value = {str(place): each for place, each in enumerate(value, start=1)}
        if not isinstance(value, dict | str):
            raise DataError(f"{source.name}, line {number:,}: must be a JSON object or a string")
        values = leaves({"text": value} if isinstance(value, str) else value)
        alone = ((path, each[0] if is_one_text(each) else each) for path, each in values)
        return {path: _cell(each) for path, each in alone if not isinstance(each, list | bytes)}

    rows = ((number, flattened(number, value)) for number, value in objects)
    sample = list(islice(rows, SAMPLE_ROWS))
    names = list(dict.fromkeys(name for _, row in sample for name in row))
    if len(names) > MOST_COLUMNS:
        many = f"{len(names):,} different fields; the limit is {MOST_COLUMNS:,}"
        raise DataError(f"{source.name} has {many}")
    cells = ((n, [row.get(name, "") for name in names]) for n, row in chain(sample, rows))
    return _table(source, kind, names, cells)


def is_one_text(value: Any) -> bool:
    """Whether this is a list of a single text, such as the only right answer."""
    return isinstance(value, list) and len(value) == 1 and isinstance(value[0], str)


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return LONE_SURROGATE.sub("\ufffd", value)
    if value is None or value != value:  # pandas uses NaN for a missing value
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _first(text_lines: Iterator[str]) -> tuple[list[str], bool]:
    """The first lines, and whether there may be more."""
    sample, room = list[str](), SAMPLE_CHARACTERS
    for line in text_lines:
        sample.append(line)
        room -= len(line)
        if len(sample) == SAMPLE_LINES or room < 0:
            return sample, True
    return sample, False


def _fasttext_rows(source: TextSource, text_lines: Iterable[str]) -> Iterator[Row]:
    for number, line in enumerate(text_lines, start=1):
        if not line.strip():
            continue
        label, *others = re.split(r"[ \t]+", line.strip(), maxsplit=1)
        text = "".join(others)
        if not label.startswith(FASTTEXT) or text.startswith(FASTTEXT):
            starts = "starts with several labels"
            if not label.startswith(FASTTEXT):
                starts = "does not start with a label"
            needed = f"each text needs exactly one {FASTTEXT}NAME"
            raise DataError(f"{source.name}, line {number:,} {starts}; {needed}")
        yield number, [label.removeprefix(FASTTEXT), text]


def _separator(
    source: TextSource, sample: list[str], cut: bool, times: int, certain: bool
) -> tuple[str, bool] | None:
    """The separator between cells, and whether they are quoted as in CSV."""
    if source.suffix == ".csv":
        choices = [(",", True), (";", True), ("\t", True), ("|", True)]
    else:
        choices = [("\t", False), ("\t", True)]
    if source.suffix not in (".csv", ".tsv"):
        choices += [(",", True), (";", True)]
    for delimiter, quoted in choices:
        rows = _even_rows(source, sample, cut, delimiter, quoted)
        if not rows or len(rows[0][1]) == 1 or (not quoted and _looks_quoted(rows)):
            continue
        foreign = delimiter in ",;" and source.suffix != ".csv"  # it may be plain text
        if not foreign or certain or _looks_like_a_table(source, rows, times):
            return delimiter, quoted
    if source.suffix == ".csv" or any("\t" in line for line in sample if source.suffix == ".tsv"):
        return choices[0]
    return None


def _even_rows(
    source: TextSource, sample: list[str], cut: bool, delimiter: str, quoted: bool
) -> list[Row] | None:
    rows: list[Row] = []
    try:
        for row in _separated_rows(source, sample, delimiter, quoted):
            if rows and len(row[1]) != len(rows[0][1]):
                return None
            rows.append(row)
    except DataError as error:
        if not cut or "unexpected end" not in str(error):  # a cell continues after the sample
            return None
    return rows


def _separated_rows(
    source: TextSource, text_lines: Iterable[str], delimiter: str, quoted: bool
) -> Iterator[Row]:
    for number, cells in csv_rows(source, text_lines, delimiter, quoted):
        if len(cells) > 1 or (cells and cells[0].strip()):
            yield number, cells


def _looks_quoted(rows: list[Row]) -> bool:
    """Whether this is a TSV with CSV quoting: quoted cells, and quotes in them doubled."""
    filled = [cell for _, row in rows for cell in row if cell]
    cells = [cell for cell in filled if '"' in cell]
    sure = len(cells) == len(filled) or any('""' in cell[1:-1] for cell in cells)
    return sure and all(map(QUOTED.fullmatch, cells))


def _looks_like_a_table(source: TextSource, rows: list[Row], times: int) -> bool:
    table = _with_header(TextTable(source, "", None, rows, iter(())))
    if table.names and any(is_column_name(name) for name in table.names):
        return True
    columns = table.columns() if table.sample else []
    return any(column.is_label(times) and len(column.filled) > 1 for column in columns)


def _with_header(table: TextTable) -> TextTable:
    """The same table, with its first row as column names if it is a header."""
    if not table.sample or not _is_header(table):
        return replace(table, kind=f"{table.kind} without a header")
    names = table.sample[0][1]  # concatenated files repeat the header
    return replace(
        table,
        kind=f"{table.kind} with a header",
        names=[name.strip() for name in names],
        sample=[row for row in table.sample if row[1] != names],
        rest=(row for row in table.rest if row[1] != names),
    )


def _is_header(table: TextTable) -> bool:
    first = [cell.strip() for cell in table.sample[0][1]]
    numbers = [str(n) for n in range(len(first))]
    if first in (numbers, ["", *numbers[:-1]]):  # how pandas names columns without a name
        return len(first) > 1
    if all(map(is_column_name, first)) and len(first) > 1:
        return True  # even if it repeats
    below = replace(table, sample=table.sample[1:]).columns() if table.sample[1:] else []
    labels = [column for column in below if column.is_label(2)]
    if any(first[column.number] in column.values for column in labels if first[column.number]):
        return False  # a label that repeats
    if any(map(is_column_name, first)):
        return True
    words = all(re.fullmatch(r"[^\W\d][\w.-]*", cell) for cell in first if cell)
    return words and any(column.number_like or column.wordy for column in below)


def _line_table(
    source: TextSource, full: list[str], text_lines: Iterable[str], cautious: bool
) -> TextTable:
    """Lines with their label at either end, or only texts; `full` has the first nonblank lines."""
    numbered = ((n, line) for n, line in enumerate(text_lines, start=1) if line.strip())
    ends = _group(TEXT_AT_LABEL, 2, full)
    starts = _group(WORD_AND_TEXT, 1, full)
    if ends and repeats(ends, 5 if cautious else 2):
        kind, pattern, order = "lines that end with @label", TEXT_AT_LABEL, (2, 1)
    elif starts and _are_labels(starts, cautious) and not _are_prose(full, set(starts)):
        kind, pattern, order = "lines that begin with their label", WORD_AND_TEXT, (1, 2)
    else:
        texts = ((number, [line]) for number, line in numbered)
        return _table(source, "plain text", ["text"], texts, True)

    def split(number: int, line: str) -> Row:
        match = pattern.fullmatch(line)
        if not match:
            raise DataError(f"{source.name}, line {number:,} has no label, unlike earlier lines")
        return number, [match[order[0]], match[order[1]]]

    rows = (split(number, line) for number, line in numbered)
    return _table(source, kind, ["label", "text"], rows, True)


def _group(pattern: re.Pattern[str], group: int, sample: list[str]) -> Counter[str] | None:
    """The matches of a group, if `pattern` matches every line."""
    values = [match[group] for match in map(pattern.fullmatch, sample) if match]
    return Counter(values) if values and len(values) == len(sample) else None


def _are_labels(starts: Counter[str], cautious: bool) -> bool:
    """Whether the first words are labels. In plain text they repeat too, but many occur once."""
    if all(map(NUMBER.fullmatch, starts)):
        return repeats(starts, 5 if cautious else 2)
    once = sum(count == 1 for count in starts.values())
    most = min(MOST_CLASSES, max(FEW_CLASSES, starts.total() // TEXTS_EACH))
    few = 1 < len(starts) <= most and 3 * once <= len(starts)
    return few and repeats(starts, 2) and not cautious


def _are_prose(sample: list[str], starts: set[str]) -> bool:
    """Whether the first words are ordinary words: unlike labels, they occur inside other lines."""
    known = {start.casefold() for start in starts if not NUMBER.fullmatch(start)}
    words = elsewhere = 0
    for line in sample:
        first, *others = re.findall(r"\w+", line.casefold()) or [""]
        words += len(others)
        elsewhere += sum(word in known and word != first for word in others)
    return elsewhere > PROSE_SHARE * words
