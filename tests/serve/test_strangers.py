"""The server withstands strangers, slow clients and broken programs."""

import http.client
import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from conftest import Tally
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from servers import Served, Start

EVERY_KIND = ("writer", "labels", "translator")
GROWTH = 50 << 20  # bytes by which the server may have grown at the end

# Host, Origin, whether it is allowed; PORT is the server's.
PAIRS: list[tuple[str | None, str | None, bool]] = [
    ("127.0.0.1:PORT", None, True),
    ("localhost:PORT", None, True),
    ("[::1]:PORT", None, True),
    ("127.0.0.1", None, True),
    ("LOCALHOST:PORT", "http://localhost:PORT", True),
    ("127.0.0.1:PORT", "http://127.0.0.1:PORT", True),
    ("127.0.0.1:PORT", "http://localhost:PORT", False),
    ("127.0.0.1:PORT", "http://127.0.0.1:1", False),
    ("127.0.0.1:PORT", "http://127.0.0.1", False),
    ("127.0.0.1:PORT", "http://evil.example", False),
    ("127.0.0.1:PORT", "null", False),
    ("127.0.0.1:PORT", "", False),
    ("127.0.0.1:PORT", "file://", False),
    ("evil.example", None, False),
    ("evil.example:PORT", "http://evil.example:PORT", False),
    ("127.0.0.1.evil.example", None, False),
    ("localhost.evil.example:PORT", None, False),
    ("evil.example@127.0.0.1:PORT", None, False),
    ("192.168.1.5:PORT", None, False),
    ("127.0.0.1:PORT:80", None, False),
    ("", None, False),
    ("127.0.0.1:PORT/path", None, False),
]


def ask(server: Served, host: str | None, origin: str | None, method: str = "POST") -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.putrequest(method, "/v1/completions", skip_host=True)
    body = b'{"max_tokens": 1}'
    headers = {"host": host, "origin": origin, "content-type": "application/json"}
    for name, value in {**headers, "content-length": str(len(body))}.items():
        if value is not None:
            connection.putheader(name, value.replace("PORT", str(server.port)))
    connection.endheaders(body)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer


@pytest.mark.parametrize(("host", "origin", "allowed"), PAIRS)
def test_by_which_names_and_from_which_pages(
    served: Served, host: str | None, origin: str | None, allowed: bool
) -> None:
    answer = ask(served, host, origin)
    assert answer.status == 200 if allowed else answer.status in (400, 403)
    assert answer.getheader("access-control-allow-origin") is None


def test_what_is_allowed_in_so_many_words(start: Start) -> None:
    server = start("--allow-host", "model.lan", "--allow-origin", "https://page.example")
    assert ask(server, "model.lan:PORT", None).status == 200
    answer = ask(server, "127.0.0.1:PORT", "https://page.example")
    assert answer.status == 200
    assert answer.getheader("access-control-allow-origin") == "https://page.example"
    assert ask(server, "127.0.0.1:PORT", "https://page.example", "OPTIONS").status == 204
    assert ask(server, "127.0.0.1:PORT", "https://other.example", "OPTIONS").status == 403


def test_other_addresses_need_the_key(start: Start) -> None:
    server = start("--host", "0.0.0.0", "--key", "a-long-secret")
    url = f"http://127.0.0.1:{server.port}"
    keys = (None, "", "Bearer", "Bearer wrong", "Bearer a-long-secretx", "Basic x")
    tried = [("/v1/models", key) for key in keys] + [("/v1/nothing", None), ("/openapi.json", None)]
    for path, given_key in tried:
        headers = {} if given_key is None else {"authorization": given_key}
        answer = requests.get(url + path, headers=headers, timeout=30)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    right = {"authorization": "Bearer a-long-secret"}
    assert requests.get(f"{url}/v1/models", headers=right, timeout=30).status_code == 200
    assert requests.get(f"{url}/health", timeout=30).status_code == 200
    assert requests.get(url, timeout=30).status_code == 200  # the page itself needs no key


def test_a_key_is_made_where_one_is_needed(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    server = start("--host", "0.0.0.0", names=("writer",))
    answer = requests.get(f"http://127.0.0.1:{server.port}/v1/models", timeout=30)
    assert answer.status_code == 401
    assert "key: " in capfd.readouterr().err


def test_every_answer_is_guarded(served: Served) -> None:
    for path in ("/", "/page.js", "/page.css", "/v1/models", "/nothing"):
        headers = requests.get(served.url + path, timeout=30).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "server" not in headers


def operations(server: Served) -> Iterator[Any]:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for result in schema.get_all_operations():
        operation: Any = result
        yield operation.ok()


def requests_by_the_document(server: Served, each: int) -> int:
    """Valid and invalid requests by the OpenAPI document; returns their number."""
    done = 0
    for operation in operations(server):
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode == GenerationMode.NEGATIVE and operation.method == "get":
                continue  # nothing in them can be wrong

            @settings(
                max_examples=each,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: Any) -> None:
                nonlocal done
                done += 1
                response = case.call(timeout=30)
                if response.status_code != 413:  # also refused, but for another reason
                    case.validate_response(response)

            ask()
    return done


def raw_bytes(server: Served, count: int) -> int:
    """Data that is hardly HTTP, or not at all."""
    source = random.Random(1)
    body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    good = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    good += b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    failed = 0
    for _ in range(count):
        kind = source.randrange(4)
        if kind == 0:
            data = source.randbytes(source.randint(1, 300))
        else:
            changed = bytearray(good)
            for _ in range(source.randint(1, 6)):
                place = source.randrange(len(changed))
                if kind == 1:
                    changed[place] = source.randrange(256)
                elif kind == 2:
                    del changed[place : place + source.randint(1, 20)]
                else:
                    changed[place:place] = source.randbytes(source.randint(1, 30))
            data = bytes(changed)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while part := connection.recv(65_536):
                    answer += part
            except ConnectionResetError:
                pass
        failed += answer.startswith(b"HTTP/1.1 500")
    assert failed == 0
    return count


def survives(server: Served, each: int, raw: int) -> int:
    requests_by_the_document(server, 10)  # warm up
    before = server.memory()
    done = requests_by_the_document(server, each) + raw_bytes(server, raw)
    assert requests.get(f"{server.url}/health", timeout=1).json()["writing"] == 0
    assert server.memory() - before < GROWTH
    return done


def test_some_fuzzed_requests(start: Start, tally: Tally) -> None:
    done = survives(start("--max-tokens", 3, names=EVERY_KIND), each=12, raw=100)
    tally("requests to the server", done, done)


def test_prompts_of_every_length_leave_nothing_behind(start: Start) -> None:
    """A kernel is compiled for each length, and not all of them are kept."""
    server = start("--max-tokens", 1, names=("other",))

    def read(lengths: range) -> None:
        body: dict[str, Any] = {"prompt": ["a" * length for length in lengths], "max_tokens": 1}
        answer = requests.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200

    for first in range(1, 129, 16):
        read(range(first, first + 16))
    before = server.memory()
    for first in range(129, 513, 16):
        read(range(first, first + 16))
    assert server.memory() - before < 20 << 20


@pytest.mark.slow
def test_ten_thousand_fuzzed_requests(start: Start, tally: Tally) -> None:
    done = survives(start("--max-tokens", 3, names=EVERY_KIND), each=820, raw=2000)
    assert done >= 10_000
    tally("requests to the server", done, done)


def test_200_slow_clients_hold_nobody_up(start: Start) -> None:
    """Some send a byte at a time, some request a lot and read nothing."""
    server = start("--max-tokens", 100_000, names=("writer",))
    body = json.dumps({"max_tokens": 100_000, "min_tokens": 100_000, "stream": True}).encode()
    asked = (
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    )
    asked += b"content-length: %d\r\n\r\n" % len(body) + body
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    for number, client in enumerate(clients):
        client.sendall(asked if number % 4 == 0 else asked[: 20 + number % 100])
    slowest = 0.0
    for turn in range(20):
        for number, client in enumerate(clients):
            if number % 4 and turn < 10:
                client.sendall(b"x")
        began = time.monotonic()
        assert requests.get(f"{server.url}/health", timeout=10).status_code == 200
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.05)
    for client in clients:
        client.close()
    assert slowest < 1
