"""Read labeled text to train a classifier on, in any of the usual forms.

    >>> data = read_labeled(["embedded:reviews"], LabelReading(), lambda what, done, total: None)

Tables have a text and a label column, found by name or else by content. Lines may begin with their
label (`__label__x` as in fastText, or a repeating word or number) or end with `@label`. Labels may
also be in a separate file, or be the names of folders.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO

from nanolm.choice import Report
from nanolm.errors import DataError, UsageError
from nanolm.formats import abridged, counted, listed
from nanolm.machine import cache_folder
from nanolm.text.bounds import ROW_BYTES, ExpansionLimit
from nanolm.text.columns import label_value, text_and_label_columns, text_and_maybe_label
from nanolm.text.decoding import Reading, decoded, lines
from nanolm.text.documents import TABLES
from nanolm.text.source import TextSource, blamed_on
from nanolm.text.sources import Sources, find_sources, skipped_files
from nanolm.text.tables import read_table

SPLIT_NAMES = {"train", "test", "dev", "val", "valid", "validation"}
UNLABELED = "unsup"  # the folder of unlabeled reviews in aclImdb

LONGEST_LABEL = 1_000  # characters
MOST_LABELS = 5_000  # the confusion matrix has all pairs of them
RIGHT_COLUMN = "is this the right column? (--label-column)"


@dataclass(frozen=True)
class LabelReading:
    encoding: str = "utf-8"
    text_column: str | None = None  # its name (a.b selects a nested field), or number from 1
    label_column: str | None = None
    label_file: str | None = None  # one label per line; the texts are then lines too

    def problems(self) -> list[str]:
        problems = Reading(encoding=self.encoding).problems()
        if self.label_file and (self.text_column or self.label_column):
            columns = "--text-column and --label-column"
            problems.append(f"--label-file requires one text per line; omit {columns}")
        return problems


@dataclass(frozen=True)
class Labeled:
    texts: list[str]
    labels: list[str]
    how: str  # one line on how they were read
    notes: list[str]


@dataclass
class ReadLog:
    """What was found while reading files."""

    how: dict[str, str] = field(default_factory=dict)  # by file
    invalid: Counter[str] = field(default_factory=Counter)  # characters, by file
    notes: list[str] = field(default_factory=list)

    def add_files(self, sources: Sources) -> None:
        self.notes += sources.notes
        if sources.skipped.total():
            self.notes.append(skipped_files(sources.skipped))

    def all_notes(self) -> list[str]:
        if not self.invalid:
            return list(self.notes)
        name, *others = self.invalid
        where = f"{name} and {counted(len(others), 'more file')}" if others else name
        characters = counted(self.invalid.total(), "invalid UTF-8 character")
        return [*self.notes, f"{characters} replaced by U+FFFD in {where}"]

    def summary(self) -> str:
        parts = [f"{name}: {how}" for name, how in self.how.items()]
        how = " | ".join(parts[:5]) + (f" | ... ({len(parts):,} files)" if parts[5:] else "")
        kinds = set(self.how.values())
        return kinds.pop() if len(kinds) == 1 else how


def read_labeled(
    names: Sequence[str], reading: LabelReading, report: Report, limit: int | None = None
) -> Labeled:
    """Every row, or the first `limit`, of the files that `names` refers to."""
    log, skipped = ReadLog(), Counter[str]()
    texts: list[str] = []
    labels: list[str] = []
    for text, label in islice(_labeled_rows(names, reading, report, log), limit):
        if not text.strip() or not label.strip():
            skipped["a label" if text.strip() else "text"] += 1
        else:
            texts.append(text.strip())
            labels.append(label_value(label))
            if len(labels[-1]) > LONGEST_LABEL:
                long = f"{abridged(labels[-1])!r} is too long for a label"
                raise DataError(f"{listed(names, 5)}: {long}; {RIGHT_COLUMN}")
    if not texts:
        raise DataError(f"{listed(names, 5)}: no rows with a text and a label")
    if (kinds_of_label := len(set(labels))) > MOST_LABELS:
        many = f"{kinds_of_label:,} different labels; the limit is {MOST_LABELS:,}"
        raise DataError(f"{listed(names, 5)}: {many}; {RIGHT_COLUMN}")
    notes = log.all_notes()
    notes += [f"{counted(n, 'row')} without {what} skipped" for what, n in skipped.items()]
    return Labeled(texts, labels, log.summary(), notes)


def read_texts(
    names: Sequence[str],
    reading: LabelReading,
    report: Report,
    are_labels: Callable[[set[str]], bool],
) -> Iterator[tuple[str, str | None]]:
    """Texts one by one, each with its label if there is one: one column of a table, including empty
    cells, so that results line up with the rows; else one text per line. Labels are in the column
    that `reading` names, or in one with the name of a label column whose values `are_labels`."""
    files = find_sources(names, cache_folder(), report, reading.encoding).files
    for source, stream, text_lines in open_each(files, reading.encoding, report, ReadLog()):
        table = read_table(source, stream, text_lines, bool(reading.text_column), cautious=True)
        if not table.sample:
            continue
        text, label = text_and_maybe_label(table, reading.text_column, reading.label_column)
        if label is not None and not reading.label_column:
            cells = (row[label] for _, row in table.sample if label < len(row))
            if not are_labels({label_value(cell) for cell in cells if cell.strip()}):
                label = None
        for row in table.rows([text] if label is None else [text, label]):
            yield row[text].strip(), None if label is None else label_value(row[label])


def _labeled_rows(
    names: Sequence[str], reading: LabelReading, report: Report, log: ReadLog
) -> Iterator[tuple[str, str]]:
    sources = find_sources(names, cache_folder(), report, reading.encoding)
    limit = ExpansionLimit(listed(names, 5), sources.size())
    for text, label in _rows_of(sources, names, reading, report, log):
        limit.add(len(text) + len(label) + 2 * ROW_BYTES)
        yield text, label


def _rows_of(
    sources: Sources, names: Sequence[str], reading: LabelReading, report: Report, log: ReadLog
) -> Iterator[tuple[str, str]]:
    log.add_files(sources)
    if reading.label_file:
        yield from _side_by_side(sources.files, reading, report, log)
        return
    classes: dict[Path, str] = {}
    for name in filter(os.path.isdir, names):
        if inside := _folder_classes(Path(name), sources.files):
            log.how[name] = "a folder for each class"
            classes |= inside
    files = _by_turns(sources.files, classes, log) if classes else sources.files
    asked = (reading.text_column, reading.label_column)
    for source, stream, text_lines in open_each(files, reading.encoding, report, log):
        if source.path in classes:
            yield "\n".join(text_lines), classes[source.path]
            continue
        table = read_table(source, stream, text_lines, any(asked), cautious=False)
        if table.sample:
            text, label = text_and_label_columns(table, *asked)
            log.how[source.name] = table.summary(text, label)
            yield from ((cells[text], cells[label]) for cells in table.rows([text, label]))


def open_each(
    files: list[TextSource], encoding: str, report: Report, log: ReadLog
) -> Iterator[tuple[TextSource, IO[bytes], Iterator[str]]]:
    """The files one by one, each open and as lines; reports progress."""
    done, total = 0, sum(source.size() for source in files)
    for source in files:
        replaced = partial(log.invalid.__setitem__, source.name)
        with blamed_on(source.name), source.open() as stream:
            yield source, stream, lines(decoded(source, stream, encoding, replaced))
        done += source.size()
        report("reading", done, total)


def _side_by_side(
    files: list[TextSource], reading: LabelReading, report: Report, log: ReadLog
) -> Iterator[tuple[str, str]]:
    """Lines of the files, each with the same line of the label file."""
    name = str(reading.label_file)
    log.how[name] = f"one text per line, labels in {name}"
    label_files = find_sources([name], cache_folder(), report, reading.encoding).files
    opened = open_each(label_files, reading.encoding, lambda *_: None, log)
    labels = [label for _, _, text_lines in opened for label in text_lines]
    count = 0
    for _, _, text_lines in open_each(files, reading.encoding, report, log):
        for line in text_lines:
            yield line, labels[count] if count < len(labels) else ""
            count += 1
    if count != len(labels):
        there = f"{counted(len(labels), 'line')} for {counted(count, 'text')}"
        needed = "each label must be on the same line number as its text"
        raise DataError(f"--label-file {name} has {there}; {needed}")


def _folder_classes(folder: Path, files: list[TextSource]) -> dict[Path, str]:
    """The class of each file, if each folder in `folder` is a class; "" means no class."""
    inside = [source for source in files if folder in source.path.parents]
    parts = {source.path: source.path.relative_to(folder).parts for source in inside}
    tops = sorted({first for first, *others in parts.values() if others})
    nested = [source for source in inside if source.path.parent != folder]
    if not tops or any(source.suffix in TABLES for source in nested):
        return {}
    if {top.lower() for top in tops} <= SPLIT_NAMES or max(map(len, parts.values())) > 2:
        cure = f"pass the one to read, for example {folder / tops[-1]}"
        raise UsageError(f"the folders in {folder} ({listed(tops)}) are not classes; {cure}")
    return {
        path: steps[0] if len(steps) == 2 and steps[0] != UNLABELED else ""
        for path, steps in parts.items()
    }


def _by_turns(files: list[TextSource], classes: dict[Path, str], log: ReadLog) -> list[TextSource]:
    """Files of each class in turn, so that the first few cover all classes; then the others."""
    turns: Counter[str] = Counter()
    order: list[tuple[int, TextSource]] = []
    for source in files:
        label = classes.get(source.path)
        turns[label or ""] += label is not None
        if label != "":
            order.append((turns[label] if label else len(files), source))
    if turns[""]:
        log.notes.append(f"{counted(turns[''], 'file')} outside class folders skipped")
    return [source for _, source in sorted(order, key=lambda item: item[0])]
