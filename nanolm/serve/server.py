"""Listening: one process, a socket that is ours before a model is loaded, and a gentle end."""

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanolm.errors import UsageError
from nanolm.serve.guard import App
from nanolm.training.interrupt import stop_signals

HEADER_SECONDS = 20.0  # in which a client has to say what it wants
SHUTDOWN_SECONDS = 20  # seconds for what is being written when the server is to stop


class HeaderTimeoutProtocol(H11Protocol):
    alarm: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.rest()
        super().connection_lost(exc)

    def watch(self) -> None:
        """Let time run while nothing is asked for, from the first such moment on."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.rest()
        elif self.alarm is None:
            # Not closed: that waits for a client that may never take what was sent.
            self.alarm = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def rest(self) -> None:
        if self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None


class GracefulServer(uvicorn.Server):
    """Ends by a signal as it ends otherwise: after what is under way."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
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
    config = uvicorn.Config(
        app,
        http=HeaderTimeoutProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        h11_max_incomplete_event_size=65_536,
    )
    GracefulServer(config, ready).run(sockets=[listening])
