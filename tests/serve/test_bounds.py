"""Limits on memory that clients can make the server use, and on the time it waits for them."""

import asyncio
import contextlib
import http.client
import io
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
import uvicorn
from servers import Served, Start
from uvicorn.server import ServerState

from nanolm.cli.notes import RateLimitedNotes
from nanolm.errors import did_you_mean
from nanolm.generation.batch import SampledToken
from nanolm.serve import guard, server
from nanolm.serve.api import json_pieces
from nanolm.serve.engine import ByteBudget, Tokens
from nanolm.serve.queues import QueueFull

BIG: dict[str, Any] = {"model": "writer", "n": 16, "logprobs": 20, "temperature": 1.5}


def raw_request(body: bytes, path: str = "/v1/completions", headers: bytes = b"") -> bytes:
    start = b"POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\n" % path.encode()
    start += b"content-type: application/json\r\n" + headers
    return start + b"content-length: %d\r\n\r\n" % len(body) + body


ASK_FOR_HEALTH = """
import http.client, select, sys, time
slowest = 0.0
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.01)[0]:
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=30)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()
    slowest = max(slowest, time.monotonic() - began)
print(slowest)
"""


class Health:
    """Polls continuously and records the slowest response, in its own process."""

    def __init__(self, served: Served) -> None:
        port = str(urlsplit(served.url).port)
        self.process = subprocess.Popen(
            [sys.executable, "-c", ASK_FOR_HEALTH, port],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.slowest = float("inf")

    def __enter__(self) -> "Health":
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *error: object) -> None:
        output, _ = self.process.communicate("", timeout=60)
        assert self.process.returncode == 0
        self.slowest = float(output)


def peak(served: Served) -> int:
    """Peak memory in bytes since the last call."""
    process = Path(f"/proc/{served.process.pid}")
    lines = (process / "status").read_text().splitlines()
    (process / "clear_refs").write_text("5")
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


def big_answers(served: Served, clients: int, tokens: int) -> tuple[int, int, float]:
    """Growth of the server's memory at its peak and afterwards; the slowest /health response."""
    requests.post(f"{served.url}/v1/completions", json={**BIG, "max_tokens": 2}, timeout=60)
    peak(served)
    before = served.memory()

    def ask(seed: int) -> None:
        body = {**BIG, "seed": seed, "max_tokens": tokens, "min_tokens": tokens}
        answer = requests.post(f"{served.url}/v1/completions", json=body, timeout=300)
        assert answer.status_code == 200
        choices = answer.json()["choices"]
        assert [len(each["logprobs"]["ids"]) for each in choices] == [tokens] * 16
        assert all(len(a) == 20 for each in choices for a in each["logprobs"]["alternatives"])

    with Health(served) as health, ThreadPoolExecutor(clients) as pool:
        list(pool.map(ask, range(clients)))
    return peak(served) - before, served.memory() - before, health.slowest


def test_big_answers_take_little_memory(served: Served) -> None:
    most, kept, slowest = big_answers(served, clients=4, tokens=100)
    assert most < 20 << 20  # 60 MB as objects
    assert kept < 20 << 20
    assert slowest < 1


@pytest.mark.slow
def test_six_of_the_biggest_answers(start: Start) -> None:
    served = start(names=("writer",))
    most, kept, slowest = big_answers(served, clients=6, tokens=2976)
    assert most < 150 << 20  # 2.4 GB as objects
    assert kept < 50 << 20
    assert slowest < 1


def test_what_answers_hold_is_bounded(served: Served) -> None:
    """More of the largest requests than the budget allows: some get status 429."""
    body = json.dumps({**BIG, "max_tokens": 2900, "min_tokens": 2900, "stream": True}).encode()
    clients = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(16)]
    for client in clients:
        client.sendall(raw_request(body))
    starts = [client.recv(200) for client in clients]
    for client in clients:
        client.close()
    assert {start[9:12] for start in starts} == {b"200", b"429"}
    # Small requests are still accepted.
    answer = requests.post(f"{served.url}/v1/completions", json={"max_tokens": 2}, timeout=30)
    assert answer.status_code == 200


def test_a_budget_is_given_back() -> None:
    budget = ByteBudget(200_000)
    with budget.hold(150_000), pytest.raises(QueueFull), budget.hold(100_000):
        pass
    with pytest.raises(ZeroDivisionError), budget.hold(150_000):
        raise ZeroDivisionError
    with budget.hold(200_000), budget.hold(10):
        assert budget.held == 200_010
    assert budget.held == 0


def test_tokens_are_what_was_put_into_them() -> None:
    tokens = Tokens()
    put = [SampledToken(n, -n / 4, [(n, -0.5), (n + 1, -1.25)]) for n in range(10)]
    pieces = ["a", "", "日本", "é", "\n", "", "xyz", "😀", "b", "c"]
    for piece, token in zip(pieces, put, strict=True):
        tokens.add(piece, token, "")
    tokens.end("rest", "length")
    assert list(tokens) == put
    parts = list(tokens.parts(3))
    assert [token for part in parts for token in part] == put
    texts = [part.text.decode() for part in parts]
    assert texts == ["a日本", "é\n", "xyz😀b", "crest"]
    assert [part.stopped for part in parts] == ["", "", "", "length"]
    (only,) = Tokens().parts(3)  # it ended before any token
    assert len(only) == 0


def test_json_in_pieces_is_json() -> None:
    def value(kind: Any) -> Any:
        lists = [kind([]), kind([{"a": 1, "é": [None]}] * 100), kind(range(64))]
        return {"lists": lists, "dict": {}, "list": [], "text": 'a"\n', "more": {"x": kind([1.5])}}

    assert json.loads("".join(json_pieces(value(iter)))) == value(list)


async def serve_bytes(size: int, client: Any) -> Any:
    """The result of `client(port)`, with a server that responds with this many bytes."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"%d" % size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(size)})

    config = uvicorn.Config(app, http=server.BoundedProtocol, log_config=None, lifespan="off")
    config.load()
    state, loop = ServerState(), asyncio.get_running_loop()
    listener = await loop.create_server(
        lambda: server.BoundedProtocol(config, state, {}, loop), "127.0.0.1", 0
    )
    port = listener.sockets[0].getsockname()[1]
    try:
        return await asyncio.to_thread(client, port)
    finally:
        listener.close()
        await listener.wait_closed()


def receive_slowly(port: int, pause: float, times: int) -> int:
    """Request, read slowly, then read the rest; returns the number of bytes."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        client.connect(("127.0.0.1", port))
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        received = 0
        for _ in range(times):
            time.sleep(pause)
            received += len(client.recv(1 << 17, socket.MSG_WAITALL))
        client.settimeout(10)
        try:
            while part := client.recv(1 << 20):
                received += len(part)
        except ConnectionError:
            pass
        return received


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.5)
    monkeypatch.setattr(server, "CHECK_SECONDS", 0.05)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("pause", "times", "whole"), [(0.2, 8, True), (1.5, 1, False)])
def test_time_runs_from_what_was_last_taken(pause: float, times: int, whole: bool) -> None:
    size = 24 << 20
    received = asyncio.run(serve_bytes(size, lambda port: receive_slowly(port, pause, times)))
    assert (received > size) == whole


@pytest.mark.usefixtures("impatient")
def test_a_connection_that_is_used_is_kept_and_an_idle_one_is_not() -> None:
    def client(port: int) -> float:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        for _ in range(20):  # longer than the idle limit
            connection.request("GET", "/")
            connection.getresponse().read()
            time.sleep(0.05)
        began = time.monotonic()
        assert connection.sock and connection.sock.recv(1) == b""
        return time.monotonic() - began

    assert 0.2 < asyncio.run(serve_bytes(10, client)) < 2


@pytest.mark.slow
def test_an_answer_is_not_cut_while_it_is_read(start: Start) -> None:
    """About 12 MB in 40 seconds: a slow connection, long after generation has finished."""
    served = start(names=("writer",))
    body = json.dumps({**BIG, "max_tokens": 400, "min_tokens": 400}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        client.connect(("127.0.0.1", served.port))
        client.sendall(raw_request(body))
        data = b""
        for _ in range(80):
            data += client.recv(1 << 17, socket.MSG_WAITALL)
            time.sleep(0.5)
        answer = http.client.HTTPResponse(Replayed(data, client))  # type: ignore[arg-type]
        answer.begin()
        assert len(json.loads(answer.read())["choices"]) == 16


class Replayed:
    """A socket, with the data already read from it."""

    def __init__(self, data: bytes, client: socket.socket) -> None:
        self.data, self.client = data, client

    def makefile(self, mode: str) -> Any:
        while part := self.client.recv(1 << 20):
            self.data += part
            if self.data.endswith(b"\r\n0\r\n\r\n"):
                break
        return io.BytesIO(self.data)


Crowd = Callable[[Served, bytes], socket.socket]


@contextlib.contextmanager
def open_files(most: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    """Connects, and sends something."""
    with contextlib.ExitStack() as clients, open_files(1500):

        def connect(served: Served, data: bytes) -> socket.socket:
            client = socket.create_connection(("127.0.0.1", served.port), timeout=10)
            clients.enter_context(client)
            client.sendall(data)
            return client

        yield connect


def test_idle_connections_keep_nobody_out(
    crowd: Crowd, start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    """A thousand connections, some with a partial request, with a limit of 256 open files."""
    with open_files(256):
        served = start("--max-tokens", 1_000_000, names=("writer",))
    asked = raw_request(b'{"max_tokens": 1000000, "min_tokens": 1000000, "stream": true}')
    busy = crowd(served, asked)
    assert busy.recv(12)[9:] == b"200"
    with Health(served) as health:
        for number in range(1000):
            crowd(served, [b"", b"GET / HT", asked[:60], asked[:-10]][number % 4])
        time.sleep(0.3)
    assert requests.get(f"{served.url}/health", timeout=5).json()["writing"] == 1
    assert health.slowest < 3  # seconds; other tests keep the machine busy
    assert len(capfd.readouterr().err) < 1000


def test_where_all_connections_are_in_use(
    crowd: Crowd, start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    """Further clients get an error, and /health still responds."""
    with open_files(256):
        served = start("--max-tokens", 1000, "--batch", 8, names=("writer",))
    asked = raw_request(b'{"max_tokens": 1000, "min_tokens": 1000, "stream": true}')
    clients = [crowd(served, asked) for _ in range(240)]
    with Health(served) as health:
        starts = [client.recv(12)[9:] for client in clients]
    assert set(starts) == {b"200", b"503"}
    assert health.slowest < 3  # seconds; other tests keep the machine busy
    assert len(capfd.readouterr().err) < 1000


LONG: dict[str, dict[str, Any]] = {
    "model": {"model": "write" * 200_000},
    "key": {"temperatur" * 100_000: 1},
    "prompt": {"prompt": "ab " * 340_000},
    "words": {"prompt": "".join(f"{n}x" for n in range(150_000))},
    "blanks": {"prompt": " " * 1_000_000},
    "ids": {"prompt": [1] * 500_000},
    "keys": {str(n): n for n in range(70_000)},
    "nested": {"prompt": [[]] * 340_000},
    "chat": {"messages": [{"role": "user", "content": "a "}] * 25_000},
}


@pytest.mark.parametrize("name", LONG)
def test_long_requests_hold_nobody_up(served: Served, name: str) -> None:
    path = "/v1/chat/completions" if name == "chat" else "/v1/completions"
    data = json.dumps(LONG[name], separators=(",", ":")).encode()
    assert 500_000 < len(data) <= 1 << 20
    with Health(served) as health:
        headers = {"content-type": "application/json"}
        answer = requests.post(served.url + path, data, headers=headers, timeout=30)
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 2000
    assert health.slowest < 1.5


def test_only_names_are_compared() -> None:
    assert did_you_mean("writr", ["writer"]) == "; did you mean writer?"
    began = time.monotonic()
    assert did_you_mean("writer" * 10**6, ["writer" * 1000] * 20) == ""
    assert time.monotonic() - began < 0.1


FRAMINGS = [
    (b"content-length: 5\r\ntransfer-encoding: chunked\r\n", b"1.1"),
    (b"transfer-encoding: chunked\r\ncontent-length: 5\r\n", b"1.1"),
    (b"Transfer-Encoding: Chunked\r\nContent-Length: 0\r\n", b"1.1"),
    (b"transfer-encoding: chunked\r\n", b"1.0"),
    (b"content-length: 5\r\ncontent-length: 6\r\n", b"1.1"),
    (b"transfer-encoding: chunked, identity\r\n", b"1.1"),
    (b"transfer-encoding: gzip, chunked\r\n", b"1.1"),
    (b"transfer-encoding: \x0bchunked\r\n", b"1.1"),
    (b"transfer-encoding : chunked\r\n", b"1.1"),
    (b"content-length: +5\r\n", b"1.1"),
    (b"content-length: 5 5\r\n", b"1.1"),
]


@pytest.mark.parametrize(("headers", "version"), FRAMINGS)
@pytest.mark.parametrize("path", [b"/v1/completions", b"/health"])
def test_where_a_request_ends_is_beyond_doubt(
    served: Served, headers: bytes, version: bytes, path: bytes
) -> None:
    """Refused otherwise, and nothing after it is read."""
    start = b"POST %s HTTP/%s\r\nhost: 127.0.0.1\r\n" % (path, version)
    smuggled = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as client:
        client.sendall(start + headers + b"\r\n0\r\n\r\n" + smuggled)
        answer = b""
        try:
            while part := client.recv(65_536):
                answer += part
        except ConnectionResetError:
            pass
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answer.lower()


def test_wrong_keys_are_answered_slowly(start: Start) -> None:
    served = start("--key", "a-long-secret", names=("writer",))
    url, count, over = f"{served.url}/v1/models", 0, time.monotonic() + 1

    def guess(number: int) -> None:
        nonlocal count
        with requests.Session() as session:
            while time.monotonic() < over:
                headers = {"authorization": f"Bearer {number}"}
                assert session.get(url, headers=headers, timeout=30).status_code == 401
                count += 1

    guessing = [threading.Thread(target=guess, args=(n,)) for n in range(8)]
    for thread in guessing:
        thread.start()
    slowest = 0.0
    while time.monotonic() < over:
        began = time.monotonic()
        right = {"authorization": "Bearer a-long-secret"}
        assert requests.get(url, headers=right, timeout=30).status_code == 200
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.05)
    for thread in guessing:
        thread.join()
    assert count < 40
    assert slowest < 0.5


def test_hanging_up_makes_no_guess_faster() -> None:
    async def guess() -> int:
        keys, tried = guard.WrongKeys(), 0
        tasks = []
        for _ in range(500):
            if not keys.too_many("1.2.3.4"):
                tasks.append(asyncio.create_task(keys.delay("1.2.3.4")))
                tried += 1
            await asyncio.sleep(0.001)
        assert not keys.too_many("1.2.3.5")
        await asyncio.wait_for(keys.delay("1.2.3.5"), 0.1)
        for number in range(5000):
            await keys.delay(str(number))
        assert len(keys.senders) <= guard.MAX_SENDERS
        for task in tasks:
            task.cancel()
        return tried

    assert asyncio.run(guess()) < 60


def test_addresses_of_one_network_are_one_sender() -> None:
    def sender(address: str) -> str:
        return guard.sender({"client": (address, 1)})

    assert sender("2001:db8::1") == sender("2001:db8::2:3") != sender("2001:db9::1")
    assert sender("::ffff:1.2.3.4") != sender("::ffff:1.2.3.5")
    assert sender("1.2.3.4") == "1.2.3.4"
    assert guard.sender({"client": None}) == ""


def test_of_each_kind_one_line_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    note = RateLimitedNotes(lines.append)
    clock = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    for number in range(1000):
        note(f"/v1/x failed: {number}")
        note("generation failed: " + "x" * 10_000)
    assert [line[:20] for line in lines] == ["/v1/x failed: 0", "generation failed: x"]
    assert len(lines[1]) == 500
    clock += 60
    note("/v1/x failed: again")
    assert lines[2] == "/v1/x failed: again (999 similar messages suppressed)"
