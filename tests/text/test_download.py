"""Downloads from a real server on this machine, which is slow, broken or changed as needed."""

import contextlib
import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from email.message import Message
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.request import Request

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanolm.errors import DataError, DiskFull, UsageError
from nanolm.text import download
from nanolm.text.download import checksum, dataset_files, fetch

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


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(download, "WAITS", (0.0, 0.01))
    with Server() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.root)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def quiet(what: str, done: int, total: int) -> None:
    pass


def ranges_asked(server: Server) -> list[str | None]:
    return [headers.get("Range") for _, headers in server.asked]


def part_of(folder: Path) -> Path:
    (part,) = folder.glob("*/*.part")
    return part


def test_a_file_is_downloaded_once(server: Server, tmp_path: Path) -> None:
    url = server.put("/some/book.jsonl.gz", content())
    seen: list[tuple[str, int, int]] = []
    file = fetch(url, tmp_path / "new" / "cache", lambda *event: seen.append(event))
    assert file.read_bytes() == DATA
    assert file.name == "book.jsonl.gz"
    assert checksum(file) == hashlib.sha256(DATA).hexdigest()
    assert {(what, total) for what, _, total in seen} == {("downloading book.jsonl.gz", len(DATA))}
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == len(DATA)
    assert {entry.name for entry in file.parent.iterdir()} == {
        ".lock",
        "book.jsonl.gz",
        "book.jsonl.gz.json",
    }
    assert fetch(url, tmp_path / "new" / "cache", quiet) == file
    assert len(server.asked) == 1
    assert server.asked[0][1]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("answer", [content(b"", tag=""), content(tag=""), chunked(DATA)])
def test_empty_files_and_those_without_tag_or_length(
    server: Server, tmp_path: Path, answer: Answer
) -> None:
    file = fetch(server.put("/a.txt", answer), tmp_path, quiet)
    assert file.read_bytes() in (b"", DATA)
    assert checksum(file) == hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_cut_connection_is_continued(server: Server, tmp_path: Path) -> None:
    url = server.put("/a.txt", content(cut=200_000), content(cut=300_000), content())
    assert fetch(url, tmp_path, quiet).read_bytes() == DATA
    assert ranges_asked(server) == [None, "bytes=200000-", "bytes=300000-"]
    assert [headers.get("If-Range") for _, headers in server.asked] == [None, '"1"', '"1"']


def test_the_date_does_where_there_is_no_tag(server: Server, tmp_path: Path) -> None:
    date = "Mon, 01 Jan 2024 00:00:00 GMT"
    url = server.put("/a.txt", content(tag="", date=date, cut=1000), content(tag="", date=date))
    assert fetch(url, tmp_path, quiet).read_bytes() == DATA
    assert ranges_asked(server) == [None, "bytes=1000-"]
    assert server.asked[1][1]["If-Range"] == date


def test_a_later_call_goes_on(server: Server, tmp_path: Path) -> None:
    url = server.put("/a.txt", content(cut=200_000))
    with pytest.raises(DataError, match=r"200,000 bytes have arrived, and .* goes on from there"):
        fetch(url, tmp_path, quiet)
    server.asked.clear()
    server.put("/a.txt", content())
    assert fetch(url, tmp_path, quiet).read_bytes() == DATA
    assert ranges_asked(server) == ["bytes=200000-"]


def test_a_hanging_server_is_given_up(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "TIMEOUT", 0.1)
    url = server.put("/a.txt", content(cut=200_000, stall=0.5), lambda handler: time.sleep(0.5))
    with pytest.raises(DataError, match=r"timed out.*200,000 bytes have arrived"):
        fetch(url, tmp_path, quiet)
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (content(cut=1000), content(ranges=False)),
        (content(cut=1000), content(tag='"2"')),  # changed on the server
        (content(b"old" * 999, cut=1000), content(DATA, tag='"2"')),
        # Nothing that stands for the very bytes:
        (content(b"x" * len(DATA), tag='W/"1"', cut=500), content(tag='W/"1"')),
        (content(b"x" * 1000, tag="", cut=500), content(tag="")),
        (chunked(b"x" * 1000, whole=False), content()),
    ],
)
def test_starts_over_where_it_cannot_go_on(
    server: Server, tmp_path: Path, first: Answer, then: Answer
) -> None:
    url = server.put("/a.txt", first, then)
    assert fetch(url, tmp_path, quiet).read_bytes() == DATA


@pytest.mark.parametrize(
    "wrong",
    [
        status(416),
        status(206, Content_Range="bytes 5-9/10"),
        status(206),
        # A server that ignores If-Range: the tag gives the new file away.
        status(206, Content_Range=f"bytes 1000-{len(DATA) - 1}/{len(DATA)}", ETag='"2"'),
    ],
)
def test_a_wrong_range_is_not_appended(server: Server, tmp_path: Path, wrong: Answer) -> None:
    url = server.put("/a.txt", content(cut=1000), wrong, content())
    assert fetch(url, tmp_path, quiet).read_bytes() == DATA
    assert ranges_asked(server) == [None, "bytes=1000-", None]


def test_a_range_that_ends_early_is_noticed(server: Server, tmp_path: Path) -> None:
    def no_length(handler: Handler) -> None:
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes 1000-{len(DATA) - 1}/{len(DATA)}")
        handler.end_headers()
        handler.wfile.write(DATA[1000:2000])

    url = server.put("/a.txt", content(cut=1000), no_length, content())
    assert fetch(url, tmp_path, quiet).read_bytes() == DATA
    assert ranges_asked(server) == [None, "bytes=1000-", "bytes=2000-"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("survived", range(3))
def test_a_kill_between_any_two_renames(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    url = server.put("/a.txt", content())
    replace, calls = os.replace, iter(range(99))

    def dying(source: Any, target: Any) -> None:
        if next(calls) == survived:
            raise Killed
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying)
        with pytest.raises(Killed):
            fetch(url, tmp_path, quiet)
    assert not list(tmp_path.glob("*/a.txt"))
    file = fetch(url, tmp_path, quiet)
    assert file.read_bytes() == DATA
    assert checksum(file) == hashlib.sha256(DATA).hexdigest()
    assert len(server.asked) == (2 if survived == 0 else 1)  # what had all arrived is kept


def test_a_damaged_copy_is_fetched_anew(server: Server, tmp_path: Path) -> None:
    url = server.put("/a.txt", content())
    file = fetch(url, tmp_path, quiet)
    file.write_bytes(DATA[:10])
    assert fetch(url, tmp_path, quiet).read_bytes() == DATA
    (file.parent / "a.txt.json").unlink()
    with pytest.raises(DataError, match="delete it to fetch it anew"):
        checksum(file)
    assert fetch(url, tmp_path, quiet).read_bytes() == DATA


def test_a_full_disk(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = server.put("/a.txt", content(cut=1000), content())

    def full(*_: object) -> None:  # as the write before it would
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskFull, match=r"what has arrived is kept"):
        fetch(url, tmp_path, full)
    assert part_of(tmp_path).stat().st_size == 1000
    assert fetch(url, tmp_path, quiet).read_bytes() == DATA
    assert ranges_asked(server) == [None, "bytes=1000-"]


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (404, UsageError, r"does not exist \(HTTP 404\)"),
        (410, UsageError, r"does not exist \(HTTP 410\)"),
        (401, UsageError, r"\(HTTP 401\).*HF_TOKEN"),
        (403, UsageError, r"\(HTTP 403\).*HF_TOKEN"),
        (500, DataError, r"HTTP 500 \(Internal Server Error\)"),
        (416, DataError, r"no such part"),
    ],
)
def test_http_errors(
    server: Server, tmp_path: Path, code: int, error: type[Exception], message: str
) -> None:
    url = server.put("/a.txt", status(code))
    with pytest.raises(error, match=f"^{url}.*{message}"):
        fetch(url, tmp_path, quiet)
    assert not list(tmp_path.glob("*/a.txt"))


def test_the_token_is_not_suggested_elsewhere(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_ENDPOINT")
    with pytest.raises(UsageError) as caught:
        fetch(server.put("/a.txt", status(403)), tmp_path, quiet)
    assert "HF_TOKEN" not in str(caught.value)


def test_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with Server() as gone:
        pass
    with pytest.raises(DataError, match=r"cannot be reached: .*refused.* is there a network\?"):
        fetch(f"{gone.root}/a.txt", tmp_path, quiet)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://host/a.txt",
        "a.txt",
        "https:///a.txt",
        "http://[/a.txt",
        "http://host:port/a.txt",
    ],
)
def test_other_addresses_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(UsageError, match="address"):
        fetch(url, tmp_path, quiet)


def test_odd_characters_in_an_address(server: Server, tmp_path: Path) -> None:
    server.put("/%C3%BC%20b.txt?q=%20", content())
    assert fetch(f"{server.root}/ü b.txt?q= ", tmp_path, quiet).name == "_b.txt"


def test_redirects(server: Server, tmp_path: Path) -> None:
    server.put("/there", content(cut=1000), content())
    file = fetch(server.put("/here.txt", status(302, Location="/there")), tmp_path, quiet)
    assert (file.name, file.read_bytes()) == ("here.txt", DATA)
    assert ranges_asked(server)[-1] == "bytes=1000-"  # goes along to where the file is


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/a.txt"])
def test_redirects_to_other_schemes_are_refused(
    server: Server, tmp_path: Path, target: str
) -> None:
    with pytest.raises(DataError, match=target):
        fetch(server.put("/a.txt", status(302, Location=target)), tmp_path, quiet)
    assert not list(tmp_path.glob("*/a.txt"))


def test_redirects_stay_encrypted() -> None:
    def redirect(source: str, target: str) -> Request | None:
        request = Request(source)
        handler = download._Redirects()
        return handler.redirect_request(request, BytesIO(), 302, "", HTTPMessage(), target)

    assert redirect("http://a/", "https://b/")
    assert redirect("https://a/", "https://b/")
    with pytest.raises(DataError, match="not safe"):
        redirect("https://a/", "http://a/")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/", "index.html"),
        ("", "index.html"),
        ("/data/", "index.html"),
        ("/..", "index.html"),
        ("/%2e%2e%2fetc%2fpasswd", "_etc_passwd"),
        ("/.hidden.txt", "hidden.txt"),
        ("/a%20b%00c.csv?token=x.exe#y", "a_b_c.csv"),
        ("/" + "x" * 500 + ".jsonl.gz", "x" * 91 + ".jsonl.gz"),
    ],
)
def test_names_are_made_safe(path: str, name: str) -> None:
    assert download._local(f"http://host{path}", Path()).name == name


@given(st.text())
def test_any_name_stays_in_its_folder(path: str) -> None:
    file = download._local(f"http://host/{path}", Path("cache"))
    assert file.name.strip(".") and set(file.name).isdisjoint('/\\:*?"<>|\0')
    assert len(file.parts) == 3 and len(file.name) <= 100


FETCH = "from pathlib import Path; from nanolm.text.download import fetch; import sys; "
FETCH += "print(fetch(sys.argv[1], Path(sys.argv[2]), lambda *event: None))"


def start(url: str, folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", FETCH, url, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_process_is_taken_over(server: Server, tmp_path: Path) -> None:
    url = server.put("/a.txt", content(pause=0.05), content())
    with start(url, tmp_path) as child:
        until = time.monotonic() + 30
        while not any(part.stat().st_size > 50_000 for part in tmp_path.glob("*/*.part")):
            assert child.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        child.kill()
    arrived = part_of(tmp_path).stat().st_size
    assert 0 < arrived < len(DATA)
    assert fetch(url, tmp_path, quiet).read_bytes() == DATA
    assert ranges_asked(server) == [None, f"bytes={arrived}-"]


def test_two_processes_share_one_download(server: Server, tmp_path: Path) -> None:
    url = server.put("/a.txt", content(pause=0.01))
    with start(url, tmp_path) as one, start(url, tmp_path) as other:
        files = {child.communicate(timeout=30)[0].strip() for child in (one, other)}
    (file,) = files
    assert Path(file).read_bytes() == DATA
    assert len(server.asked) == 1


def hub(server: Server, name: str, pages: list[list[str]]) -> None:
    """Serve a data set; each file holds its own path."""
    first = f"/api/datasets/{name}/tree/main?recursive=true"
    for number, paths in enumerate(pages):
        entries = [{"type": "file", "path": path, "size": 1} for path in paths]
        body = json.dumps([{"type": "directory", "path": "data.txt"}, *entries]).encode()
        link = {"Link": f'<{server.root}{first}&cursor={number + 1}>; rel="next"'}
        headers = link if number + 1 < len(pages) else {}
        address = f"{first}&cursor={number}" if number else first
        server.put(address, lambda h, body=body, headers=headers: h.reply(200, body, **headers))  # type: ignore[misc]
        for path in paths:
            address = f"/datasets/{name}/resolve/main/{path.replace(' ', '%20')}"
            server.put(address, content(path.encode()))


def texts(files: list[Path]) -> list[str]:
    return [file.read_text() for file in files]


def test_a_data_set_in_pages(server: Server, tmp_path: Path) -> None:
    hub(server, "owner/name", [["README.md", "b c.parquet"], ["a.jsonl.gz", "x.py"], ["d/c.TXT"]])
    files = dataset_files("hf://owner/name", tmp_path, quiet)
    assert texts(files) == ["a.jsonl.gz", "b c.parquet", "d/c.TXT"]
    asked = len(server.asked)
    assert dataset_files("hf://owner/name", tmp_path, quiet) == files
    assert len(server.asked) == asked  # no network once everything is there
    files[0].unlink()
    assert dataset_files("hf://owner/name", tmp_path, quiet) == files
    assert len(server.asked) == asked + 3 + 1  # listed anew, one file fetched


@pytest.mark.parametrize(
    ("paths", "name", "chosen"),
    [
        (["test.csv", "train.csv"], "hf://squad", ["train.csv"]),
        (["constrained.csv", "training.csv"], "hf://squad", ["constrained.csv", "training.csv"]),
        (["data/train-0.parquet", "data/test-0.parquet"], "hf://o/n", ["data/train-0.parquet"]),
        (["en/1.txt", "en/2.txt", "en2/3.txt"], "hf://o/n/en", ["en/1.txt", "en/2.txt"]),
        (["en/1.txt", "en/2.txt"], "hf://o/n/en/2.txt", ["en/2.txt"]),
        (["en/a b.txt", "train.txt"], "hf://o/n/en/", ["en/a b.txt"]),
        (["README.md", "LICENSE.txt", "readmes.txt"], "hf://o/n", ["readmes.txt"]),
        (["README.md"], "hf://o/n", ["README.md"]),
        (["a.arrow", "b.tsv.ZST", "c.gz"], "hf://o/n", ["a.arrow", "b.tsv.ZST"]),
    ],
)
def test_which_files_are_chosen(
    server: Server, tmp_path: Path, paths: list[str], name: str, chosen: list[str]
) -> None:
    hub(server, "/".join(name.removeprefix("hf://").split("/")[:2]), [paths])
    assert texts(dataset_files(name, tmp_path, quiet)) == chosen


def test_data_sets_that_are_of_no_use(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^hf://no/such does not exist \(HTTP 404\)"):
        dataset_files("hf://no/such", tmp_path, quiet)
    hub(server, "o/n", [["a.json", "b.json", "c.py", "LICENSE"]])
    with pytest.raises(DataError, match=r"\.json \(2\), \.py \(1\), no suffix \(1\)"):
        dataset_files("hf://o/n", tmp_path, quiet)
    for name in ("hf://", "hf://a//b", "hf://../b", "o/n"):
        with pytest.raises(UsageError, match="OWNER/NAME"):
            dataset_files(name, tmp_path, quiet)


@pytest.mark.parametrize("body", [b"<html>", b"{}", b"[1]", b'[{"type": "file"}]', b"3"])
def test_a_listing_that_is_none(server: Server, tmp_path: Path, body: bytes) -> None:
    server.put("/api/datasets/o/n/tree/main?recursive=true", lambda h: h.reply(200, body))
    with pytest.raises(DataError, match="hf://o/n"):
        dataset_files("hf://o/n", tmp_path, quiet)


def test_a_listing_stays_at_its_host_and_ends(server: Server, tmp_path: Path) -> None:
    path = "/api/datasets/o/n/tree/main?recursive=true"
    for elsewhere in ("http://localhost:1/next", "file:///etc/passwd", path):
        link = f'<{elsewhere}>; rel="next"'
        server.put(path, lambda h, link=link: h.reply(200, b"[]", Link=link))  # type: ignore[misc]
        with pytest.raises((DataError, UsageError), match=r"goes on at|cannot be downloaded"):
            dataset_files("hf://o/n", tmp_path, quiet)


def test_a_listing_cut_short_is_asked_for_again(server: Server, tmp_path: Path) -> None:
    path = "/api/datasets/o/n/tree/main?recursive=true"
    hub(server, "o/n", [["a.txt"]])
    server.put(path, content(b"[]  ", cut=2), *server.answers[path])
    assert texts(dataset_files("hf://o/n", tmp_path, quiet)) == ["a.txt"]
    server.put(path, content(b"[]  ", cut=2))
    with pytest.raises(DataError, match="tries again"):
        dataset_files("hf://o/n/other", tmp_path, quiet)


def test_the_token_goes_to_the_hub_only(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret\n")
    hub(server, "o/n", [["a.txt"]])
    with Server() as other:
        threading.Thread(target=other.serve_forever, args=(0.01,)).start()
        elsewhere = other.put("/a", content())
        server.put("/moved", status(302, Location=elsewhere))
        server.put("/datasets/o/n/resolve/main/a.txt", status(307, Location="/moved"))
        (file,) = dataset_files("hf://o/n", tmp_path, quiet)
        fetch(other.put("/b", content()), tmp_path, quiet)
        other.shutdown()
    assert file.read_bytes() == DATA
    assert [headers["Authorization"] for _, headers in server.asked] == ["Bearer secret"] * 3
    assert [headers["Authorization"] for _, headers in other.asked] == [None, None]
