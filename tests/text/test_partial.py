"""Using part of a large text."""

import gzip
import os
import subprocess
import time
from pathlib import Path

import pytest

from nanolm.text.corpus import read_corpus
from nanolm.text.decoding import Reading
from nanolm.text.partial import take_part, text_size
from nanolm.text.sources import Sources, find_sources

ROWS = [f"line {number:05} says schön or 日本, and goes on\n" for number in range(20_000)]


def number(row: str) -> int:
    return int(row.split()[1])


def sources_of(file: Path) -> Sources:
    return find_sources([str(file)], file.parent, lambda *_: None)


def read(sources: Sources, folder: Path) -> list[str]:
    with read_corpus(sources, Reading(), folder / "cache") as corpus:
        data = corpus.read(0, corpus.length)
    return [document.decode() for document in data.split(b"\xff")[1:]]


@pytest.mark.parametrize("limit", [50_000, 300_000])
def test_stretches_of_whole_lines_from_all_over_the_text(tmp_path: Path, limit: int) -> None:
    file = tmp_path / "text.txt"
    file.write_text("".join(ROWS))
    sources = sources_of(file)
    part = take_part(sources, Reading(), limit)
    assert 0.9 * limit < text_size(part) < 1.1 * limit
    (text,) = read(part, tmp_path)
    rows = text.splitlines(keepends=True)
    assert set(rows) <= set(ROWS)
    assert rows == sorted(set(rows))
    tenths = {number(row) * 10 // len(ROWS) for row in rows}
    assert tenths == set(range(10))
    assert take_part(sources, Reading(), limit) == part
    digests = [each.files[0].digest() for each in (part, sources)]
    assert digests[0] != digests[1]


def test_a_text_that_is_small_enough_is_used_whole(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("".join(ROWS))
    sources = sources_of(file)
    for limit in (None, text_size(sources)):
        assert take_part(sources, Reading(), limit) is sources


@pytest.mark.parametrize("end", [" ", ""])
def test_a_text_without_lines_is_cut_between_words_or_characters(tmp_path: Path, end: str) -> None:
    file = tmp_path / "text.txt"
    file.write_text(("日本é" + end) * 50_000)
    (text,) = read(take_part(sources_of(file), Reading(), 40_000), tmp_path)
    assert 30_000 < len(text.encode()) < 50_000
    assert set(text) == set("日本é" + end)


def test_small_files_are_used_whole(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    texts = ["".join(ROWS[20 * place : 20 * place + 20]) for place in range(100)]
    for place, text in enumerate(texts):
        (folder / f"{place:03}.txt").write_text(text)
    documents = read(take_part(sources_of(folder), Reading(), 25_000), tmp_path)
    assert 20 <= len(documents) <= 40
    places = [texts.index(document) for document in documents]
    assert places[0] < 10
    assert places[-1] > 90


def test_rows_of_a_table_and_lines_of_a_compressed_text(tmp_path: Path) -> None:
    table, packed = tmp_path / "rows.csv", tmp_path / "text.txt.gz"
    table.write_text("id,text\n" + "".join(f'{n},"{row}"\n' for n, row in enumerate(ROWS)))
    packed.write_bytes(gzip.compress("".join(ROWS).encode()))
    rows = read(take_part(sources_of(table), Reading(), 100_000), tmp_path)
    assert 60_000 < sum(len(row.encode()) for row in rows) < 110_000
    assert set(rows) <= set(ROWS)
    assert number(rows[-1]) > 0.7 * len(ROWS)
    limit = text_size(sources_of(packed)) // 4
    (text,) = read(take_part(sources_of(packed), Reading(), limit), tmp_path)
    assert set(text.splitlines(keepends=True)) <= set(ROWS)
    assert len(text.encode()) < 2 * limit


def test_a_pipe_is_not_read_for_longer_than_there_is_time(tmp_path: Path) -> None:
    end, start = os.pipe()
    with subprocess.Popen(["yes", "a line"], stdout=start) as endless:
        os.close(start)
        until = time.monotonic() + 0.2
        sources = find_sources([f"/dev/fd/{end}"], tmp_path, lambda *_: None, until=until)
        endless.kill()
    os.close(end)
    assert "reading stopped after" in sources.notes[0]
    (text,) = read(sources, tmp_path)
    assert set(text.splitlines(keepends=True)) == {"a line\n"}
