"""Listening: one process, a socket that is ours before a model is loaded, and a gentle end."""

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

HEADER_SECONDS = 20.0  # in which a client has to say what it wants
STALL_SECONDS = 20.0  # in which it has to take something of what was sent
LOOK_SECONDS = 1.0  # between two looks at a connection
SHUTDOWN_SECONDS = 20  # seconds for what is being written when the server is to stop
MAX_CONNECTIONS = 512  # more than rows that may be written and wait
ACCEPTS = 16  # new connections in one turn of the event loop; closing one takes some turns
SPARE_DESCRIPTORS = 6 * ACCEPTS  # for those under way, and for files
BACKLOG = 4096  # connections that the system keeps until they are accepted; it may keep fewer


class BoundedProtocol(H11Protocol):
    """Ends a connection that asks for nothing, or whose client takes nothing of what is sent, and
    the one that has been idle longest where there are too many. Slow clients are waited for."""

    most = MAX_CONNECTIONS
    alarm: asyncio.TimerHandle | None = None
    since = 0.0  # when something was last asked for, or taken
    unsent = 0  # bytes, when it was last looked at

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.since = self.loop.time()
        self.look()
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

    def look(self) -> None:
        now, unsent = self.loop.time(), unsent_bytes(self.transport)
        if unsent != self.unsent or (self.busy() and not unsent):
            self.since = now
        elif now - self.since > (STALL_SECONDS if unsent else HEADER_SECONDS):
            # Not closed: that waits for a client that may never take what was sent.
            return self.transport.abort()
        self.unsent = unsent
        self.alarm = self.loop.call_later(LOOK_SECONDS, self.look)

    def make_room(self) -> None:
        others: list[Any] = [each for each in self.connections if each is not self]
        # Those that are still sending what they ask for come last.
        others.sort(key=lambda each: (each.busy(), each.since))
        if idle := next((each for each in others if each.idle()), None):
            self.connections.discard(idle)
            idle.transport.abort()
        else:
            self.app = partial(refuse_crowd, self.app)

    def idle(self) -> bool:
        """Nothing is owed to its client, nor has it sent what is still to be read."""
        asking = not self.busy() or self.cycle.more_body
        unsent = self.transport.get_write_buffer_size()
        return asking and not unsent and not system_bytes(self.transport, "FIONREAD")


async def refuse_crowd(app: App, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http" and scope["path"] != "/health":
        error = APIError("too many connections; try again later", 503)
        app = JSONResponse(error.body(), 503, {"retry-after": "1", "connection": "close"})
    await app(scope, receive, send)


def unsent_bytes(transport: asyncio.Transport) -> int:
    """Bytes that the client has not taken: those of ours, and those the system still has."""
    return transport.get_write_buffer_size() + system_bytes(transport, "TIOCOUTQ")


def system_bytes(transport: asyncio.Transport, kind: str) -> int:
    """Bytes that the system has of a connection: unread (FIONREAD) or unsent (TIOCOUTQ)."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # Windows cannot tell
        import fcntl
        import termios

        file = transport.get_extra_info("socket").fileno()
        data = fcntl.ioctl(file, getattr(termios, kind), bytes(4))
        return int.from_bytes(data, sys.byteorder)
    return 0


def max_connections() -> int:
    """As many as there are descriptors for, less some."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MAX_CONNECTIONS
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    used = os.open(os.devnull, os.O_RDONLY)  # the lowest that is free
    os.close(used)
    return max(ACCEPTS, min(MAX_CONNECTIONS, limit - used - SPARE_DESCRIPTORS))


class GracefulServer(uvicorn.Server):
    """Ends by a signal as it ends otherwise: after what is under way."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        for listening in sockets or []:
            listening.listen(BACKLOG)  # asyncio accepts as many at once as it was told, ACCEPTS
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
        # Only if TCP is named does asyncio send at once; else each answer on a connection that
        # is kept waits for the one before to be confirmed, 40 ms.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE and port < 65_535
        hint = f"; try --port {port + 1}" if taken else ""
        raise UsageError(f"cannot listen at {address}:{port}: {error.strerror}{hint}") from None
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
