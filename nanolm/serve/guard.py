"""Access control: the Host and Origin headers, the API key, and the form of a request.

Any web page in the user's browser can send requests to this machine. With DNS rebinding, where the
page's own host name resolves to this machine, it can even read the responses. So the Host header
must be an IP address or an allowed name, and the Origin must be this server or an allowed one.
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
PAGE = ("/", "/page.css", "/page.js", "/reading.js", "/writing.js", "/icon.svg")
PUBLIC_PATHS = (*PAGE, "/health")  # need no key
BODY_SECONDS = 20.0  # time limit for receiving a body
MAX_FIELDS = 1000  # per JSON object; valid requests have far fewer
FREE_FAILURES = 8  # wrong keys per address that are answered without delay
DELAY = 0.05  # seconds added by each further wrong key
MAX_DELAY = 2.0  # seconds
MAX_WAITING = 32  # delayed responses per address; further keys are not checked
MAX_SENDERS = 4096  # addresses to remember
FORGET_SECONDS = 300.0  # after the last wrong key


class WrongKeys:
    """Delays the responses to wrong keys: one at a time per address, each later than the last.
    Disconnecting does not shorten the delay. Valid keys and other addresses do not wait."""

    def __init__(self) -> None:
        self.senders: dict[str, Failures] = {}  # ordered by the last failure

    def too_many(self, sender: str) -> bool:
        """Whether to stop checking keys. A valid one would otherwise stand out by its speed."""
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
    waiting: int = 0  # delayed responses
    next: float = 0.0  # when the last of them is sent


def sender(scope: Scope) -> str:
    """The client's address; for IPv6, its /64 network, in which a client can use any address."""
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
        # Against request smuggling: a proxy may see the end of such a request elsewhere.
        chunked = "transfer-encoding" in headers
        if chunked and ("content-length" in headers or scope["http_version"] != "1.1"):
            raise APIError("send Content-Length or, in HTTP/1.1, Transfer-Encoding, but not both")
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self.known(hosts[0]):
            cure = "use the IP address, or start the server with --allow-host NAME"
            raise APIError(f"unknown host name; {cure}", 403)
        if origin is not None and not foreign:
            same = {f"{scheme}://{hosts[0].lower()}" for scheme in ("http", "https")}
            if origin.lower() not in same:
                raise APIError("origin not allowed; start the server with --allow-origin URL", 403)
        path = scope["path"]  # /look/ pages have unguessable names
        public = path in PUBLIC_PATHS or path.startswith("/look/")
        if self.key is None or public or scope["method"] == "OPTIONS":
            return
        if self.wrong_keys.too_many(sender(scope)):
            raise APIError("too many wrong API keys from this address", 429)
        given = headers.get("authorization", "").removeprefix("Bearer ").strip()
        digest = hashlib.sha256(given.encode("latin-1", "replace")).digest()
        if not hmac.compare_digest(digest, self.key):
            message = "missing or wrong API key; send the header `Authorization: Bearer KEY`"
            raise APIError(message, 401, code="invalid_api_key")

    def known(self, host: str) -> bool:
        """Whether `host` may name this server."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
            _ = urlsplit(f"//{host}").port
        except ValueError:
            return False
        if any(letter in host for letter in "/?#@\\ "):
            return False
        # An IP address involves no DNS, so it cannot be rebound. A server that listens on loopback
        # accepts only loopback addresses.
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
    """The body of a request, if it is declared as JSON, small enough and complete in time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise APIError("the body must be JSON, with Content-Type: application/json", 415)
    too_large = APIError(f"the body is larger than {most:,} bytes", 413)
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
        raise APIError(f"the body did not arrive within {BODY_SECONDS:g} seconds", 408) from None
    except ClientDisconnect:
        raise APIError("the connection closed before the body was complete") from None
    return bytes(data)


def parse_json(data: bytes) -> Any:
    try:
        text = data.decode("utf-8")
        return json.loads(text, parse_constant=reject_constant, object_pairs_hook=limit_fields)
    except (ValueError, RecursionError) as error:
        raise APIError(f"the body is not valid JSON: {error}") from None


def limit_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, cut to MAX_FIELDS fields: enough to report an error, and quicker to check."""
    fields = dict(pairs)
    return (
        fields if len(fields) <= MAX_FIELDS else dict(itertools.islice(fields.items(), MAX_FIELDS))
    )


def reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
