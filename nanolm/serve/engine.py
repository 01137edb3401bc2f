"""The one thread that computes: texts of many requests in one batch, and what else is asked for.

    >>> engine = Engine(limits)
    >>> engine.add(writer)
    >>> engine.start(asyncio.get_running_loop())
    >>> order = Order(desk, rows, client="127.0.0.1")
    >>> engine.take(order)
    >>> async for news in order.news(): ...

Requests come in from the event loop as orders, which wait until there is room for their rows; a
row joins and leaves the batch between two tokens. All models take turns, a token each.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nanolm.errors import NanolmError
from nanolm.generation.batch import Batch, Row, Token
from nanolm.generation.decoding import READ, Cached
from nanolm.generation.knobs import Knobs
from nanolm.generation.language_model import TOGETHER, LanguageModel, Pen, Sample
from nanolm.generation.sampler import Sampler
from nanolm.model.device import use_fitting_threads

# What is new is told so often and no oftener; tokens that come in between go out together. Sending
# takes the event loop about a tenth of that, and while it runs the thread here has to wait for it.
PACE = 0.001  # seconds a text that is written
SOONEST = 0.005  # seconds
READ_ON_A_CPU = 2048  # tokens of prompts, between two tokens of those who are written for
SWEEP = 0.1  # seconds between looks at who waits in vain
WAITED = 1.0  # seconds after which a thread without work looks around


@dataclass(frozen=True)
class Limits:
    """What one server takes upon itself."""

    rows: int = 64  # texts written at the same time, by each model
    queue: int = 256  # texts that may wait for that
    tokens: int = 4096  # of one text
    prompt: int = 16_384  # tokens, or as many as the model can look at if that is more
    body: int = 1 << 20  # bytes of a request
    seconds: float = 300  # until a request is ended where it stands

    def longest(self, window: int | None) -> int:
        """Tokens of a prompt, for a model that looks at so many."""
        return max(self.prompt, window or 0)


class Busy(NanolmError):
    """Too much is waiting already."""

    def __init__(self, seconds: int) -> None:
        super().__init__("too many requests are waiting; try again later")
        self.seconds = seconds  # until it is worth trying again


class News(NamedTuple):
    """What is new of a text."""

    place: int  # which of its order
    piece: str
    token: Token | None  # None: only its end
    stopped: str  # why it ended, if it has


class Order:
    """Texts that one request has asked for."""

    def __init__(
        self,
        desk: "Desk",
        rows: list[Row],
        client: str = "",
        seconds: float = 300,
        streamed: bool = False,
    ) -> None:
        self.desk, self.client, self.streamed = desk, client, streamed
        self.samples = [Sample(number=row.number) for row in rows]
        self.pens = {
            row: (place, Pen(sample, row.knobs, desk.writer.tokenizer))
            for place, (row, sample) in enumerate(zip(rows, self.samples, strict=True))
        }
        self.deadline = time.monotonic() + seconds
        self.left = len(rows)  # texts that are not finished
        self.gone = False  # nobody waits for it any more
        self.failed: Exception | None = None
        self.fresh: deque[News] = deque()
        self.told = asyncio.Event()

    def add(self, row: Row, token: Token) -> bool:
        """Write it down; is the text finished?"""
        place, pen = self.pens[row]
        piece = pen.add(token)
        self.fresh.append(News(place, piece, token, pen.sample.stopped))
        return bool(pen.sample.stopped)

    def cut(self, row: Row) -> None:
        """End a text where it stands."""
        place, pen = self.pens[row]
        pen.sample.stopped = "length"
        rest = pen.transcript.finish()
        pen.sample.text += rest
        self.fresh.append(News(place, rest, None, "length"))

    async def news(self) -> AsyncIterator[list[News]]:
        """What is new, until all texts are finished. Whoever stops listening has gone."""
        try:
            while True:
                await self.told.wait()
                self.told.clear()
                over = not self.left  # before the rest is taken, so that nothing is left
                fresh = [self.fresh.popleft() for _ in range(len(self.fresh))]
                if self.failed:
                    raise self.failed
                if fresh:
                    yield fresh
                if over:
                    return
        finally:
            self.gone = True
            self.desk.engine.wake.set()


class Line:
    """Rows that wait. Clients take turns, however much one of them has asked for."""

    def __init__(self) -> None:
        self.clients: dict[str, deque[tuple[Order, Row]]] = {}
        self.length = 0

    def add(self, order: Order) -> None:
        self.clients.setdefault(order.client, deque()).extend((order, row) for row in order.pens)
        self.length += len(order.pens)

    def next(self) -> tuple[Order, Row]:
        client, rows = next(iter(self.clients.items()))
        found = rows.popleft()
        del self.clients[client]
        if rows:
            self.clients[client] = rows  # behind all others
        self.length -= 1
        return found

    def drop(self, over: Callable[[Order], bool]) -> list[tuple[Order, Row]]:
        """Take out the rows of orders that are over before they have begun."""
        found = [pair for rows in self.clients.values() for pair in rows if over(pair[0])]
        if found:
            rest = [pair for rows in self.clients.values() for pair in rows if not over(pair[0])]
            self.clients = {}
            for order, row in rest:
                self.clients.setdefault(order.client, deque()).append((order, row))
            self.length = len(rest)
        return found


class Desk:
    """One language model, and all that is written with it."""

    def __init__(self, engine: "Engine", writer: LanguageModel, limits: Limits) -> None:
        self.engine, self.writer, self.limits = engine, writer, limits
        model = writer.model.eval()  # once: it goes through all of its parts
        length = limits.longest(model.window()) + limits.tokens
        room = TOGETHER
        self.on_a_gpu = model.device.type == "cuda"
        if self.on_a_gpu:
            room = torch.cuda.mem_get_info(model.device)[0] // 4
        self.most = max(1, min(limits.rows, room // model.cache_bytes(length)))
        self.length = length
        self.line = Line()
        self.running: dict[Row, Order] = {}
        self.swept = 0.0  # when it was last seen who waits in vain
        self.speed = 0.0  # tokens a second, about
        self.threads = torch.get_num_threads()
        self.reading = READ if self.on_a_gpu else READ_ON_A_CPU
        self.batch: Batch | None = self.begin()

    def begin(self) -> Batch:
        """With nothing written."""
        model, device = self.writer.model, self.writer.model.device
        sizes = [1 << power for power in range(self.most.bit_length()) if 1 << power < self.most]
        return Batch(
            Cached(model, self.most, self.length),
            Sampler(self.writer.tokenizer, self.most, device),
            self.length,
            (*sizes, self.most) if self.on_a_gpu else (),
        )

    def warm(self) -> None:
        """Compile and record what most requests need, so that none of them has to wait for it."""
        use_fitting_threads(self.writer.model)
        self.threads = torch.get_num_threads()
        self.batch = batch = self.batch or self.begin()
        for size in batch.sizes or [1]:
            for temperature in (0.0, 0.8):
                for top in (0, 6) if size == 1 else (0,):
                    knobs = Knobs(tokens=3, temperature=temperature)
                    start = [self.writer.tokenizer.start_of_text] * 2
                    batch.join([Row(start, knobs, top=top) for _ in range(size)])
                    while batch.busy():
                        for _ in batch.step():
                            pass

    def turn(self) -> None:
        """One token more of everything, and whoever waits and fits in."""
        now = time.monotonic()
        self.batch = batch = self.batch or self.begin()

        def over(order: Order) -> bool:
            return order.gone or now > order.deadline

        for row, order in list(self.running.items()):
            if over(order):
                batch.leave(row)
                self.end(order, row)
        if self.line.length and now - self.swept > SWEEP:
            self.swept = now
            for order, row in self.line.drop(over):
                self.end(order, row)
        joining: list[Row] = []
        reading = 0  # tokens of prompts, for which all others have to wait
        while (
            self.line.length
            and reading < self.reading
            and len(batch.rows) + len(joining) < self.most
        ):
            order, row = self.line.next()
            self.running[row] = order
            joining.append(row)
            reading += min(len(row.prompt), self.writer.model.window() or self.length)
        batch.join(joining)
        for row, token in batch.step():
            if not (found := self.running.get(row)):
                continue  # it has ended, and this was under way
            self.engine.news.setdefault(found)
            if found.add(row, token):
                batch.leave(row)
                self.finish(found, row)
        taken = time.monotonic() - now
        if batch.rows and taken > 0:
            self.speed = 0.95 * self.speed + 0.05 * len(batch.rows) / taken

    def finish(self, order: Order, row: Row) -> None:
        self.running.pop(row, None)
        order.left -= 1
        self.engine.news.setdefault(order)

    def end(self, order: Order, row: Row) -> None:
        """Before it is finished."""
        order.cut(row)
        self.finish(order, row)

    def busy(self) -> bool:
        return bool(self.line.length or self.running or (self.batch and self.batch.busy()))

    def fail(self, error: Exception) -> None:
        """Whatever is written or waits ends so, and the next turn begins anew."""
        waiting = [order for order, _ in self.line.drop(lambda order: True)]
        for order in (*self.running.values(), *waiting):
            # Without its traceback, which holds on to all that was being computed.
            order.failed, order.left = RuntimeError(repr(error)), 0
            self.engine.news.setdefault(order)
        self.running.clear()
        self.batch = None


class Engine:
    """A thread, and what is handed over to it and back."""

    def __init__(self, limits: Limits, note: Callable[[str], None]) -> None:
        self.limits, self.note = limits, note
        self.desks: list[Desk] = []
        self.orders: deque[Order] = deque()
        self.tasks: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()
        self.news: dict[Order, None] = {}  # orders with news that were not told
        self.tellings = 0.0  # when something was told
        self.wake = threading.Event()
        self.closed = False
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self.loop: asyncio.AbstractEventLoop | None = None

    def add(self, writer: LanguageModel) -> Desk:
        desk = Desk(self, writer, self.limits)
        self.desks.append(desk)
        return desk

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.thread.start()

    def close(self) -> None:
        """End; what is still written ends where it stands."""
        self.closed = True
        self.wake.set()
        if self.thread.is_alive():
            self.thread.join(timeout=10)

    # Called by the event loop.

    def waiting(self) -> int:
        """Texts that have no place yet."""
        handed = sum(len(order.pens) for order in list(self.orders))
        return handed + sum(desk.line.length for desk in self.desks)

    def take(self, order: Order) -> None:
        """Let it be written, or raise Busy."""
        desk = order.desk
        room = self.limits.queue + max(0, desk.most - len(desk.running))
        if self.closed or self.waiting() + len(order.pens) > room:
            raise Busy(self.patience(desk))
        self.orders.append(order)
        self.wake.set()

    def patience(self, desk: Desk) -> int:
        """Seconds until there may be room again."""
        texts = max(1, desk.line.length)
        tokens = texts * sum(row.knobs.tokens for row in list(desk.running)) / desk.most
        return round(min(60, max(1, tokens / max(1, desk.speed) / 4)))

    async def do(self, task: Callable[[], Any]) -> Any:
        """The result of something short, computed between two tokens."""
        if self.closed or len(self.tasks) > self.limits.queue:  # one is at hand, not waiting
            raise Busy(1)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.tasks.append((future, task))
        self.wake.set()
        return await future

    # Called by the thread.

    def run(self) -> None:
        try:
            self.work()
        finally:  # nobody waits for a thread that has ended
            self.closed = True
            for order in self.orders:
                order.desk.line.add(order)
            for desk in self.desks:
                pairs = [(order, row) for row, order in desk.running.items()]
                for order, row in [*pairs, *desk.line.drop(lambda order: True)]:
                    desk.end(order, row)
            for future, _ in self.tasks:
                self.later(self.settle, future, None, Busy(1))
            self.tell(everything=True)

    def work(self) -> None:
        while not self.closed:
            self.wake.clear()
            while self.orders:
                order = self.orders.popleft()
                order.desk.line.add(order)
            if self.tasks:
                self.perform(*self.tasks.popleft())
            for desk in self.desks:
                if desk.busy():
                    self.turn(desk)
            self.tell()
            if not (self.tasks or self.orders or any(desk.busy() for desk in self.desks)):
                self.tell(everything=True)
                self.wake.wait(WAITED)

    def turn(self, desk: Desk) -> None:
        try:
            if torch.get_num_threads() != desk.threads:  # another model was at work
                torch.set_num_threads(desk.threads)
            desk.turn()
        except Exception as error:  # of this model alone; the others go on
            desk.fail(error)
            with contextlib.suppress(OSError):  # a terminal that is gone
                self.note(f"writing failed: {error!r}")

    def perform(self, future: "asyncio.Future[Any]", task: Callable[[], Any]) -> None:
        result, failed = None, None
        if not future.cancelled():
            try:
                result = task()
            except Exception as error:
                failed = error
        self.later(self.settle, future, result, failed)

    @staticmethod
    def settle(future: "asyncio.Future[Any]", result: Any, failed: Exception | None) -> None:
        if future.done():  # nobody waits any more
            return
        if failed:
            future.set_exception(failed)
        else:
            future.set_result(result)

    def tell(self, everything: bool = False) -> None:
        """Wake those who have news: at once if few are written, and not too often if many are."""
        now = time.monotonic()
        texts = sum(len(desk.running) for desk in self.desks)
        due = everything or now - self.tellings >= max(SOONEST, PACE * texts)
        told = [
            order
            for order in self.news
            if not order.left or (order.streamed and (due or self.first(order)))
        ]
        if told:
            self.later(self.rouse, told)
        if due:
            self.tellings = now
        for order in list(self.news) if due else told:
            del self.news[order]

    @staticmethod
    def first(order: Order) -> bool:
        """Has it just begun?"""
        return all(len(sample.tokens) <= 1 for sample in order.samples)

    @staticmethod
    def rouse(orders: list[Order]) -> None:
        for order in orders:
            order.told.set()

    def later(self, call: Callable[..., None], *values: Any) -> None:
        assert self.loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(call, *values)
