from pathlib import Path

import pytest

from nanolm.text.check import compare, survey
from nanolm.text.decoding import Reading
from nanolm.text.tokenizer import train_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = {"a": "same text", "b": "same text", "c": "other\x01 text \ufffd", "d": "zwölf 日"}
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    (folder / "e.txt").write_bytes(b"broken \xff")
    (folder / "f.bin").write_bytes(b"\0")
    return folder


def test_a_survey(folder: Path) -> None:
    found = survey((str(folder),), Reading(), lambda *_: None)
    assert (found.files, found.skipped) == (5, {"hidden": 0, "binary": 1})
    assert (found.documents, found.duplicates) == (4, 1)
    whole = "same textsame textother\x01 text \ufffdzwölf 日"
    assert found.bytes == len(whole.encode())
    assert found.characters == len(whole)
    assert found.distinct_characters == len(set(whole))
    assert found.longest_document == len("other\x01 text \ufffd".encode())
    assert (found.replacement_characters, found.control_characters) == (1, 1)
    assert found.examples == ["same text", "same text", "other\x01 text \ufffd"]
    assert len(found.problems) == 1
    assert "e.txt is not UTF-8: byte 0xff at offset 7" in found.problems[0]
    assert [choice.what for choice in found.choices] == ["tokenizer", "vocabulary"]
    assert found.bytes_per_token and found.bytes_per_token > 1


def test_documents_longer_than_a_part(tmp_path: Path) -> None:
    text = "word " * 250_000
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(text)
    names = (str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))
    found = survey(names, Reading(), lambda *_: None)
    assert (found.documents, found.duplicates) == (2, 1)
    assert found.longest_document == len(text)


def test_compare(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("zwölf cats sat. " * 100)
    own = train_tokenizer(["zwölf cats sat. " * 10], "bpe")
    rows = compare(
        (str(tmp_path / "a.txt"),),
        Reading(),
        [("mine", own), ("byte", ("byte", None)), ("char", ("char", None)), ("b", ("bpe", 262))],
    )
    assert [row.tokens for row in rows[1:3]] == [1700, 1600]
    assert rows[1].bytes_per_token == 1
    assert rows[2].characters_per_token == 1
    assert rows[3].vocab_size == 262
    assert rows[0].tokens == len(own.encode("zwölf cats sat. " * 100)) < rows[3].tokens
