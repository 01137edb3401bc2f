"""Downloads from a real server on this machine."""

import errno
import hashlib
import os
import subprocess
import sys
import time
from http.client import HTTPMessage
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.request import Request

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import DATA, Answer, Handler, Server, chunked, content, quiet, ranges_asked, status

from nanolm import download
from nanolm.download import checksum, fetch
from nanolm.errors import DataError, DiskFull, UsageError


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
    with pytest.raises(DataError, match=r"200,000 bytes of a.txt.* resume"):
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
    with pytest.raises(DataError, match=r"timed out.*200,000 bytes of a.txt"):
        fetch(url, tmp_path, quiet)
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (content(cut=1000), content(ranges=False)),
        (content(cut=1000), content(tag='"2"')),  # changed on the server
        (content(b"old" * 999, cut=1000), content(DATA, tag='"2"')),
        # No strong validator:
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
        # A server that ignores If-Range: the ETag shows that the file is new.
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
    assert len(server.asked) == (2 if survived == 0 else 1)  # a complete download is kept


def test_a_damaged_copy_is_fetched_anew(server: Server, tmp_path: Path) -> None:
    url = server.put("/a.txt", content())
    file = fetch(url, tmp_path, quiet)
    file.write_bytes(DATA[:10])
    assert fetch(url, tmp_path, quiet).read_bytes() == DATA
    (file.parent / "a.txt.json").unlink()
    with pytest.raises(DataError, match=r"a\.txt .*checksum.*delete"):
        checksum(file)
    assert fetch(url, tmp_path, quiet).read_bytes() == DATA


def test_a_full_disk(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = server.put("/a.txt", content(cut=1000), content())

    def full(*_: object) -> None:  # like the write before it
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskFull, match=r"bytes downloaded so far are kept"):
        fetch(url, tmp_path, full)
    assert part_of(tmp_path).stat().st_size == 1000
    assert fetch(url, tmp_path, quiet).read_bytes() == DATA
    assert ranges_asked(server) == [None, "bytes=1000-"]


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (404, UsageError, r"a.txt does not exist \(HTTP 404\)"),
        (410, UsageError, r"a.txt does not exist \(HTTP 410\)"),
        (401, UsageError, r"a.txt is not public \(HTTP 401\)"),
        (403, UsageError, r"a.txt is not public \(HTTP 403\)"),
        (500, DataError, r"a.txt.* HTTP 500 \(Internal Server Error\)"),
        (416, DataError, r"a.txt.* requested part of the file"),
    ],
)
def test_http_errors(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    error: type[Exception],
    message: str,
) -> None:
    url = server.put("/a.txt", status(code))
    with pytest.raises(error) as from_the_hub:
        fetch(url, tmp_path, quiet)
    assert ("HF_TOKEN" in str(from_the_hub.value)) == (error is UsageError)
    monkeypatch.delenv("HF_ENDPOINT")  # not the Hub, so its token does not help
    with pytest.raises(error, match=f"^{server.root}/{message}") as caught:
        fetch(url, tmp_path, quiet)
    assert "HF_TOKEN" not in str(caught.value)
    assert not list(tmp_path.glob("*/a.txt"))


def test_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with Server() as gone:
        pass
    with pytest.raises(DataError, match=r"could not be reached \(.*refused.*local path"):
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
    with pytest.raises(UsageError, match="URL"):
        fetch(url, tmp_path, quiet)


def test_odd_characters_in_an_address(server: Server, tmp_path: Path) -> None:
    server.put("/%C3%BC%20b.txt?q=%20", content())
    assert fetch(f"{server.root}/ü b.txt?q= ", tmp_path, quiet).name == "_b.txt"


def test_redirects(server: Server, tmp_path: Path) -> None:
    server.put("/there", content(cut=1000), content())
    file = fetch(server.put("/here.txt", status(302, Location="/there")), tmp_path, quiet)
    assert (file.name, file.read_bytes()) == ("here.txt", DATA)
    assert ranges_asked(server)[-1] == "bytes=1000-"  # sent on to the host of the file


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
    assert download._name(f"http://host{path}") == name


@given(st.text())
def test_any_name_stays_in_its_folder(path: str) -> None:
    name = download._name(f"http://host/{path}")
    assert name.strip(".") and set(name).isdisjoint('/\\:*?"<>|\0') and len(name) <= 100


FETCH = "from pathlib import Path; from nanolm.download import fetch; import sys; "
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
