"""Files from the network, kept in a cache, continued where a download broke off.

    >>> fetch("https://www.gutenberg.org/files/11/11-0.txt", Path("cache"), lambda *progress: None)

The cache has a folder for each URL or repository, named by its hash:
  NAME        there only when it is whole
  NAME.json   URL, validator (what tells versions apart), size, and the SHA-256 once it is whole
  NAME.part   what has arrived so far
"""

import contextlib
import hashlib
import http.client
import json
import os
import re
import string
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from nanolm import files
from nanolm.choice import Report
from nanolm.errors import DataError, DiskFull, NanolmError, UsageError

T = TypeVar("T")
TIMEOUT = 30.0  # seconds without a byte
WAITS = (0.5, 2.0, 5.0)  # seconds before each further attempt
RECEIVED_BYTES = 1 << 16  # at once


class _Interrupted(Exception):
    """The connection broke; another attempt may get further."""


class _StartOver(_Interrupted):
    """What the server has now does not fit what has arrived."""


def fetch(url: str, folder: Path, report: Report) -> Path:
    """The local copy of `url`, downloaded unless the cache in `folder` has it."""
    return _fetch(url, folder / _key(url) / _name(url), url, report)


def checksum(file: Path) -> str:
    """The SHA-256 of a fetched file, as it was when it arrived."""
    try:
        return str(_read_json(file.with_name(f"{file.name}.json"))["sha256"])
    except KeyError:
        raise DataError(f"{file} has no checksum beside it; delete it to fetch it anew") from None


@dataclass(frozen=True)
class Repository:
    kind: str  # "datasets" or "models"
    name: str  # OWNER/NAME, or NAME alone
    shown: str  # what messages call it
    cache: Path

    def fetch(
        self, choose: Callable[[list[str]], list[str]], report: Report, together: bool = False
    ) -> list[Path]:
        """The local copies of what `choose` picks from all paths, or refuses; once they are whole,
        without a network. `together` in one folder, or each in its own, as names may recur."""
        url = f"{_endpoint()}/api/{self.kind}/{quote(self.name)}/tree/main?recursive=true"
        listing = self.cache / f"{_key(url)}.json"
        prefix = "" if self.kind == "models" else f"{self.kind}/"

        def address(path: str) -> str:
            return f"{_endpoint()}/{prefix}{quote(self.name)}/resolve/main/{quote(path)}"

        def local(path: str) -> Path:
            return self.cache / _key(url if together else address(path)) / _name(address(path))

        chosen: list[str] = []
        with contextlib.suppress(NanolmError):  # what is refused may be there by now
            chosen = choose(_read_json(listing).get("paths", []))
        if not chosen or not all(_whole(local(path)) for path in chosen):
            paths = _list(self.shown, url)
            chosen = choose(paths)
            with _locked(self.cache, report):
                _write_json(listing, {"url": url, "paths": paths})
        return [_fetch(address(path), local(path), self.shown, report) for path in chosen]


def _list(name: str, url: str) -> list[str]:
    """The paths of all files of a repository, which come in pages."""

    def page() -> tuple[bytes, str]:
        with _open(url, name, {}) as response:
            return b"".join(_blocks(response)), response.headers.get("Link", "")

    paths: list[str] = []
    while True:
        try:
            data, links = _retry(page)
            paths += [str(entry["path"]) for entry in json.loads(data) if entry["type"] == "file"]
        except _Interrupted as error:
            raise DataError(f"{name}: {error}; the same command tries again") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DataError(f"{name}: {url} sent no list of files; is HF_ENDPOINT right?") from None
        link = re.search(r'<([^>]*)>[^,]*;\s*rel="?next\b', links)
        if link is None:
            return paths
        following = urljoin(url, link[1])
        if _origin(following) != _origin(url) or following == url:
            raise DataError(f"{name}: its list of files goes on at {following}, not followed")
        url = following


def _fetch(url: str, file: Path, shown: str, report: Report) -> Path:
    if not _whole(file):
        with _locked(file.parent, report):
            if not _whole(file):  # another process may have been faster
                _download(url, file, shown, report)
    return file


def _download(url: str, file: Path, shown: str, report: Report) -> None:
    part, record_file = (file.with_name(file.name + suffix) for suffix in (".part", ".json"))
    try:
        _retry(lambda: _receive(url, part, record_file, shown, report))
    except _Interrupted as error:
        arrived = part.stat().st_size if part.exists() else 0
        on = "goes on from there" if _resumable(_read_json(record_file)) else "starts over"
        state = f"{arrived:,} bytes of {file.name} have arrived, and the same command {on}"
        raise DataError(f"{shown}: {error}; {state}") from None
    # In this order, so that a kill in between leaves a part file that is known to be whole.
    whole = {"size": part.stat().st_size, "sha256": files.sha256(part)}
    _write_json(record_file, {**_read_json(record_file), **whole})
    files.replace(part, file)


def _receive(url: str, part: Path, record_file: Path, shown: str, report: Report) -> None:
    """One request for what is still missing of the part file."""
    record = _read_json(record_file)
    done = part.stat().st_size if part.exists() else 0
    if done and done == record.get("size"):
        return
    resumed = bool(done and _resumable(record))
    headers = {"Range": f"bytes={done}-", "If-Range": record["validator"]} if resumed else {}
    try:
        with _open(url, shown, headers) as response:
            # What `If-Range` takes: an ETag that stands for the very bytes, or else the date.
            tag = response.headers.get("ETag", "")
            validator = tag if tag.startswith('"') else response.headers.get("Last-Modified")
            if response.status == 206:
                size = record.get("size") or 0
                rest = f"bytes {done}-{size - 1}/{size}"
                same = validator in (None, record.get("validator"))
                if not (headers and same and response.headers.get("Content-Range") == rest):
                    raise _StartOver("the server sent another part of the file than was asked for")
            else:
                # Emptied before its record changes: old bytes never meet a new validator.
                part.write_bytes(b"")
                record = {"url": url, "validator": validator, "size": response.length}
                _write_json(record_file, record)
                done = 0
            with part.open("ab") as stream:
                for block in _blocks(response):
                    stream.write(block)
                    done += len(block)
                    report(f"downloading {part.stem}", done, record["size"] or 0)
    except _StartOver:
        part.unlink(missing_ok=True)
        raise
    if record["size"] not in (None, done):
        raise _Interrupted("the connection ended early")


def _resumable(record: dict[str, Any]) -> bool:
    return bool(record.get("validator") and record.get("size"))


def _blocks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The body as it arrives. Its errors are told apart here from those of the disk."""
    try:
        while block := response.read1(RECEIVED_BYTES):
            yield block
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(f"the connection broke ({error})") from None
    if response.length:  # read1 keeps count of what is still to come
        raise _Interrupted("the connection ended early")


def _retry(action: Callable[[], T]) -> T:
    for wait in WAITS:
        try:
            return action()
        except _Interrupted:
            time.sleep(wait)
    return action()


class _Redirects(HTTPRedirectHandler):
    def redirect_request(self, req: Request, *rest: Any, **named: Any) -> Request | None:
        url = rest[-1]  # that it leads to
        if urlsplit(url).scheme not in ("https", req.type):
            raise DataError(f"{req.full_url} leads to {url}, which is not safe to follow")
        request = super().redirect_request(req, *rest, **named)
        return request and _authorised(request)


def _open(url: str, shown: str, headers: dict[str, str]) -> http.client.HTTPResponse:
    """Ask for `url`; errors call it `shown`."""
    headers = {"User-Agent": "nanolm", "Accept-Encoding": "identity", **headers}
    try:
        request = Request(quote(url, safe=string.punctuation), headers=headers)
        return build_opener(_Redirects).open(_authorised(request), timeout=TIMEOUT)  # type: ignore[no-any-return]
    except HTTPError as error:
        error.close()
        status = f"(HTTP {error.code})"
        if error.code == 416:
            raise _StartOver("the server has no such part of the file") from None
        if error.code not in (401, 403, 404, 410):
            answer = f"HTTP {error.code} ({' '.join(str(error.reason).split())})"
            raise DataError(f"{shown}: the server answered {answer}; try again later") from None
        if _is_hub(url):  # which does not tell strangers what it keeps from them
            cure = "check its spelling, or set HF_TOKEN to an access token that may read it"
            raise UsageError(f"the Hub has no open {shown} {status}; {cure}") from None
        missing = f"does not exist {status}; check its spelling"
        closed = f"is not public {status}; download it another way and give the file instead"
        raise UsageError(f"{shown} {missing if error.code > 403 else closed}") from None
    except (ValueError, http.client.InvalidURL):
        raise UsageError(f"{shown} is not a valid address") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(error, URLError) and not isinstance(reason, TimeoutError):
            cure = "A file or folder that was downloaded elsewhere can be given instead"
            why = f"{reason}; is there a network? {cure}"
            raise DataError(f"{shown} cannot be reached: {why}") from None
        raise _Interrupted(f"the connection broke ({reason})") from None


def _authorised(request: Request) -> Request:
    """Add the user's token where it belongs; urllib does not take it along to another host."""
    token = os.environ.get("HF_TOKEN", "").strip()
    if _is_hub(request.full_url) and token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    return request


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _is_hub(url: str) -> bool:
    return _origin(url) == _origin(_endpoint())


def _origin(url: str) -> tuple[str, str]:
    return _parse(url).scheme, _parse(url).netloc.lower()


def _parse(url: str) -> SplitResult:
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname:
            return parts
    raise UsageError(f"{url} cannot be downloaded; an address starts with https://HOST/")


def _name(url: str) -> str:
    """What the copy of `url` is called: its own name, as the suffix says how to read it."""
    name = unquote(_parse(url).path.rpartition("/")[2])
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[-100:].lstrip(".") or "index.html"


def _key(url: str) -> str:
    return hashlib.sha256(url.encode(errors="backslashreplace")).hexdigest()[:20]


def _whole(file: Path) -> bool:
    record = _read_json(file.with_name(f"{file.name}.json"))
    return "sha256" in record and file.is_file() and file.stat().st_size == record["size"]


@contextlib.contextmanager
def _locked(folder: Path, report: Report) -> Iterator[None]:
    try:
        with files.locked(folder / ".lock", lambda: report("waiting for another process", 0, 0)):
            yield
    except OSError as error:
        if not (problem := files.disk_problem(error)):
            raise
        kept = f"what has arrived is kept. {problem.cure}, then run the same command again."
        raise DiskFull(f"{problem.what}: {folder} cannot be written; {kept}") from None


def _read_json(file: Path) -> dict[str, Any]:
    """What `file` says; nothing where it is missing or damaged."""
    try:
        values = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _write_json(file: Path, values: dict[str, Any]) -> None:
    files.write_atomically(file, json.dumps(values, indent=1) + "\n")
