"""A real server on this machine, which is slow, broken or changed as a test needs it."""

import contextlib
import json
import time
from collections.abc import Callable
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DATA = bytes(range(256)) * 2000  # half a megabyte: several blocks
Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    server: "Server"

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers))
        answers = self.server.answers.get(self.path, [status(404)])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        with contextlib.suppress(ConnectionError):  # the client may be killed
            answer(self)

    def reply(self, code: int, body: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Answers a path with the first of its answers, each once; with the last for ever."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, list[Answer]] = {}
        self.asked: list[tuple[str, Message]] = []
        self.root = f"http://127.0.0.1:{self.server_port}"

    def put(self, path: str, *answers: Answer) -> str:
        self.answers[path] = list(answers)
        return self.root + path


def status(code: int, **headers: str) -> Answer:
    return lambda handler: handler.reply(code, b"", **headers)


def content(
    data: bytes = DATA,
    tag: str = '"1"',
    date: str = "",
    cut: int | None = None,
    pause: float = 0,
    stall: float = 0,
    ranges: bool = True,
) -> Answer:
    """Serve `data` as a good server does: only so many bytes, slowly, or hanging if told to."""

    def answer(handler: Handler) -> None:
        start, wanted = 0, handler.headers.get("Range", "")
        if wanted and ranges and handler.headers.get("If-Range") == (tag or date):
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(data):
                return handler.reply(416, b"", Content_Range=f"bytes */{len(data)}")
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        if tag:
            handler.send_header("ETag", tag)
        if date:
            handler.send_header("Last-Modified", date)
        handler.send_header("Content-Length", str(len(data) - start))
        handler.end_headers()
        step = 16384 if pause else len(data)
        for offset in range(start, min(len(data), cut or len(data)), step):
            handler.wfile.write(data[offset : min(offset + step, cut or len(data))])
            time.sleep(pause)
        time.sleep(stall)
        return None

    return answer


def chunked(data: bytes, whole: bool = True) -> Answer:
    def answer(handler: Handler) -> None:
        handler.protocol_version = "HTTP/1.1"
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.send_header("ETag", '"1"')
        handler.end_headers()
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) + (b"0\r\n\r\n" if whole else b""))
        handler.close_connection = True

    return answer


def hub(server: Server, name: str, pages: list[list[str]], kind: str = "datasets") -> None:
    """Serve a repository as the Hub does; each file holds its own path."""
    first = f"/api/{kind}/{name}/tree/main?recursive=true"
    root = f"/{name}" if kind == "models" else f"/{kind}/{name}"
    for number, paths in enumerate(pages):
        entries = [{"type": "file", "path": path, "size": 1} for path in paths]
        body = json.dumps([{"type": "directory", "path": "data.txt"}, *entries]).encode()
        link = {"Link": f'<{server.root}{first}&cursor={number + 1}>; rel="next"'}
        headers = link if number + 1 < len(pages) else {}
        address = f"{first}&cursor={number}" if number else first
        server.put(address, lambda h, body=body, headers=headers: h.reply(200, body, **headers))  # type: ignore[misc]
        for path in paths:
            address = f"{root}/resolve/main/{path.replace(' ', '%20')}"
            server.put(address, content(path.encode()))


def quiet(what: str, done: int, total: int) -> None:
    pass


def ranges_asked(server: Server) -> list[str | None]:
    return [headers.get("Range") for _, headers in server.asked]
