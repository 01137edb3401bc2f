"""Who may ask at all: by Host and Origin, by the key, and by how the question comes.

A stranger's page in the user's browser can send requests to this machine, and with a name of its
own for its address (DNS rebinding) even read the answers. So a request has to name this machine by
its address or an allowed name; and a page that sends one must be of this very server.
"""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from nanolm.serve.request_models import APIError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
PREFLIGHT = {
    "access-control-allow-methods": "GET, POST",
    "access-control-allow-headers": "authorization, content-type",
}
PUBLIC_PATHS = ("/", "/page.css", "/page.js", "/icon.svg", "/health")  # that need no key
BODY_SECONDS = 20.0  # in which a body has to be here
MAX_FIELDS = 1000  # of an object; none that is right has as many
FREE_FAILURES = 8  # wrong keys of one address that are answered at once
DELAY = 0.05  # seconds that each further one takes longer
MAX_DELAY = 2.0  # seconds
MAX_WAITING = 32  # wrong keys of one address; more are not looked at
MAX_SENDERS = 4096  # addresses that are remembered
FORGET_SECONDS = 300.0  # after the last wrong key


class WrongKeys:
    """Answers to wrong keys are slow: those to one address come one after the other, each later
    than the last. Whoever hangs up has used a turn; right keys and other addresses do not wait."""

    def __init__(self) -> None:
        self.senders: dict[str, Failures] = {}  # the last that failed at the end

    def too_many(self, sender: str) -> bool:
        """Do so many wait that no more keys are tried? Else each would be told at once."""
        return sender in self.senders and self.senders[sender].waiting >= MAX_WAITING

    async def delay(self, sender: str) -> None:
        now = time.monotonic()
        failures = self.senders.pop(sender, None)
        if failures is None or now > failures.next + FORGET_SECONDS:
            failures = Failures()
        self.senders[sender] = failures
        if len(self.senders) > MAX_SENDERS:
            del self.senders[next(iter(self.senders))]
        failures.count += 1
        seconds = min(MAX_DELAY, DELAY * max(0, failures.count - FREE_FAILURES))
        failures.next = max(now, failures.next) + seconds
        failures.waiting += 1
        try:
            await asyncio.sleep(failures.next - now)
        finally:
            failures.waiting -= 1


@dataclass
class Failures:
    count: int = 0
    waiting: int = 0  # for their answer
    next: float = 0.0  # when the last of them is answered


def sender(scope: Scope) -> str:
    """The client's address; of IPv6 the network, in which a client may take any address."""
    address, _ = scope.get("client") or ("", 0)
    literal = ip(address)
    if isinstance(literal, ipaddress.IPv6Address) and not literal.ipv4_mapped:
        return str(ipaddress.ip_network((literal.packed[:8] + bytes(8), 64)))
    return address


class AccessGuard:
    def __init__(
        self,
        app: App,
        address: str,
        key: str | None,
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
    ) -> None:
        self.app, self.address = app, address
        self.key = hashlib.sha256(key.encode()).digest() if key is not None else None
        self.hosts = {host.lower() for host in (address, *hosts)}
        self.origins = {origin.lower().rstrip("/") for origin in origins}
        self.wrong_keys = WrongKeys()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1000})
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        foreign = origin is not None and origin.lower() in self.origins
        cors = {"access-control-allow-origin": origin or "", "vary": "Origin"}

        async def send_guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = MutableHeaders(scope=message)
                for name, value in (HEADERS | cors if foreign else HEADERS).items():
                    own.setdefault(name, value)
            await send(message)

        app = self.app
        try:
            self.check(scope, headers, origin, foreign)
            if foreign and scope["method"] == "OPTIONS":
                app = Response(status_code=204, headers=PREFLIGHT)
        except APIError as error:
            if error.status == 401:
                await self.wrong_keys.delay(sender(scope))
            more = {400: {"connection": "close"}, 429: {"retry-after": "1"}}.get(error.status)
            app = JSONResponse(error.body(), error.status, more)
        await app(scope, receive, send_guarded)

    def check(self, scope: Scope, headers: Headers, origin: str | None, foreign: bool) -> None:
        # Others on the way may see the end of such a request elsewhere, and another one behind it.
        chunked = "transfer-encoding" in headers
        if chunked and ("content-length" in headers or scope["http_version"] != "1.1"):
            raise APIError("send Content-Length, or (not by HTTP/1.0) Transfer-Encoding")
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self.known(hosts[0]):
            raise APIError("unknown host name: use the address, or see --allow-host", 403)
        if origin is not None and not foreign:
            same = {f"{scheme}://{hosts[0].lower()}" for scheme in ("http", "https")}
            if origin.lower() not in same:
                raise APIError("pages of other servers are refused; see --allow-origin", 403)
        path = scope["path"]  # that of a page at /look/ is a secret itself
        public = path in PUBLIC_PATHS or path.startswith("/look/")
        if self.key is None or public or scope["method"] == "OPTIONS":
            return
        if self.wrong_keys.too_many(sender(scope)):
            raise APIError("too many wrong keys from this address", 429)
        given = headers.get("authorization", "").removeprefix("Bearer ").strip()
        digest = hashlib.sha256(given.encode("latin-1", "replace")).digest()
        if not hmac.compare_digest(digest, self.key):
            message = "this server needs its key: Authorization: Bearer KEY"
            raise APIError(message, 401, code="invalid_api_key")

    def known(self, host: str) -> bool:
        """May this machine be called so?"""
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
            _ = urlsplit(f"//{host}").port
        except ValueError:
            return False
        if any(letter in host for letter in "/?#@\\ "):
            return False
        # Whoever has an address needs no name server, so nobody can have lied about it. A server
        # for this machine alone is asked for by this machine alone.
        by_address = ip(name) is not None and not is_loopback(self.address)
        return by_address or name in self.hosts or is_loopback(name)


def ip(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name)
    return None


def is_loopback(address: str) -> bool:
    literal = ip("127.0.0.1" if address == "localhost" else address)
    return literal is not None and literal.is_loopback


def declared_size(request: Request, most: int) -> int:
    size = request.headers.get("content-length", "")
    return min(int(size), most) if size.isdigit() else most


async def read_body(request: Request, most: int) -> bytes:
    """What a request brings, if it is to be JSON, is not too much and comes in time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise APIError("send JSON, with Content-Type: application/json", 415)
    too_large = APIError(f"the body has more than {most:,} bytes", 413)
    size = request.headers.get("content-length", "")
    if size.isdigit() and int(size) > most:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > most:
                    raise too_large
    except TimeoutError:
        raise APIError(f"the body was not here within {BODY_SECONDS:g} seconds", 408) from None
    except ClientDisconnect:
        raise APIError("the body ends too early") from None
    return bytes(data)


def parse_json(data: bytes) -> Any:
    try:
        text = data.decode("utf-8")
        return json.loads(text, parse_constant=no_number, object_pairs_hook=some_fields)
    except (ValueError, RecursionError) as error:
        raise APIError(f"the body is not JSON: {error}") from None


def some_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of far too many fields the first, which are wrong as well and sooner told."""
    fields = dict(pairs)
    return (
        fields if len(fields) <= MAX_FIELDS else dict(itertools.islice(fields.items(), MAX_FIELDS))
    )


def no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
