import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanolm.errors import DataError, UsageError
from nanolm.text.corpus import EMBEDDED, Corpus, read_corpus


@given(
    st.lists(st.text("ab \né", min_size=1, max_size=200), min_size=1, max_size=30),
    st.floats(0.01, 0.5),
)
def test_a_split_loses_and_repeats_nothing(documents: list[str], fraction: float) -> None:
    training, validation = Corpus(tuple(documents)).split(fraction)
    assert "".join(training.documents + validation.documents) == "".join(documents)


def test_many_documents_are_split_between_documents() -> None:
    documents = tuple(f"document {n}\n" for n in range(100))
    training, validation = Corpus(documents).split(0.1)
    assert (len(training.documents), len(validation.documents)) == (90, 10)


def test_one_document_is_split_between_lines() -> None:
    training, validation = Corpus(("one two three four\n" * 100,)).split(0.1)
    assert validation.documents == ("one two three four\n" * 10,)
    assert training.documents[0].endswith("\n")


def test_a_line_without_end_is_split_between_words() -> None:
    _, validation = Corpus(("word " * 100,)).split(0.1)
    assert validation.documents[0].startswith("word ")


def test_a_cut_near_the_start_of_a_document_stays_there() -> None:
    documents = ("x" * 880, "y z" + "w" * 300 + "\n" + "v" * 20)
    training, validation = Corpus(documents).split(0.26)
    assert "".join(training.documents + validation.documents) == "".join(documents)
    assert 0.1 < validation.size / 1204 < 0.4


def test_separator(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\n***\ntwo *** two\n  ***  \n\n***\nthree\n***")
    assert read_corpus([str(file)], "***").documents == ("one\n", "two *** two\n", "three\n")
    assert len(read_corpus([str(file)]).documents) == 1


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xef\xbb\xbfwith a mark", "with a mark"),
        (b"dos\r\nmac\runix\n", "dos\nmac\nunix\n"),
        (b"a NUL \x00 in it", "a NUL \x00 in it"),
        ("NEL \x85 is no line end".encode(), "NEL \x85 is no line end"),
    ],
)
def test_odd_text_is_read(data: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    assert read_corpus([str(tmp_path / "a.txt")]).documents == (text,)


def test_what_cannot_be_read_is_explained_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"line one\ncaf\xe9\n")
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbfab\xff")
    paths = [str(tmp_path / name) for name in ("latin.txt", "mark.txt", "none.txt")]
    with pytest.raises(UsageError) as caught:
        read_corpus([*paths, str(tmp_path), "embedded:stori"])
    latin, mark, none, folder, embedded = str(caught.value).split("\n")
    assert "byte 0xe9 at offset 12 (line 2)" in latin
    assert "iconv" in latin
    assert "byte 0xff at offset 5 " in mark
    assert "none.txt does not exist" in none
    assert "is a folder" in folder
    assert "embedded:stories" in embedded


def test_empty_text_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"\n \n", b"\xef\xbb\xbf"):
        (tmp_path / "a.txt").write_bytes(data)
        with pytest.raises(DataError, match="no text"):
            read_corpus([str(tmp_path / "a.txt")])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs symlinks")
def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(DataError, match="cannot be read"):
        read_corpus([str(tmp_path / "a")])


def test_a_forgotten_scheme_is_guessed() -> None:
    with pytest.raises(UsageError, match="did you mean embedded:stories"):
        read_corpus(["stories"])


def test_fingerprint_sees_text_and_boundaries() -> None:
    prints = {Corpus(parts).fingerprint() for parts in [("ab", "c"), ("a", "bc"), ("abc",)]}
    assert len(prints) == 3
    assert Corpus(("ab",)).fingerprint() == Corpus(("ab",)).fingerprint()


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded(name: str) -> None:
    corpus = read_corpus([f"embedded:{name}"])
    assert corpus.size > 4_000
    assert all(document.strip() for document in corpus.documents)
