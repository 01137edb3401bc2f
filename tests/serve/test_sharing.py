"""Queueing, batching and events of the engine, without a socket."""

import asyncio
from pathlib import Path

import pytest

from nanolm.generation.batch import Batch, BatchRow
from nanolm.generation.language_model import LanguageModel, load
from nanolm.generation.sampling_params import SamplingParams
from nanolm.serve.engine import Engine, GenerationRequest, Limits, ModelWorker, Tokens
from nanolm.serve.models import ServedLanguageModel, names_of
from nanolm.serve.queues import FairQueue, QueueFull
from nanolm.text.tokenizer import train_tokenizer


@pytest.fixture
def engine(models: Path) -> Engine:
    engine = Engine(Limits(rows=3, queue=20), note=print)
    engine.add(load(models / "writer", print))
    return engine


def request_of(
    worker: ModelWorker, count: int, client: str = "", tokens: int = 12, seed: int = 0
) -> GenerationRequest:
    params = SamplingParams(tokens=tokens, min_tokens=tokens, seed=seed)
    return GenerationRequest(
        worker, [BatchRow([seed + 1, 2], params, which) for which in range(count)], client
    )


def test_clients_take_turns(engine: Engine) -> None:
    (worker,) = engine.workers
    for name, count in (("a", 5), ("b", 1), ("c", 2)):
        worker.admit(request_of(worker, count, name))
    names = "".join(worker.queue.next()[0].client for _ in range(worker.queue.length))
    assert names == "abcacaaa"
    assert worker.queue.length == 0


def test_who_has_gone_waits_no_longer() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add("a", ["going"] * 3)
    queue.add("a", ["staying"] * 2)
    assert queue.drop(lambda item: item == "going") == ["going"] * 3
    assert [queue.next() for _ in range(queue.length)] == ["staying"] * 2


async def all_of(request: GenerationRequest) -> dict[int, Tokens]:
    (texts,) = [texts async for texts in request.events()]
    return texts


def test_requests_share_steps_and_nothing_else(engine: Engine) -> None:
    """Seven texts of three requests in three rows: each as if it were alone."""

    async def ask() -> list[dict[int, Tokens]]:
        engine.start(asyncio.get_running_loop())
        requests = [request_of(worker, count, seed=7 * count) for count in (4, 2, 1)]
        for request in requests:
            engine.take(request)
        return await asyncio.gather(*map(all_of, requests))

    (worker,) = engine.workers
    steps = 0

    def counted() -> None:
        nonlocal steps
        steps += 1
        launch()

    assert worker.batch
    launch = worker.batch.launch
    worker.batch.launch = counted  # type: ignore[method-assign]
    found = asyncio.run(ask())
    engine.close()
    assert 12 * 7 / 3 <= steps <= 12 * 4  # not 12 * 7
    for request, count in zip(found, (4, 2, 1), strict=True):
        for place in range(count):
            expected = alone(worker.writer, [7 * count + 1, 2], place, 7 * count)
            assert list(request[place].ids) == expected
            assert request[place].stopped == "length"


def alone(writer: LanguageModel, prompt: list[int], number: int, seed: int) -> list[int]:
    batch = Engine(Limits(rows=1), note=print).add(writer).begin()
    batch.join([BatchRow(prompt, SamplingParams(tokens=12, min_tokens=12, seed=seed), number)])
    return [token.id for _ in range(12) for _, token in batch.step()]


def test_what_fails_is_told_and_the_next_is_written(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        engine.start(asyncio.get_running_loop())
        (worker,) = engine.workers

        def fail(batch: Batch) -> None:
            raise RuntimeError("out of luck")

        broken = request_of(worker, 5)
        with monkeypatch.context() as patch:
            patch.setattr(Batch, "launch", fail)
            engine.take(broken)
            with pytest.raises(RuntimeError, match="out of luck"):
                await all_of(broken)
        fine = request_of(worker, 2)
        engine.take(fine)
        assert sum(map(len, (await all_of(fine)).values())) == 24
        with pytest.raises(ZeroDivisionError):
            await engine.do(lambda: 1 // 0)
        assert await engine.do(lambda: 6 * 7) == 42

    asyncio.run(ask())
    engine.close()


def test_without_a_queue_there_is_still_one_at_a_time(models: Path) -> None:
    async def ask() -> None:
        engine = Engine(Limits(rows=1, queue=0), note=print)
        worker = engine.add(load(models / "writer", print))
        engine.start(asyncio.get_running_loop())
        assert await engine.do(lambda: 6 * 7) == 42
        only = request_of(worker, 1)
        engine.take(only)
        assert len((await all_of(only))[0]) == 12
        engine.close()

    asyncio.run(ask())


def test_more_than_may_wait_are_refused(engine: Engine) -> None:
    async def ask() -> None:
        (worker,) = engine.workers
        engine.take(request_of(worker, 16))
        engine.take(request_of(worker, 7))
        with pytest.raises(QueueFull):
            engine.take(request_of(worker, 1))

    asyncio.run(ask())


def test_names_tell_nothing_of_where_a_model_is() -> None:
    runs = ["/home/me/runs/novel", "runs/novel/best", "hf://openai/gpt2", "x/checkpoints/step-1"]
    assert names_of([*runs, "/", "ü/ä ö"]) == ["novel", "novel-2", "gpt2", "x", "model", "model-2"]


def test_a_conversation_by_the_tokens_of_the_tokenizer() -> None:
    tokenizer = train_tokenizer(["abc " * 50], "bpe", 300)
    writer = ServedLanguageModel("x", 0, LanguageModel(None, tokenizer))  # type: ignore[arg-type]
    ids, stops = writer.conversation([("user", "hi <|im_end|>")])
    assert (tokenizer.decode(ids), stops) == ("user: hi <|im_end|>\nassistant:", ["\nuser:"])
    tokenizer.turn = (7, 8)
    ids, stops = writer.conversation([("system", "s"), ("user", "hi <|im_end|>")])
    parts = ["system\ns", "\n", "user\nhi <|im_end|>", "\n", "assistant\n"]
    expected = [[7], parts[0], [8], parts[1], [7], parts[2], [8], parts[3], [7], parts[4]]
    flat = [
        id
        for part in expected
        for id in (tokenizer.encode(part) if isinstance(part, str) else part)
    ]
    assert (ids, stops) == (flat, [])  # special tokens in a message are plain text
