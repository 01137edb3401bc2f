"""Labeled text in every form, with the pitfalls of real files in small copies.

Set NANOLM_TEST_DATA to a folder with real files in `cls` to test those as well.
"""

import csv
import gzip
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import ipc, parquet

from nanolm.errors import DataError, NanolmError, UsageError
from nanolm.text import tables
from nanolm.text.labeled import Labeled, LabelReading, read_labeled, read_texts
from nanolm.text.sources import embedded_file

Pairs = list[tuple[str, str]]

FILMS: Pairs = [
    ("a stirring , funny film", "1"),
    ("one long string of cliches", "0"),
    ("it 's played straight , with little humor", "0"),
    ("a gem of a romantic comedy .", "1"),
    ("unflinchingly bleak and desperate", "0"),
    ("fun , and then some", "1"),
]
SENTENCES = "".join(
    f"{first} {verb} {thing} and {other} came too.\n"
    for first, other in (("He", "she"), ("She", "I"), ("I", "he"), ("The dog", "a cat"))
    for verb in ("saw", "held", "lost")
    for thing in ("the ball", "a stick", "the house")
)


def quiet(*_: object) -> None:
    pass


def written(folder: Path, name: str, data: bytes | str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data.encode() if isinstance(data, str) else data)
    return file


def read(*files: Path, **how: str) -> Labeled:
    return read_labeled([str(file) for file in files], LabelReading(**how), quiet)


def first(count: int, *files: Path) -> list[str]:
    """The labels of the first rows."""
    return read_labeled([str(file) for file in files], LabelReading(), quiet, count).labels


def pairs(*files: Path, **how: str) -> Pairs:
    found = read(*files, **how)
    return list(zip(found.texts, found.labels, strict=True))


def texts(*files: Path, **how: str) -> list[str]:
    rows = read_texts([str(file) for file in files], LabelReading(**how), quiet, no_labels)
    return [text for text, _ in rows]


def no_labels(values: set[str]) -> bool:
    return False


def table(rows: Pairs, form: str = "{0}\t{1}\n", start: str = "") -> str:
    return start + "".join(form.format(text, label, n) for n, (text, label) in enumerate(rows))


@pytest.mark.parametrize(
    ("name", "form", "start", "how"),
    [
        ("a.tsv", "{0}\t{1}\n", "", "tsv without a header; text is column 1, label is column 2"),
        (
            "a.tsv",
            "{0} \t{1}\n",
            "sentence\tlabel\n",
            "tsv with a header; text is 'sentence', label is 'label'",
        ),
        (
            "a.tsv",
            "{1}\t{0}\r\n",
            "\ufefflabel\tcontent\r\n",
            "tsv with a header; text is 'content', label is 'label'",
        ),
        ("a.tsv", "{1}\t{0}\n", "", "tsv without a header; text is column 2, label is column 1"),
        ("a.tsv", "9{2}\t{0} \t{1}\n", "\ttext\tlabel\n", "text is 'text', label is 'label'"),
        ("a.tsv", "{2}\t{0}\t{1}.0\n", "\t0\t1\n", "text is '0', label is '1'"),
        ("a.tsv", "{0}\t{1}\n", "zin\tklasse\n", "text is 'zin', label is 'klasse'"),
        ("a.tsv", "{0}\t{1}\t{2}\t{2}7\n", "sentence\tlabel\trating\tid\n", "label is 'label'"),
        ("a.csv", '"{0}",{1}\n', "Review Text,airlineSentiment\n", "csv with a header"),
        ("a.csv", "{1};{0}\n", "category;Message\n", "';' csv with a header"),
        ("a.csv", '{1}.0,"{0}",,\n', "v1,v2,,\n", "text is 'v2', label is 'v1'"),
        ("a.txt", "{0}\t{1}\n", "", "tsv without a header"),
        ("a.all", '{1},"{0}"\n', "", "csv without a header; text is column 2"),
        ("a", "{1} {0}\n", "", "lines that begin with their label"),
        ("a.dev", "__label__{1} {0}\n", "", "lines that begin with __label__"),
        ("a.txt", "{0}@{1}\n", "", "lines that end with @label"),
    ],
)
def test_forms(name: str, form: str, start: str, how: str, tmp_path: Path) -> None:
    whole = table(FILMS, form, start)
    for data in (whole, whole.rstrip("\r\n")):  # with a line end after the last row, and without
        file = written(tmp_path, name, data)
        assert pairs(file) == FILMS
        assert how in read(file).how
        assert read(file).notes == []


@pytest.mark.parametrize("name", ["a.tsv", "a.txt"])
def test_a_header_that_is_none(name: str, tmp_path: Path) -> None:
    rows = [("review", "1"), *FILMS]
    assert pairs(written(tmp_path, name, table(rows))) == rows
    words = [(text, "ja" if label == "1" else "nee") for text, label in FILMS]
    assert pairs(written(tmp_path, name, table(words))) == words


@pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.jsonl", "a.txt", "a.train"])
def test_odd_line_ends_are_characters(name: str, tmp_path: Path) -> None:
    rows = [(f"{text} \x85 or \u2028 and \x1c then", label) for text, label in FILMS]
    form = '{{"text": "{0}", "label": {1}}}\n' if name == "a.jsonl" else "{0}\t{1}\n"
    form = "{1} {0}\n" if name == "a.train" else form
    data = table(rows, form).replace("\x1c", "\\u001c" if name == "a.jsonl" else "\x1c")
    assert pairs(written(tmp_path, name, data)) == rows


def test_csv_with_quotes_and_newlines_and_columns_of_all_kinds(tmp_path: Path) -> None:
    header = "tweet_id,airline_sentiment,airline_sentiment_confidence,text,airline,"
    header += "airline_sentiment_gold,name,retweet_count\n"
    rows = [
        f"5703{n:04},{('negative', 'neutral', 'positive')[n % 3]},0.{n:04},"
        f'"@x said:\n\n""no, {n}""",'
        f"{('US', 'Delta')[n % 2]},{'negative' if n == 7 else ''},user{n // 2},{n % 4}\n"
        for n in range(60)
    ]
    file = written(tmp_path, "t.csv.gz", gzip.compress((header + "".join(rows)).encode()))
    found = read(file)
    assert found.how == "csv with a header; text is 'text', label is 'airline_sentiment'"
    assert len(found.texts) == 60
    assert found.texts[3] == '@x said:\n\n"no, 3"'
    assert Counter(found.labels) == {"negative": 20, "neutral": 20, "positive": 20}
    assert texts(file) == found.texts
    assert set(read(file, label_column="airline").labels) == {"US", "Delta"}


def test_a_tsv_that_was_written_with_quotes(tmp_path: Path) -> None:
    ragged = '"two\nlines"\t1\nplain "words" here\t0\n"a\ttab"\t1\nmore of it\t0\n'
    assert pairs(written(tmp_path, "a.tsv", ragged))[0] == ("two\nlines", "1")
    even = '"he said ""no"" to it"\t1\nplain words\t0\nmore words\t1\nand more\t0\n'
    assert pairs(written(tmp_path, "b.tsv", even))[0] == ('he said "no" to it', "1")
    plain = '"great" film\t1\nsaid ""no""\t0\n"quite"\t1\nand more\t0\n'
    assert pairs(written(tmp_path, "c.tsv", plain))[0] == ('"great" film', "1")


def test_json(tmp_path: Path) -> None:
    rows = [{"id": n, "meta": {"label": n % 2 == 0}, "body": f"text {n}"} for n in range(6)]
    file = written(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)))
    found = read(file)
    assert found.labels == ["true", "false"] * 3
    assert found.how == "JSON lines; text is 'body', label is 'meta.label'"
    numbers = '{"text": "a b", "y": 1.0, "z": [1]}\n{"text": "c \\ud83d", "y": 2}\n{"text": "d"}'
    found = read(written(tmp_path, "b.ndjson", numbers))
    assert (found.texts, found.labels) == (["a b", "c \ufffd"], ["1", "2"])
    assert found.notes == ["1 row without a label skipped"]
    with pytest.raises(DataError, match="line 2: must be a JSON object or a string"):
        read(written(tmp_path, "c.jsonl", '{"text": "a", "label": 1}\n[1]\n'))


def test_parquet_and_arrow(tmp_path: Path) -> None:
    columns = {
        "idx": list(range(6)),
        "sentence": [text for text, _ in FILMS],
        "label": [float(label) for _, label in FILMS],
        "embedding": [[0.5]] * 6,
    }
    data = pyarrow.table(columns)
    parquet.write_table(data, tmp_path / "a.parquet")
    with ipc.new_stream(tmp_path / "a.arrow", data.schema) as writer:
        writer.write_table(data)
    written(tmp_path, "b.parquet.gz", gzip.compress((tmp_path / "a.parquet").read_bytes()))
    for name in ("a.parquet", "a.arrow", "b.parquet.gz"):
        assert pairs(tmp_path / name) == FILMS
        assert texts(tmp_path / name) == [text for text, _ in FILMS]


def test_folders_of_classes(tmp_path: Path) -> None:
    for label in ("neg", "pos"):
        for n in range(3):
            written(tmp_path, f"train/{label}/{n}_7.txt", f"\n{label} film\nnumber {n}\n")
            written(tmp_path, f"test/{label}/{n}_7.txt", "unseen")
    written(tmp_path, "train/unsup/0_0.txt", "of no class")
    written(tmp_path, "train/urls.txt", "no film")
    found = read(tmp_path / "train")
    assert found.how == "a folder for each class"
    assert found.notes == ["2 files outside class folders skipped"]
    assert found.texts[0] == "neg film\nnumber 0"
    assert found.labels == ["neg", "pos"] * 3
    more = written(tmp_path, "more.tsv", table(FILMS))
    assert read(more, tmp_path / "train").labels == ["neg", "pos"] * 3 + [y for _, y in FILMS]
    assert first(2, tmp_path / "train") == ["neg", "pos"]
    with pytest.raises(UsageError, match=r"folders in .*\(test, train\).*for example .*/train$"):
        read(tmp_path)


def test_several_files_each_in_its_form(tmp_path: Path) -> None:
    one = written(tmp_path, "in/a.tsv", table(FILMS))
    two = written(tmp_path, "in/b.train", table(FILMS, "{1} {0}\n"))
    assert pairs(one, two) == FILMS * 2 == pairs(tmp_path / "in")
    assert read(one, two).how == f"{one}: {read(one).how} | {two}: {read(two).how}"
    assert first(7, one, two) == [label for _, label in (FILMS * 2)[:7]]


def test_labels_in_a_file_of_their_own(tmp_path: Path) -> None:
    file = written(tmp_path, "a.txt", table(FILMS, "{0}\n"))
    labels = written(tmp_path, "a.labels", table(FILMS, "{1}\r\n"))
    assert pairs(file, label_file=str(labels)) == FILMS
    short = written(tmp_path, "b.labels", "1\n0\n")
    with pytest.raises(DataError, match=r"b.labels has 2 lines for 6 texts"):
        read(file, label_file=str(short))
    (problem,) = LabelReading(label_file="b", text_column="x").problems()
    assert "--label-file" in problem
    assert "unknown encoding" in LabelReading(encoding="utf-9").problems()[0]


def test_rows_without_text_or_label_are_counted(tmp_path: Path) -> None:
    rows = table([*FILMS, ("", "1"), ("  ", "0"), ("who knows", "")], start="text\tlabel\n")
    found = read(written(tmp_path, "a.tsv", rows))
    assert len(found.texts) == len(found.labels) == 6
    assert found.notes == ["2 rows without text skipped", "1 row without a label skipped"]


def test_a_few_broken_bytes_are_mended_and_told(tmp_path: Path) -> None:
    emoji = [f"{text} 🙂🙂🙂🙂".encode() for text, _ in FILMS]
    good = b"".join(text + b"\t%d\n" % (n % 2) for n, text in enumerate(emoji))
    file = written(tmp_path, "a.tsv", good.replace(b"\x82\t", b"\t", 2))
    found = read(file)
    assert found.texts[0].endswith("🙂🙂🙂\ufffd")
    assert found.notes == [f"2 invalid UTF-8 characters replaced by U+FFFD in {file}"]
    assert texts(file) == found.texts
    with pytest.raises(DataError, match="is not UTF-8: byte 0xf0"):
        read(written(tmp_path, "b.tsv", good.replace(b"\x82\t", b"\t", 3)))


@pytest.mark.parametrize("odd", ["\xf0", "caf\xe9 \x85"])
def test_another_encoding_is_named_and_reads_it(odd: str, tmp_path: Path) -> None:
    rows = [(text + f" sister{odd}city", label) for text, label in FILMS]
    file = written(tmp_path, "a.all", table(rows, "{1} {0}\n").encode("latin-1"))
    with pytest.raises(DataError, match=r"at offset .*try --encoding cp1252"):
        read(file)
    assert pairs(file, encoding="latin-1") == rows
    assert len(pairs(file, encoding="cp1252")) == 6


def test_a_file_without_labels_says_so_and_can_be_classified(tmp_path: Path) -> None:
    unlabeled = written(tmp_path, "a.tsv", table(FILMS, "{2}\t{0}\n", "index\tsentence\n"))
    plain = written(tmp_path, "a.txt", table(FILMS, "{0}\n"))
    single = written(tmp_path, "b.csv", table(FILMS, '"{0}"\n', "text\n"))
    for file in (unlabeled, plain, single):
        with pytest.raises(UsageError, match=r"no labels.*nanolm classify --file"):
            read(file)
        assert texts(file) == [text for text, _ in FILMS]


@pytest.mark.parametrize(
    "form", ["{0}\t{1}\n", "{1} {0}\n", "__label__{1} {0}\n", "{0}@{1}\n", "{1}\t{2}\t{0}\n"]
)
def test_texts_of_labeled_files(form: str, tmp_path: Path) -> None:
    rows = FILMS * 3
    assert texts(written(tmp_path, "a.txt", table(rows, form))) == [text for text, _ in rows]


def test_plain_text_stays_whole(tmp_path: Path) -> None:
    for lines in (
        ["the film, it was good", "the film, it was bad"] * 2,
        ["2 eggs", "3 apples", "2 pears"],
        ["yes I do", "no I do not", "yes we do", "no we do not"],
        ["write to a@b", "write to b@b"],
        ['a "quote', "and, more", "and, even, more"],
        ["17", "4", "2026"],
    ):
        assert texts(written(tmp_path, "a.txt", "\n".join(lines) + "\n\n")) == lines


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("text\tclass\ttopic\na b\t1\tx\nc d\t2\ty\ne f\t1\tx\ng h\t2\tx\n", "'class' and 'topic'"),
        ("sentence1\tsentence2\tlabel\na b\tc d\t1\ne f\tg h\t0\n", "'sentence1' and 'sentence2'"),
        ("a b\t1\tx\nc d\t2\ty\ne f\t1\tx\ng h\t2\tx\n", "'2' and '3' could each be the label"),
    ],
)
def test_no_guess_between_two(data: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message) as error:
        read(written(tmp_path, "a.tsv", data))
    assert re.search(r"choose one with --(text|label)-column", str(error.value))
    assert "('1')" in str(error.value)


def test_columns_by_name_and_number(tmp_path: Path) -> None:
    rows = table(FILMS, "{1}\t{0}\tx{1}\tno {0}\n")
    bare = written(tmp_path, "a.tsv", rows)
    named = written(tmp_path, "b.tsv", "one\ttwo\tthree\tfour\n" + rows)
    for file, text, label in ((bare, "4", "3"), (named, "four", "Three"), (named, "4", "3")):
        found = read(file, text_column=text, label_column=label)
        assert found.texts[0] == "no a stirring , funny film"
        assert found.labels == ["x" + label for _, label in FILMS]
        assert texts(file, text_column=text) == found.texts
    with pytest.raises(UsageError, match=r"--label-column tree: .*one \('.'\).*mean three\?"):
        read(named, label_column="tree")
    with pytest.raises(UsageError, match="cannot be both"):
        read(named, label_column="two", text_column="two")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "a.txt",
            "one two\nthree four\nfive six\n",
            "neither begin nor end with one. .*--label-file",
        ),
        # Prose: first words repeat, but also occur inside other lines.
        ("a.txt", SENTENCES, "neither begin nor end with one. .*__label__NAME"),
        ("a.txt", embedded_file("tiny.txt").read_text(), "neither begin nor end with one"),
        ("a.tsv", "", "no rows with a text and a label"),
        ("a.csv", "text,label\na,0\nb,1\nc, and d,1\n", "line 4 has 3 columns, not 2"),
        ("a.csv", 'text,label\na,0\n"b,1\n', "fix that row"),
        (
            "a.txt",
            "__label__a __label__b text\n__label__a x\n",
            "line 1 starts with several labels",
        ),
        ("a.jsonl", '{"label": 1, "n": 2}\n{"label": 0, "n": 3}', "no column looks like text"),
        ("a.tsv", table([(f"t {n}", f"0.{n}") for n in range(1000, 1100)]), "no labels"),
        ("a.tsv", "text\ttarget\n" + "".join(f"t\t0.{n}\n" for n in range(99)) * 3, "no labels"),
    ],
)
def test_what_cannot_be_used_is_told(name: str, data: str, message: str, tmp_path: Path) -> None:
    file = written(tmp_path, name, data)
    with pytest.raises(NanolmError, match=message) as error:
        read(file)
    assert str(file) in str(error.value)


def test_a_line_without_label_after_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "SAMPLE_LINES", 6)
    monkeypatch.setattr(tables, "SAMPLE_ROWS", 4)
    assert pairs(written(tmp_path, "a.tsv", table(FILMS * 3))) == FILMS * 3
    quoted = "".join(f'"say ""{n}""\n\nand more"\t{n % 2}\n' for n in range(9))
    assert len(pairs(written(tmp_path, "q.tsv", quoted))) == 9
    ends = written(tmp_path, "a.txt", table(FILMS, "{0}@{1}\n") + "none\n")
    with pytest.raises(DataError, match="line 7 has no label"):
        read(ends)
    fasttext = written(tmp_path, "f.txt", table(FILMS, "__label__{1} {0}\n") + "none\n")
    with pytest.raises(DataError, match="line 7 does not start with a label"):
        read(fasttext)


def test_files_put_together_and_numbers_that_name_a_group(tmp_path: Path) -> None:
    part = table(FILMS, start="sentence\tlabel\n")
    file = written(tmp_path, "a.tsv", part + part)
    assert pairs(file) == FILMS * 2
    assert texts(file) == [text for text, _ in FILMS * 2]
    groups = "PhraseId\tSentenceId\tPhrase\n"
    groups += "".join(f"{n}\t{n // 4}\ttext number {n}\n" for n in range(20))
    with pytest.raises(UsageError, match="has no labels"):
        read(written(tmp_path, "b.tsv", groups))


def test_a_label_for_each_text(tmp_path: Path) -> None:
    rows = [(f"text number {n}", f"class{n}") for n in range(30)]
    assert pairs(written(tmp_path, "a.txt", table(rows, "__label__{1} {0}\n"))) == rows
    named = written(tmp_path, "a.tsv", table(rows, start="text\tlabel\n"))
    with pytest.raises(UsageError, match=r"no labels.*--label-column"):
        read(named)
    assert pairs(named, label_column="label") == rows


def test_texts_come_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SAMPLE_LINES", 6)
    monkeypatch.setattr(tables, "SAMPLE_ROWS", 6)
    file = written(tmp_path, "a.csv", table(FILMS * 2, '"{0}",{1}\n', "text,label\n") + '"never\n')
    stream = read_texts([str(file)], LabelReading(), quiet, no_labels)
    assert [next(stream)[0] for _ in range(12)] == [text for text, _ in FILMS * 2]
    with pytest.raises(DataError, match="line 14"):
        next(stream)


def test_the_embedded_reviews() -> None:
    found = read_labeled(["embedded:reviews"], LabelReading(), quiet)
    assert found.how == "tsv with a header; text is 'text', label is 'label'"
    assert Counter(found.labels) == {"positive": 4800, "negative": 4800}


def as_csv(rows: Pairs) -> str:
    out = io.StringIO()
    csv.writer(out).writerows([("text", "label"), *rows])
    return out.getvalue()


FORMS: dict[str, Callable[[Pairs], str]] = {
    "a.csv": as_csv,
    "a.tsv": lambda rows: table(rows, start="text\tlabel\n"),
    "bare.tsv": table,
    "a.jsonl": lambda rows: "\n".join(json.dumps({"y": y, "text": text}) for text, y in rows),
    "a.train": lambda rows: table(rows, "{1} {0}\n"),
    "a.txt": lambda rows: table(rows, "__label__{1} {0}\n"),
}
# No line ends or tabs, which not every form allows; more than one word, as in real texts.
LINE = st.text(st.characters(codec="utf-8", exclude_characters="\n\r\t\ufeff"), max_size=30).map(
    lambda text: f"so: {text} .".strip()
)
# If every text contains its label as a word, it looks like prose.
LABEL = st.from_regex(r"[a-z]{2,8}|[1-9][0-9]?", fullmatch=True).filter(lambda word: word != "so")


@given(st.lists(LABEL, min_size=2, max_size=4, unique=True), st.data())
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, labels: list[str], data: st.DataObject
) -> None:
    count = 3 * len(labels)
    found = data.draw(st.lists(LINE, min_size=count, max_size=count, unique=True))
    rows = list(zip(found, labels * 3, strict=True))
    for name, write in FORMS.items():
        assert pairs(written(tmp_path_factory.getbasetemp(), name, write(rows))) == rows, name


@given(st.binary(max_size=200), st.sampled_from(["a.txt", "a.jsonl", "a.csv", "a.tsv", "a"]))
def test_whatever_the_bytes_the_error_is_for_people(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str
) -> None:
    file = written(tmp_path_factory.getbasetemp(), name, data)
    for reading in (pairs, texts):
        message = ""
        try:
            reading(file)
        except NanolmError as error:
            message = str(error)
        assert not message or str(file) in message


REAL = {
    "airline/Tweets.csv.gz": (14_640, 3, "label is 'airline_sentiment'"),
    "ece1786_a2/train.tsv": (6_400, 2, "quoted tsv with a header"),
    "imdb/test_1000.tsv": (1_000, 2, "text is 'sentence', label is 'label'"),
    "sent-conv/stsa.fine.train": (8_544, 5, "lines that begin with their label"),
    "sst2_glue/train.tsv": (67_349, 2, "tsv with a header"),
    "sst2_labelfirst/train_head_crlf.tsv": (2_000, 2, "tsv with a header"),
    "sst2_sentence/train.tsv": (6_920, 2, "tsv without a header"),
}


@pytest.mark.parametrize("name", REAL)
def test_real_files(name: str) -> None:
    file = Path(os.environ.get("NANOLM_TEST_DATA") or "no such folder") / "cls" / name
    if not file.exists():
        pytest.skip(f"NANOLM_TEST_DATA has no cls/{name}")
    rows, classes, how = REAL[name]
    found = read(file)
    assert (len(found.texts), len(set(found.labels))) == (rows, classes)
    assert how in found.how
    assert texts(file) == found.texts


def test_labels_beside_the_texts_are_read_where_they_are_known(tmp_path: Path) -> None:
    def labels(file: Path, known: str, **how: str) -> list[str | None]:
        rows = read_texts([str(file)], LabelReading(**how), quiet, lambda seen: seen <= {*known})
        return [label for _, label in rows]

    rows = [(f"text number {n}", str(n % 2)) for n in range(8)]
    named = written(tmp_path, "a.tsv", table(rows, start="text\tlabel\n"))
    assert labels(named, "01") == [label for _, label in rows]
    assert labels(named, "ab") == [None] * 8  # of another classifier
    assert labels(named, "ab", label_column="label") == [label for _, label in rows]
    other = written(tmp_path, "b.tsv", table(rows, start="text\tpage\n"))
    assert labels(other, "01") == [None] * 8
    assert labels(other, "01", label_column="page") == [label for _, label in rows]
    lines = written(tmp_path, "c.txt", table(rows, "__label__{1} {0}\n"))
    assert labels(lines, "01") == [label for _, label in rows]
    assert labels(written(tmp_path, "d.txt", "one text\nanother text\n"), "01") == [None] * 2
