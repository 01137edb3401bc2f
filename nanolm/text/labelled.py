"""Labelled text to train a classifier on, in whatever form people have it.

    >>> found = read_labelled(["embedded:reviews"], LabelReading(), lambda what, done, total: None)
    >>> found.how
    "tsv with a header; text is 'text', label is 'label'"

A table (CSV, TSV, JSON lines, Parquet, Arrow, whatever its suffix) has a column for each; they are
found by their names, else by what is in them, and where two fit equally well the user is asked.
Lines may begin with their label (`__label__x` as fastText has it, or just a word or number that
repeats) or end with `@label`. Labels may stand in a file of their own, or be the names of folders.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from nanolm.choice import Report
from nanolm.errors import DataError, UsageError, did_you_mean
from nanolm.machine import cache_folder
from nanolm.text import TABLES
from nanolm.text.documents import (
    Reading,
    arrow_batches,
    csv_rows,
    decoded,
    decompressed,
    json_rows,
    lines,
)
from nanolm.text.sources import Source, find_sources, skipped_files

LINES, CHARACTERS = 20_000, 1 << 24  # what is looked at to find out how a file is written
ROWS = 10_000  # to find its columns

# Better names first; of each group all are as good.
LABEL_NAMES = (
    ("label", "labels"),
    ("class", "category", "sentiment", "target", "polarity", "emotion", "intent", "topic", "y"),
)
TEXT_NAMES = (
    ("text",),
    ("sentence", "content", "review", "tweet", "comment", "body", "message", "document", "phrase"),
    ("question", "utterance", "post", "sms", "headline", "texts", "sentences", "x"),
)
WEAK_LABELS = ("rating", "stars", "score", "tag", "type")  # where there is nothing better
INDICES = ("", "id", "ids", "idx", "index", "unnamed: 0")
KNOWN = {*chain(*LABEL_NAMES, *TEXT_NAMES), *WEAK_LABELS, *INDICES} - {""}
SPLITS = {"train", "test", "dev", "val", "valid", "validation"}
UNLABELLED = "unsup"  # what the film reviews of aclImdb call their folder without labels

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
WHOLE_NUMBER = re.compile(r"([-+]?\d+)\.0+")
QUOTED = re.compile(r'"(?:[^"]|"")*"')
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
FASTTEXT = "__label__"
WORD_AND_TEXT = re.compile(r"[ \t]*([^ \t]+)[ \t]*(.*)")
TEXT_AT_LABEL = re.compile(r"(.*)@([^\s@]+)[ \t]*")

Row = tuple[int, list[str]]  # the number of its line, its cells


@dataclass(frozen=True)
class LabelReading:
    """How labelled files are to be read; what is not said is found out."""

    encoding: str = "utf-8"
    text_column: str | None = None  # its name (a.b leads into nested objects), or number from 1
    label_column: str | None = None
    label_file: str | None = None  # a label a line; the texts are then lines too

    def problems(self) -> list[str]:
        problems = Reading(encoding=self.encoding).problems()
        if self.label_file and (self.text_column or self.label_column):
            problems.append(
                "--label-file: the texts are lines then; leave out --text-column and --label-column"
            )
        return problems


@dataclass(frozen=True)
class Labelled:
    """Texts and their labels, in the order of the files they came from."""

    texts: list[str]
    labels: list[str]
    how: str  # they were read, in a line
    notes: list[str]  # what else to know


@dataclass
class _Log:
    """What is noticed on the way."""

    how: dict[str, str] = field(default_factory=dict)  # by file
    left_out: Counter[str] = field(default_factory=Counter)  # rows without this
    broken: Counter[str] = field(default_factory=Counter)  # characters, by file
    notes: list[str] = field(default_factory=list)

    def story(self) -> str:
        kinds = set(self.how.values())
        if len(kinds) == 1:
            return kinds.pop()
        parts = [f"{name}: {how}" for name, how in self.how.items()]
        return " | ".join(parts[:5]) + (f" | ... ({len(parts):,} files)" if parts[5:] else "")

    def told(self) -> list[str]:
        """All notes."""
        left_out = [
            f"{_many(count, 'row')} without {what} left out"
            for what, count in self.left_out.items()
        ]
        if not self.broken:
            return self.notes + left_out
        name, *others = self.broken
        where = f"{name} and {_many(len(others), 'more file')}" if others else name
        return [
            *self.notes,
            f"{_many(self.broken.total(), 'broken character')} replaced by U+FFFD in {where}, "
            "which is UTF-8 otherwise",
            *left_out,
        ]


def read_labelled(
    names: Sequence[str], reading: LabelReading, report: Report, limit: int | None = None
) -> Labelled:
    """Every row, or the first `limit`, of the files that `names` stand for."""
    log = _Log()
    rows = islice(_labelled_rows(names, reading, report, log), limit)
    pairs = [(text.strip(), _label(label)) for text, label in _with_both(rows, log)]
    where = ", ".join(names[:5])
    if not pairs:
        raise DataError(f"{where}: no rows with a text and a label in there")
    texts, labels = [text for text, _ in pairs], [label for _, label in pairs]
    if len(set(labels)) == 1:
        more = "; the limit may be too low" if len(labels) == limit else ""
        raise DataError(
            f"{where}: there is only one class, {labels[0]!r} in {_many(len(labels), 'row')}, "
            f"but a classifier needs two{more}"
        )
    return Labelled(texts, labels, log.story(), log.told())


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def read_texts(names: Sequence[str], reading: LabelReading, report: Report) -> Iterator[str]:
    """The texts alone, one by one, labelled or not: of tables one column, else a text a line."""
    files = find_sources(names, cache_folder(), report, reading.encoding).files
    for source in _told(files, report):
        with _opened(source) as stream:
            table = _read_table(source, stream, reading, _Log(), cautious=True)
            if table.sample:
                text = _text_alone(table, reading)
                yield from filter(None, (cells[text].strip() for cells in table.rows([text])))


def _with_both(rows: Iterable[tuple[str, str]], log: _Log) -> Iterator[tuple[str, str]]:
    for text, label in rows:
        if not text or text.isspace():
            log.left_out["text"] += 1
        elif not label or label.isspace():
            log.left_out["a label"] += 1
        else:
            yield text, label


def _label(value: str) -> str:
    """`1.0` is what becomes of 1 in a column where some are missing."""
    value = value.strip()
    whole = WHOLE_NUMBER.fullmatch(value)
    return whole[1] if whole else value


def _labelled_rows(
    names: Sequence[str], reading: LabelReading, report: Report, log: _Log
) -> Iterator[tuple[str, str]]:
    found = find_sources(names, cache_folder(), report, reading.encoding)
    log.notes += found.notes
    if found.skipped.total():
        log.notes.append(skipped_files(found.skipped))
    if reading.label_file:
        yield from _side_by_side(found.files, reading, report, log)
        return
    classes: dict[Path, str] = {}
    for name in filter(os.path.isdir, names):
        if inside := _folder_classes(Path(name), found.files):
            log.how[name] = "a folder for each class"
            classes |= inside
    files = _by_turns(found.files, classes, log) if classes else found.files
    for source in _told(files, report):
        with _opened(source) as stream:
            if source.path in classes:
                yield "\n".join(_text_lines(source, stream, reading, log)), classes[source.path]
                continue
            table = _read_table(source, stream, reading, log)
            if table.sample:
                text, label = _text_and_label(table, reading)
                log.how[source.name] = table.story(text, label)
                yield from ((cells[text], cells[label]) for cells in table.rows([text, label]))


def _told(files: list[Source], report: Report) -> Iterator[Source]:
    """The files one by one, while `report` is told how far it is."""
    done, total = 0, sum(source.size() for source in files)
    for source in files:
        yield source
        done += source.size()
        report("reading", done, total)


@contextmanager
def _opened(source: Source) -> Iterator[IO[bytes]]:
    try:
        with source.open() as stream:
            yield stream
    except OSError as error:
        raise DataError(f"{source.name} cannot be read: {error.strerror or error}") from None


def _text_lines(
    source: Source, stream: IO[bytes], reading: LabelReading, log: _Log
) -> Iterator[str]:
    def mended(broken: int) -> None:
        log.broken[source.name] = broken

    return lines(decoded(source, decompressed(source, stream), reading.encoding, mended))


# Labels that stand elsewhere


def _side_by_side(
    files: list[Source], reading: LabelReading, report: Report, log: _Log
) -> Iterator[tuple[str, str]]:
    """Lines of the files, each with its line of the file of labels."""
    name = str(reading.label_file)
    log.how[name] = f"a text a line, their labels in {name}"
    labels: list[str] = []
    for source in find_sources([name], cache_folder(), report, reading.encoding).files:
        with _opened(source) as stream:
            labels += _text_lines(source, stream, reading, log)
    count = 0
    for source in _told(files, report):
        with _opened(source) as stream:
            for line in _text_lines(source, stream, reading, log):
                yield line, labels[count] if count < len(labels) else ""
                count += 1
    if count != len(labels):
        raise DataError(
            f"--label-file {name} has {_many(len(labels), 'line')}, but there are "
            f"{_many(count, 'text')}; each text needs its label on the line of the same number"
        )


def _folder_classes(folder: Path, files: list[Source]) -> dict[Path, str]:
    """The class of each file, where the folders in `folder` are one class each."""
    inside = [source for source in files if folder in source.path.parents]
    parts = {source.path: source.path.relative_to(folder).parts for source in inside}
    tops = sorted({first for first, *others in parts.values() if others})
    if not tops or any(source.suffix in TABLES for source in inside):
        return {}
    deep = next((path for path, steps in parts.items() if len(steps) > 2), None)
    if deep or {top.lower() for top in tops} <= SPLITS:
        raise UsageError(
            f"{folder} has the folders {', '.join(tops[:10])}, which are no classes; name the one "
            f"to read, for example {folder / tops[-1]}"
        )
    return {path: steps[0] for path, steps in parts.items() if len(steps) == 2}


def _by_turns(files: list[Source], classes: dict[Path, str], log: _Log) -> list[Source]:
    """Files of each class in turn, so that the first few are of all classes."""
    turns: Counter[str] = Counter()
    order, beside = [], 0
    for source in files:
        label = classes.get(source.path, UNLABELLED)
        beside += label == UNLABELLED
        turns[label] += 1
        if label != UNLABELLED:
            order.append((turns[label], source))
    if beside:
        log.notes.append(f"{beside:,} files left out that lie in no folder of a class")
    return [source for _, source in sorted(order, key=lambda item: item[0])]


# Tables, and lines that are tables of two columns


@dataclass
class _Table:
    """A file as rows of cells."""

    source: Source
    kind: str
    names: list[str] | None  # of the columns, where it says them
    sample: list[Row]  # its first rows
    rest: Iterator[Row]
    obvious: bool = False  # its columns need no telling

    def columns(self) -> list["_Column"]:
        names = self.names or [str(n + 1) for n in range(len(self.sample[0][1]))]
        return [
            _Column(
                number,
                name.strip(),
                Counter(cells[number].strip() for _, cells in self.sample if number < len(cells)),
            )
            for number, name in enumerate(names)
        ]

    def rows(self, needed: list[int]) -> Iterator[list[str]]:
        """The cells of every row; a row that is not like the first is refused."""
        width = len(self.names or self.sample[0][1])
        for number, cells in chain(self.sample, self.rest):
            if len(cells) != width and (len(cells) <= max(needed) or any(cells[width:])):
                raise DataError(
                    f"{self.source.name}, line {number:,} has {len(cells)} columns, not {width}; "
                    "mend that row (a separator within a text must be quoted)"
                )
            yield cells

    def story(self, text: int, label: int) -> str:
        if self.obvious:
            return self.kind
        if self.names:
            return f"{self.kind}; text is {self.names[text]!r}, label is {self.names[label]!r}"
        return f"{self.kind}; text is column {text + 1}, label is column {label + 1}"


def _table(
    source: Source, kind: str, names: list[str] | None, rows: Iterator[Row], obvious: bool = False
) -> _Table:
    return _Table(source, kind, names, list(islice(rows, ROWS)), rows, obvious)


def _read_table(
    source: Source,
    stream: IO[bytes],
    reading: LabelReading,
    log: _Log,
    cautious: bool = False,
) -> _Table:
    """`source` as a table. If `cautious`, what might be plain text is taken for that."""
    if source.suffix in (".parquet", ".arrow"):
        batches = arrow_batches(source, stream, lambda schema: schema.names)
        objects = (row for batch in batches for row in batch.to_pylist())
        return _object_table(source, source.suffix[1:], enumerate(objects, start=1))
    text_lines = _text_lines(source, stream, reading, log)
    if source.suffix in (".jsonl", ".ndjson"):
        return _object_table(source, "JSON lines", json_rows(source, text_lines))
    sample, cut = _first(text_lines)
    everything = chain(sample, text_lines)
    if source.suffix != ".csv" and _all_begin(sample, FASTTEXT):
        rows = _fasttext_rows(source, everything)
        return _table(source, "lines that begin with __label__", ["label", "text"], rows, True)
    told = bool(reading.text_column or reading.label_column)
    found = _separator(source, sample, cut, 5 if cautious else 2, told)
    if found:
        return _separated_table(source, *found, everything)
    return _line_table(source, sample, everything, cautious)


def _object_table(source: Source, kind: str, objects: Iterator[tuple[int, Any]]) -> _Table:
    """Objects as rows, with a column for whatever the first of them have."""

    def flattened(number: int, value: Any) -> dict[str, str]:
        if isinstance(value, str):
            value = {"text": value}
        if not isinstance(value, dict):
            raise DataError(f"{source.name}, line {number:,}: neither an object nor a string")
        return dict(_values(value, ""))

    rows = ((number, flattened(number, value)) for number, value in objects)
    sample = list(islice(rows, ROWS))
    names = list(dict.fromkeys(name for _, row in sample for name in row))
    cells = ((n, [row.get(name, "") for name in names]) for n, row in chain(sample, rows))
    return _table(source, kind, names, cells)


def _values(row: dict[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """What an object holds as (path, text); lists are not looked into."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _values(value, f"{path}{name}.")
        elif isinstance(value, bool):
            yield path + name, "true" if value else "false"
        elif isinstance(value, str):
            yield path + name, LONE_SURROGATE.sub("\ufffd", value)
        elif value is None or value != value:  # NaN is how pandas says that there is none
            yield path + name, ""
        elif not isinstance(value, (list, bytes)):
            yield path + name, str(value)


def _first(text_lines: Iterator[str]) -> tuple[list[str], bool]:
    """The first lines, and whether there may be more."""
    sample: list[str] = []
    size = 0
    for line in text_lines:
        sample.append(line)
        size += len(line)
        if len(sample) == LINES or size > CHARACTERS:
            return sample, True
    return sample, False


def _all_begin(sample: list[str], start: str) -> bool:
    found = [line.lstrip().startswith(start) for line in sample if line.strip()]
    return bool(found) and all(found)


def _fasttext_rows(source: Source, text_lines: Iterable[str]) -> Iterator[Row]:
    for number, line in enumerate(text_lines, start=1):
        if not line.strip():
            continue
        label, *others = re.split(r"[ \t]+", line.strip(), maxsplit=1)
        text = "".join(others)
        if not label.startswith(FASTTEXT) or text.startswith(FASTTEXT):
            count = "several labels" if label.startswith(FASTTEXT) else "no label"
            raise DataError(
                f"{source.name}, line {number:,} begins with {count}; each text needs exactly one "
                f"{FASTTEXT}NAME"
            )
        yield number, [label.removeprefix(FASTTEXT), text]


def _separator(
    source: Source, sample: list[str], cut: bool, times: int, told: bool
) -> tuple[str, bool] | None:
    """What parts the cells of a file, and whether they are quoted as in CSV."""
    if source.suffix == ".csv":
        choices = [(",", True), (";", True), ("\t", True), ("|", True)]
    else:
        choices = [("\t", False), ("\t", True)]
    if source.suffix not in (".csv", ".tsv"):
        choices += [(",", True), (";", True)]
    for delimiter, quoted in choices:
        rows = _even_rows(source, sample, cut, delimiter, quoted)
        if not rows or len(rows[0][1]) == 1:
            continue
        if (delimiter, quoted) == ("\t", False) and _looks_quoted(rows):
            continue
        foreign = delimiter in ",;" and source.suffix != ".csv"  # it may be plain text as well
        if not foreign or told or _looks_like_a_table(source, rows, times):
            return delimiter, quoted
    if source.suffix == ".csv" or any("\t" in line for line in sample if source.suffix == ".tsv"):
        return choices[0]
    return None


def _even_rows(
    source: Source, sample: list[str], cut: bool, delimiter: str, quoted: bool
) -> list[Row] | None:
    """The rows of a sample, if all of them have as many cells."""
    rows: list[Row] = []
    try:
        for row in _separated_rows(source, sample, delimiter, quoted):
            if rows and len(row[1]) != len(rows[0][1]):
                return None
            rows.append(row)
    except DataError as error:
        if not cut or "unexpected end" not in str(error):  # of a cell that goes on later
            return None
    return rows


def _separated_rows(
    source: Source, text_lines: Iterable[str], delimiter: str, quoted: bool
) -> Iterator[Row]:
    for number, cells in csv_rows(source, text_lines, delimiter, quoted):
        if len(cells) > 1 or (cells and cells[0].strip()):
            yield number, cells


def _looks_quoted(rows: list[Row]) -> bool:
    """Is this a TSV in which quotes are doubled, and cells with quotes are within quotes?"""
    cells = [cell for _, row in rows for cell in row if '"' in cell]
    return any('""' in cell[1:-1] for cell in cells) and all(map(QUOTED.fullmatch, cells))


def _looks_like_a_table(source: Source, rows: list[Row], times: int) -> bool:
    """Has it a header that we know, or a column that repeats?"""
    table = _with_header(_Table(source, "", None, rows, iter(())))
    if table.names and any(_known(name) for name in table.names):
        return True
    columns = table.columns() if table.sample else []
    return any(column.is_label(times) and len(column.filled) > 1 for column in columns)


def _separated_table(
    source: Source, delimiter: str, quoted: bool, text_lines: Iterable[str]
) -> _Table:
    kind = {"\t": "quoted tsv" if quoted else "tsv", ",": "csv"}.get(
        delimiter, f"{delimiter!r} csv"
    )
    rows = _separated_rows(source, text_lines, delimiter, quoted)
    return _with_header(_table(source, kind, None, rows))


def _with_header(table: _Table) -> _Table:
    """The same table, its first row taken for the names if it is not one of the data."""
    header = bool(table.sample) and _is_header(table)
    names = [name.strip() for name in table.sample[0][1]] if header else None
    return replace(
        table,
        kind=f"{table.kind} {'with' if header else 'without'} a header",
        names=names,
        sample=table.sample[header:],
    )


def _is_header(table: _Table) -> bool:
    first, *others = (cells for _, cells in table.sample)
    first = [cell.strip() for cell in first]
    numbers = [str(n) for n in range(len(first))]
    if first in (numbers, ["", *numbers[:-1]]):  # what pandas calls columns without a name
        return len(first) > 1
    below = replace(table, sample=table.sample[1:]).columns() if others else []
    labels = [column for column in below if column.is_label(2)]
    if any(first[column.number] in column.values for column in labels if first[column.number]):
        return False  # a label that occurs again
    if any(map(_known, first)):
        return True
    words = all(re.fullmatch(r"[^\W\d][\w.-]*", cell) for cell in first if cell)
    return words and any(column.number_like or column.wordy for column in below)


def _known(name: str) -> bool:
    """Is this a name for a column, and nothing that a text might be?"""
    words = _words(name)
    return bool(KNOWN.intersection(words)) and (
        KNOWN.issuperset(words) or re.fullmatch(r"[\w.-]+", name) is not None
    )


def _words(name: str) -> list[str]:
    """The words that a name is made of: `airline_sentiment`, `reviewText`."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def _line_table(
    source: Source, sample: list[str], text_lines: Iterable[str], cautious: bool
) -> _Table:
    """Lines with their label at either end, or just texts."""
    full = [line for line in sample if line.strip()]
    numbered = ((n, line) for n, line in enumerate(text_lines, start=1) if line.strip())
    ends = _group(TEXT_AT_LABEL, 2, full)
    starts = _group(WORD_AND_TEXT, 1, full)
    if ends and _repeats(ends, 5 if cautious else 2):
        kind, pattern, order = "lines that end in @label", TEXT_AT_LABEL, (2, 1)
    elif starts and _are_labels(starts, cautious):
        kind, pattern, order = "lines that begin with their label", WORD_AND_TEXT, (1, 2)
    else:
        texts = ((number, [line]) for number, line in numbered)
        return _table(source, "plain text", ["text"], texts, True)

    def split(number: int, line: str) -> Row:
        match = pattern.fullmatch(line)
        if not match:
            raise DataError(f"{source.name}, line {number:,} has no label, unlike those before it")
        return number, [match[order[0]], match[order[1]]]

    rows = (split(number, line) for number, line in numbered)
    return _table(source, kind, ["label", "text"], rows, True)


def _group(pattern: re.Pattern[str], group: int, sample: list[str]) -> Counter[str] | None:
    """What `pattern` finds there, if it fits every line."""
    matches = [pattern.fullmatch(line) for line in sample]
    found = [match[group] for match in matches if match]
    return Counter(found) if found and len(found) == len(sample) else None


def _are_labels(starts: Counter[str], cautious: bool) -> bool:
    """Are the first words labels? Those of plain text repeat too, but many occur only once."""
    if all(map(NUMBER.fullmatch, starts)):
        return _repeats(starts, 5 if cautious else 2)
    once = sum(count == 1 for count in starts.values())
    return not cautious and len(starts) > 1 and _repeats(starts, 2) and 3 * once <= len(starts)


def _repeats(values: Counter[str], times: int) -> bool:
    """Few and short, each there `times` on average."""
    return max(map(len, values)) <= 50 and times * len(values) <= max(values.total(), 4)


# Which column is what


@dataclass(frozen=True)
class _Column:
    number: int
    name: str
    values: Counter[str]  # of the first rows, and how often

    @cached_property
    def filled(self) -> Counter[str]:
        return Counter({value: count for value, count in self.values.items() if value})

    @cached_property
    def number_like(self) -> bool:
        return bool(self.filled) and all(map(NUMBER.fullmatch, self.filled))

    @cached_property
    def wordy(self) -> bool:
        """Has most of it several words?"""
        spaced = sum(count for value, count in self.filled.items() if " " in value)
        return 2 * spaced > self.filled.total()

    @cached_property
    def length(self) -> float:
        total = sum(len(value) * count for value, count in self.filled.items())
        return total / max(1, self.filled.total())

    def is_label(self, times: int) -> bool:
        """Few short values that repeat, in most rows; measurements are none."""
        if not self.filled or 2 * self.filled.total() < self.values.total():
            return False
        return _repeats(self.filled, times) and not self.measured

    @cached_property
    def measured(self) -> bool:
        fractions = any("." in _label(value) for value in self.filled)
        return self.number_like and fractions and len(self.filled) > 20

    def may_be_label(self) -> bool:
        """Enough for a column that is called so."""
        few = len(self.filled) <= max(20, self.filled.total() / 2)
        return bool(self.filled) and few and not self.measured

    def may_be_text(self) -> bool:
        return bool(self.filled) and not self.number_like

    def is_text(self) -> bool:
        return self.may_be_text() and not self.is_label(5)

    def __str__(self) -> str:
        example = max(self.filled, key=self.filled.__getitem__, default="")
        shown = example if len(example) <= 40 else example[:37] + "..."
        return f"{self.name or self.number + 1} ({shown!r})"


def _text_and_label(table: _Table, reading: LabelReading) -> tuple[int, int]:
    columns = table.columns()
    label = _asked(table, columns, reading.label_column, "--label-column")
    text = _asked(table, columns, reading.text_column, "--text-column")
    label = label or _label_by_name([column for column in columns if column is not text], table)
    text = text or _find_text([column for column in columns if column is not label], table)
    label = label or _label_by_content([column for column in columns if column is not text], table)
    if text is label:
        raise UsageError(f"{table.source.name}: {text.name!r} cannot be both text and label")
    return text.number, label.number


def _text_alone(table: _Table, reading: LabelReading) -> int:
    columns = table.columns()
    text = _asked(table, columns, reading.text_column, "--text-column")
    if text is None and len(columns) > 1:
        label = next(
            iter(_named(columns, LABEL_NAMES, _Column.may_be_label, _Column.may_be_label)), None
        )
        columns = [column for column in columns if column is not label]
    return (text or _find_text(columns, table)).number


def _asked(table: _Table, columns: list[_Column], name: str | None, option: str) -> _Column | None:
    if name is None:
        return None
    for column in columns:
        if name.lower() == column.name.lower():
            return column
    if name.isdigit() and 1 <= int(name) <= len(columns):
        return columns[int(name) - 1]
    hint = did_you_mean(name, [column.name for column in columns])
    raise UsageError(
        f"{option} {name}: {table.source.name} ({table.kind}) has the columns {_listed(columns)}"
        f"{hint}"
    )


Fits = Callable[[_Column], bool]


def _named(
    columns: list[_Column], groups: Sequence[Sequence[str]], exact: Fits, similar: Fits
) -> list[_Column]:
    """The columns with the best name for what is sought: all that are called as well."""
    words = set(chain(*groups))
    tests: list[Fits] = [
        *(lambda c, g=group: c.name.lower() in g and exact(c) for group in groups),
        lambda c: bool(words.intersection(_words(c.name)[-1:])) and similar(c),
        lambda c: bool(words.intersection(_words(c.name))) and similar(c),
    ]
    return next((found for test in tests if (found := list(filter(test, columns)))), [])


def _label_by_name(columns: list[_Column], table: _Table) -> _Column | None:
    if table.names is None:
        return None
    found = _named(columns, LABEL_NAMES, _Column.may_be_label, lambda column: column.is_label(2))
    found = found or [c for c in columns if c.name.lower() in WEAK_LABELS and c.is_label(2)]
    return _only(found, "label", table) if found else None


def _label_by_content(columns: list[_Column], table: _Table) -> _Column:
    found = [
        c for c in columns if c.is_label(2) and not (table.names and c.name.lower() in INDICES)
    ]
    found = [column for column in found if len(column.filled) > 1] or found
    if not found:
        raise UsageError(
            f"{table.source.name} ({table.kind}) has no labels: no column has few values that "
            f"repeat. Its columns are {_listed(table.columns())}; name one with --label-column. "
            "Texts without labels are for `nanolm classify --file`"
        )
    return _only(found, "label", table)


def _find_text(columns: list[_Column], table: _Table) -> _Column:
    """By its name, else the one with the longest texts."""
    if table.names and (found := _named(columns, TEXT_NAMES, _Column.may_be_text, _Column.is_text)):
        return _only(found, "text", table)
    found = [column for column in columns if column.may_be_text()]
    found = [column for column in found if column.is_text()] or found
    found = [column for column in found if column.wordy] or found
    if not found:
        raise UsageError(
            f"{table.source.name} ({table.kind}): no column looks like text; its columns are "
            f"{_listed(table.columns())}; name one with --text-column"
        )
    longest = max(column.length for column in found)
    return _only([column for column in found if 2 * column.length > longest], "text", table)


def _only(found: list[_Column], what: str, table: _Table) -> _Column:
    if len(found) == 1:
        return found[0]
    names = " and ".join(repr(column.name) for column in found[:5])
    raise UsageError(
        f"{table.source.name} ({table.kind}): {names} may each be the {what}; say which with "
        f"--text-column and --label-column. Its columns are {_listed(table.columns())}"
    )


def _listed(columns: list[_Column]) -> str:
    return ", ".join(map(str, columns[:30])) + (", ..." if columns[30:] else "")
