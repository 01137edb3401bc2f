"""The server's routes: the playground, the API, and how responses are sent.

>>> app = application(models, limits, address="127.0.0.1", key=None, note=print)
"""

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import mul
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from nanolm.errors import NanolmError, OutOfMemory
from nanolm.generation.decoding import first_visible
from nanolm.generation.transcript import token_name
from nanolm.serve import api
from nanolm.serve.echo import echo_prompts
from nanolm.serve.engine import (
    CPU_PREFILL_TOKENS,
    MAX_TOP_LOGPROBS,
    ByteBudget,
    Engine,
    GenerationRequest,
    Limits,
    Tokens,
    token_bytes,
)
from nanolm.serve.guard import (
    AccessGuard,
    Receive,
    Scope,
    Send,
    declared_size,
    parse_json,
    read_body,
)
from nanolm.serve.models import ServedClassifier, ServedLanguageModel, ServedModel, ServedTranslator
from nanolm.serve.openapi import document
from nanolm.serve.queues import QueueFull, TookTooLong
from nanolm.serve.request_models import APIError, RequestModels, advice, checked
from nanolm.text.page import SURPRISE_STYLE
from nanolm.webpage import beside

PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/reading.js": ("reading.js", "text/javascript; charset=utf-8"),
    "/writing.js": ("writing.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
MAX_INSPECTIONS = 8  # pages to keep
LONG_BODY = 20_000  # bytes from which a request is validated in another thread
BODY_BYTES = 64 << 20  # of all requests that are being read and validated
MAX_WEIGHTS, WEIGHT_BYTES = 1 << 22, 8  # of the alignments of a request
MAX_REQUEST_TOKENS = 1_000_000  # alternatives included, unless the request is for a single text

Kind = TypeVar("Kind", bound=ServedModel)


class Server:
    def __init__(
        self, models: dict[str, ServedModel], limits: Limits, note: Callable[[str], None]
    ) -> None:
        self.models, self.limits, self.note = models, limits, note
        self.engine = Engine(limits, note)
        self.workers = {
            name: self.engine.add(model.loaded)
            for name, model in models.items()
            if isinstance(model, ServedLanguageModel)
        }
        for model in models.values():
            model.loaded.model.eval()
        self.requests = RequestModels(models, limits)
        self.document = document(self.requests)
        self.inspections: dict[str, str] = {}
        self.bodies = ByteBudget(BODY_BYTES)
        self.threads = ThreadPoolExecutor(4, "check")  # more would only slow each other down

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        with contextlib.closing(self.engine):
            self.engine.start(asyncio.get_running_loop())
            yield

    def routes(self) -> list[Route]:
        pages = {path: beside(__file__, f"page/{name}") for path, (name, _) in PAGE_FILES.items()}
        pages["/page.css"] = SURPRISE_STYLE + pages["/page.css"]

        async def page(request: Request) -> Response:
            path = request.url.path
            return Response(pages[path], media_type=PAGE_FILES[path][1])

        def post(path: str, model: type[BaseModel], answer: Callable[..., Any]) -> Route:
            async def endpoint(request: Request) -> Response:
                with self.bodies.hold(declared_size(request, self.limits.body)):
                    data = await read_body(request, self.limits.body)
                    request.state.size = len(data)
                    given = await self.offload(request, lambda: checked(parse_json(data), model))
                    response: Response = await answer(request, given)
                return response

            return Route(path, endpoint, methods=["POST"])

        return [
            *(Route(path, page) for path in pages),
            Route("/look/{name}", self.show_inspection),
            Route("/health", self.health),
            Route("/openapi.json", self.openapi),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{id}", self.show_model),
            post("/v1/completions", self.requests.completion, self.write),
            post("/v1/chat/completions", self.requests.chat, self.write),
            post("/v1/classify", self.requests.classification, self.classify),
            post("/v1/translate", self.requests.translation, self.translate),
            post("/v1/tokenize", self.requests.tokenization, self.tokenize),
            post("/v1/probabilities", self.requests.probabilities, self.probabilities),
            post("/v1/inspect", self.requests.inspection, self.inspect),
            post("/v1/walk", self.requests.walk, self.walk),
        ]

    async def health(self, request: Request) -> Response:
        if not self.engine.thread.is_alive():
            raise APIError("the generation thread has stopped", 503)
        return JSONResponse({"status": "ok", "models": len(self.models), **self.engine.status()})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(self.document)

    def facts(self, model: ServedModel) -> dict[str, Any]:
        return {**model.facts(), "max_tokens": self.limits.tokens}

    async def list_models(self, request: Request) -> Response:
        data = [self.facts(model) for model in self.models.values()]
        return JSONResponse({"object": "list", "data": data})

    async def show_model(self, request: Request) -> Response:
        if model := self.models.get(request.path_params["id"]):
            return JSONResponse(self.facts(model))
        known = ", ".join([*self.models][:20])
        raise APIError(f"no such model; served are {known}", 404, "model", "model_not_found")

    def model(self, given: dict[str, Any], kind: type[Kind], needs_attention: bool = False) -> Kind:
        for model in self.models.values():
            named = given.get("model") in (None, model.name)
            if isinstance(model, kind) and named and (model.attention or not needs_attention):
                return model
        problem = f"no {kind.kind} that supports this is served; {advice(self.models.values())}"
        raise APIError(problem, 404, "model", "model_not_found")

    async def write(self, request: Request, given: dict[str, Any]) -> Response:
        writer = self.model(given, ServedLanguageModel)
        worker = self.workers[writer.name]
        answer: api.Answer = await self.offload(request, api.parse, given, writer, self.limits)
        rows = answer.rows
        if len(rows) > (most := self.limits.queue + worker.most):
            raise APIError(f"the request is for {len(rows)} texts; the limit is {most}", param="n")
        prompts = [len(row.prompt) if answer.echo else 0 for row in rows]
        total = sum(
            (row.params.tokens + prompt) * (1 + row.top)
            for row, prompt in zip(rows, prompts, strict=True)
        )
        if total > (most := max(MAX_REQUEST_TOKENS, self.limits.tokens * (1 + MAX_TOP_LOGPROBS))):
            wanted = f"{total:,} tokens and alternatives exceed the limit of {most:,} per request"
            raise APIError(f"{wanted}; reduce n, max_tokens or logprobs")
        client = client_of(request, given)
        streamed = given.get("stream", False)
        generation = GenerationRequest(worker, rows, client, self.limits.seconds, streamed)
        echo = None
        if answer.echo:
            generation.bytes += 2 * sum(map(mul, prompts, (token_bytes(row.top) for row in rows)))
            steps = echo_prompts(writer, rows, answer.logprobs)
            echo = partial(self.engine.do_in_steps, steps, len(rows), client)
        return (Stream if streamed else Whole)(self.engine, generation, answer, echo)

    async def offload(self, request: Request, call: Callable[..., Any], *values: Any) -> Any:
        """Run `call`, in another thread if the request is so long that it may take a while."""
        if request.state.size < LONG_BODY:
            return call(*values)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads, partial(call, *values))

    def count(self, model: ServedModel, texts: list[str]) -> list[int]:
        """The ids of all texts, which together must not exceed the limit of one prompt."""
        ids = [id for text in texts for id in model.tokenizer.encode_prompt(text)]
        if len(ids) > (most := self.limits.longest(model.window)):
            raise APIError(f"the input has {len(ids):,} tokens; the limit is {most:,}")
        return ids

    async def classify(self, request: Request, given: dict[str, Any]) -> Response:
        classifier, texts = self.model(given, ServedClassifier), given["input"]
        texts = [texts] if isinstance(texts, str) else texts
        await self.offload(request, self.count, classifier, texts)
        results = await self.engine.do(lambda: classifier.classify(texts))
        return JSONResponse(api.labels_json(classifier, results))

    async def translate(self, request: Request, given: dict[str, Any]) -> Response:
        model, texts = self.model(given, ServedTranslator), given["text"]
        texts = [texts] if isinstance(texts, str) else texts
        params, aligned = api.translate_params(given, self.limits), given.get("alignment", False)
        tokens = len(await self.offload(request, self.count, model, texts))
        weights = aligned * tokens * min(params.max_tokens or model.window, model.window)
        if weights > MAX_WEIGHTS:
            wanted = f"the alignment of {tokens:,} source tokens could need {weights:,} weights"
            raise APIError(f"{wanted}, but the limit is {MAX_WEIGHTS:,}; send less text")
        steps = model.translate(texts, params, partial(model.result, alignment=aligned))
        task = partial(self.engine.do_in_steps, steps, len(texts), client_of(request, given))
        return Translated(self.engine, task, model, size=WEIGHT_BYTES * weights)

    async def tokenize(self, request: Request, given: dict[str, Any]) -> Response:
        model = self.model(given, ServedModel)
        ids = await self.offload(request, self.count, model, [given["text"]])
        tokens = [token_name(model.tokenizer, id) for id in ids]
        unseen = first_visible(len(ids), model.window)  # when a language model continues the text
        return JSONResponse({"model": model.name, "ids": ids, "tokens": tokens, "unseen": unseen})

    async def probabilities(self, request: Request, given: dict[str, Any]) -> Response:
        model = self.model(given, ServedLanguageModel)
        row = (await self.offload(request, api.parse, given, model, self.limits)).rows[0]
        if (count := len(row.prompt)) > CPU_PREFILL_TOKENS:
            raise APIError(f"the prompt has {count:,} tokens; the limit is {CPU_PREFILL_TOKENS:,}")
        generated = min(given.get("generated", 0), count)
        return JSONResponse(await self.engine.do(lambda: model.probabilities(row, generated)))

    async def inspect(self, request: Request, given: dict[str, Any]) -> Response:
        model = self.model(given, ServedModel, needs_attention=True)
        ids = await self.ids_of(request, model, given)
        if isinstance(model, ServedTranslator):
            steps = model.inspect_in_steps(ids)
            (page,) = await self.engine.do_in_steps(steps, 1, client_of(request, given))
        else:
            page = await self.engine.do(lambda: model.inspect(ids))
        return await self.keep(page)

    async def walk(self, request: Request, given: dict[str, Any]) -> Response:
        model = self.model(given, ServedLanguageModel)
        ids = await self.ids_of(request, model, given)
        return await self.keep(await self.engine.do(lambda: model.walk(ids)))

    async def ids_of(
        self, request: Request, model: ServedModel, given: dict[str, Any]
    ) -> list[int]:
        """The tokens of a request, given as ids or as text."""
        ids: list[int] = given.get("ids") or []
        if not ids:
            text = given.get("text", "")
            if isinstance(model, ServedClassifier):
                text = text.strip()  # as for classification
            ids = await self.offload(request, model.tokenizer.encode_prompt, text)
        if max(ids) >= model.tokenizer.vocab_size:
            raise APIError(f"token id {max(ids)} is out of range", param="ids")
        return ids

    async def keep(self, page: Callable[[], str]) -> Response:
        """Render a page and keep it; responds with its path."""
        name = secrets.token_urlsafe(16)
        self.inspections[name] = await asyncio.to_thread(page)
        while len(self.inspections) > MAX_INSPECTIONS:
            del self.inspections[next(iter(self.inspections))]
        return JSONResponse({"page": f"/look/{name}"})

    async def show_inspection(self, request: Request) -> Response:
        page = self.inspections.get(request.path_params["name"])
        if page is None:
            raise HTTPException(404)
        # The page's own policy allows its style and script by hash, and nothing else.
        policy = "frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
        return HTMLResponse(page, headers={"content-security-policy": policy})

    async def refuse(self, request: Request, error: Exception) -> Response:
        headers: dict[str, str] = {}
        match error:
            case APIError():
                refusal = error
            case QueueFull():
                refusal = APIError(str(error), 429, code="rate_limit_exceeded")
                headers["retry-after"] = str(error.seconds)
            case HTTPException():
                about = {404: "no such path", 405: "this path does not support this method"}
                status = error.status_code
                refusal = APIError(about.get(status, error.detail), status)
                headers |= error.headers or {}
            case OutOfMemory() | TookTooLong():
                refusal = APIError(str(error), 503)
            case NanolmError():
                refusal = APIError(str(error))
            case _:
                self.note(f"{request.url.path} failed: {error!r}")
                refusal = APIError("internal error", 500)
        return JSONResponse(refusal.body(), refusal.status, headers)


class Generated(Response):
    """Submits a request to the engine and sends the texts as fast as the client reads them. A byte
    budget limits how much is buffered."""

    def __init__(self, engine: Engine, size: int, retry_after: int = 1) -> None:
        self.engine, self.size, self.retry_after = engine, size, retry_after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = self.engine.budget.hold(self.size, self.retry_after)
        with held, listening(receive, self.begin()) as listener:
            async for chunk in self.send_start(send):
                if listener.done():  # the client has disconnected
                    return
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await asyncio.sleep(0)  # let other tasks run
            if not listener.done():
                await send({"type": "http.response.body", "body": b""})

    def begin(self) -> Callable[[], object]:
        """Submit the request. Calling the result cancels it."""
        raise NotImplementedError

    async def send_start(self, send: Send) -> AsyncIterator[bytes]:
        """Send status and headers, and yield the chunks of the body."""
        raise NotImplementedError
        yield


class Completed(Generated):
    def __init__(
        self,
        engine: Engine,
        generation: GenerationRequest,
        answer: api.Answer,
        echo: Callable[[], Coroutine[Any, Any, list[Tokens]]] | None,
    ) -> None:
        super().__init__(engine, generation.bytes, generation.worker.retry_after())
        self.generation, self.answer, self.echo = generation, answer, echo
        self.echoing: asyncio.Task[list[Tokens]] | None = None

    def begin(self) -> Callable[[], object]:
        if self.echo:
            self.echoing = asyncio.create_task(self.echo())
        elif self.answer.generates:
            self.engine.take(self.generation)
        else:
            self.generation.begin_with([Tokens() for _ in self.answer.rows], generates=False)
        return self.cancel

    def cancel(self) -> None:
        if self.echoing:
            self.echoing.cancel()
        self.generation.cancel()

    async def echoed(self) -> bool:
        """Wait for the echoed prompts, if any, before generating; False if that was canceled."""
        if self.echoing:
            await asyncio.wait([self.echoing])
            if self.echoing.cancelled():
                return False
            self.generation.begin_with(self.echoing.result(), self.answer.generates)
            if self.answer.generates:
                self.engine.take(self.generation)
        return True


class Whole(Completed):
    async def send_start(self, send: Send) -> AsyncIterator[bytes]:
        if not await self.echoed():
            return
        texts: dict[int, Tokens] = {}
        async for fresh in self.generation.events():
            texts = fresh  # everything arrives at once
        async for chunk in send_json(self.answer.whole(texts), send):
            yield chunk


class Translated(Generated):
    def __init__(
        self,
        engine: Engine,
        task: Callable[[], Coroutine[Any, Any, list[dict[str, Any]]]],
        model: ServedTranslator,
        size: int,
    ) -> None:
        super().__init__(engine, size)
        self.task, self.model = task, model

    def begin(self) -> Callable[[], object]:
        self.work = asyncio.create_task(self.task())
        return self.work.cancel

    async def send_start(self, send: Send) -> AsyncIterator[bytes]:
        await asyncio.wait([self.work])
        if not self.work.cancelled():
            chunks = api.translations_json(self.model, self.work.result())
            async for chunk in send_json(chunks, send):
                yield chunk


async def send_json(chunks: Iterator[bytes], send: Send) -> AsyncIterator[bytes]:
    first, rest = next(chunks), next(chunks, None)
    headers = {"content-type": "application/json"}
    if rest is None:
        headers["content-length"] = str(len(first))
    await send(start(headers))
    yield first
    if rest is not None:
        yield rest
    for chunk in chunks:
        yield chunk


class Stream(Completed):
    async def send_start(self, send: Send) -> AsyncIterator[bytes]:
        if not await self.echoed():
            return
        await send(start({"content-type": "text/event-stream; charset=utf-8"}))
        try:
            async for texts in self.generation.events():
                parts = (self.answer.parts(place, tokens) for place, tokens in texts.items())
                for chunk in api.chunks(itertools.chain.from_iterable(parts)):
                    yield chunk
            yield self.answer.last().encode()
        except Exception as error:  # the status has already been sent
            about = str(error) if isinstance(error, OutOfMemory) else "internal error"
            yield api.event(APIError(about, 500).body()).encode()


def start(headers: dict[str, str]) -> dict[str, Any]:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": raw}


@contextlib.contextmanager
def listening(receive: Receive, cancel: Callable[[], object]) -> Any:
    """Watch for the client to disconnect, which cancels the request."""

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        cancel()

    listener = asyncio.create_task(listen())
    try:
        yield listener
    finally:
        cancel()
        listener.cancel()


def client_of(request: Request, given: dict[str, Any]) -> str:
    return f"{request.client.host if request.client else ''} {given.get('user', '')}"


def application(
    models: dict[str, ServedModel],
    limits: Limits,
    address: str,
    key: str | None,
    note: Callable[[str], None],
    hosts: tuple[str, ...] = (),
    origins: tuple[str, ...] = (),
) -> AccessGuard:
    server = Server(models, limits, note)
    handlers: Any = dict.fromkeys((NanolmError, HTTPException, Exception), server.refuse)
    app = Starlette(routes=server.routes(), lifespan=server.lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False
    app.state.server = server
    return AccessGuard(app, address, key, hosts, origins)
