import bz2
import gzip
import json
import lzma
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import ipc, parquet

from nanolm.errors import DataError, NanolmError, UsageError
from nanolm.text import documents, source
from nanolm.text.decoding import Reading, lines
from nanolm.text.source import TextSource


def read(file: Path, **how: str) -> list[str]:
    """The documents of a file, each in one string."""
    found: list[str] = []
    for begins, text in documents.documents(TextSource(str(file), file), Reading(**how)):
        if begins:
            found.append("")
        found[-1] += text
    return found


def written(folder: Path, name: str, data: bytes | str) -> Path:
    file = folder / name
    file.write_bytes(data.encode() if isinstance(data, str) else data)
    return file


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block boundaries as in a large file, in a small one."""
    monkeypatch.setattr(source, "READ_BYTES", 3)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xef\xbb\xbfwith a mark", "with a mark"),
        (b"dos\r\nmac\runix\n", "dos\nmac\nunix\n"),
        (b"a\r", "a\n"),
        (b"a NUL \x00 in it", "a NUL \x00 in it"),
        ("NEL \x85 and \u2028 are no line ends".encode(), "NEL \x85 and \u2028 are no line ends"),
        ("日本語 👍".encode(), "日本語 👍"),
    ],
)
def test_odd_text_is_read(data: bytes, text: str, tmp_path: Path) -> None:
    assert read(written(tmp_path, "a.txt", data)) == [text]
    assert read(written(tmp_path, "README", data)) == [text]


@pytest.mark.usefixtures("small_blocks")
def test_separator(tmp_path: Path) -> None:
    file = written(tmp_path, "a.txt", "one\n***\ntwo *** two\n  ***  \n\n***\nthree\n***")
    found = [text for text in read(file, separator="***") if text.strip()]
    assert found == ["one\n", "two *** two\n", "three\n"]
    assert len(read(file)) == 1


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("shift_jis", "吾輩は猫である。\r\n名前はまだ無い。\r\n"),
        ("utf-16", "grün\r\n日本"),
        ("latin-1", "café\n"),
        ("gb18030", "床前明月光、\n疑是地上霜。"),
        ("UTF8", "plain"),
    ],
)
def test_encodings(
    encoding: str, text: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "READ_BYTES", block)
    file = written(tmp_path, "a.txt", text.encode(encoding))
    assert read(file, encoding=encoding) == [text.replace("\r\n", "\n")]


@pytest.mark.parametrize(
    ("data", "option"),
    [
        ("吾輩は猫である。名前はまだ無い。".encode("shift_jis"), "shift_jis"),
        ("床前明月光、疑是地上霜。".encode("gb18030"), "gb18030"),
        ("hello".encode("utf-16"), "utf-16"),
        ("“naïve” café…".encode("cp1252"), "cp1252"),
        (b"odd \x81\x8d\x90 bytes", "latin-1"),
    ],
)
def test_the_option_that_would_read_it_is_named_and_does(
    data: bytes, option: str, tmp_path: Path
) -> None:
    file = written(tmp_path, "a.txt", data)
    with pytest.raises(DataError, match=f"try --encoding {option}$"):
        read(file)
    assert read(file, encoding=option)


@pytest.mark.parametrize("block", [1, 2, 5, 1 << 20])
def test_the_first_bad_byte_is_told_exactly(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "READ_BYTES", block)
    cases: dict[bytes, tuple[int, int, int]] = {
        b"ab\n\xe4\xb8\xad\xe4x": (6, 0xE4, 2),
        b"\xef\xbb\xbfab\xff": (5, 0xFF, 1),
        b"ab\xe4\xb8": (2, 0xE4, 1),  # cut off at the end
        b"line\r\nline\r\n\x80": (12, 0x80, 3),
    }
    for data, (offset, byte, line) in cases.items():
        expected = rf"byte 0x{byte:02x} at offset {offset} \(line {line}\)"
        with pytest.raises(DataError, match=expected):
            read(written(tmp_path, "a.txt", data))
    with pytest.raises(DataError, match="is not ascii: byte 0xe4 at offset 3"):
        read(written(tmp_path, "a.txt", b"ab\n\xe4"), encoding="ascii")


@pytest.mark.parametrize("block", [1, 2, 5, 1 << 20])
def test_a_text_cut_in_the_middle_of_its_last_character(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `head -c 1000000` does it."""
    monkeypatch.setattr(source, "READ_BYTES", block)
    whole = "Знаешь что\n".encode()
    for end in range(3, len(whole)):
        text = whole[:end].decode(errors="ignore")
        assert read(written(tmp_path, "a.txt", whole[:end])) == [text]
        assert read(written(tmp_path, "a.gz", gzip.compress(whole[:end]))) == [text]


@pytest.mark.parametrize("encoding", ["utf-9", "hex", "rot13", ""])
def test_an_encoding_that_is_none(encoding: str) -> None:
    (problem,) = Reading(encoding=encoding).problems()
    assert f"--encoding {encoding}: unknown encoding" in problem


Pack = Callable[[bytes], bytes]
PACKERS: dict[str, Pack] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd.compress,
}


@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed(suffix: str, tmp_path: Path) -> None:
    pack = PACKERS[suffix]
    text = "some text, and more\n" * 5000
    assert read(written(tmp_path, "a.txt" + suffix, pack(text.encode()))) == [text]
    assert read(written(tmp_path, "packed", pack(text.encode()))) == [text]  # whatever its name
    two = pack(b"one ") + pack(b"two")  # as from `cat a.gz b.gz`
    assert read(written(tmp_path, "a.txt" + suffix, two)) == ["one two"]
    row = json.dumps({"text": "row"}).encode()
    assert read(written(tmp_path, "a.jsonl" + suffix, pack(row))) == ["row"]


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_damaged_archive_is_refused(suffix: str, tmp_path: Path) -> None:
    whole = PACKERS[suffix](b"".join(b"%d " % n for n in range(20_000)))
    for data in (whole[: len(whole) // 2], whole[:20] + b"\0" * 20 + whole[40:]):
        with pytest.raises(DataError, match="is a damaged"):
            read(written(tmp_path, "a.txt" + suffix, data))
    with pytest.raises(DataError, match=r"is not a \w+ file; rename it"):
        read(written(tmp_path, "a.txt" + suffix, b"plain text"))


@pytest.mark.usefixtures("small_blocks")
def test_json_lines(tmp_path: Path) -> None:
    rows = '{"text": "one\\n1"}\r\n\n{"id": 2, "text": "two"}\n"three"\n{"text": "\\u65e5"}'
    assert read(written(tmp_path, "a.jsonl", rows)) == ["one\n1", "two", "three", "日"]
    nested = '{"meta": {"body": "deep"}, "text": "flat", "n": 3}\n'
    file = written(tmp_path, "b.ndjson", nested)
    assert read(file, text_field="meta.body") == ["deep"]
    only = written(tmp_path, "c.jsonl", '{"id": 1, "story": {"body": "the only text"}}')
    assert read(only) == ["the only text"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not valid JSON"),
        ("[1]", "line 2: must be a JSON object or a string"),
        ('{"a": "x", "b": "y"}', "no text field 'text'; .* a, b with --text-column"),
        ('{"a": 1}', "line 2: no text field"),
        ("[" * 100_000, "line 2 is nested more than 100 levels deep"),
        ('{"text": null}', "line 2: no text field"),
        ('{"text": null, "id": "x"}', "line 2: no text field"),
    ],
)
def test_a_bad_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read(written(tmp_path, "a.jsonl", f'{{"text": "good"}}\n{line}\n'))


@pytest.mark.usefixtures("small_blocks")
def test_csv(tmp_path: Path) -> None:
    table = 'id,Text\r\n1,"two\r\nlines, and a ""quote"""\r\n\r\n2,plain\r\n'
    file = written(tmp_path, "a.csv", table)
    assert read(file) == ['two\nlines, and a "quote"', "plain"]
    assert read(file, text_column="id") == ["1", "2"]
    assert read(file, text_column="1") == ["id", "1", "2"]  # by number: no header
    assert read(written(tmp_path, "one.csv", "anything\nrow 1\nrow 2")) == ["row 1", "row 2"]


def test_tsv_quotes_nothing(tmp_path: Path) -> None:
    file = written(tmp_path, "a.tsv", "sentence\tlabel\na \"quoted word\t1\n's\t0\n")
    assert read(file, text_column="sentence") == ['a "quoted word', "'s"]


def test_a_wide_cell_and_bad_tables(tmp_path: Path) -> None:
    assert len(read(written(tmp_path, "a.csv", "text\n" + "x" * 300_000))[0]) == 300_000
    with pytest.raises(UsageError, match="no column 'text'; the columns are a, b"):
        read(written(tmp_path, "b.csv", "a,b\n1,2"))
    with pytest.raises(UsageError, match="no column 'body'"):
        read(written(tmp_path, "b.csv", "a,b\n1,2"), text_column="body")
    with pytest.raises(DataError, match="line 3 has only 1 columns, but the text is in column 2"):
        read(written(tmp_path, "b.csv", "a,text\n1,2\n3"))
    with pytest.raises(DataError, match=r"line 2.*fix that row"):
        read(written(tmp_path, "b.csv", 'text\n"never closed'))


def test_parquet_and_arrow(tmp_path: Path) -> None:
    table = pyarrow.table(
        {"id": [1, 2, 3], "text": ["one", None, "three"], "meta": [{"t": "a"}, {"t": "b"}, None]}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    with ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    with ipc.new_file(tmp_path / "b.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow", "b.arrow"):
        assert read(tmp_path / name) == ["one", "three"]
        assert read(tmp_path / name, text_column="meta.t") == ["a", "b"]
        assert read(tmp_path / name, text_column="id") == ["1", "2", "3"]
        with pytest.raises(UsageError, match="no column 'body'; the columns are id, text, meta"):
            read(tmp_path / name, text_column="body")
    parquet.write_table(pyarrow.table({"n": [1], "story": ["s"]}), tmp_path / "c.parquet")
    assert read(tmp_path / "c.parquet") == ["s"]
    for value in (["a", "b"], {"x": 1}, b"bytes"):
        parquet.write_table(pyarrow.table({"text": [value]}), tmp_path / "d.parquet")
        with pytest.raises(DataError, match=r"text holds (list|dict|bytes) values, not text"):
            read(tmp_path / "d.parquet")
    for name in ("broken.parquet", "broken.arrow"):
        with pytest.raises(DataError, match="is damaged, or not a"):
            read(written(tmp_path, name, b"PAR1 nothing of the kind"))


@pytest.mark.parametrize(("module", "name"), [("pyarrow", "a.parquet"), ("backports", "a.zst")])
def test_a_missing_extra_is_named(
    module: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "compression", None)
    file = written(tmp_path, name, PACKERS[".zst"](b"text"))
    with pytest.raises(UsageError, match=r"pip install 'nanolm\[data\]'"):
        read(file)


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_list_is_read_like_json_lines(
    tmp_path: Path, small_blocks: None, indent: int | None
) -> None:
    rows = [{"text": "one\n1"}, {"id": 2, "text": "two, [2]"}, "three", {"text": '\\ " 日本 }'}]
    texts = ["one\n1", "two, [2]", "three", '\\ " 日本 }']
    assert read(written(tmp_path, "a.json", json.dumps(rows, indent=indent))) == texts
    inside = {"version": 1, "tags": ["a"], "data": [{"text": text} for text in texts]}
    assert read(written(tmp_path, "b.json", json.dumps(inside, indent=indent))) == texts
    assert read(written(tmp_path, "c.json", "\n".join(map(json.dumps, rows)))) == texts
    file = written(tmp_path, "d.json", json.dumps([{"a": {"b": "x"}, "c": "y"}], indent=indent))
    assert read(file, text_field="a.b") == ["x"]
    with pytest.raises(DataError, match=r"d\.json, line \d: no text field 'text'; .* a\.b, c with"):
        read(file)
    alone = written(tmp_path, "e.json", '{"title": "t", "text": "one document"}')
    assert read(alone) == ["one document"]
    assert read(written(tmp_path, "f.json.gz", gzip.compress(b'["a", "b"]'))) == ["a", "b"]


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        ('{"text": "a",}]', "line 2 is not valid JSON"),
        ('{"text": "a"} {"text": "b"}]', "line 2 is not valid JSON .Expecting ',' or ']'"),
        ('{"text": "a"}', "line 2 is not valid JSON"),
        ('{"text": "a"}]\n]', "line 3 is not valid JSON .Extra data"),
        ('{"text": "a}]', "line 2 is not valid JSON .Unterminated string"),
        ('{"text": "a", "n": ' + "9" * 5_000 + "}]", "line 2 is not valid JSON .Exceeds the limit"),
        ('{"text": "a"}, 5]', "line 2: must be a JSON object or a string"),
        ("[" * 200 + "]" * 200 + "]", "line 2 is nested more than 100 levels deep"),
        ("[" * 100_000, "line 2 is nested more than 100 levels deep"),
    ],
)
def test_broken_json_lists(tmp_path: Path, rest: str, reason: str) -> None:
    with pytest.raises(DataError, match=rf"a\.json, {reason}"):
        read(written(tmp_path, "a.json", '[{"text": "good"},\n' + rest))


def test_a_long_json_list_takes_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "READ_BYTES", 1 << 14)
    row = json.dumps({"text": "many words " * 10})
    file = written(tmp_path, "a.json", f"[{', '.join([row] * 20_000)}]")
    found = documents.documents(TextSource(str(file), file), Reading())
    tracemalloc.start()
    assert sum(len(text) for _, text in found) == 20_000 * 110
    assert tracemalloc.get_traced_memory()[1] < 300_000 < file.stat().st_size / 8
    tracemalloc.stop()
    monkeypatch.setenv("NANOLM_MAX_UNPACKED", "1000000")
    whole = written(tmp_path, "b.json", '[{"text": "good"}, {"text": "' + "a" * 10_000_000)
    with pytest.raises(DataError, match=r"line 1: a value of more than .* to JSON lines"):
        read(whole)


def test_other_json_is_read_as_plain_text(tmp_path: Path) -> None:
    texts = {
        "a.json": '{"name": "a", "tasks": [{"label": "b"}]}',
        "b.json": "[1, 2]",
        "c.json": "// no JSON at all",
        "d.json": '{"x": [{"text": "a"}], "y": [{"text": "b"}]}',
    }
    files = [written(tmp_path, name, text) for name, text in texts.items()]
    assert [read(file) for file in files] == [[text] for text in texts.values()]
    files.append(written(tmp_path, "e.json", '[{"text": "a"}]'))
    found = [TextSource(file.name, file) for file in files]
    (note,) = documents.plain_json(found, Reading())
    assert (
        note == "a.json, b.json, c.json, ... (4 in all) are no lists of texts; read as plain text"
    )
    assert documents.plain_json(found[4:], Reading()) == []


@given(
    st.binary(max_size=200),
    st.sampled_from(["a.txt", "a.jsonl", "a.json", "a.csv", "a.tsv", "a.gz"]),
)
def test_whatever_the_bytes_the_error_is_for_people(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str
) -> None:
    file = written(tmp_path_factory.getbasetemp(), name, data)
    message = ""
    try:
        read(file)
    except NanolmError as error:
        message = str(error)
    assert not message or str(file) in message


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=50)), st.integers(1, 9))
def test_lines_are_lines_whatever_the_blocks(texts: list[str], size: int) -> None:
    whole = "\n".join(texts)
    blocks = iter([whole[n : n + size] for n in range(0, len(whole), size)])
    expected = whole.split("\n")
    if not expected[-1]:
        expected.pop()
    assert list(lines(blocks)) == expected


def test_a_suffix_belongs_to_one_format() -> None:
    suffixes = documents.KNOWN_SUFFIXES
    assert len(set(suffixes)) == len(suffixes)
    assert documents.format_of(".parquet").read and documents.format_of(".jsonl").any_line
    assert documents.format_of(".log") is documents.format_of("") is documents.PLAIN_TEXT
