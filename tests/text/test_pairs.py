"""Pairs of texts in every form."""

import gzip
import io
import json
import lzma
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from nanolm.errors import DataError, NanolmError, UsageError
from nanolm.text.pairs import PairReading, Pairs, read_pairs
from nanolm.text.sources import EMBEDDED_PAIRS

ROWS = [
    ("Das ist ein Haus.", "This is a house."),
    ("Wo ist der Hund?", "Where is the dog?"),
    ("Er schläft, wie immer.", "He is asleep, as always."),
]


def quiet(*_: object) -> None:
    pass


def written(folder: Path, name: str, data: bytes | str) -> str:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(file)


def read(*names: str, **how: str | bool) -> Pairs:
    return read_pairs(names, PairReading(**how), quiet)  # type: ignore[arg-type]


def rows(*names: str, **how: str | bool) -> list[tuple[str, str]]:
    pairs = read(*names, **how)
    return list(zip(pairs.sources, pairs.targets, strict=True))


def table(form: str, start: str = "") -> str:
    return start + "".join(form.format(*row, n) for n, row in enumerate(ROWS))


CREDIT = "CC-BY 2.0 (France) Attribution: tatoeba.org #{2}"


@pytest.mark.parametrize(
    ("name", "form", "start", "how"),
    [
        ("a.tsv", "{0}\t{1}\n", "", "tsv without a header; source is column 1, target is column 2"),
        ("a.tsv", "{0}\t{1}\r\n", "\ufeffde\ten\r\n", "source is 'de', target is 'en'"),
        ("a.txt", "{0}\t{1}\n", "", "tsv without a header"),
        ("a.csv", '"{1}","{0}"\n', "output,input\n", "source is 'input', target is 'output'"),
        ("a.csv", '{2},"{0}","{1}"\n', "id,german,english\n", "(not used: id)"),
        ("a.csv", '{2},"{0}","{1}"\n', "n,text_de,text_en\n", "source is 'text_de'"),
        ("a.csv", '{2};"{0}";"{1}"\n', "nr;zin;vertaling\n", "source is 'zin'"),
        ("a.tsv", "{2}\t{1}\t{0}\n", "id\ttarget\tsource\n", "target is 'target'"),
        ("a.tsv", "{0}\t{1}\t{2}\n", "", "target is column 2"),
        ("deu.txt", "{0}\t{1}\t" + CREDIT + "\n", "", "(not used: column 3)"),
        ("links.tsv", "https://x.org/{2}\t{0}\t{1}\t0.8\n", "", "source is column 2"),
        ("tatoeba.tsv", "1{2}\tdeu\t{0}\t7{2}\teng\t{1}\n", "", "tsv without a header"),
        ("excel.csv", '"{0}";"{1}"\n', "sep=;\nsource;target\n", "source is 'source'"),
        ("quoted.tsv", '"{0}"\t"{1}"\n', '"de"\t"en"\n', "quoted tsv with a header"),
        ("moses.txt", "{0} ||| {1}\n", "", "separated by |||"),
        ("topics.csv", '{2},"{0}","{1}",x\n', "No.,German,English,Topic\n", "'German'"),
        ("kaggle.csv", '"{0}","{1}"\n', "German words/sentences,English words\n", "with a header"),
        ("hindi.csv", '"{0}","{1}",ab{2}\n', "de,en,key\n", "(not used: key)"),
    ],
)
def test_tables(name: str, form: str, start: str, how: str, tmp_path: Path) -> None:
    file = written(tmp_path, name, table(form, start))
    assert rows(file) == ROWS
    assert how in read(file).how
    assert read(file).notes == []
    assert read(file).examples[0] == "  Das ist ein Haus. → This is a house."
    assert rows(file, reverse=True) == [row[::-1] for row in ROWS]
    assert len(read_pairs([file], PairReading(), quiet, limit=2)) == 2


WORDS = [("dog", "Hund"), ("to go", "gehen"), ("good morning", "guten Morgen")]


def test_the_first_pair_is_not_a_header(tmp_path: Path) -> None:
    for name, pairs in {
        "words.tsv": WORDS,
        "typos.tsv": [("teh", "the"), ("recieve", "receive"), ("adn", "and")],
        "short.tsv": [("Go", "Geh"), *ROWS],
        "zh.txt": [("你好", "Hello"), ("我喜欢喝茶。", "I like tea.")],
    }.items():
        file = written(tmp_path, name, "".join(f"{a}\t{b}\n" for a, b in pairs))
        assert rows(file) == pairs
        if name != "typos.tsv":
            assert f"({pairs[0][0]!r} and {pairs[0][1]!r}) is a pair; if" in read(file).notes[0]
    file = written(tmp_path, "words.csv", "".join(f"{a},{b}\n" for a, b in WORDS))
    assert "('dog' and 'Hund') is the header" in read(file).notes[0]
    assert rows(file, source_column="1", target_column="2") == WORDS


def test_instructions_and_answers(tmp_path: Path) -> None:
    objects = [
        {"instruction": "Translate.", "input": a * (n > 0), "output": b}
        for n, (a, b) in enumerate(ROWS)
    ]
    file = written(tmp_path, "a.json", json.dumps({"version": "1", "data": objects}))
    assert read(file).sources == ["Translate.", *(f"Translate.\n{a}" for a, _ in ROWS[1:])]
    assert "source is 'instruction' and 'input', target is 'output'" in read(file).how
    squad = [
        {"context": f"{b} {a}", "question": a, "answers": {"text": [b], "answer_start": [0]}}
        for a, b in ROWS
    ]
    assert rows(written(tmp_path, "b.json", json.dumps(squad, indent=1))) == ROWS
    queries = [{"db": f"d{n}", "query": b, "question": a} for n, (a, b) in enumerate(ROWS)]
    assert rows(written(tmp_path, "c.jsonl", "\n".join(map(json.dumps, queries)))) == ROWS
    assert rows(written(tmp_path, "d.json", json.dumps(ROWS))) == ROWS
    chat = [{"messages": [{"role": "user", "content": a}]} for a, _ in ROWS]
    with pytest.raises(UsageError, match="lists, which are not read"):
        read(written(tmp_path, "e.json", json.dumps(chat)))


def test_lines_that_do_not_fit(tmp_path: Path) -> None:
    whole = table("{0}\t{1}\n")
    for line, found in (("no tab", "1 column,"), ("a\tb\tc", "3 columns,")):
        file = written(tmp_path, "a.txt", f"{whole}{line}\n")
        with pytest.raises(DataError, match=f"line 4 has {found} but most lines have 2"):
            read(file, source_column="1", target_column="2")
    file = written(tmp_path, "a.tsv", f"{whole}no tab\n")
    with pytest.raises(DataError, match="line 4 has 1 column, not 2; fix or remove"):
        read(file)
    numbered = "".join(f"{n % 3 + 1} Mary moved to the kitchen.\n" for n in range(30))
    with pytest.raises(UsageError, match="lines without columns"):
        read(written(tmp_path, "babi.txt", numbered))
    xml = [written(tmp_path, f"a.{side}.sgm", "<seg>x</seg>\n") for side in ("de", "en")]
    with pytest.raises(UsageError, match=r"cannot be read from \.sgm files; convert"):
        read(*xml)
    sides = [written(tmp_path, f"{name}.{side}", "x\n") for name in "ab" for side in ("de", "en")]
    with pytest.raises(UsageError, match="pass the two that belong together"):
        read(*sides)
    with pytest.raises(UsageError, match="both source and target"):
        read(sides[0], sides[0])
    two = [written(tmp_path, f"{name}.txt", whole) for name in "xy"]
    assert rows(*two) == ROWS + ROWS
    assert "pairs of 2 files" in read(*two).notes[0]


def test_marks_of_utf_16(tmp_path: Path) -> None:
    text = table("{0}\t{1}\n", "source\ttarget\n")
    file = written(tmp_path, "a.txt", b"\xff\xfe" + text.encode("utf-16-le"))
    with pytest.raises(DataError, match=r"try --encoding utf-16$"):
        read(file)
    assert rows(file, encoding="utf-16") == rows(file, encoding="utf-16-le") == ROWS


def test_objects(tmp_path: Path) -> None:
    objects = [{"id": f"r{n}", "translation": {"de": a, "en": b}} for n, (a, b) in enumerate(ROWS)]
    lines = written(tmp_path, "a.jsonl", "\n".join(map(json.dumps, objects)))
    assert rows(lines) == ROWS
    assert "source is 'translation.de', target is 'translation.en'" in read(lines).how
    assert rows(lines, source_column="translation.en", target_column="id")[0][1] == "r0"
    assert rows(written(tmp_path, "a.json", json.dumps(objects, indent=4))) == ROWS
    assert rows(written(tmp_path, "b.json", "\n".join(map(json.dumps, objects)))) == ROWS
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(objects), buffer)
    assert rows(written(tmp_path, "a.parquet", buffer.getvalue())) == ROWS


@pytest.mark.parametrize("text", ["[{]", "[" * 100_000, '[{"a":' * 200 + "1" + "}]" * 200, "[1]"])
def test_a_list_that_is_not_one_of_objects(text: str, tmp_path: Path) -> None:
    file = written(tmp_path, "a.json", text)
    with pytest.raises(DataError, match=r"not valid JSON|nested|must be a JSON object"):
        read(file)


def test_two_files_line_by_line(tmp_path: Path) -> None:
    german = written(tmp_path, "train.de.gz", gzip.compress(table("{0} \r\n").encode()))
    english = written(tmp_path, "train.en.xz", lzma.compress(table("{1}\n").encode()))
    assert rows(german, english) == ROWS
    assert read(german, english).how.endswith("line by line, de → en")
    assert read(german, english, reverse=True).how.endswith("line by line, en → de")
    assert rows(str(tmp_path)) == ROWS  # a folder with these two files
    longer = written(tmp_path, "longer.en", table("{1}\n") + "\n\nMore.\nAnd more.\n")
    with pytest.raises(DataError, match=r"train.de.gz ends after line 3, but .*longer.en has 2 mo"):
        read(german, longer)
    blank = written(tmp_path, "blank.en", table("{1}\n", "\n") + "\n")
    shifted = written(tmp_path, "shifted.de", table("{0}\n", "\n"))
    assert rows(shifted, blank) == ROWS
    assert read(shifted, blank).notes == ["1 pair skipped: both sides are empty"]


def test_a_pronunciation_dictionary(tmp_path: Path) -> None:
    text = ";;; sounds\ncat K AE T\ncat(2)  K AH T\naalen AA L AH N # place, german\n#hash HH\n"
    file = written(tmp_path, "cmu.dict.xz", lzma.compress(text.encode()))
    with pytest.raises(UsageError, match="--source-column 1 --target-column 2"):
        read(file)
    pairs = read(file, source_column="1", target_column="2")
    assert pairs.sources == ["cat", "cat", "aalen", "#hash"]
    assert pairs.targets == ["K AE T", "K AH T", "AA L AH N", "HH"]
    assert pairs.how == "lines; the first word → the rest"
    assert pairs.notes == ["comments removed from 1 pair"]
    alone = written(tmp_path, "alone.dict", "cat K AE T\ndog\n")
    with pytest.raises(DataError, match="line 2: only one word, 'dog'"):
        read(alone, source_column="1", target_column="2")


@pytest.mark.parametrize("count", [1, 2, 50])
def test_one_json_object_is_no_list_of_pairs(tmp_path: Path, count: int) -> None:
    flat = {f"word {n}": f"Wort {n}" for n in range(count)}
    with pytest.raises(UsageError, match=r"a\.json is one JSON object; write .*\[{.source.: "):
        read(written(tmp_path, "a.json", json.dumps(flat)))
    one = written(tmp_path, "b.json", '{"source": "a", "target": "b"}')
    assert rows(one) == [("a", "b")]


def test_columns_are_not_guessed(tmp_path: Path) -> None:
    file = written(tmp_path, "a.csv", "name,city,motto\nJo Li,Oslo,be good\nAl Bo,Rome,be kind\n")
    with pytest.raises(UsageError, match=r"Pass --source-column X.* city \('Oslo'\)"):
        read(file)
    assert rows(file, source_column="city", target_column="3")[1] == ("Rome", "be kind")
    with pytest.raises(UsageError, match="did you mean motto"):
        read(file, source_column="city", target_column="moto")
    with pytest.raises(UsageError, match="cannot be both source and target"):
        read(file, source_column="city", target_column="city")
    both = written(tmp_path, "b.csv", "city,motto\nOslo,be good\nRome,be kind\n")
    assert rows(both, target_column="city") == [("be good", "Oslo"), ("be kind", "Rome")]


def test_short_sentences_are_no_header(tmp_path: Path) -> None:
    file = written(tmp_path, "a.tsv", "Go.\tGeh.\nI am here.\tIch bin hier.\n")
    assert rows(file)[0] == ("Go.", "Geh.")
    words = written(tmp_path, "b.tsv", "spelling\tsound\ncat\tket\ndog\tdok\n")
    assert rows(words) == [("cat", "ket"), ("dog", "dok")]


def test_notes(tmp_path: Path) -> None:
    cells = "5 + 5\t10\n\t3\n7 +\t\n5 + 5\t10\n" + "x" * 20_001 + "\t1\n"
    pairs = read(written(tmp_path, "a.tsv", cells))
    assert pairs.sources == ["5 + 5", "5 + 5"]
    assert pairs.notes == [
        "1 pair skipped: the source is empty",
        "1 pair skipped: the target is empty",
        "1 pair of more than 20,000 characters skipped",
        "1 duplicate pair found",
    ]
    with pytest.raises(DataError, match="no pairs of a source and a target"):
        read(written(tmp_path, "empty.tsv", "\t\n\t\n"))
    latin = "é".encode() * 50 + b"\xe9 a\tb c\nd e\tf g\n"
    assert read(written(tmp_path, "b.tsv", latin)).notes[0].startswith("1 invalid UTF-8 character")


def test_an_expansion_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOLM_MAX_UNPACKED", "100000")
    bomb = written(tmp_path, "a.tsv.gz", gzip.compress(b"a\tb\n" * 2_000_000))
    with pytest.raises(DataError, match="NANOLM_MAX_UNPACKED"):
        read(bomb)
    objects = written(tmp_path, "a.json.gz", gzip.compress(b"[" + b"{}," * 20_000 + b"{}]"))
    with pytest.raises(DataError, match="NANOLM_MAX_UNPACKED"):
        read(objects)


@pytest.mark.parametrize("name", EMBEDDED_PAIRS)
def test_embedded(name: str) -> None:
    pairs = read(f"embedded:{name}")
    assert len(pairs) >= 10_000
    assert pairs.how == "tsv with a header; source is 'source', target is 'target'"
    assert pairs.notes == []


@given(st.binary(max_size=200), st.sampled_from(["a.tsv", "a.csv", "a.json", "a.jsonl", "a.dict"]))
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str
) -> None:
    file = written(tmp_path_factory.mktemp("any", numbered=True), name, data)
    for columns in ({}, {"source_column": "1", "target_column": "2"}):
        message = ""
        try:
            pairs = read(file, **columns)
            assert all(pairs.sources)
            assert all(pairs.targets)
        except NanolmError as error:
            message = str(error)
        assert not message or file in message
