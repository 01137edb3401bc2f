"""Several processes that work on parts of one file: threads would wait for each other.

    >>> with WorkerPool("nanolm.text.words", corpus.file, size=2) as pool:
    ...     answers = [answer for _, answer in pool.map(corpus.parts())]

Each reads the parts it is given, and answers each with some bytes; at the end (`pool.finish`) it
answers once more.
"""

import contextlib
import os
import signal
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Self, TypeVar

HAS_PREAD = hasattr(os, "pread")  # not on Windows
PACKAGE_PARENT = str(Path(__file__).parents[2])
LENGTH = struct.Struct("<q")

Range = tuple[int, int]
T = TypeVar("T")


class WorkerPool:
    """Processes that run `module`, which calls `serve`."""

    def __init__(self, module: str, file: IO[bytes], size: int, *arguments: str) -> None:
        descriptor = file.fileno()
        # The same nanolm as here, and nothing from the current folder.
        paths = os.pathsep.join(filter(None, [PACKAGE_PARENT, os.environ.get("PYTHONPATH")]))
        self.workers = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(descriptor), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[descriptor],
                env={**os.environ, "PYTHONPATH": paths},
            )
            for _ in range(size)
        ]
        self.own, workers = threading.local(), iter(self.workers)  # each thread has a process
        own = partial(setattr, self.own, "worker")
        self.threads = ThreadPoolExecutor(size, initializer=lambda: own(next(workers)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers:  # has ended by itself, unless something went wrong
            worker.kill()
            worker.wait()
            for stream in filter(None, (worker.stdin, worker.stdout)):
                with contextlib.suppress(BrokenPipeError):  # a request that it never read
                    stream.close()
        self.threads.shutdown(cancel_futures=True)

    def map(self, parts: Iterable[Range]) -> Iterator[tuple[Range, bytes]]:
        return map_in_order(self.threads, len(self.workers), self._ask, parts)

    def _ask(self, part: Range) -> bytes:
        worker: subprocess.Popen[bytes] = self.own.worker
        assert worker.stdin
        with contextlib.suppress(BrokenPipeError):  # it has died: the missing answer says so
            worker.stdin.write(b"%d %d\n" % part)
            worker.stdin.flush()
        return self._answer(worker)

    def finish(self) -> list[bytes]:
        """The last answer of each, when there are no more parts."""
        for stdin in filter(None, (worker.stdin for worker in self.workers)):
            with contextlib.suppress(BrokenPipeError):
                stdin.close()
        return [self._answer(worker) for worker in self.workers]

    def _answer(self, worker: "subprocess.Popen[bytes]") -> bytes:
        assert worker.stdout
        head = worker.stdout.read(LENGTH.size)
        if len(head) == LENGTH.size:
            (length,) = LENGTH.unpack(head)
            if len(answer := worker.stdout.read(length)) == length:
                return answer
        raise RuntimeError(f"a worker process ended early, with {worker.wait()}")


def map_in_order(
    pool: ThreadPoolExecutor, size: int, ask: Callable[[Range], T], parts: Iterable[Range]
) -> Iterator[tuple[Range, T]]:
    """Ask for every part, several at once; few enough that memory does not grow with the text."""
    waiting: deque[tuple[Range, Future[T]]] = deque()
    for part in parts:
        waiting.append((part, pool.submit(ask, part)))
        if len(waiting) > 2 * size:
            first, future = waiting.popleft()
            yield first, future.result()
    for first, future in waiting:
        yield first, future.result()


def serve(work: Callable[[bytes], bytes], finish: Callable[[], bytes] = bytes) -> None:
    # What all processes of a terminal or a job are sent is for the parent to deal with.
    for name in ("SIGINT", "SIGHUP", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    descriptor = int(sys.argv[1])
    # A pipe that breaks: the parent is gone, and nobody waits for an answer.
    with contextlib.suppress(BrokenPipeError), open(0, "rb") as requests, open(1, "wb") as answers:
        for request in requests:
            start, stop = map(int, request.split())
            answer = work(os.pread(descriptor, stop - start, start))
            answers.write(LENGTH.pack(len(answer)) + answer)
            answers.flush()
        answer = finish()
        answers.write(LENGTH.pack(len(answer)) + answer)
