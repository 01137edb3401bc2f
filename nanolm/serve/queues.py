"""Queues of the compute thread: what waits, in turn by client, and long tasks, done in steps."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from nanolm.errors import NanolmError, OutOfMemory, out_of_memory

TASKS_IN_TURN = 4  # each holds the memory of its model's caches

Item = TypeVar("Item")
Steps = Generator[list[Any], None, None]  # each step yields some of the results


class QueueFull(NanolmError):
    def __init__(self, seconds: int) -> None:
        super().__init__("the queue is full; try again later")
        self.seconds = seconds  # for the Retry-After header


class TookTooLong(NanolmError):
    """A request did not finish in its time."""


class FairQueue(Generic[Item]):
    """Waiting items. Clients take turns, no matter how much each has requested."""

    def __init__(self) -> None:
        self.clients: dict[str, deque[Item]] = {}
        self.length = 0

    def add(self, client: str, items: Iterable[Item]) -> None:
        new = list(items)
        self.clients.setdefault(client, deque()).extend(new)
        self.length += len(new)

    def next(self) -> Item:
        client = next(iter(self.clients))
        waiting = self.clients.pop(client)
        self.length -= 1
        if len(waiting) > 1:
            self.clients[client] = waiting  # last in line
        return waiting.popleft()

    def drop(self, over: Callable[[Item], bool]) -> list[Item]:
        """Remove and return the items of requests that ended while they were waiting."""
        dropped = [item for waiting in self.clients.values() for item in waiting if over(item)]
        if dropped:
            for client, waiting in list(self.clients.items()):
                self.clients[client] = deque(item for item in waiting if not over(item))
                if not self.clients[client]:
                    del self.clients[client]
            self.length = sum(map(len, self.clients.values()))
        return dropped


class LongTask:
    """Work on several texts, done in steps. Canceling `future` ends it before the next step."""

    def __init__(self, steps: Steps, texts: int, client: str, seconds: float) -> None:
        self.steps, self.texts, self.client, self.seconds = steps, texts, client, seconds
        self.deadline = time.monotonic() + seconds
        self.results: list[Any] = []
        self.future: Future[list[Any]] = Future()

    def over(self) -> bool:
        return self.future.cancelled() or time.monotonic() > self.deadline

    def step(self) -> bool:
        """Take a step; returns whether it was the last."""
        try:
            if self.over():
                raise TookTooLong(f"not finished within {self.seconds:g} s; send less text")
            self.results += next(self.steps)
        except StopIteration:
            self.settle()
        except Exception as error:
            self.settle(error)
        return self.future.done()

    def settle(self, error: Exception | None = None) -> None:
        self.steps.close()
        if not self.future.set_running_or_notify_cancel():
            return  # nobody waits for it
        if error is None:
            return self.future.set_result(self.results)
        if out_of_memory(error):
            error = OutOfMemory("out of memory; send less text")
        # Without its traceback, which would keep tensors alive.
        self.future.set_exception(error.with_traceback(None))


class LongTasks:
    """A few of them take turns, one step each, and the rest wait."""

    def __init__(self) -> None:
        self.new: deque[LongTask] = deque()  # from the event loop
        self.queue: FairQueue[LongTask] = FairQueue()
        self.running: deque[LongTask] = deque()
        self.texts = 0  # of all tasks; counted by the event loop

    def in_progress(self) -> int:
        return sum(task.texts for task in list(self.running))

    def busy(self) -> bool:
        return bool(self.new or self.queue.length or self.running)

    def turn(self) -> None:
        """One step of one task."""
        while self.new:
            task = self.new.popleft()
            self.queue.add(task.client, [task])
        for task in self.queue.drop(LongTask.over):
            task.step()
        while self.queue.length and len(self.running) < TASKS_IN_TURN:
            self.running.append(self.queue.next())
        if self.running:
            if self.running[0].step():
                self.running.popleft()
            else:
                self.running.rotate(-1)

    def close(self) -> None:
        """Nothing must keep waiting for them."""
        waiting = self.queue.drop(lambda task: True)
        for task in [*self.running, *waiting, *self.new]:
            task.settle(QueueFull(1))
