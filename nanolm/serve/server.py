"""The listener: one process, a socket bound before the models load, and a graceful shutdown."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanolm.errors import UsageError
from nanolm.serve.guard import App, Receive, Scope, Send
from nanolm.serve.request_models import APIError
from nanolm.training.interrupt import stop_signals

HEADER_SECONDS = 20.0  # time limit for a client to send a request
STALL_SECONDS = 20.0  # time limit for a client to read some of the response
CHECK_SECONDS = 1.0  # between two checks of a connection
SHUTDOWN_SECONDS = 20  # for unfinished responses when the server stops
MAX_CONNECTIONS = 512  # more than the texts that can run and wait
ACCEPTS = 16  # new connections per iteration of the event loop; closing one takes several
SPARE_DESCRIPTORS = 6 * ACCEPTS  # for connections being opened or closed, and for files
BACKLOG = 4096  # connections waiting to be accepted; the system may allow fewer


class BoundedProtocol(H11Protocol):
    """Closes connections that send no request or stop reading the response, and, when there are too
    many, the one that has been idle longest. Clients that are merely slow are kept."""

    most = MAX_CONNECTIONS
    alarm: asyncio.TimerHandle | None = None
    since = 0.0  # the last progress: data read by the client, or a finished response
    unsent = 0  # bytes at the last check

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.since = self.loop.time()
        self.check()
        if len(self.connections) > self.most:
            self.make_room()

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.alarm is not None:
            self.alarm.cancel()
        super().connection_lost(exc)

    def busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def check(self) -> None:
        now, unsent = self.loop.time(), unsent_bytes(self.transport)
        if unsent != self.unsent or (self.busy() and not unsent):
            self.since = now
        elif now - self.since > (STALL_SECONDS if unsent else HEADER_SECONDS):
            # close() would wait for a client that may never read the rest.
            return self.transport.abort()
        self.unsent = unsent
        self.alarm = self.loop.call_later(CHECK_SECONDS, self.check)

    def make_room(self) -> None:
        others: list[Any] = [each for each in self.connections if each is not self]
        # Connections that are still sending a request come last.
        others.sort(key=lambda each: (each.busy(), each.since))
        if idle := next((each for each in others if each.idle()), None):
            self.connections.discard(idle)
            idle.transport.abort()
        else:
            self.app = partial(refuse_crowd, self.app)

    def idle(self) -> bool:
        """Whether there is nothing to send, and nothing received that is still unread."""
        asking = not self.busy() or self.cycle.more_body
        unsent = self.transport.get_write_buffer_size()
        return asking and not unsent and not system_bytes(self.transport, "FIONREAD")


async def refuse_crowd(app: App, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http" and scope["path"] != "/health":
        error = APIError("too many connections; try again later", 503)
        app = JSONResponse(error.body(), 503, {"retry-after": "1", "connection": "close"})
    await app(scope, receive, send)


def unsent_bytes(transport: asyncio.Transport) -> int:
    """Bytes that the client has not received: in our buffer and in the system's."""
    return transport.get_write_buffer_size() + system_bytes(transport, "TIOCOUTQ")


def system_bytes(transport: asyncio.Transport, kind: str) -> int:
    """Bytes in the system's buffers of a connection: unread (FIONREAD) or unsent (TIOCOUTQ)."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # not available on Windows
        import fcntl
        import termios

        file = transport.get_extra_info("socket").fileno()
        data = fcntl.ioctl(file, getattr(termios, kind), bytes(4))
        return int.from_bytes(data, sys.byteorder)
    return 0


def max_connections() -> int:
    """MAX_CONNECTIONS, or fewer if there are not enough file descriptors."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MAX_CONNECTIONS
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    used = os.open(os.devnull, os.O_RDONLY)  # the lowest free descriptor
    os.close(used)
    return max(ACCEPTS, min(MAX_CONNECTIONS, limit - used - SPARE_DESCRIPTORS))


class GracefulServer(uvicorn.Server):
    """Handles stop signals by finishing the current requests."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        for listening in sockets or []:
            listening.listen(BACKLOG)  # asyncio keeps accepting ACCEPTS at a time
        self.ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {kind: signal.signal(kind, self.handle_exit) for kind in stop_signals()}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)


def bound(address: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio sets TCP_NODELAY only if the protocol is given. Without it, each response on a
        # kept-alive connection waits 40 ms for the previous one to be acknowledged.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE and port < 65_535
        hint = f"; try --port {port + 1}" if taken else ""
        raise UsageError(f"cannot listen on {address}:{port}: {error.strerror}{hint}") from None
    listening.set_inheritable(True)
    return listening


def listen(app: App, listening: socket.socket, ready: Callable[[], None]) -> None:
    class Protocol(BoundedProtocol):
        most = max_connections()

    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=ACCEPTS,
        timeout_keep_alive=3600,  # BoundedProtocol ends idle connections
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        h11_max_incomplete_event_size=65_536,
    )
    GracefulServer(config, ready).run(sockets=[listening])
