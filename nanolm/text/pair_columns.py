"""Find the source and the target column of a table of pairs, and whether it has a header.

    >>> table = with_pair_names(read_table(...), (None, None))
    >>> source, target = pair_columns(table, None, None)

As in `columns`, names decide first, then contents, and nothing is guessed.
"""

import re
from collections import Counter
from dataclasses import replace

from nanolm.errors import UsageError
from nanolm.formats import abridged, listed
from nanolm.text.columns import INDICES, Column, Fits, TextTable, asked_column, listed_columns

Asked = tuple[str | None, ...]  # the names or numbers of the columns that were given
INSTRUCTION = "instruction|prompt"
NAMES = (  # of the source and the target column, the most specific first
    ("source", "target"),
    ("src", "tgt|trg"),
    (INSTRUCTION, "output|response|completion"),
    ("question", "query|sql"),
    ("inputs?", "outputs?|targets?"),
    ("questions?|query|problem", "answers?|solution"),
    ("article|document|dialogue|text", "summary|highlights"),
    ("context", "response|reply"),
    ("spelling|word|graphemes?", "sound|pronunciation|phonemes?|ipa"),
    ("wrong|incorrect|noisy|original", "right|correct|clean|corrected"),
    ("text|sentence", "target|translation"),
    ("x", "y"),
)
CODES = (  # ISO 639: the languages of the usual collections
    " af ar az be bg bn bs ca cs cy da de el en eo es et eu fa fi fr ga gl gu he hi hr hu hy id "
    "is it ja ka kk km kn ko ky la lb lo lt lv mg mk ml mn mr ms mt my nb ne nl nn no pa pl ps "
    "pt ro ru si sk sl so sq sr sv sw ta te tg th tl tr uk ur uz vi xh yi yo zh zu ara ben bul "
    "ces cmn dan deu ell eng est fas fin fra heb hin hrv hun hye ind isl ita jpn kat kor lat "
    "lav lit nld nob nor pes pol por ron rus slk slv spa srp swe tam tel tha tur ukr urd vie "
    "yue zho "
)
CODE = re.compile(r"([a-z]{2,3})([-_][a-z]{2,4})?", re.I)  # de, deu, de_DE, deu_Latn
LANGUAGES = re.compile(
    "arabic|chinese|czech|danish|dutch|english|finnish|french|german|greek|hebrew|hindi|hungarian|"
    "italian|japanese|korean|latin|norwegian|polish|portuguese|romanian|russian|spanish|swedish|"
    "turkish|ukrainian|vietnamese|deutsch|englisch|französisch|spanisch|italienisch|russisch|"
    "allemand|anglais|français|espagnol|italien|russe|inglés|español|francés|alemán"
)
BY_COLUMN = "--source-column X --target-column Y"
FIRST_WORD = "--source-column 1 --target-column 2"
SENTENCE = re.compile(r"(?!n[or]\.$).*[.!?,]", re.I)
CREDITS = re.compile(r"CC[ -]?(BY|0)|https?://")  # how cells begin that are neither side


def with_pair_names(table: TextTable, asked: Asked) -> TextTable:
    """The same table with a header if its first row has the names of such columns, and without if
    it looks like a header, but is a pair of short sentences."""
    if " with" not in table.kind:  # neither with a header nor without
        return table
    first = table.names or [cell.strip() for cell in table.sample[0][1]]
    known = _known_names(first, asked)
    if table.names:
        by_number = all(name and name.isdigit() for name in asked)
        certain = known or any(column.number_like for column in table.columns())
        doubted = by_number or "tsv" in table.kind  # tables of words rarely have a header
        if any(map(SENTENCE.fullmatch, first)) or (doubted and not certain):
            kind = table.kind.replace("with", "without")
            return replace(table, kind=kind, names=None, sample=[(1, first), *table.sample])
    elif known and table.sample[1:]:
        below = replace(table, sample=table.sample[1:])
        if not any(first[c.number] in c.values for c in below.columns()):
            return replace(below, kind=table.kind.replace("without", "with"), names=first)
    return table


def header_note(found: TextTable, table: TextTable, asked: Asked) -> list[str]:
    """What to do if the first row was taken for a header, or for a pair, by mistake; `found` is the
    table as it was read."""
    names = found.names or table.names or []
    certain = any(column.number_like for column in found.columns())
    if " with" not in table.kind or certain or any(asked) or _known_names(names, asked):
        return []
    row = f"{table.source.name}: the first row ({' and '.join(map(repr, names[:2]))})"
    if table.names:
        return [f"{row} is the header; if it is a pair, pass {FIRST_WORD}"]
    if names and not any(map(SENTENCE.fullmatch, names)):
        return [f"{row} is a pair; if it is the header, pass {BY_COLUMN}"]
    return []


def _known_names(names: list[str], asked: Asked) -> bool:
    """Whether these are names of columns for certain."""
    lower = [name.lower() for name in names]
    columns = [Column(number, name, Counter()) for number, name in enumerate(lower)]
    given = [name.lower() for name in asked if name and not name.isdigit()]
    return any(name in lower for name in given) or bool(by_name(columns))


def pair_columns(table: TextTable, source: str | None, target: str | None) -> tuple[Column, ...]:
    """The source and the target column."""
    columns = table.columns()
    both = [
        asked_column(table, columns, source, "--source-column"),
        asked_column(table, columns, target, "--target-column"),
    ]
    if both[0] is both[1] is None:
        both = list(by_name(columns)) or list(by_position(columns)) or both
    elif None in both:
        given, pair = both[0] or both[1], by_name(columns)
        texts = list(pair) if given in pair else list(filter(Column.may_be_text, _sides(columns)))
        others = [column for column in texts if column != given]
        if len(others) == 1:
            both = [column or others[0] for column in both]
    chosen = [column for column in both if column is not None]
    if len(chosen) < 2:
        options = BY_COLUMN if table.names else FIRST_WORD
        there = f"which columns are source and target? Pass {options}; the columns are "
        there += listed_columns(columns) if columns else "lists, which are not read"
        raise UsageError(f"{table.source.name} ({table.kind}): {there}")
    if chosen[0] is chosen[1]:
        same = f"{abridged(chosen[0].name)!r} cannot be both source and target"
        raise UsageError(f"{table.source.name}: {same}; pass {BY_COLUMN}")
    return tuple(chosen)


def input_columns(table: TextTable, source: Column) -> list[Column]:
    """The column with what an instruction refers to, if there is one."""
    if not re.fullmatch(INSTRUCTION, source.name, re.I):
        return []
    return [c for c in table.columns() if re.fullmatch("input|context", c.name, re.I) and c.filled]


def by_name(columns: list[Column]) -> tuple[Column, ...]:
    """The columns with the names of a source and a target, or of two languages."""
    whole = [column.name.lower().removesuffix(".text") for column in columns]  # answers.text
    leaf = [re.split(r"[.\s]", name)[-1] for name in whole]  # a.b: b
    for names in NAMES:
        found = [[c for c in columns if re.fullmatch(name, leaf[c.number])] for name in names]
        if all(len(each) == 1 for each in found):
            return found[0][0], found[1][0]
    texts = [c for c in columns if c.may_be_text() or not c.values]
    for words in (leaf, [re.split("[_-]", name)[-1] for name in leaf], whole):
        languages = [c for c in texts if _is_language(words[c.number])]
        if len(languages) == 2:
            return languages[0], languages[1]
    return ()


def by_position(columns: list[Column]) -> tuple[Column, ...]:
    """The only two columns, or the only two with texts; without names, with texts of words."""
    texts, tests = _sides(columns), list[Fits]([Column.may_be_text, Column.is_text])
    if all(column.name.isdigit() for column in columns):
        tests.append(lambda column: column.wordy)
    for test in tests:
        if len(texts) > 2:
            texts = list(filter(test, texts))
    return tuple(texts) if len(texts) == 2 else ()


def _sides(columns: list[Column]) -> list[Column]:
    """Without the columns that are certainly neither source nor target."""
    return [
        column
        for column in columns
        if column.name.lower() not in INDICES
        and not (column.filled and all(map(CREDITS.match, column.filled)))
    ]


def _is_language(name: str) -> bool:
    code = CODE.fullmatch(name)
    if code and f" {code[1].lower()} " in CODES:
        return name not in INDICES
    return LANGUAGES.match(name) is not None and len(name.split()) <= 2  # "English sentences"


def is_side(suffix: str) -> bool:
    """Whether a file of lines with this suffix is one side of pairs: train.de, train.src."""
    return suffix in ("src", "tgt", "trg") or _is_language(suffix)


def summary(table: TextTable, both: tuple[Column, ...], more: list[Column]) -> str:
    named = table.names is not None
    shown = [repr(abridged(c.name)) if named else f"column {c.number + 1}" for c in both]
    for column in more:
        place = 0 if re.fullmatch(INSTRUCTION, both[0].name, re.I) else 1
        shown[place] += f" and {abridged(column.name)!r}"
    used = (*both, *more)
    others = [
        abridged(c.name) if named else f"column {c.number + 1}"
        for c in table.columns()
        if c not in used and c.filled and c.name
    ]
    unused = f" (not used: {listed(others, 5)})" if others else ""
    return f"{table.kind}; source is {shown[0]}, target is {shown[1]}{unused}"
