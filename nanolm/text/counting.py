"""The words of a corpus, counted by several processes.

    >>> count_corpus(corpus, (0, corpus.length), processes=2)

The parent cuts the text into parts and hands them out; each process counts the words of its parts
and sends its counts when there are no more. Counts are added up, so the result does not depend on
how many processes there were or who counted what.
"""

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from nanolm.text import Report, words
from nanolm.text.corpus import Corpus, Range

ALONE = 8_000_000  # bytes; fewer are counted before other processes would have started


def count_corpus(
    corpus: Corpus, part: Range, processes: int, report: Report = lambda *_: None
) -> Counter[bytes]:
    """How often each word occurs in a part of the corpus."""
    total, done = part[1] - part[0], 0
    parts = corpus.parts(*part, size=1 << 19)
    lock = Lock()

    def counted(start: int, stop: int) -> None:
        nonlocal done
        done += stop - start
        report("counting words", done, total)

    if processes < 2 or total < ALONE or not hasattr(os, "pread"):
        counter = words.WordCounter()
        for start, stop in parts:
            counter.add(corpus.read(start, stop))
            counted(start, stop)
        return Counter({word.encode(): count for word, count in counter.counts().items()})

    descriptor = corpus.file.fileno()
    workers = [
        subprocess.Popen(
            # -P: this folder must not hide modules of the same name elsewhere.
            [sys.executable, "-P", words.__file__, str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[descriptor],
        )
        for _ in range(processes)
    ]

    def employ(worker: subprocess.Popen[bytes]) -> bytes:
        assert worker.stdin and worker.stdout
        while True:
            with lock:
                range_ = next(parts, None)
            if range_ is None:
                break
            worker.stdin.write(b"%d %d\n" % range_)
            worker.stdin.flush()
            if not worker.stdout.readline():
                break
            with lock:
                counted(*range_)
        worker.stdin.close()
        answer = worker.stdout.read()
        if worker.wait():
            raise RuntimeError(f"a process that counted words ended with {worker.returncode}")
        return answer

    counts: Counter[bytes] = Counter()
    pool = ThreadPoolExecutor(processes)
    try:
        for answer in pool.map(employ, workers):
            numbers, _, joined = answer.partition(b"\n")
            for word, number in zip(joined.split(words.MARK), numbers.split(), strict=False):
                counts[word] += int(number)
    finally:
        for worker in workers:  # has ended by itself, unless something went wrong
            worker.kill()
            worker.wait()
        pool.shutdown()
    return counts
