"""The words of a corpus, counted by several processes.

    >>> count_corpus(corpus, (0, corpus.length), processes=2)

Counts are added up, so the result does not depend on how many processes there were or who counted
what.
"""

from collections import Counter

from nanolm.choice import Report
from nanolm.text.corpus import Corpus
from nanolm.text.crew import POSSIBLE, Crew, Range
from nanolm.text.words import MARK, WordCounter

ALONE = 8_000_000  # bytes; fewer are counted before other processes would have started
PART = 1 << 19  # bytes that a process counts at once


def count_corpus(
    corpus: Corpus, part: Range, processes: int, report: Report = lambda *_: None
) -> Counter[bytes]:
    """How often each word occurs in a part of the corpus."""
    start, stop = part
    parts = corpus.parts(start, stop, size=PART)
    if processes < 2 or stop - start < ALONE or not POSSIBLE:
        counter = WordCounter()
        for range_ in parts:
            counter.add(corpus.read(*range_))
            report("counting words", range_[1] - start, stop - start)
        return Counter({word.encode(): count for word, count in counter.counts().items()})
    counts: Counter[bytes] = Counter()
    with Crew("nanolm.text.words", corpus.file, processes) as crew:
        for (_, done), _ in crew.work(parts):
            report("counting words", done - start, stop - start)
        for answer in crew.dismiss():
            numbers, _, joined = answer.partition(b"\n")
            for word, number in zip(joined.split(MARK), numbers.split(), strict=False):
                counts[word] += int(number)
    return counts
