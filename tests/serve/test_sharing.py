"""Who waits, who is written for, and what is told of it; without a socket."""

import asyncio
from pathlib import Path

import pytest

from nanolm.generation.batch import Row
from nanolm.generation.knobs import Knobs
from nanolm.generation.language_model import LanguageModel, load
from nanolm.serve.engine import Busy, Desk, Engine, Limits, Line, News, Order
from nanolm.serve.models import Writer, names_of
from nanolm.serve.schema import integer, listed, number, optional, problems, record, text
from nanolm.text.tokenizer import train_tokenizer


@pytest.fixture
def engine(models: Path) -> Engine:
    engine = Engine(Limits(rows=3, queue=20), note=print)
    engine.add(load(models / "writer", print))
    return engine


def order_of(desk: Desk, count: int, client: str = "", tokens: int = 12, seed: int = 0) -> Order:
    knobs = Knobs(tokens=tokens, min_tokens=tokens, seed=seed)
    return Order(desk, [Row([seed + 1, 2], knobs, which) for which in range(count)], client)


def test_clients_take_turns(engine: Engine) -> None:
    line, (desk,) = Line(), engine.desks
    asked = {name: order_of(desk, count, name) for name, count in (("a", 5), ("b", 1), ("c", 2))}
    for order in asked.values():
        line.add(order)
    names = "".join(line.next()[0].client for _ in range(line.length))
    assert names == "abcacaaa"
    assert line.length == 0


def test_who_has_gone_waits_no_longer(engine: Engine) -> None:
    line, (desk,) = Line(), engine.desks
    going, staying = order_of(desk, 3, "a"), order_of(desk, 2, "a")
    line.add(going)
    line.add(staying)
    going.gone = True
    assert [order for order, _ in line.drop(lambda order: order.gone)] == [going] * 3
    assert [line.next()[0] for _ in range(line.length)] == [staying] * 2


async def all_of(order: Order) -> list[News]:
    return [news async for part in order.news() for news in part]


def test_requests_share_steps_and_nothing_else(engine: Engine) -> None:
    """Seven texts of three requests in three places: each as if it were alone."""

    async def ask() -> list[list[News]]:
        engine.start(asyncio.get_running_loop())
        orders = [order_of(desk, count, seed=7 * count) for count in (4, 2, 1)]
        for order in orders:
            engine.take(order)
        return await asyncio.gather(*map(all_of, orders))

    (desk,) = engine.desks
    steps = 0

    def counted() -> None:
        nonlocal steps
        steps += 1
        launch()

    assert desk.batch
    launch = desk.batch.launch
    desk.batch.launch = counted  # type: ignore[method-assign]
    found = asyncio.run(ask())
    engine.close()
    assert 12 * 7 / 3 <= steps <= 12 * 4  # not 12 * 7
    for order, count in zip(found, (4, 2, 1), strict=True):
        for place in range(count):
            news = [each for each in order if each.place == place]
            ids = [each.token.id for each in news if each.token]
            assert ids == alone(desk.writer, [7 * count + 1, 2], place, 7 * count)
            assert [each.stopped for each in news] == [""] * 11 + ["length"]


def alone(writer: LanguageModel, prompt: list[int], number: int, seed: int) -> list[int]:
    batch = Engine(Limits(rows=1), note=print).add(writer).begin()
    batch.join([Row(prompt, Knobs(tokens=12, min_tokens=12, seed=seed), number)])
    return [token.id for _ in range(12) for _, token in batch.step()]


def test_what_fails_is_told_and_the_next_is_written(engine: Engine) -> None:
    async def ask() -> None:
        engine.start(asyncio.get_running_loop())
        (desk,) = engine.desks

        def fail() -> None:
            raise RuntimeError("out of luck")

        assert desk.batch
        desk.batch.launch = fail  # type: ignore[method-assign]
        broken = order_of(desk, 5)
        engine.take(broken)
        with pytest.raises(RuntimeError, match="out of luck"):
            await all_of(broken)
        fine = order_of(desk, 2)
        engine.take(fine)
        assert len(await all_of(fine)) == 24
        with pytest.raises(ZeroDivisionError):
            await engine.do(lambda: 1 // 0)
        assert await engine.do(lambda: 6 * 7) == 42

    asyncio.run(ask())
    engine.close()


def test_without_a_queue_there_is_still_one_at_a_time(models: Path) -> None:
    async def ask() -> None:
        engine = Engine(Limits(rows=1, queue=0), note=print)
        desk = engine.add(load(models / "writer", print))
        engine.start(asyncio.get_running_loop())
        assert await engine.do(lambda: 6 * 7) == 42
        only = order_of(desk, 1)
        engine.take(only)
        assert len(await all_of(only)) == 12
        engine.close()

    asyncio.run(ask())


def test_more_than_may_wait_are_refused(engine: Engine) -> None:
    async def ask() -> None:
        (desk,) = engine.desks
        engine.take(order_of(desk, 16))
        engine.take(order_of(desk, 7))
        with pytest.raises(Busy):
            engine.take(order_of(desk, 1))

    asyncio.run(ask())


def test_names_tell_nothing_of_where_a_model_is() -> None:
    runs = ["/home/me/runs/novel", "runs/novel/best", "hf://openai/gpt2", "x/checkpoints/step-1"]
    assert names_of([*runs, "/", "ü/ä ö"]) == ["novel", "novel-2", "gpt2", "x", "model", "model-2"]


def test_a_conversation_by_the_tokens_of_the_tokenizer() -> None:
    tokenizer = train_tokenizer(["abc " * 50], "bpe", 300)
    writer = Writer("x", 0, LanguageModel(None, tokenizer))  # type: ignore[arg-type]
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
    assert (ids, stops) == (flat, [])  # what a message says is text, whatever it looks like


SCHEMA = record(
    {
        "n": integer(1, 3),
        "x": optional(number(0, 1)),
        "t": {"anyOf": [text(1, 5), listed(text(1, 5), 1, 2)]},
    },
    ("n",),
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"n": 1}, []),
        ({"n": 2.0, "x": None, "t": ["a"]}, []),
        ({"n": 1.5}, [("n", "must be a whole number")]),
        ({"n": True}, [("n", "must be a whole number")]),
        ({"n": 4}, [("n", "must be from 1 to 3")]),
        ({"n": 1, "x": "1"}, [("x", "must be a number or null")]),
        ({"n": 1, "x": float("inf")}, [("x", "must be from 0 to 1")]),
        ({"n": 1, "t": 5}, [("t", "must be a text or a list")]),
        ({"n": 1, "t": ["toolong"]}, [("t[0]", "must have 1 to 5 characters")]),
        ({"n": 1, "t": []}, [("t", "must have 1 to 2 entries")]),
        ({"y": 1}, [("n", "is missing"), ("y", "is not known here")]),
        ([], [("", "must be an object")]),
    ],
)
def test_values_are_held_to_a_schema(value: object, expected: list[tuple[str, str]]) -> None:
    assert list(problems(value, SCHEMA)) == expected
