"""Read pairs of texts, a source and its target, in any of the usual forms.

    >>> pairs = read_pairs(["embedded:dates"], PairReading(), lambda what, done, total: None)

A table has a source and a target column, found by name or else by position. Two files that are not
tables are read line by line (`train.de train.en`). In a file of lines without columns, the source
can be the first word and the target the rest, as in pronunciation dictionaries.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice, zip_longest

from nanolm.choice import Report
from nanolm.errors import DataError, NanolmError, UsageError
from nanolm.formats import abridged, counted, listed, printable
from nanolm.machine import cache_folder
from nanolm.text import STDIN
from nanolm.text.bounds import ROW_BYTES, ExpansionLimit
from nanolm.text.columns import TextTable
from nanolm.text.decoding import Reading
from nanolm.text.documents import TABLES
from nanolm.text.labeled import ReadLog, open_each
from nanolm.text.pair_columns import (
    FIRST_WORD,
    by_name,
    by_position,
    header_note,
    input_columns,
    is_side,
    pair_columns,
    summary,
    with_pair_names,
)
from nanolm.text.source import TextSource
from nanolm.text.sources import ADDRESSES, Sources, find_sources
from nanolm.text.tables import read_table

LONGEST_TEXT = 20_000  # characters of a source or a target
VARIANT = re.compile(r"\(\d+\)$")  # word(2): another pronunciation of a word
COMMENT = re.compile(r"(^|\s)#\s.*|^;;;.*")
FIRST_TWO = ("1", "2")  # the same as given
BETWEEN = " ||| "
# Formats with pairs in them, but not in rows or lines.
MARKUP = (".tmx", ".xml", ".xlf", ".xliff", ".sgm", ".sgml", ".srt", ".vtt", ".po", ".yaml", ".yml")


@dataclass(frozen=True)
class PairReading:
    encoding: str = "utf-8"
    source_column: str | None = None  # its name (a.b selects a nested field), or number from 1
    target_column: str | None = None
    reverse: bool = False  # swap source and target

    def problems(self) -> list[str]:
        return Reading(encoding=self.encoding).problems()


@dataclass(frozen=True)
class Pairs:
    sources: list[str]
    targets: list[str]
    how: str = ""  # one line on how they were read
    examples: list[str] = field(default_factory=list)  # the first rows, for display
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.sources)

    def part(self, rows: Sequence[int]) -> "Pairs":
        sources, targets = ([side[n] for n in rows] for side in (self.sources, self.targets))
        return replace(self, sources=sources, targets=targets)


def read_pairs(
    names: Sequence[str], reading: PairReading, report: Report, limit: int | None = None
) -> Pairs:
    """Every pair, or the first `limit`, of the files that `names` refers to."""
    log, skipped = ReadLog(), Counter[str]()
    where = listed(names, 5)
    files = find_sources(names, cache_folder(), report, reading.encoding)
    log.add_files(files)
    bound = ExpansionLimit(where, files.size())
    pairs = Pairs([], [])
    for both in islice(_rows(files, reading, report, log, skipped), limit):
        source, target = (text.strip() for text in (both[::-1] if reading.reverse else both))
        bound.add(len(source) + len(target) + 2 * ROW_BYTES)
        if not source or not target:
            empty = "both sides" if source == target else "the target" if source else "the source"
            skipped[f"{{}} skipped: {empty} is empty".replace("sides is", "sides are")] += 1
        elif max(len(source), len(target)) > LONGEST_TEXT:
            skipped[f"{{}} of more than {LONGEST_TEXT:,} characters skipped"] += 1
        else:
            pairs.sources.append(source)
            pairs.targets.append(target)
    if not len(pairs):
        raise DataError(f"{where}: no pairs of a source and a target")
    notes = log.all_notes()
    if len(log.how) > 1:
        notes.append(f"pairs of {len(log.how):,} files: {listed([*log.how], 5)}")
    notes += [reason.format(counted(count, "pair")) for reason, count in skipped.items()]
    if again := len(pairs) - len(set(zip(pairs.sources, pairs.targets, strict=True))):
        notes.append(f"{counted(again, 'duplicate pair')} found")
    rows = zip(pairs.sources[:3], pairs.targets[:3], strict=True)
    examples = [f"  {_short(source)} → {_short(target)}" for source, target in rows]
    return replace(pairs, how=log.summary(), examples=examples, notes=notes)


def _short(text: str) -> str:
    words = printable(" ".join(text[:1000].split()))
    return words if len(words) <= 50 else words[:49] + "…"


def _rows(
    sources: Sources, reading: PairReading, report: Report, log: ReadLog, skipped: Counter[str]
) -> Iterator[tuple[str, str]]:
    asked, files = (reading.source_column, reading.target_column), sources.files
    for file in files:
        if file.suffix in MARKUP:
            cure = "convert it to a .tsv with two columns, or to two files whose lines correspond"
            raise UsageError(f"{file.name}: pairs cannot be read from {file.suffix} files; {cure}")
    tables = any(file.suffix in (*TABLES, ".json") for file in files)
    if len(files) > 2 and all(is_side(file.suffix[1:]) for file in files):
        cure = f"pass the two that belong together, such as {files[0].name} {files[1].name}"
        raise UsageError(f"{len(files)} files of lines; {cure}")
    if len(files) == 2 and not tables and not any(asked) and not _all_have_tabs(files, reading):
        yield from _side_by_side(files, reading, report, log)
        return
    for source, stream, lines in open_each(files, reading.encoding, report, log):
        table = read_table(source, stream, lines, any(asked), cautious=True)
        if not table.sample:
            continue
        if table.obvious:
            yield from _from_lines(table, reading, log, skipped)
            continue
        alone = source.suffix == ".json" and len(table.sample) == 1
        if alone and not any(asked) and not by_name(table.columns()):
            example = '[{"source": "a", "target": "b"}, ...]'
            raise UsageError(
                f"{source.name} is one JSON object; write its pairs as a list such as {example}"
            )
        found, table = table, with_pair_names(table, asked)
        both = pair_columns(table, *asked)
        more = input_columns(table, both[0]) if not any(asked) else []
        log.how[source.name] = summary(table, both[::-1] if reading.reverse else both, more)
        log.notes += header_note(found, table, asked)
        numbers = [column.number for column in (*both, *more)]
        for cells in table.rows(numbers):
            texts = [cells[number] for number in numbers]
            yield "\n".join(filter(str.strip, (texts[0], *texts[2:]))), texts[1]


def _all_have_tabs(files: list[TextSource], reading: PairReading) -> bool:
    """Whether the first line of each file has a tab: each has pairs in columns then."""
    opened = (open_each([file], reading.encoding, lambda *_: None, ReadLog()) for file in files)
    return all("\t" in next(lines, "") for each in opened for _, _, lines in each)


def look_like_pairs(names: Sequence[str]) -> bool:
    """Whether these local files are pairs rather than labeled or plain text: two files with the
    names of languages, or a table with two columns of texts that hardly repeat."""
    with suppress(NanolmError, OSError):
        if any(name == STDIN or name.startswith(ADDRESSES) for name in names):
            return False
        files = find_sources(names, cache_folder(), lambda *progress: None).files
        if len(files) == 2 and is_side(files[0].suffix[1:]):
            first, second = (file.suffix[1:] for file in files)
            return first != second and is_side(second)
        for source, stream, lines in open_each(files, "utf-8", lambda *progress: None, ReadLog()):
            if source.suffix not in (*TABLES, ".json"):
                return False
            table = with_pair_names(read_table(source, stream, lines, False, True), (None, None))
            named = by_name(table.columns())
            times = 5 if named else 2  # text and target may also be the names of text and label
            both = named or by_position(table.columns())
            return bool(both) and not any(column.is_label(times) for column in both)
    return False


def _side_by_side(
    files: list[TextSource], reading: PairReading, report: Report, log: ReadLog
) -> Iterator[tuple[str, str]]:
    """The lines of one file, each with the same line of the other."""
    names_of = [file.name for file in files]
    if names_of[0] == names_of[1]:
        raise UsageError(f"{names_of[0]} is given as both source and target")
    first, second = (file.suffix[1:] for file in (files[::-1] if reading.reverse else files))
    known = first != second and is_side(first) and is_side(second)
    languages = f", {first} → {second}" if known else ""
    log.how[names_of[0]] = f"{names_of[0]} and {names_of[1]}, line by line{languages}"
    opened = [open_each([file], reading.encoding, report, log) for file in files]
    sides = [chain.from_iterable(lines for _, _, lines in each) for each in opened]
    count, extra, longer, shorter = 0, 0, "", ""
    for source, target in zip_longest(*sides):
        if source is not None and target is not None:
            count += 1
            yield source, target
        elif (source or target or "").strip():  # empty lines at the end are harmless
            extra += 1
            longer, shorter = names_of if target is None else names_of[::-1]
    if extra:
        raise DataError(
            f"{shorter} ends after line {count:,}, but {longer} has {counted(extra, 'more line')}. "
            "Line n of one file must correspond to line n of the other; if each file has pairs in "
            f"columns, pass {FIRST_WORD}"
        )


def _from_lines(
    table: TextTable, reading: PairReading, log: ReadLog, skipped: Counter[str]
) -> Iterator[tuple[str, str]]:
    """The two sides of each line around |||; without these, its first word and the rest, if that
    was asked for."""
    name, lines = table.source.name, [" ".join(cells) for _, cells in table.sample]
    if tabs := _usual_count(lines, "\t"):
        for (number, _), line in zip(table.sample, lines, strict=True):
            if line.count("\t") != tabs:
                found = counted(line.count("\t") + 1, "column")
                raise DataError(
                    f"{name}, line {number:,} has {found}, but most lines have {tabs + 1}; fix or "
                    "remove that line"
                )
    between = _usual_count(lines, BETWEEN) == 1
    if not between and (reading.source_column, reading.target_column) != FIRST_TWO:
        example = f"such as {abridged(lines[0])!r}"
        raise UsageError(
            f"{name} has lines without columns, {example}. Pass a table with two columns, or "
            "two files whose lines correspond (train.de train.en). If each line is a word followed "
            f"by its target, pass {FIRST_WORD}"
        )
    order = "the rest → the first word" if reading.reverse else "the first word → the rest"
    log.how[name] = "two sides separated by |||" if between else f"lines; {order}"
    for number, cells in chain(table.sample, table.rest):
        line = " ".join(cells)
        if between:
            source, *target = line.split(BETWEEN)
            if len(target) != 1:
                raise DataError(f"{name}, line {number:,}: needs one ||| between source and target")
            yield source, target[0]
            continue
        plain = COMMENT.sub("", line).strip()
        if plain and plain != line.strip():
            skipped["comments removed from {}"] += 1
        if plain:
            word, *rest = plain.split(maxsplit=1)
            if not rest:
                raise DataError(f"{name}, line {number:,}: only one word, {abridged(word)!r}")
            yield VARIANT.sub("", word) or word, rest[0]


def _usual_count(lines: list[str], separator: str) -> int:
    """How often the separator occurs in more than half of the lines; 0 if that varies."""
    count, times = Counter(line.count(separator) for line in lines).most_common(1)[0]
    return count if 2 * times > len(lines) else 0
