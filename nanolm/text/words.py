"""Split text into words and count them, as input for byte-pair encoding.

    >>> count_words(["low lower low"])
    Counter({b'low': 1, b' lower': 1, b' low': 1})

Also the main module of the worker processes that count a large corpus, so it imports little.
"""

from collections import Counter
from collections.abc import Iterable

import regex

from nanolm.text.workers import serve

# How text is split into words before pairs are counted: contractions; letters with the one
# character before them (usually a space); up to three digits; runs of punctuation with the line
# ends after them; line ends; other white space, leaving the last space to the next word.
# This is the pattern of GPT-4's tokenizer without its possessive quantifier, which tiktoken,
# `tokenizers` and llama.cpp interpret differently.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MARK = b"\xff"  # between documents; never occurs in UTF-8
MOST_CHUNKS = 300_000  # limits memory if nearly all are distinct
LONGEST_WORD = 1_000  # characters; a longer word (text without spaces) is counted in pieces


def lowered(text: str) -> str:
    """In lowercase, character by character like `tokenizers`: str.lower() has a final sigma."""
    return text.replace("\u03a3", "\u03c3").lower()


def count_words(texts: Iterable[str]) -> Counter[bytes]:
    """The count of each word, as UTF-8; `SPLIT` defines the words."""
    words: Counter[str] = Counter()
    for text in texts:
        words.update(regex.findall(SPLIT, text))
    return Counter({word.encode(): count for word, count in words.items()})


class WordCounter:
    """Like `count_words`, but twice as fast: `str.split` splits most of the text, since no word has
    a space after another character, and the pattern is applied to each distinct chunk."""

    def __init__(self) -> None:
        self.words: Counter[str] = Counter()
        self.chunks: Counter[str] = Counter()  # each without the space before it

    def add(self, part: bytes) -> None:
        for text in part.split(MARK):
            first, *chunks = self._cut(text.decode())
            self.words.update(regex.findall(SPLIT, first))
            self.chunks.update(chunks)
        if len(self.chunks) > MOST_CHUNKS:
            self._count_chunks()

    def counts(self) -> dict[str, int]:
        self._count_chunks()
        for word in [word for word in self.words if len(word) > LONGEST_WORD]:
            count = self.words.pop(word)
            for start in range(0, len(word), LONGEST_WORD):
                self.words[word[start : start + LONGEST_WORD]] += count
        return self.words

    def _cut(self, text: str) -> list[str]:
        chunks: list[str | None] = [*text.split(" ")]
        # Do not split at a space that follows white space: that chunk and the next stay together.
        loose = [n for n, chunk in enumerate(chunks[:-1]) if not chunk or chunk[-1].isspace()]
        for n in reversed(loose):
            if n or chunks[n]:
                chunks[n : n + 2] = [f"{chunks[n]} {chunks[n + 1]}", None]
        return [chunk for chunk in chunks if chunk is not None]

    def _count_chunks(self) -> None:
        find = regex.compile(SPLIT).findall
        for chunk, count in self.chunks.items():
            for word in find(" " + chunk):
                self.words[word] += count
        self.chunks.clear()

    def answer(self) -> bytes:
        """The counts, then the words, for the parent process."""
        counts = self.counts()
        numbers = " ".join(map(str, counts.values())).encode()
        return numbers + b"\n" + MARK.join(word.encode() for word in counts)


if __name__ == "__main__":
    counter = WordCounter()

    def count(part: bytes) -> bytes:
        counter.add(part)
        return b""

    serve(count, counter.answer)
