import subprocess
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import corpus_of
from hypothesis import given
from hypothesis import strategies as st

from nanolm.text import vocabulary
from nanolm.text.corpus import Corpus
from nanolm.text.vocabulary import count_corpus
from nanolm.text.words import LONGEST_WORD, MARK, WordCounter, count_words

# Arbitrary text, with a lot of white space of every kind.
TEXTS = st.text() | st.text(" \n\t\r\u3000a1.,'sé日", max_size=60)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("it's 12345!\n\nOh", ["it", "'s", " ", "123", "45", "!\n\n", "Oh"]),
        ("two  spaces", ["two", " ", " spaces"]),
        ("é日本", ["é日本"]),
    ],
)
def test_where_words_are_cut(text: str, words: list[str]) -> None:
    assert sorted(count_words([text])) == sorted(word.encode() for word in words)


@given(st.lists(TEXTS, max_size=5))
def test_the_fast_counter_counts_the_same(texts: list[str]) -> None:
    counter = WordCounter()
    counter.add(MARK.join(text.encode() for text in texts))
    fast = {word.encode(): count for word, count in counter.counts().items()}
    assert fast == count_words(texts)


def test_memory_stays_in_bounds_where_all_chunks_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanolm.text.words.MOST_CHUNKS", 10)
    counter = WordCounter()
    text = " ".join(f"same {n}" for n in range(100))
    counter.add(text.encode())
    assert not counter.chunks
    assert {word.encode(): n for word, n in counter.counts().items()} == count_words([text])


def test_a_word_of_a_million_letters_is_counted_in_pieces() -> None:
    counter = WordCounter()
    counter.add(b"a" * 1_000_000)
    assert counter.counts() == {"a" * LONGEST_WORD: 1_000_000 // LONGEST_WORD}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Iterator[Corpus]:
    monkeypatch.setattr(vocabulary, "COUNTED_ALONE", 0)
    text = "".join(f"The {n} cats  sat on {n % 97} mats.\n" for n in range(60_000))
    with corpus_of(text, "another document", text[:700_000]) as corpus:
        yield corpus


def test_the_number_of_processes_changes_nothing(large: Corpus) -> None:
    whole = (0, large.length)
    seen: list[int] = []
    one = count_corpus(large, 1, lambda *_: None)
    for processes in (2, 3):
        several = count_corpus(large, processes, lambda what, done, total: seen.append(done))
        assert several == one
    assert seen[-1] == large.length
    assert one == count_words(text.decode() for text in large.read(*whole).split(MARK))


def test_a_process_that_dies_is_noticed(large: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    workers: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **rest: Any) -> None:
            super().__init__(*arguments, **rest)
            workers.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    with pytest.raises(RuntimeError, match="exited early with code -9"):
        count_corpus(large, 2, lambda *_: workers[0].kill())
    assert all(worker.returncode is not None for worker in workers)


def test_an_interruption_ends_the_processes(large: Corpus) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        count_corpus(large, 2, interrupt)
    assert Counter(count_corpus(large, 2, lambda *_: None)).total() > 0
