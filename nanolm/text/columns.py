"""Find the text column and the label column of a table.

Names decide first, then contents. If two columns fit equally well, nothing is guessed: an error
shows the columns and asks the user to choose.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from nanolm.errors import DataError, UsageError, did_you_mean
from nanolm.formats import abridged, counted, joined, listed
from nanolm.text.source import TextSource

# Better names first; all names in a group are equally good.
LABEL_NAMES = (
    ("label", "labels"),
    ("class", "category", "sentiment", "target", "polarity", "emotion", "intent", "topic", "y"),
)
TEXT_NAMES = (
    ("text",),
    ("sentence", "content", "review", "tweet", "comment", "body", "message", "document", "phrase"),
    ("question", "utterance", "post", "sms", "headline", "texts", "sentences", "x"),
)
WEAK_LABELS = ("rating", "stars", "score", "tag", "type")  # if there is nothing better
INDICES = {"id", "ids", "idx", "index"}
COLUMN_NAMES = {*chain(*LABEL_NAMES, *TEXT_NAMES), *WEAK_LABELS, *INDICES}

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
WHOLE_NUMBER = re.compile(r"([-+]?\d+)\.0+")

Row = tuple[int, list[str]]  # line number, cells
Fits = Callable[["Column"], bool]


@dataclass
class TextTable:
    source: TextSource
    kind: str
    names: list[str] | None  # of the columns, if there is a header
    sample: list[Row]  # the first rows
    rest: Iterator[Row]
    obvious: bool = False  # each line is a label and a text, or only a text

    def columns(self) -> list["Column"]:
        names = self.names or [str(n + 1) for n in range(len(self.sample[0][1]))]
        rows = [cells for _, cells in self.sample]
        return [
            Column(n, name.strip(), Counter(row[n].strip() for row in rows if n < len(row)))
            for n, name in enumerate(names)
        ]

    def rows(self, needed: list[int]) -> Iterator[list[str]]:
        """The cells of every row; DataError if the number of columns changes."""
        width = len(self.names or self.sample[0][1])
        for number, cells in chain(self.sample, self.rest):
            if len(cells) != width and (len(cells) <= max(needed) or any(cells[width:])):
                where = f"{self.source.name}, line {number:,}"
                cure = "fix or remove that row"
                if len(cells) > width:
                    cure = "quote a text that contains the separator"
                found = counted(len(cells), "column")
                raise DataError(f"{where} has {found}, not {width}; {cure}")
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
    values: Counter[str]  # of the first rows

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
        """Whether most rows have one of a few short, repeating values that are not measurements."""
        few = not self.filled or 2 * self.filled.total() < self.values.total()
        return not few and repeats(self.filled, times) and not self.measured

    @cached_property
    def measured(self) -> bool:
        fractions = any("." in label_value(value) for value in self.filled)
        return self.number_like and fractions and len(self.filled) > 20

    def may_be_label(self) -> bool:
        """A weaker test, for a column with the name of a label column."""
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
    """Turns `1.0` back into 1: pandas writes it so in a column with missing values."""
    whole = WHOLE_NUMBER.fullmatch(value.strip())
    return whole[1] if whole else value.strip()


def repeats(values: Counter[str], times: int) -> bool:
    """Whether the values are few and short, each occurring `times` on average."""
    return max(map(len, values)) <= 50 and times * len(values) <= max(values.total(), 4)


def is_column_name(name: str) -> bool:
    """Whether this is the name of a column rather than a text."""
    words = set(_words(name))
    single = words <= COLUMN_NAMES or re.fullmatch(r"[\w.-]+", name) is not None
    return single and bool(words & COLUMN_NAMES)


def _words(name: str) -> list[str]:
    """The words in a name such as `airline_sentiment` or `reviewText`."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def text_and_label_columns(
    table: TextTable, text_name: str | None, label_name: str | None
) -> tuple[int, int]:
    """The columns of the text and the label. The user can give a name or a number from 1."""
    columns = table.columns()
    if table.obvious and len(columns) == 2 and not (text_name or label_name):
        return 1, 0
    label = asked_column(table, columns, label_name, "--label-column")
    text = asked_column(table, columns, text_name, "--text-column")
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
    """The same for a table without labels, or with a label column of an unambiguous name."""
    columns = table.columns()
    text = asked_column(table, columns, text_name, "--text-column")
    if text is None and table.obvious:
        text = columns[-1]
    elif text is None:
        labels = _named(columns, LABEL_NAMES, Column.may_be_label, Column.may_be_label)
        text = _find_text([c for c in columns if c not in labels[:1]], table)
    label = asked_column(table, columns, label_name, "--label-column")
    if label is None and table.obvious:
        label = columns[0] if len(columns) == 2 else None
    elif label is None:
        with suppress(UsageError):  # several fit
            label = _label_by_name([c for c in columns if c is not text], table)
    return text.number, label.number if label else None


def asked_column(
    table: TextTable, columns: list[Column], name: str | None, option: str
) -> Column | None:
    if name is None:
        return None
    same = [column for column in columns if column.name.lower() == name.lower()]
    if same:
        return next((column for column in same if column.name == name), same[0])
    if name.isdigit() and 1 <= int(name) <= len(columns):
        return columns[int(name) - 1]
    similar = did_you_mean(name, [column.name for column in columns])
    there = f"has the columns {listed_columns(columns)}{similar}"
    raise UsageError(f"{option} {name}: {table.source.name} ({table.kind}) {there}")


def _named(
    columns: list[Column], groups: Sequence[Sequence[str]], exact: Fits, similar: Fits
) -> list[Column]:
    """The columns with the best names: all of the best group that has any."""
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
        why = "no column has just a few values that repeat. Name one with --label-column NAME; "
        why += f"the columns are {listed_columns(table.columns())}"
        if table.obvious:
            why = "its lines neither begin nor end with one. Start each line with __label__NAME, "
            why += "use a table, or pass --label-file FILE if the labels are in another file"
        why += ". To classify unlabeled texts, use `nanolm classify --file`"
        raise UsageError(f"{table.source.name} ({table.kind}) has no labels: {why}")
    return _only(labels, "label", table)


def _find_text(columns: list[Column], table: TextTable) -> Column:
    if table.names and (texts := _named(columns, TEXT_NAMES, Column.may_be_text, Column.is_text)):
        return _only(texts, "text", table)
    texts = [c for c in columns if c.may_be_text()]
    texts = [c for c in texts if c.is_text()] or texts
    texts = [c for c in texts if c.wordy] or texts
    if not texts:
        listed = f"name one of {listed_columns(table.columns())} with --text-column"
        raise UsageError(f"{table.source.name} ({table.kind}): no column looks like text; {listed}")
    longest = max(c.length for c in texts)
    return _only([c for c in texts if 2 * c.length > longest], "text", table)


def _only(columns: list[Column], what: str, table: TextTable) -> Column:
    if len(columns) == 1:
        return columns[0]
    names = joined([repr(abridged(column.name)) for column in columns[:5]])
    cure = f"choose one with --{what}-column. The columns are"
    both = f"{names} could each be the {what}; {cure} {listed_columns(table.columns())}"
    raise UsageError(f"{table.source.name} ({table.kind}): {both}")


def listed_columns(columns: list[Column]) -> str:
    return listed([*map(str, columns)], 30)
