"""A pool of processes that work on parts of one file: threads would wait for the GIL.

    >>> with WorkerPool("nanolm.text.words", corpus.file, size=2) as pool:
    ...     answers = [answer for _, answer in pool.map(corpus.parts())]

Each process reads the parts it is given and answers each with some bytes. At the end
(`pool.finish`) it answers once more.
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
from typing import IO, Self, TypeVar

from nanolm.machine import module_command

HAS_PREAD = hasattr(os, "pread")  # not on Windows
LENGTH = struct.Struct("<q")

Range = tuple[int, int]
T = TypeVar("T")


class WorkerPool:
    """Processes that run `module`, which calls `serve`."""

    def __init__(self, module: str, file: IO[bytes], size: int, *arguments: str) -> None:
        descriptor = file.fileno()
        self.workers = [
            subprocess.Popen(
                **module_command(module, str(descriptor), *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[descriptor],
            )
            for _ in range(size)
        ]
        self.own, workers = threading.local(), iter(self.workers)  # each thread has a process
        own = partial(setattr, self.own, "worker")
        self.threads = ThreadPoolExecutor(size, initializer=lambda: own(next(workers)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers:  # normally it has exited already
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
        with contextlib.suppress(BrokenPipeError):  # it has died: `_answer` raises the error
            worker.stdin.write(b"%d %d\n" % part)
            worker.stdin.flush()
        return self._answer(worker)

    def finish(self) -> list[bytes]:
        """The final answer of each process, after the last part."""
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
        raise RuntimeError(f"a worker process exited early with code {worker.wait()}")


def map_in_order(
    pool: ThreadPoolExecutor, size: int, ask: Callable[[Range], T], parts: Iterable[Range]
) -> Iterator[tuple[Range, T]]:
    """Request all parts, a few at a time, so that memory does not grow with the text."""
    waiting: deque[tuple[Range, Future[T]]] = deque()
    for part in parts:
        waiting.append((part, pool.submit(ask, part)))
        if len(waiting) > 2 * size:
            first, future = waiting.popleft()
            yield first, future.result()
    for first, future in waiting:
        yield first, future.result()


def serve(work: Callable[[bytes], bytes], finish: Callable[[], bytes] = bytes) -> None:
    # Signals sent to the whole terminal or job are handled by the parent.
    for name in ("SIGINT", "SIGHUP", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    descriptor = int(sys.argv[1])
    # A broken pipe means the parent has exited, and no one is waiting for an answer.
    with contextlib.suppress(BrokenPipeError), open(0, "rb") as requests, open(1, "wb") as answers:
        for request in requests:
            start, stop = map(int, request.split())
            answer = work(os.pread(descriptor, stop - start, start))
            answers.write(LENGTH.pack(len(answer)) + answer)
            answers.flush()
        answer = finish()
        answers.write(LENGTH.pack(len(answer)) + answer)
