"""Read JSON as rows: JSON lines, and `.json` files with a list of objects or strings.

    >>> for line, row in json_objects(source, stream, iter(['[{"text": "a"},', '{"text": "b"}]'])):
    ...     json_text(row, f"line {line}", None)

A list is read one value at a time, however long it is.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import IO, Any

from nanolm.errors import DataError
from nanolm.formats import listed
from nanolm.text.bounds import MOST_NESTED, ROW_BYTES, ExpansionLimit, always_allowed
from nanolm.text.decoding import Reading, decoded, lines
from nanolm.text.source import TextSource

Rows = Iterator[tuple[int, Any]]  # (line number, value)
SPACE = re.compile(r"[ \t\r\n]*")
CUT_OFF = 16  # characters: an error so close to the end may be due to a value that is cut off


def json_lines(source: TextSource, stream: IO[bytes], reading: Reading) -> Iterator[str]:
    text_lines = lines(decoded(source, stream, reading.encoding))
    return texts_of(source, json_rows(source, stream, text_lines), reading)


def json_list(source: TextSource, stream: IO[bytes], reading: Reading) -> Iterator[str]:
    blocks = decoded(source, stream, reading.encoding)
    return texts_of(source, JsonValues(source, blocks).rows(), reading)


def texts_of(source: TextSource, rows: Rows, reading: Reading) -> Iterator[str]:
    for number, row in rows:
        place = f"{source.name}, line {number:,}"
        yield row if isinstance(row, str) else json_text(row, place, reading.text_field)


def json_rows(source: TextSource, stream: IO[bytes], lines: Iterable[str]) -> Rows:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if sum(map(line.count, "[{")) > MOST_NESTED and depth(row) > MOST_NESTED:
                raise RecursionError
        except RecursionError:
            deep = f"is nested more than {MOST_NESTED} levels deep; remove or flatten that line"
            raise DataError(f"{source.name}, line {number:,} {deep}") from None
        except ValueError as error:
            wrong = f"line {number:,} is not valid JSON ({error}); fix or remove that line"
            raise DataError(f"{source.name}, {wrong}") from None
        yield number, row


def json_objects(source: TextSource, stream: IO[bytes], lines: Iterable[str]) -> Rows:
    """The objects in a JSON list, which may be in an object, or in JSON lines."""
    return JsonValues(source, (f"{line}\n" for line in lines)).rows()


def is_json_table(source: TextSource, reading: Reading) -> bool:
    """Whether a `.json` file has rows of text, judged by its first value: an element of a list, or
    a JSON line. A list in an object may be anything, unless it has the text in a known field."""
    with suppress(DataError, OSError), source.open() as stream:
        values = JsonValues(source, decoded(source, stream, reading.encoding))
        if values.peek() == "[":
            return isinstance(next(values.elements(), (0, None))[1], dict | str)
        first = values.read()
        if isinstance(first, dict) and values.peek() != "{":
            json_text((inner_table(first) or [first])[0], "", reading.text_field or "text")
        return isinstance(first, dict)
    return False


def inner_table(value: Any) -> list[Any] | None:
    """The list of objects in an object, if there is exactly one."""
    inside = value.values() if isinstance(value, dict) else ()
    lists = [each for each in inside if isinstance(each, list) and each]
    tables = [each for each in lists if all(isinstance(row, dict) for row in each)]
    return tables[0] if len(tables) == 1 else None


class JsonValues:
    """The values in a text that is read block by block."""

    def __init__(self, source: TextSource, texts: Iterable[str]) -> None:
        self.source, self.texts = source, iter(texts)
        self.text, self.place, self.line = "", 0, 1
        self.decoder = json.JSONDecoder()
        self.limit = ExpansionLimit(source.name, source.size())

    def peek(self) -> str:
        """The next character that is not white space; nothing at the end."""
        while True:
            self.move(SPACE.match(self.text, self.place).end())  # type: ignore[union-attr]
            if self.place < len(self.text) or not self.more(1):
                return self.text[self.place : self.place + 1]

    def move(self, place: int) -> None:
        self.line += self.text.count("\n", self.place, place)
        self.place = place

    def more(self, least: int) -> bool:
        """Read at least `least` more characters; return whether there were any."""
        parts, count = [self.text[self.place :]], 0
        while count < least and (block := next(self.texts, None)) is not None:
            parts.append(block)
            count += len(block)
        self.text, self.place = "".join(parts), 0
        return count > 0

    def rows(self) -> Rows:
        if self.peek() == "[":
            yield from self.elements()
            return
        line, first = self.line, self.read()
        if not self.peek():
            yield from ((line, row) for row in inner_table(first) or [first])
            return
        yield line, first
        while self.peek():
            yield self.line, self.read()

    def elements(self) -> Rows:
        """The values of the list that begins here, which must be all there is."""
        self.move(self.place + 1)
        after = "]" if self.peek() == "]" else ","
        while after == ",":
            self.peek()
            yield self.line, self.read()
            after = self.peek()
            if after not in (",", "]"):
                raise self.invalid("Expecting ',' or ']'")
            self.move(self.place + (after == ","))
        self.move(self.place + 1)
        if self.peek():
            raise self.invalid("Extra data")

    def read(self) -> Any:
        """The value that begins here."""
        while True:
            size = len(self.text) - self.place
            try:
                value, end = self.decoder.raw_decode(self.text, self.place)
                if end == len(self.text) and self.more(1):  # 12 may be the beginning of 123
                    continue
                if depth(value) > MOST_NESTED:
                    raise RecursionError
                self.limit.add(self.memory(end))
                self.move(end)
                return value
            except RecursionError:
                deep = f"is nested more than {MOST_NESTED} levels deep; flatten it"
                raise DataError(f"{self.source.name}, line {self.line:,} {deep}") from None
            except ValueError as error:
                where = getattr(error, "pos", self.place) - self.place  # none for long numbers
                cut_off = size - where <= CUT_OFF or "Unterminated string" in str(error)
                if not cut_off or not self.more(size + 1):
                    self.move(self.place + where)
                    raise self.invalid(getattr(error, "msg", str(error))) from None
            self.limit.check(self.limit.total + self.memory(len(self.text)))
            if size > always_allowed():
                raise DataError(
                    f"{self.source.name}, line {self.line:,}: a value of more than {size:,} "
                    "characters; convert the file to JSON lines (.jsonl)"
                )

    def memory(self, end: int) -> int:
        """For the values up to `end`: each takes some, however short it is in the file."""
        return ROW_BYTES * sum(self.text.count(each, self.place, end) for each in ",[{")

    def invalid(self, why: str) -> DataError:
        wrong = f"line {self.line:,} is not valid JSON ({why}); fix that line"
        return DataError(f"{self.source.name}, {wrong}")


def depth(value: Any) -> int:
    level, count = [value], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        parts = (each.values() if isinstance(each, dict) else each for each in level)
        level, count = [*chain.from_iterable(parts)], count + 1
    return count


def json_text(row: Any, place: str, field: str | None) -> str:
    """The text of one object: its field `text`, or the value at `field`."""
    value = row
    for name in (field or "text").split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, str):
        return value
    if not isinstance(row, dict):
        raise DataError(f"{place}: must be a JSON object or a string")
    texts = [path for path, value in leaves(row) if isinstance(value, str)]
    if field is None and len(texts) == 1 and "text" not in row:
        return json_text(row, place, texts[0])
    hint = (
        f"choose one of {listed(texts)} with --text-column NAME"
        if texts
        else "none of its fields holds text"
    )
    raise DataError(f"{place}: no text field {field or 'text'!r}; {hint}")


def leaves(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values in an object and its nested objects, each with its dotted path."""
    waiting: list[tuple[str, Any]] = [("", row)]  # no recursion: Arrow may nest deeply
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(f"{path}{name}.", inner) for name, inner in reversed(value.items())]
        else:
            yield path[:-1], value
