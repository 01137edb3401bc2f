"""A table, and which of its columns is the text and which the label.

By their names first, else by what is in them. Where two fit equally well nothing is guessed: the
user is shown the columns and asked.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from nanolm.errors import DataError, UsageError, did_you_mean
from nanolm.formats import abridged, listed
from nanolm.text.source import TextSource

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
INDICES = {"id", "ids", "idx", "index"}
COLUMN_NAMES = {*chain(*LABEL_NAMES, *TEXT_NAMES), *WEAK_LABELS, *INDICES}

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
WHOLE_NUMBER = re.compile(r"([-+]?\d+)\.0+")

Row = tuple[int, list[str]]  # the number of its line, its cells
Fits = Callable[["Column"], bool]


@dataclass
class TextTable:
    source: TextSource
    kind: str
    names: list[str] | None  # of the columns, where it says them
    sample: list[Row]  # its first rows
    rest: Iterator[Row]
    obvious: bool = False  # lines of a label and a text, or of a text alone

    def columns(self) -> list["Column"]:
        names = self.names or [str(n + 1) for n in range(len(self.sample[0][1]))]
        rows = [cells for _, cells in self.sample]
        return [
            Column(n, name.strip(), Counter(row[n].strip() for row in rows if n < len(row)))
            for n, name in enumerate(names)
        ]

    def rows(self, needed: list[int]) -> Iterator[list[str]]:
        """The cells of every row; a row that is not like the first is refused."""
        width = len(self.names or self.sample[0][1])
        for number, cells in chain(self.sample, self.rest):
            if len(cells) != width and (len(cells) <= max(needed) or any(cells[width:])):
                where = f"{self.source.name}, line {number:,}"
                cure = "mend that row (a separator within a text must be quoted)"
                raise DataError(f"{where} has {len(cells)} columns, not {width}; {cure}")
            yield cells

    def summary(self, text: int, label: int) -> str:
        if self.obvious:
            return self.kind
        names = [abridged(repr(name)) for name in self.names or ()]
        shown = [names[n] if names else f"column {n + 1}" for n in (text, label)]
        return f"{self.kind}; text is {shown[0]}, label is {shown[1]}"


@dataclass(frozen=True)
class Column:
    number: int  # from 0
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
        spaced = sum(count for value, count in self.filled.items() if " " in value)
        return 2 * spaced > self.filled.total()

    @cached_property
    def length(self) -> float:
        total = sum(len(value) * count for value, count in self.filled.items())
        return total / max(1, self.filled.total())

    def is_label(self, times: int) -> bool:
        """Few short values that repeat, in most rows; measurements are none."""
        few = not self.filled or 2 * self.filled.total() < self.values.total()
        return not few and repeats(self.filled, times) and not self.measured

    @cached_property
    def measured(self) -> bool:
        fractions = any("." in label_value(value) for value in self.filled)
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
        return f"{abridged(self.name) or self.number + 1} ({shown!r})"


def label_value(value: str) -> str:
    """`1.0` is what becomes of 1 in a column where some are missing."""
    whole = WHOLE_NUMBER.fullmatch(value.strip())
    return whole[1] if whole else value.strip()


def repeats(values: Counter[str], times: int) -> bool:
    """Few and short, each there `times` on average."""
    return max(map(len, values)) <= 50 and times * len(values) <= max(values.total(), 4)


def is_column_name(name: str) -> bool:
    """Is this a name for a column, and nothing that a text might be?"""
    words = set(_words(name))
    single = words <= COLUMN_NAMES or re.fullmatch(r"[\w.-]+", name) is not None
    return single and bool(words & COLUMN_NAMES)


def _words(name: str) -> list[str]:
    """The words that a name is made of: `airline_sentiment`, `reviewText`."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def text_and_label_columns(
    table: TextTable, text_name: str | None, label_name: str | None
) -> tuple[int, int]:
    """Where the text and the label stand; either may be named, or numbered from 1."""
    columns = table.columns()
    if table.obvious and len(columns) == 2 and not (text_name or label_name):
        return 1, 0
    label = _asked(table, columns, label_name, "--label-column")
    text = _asked(table, columns, text_name, "--text-column")
    label = label or _label_by_name([c for c in columns if c is not text], table)
    text = text or _find_text([c for c in columns if c is not label], table)
    label = label or _label_by_content([c for c in columns if c is not text], table)
    if text is label:
        raise UsageError(
            f"{table.source.name}: {abridged(text.name)!r} cannot be both text and label"
        )
    return text.number, label.number


def text_and_maybe_label(
    table: TextTable, text_name: str | None, label_name: str | None
) -> tuple[int, int | None]:
    """The same for a table that need not have labels, unless their name is clear enough."""
    columns = table.columns()
    text = _asked(table, columns, text_name, "--text-column")
    if text is None and table.obvious:
        text = columns[-1]
    elif text is None:
        labels = _named(columns, LABEL_NAMES, Column.may_be_label, Column.may_be_label)
        text = _find_text([c for c in columns if c not in labels[:1]], table)
    label = _asked(table, columns, label_name, "--label-column")
    if label is None and table.obvious:
        label = columns[0] if len(columns) == 2 else None
    elif label is None:
        with suppress(UsageError):  # several may be meant
            label = _label_by_name([c for c in columns if c is not text], table)
    return text.number, label.number if label else None


def _asked(table: TextTable, columns: list[Column], name: str | None, option: str) -> Column | None:
    if name is None:
        return None
    same = [column for column in columns if column.name.lower() == name.lower()]
    if same:
        return next((column for column in same if column.name == name), same[0])
    if name.isdigit() and 1 <= int(name) <= len(columns):
        return columns[int(name) - 1]
    there = f"has the columns {_listed(columns)}{did_you_mean(name, [c.name for c in columns])}"
    raise UsageError(f"{option} {name}: {table.source.name} ({table.kind}) {there}")


def _named(
    columns: list[Column], groups: Sequence[Sequence[str]], exact: Fits, similar: Fits
) -> list[Column]:
    """The columns with the best name for what is sought: all that are called as well."""
    words = set(chain(*groups))
    tests: list[Fits] = [
        *(lambda c, g=group: c.name.lower() in g and exact(c) for group in groups),
        lambda c: bool(words.intersection(_words(c.name)[-1:])) and similar(c),
        lambda c: bool(words.intersection(_words(c.name))) and similar(c),
    ]
    return next((fitting for test in tests if (fitting := list(filter(test, columns)))), [])


def _label_by_name(columns: list[Column], table: TextTable) -> Column | None:
    if table.names is None:
        return None
    labels = _named(columns, LABEL_NAMES, Column.may_be_label, lambda column: column.is_label(2))
    labels = labels or [c for c in columns if c.name.lower() in WEAK_LABELS and c.is_label(2)]
    return _only(labels, "label", table) if labels else None


def _label_by_content(columns: list[Column], table: TextTable) -> Column:
    labels = [c for c in columns if c.is_label(2) and not INDICES.intersection(_words(c.name)[-1:])]
    labels = [c for c in labels if len(c.filled) > 1] or labels
    if not labels:
        why = "no column has few values that repeat (--label-column NAME if one is meant); "
        why += f"its columns are {_listed(table.columns())}"
        if table.obvious:
            why = "its lines neither begin nor end with one. Begin each with __label__NAME, make "
            why += "it a table, or give --label-file FILE if they are elsewhere"
        why += ". Texts without labels are for `nanolm classify --file`"
        raise UsageError(f"{table.source.name} ({table.kind}) has no labels: {why}")
    return _only(labels, "label", table)


def _find_text(columns: list[Column], table: TextTable) -> Column:
    if table.names and (texts := _named(columns, TEXT_NAMES, Column.may_be_text, Column.is_text)):
        return _only(texts, "text", table)
    texts = [c for c in columns if c.may_be_text()]
    texts = [c for c in texts if c.is_text()] or texts
    texts = [c for c in texts if c.wordy] or texts
    if not texts:
        listed = f"its columns are {_listed(table.columns())}; name one with --text-column"
        raise UsageError(f"{table.source.name} ({table.kind}): no column looks like text; {listed}")
    longest = max(c.length for c in texts)
    return _only([c for c in texts if 2 * c.length > longest], "text", table)


def _only(columns: list[Column], what: str, table: TextTable) -> Column:
    if len(columns) == 1:
        return columns[0]
    names = " and ".join(repr(abridged(column.name)) for column in columns[:5])
    cure = "say which with --text-column and --label-column. Its columns are"
    both = f"{names} may each be the {what}; {cure} {_listed(table.columns())}"
    raise UsageError(f"{table.source.name} ({table.kind}): {both}")


def _listed(columns: list[Column]) -> str:
    return listed([*map(str, columns)], 30)
