"""The server under mixed load; NANOLM_LOAD_SECONDS=3600 gives the hour in docs/reliability.md."""

import asyncio
import os
from pathlib import Path

import load
import pytest
from servers import Start


@pytest.mark.slow
def test_mixed_load_cuts_no_answer_and_leaves_nothing_behind(start: Start, trained: Path) -> None:
    server = start("--key", "a-long-secret", names=(trained,))
    seconds = float(os.environ.get("NANOLM_LOAD_SECONDS", "60"))
    mixed = load.Load(server.port, server.process.pid, "a-long-secret", seconds)
    asyncio.run(mixed.run())
    assert not mixed.problems(), mixed.table()


def test_an_answer_that_ends_early_is_noticed() -> None:
    """The measurement itself: it must detect truncated responses."""

    async def read(data: bytes) -> tuple[int, bytes]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await load.answer(reader)

    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    sized = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc"
    for whole in (chunked, sized):
        assert asyncio.run(read(whole)) == (200, b"abc")
        for size in range(len(whole)):
            with pytest.raises(load.Cut):
                asyncio.run(read(whole[:size]))
