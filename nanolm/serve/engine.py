"""The one thread that computes: texts of many requests in one batch, and what else is asked for.

    >>> engine = Engine(limits)
    >>> engine.add(writer)
    >>> engine.start(asyncio.get_running_loop())
    >>> request = GenerationRequest(worker, rows, client="127.0.0.1")
    >>> engine.take(request)
    >>> async for events in request.events(): ...

Requests come from the event loop and wait until there is room for their rows; a row joins and
leaves the batch between two tokens. All models take turns, a token each.
"""

import asyncio
import contextlib
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nanolm.errors import NOT_FINITE, ModelError, NanolmError
from nanolm.generation.batch import Batch, BatchRow, SampledToken
from nanolm.generation.decoding import PREFILL_TOKENS, CachedDecoder
from nanolm.generation.language_model import LanguageModel, Sample, TextBuilder, max_rows
from nanolm.generation.sampler import Sampler
from nanolm.generation.sampling_params import SamplingParams
from nanolm.model.device import use_fitting_threads

# What is new is told so often and no oftener; tokens that come in between go out together. Sending
# takes the event loop about a tenth of that, and while it runs the thread here has to wait for it.
SECONDS_PER_TEXT = 0.001  # seconds a text that is written
MIN_SEND_INTERVAL = 0.005  # seconds
CPU_PREFILL_TOKENS = 2048  # tokens of prompts, between two tokens of those who are written for
SWEEP_INTERVAL = 0.1  # seconds between looks at who waits in vain
IDLE_WAIT = 1.0  # seconds after which a thread without work looks around


@dataclass(frozen=True)
class Limits:
    rows: int = 64  # texts written at the same time, by each model
    queue: int = 256  # texts that may wait for that
    tokens: int = 4096  # of one text
    prompt: int = 16_384  # tokens, or as many as the model can look at if that is more
    body: int = 1 << 20  # bytes of a request
    seconds: float = 300  # until a request is ended where it stands

    def longest(self, window: int | None) -> int:
        """Tokens of a prompt, for a model that looks at so many."""
        return max(self.prompt, window or 0)


class QueueFull(NanolmError):
    def __init__(self, seconds: int) -> None:
        super().__init__("too many requests are waiting; try again later")
        self.seconds = seconds  # until it is worth trying again


class TokenEvent(NamedTuple):
    place: int  # which of its request
    piece: str
    token: SampledToken | None  # None: only its end
    stopped: str  # why it ended, if it has


class GenerationRequest:
    def __init__(
        self,
        worker: "ModelWorker",
        rows: list[BatchRow],
        client: str = "",
        seconds: float = Limits.seconds,
        streamed: bool = False,
    ) -> None:
        self.worker, self.client, self.streamed = worker, client, streamed
        self.builders = {
            row: (place, TextBuilder(Sample(), row.params, worker.writer.tokenizer))
            for place, row in enumerate(rows)
        }
        self.deadline = time.monotonic() + seconds
        self.left = len(rows)  # texts that are not finished
        self.gone = False  # nobody waits for it any more
        self.failed: Exception | None = None
        self.fresh: deque[TokenEvent] = deque()
        self.ready = asyncio.Event()

    def add(self, row: BatchRow, token: SampledToken) -> bool:
        """Write it down; is the text finished?"""
        place, builder = self.builders[row]
        piece = builder.add(token)
        self.fresh.append(TokenEvent(place, piece, token, builder.sample.stopped))
        return bool(builder.sample.stopped)

    def cut(self, row: BatchRow) -> None:
        place, builder = self.builders[row]
        self.fresh.append(TokenEvent(place, builder.transcript.finish(), None, "length"))

    def has_just_begun(self) -> bool:
        return all(len(builder.sample.tokens) <= 1 for _, builder in self.builders.values())

    async def events(self) -> AsyncIterator[list[TokenEvent]]:
        """What is new, until all texts are finished. Whoever stops listening has gone."""
        try:
            while True:
                await self.ready.wait()
                self.ready.clear()
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
            self.worker.engine.wake.set()


class FairQueue:
    """Rows that wait. Clients take turns, however much one of them has asked for."""

    def __init__(self) -> None:
        self.clients: dict[str, deque[tuple[GenerationRequest, BatchRow]]] = {}
        self.length = 0

    def add(self, request: GenerationRequest) -> None:
        rows = self.clients.setdefault(request.client, deque())
        rows += ((request, row) for row in request.builders)
        self.length += len(request.builders)

    def next(self) -> tuple[GenerationRequest, BatchRow]:
        client = next(iter(self.clients))
        rows = self.clients.pop(client)
        self.length -= 1
        if len(rows) > 1:
            self.clients[client] = rows  # behind all others
        return rows.popleft()

    def drop(
        self, over: Callable[[GenerationRequest], bool]
    ) -> list[tuple[GenerationRequest, BatchRow]]:
        """Take out the rows of requests that are over before they have begun."""
        dropped = [pair for rows in self.clients.values() for pair in rows if over(pair[0])]
        if dropped:
            for client, rows in list(self.clients.items()):
                self.clients[client] = deque(pair for pair in rows if not over(pair[0]))
                if not self.clients[client]:
                    del self.clients[client]
            self.length = sum(map(len, self.clients.values()))
        return dropped


class ModelWorker:
    def __init__(self, engine: "Engine", writer: LanguageModel, limits: Limits) -> None:
        self.engine, self.writer, self.limits = engine, writer, limits
        model = writer.model.eval()  # once: it goes through all of its parts
        self.on_a_gpu = model.device.type == "cuda"
        self.length = limits.longest(model.window()) + limits.tokens
        self.most = max_rows(model, self.length, limits.rows)
        self.queue = FairQueue()
        self.running: dict[BatchRow, GenerationRequest] = {}
        self.swept = 0.0  # when it was last seen who waits in vain
        self.speed = 0.0  # tokens a second, about
        self.threads = torch.get_num_threads()
        self.reading = PREFILL_TOKENS if self.on_a_gpu else CPU_PREFILL_TOKENS
        self.batch: Batch | None = self.begin()

    def begin(self) -> Batch:
        model, most = self.writer.model, self.most
        sizes = sorted({min(1 << power, most) for power in range(most.bit_length() + 1)})
        decoder = CachedDecoder(model, most, self.length)
        sampler = Sampler(self.writer.tokenizer, most, model.device)
        return Batch(decoder, sampler, self.length, sizes if self.on_a_gpu else ())

    def warm(self) -> None:
        """Compile and record what most requests need, so that none of them has to wait for it."""
        use_fitting_threads(self.writer.model)
        self.threads = torch.get_num_threads()
        self.batch = batch = self.batch or self.begin()
        start = [self.writer.tokenizer.start_of_text] * 2
        for size, temperature, top in itertools.product(batch.sizes or [1], (0.0, 0.8), (0, 6)):
            if top and size > 1:
                continue
            params = SamplingParams(tokens=3, temperature=temperature)
            batch.join([BatchRow(start, params, top=top) for _ in range(size)])
            while batch.busy():
                if any(math.isnan(token.logprob) for _, token in batch.step()):
                    raise ModelError(NOT_FINITE)

    def turn(self) -> None:
        """One token more of everything, and whoever waits and fits in."""
        now = time.monotonic()
        self.batch = batch = self.batch or self.begin()

        def over(request: GenerationRequest) -> bool:
            return request.gone or now > request.deadline

        for row, request in list(self.running.items()):
            if over(request):
                batch.leave(row)
                self.finish(request, row, cut=True)
        if self.queue.length and now - self.swept > SWEEP_INTERVAL:
            self.swept = now
            for request, row in self.queue.drop(over):
                self.finish(request, row, cut=True)
        joining: list[BatchRow] = []
        reading = 0  # tokens of prompts, for which all others have to wait
        free = self.most - len(batch.rows)
        while self.queue.length and reading < self.reading and len(joining) < free:
            request, row = self.queue.next()
            self.running[row] = request
            joining.append(row)
            reading += min(len(row.prompt), self.writer.model.window() or self.length)
        batch.join(joining)
        for row, token in batch.step():
            if not (found := self.running.get(row)):
                continue  # it has ended, and this was under way
            self.engine.pending.setdefault(found)
            if found.add(row, token):
                batch.leave(row)
                self.finish(found, row)
        taken = time.monotonic() - now
        if batch.rows and taken > 0:
            self.speed = 0.95 * self.speed + 0.05 * len(batch.rows) / taken

    def finish(self, request: GenerationRequest, row: BatchRow, cut: bool = False) -> None:
        if cut:
            request.cut(row)
        self.running.pop(row, None)
        request.left -= 1
        self.engine.pending.setdefault(request)

    def busy(self) -> bool:
        return bool(self.queue.length or self.running or (self.batch and self.batch.busy()))

    def fail(self, error: Exception) -> None:
        """Whatever is written or waits ends so, and the next turn begins anew."""
        waiting = [request for request, _ in self.queue.drop(lambda request: True)]
        for request in (*self.running.values(), *waiting):
            # Without its traceback, which holds on to all that was being computed.
            request.failed, request.left = RuntimeError(repr(error)), 0
            self.engine.pending.setdefault(request)
        self.running.clear()
        self.batch = None


class Engine:
    def __init__(self, limits: Limits, note: Callable[[str], None]) -> None:
        self.limits, self.note = limits, note
        self.workers: list[ModelWorker] = []
        self.requests: deque[GenerationRequest] = deque()
        self.tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.pending: dict[GenerationRequest, None] = {}  # requests with events that were not told
        self.tellings = 0.0  # when something was told
        self.wake = threading.Event()
        self.closed = False
        self.thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self.loop: asyncio.AbstractEventLoop | None = None

    def add(self, writer: LanguageModel) -> ModelWorker:
        worker = ModelWorker(self, writer, self.limits)
        self.workers.append(worker)
        return worker

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
        handed = sum(len(request.builders) for request in list(self.requests))
        return handed + sum(worker.queue.length for worker in self.workers)

    def take(self, request: GenerationRequest) -> None:
        worker = request.worker
        room = self.limits.queue + max(0, worker.most - len(worker.running))
        if self.closed or self.waiting() + len(request.builders) > room:
            texts = max(1, worker.queue.length)
            tokens = texts * sum(row.params.tokens for row in list(worker.running)) / worker.most
            raise QueueFull(round(min(60, max(1, tokens / max(1, worker.speed) / 4))))
        self.requests.append(request)
        self.wake.set()

    async def do(self, task: Callable[[], Any]) -> Any:
        """The result of something short, computed between two tokens."""
        if self.closed or len(self.tasks) > self.limits.queue:  # one is at hand, not waiting
            raise QueueFull(1)
        future: Future[Any] = Future()
        self.tasks.append((future, task))
        self.wake.set()
        return await asyncio.wrap_future(future)

    # Called by the thread.

    def run(self) -> None:
        try:
            self.work()
        finally:  # nobody waits for a thread that has ended
            self.closed = True
            for request in self.requests:
                request.worker.queue.add(request)
            for worker in self.workers:
                pairs = [(request, row) for row, request in worker.running.items()]
                for request, row in [*pairs, *worker.queue.drop(lambda request: True)]:
                    worker.finish(request, row, cut=True)
            for future, _ in self.tasks:
                if future.set_running_or_notify_cancel():
                    future.set_exception(QueueFull(1))
            self.tell(everything=True)

    def work(self) -> None:
        while not self.closed:
            self.wake.clear()
            while self.requests:
                request = self.requests.popleft()
                request.worker.queue.add(request)
            if self.tasks:
                future, task = self.tasks.popleft()
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(task())
                    except Exception as error:
                        future.set_exception(error)
            for worker in self.workers:
                if worker.busy():
                    self.turn(worker)
            self.tell()
            if not (self.tasks or self.requests or any(worker.busy() for worker in self.workers)):
                self.tell(everything=True)
                self.wake.wait(IDLE_WAIT)

    def turn(self, worker: ModelWorker) -> None:
        try:
            if torch.get_num_threads() != worker.threads:  # another model was at work
                torch.set_num_threads(worker.threads)
            worker.turn()
        except Exception as error:  # of this model alone; the others go on
            worker.fail(error)
            with contextlib.suppress(OSError):  # a terminal that is gone
                self.note(f"writing failed: {error!r}")

    def tell(self, everything: bool = False) -> None:
        """Wake those who have events: at once if few are written, and not too often if many are."""
        now = time.monotonic()
        texts = sum(len(worker.running) for worker in self.workers)
        due = everything or now - self.tellings >= max(MIN_SEND_INTERVAL, SECONDS_PER_TEXT * texts)
        told = [
            request
            for request in self.pending
            if not request.left or (request.streamed and (due or request.has_just_begun()))
        ]
        if told and self.loop:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(rouse, told)
        if due:
            self.tellings = now
        for request in list(self.pending) if due else told:
            del self.pending[request]


def rouse(requests: list[GenerationRequest]) -> None:
    for request in requests:
        request.ready.set()
