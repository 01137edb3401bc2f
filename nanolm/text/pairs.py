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
from nanolm.text.bounds import ROW_BYTES, ExpansionLimit
from nanolm.text.columns import INDICES, Column, TextTable, asked_column, listed_columns
from nanolm.text.decoding import Reading
from nanolm.text.documents import TABLES
from nanolm.text.labeled import ReadLog, open_each
from nanolm.text.source import TextSource
from nanolm.text.sources import ADDRESSES, STDIN, Sources, find_sources
from nanolm.text.tables import read_table

LONGEST_TEXT = 20_000  # characters of a source or a target
NAMES = (  # of the source and the target column, the most specific first
    ("source", "target"),
    ("src", "tgt|trg"),
    ("instruction", "output|response"),
    ("inputs?", "outputs?|targets?"),
    ("questions?|query|problem", "answers?|solution"),
    ("prompt", "completion|response"),
    ("article|document|text", "summary|highlights"),
    ("spelling|word|graphemes?", "sound|pronunciation|phonemes?|ipa"),
    ("wrong|incorrect|noisy|original", "right|correct|clean|corrected"),
    ("text|sentence", "target|translation"),
    ("x", "y"),
)
LANGUAGE = re.compile(r"[a-z]{2,3}([-_][a-z]{2,4})?", re.I)  # de, deu, de_DE
LANGUAGES = re.compile(
    "arabic|chinese|czech|danish|dutch|english|finnish|french|german|greek|hebrew|hindi|hungarian|"
    "italian|japanese|korean|latin|norwegian|polish|portuguese|romanian|russian|spanish|swedish|"
    "turkish|ukrainian|vietnamese"
)
VARIANT = re.compile(r"\(\d+\)$")  # word(2): another pronunciation of a word
COMMENT = re.compile(r"(^|\s)#\s.*|^;;;.*")
BY_COLUMN = "--source-column X --target-column Y"
FIRST_WORD = "--source-column 1 --target-column 2"


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
    asked = (reading.source_column, reading.target_column)
    tables = any(file.suffix in (*TABLES, ".json") for file in sources.files)
    if len(sources.files) == 2 and not tables and not any(asked):
        yield from _side_by_side(sources.files, reading, report, log)
        return
    for source, stream, lines in open_each(sources.files, reading.encoding, report, log):
        table = read_table(source, stream, lines, any(asked), cautious=True)
        if not table.sample:
            continue
        if table.obvious and len(table.columns()) == 1:
            order = "the rest → the first word" if reading.reverse else "the first word → the rest"
            log.how[source.name] = f"lines; {order}"
            yield from _words_and_rest(table, asked, skipped)
            continue
        table = _with_pair_names(table, asked)
        both = _pair_columns(table, *asked)
        log.how[source.name] = _summary(table, both[::-1] if reading.reverse else both)
        numbers = [column.number for column in both]
        yield from ((cells[numbers[0]], cells[numbers[1]]) for cells in table.rows(numbers))


def look_like_pairs(names: Sequence[str]) -> bool:
    """Whether these local files are pairs rather than labeled or plain text: two files with the
    names of languages, or a table with two columns of texts that hardly repeat."""
    with suppress(NanolmError, OSError):
        if any(name == STDIN or name.startswith(ADDRESSES) for name in names):
            return False
        files = find_sources(names, cache_folder(), lambda *progress: None).files
        if len(files) == 2 and _is_language(files[0].suffix[1:]):
            first, second = (file.suffix[1:] for file in files)
            return first != second and _is_language(second)
        for source, stream, lines in open_each(files, "utf-8", lambda *progress: None, ReadLog()):
            if source.suffix not in (*TABLES, ".json"):
                return False
            table = _with_pair_names(read_table(source, stream, lines, False, True), (None, None))
            named = _by_name(table.columns())
            times = 5 if named else 2  # text and target may also be the names of text and label
            both = named or _by_position(table.columns())
            return bool(both) and not any(column.is_label(times) for column in both)
    return False


def _side_by_side(
    files: list[TextSource], reading: PairReading, report: Report, log: ReadLog
) -> Iterator[tuple[str, str]]:
    """The lines of one file, each with the same line of the other."""
    names_of = [file.name for file in files]
    first, second = (file.suffix[1:] for file in (files[::-1] if reading.reverse else files))
    known = first != second and _is_language(first) and _is_language(second)
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


def _words_and_rest(
    table: TextTable, asked: tuple[str | None, ...], skipped: Counter[str]
) -> Iterator[tuple[str, str]]:
    """The first word of each line and the rest, without comments."""
    name = table.source.name
    if asked != ("1", "2"):
        example = f"such as {abridged(table.sample[0][1][0])!r}"
        raise UsageError(
            f"{name} has lines without columns, {example}. Pass a table with two columns, or "
            "two files whose lines correspond (train.de train.en). If each line is a word followed "
            f"by its target, pass {FIRST_WORD}"
        )
    for number, (line,) in chain(table.sample, table.rest):
        plain = COMMENT.sub("", line).strip()
        if plain != line.strip():
            skipped["comments removed from {}"] += bool(plain)
        if not plain:
            continue
        word, *rest = plain.split(maxsplit=1)
        if not rest:
            raise DataError(f"{name}, line {number:,}: only one word, {abridged(word)!r}")
        yield VARIANT.sub("", word) or word, rest[0]


def _with_pair_names(table: TextTable, asked: tuple[str | None, ...]) -> TextTable:
    """The same table with a header if its first row has the names of such columns, and without if
    it looks like a header, but is a pair of short sentences."""
    separated = " with" in table.kind  # a header, or no header
    if separated and table.names and any(re.search(r"[.!?,]$", name) for name in table.names):
        kind = table.kind.replace("with", "without")
        return replace(table, kind=kind, names=None, sample=[(1, table.names), *table.sample])
    first = table.sample[0][1] if separated and table.names is None else []
    names = [cell.strip().lower() for cell in first]
    if any(name in names for name in asked) or _by_name(
        [Column(n, name, Counter()) for n, name in enumerate(names)]
    ):
        kind = table.kind.replace("without", "with")
        return replace(table, kind=kind, names=first, sample=table.sample[1:])
    return table


def _pair_columns(table: TextTable, source: str | None, target: str | None) -> tuple[Column, ...]:
    """The source and the target column."""
    columns = table.columns()
    both = [
        asked_column(table, columns, source, "--source-column"),
        asked_column(table, columns, target, "--target-column"),
    ]
    if both[0] is both[1] is None:
        both = list(_by_name(columns)) or list(_by_position(columns)) or both
    elif None in both:
        given, pair = both[0] or both[1], _by_name(columns)
        texts = list(pair) if given in pair else [c for c in columns if c.may_be_text()]
        others = [column for column in texts if column != given]
        if len(others) == 1:
            both = [column or others[0] for column in both]
    chosen = [column for column in both if column is not None]
    if len(chosen) < 2:
        there = f"which columns are source and target? Pass {BY_COLUMN}"
        raise UsageError(
            f"{table.source.name} ({table.kind}): {there}; the columns are "
            f"{listed_columns(columns)}"
        )
    if chosen[0] is chosen[1]:
        same = f"{abridged(chosen[0].name)!r} cannot be both source and target"
        raise UsageError(f"{table.source.name}: {same}; pass {BY_COLUMN}")
    return tuple(chosen)


def _by_name(columns: list[Column]) -> tuple[Column, ...]:
    """The columns with the names of a source and a target, or of two languages."""
    leaf = [re.split(r"[.\s]", column.name.lower())[-1] for column in columns]  # a.b: b
    for names in NAMES:
        found = [[c for c in columns if re.fullmatch(name, leaf[c.number])] for name in names]
        if all(len(each) == 1 for each in found):
            return found[0][0], found[1][0]
    texts = [c for c in columns if c.may_be_text() or not c.values]
    for words in (leaf, [re.split("[_-]", name)[-1] for name in leaf]):
        languages = [c for c in texts if _is_language(words[c.number])]
        if len(languages) == 2:
            return languages[0], languages[1]
    return ()


def _is_language(name: str) -> bool:
    code = LANGUAGE.fullmatch(name) is not None and name not in INDICES
    return code or LANGUAGES.fullmatch(name) is not None


def _by_position(columns: list[Column]) -> tuple[Column, ...]:
    """The only two columns, or the only two with texts."""
    texts = columns
    for test in (Column.may_be_text, Column.is_text):
        if len(texts) > 2:
            texts = [c for c in texts if test(c) and c.name.lower() not in INDICES]
    return tuple(texts) if len(texts) == 2 else ()


def _summary(table: TextTable, both: tuple[Column, ...]) -> str:
    named = table.names is not None
    shown = [repr(abridged(c.name)) if named else f"column {c.number + 1}" for c in both]
    others = [abridged(c.name) for c in table.columns() if c not in both and c.filled and named]
    unused = f" (not used: {listed(others, 5)})" if others else ""
    return f"{table.kind}; source is {shown[0]}, target is {shown[1]}{unused}"
