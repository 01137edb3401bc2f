"""Long tasks take turns; each has its own end, whether good or bad."""

import asyncio
import itertools
import time
from collections.abc import Generator
from typing import Any

import pytest

from nanolm.errors import OutOfMemory
from nanolm.serve.engine import Engine, Limits
from nanolm.serve.queues import LongTask, LongTasks, QueueFull, TookTooLong

Steps = Generator[list[Any], None, None]


def counting(name: str, most: int, log: list[str], error: Exception | None = None) -> Steps:
    for number in range(most):
        log.append(name)
        yield [number]
    if error:
        raise error


def added(tasks: LongTasks, steps: Steps, client: str = "", seconds: float = 60) -> LongTask:
    task = LongTask(steps, 1, client, seconds)
    tasks.new.append(task)
    return task


def test_a_short_task_does_not_wait_for_a_long_one() -> None:
    tasks, log = LongTasks(), list[str]()
    long = added(tasks, counting("a", 100, log))
    short = added(tasks, counting("b", 3, log))
    while not short.future.done():
        tasks.turn()
    assert "".join(log) == "abababa"
    assert short.future.result() == [0, 1, 2]
    assert not long.future.done()


def test_few_run_at_a_time_and_clients_take_turns() -> None:
    tasks, log = LongTasks(), list[str]()
    for number in range(6):
        added(tasks, counting(f"a{number} ", 1, log), "a")
    added(tasks, counting("b ", 1, log), "b")
    while tasks.busy():
        tasks.turn()
        assert len(tasks.running) <= 4
    assert "".join(log) == "a0 b a1 a2 a3 a4 a5 "


def test_a_failure_is_that_of_one_task() -> None:
    tasks, log = LongTasks(), list[str]()
    failures = [RuntimeError("out of luck"), MemoryError()]
    bad = [added(tasks, counting("x", 2, log, error)) for error in failures]
    good = added(tasks, counting("a", 5, log))
    while tasks.busy():
        tasks.turn()
    assert good.future.result() == [*range(5)]
    assert str(bad[0].future.exception()) == "out of luck"
    assert isinstance(bad[1].future.exception(), OutOfMemory)


def test_a_canceled_task_ends_before_its_next_step() -> None:
    tasks, log = LongTasks(), list[str]()
    running, waiting = (added(tasks, counting(name, 9, log)) for name in "ab")
    late = added(tasks, counting("c", 9, log), seconds=0)
    tasks.turn()
    running.future.cancel()
    waiting.future.cancel()
    while tasks.busy():
        tasks.turn()
    assert log == ["a"]
    assert isinstance(late.future.exception(), TookTooLong)
    with pytest.raises(StopIteration):  # the generator is closed
        next(running.steps)


def test_the_engine_counts_and_bounds_them() -> None:
    def endless() -> Steps:
        for _ in itertools.count():
            time.sleep(0.001)
            yield []

    async def ask() -> None:
        engine = Engine(Limits(rows=2, queue=1), note=print)
        engine.start(asyncio.get_running_loop())
        tasks = [asyncio.create_task(engine.do_in_steps(endless(), 1, "")) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert engine.status() == {"writing": 3, "waiting": 0}
        with pytest.raises(QueueFull):
            await engine.do_in_steps(endless(), 1, "")
        assert await engine.do(lambda: "short") == "short"
        tasks[0].cancel()
        await asyncio.sleep(0.05)
        assert engine.status() == {"writing": 2, "waiting": 0}
        await asyncio.to_thread(engine.close)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in results] == [asyncio.CancelledError, QueueFull, QueueFull]

    asyncio.run(ask())
