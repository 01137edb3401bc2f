"""The compute thread: it batches the texts of many requests, and runs all other model calls.

    >>> engine = Engine(limits)
    >>> engine.add(writer)
    >>> engine.start(asyncio.get_running_loop())
    >>> request = GenerationRequest(worker, rows, client="127.0.0.1")
    >>> engine.take(request)
    >>> async for events in request.events(): ...

Requests come from the event loop and wait until there is room for their rows. Rows join and leave
the batch between two tokens (continuous batching). Models take turns, one step each, and so do long
tasks (queues.py).
"""

import asyncio
import contextlib
import itertools
import math
import threading
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from nanolm.errors import NOT_FINITE, ModelError, OutOfMemory, out_of_memory
from nanolm.generation.batch import Batch, BatchRow, SampledToken
from nanolm.generation.decoding import PREFILL_TOKENS, CachedDecoder
from nanolm.generation.language_model import LanguageModel, TextBuilder, max_rows
from nanolm.generation.sampler import Sampler
from nanolm.generation.sampling_params import SamplingParams
from nanolm.machine import give_back_memory
from nanolm.model.device import use_fitting_threads
from nanolm.serve.queues import FairQueue, LongTask, LongTasks, QueueFull, Steps

# The interval between two sends; tokens in between are sent together. Sending takes the event loop
# about a tenth of that, and this thread waits meanwhile (GIL).
SECONDS_PER_TEXT = 0.001  # for each text in progress
MIN_SEND_INTERVAL = 0.005  # seconds
CPU_PREFILL_TOKENS = 2048  # prompt tokens to read between two steps of the running texts
SWEEP_INTERVAL = 0.1  # seconds between checks for canceled requests in the queue
IDLE_WAIT = 1.0  # seconds after which an idle thread frees memory
ANSWER_BYTES = 96 << 20  # minimum budget for all responses in progress
PROMPT_BYTES = 40  # per token of a prompt
RELEASED_BYTES = 4 << 20  # of finished responses, after which memory is returned to the system
SMALL_BYTES = 64 << 10  # requests up to this size are never refused for memory
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class Limits:
    rows: int = 64  # texts generated at the same time, per model
    queue: int = 256  # texts that may wait
    tokens: int = 4096  # per text
    prompt: int = 16_384  # tokens, or the model's context length if that is more
    body: int = 1 << 20  # bytes per request
    seconds: float = 300  # after which a request is truncated

    def longest(self, window: int | None) -> int:
        """The longest prompt in tokens, for a model with this context length."""
        return max(self.prompt, window or 0)


class Tokens:
    """Generated tokens of one text, in arrays: objects would take ten times the memory."""

    def __init__(self) -> None:
        self.text = bytearray()  # UTF-8
        self.lengths = array("I")  # characters that each token added
        self.ids, self.logprobs = array("i"), array("f")
        self.top = 0  # alternatives per token
        self.top_ids, self.top_logprobs = array("i"), array("f")
        self.stopped = ""  # why it ended, as in `Sample`

    def add(self, piece: str, token: SampledToken, stopped: str) -> None:
        self.lengths.append(len(piece))
        self.ids.append(token.id)
        self.logprobs.append(token.logprob)
        self.top = len(token.top)
        self.top_ids.extend(id for id, _ in token.top)
        self.top_logprobs.extend(logprob for _, logprob in token.top)
        self.end(piece, stopped)

    def end(self, piece: str, stopped: str) -> None:
        self.text += piece.encode()
        self.stopped = stopped

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[SampledToken]:
        return map(SampledToken, self.ids, self.logprobs, self.alternatives())

    def alternatives(self) -> Iterator[list[tuple[int, float]]]:
        for number in range(len(self)):
            its = slice(number * self.top, (number + 1) * self.top)
            yield list(zip(self.top_ids[its], self.top_logprobs[its], strict=True))

    def parts(self, size: int) -> "Iterator[Tokens]":
        """The same tokens in parts of up to `size`."""
        text, at = self.text.decode(), 0
        for first in range(0, max(1, len(self)), size):
            part, its = Tokens(), slice(first, first + size)
            part.lengths, part.ids = self.lengths[its], self.ids[its]
            part.logprobs, part.top = self.logprobs[its], self.top
            its = slice(first * self.top, (first + size) * self.top)
            part.top_ids, part.top_logprobs = self.top_ids[its], self.top_logprobs[its]
            last = first + size >= len(self)
            end = len(text) if last else at + sum(part.lengths)
            part.end(text[at:end], self.stopped if last else "")
            at = end
            yield part


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
            row: (place, TextBuilder(None, row.params, worker.writer.tokenizer))
            for place, row in enumerate(rows)
        }
        self.bytes = sum(row.params.tokens * token_bytes(row.top) for row in rows)
        self.bytes += sum(len(row.prompt) * PROMPT_BYTES for row in rows if row.number == 0)
        self.deadline = time.monotonic() + seconds
        self.left = len(rows)  # unfinished texts
        self.canceled = False  # the client has disconnected
        self.failed: Exception | None = None
        self.fresh: dict[int, Tokens] = {}  # by the index of the text
        self.lock = threading.Lock()  # of `fresh`
        self.ready = asyncio.Event()

    def begin_with(self, prompts: list[Tokens], generates: bool) -> None:
        """Return the prompts before the texts. Unless it `generates`, this is all."""
        self.fresh = dict(enumerate(prompts))
        if not generates:
            self.left = 0
            for tokens in prompts:
                tokens.stopped = "length"
            self.ready.set()

    def add(self, row: BatchRow, token: SampledToken) -> bool:
        """Add a token; returns whether the text is finished."""
        place, builder = self.builders[row]
        piece = builder.add(token)
        row.written.append(token.id)
        with self.lock:
            self.fresh.setdefault(place, Tokens()).add(piece, token, builder.stopped)
        return bool(builder.stopped)

    def cut(self, row: BatchRow) -> None:
        place, builder = self.builders[row]
        with self.lock:
            self.fresh.setdefault(place, Tokens()).end(builder.transcript.finish(), "length")

    def has_just_begun(self) -> bool:
        return all(builder.count <= 1 for _, builder in self.builders.values())

    async def events(self) -> AsyncIterator[dict[int, Tokens]]:
        """New tokens of each text until all are finished; if not streamed, all of them at the end.
        Closing the iterator cancels the request."""
        try:
            while True:
                await self.ready.wait()
                self.ready.clear()
                over = not self.left  # read before `fresh`, so that no token is missed
                if self.failed:
                    raise self.failed
                fresh: dict[int, Tokens] = {}
                if over or self.streamed:
                    with self.lock:
                        fresh, self.fresh = self.fresh, fresh
                if fresh:
                    yield fresh
                if over:
                    return
        finally:
            self.cancel()

    def cancel(self) -> None:
        self.canceled = True
        self.worker.engine.wake.set()


class ByteBudget:
    """Memory held by all requests. Small ones are never refused, but connections are limited."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        self.released = 0  # bytes since the last reset

    @contextlib.contextmanager
    def hold(self, size: int, retry_after: int = 1) -> Iterator[None]:
        if size > SMALL_BYTES and self.held + size > self.most:
            raise QueueFull(retry_after)
        self.held += size
        try:
            yield
        finally:
            self.held -= size
            self.released += size


def token_bytes(top: int) -> int:
    """Memory of a token with its alternatives in `Tokens`, spare capacity included."""
    return 36 + 9 * top


class ModelWorker:
    def __init__(self, engine: "Engine", writer: LanguageModel, limits: Limits) -> None:
        self.engine, self.writer, self.limits = engine, writer, limits
        model = writer.model.eval()  # once, since it visits every module
        self.on_a_gpu = model.device.type == "cuda"
        self.length = limits.longest(model.window()) + limits.tokens
        self.most = max_rows(model, self.length, limits.rows)
        self.queue: FairQueue[tuple[GenerationRequest, BatchRow]] = FairQueue()
        self.running: dict[BatchRow, GenerationRequest] = {}
        # After a failed step, its rows rejoin one at a time. If a step fails again, the row on
        # trial caused it.
        self.suspects: deque[BatchRow] = deque()
        self.trial: BatchRow | None = None
        self.swept = 0.0  # when the queue was last swept
        self.speed = 0.0  # tokens per second, moving average
        self.threads = torch.get_num_threads()
        self.reading = PREFILL_TOKENS if self.on_a_gpu else CPU_PREFILL_TOKENS
        self.batch: Batch | None = self.begin()

    def begin(self) -> Batch:
        model, most = self.writer.model, self.most
        sizes = sorted({min(1 << power, most) for power in range(most.bit_length() + 1)})
        decoder = CachedDecoder(model, most, self.length)
        sampler = Sampler(self.writer.tokenizer, most, model.device)
        return Batch(decoder, sampler, self.length, sizes if self.on_a_gpu else ())

    def admit(self, request: GenerationRequest) -> None:
        self.queue.add(request.client, ((request, row) for row in request.builders))

    def warm(self) -> None:
        """Compile kernels and capture CUDA graphs for common requests, so that none has to wait."""
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
        """One step: admit waiting rows that fit, and generate one token for each row."""
        now = time.monotonic()

        def over(request: GenerationRequest) -> bool:
            return request.canceled or now > request.deadline

        for row, request in list(self.running.items()):
            if over(request):
                self.finish(request, row, cut=True)
        if self.queue.length and now - self.swept > SWEEP_INTERVAL:
            self.swept = now
            for request, row in self.queue.drop(lambda waiting: over(waiting[0])):
                self.finish(request, row, cut=True)
        joining = self.next_rows()
        self.batch = batch = self.batch or self.begin()
        self.join(batch, joining)
        for row, token in batch.step():
            if not (owner := self.running.get(row)):
                continue  # the row ended while this token was in flight
            self.engine.pending.setdefault(owner)
            try:
                ended = owner.add(row, token)
            except Exception as error:
                self.fail(owner, error)
            else:
                if ended:
                    self.finish(owner, row)
        self.trial = None
        taken = time.monotonic() - now
        if batch.rows and taken > 0:
            self.speed = 0.95 * self.speed + 0.05 * len(batch.rows) / taken

    def next_rows(self) -> list[BatchRow]:
        """The rows to admit: waiting ones that fit, or one on trial."""
        while self.suspects:
            if (row := self.suspects.popleft()) in self.running:
                self.trial = row
                return [row]
        rows: list[BatchRow] = []
        reading = 0  # prompt tokens, during which all other rows wait
        free = self.most - (len(self.batch.rows) if self.batch else 0)
        while self.queue.length and reading < self.reading and len(rows) < free:
            request, row = self.queue.next()
            self.running[row] = request
            rows.append(row)
            reading += min(len(row.prompt), self.writer.model.window() or self.length)
        return rows

    def join(self, batch: Batch, rows: list[BatchRow]) -> None:
        """Add rows together, or one by one if that fails, so that only the faulty one fails."""
        try:
            batch.join(rows)
        except Exception as error:
            if len(rows) == 1:
                self.fail(self.running[rows[0]], error)
            else:
                for row in rows:
                    if row in self.running:
                        self.join(batch, [row])

    def finish(self, request: GenerationRequest, row: BatchRow, cut: bool = False) -> None:
        if cut:
            request.cut(row)
        self.running.pop(row, None)
        if self.batch:
            self.batch.leave(row)
        request.left -= 1
        self.engine.pending.setdefault(request)

    def retry_after(self) -> int:
        """Estimated seconds until there is room."""
        texts = max(1, self.queue.length)
        tokens = texts * sum(row.params.tokens for row in list(self.running)) / self.most
        return round(min(60, max(1, tokens / max(1, self.speed) / 4)))

    def busy(self) -> bool:
        return bool(self.queue.length or self.running or (self.batch and self.batch.busy()))

    def fail(self, request: GenerationRequest, error: Exception) -> None:
        """End all texts of this request only."""
        # Without its traceback, which would keep tensors alive.
        request.failed, request.left = RuntimeError(repr(error)), 0
        if out_of_memory(error):
            request.failed = OutOfMemory("out of memory; reduce n, max_tokens or the prompt")
        for row in request.builders:
            self.running.pop(row, None)
            if self.batch:
                self.batch.leave(row)
        self.queue.drop(lambda waiting: waiting[0] is request)
        self.engine.pending.setdefault(request)
        with contextlib.suppress(OSError):  # the terminal was closed
            self.engine.note(f"generation failed: {error!r}")

    def recover(self, error: Exception) -> None:
        """After a failed step: fail the row that caused it and resume all others."""
        blamed = next(iter(self.running)) if len(self.running) == 1 else self.trial
        self.batch, self.trial = None, None
        if blamed in self.running:
            self.fail(self.running[blamed], error)
        self.suspects = deque(self.running)


class Engine:
    def __init__(self, limits: Limits, note: Callable[[str], None]) -> None:
        self.limits, self.note = limits, note
        largest = limits.tokens * token_bytes(MAX_TOP_LOGPROBS) + limits.body * PROMPT_BYTES
        self.budget = ByteBudget(max(ANSWER_BYTES, largest))
        self.workers: list[ModelWorker] = []
        self.requests: deque[GenerationRequest] = deque()
        self.tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.long_tasks = LongTasks()
        self.pending: dict[GenerationRequest, None] = {}  # requests with unsent tokens
        self.last_sent = 0.0
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
        """Stop; unfinished texts are truncated."""
        self.closed = True
        self.wake.set()
        if self.thread.is_alive():
            self.thread.join(timeout=10)

    # Called by the event loop.

    def waiting(self) -> int:
        handed = sum(len(request.builders) for request in list(self.requests))
        return handed + sum(worker.queue.length for worker in self.workers)

    def status(self) -> dict[str, int]:
        """The number of texts in progress and in the queue."""
        long = self.long_tasks.in_progress()
        writing = long + sum(len(worker.running) for worker in self.workers)
        waiting = self.waiting() + max(0, self.long_tasks.texts - long)
        return {"writing": writing, "waiting": waiting}

    def take(self, request: GenerationRequest) -> None:
        worker = request.worker
        room = self.limits.queue + max(0, worker.most - len(worker.running))
        if self.closed or self.waiting() + len(request.builders) > room:
            raise QueueFull(worker.retry_after())
        self.requests.append(request)
        self.wake.set()

    async def do(self, task: Callable[[], Any]) -> Any:
        """Run a short task on the compute thread, between two steps."""
        if self.closed or len(self.tasks) > self.limits.queue:  # one of them is running
            raise QueueFull(1)
        future: Future[Any] = Future()
        self.tasks.append((future, task))
        self.wake.set()
        return await asyncio.wrap_future(future)

    async def do_in_steps(self, steps: Steps, texts: int, client: str) -> list[Any]:
        """Run a long task on the compute thread, in turn with others. Canceling this ends it."""
        limit = self.limits.queue + self.limits.rows
        if self.closed or self.long_tasks.texts + texts > limit:
            raise QueueFull(1)
        task = LongTask(steps, texts, client, self.limits.seconds)
        self.long_tasks.texts += texts
        self.long_tasks.new.append(task)
        self.wake.set()
        try:
            return await asyncio.wrap_future(task.future)
        finally:
            self.long_tasks.texts -= texts

    # Called by the thread.

    def run(self) -> None:
        try:
            self.work()
        finally:  # nothing must keep waiting for this thread
            self.closed = True
            for request in self.requests:
                request.worker.admit(request)
            for worker in self.workers:
                pairs = [(request, row) for row, request in worker.running.items()]
                for request, row in [*pairs, *worker.queue.drop(lambda waiting: True)]:
                    worker.finish(request, row, cut=True)
            for future, _ in self.tasks:
                if future.set_running_or_notify_cancel():
                    future.set_exception(QueueFull(1))
            self.long_tasks.close()
            self.notify(everything=True)

    def work(self) -> None:
        while not self.closed:
            self.wake.clear()
            while self.requests:
                request = self.requests.popleft()
                request.worker.admit(request)
            if self.tasks:
                future, task = self.tasks.popleft()
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(task())
                    except Exception as error:
                        future.set_exception(error)
            self.long_tasks.turn()
            for worker in self.workers:
                if worker.busy():
                    self.turn(worker)
            self.notify()
            if not (self.tasks or self.requests or self.busy()):
                self.notify(everything=True)
                if not self.wake.wait(IDLE_WAIT) and self.budget.released > RELEASED_BYTES:
                    self.budget.released = 0
                    give_back_memory()

    def busy(self) -> bool:
        return self.long_tasks.busy() or any(worker.busy() for worker in self.workers)

    def turn(self, worker: ModelWorker) -> None:
        try:
            if torch.get_num_threads() != worker.threads:  # another model ran in between
                torch.set_num_threads(worker.threads)
            worker.turn()
        except Exception as error:  # affects only this model
            worker.recover(error)

    def notify(self, everything: bool = False) -> None:
        """Wake requests that have tokens to send, less often when more texts are in progress."""
        now = time.monotonic()
        texts = sum(len(worker.running) for worker in self.workers)
        due = everything or now - self.last_sent >= max(MIN_SEND_INTERVAL, SECONDS_PER_TEXT * texts)
        ready = [
            request
            for request in self.pending
            if not request.left or (request.streamed and (due or request.has_just_begun()))
        ]
        if ready and self.loop:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(wake, ready)
        if due:
            self.last_sent = now
        for request in list(self.pending) if due else ready:
            del self.pending[request]


def wake(requests: list[GenerationRequest]) -> None:
    for request in requests:
        request.ready.set()
