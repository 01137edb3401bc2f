import random
from pathlib import Path

import pytest

from nanolm.text.corpus import Corpus, read_corpus
from nanolm.text.decoding import Reading
from nanolm.text.partial import take_part
from nanolm.text.sources import find_sources
from nanolm.text.split import LEAST_TO_SPLIT, at_the_end, spread, take_out
from nanolm.text.words import MARK


def corpus_of(tmp_path: Path, text: str, separator: str | None = None) -> Corpus:
    file = tmp_path / "text.txt"
    file.write_text(text)
    sources = find_sources([str(file)], tmp_path, lambda *_: None)
    return read_corpus(sources, Reading(separator=separator), tmp_path)


def pieces(corpus: Corpus, fraction: float | None = None) -> list[str]:
    return [corpus.read(*part).decode() for part in spread(corpus, fraction).ranges]


SORTED = "  ".join(f"{who} {what} a dog." for who in ("I", "She", "He") for what in range(100))


def test_stretches_come_from_all_over_a_sorted_text(tmp_path: Path) -> None:
    with corpus_of(tmp_path, SORTED) as corpus:
        found = spread(corpus)
        texts = [corpus.read(*part).decode() for part in found.ranges]
    assert 0.08 < found.size / len(SORTED) < 0.13
    for who in ("I", "She", "He"):  # a third of the text each
        assert 0.2 < sum(text.split()[0] == who for text in texts) / len(texts) < 0.5
    assert all(text.rstrip().endswith(".") and text.startswith(" ") for text in texts)
    assert found.origin.endswith("cut between sentences")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("A line of a paragraph,\nand another.\n\n" * 400, "paragraphs"),
        ("".join(f"name{number}\n" for number in range(3000)), "lines"),
        ("One sentence of a text. " * 300, "sentences"),
        ("word " * 1000, "words"),
        ("文字" * 1000, "characters"),
        ("これは文です。" * 300, "sentences"),
    ],
)
def test_a_text_is_cut_between_the_largest_units_that_fit(
    tmp_path: Path, text: str, kind: str
) -> None:
    with corpus_of(tmp_path, text) as corpus:
        found = spread(corpus)
        parts = [corpus.read(*part).decode() for part in found.ranges]  # whole characters
    assert found.origin.endswith(f"cut between {kind}")
    assert len(parts) >= 4
    ends = {"paragraphs": ("\n\n",), "lines": ("\n",), "sentences": (".", "。"), "words": ("word",)}
    if kind in ends:
        assert all(part.endswith(ends[kind]) for part in parts[:-1])


@pytest.mark.parametrize("shift", range(4))
def test_no_character_is_cut_where_a_unit_is_longer_than_a_passage(
    shift: int, tmp_path: Path
) -> None:
    """Short sentences, and a few that span the place where a passage should begin."""
    lengths = [40_000 if number % 50 == 0 else 60 for number in range(600)]
    text = "x" * shift + "".join("я" * length + ". " for length in lengths)
    with corpus_of(tmp_path, text) as corpus:
        assert len("".join(pieces(corpus))) > 1000
        with take_out(corpus, spread(corpus).ranges, tmp_path):
            corpus.read(0, corpus.length).replace(MARK, b"").decode()


def test_training_and_held_out_text_are_all_of_the_text(tmp_path: Path) -> None:
    with corpus_of(tmp_path, SORTED) as corpus:
        whole = corpus.read(0, corpus.length)
        ranges = spread(corpus).ranges
        held_out = [whole[start:stop] for start, stop in ranges]
        with take_out(corpus, ranges, tmp_path) as taken:
            assert taken.read(0, taken.length) == b"".join(held_out)
            rest = corpus.read(0, corpus.length)
            assert corpus.documents == 1 and rest.startswith(MARK)
    end = 0
    kept = b""
    for start, stop in ranges:
        kept, end = kept + whole[end:start], stop
    assert rest == kept + whole[end:]


def test_documents_are_split_by_hash(tmp_path: Path) -> None:
    """The same documents in any order; duplicates on one side."""
    documents = [f"Document {number % 150} of some words." for number in range(300)]
    random.Random(1).shuffle(documents)
    found = []
    for order in (documents, sorted(documents)):
        with corpus_of(tmp_path, "\n***\n".join(order), "***") as corpus:
            held_out = [text.strip(MARK.decode("latin-1")) for text in latin(corpus)]
            whole = corpus.read(0, corpus.length)
            with take_out(corpus, spread(corpus).ranges, tmp_path) as taken:
                rest = corpus.read(0, corpus.length).split(MARK)[1:]
                assert len(rest) + taken.documents == whole.count(MARK)
        assert not {text.strip() for text in held_out} & {text.decode().strip() for text in rest}
        found.append(sorted(text.strip() for text in held_out))
    assert found[0] == found[1]
    assert 15 < len(found[0]) < 45


def latin(corpus: Corpus) -> list[str]:
    return [corpus.read(*part).decode("latin-1") for part in spread(corpus).ranges]


def test_a_few_long_documents_are_sampled_instead(tmp_path: Path) -> None:
    text = "\n***\n".join(f"{name} line\n" * 200 for name in ("first", "second", "third"))
    with corpus_of(tmp_path, text, "***") as corpus:
        found = pieces(corpus)
    assert all(any(name in text for text in found) for name in ("first", "second", "third"))
    assert not any("\xff" in text for text in found)


def test_so_small_a_text_is_trained_on_whole(tmp_path: Path) -> None:
    with corpus_of(tmp_path, "x " * (LEAST_TO_SPLIT // 2 - 10)) as corpus:
        assert spread(corpus).ranges == []
        assert spread(corpus, 0.2).ranges  # unless requested
        assert at_the_end(corpus, 0).ranges == spread(corpus, 0).ranges == []


def test_nothing_is_taken_from_a_small_text_that_hardly_repeats(tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(500)]
    with corpus_of(
        tmp_path, "\n".join(" ".join(words[n : n + 5]) for n in range(0, 500, 5))
    ) as one:
        assert spread(one).ranges == []
        assert spread(one, 0.1).ranges


def test_of_documents_used_in_part_the_same_are_held_out(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(30):
        lines = (f"Note {number}, line {line}: {line**3}\n" for line in range(3_000))
        (folder / f"{number}.txt").write_text("".join(lines))
    whole = find_sources([str(folder)], tmp_path, lambda *_: None)
    part = take_part(whole, Reading(), 1_000_000)
    held_out = []
    for number, sources in enumerate((whole, part)):
        (cache := tmp_path / f"cache-{number}").mkdir()
        with read_corpus(sources, Reading(), cache) as corpus:
            texts = [corpus.read(*range_).strip(MARK) for range_ in spread(corpus).ranges]
            held_out.append([text.partition(b",")[0] for text in texts])
    assert held_out[0] == held_out[1]
    assert len(held_out[0]) > 2
