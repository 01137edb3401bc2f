"""Mixed load on `nanolm serve`: streams, slow readers, hang-ups, fuzz, idle clients, big answers.

    python tests/serve/load.py --seconds 3600              with a small model, trained for it
    python tests/serve/load.py runs/novel --seconds 60

Client and server share the machine, so clients are coroutines on plain sockets that think between
two requests: the server is kept busy, and it is the server that is measured. It fails by status
500, by an answer that ends too early, by a slow /health or by memory that grows.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CLIENTS = {  # number of clients of each kind
    "stream": 64,
    "slow_reader": 4,
    "big_answer": 2,
    "hang_up": 4,
    "fuzz": 3,
    "wrong_key": 2,
    "idle": 32,
}
HEALTH_INTERVAL = 0.1  # seconds
FINISH = 60.0  # seconds to finish requests that are running at the end
MAX_GROWTH, MAX_HEALTH = 50 << 20, 1.0  # bytes after the first minute; seconds at 99.9 %


class Cut(Exception):
    """A response was cut off."""


@dataclass
class Load:
    port: int
    pid: int
    key: str
    seconds: float
    statuses: Counter[str] = field(default_factory=Counter)  # "kind status"
    cuts: list[str] = field(default_factory=list)
    healths: list[float] = field(default_factory=list)  # seconds
    memory: list[int] = field(default_factory=list)  # bytes, each second
    ends: float = 0.0

    def over(self) -> bool:
        return time.monotonic() >= self.ends

    # Sending requests.

    @contextlib.asynccontextmanager
    async def connect(
        self, window: int | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        connection = socket.socket()
        connection.setblocking(False)
        if window:  # a small receive buffer, so that unread data stays with the server
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=window or 1 << 16)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    def request(self, path: str, body: Any, key: str | None = None) -> bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        head += f"authorization: Bearer {key or self.key}\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data

    async def ask(self, kind: str, data: bytes, pace: float = 0.0, slowly: int = 0) -> None:
        """Send it and read the whole response, `slowly` bytes at a time with pauses of `pace`."""
        try:
            async with self.connect(slowly or None) as (reader, writer):
                writer.write(data)
                status, body = await answer(reader, slowly, pace)
        except (Cut, ConnectionError) as error:
            self.cuts.append(f"{kind}: {error or type(error).__name__}")
            return
        self.statuses[f"{kind} {status}"] += 1
        if status == 200 and body.startswith(b"data:") and not body.endswith(b"data: [DONE]\n\n"):
            self.cuts.append(f"{kind}: no [DONE] after {body[-200:]!r}")

    # The kinds of clients. Each call does one thing, and is repeated.

    async def stream(self, source: random.Random) -> None:
        tokens = source.randint(10, 200)
        body = {"prompt": "the " * source.randint(0, 20), "max_tokens": tokens, "stream": True}
        body |= {"min_tokens": tokens} if source.random() < 0.5 else {"top_k": 40, "top_p": 0.9}
        await self.ask("stream", self.request("/v1/completions", body))
        await asyncio.sleep(source.uniform(0.5, 3))

    async def slow_reader(self, source: random.Random) -> None:
        """About 64 kB per second: a megabyte takes longer than most time limits."""
        body = {"n": 4, "logprobs": 20, "max_tokens": 150, "min_tokens": 150, "user": "slow"}
        body["stream"] = source.random() < 0.5
        data = self.request("/v1/completions", body)
        await self.ask("slow_reader", data, pace=0.25, slowly=16_384)

    async def big_answer(self, source: random.Random) -> None:
        body = {"n": 8, "logprobs": 20, "max_tokens": 200, "min_tokens": 200, "user": "big"}
        await self.ask("big_answer", self.request("/v1/completions", body))
        await asyncio.sleep(source.uniform(3, 6))

    async def hang_up(self, source: random.Random) -> None:
        streamed = source.random() < 0.5
        body = {"max_tokens": 4000, "min_tokens": 4000, "stream": streamed, "logprobs": 5}
        data = self.request("/v1/completions", body)
        with contextlib.suppress(ConnectionError):
            async with self.connect() as (reader, writer):
                sent = source.choice((len(data), source.randrange(len(data))))
                writer.write(data[:sent])
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(source.uniform(0, 1)):
                        await reader.read(source.randint(1, 100_000))
        await asyncio.sleep(source.uniform(0.2, 1))

    async def fuzz(self, source: random.Random) -> None:
        path = source.choice(("completions", "chat/completions", "tokenize", "inspect", "classify"))
        good = json.dumps({"prompt": "the cat", "max_tokens": 3, "n": 2, "top_p": 0.5, "stop": "a"})
        data = bytearray(self.request(f"/v1/{path}", strange(good, source).encode()))
        if source.random() < 0.3:
            for _ in range(source.randint(1, 5)):
                data[source.randrange(len(data))] = source.randrange(256)
        with contextlib.suppress(ConnectionError, TimeoutError, Cut):  # it may not be a request
            async with self.connect() as (reader, writer), asyncio.timeout(5):
                writer.write(data)
                status, _ = await answer(reader)
                self.statuses[f"fuzz {status}"] += 1
        await asyncio.sleep(source.uniform(0.05, 0.2))

    async def wrong_key(self, source: random.Random) -> None:
        await self.ask("wrong_key", self.request("/v1/completions", {}, secrets.token_hex(8)))
        await asyncio.sleep(source.uniform(0.5, 1))

    async def idle(self, source: random.Random) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with self.connect() as (reader, writer):
                writer.write(source.choice((b"", b"POST /v1/completions HTTP/1.1\r\nhost: 127")))
                async with asyncio.timeout(min(source.uniform(5, 60), self.seconds)):
                    await reader.read(1)
        await asyncio.sleep(source.uniform(0, 1))

    # Measurements.

    async def health(self, source: random.Random) -> None:
        began = time.monotonic()
        data = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
        await self.ask("health", data)
        self.healths.append(time.monotonic() - began)
        await asyncio.sleep(HEALTH_INTERVAL)

    async def watch(self, source: random.Random) -> None:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        self.memory.append(pages * os.sysconf("SC_PAGE_SIZE"))
        await asyncio.sleep(1)

    async def run(self) -> None:
        self.ends = time.monotonic() + self.seconds

        async def again(act: Callable[[random.Random], Awaitable[None]], number: int) -> None:
            source = random.Random(number)
            await asyncio.sleep(source.uniform(0, 2))
            while not self.over():
                await act(source)

        kinds = {**CLIENTS, "health": 1, "watch": 1}
        acts = [getattr(self, kind) for kind, count in kinds.items() for _ in range(count)]
        tasks = [asyncio.create_task(again(act, number)) for number, act in enumerate(acts)]
        _, late = await asyncio.wait(tasks, timeout=self.seconds + FINISH)
        for task in late:
            task.cancel()
        for task in tasks:
            if task not in late:
                task.result()
        if late:
            self.cuts.append(f"{len(late)} clients were not answered {FINISH:.0f} s after the end")

    def growth(self) -> int:
        """Peak growth in bytes after the first minute, or after the first half of a short run."""
        start = round(min(60, len(self.memory) / 2))
        return max(self.memory[start:]) - int(statistics.median(self.memory[:start][-10:]))

    def problems(self) -> list[str]:
        wrong = [f"{what}: {count}" for what, count in self.statuses.items() if what[-3:] == "500"]
        wrong += [f"cut: {cut}" for cut in self.cuts[:20]]
        if (slowest := percentile(self.healths, 99.9)) >= MAX_HEALTH:
            wrong.append(f"/health takes {slowest:.2f} s at the 99.9th percentile")
        if (growth := self.growth()) > MAX_GROWTH:
            wrong.append(f"memory grew by {growth / 1e6:.0f} MB after the first minute")
        return wrong

    def table(self) -> str:
        healths = {f"p{percent:g}": percentile(self.healths, percent) for percent in (50, 99, 99.9)}
        health = [f"{name} {value * 1e3:.0f}" for name, value in healths.items()]
        peak, last = max(self.memory) / 1e6, self.memory[-1] / 1e6
        rows = [("/health, ms", ", ".join([*health, f"max {max(self.healths) * 1e3:.0f}"]))]
        rows += [("memory, MB", f"peak {peak:.0f}, last {last:.0f}, {self.growth() / 1e6:+.0f}")]
        for kind in [*CLIENTS, "health"]:
            found = {what: n for what, n in self.statuses.items() if what.rsplit(" ", 1)[0] == kind}
            told = ", ".join(f"{what[-3:]}: {n:,}" for what, n in sorted(found.items()))
            rows.append((kind, told or "no answer wanted"))
        rows.append(("cut answers", str(len(self.cuts))))
        return "\n".join(f"{name:<14}{value}" for name, value in rows)


async def answer(
    reader: asyncio.StreamReader, slowly: int = 0, pace: float = 0.0
) -> tuple[int, bytes]:
    """Status and body; raises Cut if the connection ends early."""

    async def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = await reader.read(min(count - len(data), slowly or 1 << 16))
            if not part:
                raise Cut(f"{len(data):,} of {count:,} bytes")
            data += part
            await asyncio.sleep(pace)
        return data

    try:
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        if length := re.search(rb"(?i)\r\ncontent-length: *(\d+)", head):
            return status, await exactly(int(length[1]))
        body = b""
        if re.search(rb"(?i)\r\ntransfer-encoding: *chunked", head):
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await exactly(size + 2))[:-2]
            await reader.readuntil(b"\r\n")
        return status, body
    except asyncio.IncompleteReadError as error:
        raise Cut(f"the connection ended after {error.partial[-80:]!r}") from None


def strange(text: str, source: random.Random) -> str:
    """A mutated JSON body."""
    odd = [r"\ud800", "NaN", "1e999", "null", "[" * 2000, "9" * 400, "\x00", '"n":', "{}", "-", '"']
    for _ in range(source.randint(0, 3)):
        place = source.randrange(len(text))
        text = text[:place] + source.choice(odd) + text[place + source.randint(0, 6) :]
    return text


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", nargs="?", help="a run or model folder [default: one made for it]")
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nanolm-load-") as folder:
        run, key = given.run or f"{folder}/tiny", secrets.token_hex(16)
        nanolm = [sys.executable, "-m", "nanolm"]
        if not given.run:
            small = ["--steps", "60", "--layers", "1", "--heads", "2", "--dim", "16"]
            train = [*nanolm, "train", "embedded:tiny", "--out", run, *small, "--context", "64"]
            subprocess.run(train, check=True, stdout=subprocess.DEVNULL)
        serve = [*nanolm, "serve", run, "--port=0", "--key", key]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout
            port = int(server.stdout.readline().partition("/#")[0].rsplit(":", 1)[1])
            load = Load(port, server.pid, key, given.seconds)
            try:
                asyncio.run(load.run())
            finally:
                server.terminate()
    sys.stdout.write(f"{load.table()}\n")
    sys.exit("\n".join(load.problems()) or 0)


if __name__ == "__main__":
    main()
