from itertools import pairwise
from pathlib import Path

import pytest
import regex
from conftest import corpus_of
from hypothesis import example, given
from hypothesis import strategies as st

from nanolm.errors import DataError
from nanolm.text.corpus import MOST_HELD_OUT, SAFE_CUT, read_corpus
from nanolm.text.decoding import Reading
from nanolm.text.sources import Sources, find_sources
from nanolm.text.words import MARK, SPLIT

# The split patterns of GPT-2, cl100k and o200k as in tiktoken (possessive quantifiers, and
# `$` for the end of the text), and nanolm's.
PATTERNS = {
    "ours": SPLIT,
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++\Z|\s+(?!\S)|\s",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++\Z|\s*[\r\n]|\s+(?!\S)|\s",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
PROSE = st.text("aé1.'s \n\t\u3000日", max_size=300)


def texts(corpus_bytes: bytes) -> list[str]:
    return [text.decode() for text in corpus_bytes.split(MARK)]


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@given(documents=st.lists(PROSE, min_size=1, max_size=4), size=st.integers(1, 60))
@example(documents=["a \n\n  b\n\nc\nd"], size=3)
def test_no_pattern_sees_where_a_text_was_cut(
    pattern: str, documents: list[str], size: int
) -> None:
    with corpus_of(*documents) as corpus:
        ranges = list(corpus.parts(size))
        assert ranges[0][0] == 0
        assert ranges[-1][1] == corpus.length
        assert all(before[1] == after[0] for before, after in pairwise(ranges))
        parts = [corpus.read(*range_) for range_ in ranges]
    assert b"".join(parts) == b"".join(MARK + document.encode() for document in documents)
    start, safe = 0, set()  # without a good place, it can only cut anywhere
    for document in documents:
        begin = start + len(MARK)
        places = [match.start() for match in SAFE_CUT.finditer(document)]
        safe |= {start, begin} | {begin + len(document[:place].encode()) for place in places}
        start = begin + len(document.encode())
    cut = [word for part in parts for text in texts(part) for word in regex.findall(pattern, text)]
    whole = [word for document in documents for word in regex.findall(pattern, document)]
    if {stop for _, stop in ranges[:-1]} <= safe:
        assert cut == whole


@given(st.lists(PROSE, min_size=1, max_size=6), st.integers(1, 100))
def test_whole_documents_are_not_cut(documents: list[str], size: int) -> None:
    with corpus_of(*documents) as corpus:
        parts = [corpus.read(*part) for part in corpus.parts(size, whole=True)]
    assert all(part.startswith(MARK) for part in parts)


@given(
    st.lists(st.text("ab \né日", min_size=1, max_size=200), min_size=1, max_size=30),
    st.floats(0.01, 0.5),
)
def test_a_split_loses_and_repeats_nothing(documents: list[str], fraction: float) -> None:
    with corpus_of(*documents) as corpus:
        training, validation = corpus.split(fraction)
        assert training[0] == 0
        assert training[1] == validation[0]
        assert validation[1] == corpus.length
        for part in (training, validation):
            texts(corpus.read(*part))  # no character is split


def test_many_documents_are_split_between_documents() -> None:
    with corpus_of(*(f"document {n:03}\n" for n in range(100))) as corpus:
        training, validation = corpus.split(0.1)
        assert corpus.read(*training).count(MARK) == 90
        assert corpus.read(*validation).startswith(MARK + b"document 090")


def test_of_a_large_text_a_megabyte_is_held_out() -> None:
    for lines, held_out in ((20_000, 20_000), (1_200_000, MOST_HELD_OUT)):
        with corpus_of("one line\n\n" * lines) as corpus:
            _, (start, stop) = corpus.split()
        assert stop - start == pytest.approx(held_out, rel=0.01)


def test_one_document_is_split_between_lines() -> None:
    with corpus_of("one two three four\n" * 100) as corpus:
        training, validation = corpus.split(0.1)
        assert corpus.read(*training).endswith(b"four\n")
        assert corpus.read(*validation) == b"one two three four\n" * 10


def test_a_line_without_end_is_split_between_words() -> None:
    with corpus_of("word " * 100) as corpus:
        _, validation = corpus.split(0.1)
        assert corpus.read(*validation).startswith(b"word ")


def read(path: Path, reading: Reading | None = None) -> list[str]:
    sources = find_sources([str(path)], path.parent / "cache", lambda *_: None)
    with read_corpus(sources, reading or Reading(), path.parent / "cache") as corpus:
        assert corpus.size == corpus.length - corpus.documents
        return texts(corpus.read(0, corpus.length))[1:]


def test_empty_text_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"\n \n", b"\xef\xbb\xbf"):
        (tmp_path / "a.txt").write_bytes(data)
        with pytest.raises(DataError, match="no text"):
            read(tmp_path / "a.txt")


def test_blank_documents_are_left_out_and_blank_beginnings_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n  first\n***\n \n***\nsecond\n***\n")
    assert read(tmp_path / "a.txt", Reading(separator="***")) == ["\n\n  first\n", "second\n"]


def test_what_cannot_be_read_is_explained_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"line one\ncaf\xe9\n")
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbfab\xff")
    (tmp_path / "good.txt").write_bytes(b"good")
    sources = find_sources([str(tmp_path)], tmp_path, lambda *_: None)
    with pytest.raises(DataError) as caught:
        read_corpus(sources, Reading(), tmp_path)
    latin, mark = str(caught.value).split("\n")
    assert "latin.txt is not UTF-8: byte 0xe9 at offset 12 (line 2); try --encoding cp1252" in latin
    assert "byte 0xff at offset 5 " in mark


def test_many_broken_files_do_not_fill_the_screen(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"{number}.txt").write_bytes(b"\xff\xff")
    sources = find_sources([str(tmp_path)], tmp_path, lambda *_: None)
    with pytest.raises(DataError, match="and 30 more problems like these"):
        read_corpus(sources, Reading(), tmp_path)


def test_a_file_that_changes_or_goes_away_is_told(tmp_path: Path) -> None:
    for name in ("grows", "goes"):
        (tmp_path / f"{name}.txt").write_text("some text\n" * 300_000)
    sources = find_sources([str(tmp_path / "grows.txt")], tmp_path, lambda *_: None)

    def grow(what: str, done: int, total: int) -> None:
        with (tmp_path / "grows.txt").open("a") as stream:
            stream.write("more")

    with pytest.raises(DataError, match=r"grows\.txt changed while it was being read"):
        read_corpus(sources, Reading(), tmp_path, grow)
    sources = find_sources([str(tmp_path / "goes.txt")], tmp_path, lambda *_: None)
    (tmp_path / "goes.txt").unlink()
    with pytest.raises(DataError, match=r"goes\.txt no longer exists"):
        read_corpus(sources, Reading(), tmp_path)


@pytest.mark.slow
def test_a_line_of_100_megabytes(tmp_path: Path) -> None:
    """Text without a single space or line end."""
    file = tmp_path / "line.txt"
    with file.open("w") as stream:
        for _ in range(100):
            stream.write("日本ab" * 125_000)
    sources = find_sources([str(file)], tmp_path, lambda *_: None)
    with read_corpus(sources, Reading(), tmp_path) as corpus:
        assert corpus.size == 100_000_000
        ranges = list(corpus.parts())
        assert len(ranges) > 100
        for start, stop in ranges[1:5]:
            corpus.read(start, stop).decode()


def test_no_sources() -> None:
    with pytest.raises(DataError, match="no text"):
        read_corpus(Sources(), Reading(), Path("."))
