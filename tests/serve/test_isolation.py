"""A failure in one text ends only that text; the others are unaffected."""

import asyncio
import json
import random
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
from models import small_vocabulary
from servers import Served, Start
from starlette.responses import JSONResponse

from nanolm.errors import OutOfMemory
from nanolm.generation.batch import Batch, BatchRow
from nanolm.generation.language_model import LanguageModel, load
from nanolm.generation.sampling_params import SamplingParams
from nanolm.serve.engine import Engine, GenerationRequest, Limits, ModelWorker
from nanolm.serve.request_models import APIError

Failing = Callable[..., Any]


@pytest.mark.parametrize("size", [1, 2, 4, 6, 19, 30])
def test_more_likeliest_tokens_than_there_are(tmp_path: Path, size: int) -> None:
    writer = load(small_vocabulary(tmp_path / "x", size), print)
    engine = Engine(Limits(rows=3), note=print)
    worker = engine.add(writer)
    worker.warm()
    batch = worker.begin()
    params = SamplingParams(tokens=4, min_tokens=4, top_k=50)
    rows = [BatchRow([0], replace(params, seed=top), top=top) for top in (0, 20, 3)]
    batch.join(rows)
    tokens = {row: [] for row in rows}  # type: dict[BatchRow, list[int]]
    for _ in range(4):
        for row, token in batch.step():
            tokens[row].append(token.id)
            assert len({id for id, _ in token.top}) == min(row.top, size)
            assert all(logprob <= 0 for _, logprob in token.top)
    for row in rows:
        assert tokens[row] == alone(writer, row)


def alone(writer: LanguageModel, row: BatchRow) -> list[int]:
    batch = Engine(Limits(rows=1), note=print).add(writer).begin()
    batch.join([replace(row, written=array("i"))])
    return [token.id for _ in range(row.params.tokens) for _, token in batch.step()]


KINDS = (
    SamplingParams(greedy=True),
    SamplingParams(top_p=0.9, repetition_penalty=1.3),
    SamplingParams(top_k=9, frequency_penalty=0.4, presence_penalty=-0.2),
    SamplingParams(temperature=1.4, ban=("a", "the c")),
    SamplingParams(min_p=0.05, min_tokens=300),
)


def rows_of(count: int, seed: int, tokens: int) -> list[BatchRow]:
    source = random.Random(seed)
    return [
        BatchRow(
            source.choices(range(256), k=source.randint(1, 50)),
            replace(KINDS[number % len(KINDS)], tokens=tokens, seed=source.randint(0, 99)),
            top=source.choice((0, 3, 20)),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("name", ["writer", "other"])
def test_a_row_that_joins_again_goes_on_as_if_it_had_stayed(models: Path, name: str) -> None:
    writer = load(models / name, print)
    worker = Engine(Limits(rows=5), note=print).add(writer)
    rows = rows_of(5, 1, tokens=262)
    expected = {row: alone(writer, row) for row in rows}
    for at in (1, 40, 256, 257):
        batch = worker.begin()
        for row in rows:
            row.written = array("i", expected[row][:at])
        batch.join(rows)
        for _ in range(4):
            for row, token in batch.step():
                assert token.id == expected[row][len(row.written)]
                row.written.append(token.id)


def broken_at(step: int, bad: list[BatchRow], error: Exception) -> Failing:
    """Makes a step fail when one of these rows has this many tokens."""
    launch = Batch.launch

    def fail(batch: Batch) -> None:
        for row, length in zip(batch.rows, batch.lengths, strict=True):
            if row in bad and length >= len(row.prompt) + step:
                raise error
        launch(batch)

    return fail


def failing_join(step: int, bad: list[BatchRow], error: Exception) -> Failing:
    from nanolm.generation.sampler import Sampler

    begin = Sampler.begin

    def fail(sampler: Sampler, place: int, params: SamplingParams, *rest: Any) -> None:
        begin(sampler, place, params, *rest)
        if any(params is row.params for row in bad):
            raise error

    return fail


def failing_text(step: int, bad: list[BatchRow], error: Exception) -> Failing:
    add = GenerationRequest.add

    def fail(request: GenerationRequest, row: BatchRow, token: Any) -> bool:
        if row in bad and request.builders[row][1].count >= step:
            raise error
        return add(request, row, token)

    return fail


WAYS = {
    "step": ("nanolm.generation.batch.Batch.launch", broken_at),
    "join": ("nanolm.generation.sampler.Sampler.begin", failing_join),
    "text": ("nanolm.serve.engine.GenerationRequest.add", failing_text),
}


@pytest.mark.parametrize("step", [0, 7])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", [RuntimeError("out of luck"), MemoryError()])
def test_what_fails_in_one_row_ends_that_request_alone(
    models: Path, monkeypatch: pytest.MonkeyPatch, way: str, step: int, error: Exception
) -> None:
    writer, rows = load(models / "writer", print), rows_of(9, 3, tokens=20)
    expected = {row: alone(writer, row) for row in rows}
    bad = [rows[4], rows[7]]
    where, make = WAYS[way]

    async def write() -> dict[BatchRow, Any]:
        engine = Engine(Limits(rows=6, queue=20), note=notes.append)
        worker: ModelWorker = engine.add(writer)
        engine.start(asyncio.get_running_loop())
        asked = {row: GenerationRequest(worker, [row]) for row in rows}
        for request in asked.values():
            engine.take(request)
        results = await asyncio.gather(*map(told, asked.values()), return_exceptions=True)
        engine.close()
        assert not worker.running and not worker.queue.length
        return dict(zip(rows, results, strict=True))

    async def told(request: GenerationRequest) -> list[int]:
        return [
            id async for part in request.events() for tokens in part.values() for id in tokens.ids
        ]

    notes: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(where, make(step, bad, error))
        found = asyncio.run(write())
    for row in rows:
        if row in bad:
            kind = OutOfMemory if isinstance(error, MemoryError) else RuntimeError
            assert isinstance(found[row], kind)
        else:
            stop = next((n for n, id in enumerate(expected[row], 1) if id in ends(writer)), 20)
            assert found[row] == expected[row][:stop]
    assert len(notes) == len(bad)


def ends(writer: LanguageModel) -> set[int]:
    return writer.tokenizer.stops


@pytest.mark.parametrize(
    "what", ["generation.batch.Batch.launch", "serve.engine.ModelWorker.begin"]
)
def test_where_every_step_fails_every_request_is_told(
    models: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    async def told(request: GenerationRequest) -> list[Any]:
        return [part async for part in request.events()]

    async def write() -> list[Any]:
        engine = Engine(Limits(rows=3, queue=20), note=lambda text: None)
        worker = engine.add(load(models / "writer", print))
        worker.batch = None
        monkeypatch.setattr(f"nanolm.{what}", fail)
        engine.start(asyncio.get_running_loop())
        asked = [GenerationRequest(worker, [row]) for row in rows_of(7, 3, tokens=5)]
        for request in asked:
            engine.take(request)
        results = await asyncio.gather(*map(told, asked), return_exceptions=True)
        engine.close()
        return results

    assert [str(each) for each in asyncio.run(write())] == ["RuntimeError('out of luck')"] * 7


def completion(server: Served, **body: Any) -> requests.Response:
    url = f"{server.url}/v1/completions"
    return requests.post(url, json=body, timeout=30)


def test_requests_beside_each_other_get_what_they_get_alone(start: Start, tmp_path: Path) -> None:
    """Over HTTP, with a vocabulary of 9 tokens: more logprobs than tokens, filters and bans that
    leave nothing, extreme penalties, wrong ids, clients that disconnect."""
    server = start("--batch", 16, names=(small_vocabulary(tmp_path / "few", 9),))
    usual = {"prompt": [1, 2], "max_tokens": 60, "min_tokens": 60, "temperature": 1.2}
    quiet = [{**usual, "seed": seed, "n": 1 + seed % 3} for seed in range(6)]
    loud = [
        {**usual, "logprobs": 20},
        {**usual, "logprobs": 20, "n": 3, "stream": True},
        {**usual, "ban": ["w", " "], "logprobs": 0},
        {**usual, "top_k": 1_000_000, "top_p": 1e-9, "typical_p": 1e-9, "min_p": 1.0},
        {**usual, "repetition_penalty": 100, "frequency_penalty": -100, "presence_penalty": 100},
        {**usual, "temperature": 0, "stop": ["w1", "\u0000", "w" * 200]},
        {**usual, "temperature": 100, "seed": 2**53},
        {**usual, "prompt": [1, 9]},
        {**usual, "prompt": "\ud800"},
        {**usual, "prompt": [1, 2] * 8000, "max_tokens": 2, "min_tokens": 0},
    ]

    def texts(body: dict[str, Any]) -> list[str]:
        return [choice["text"] for choice in completion(server, **body).json()["choices"]]

    def hang_up(body: dict[str, Any]) -> int:
        url = f"{server.url}/v1/completions"
        with requests.post(url, json={**body, "stream": True}, stream=True, timeout=30) as answer:
            next(answer.iter_content(10), b"")
            return int(answer.status_code)

    expected = [texts(body) for body in quiet]
    with ThreadPoolExecutor(24) as pool:
        statuses = [pool.submit(completion, server, **body) for body in loud]
        gone = [pool.submit(hang_up, body) for body in loud[:7]]
        found = [*pool.map(texts, quiet * 2)]
    assert found == expected * 2
    assert [each.result().status_code for each in statuses] == [200] * 7 + [400, 400, 200]
    assert [each.result() for each in gone] == [200] * 7
    first = statuses[0].result().json()["choices"][0]["logprobs"]
    assert {len(top) for top in first["top_logprobs"]} == {9}


@pytest.mark.parametrize("size", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_smallest_vocabularies_are_served(start: Start, tmp_path: Path, size: int) -> None:
    server = start(names=(small_vocabulary(tmp_path / "few", size),))
    answer = completion(server, prompt="w1 w2", max_tokens=3, logprobs=20)
    assert answer.status_code == 200


def test_an_error_can_quote_half_a_character() -> None:
    body = APIError("\ud800 is not known here", param="x.\ud800").body()
    assert json.loads(bytes(JSONResponse(body).body))["error"]["param"] == r"x.\ud800"


# Bodies that only some parsers accept as JSON.
BODIES = [
    r'{"\ud800": 1}',
    r'{"prompt": "a\udfff b"}',
    r'{"prompt": ["a", "\ud83d"]}',
    r'{"model": "\ud800"}',
    r'{"user": "\ud800"}',
    r'{"stop": "\ud800"}',
    r'{"stop": ["a", "\ud800"]}',
    r'{"ban": ["\ud800"]}',
    r'{"metadata": {"\ud800": "\ud800"}}',
    r'{"stream_options": {"\udc00": true}}',
    r'{"messages": [{"role": "user", "content": "\ud800"}]}',
    r'{"messages": [{"role": "\ud800", "content": "a"}]}',
    r'{"messages": [{"role": "user", "content": "a", "name": "\ud800"}]}',
    r'{"input": "\ud800", "text": "\udc00"}',
    r'{"text": "\ud800"}',
    r'{"input": ["\ud800"]}',
    r'"\ud800"',
    r'["\ud800"]',
    '{"temperature": NaN}',
    '{"temperature": -Infinity}',
    '{"temperature": 1e999}',
    f'{{"temperature": 1{"0" * 400}}}',
    f'{{"temperature": 1{"0" * 5000}}}',
    f'{{"max_tokens": 1{"0" * 4000}}}',
    '{"seed": -1000000000000000000000000000000}',
    '{"prompt": [1000000000000000000000000000000]}',
    '{"ids": [-1000000000000000000000000000000, 1e400]}',
    '{"n": 1e3000, "n": 2, "max_tokens": 3}',
    '{"prompt": "a", "prompt": 5, "prompt": "b", "max_tokens": 1}',
    r'{"prompt": "a\u0000b", "stop": "\u0000", "max_tokens": 1, "user": "\u0000"}',
    "[" * 100_000 + "]" * 100_000,
    "[" * 900 + "]" * 900,
    '{"prompt": ' + "[" * 900 + "1" + "]" * 900 + "}",
    '{"a":' * 50_000 + "1" + "}" * 50_000,
    '{"stream_options": ' + '{"a":' * 800 + "1" + "}" * 801,
    "",
    "null",
    "\ufeff{}",
    "0" * 10_000,
]


@pytest.mark.parametrize(
    "path", ["completions", "chat/completions", "classify", "tokenize", "inspect"]
)
def test_strange_json_is_refused_or_answered(served: Served, path: str) -> None:
    for body in BODIES:
        kind = {"content-type": "application/json"}
        url = f"{served.url}/v1/{path}"
        answer = requests.post(url, data=body.encode(), headers=kind, timeout=30)
        assert answer.status_code in (200, 400, 404), (body[:80], answer.text[:300])
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert {*error} == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            assert len(error["message"]) < 1000
