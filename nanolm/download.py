"""Download files into a cache, resuming interrupted downloads.

    >>> fetch("https://www.gutenberg.org/files/11/11-0.txt", Path("cache"), lambda *progress: None)

The cache has a folder for each URL or repository, named by its hash:
  NAME        the file; exists only once it is complete
  NAME.json   URL, validator (identifies the version), size and, once complete, the SHA-256
  NAME.part   the bytes received so far
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
WAITS = (0.5, 2.0, 5.0)  # seconds before each retry
RECEIVED_BYTES = 1 << 16  # per read


class _Interrupted(Exception):
    """The connection was lost; another attempt may get further."""


class _StartOver(_Interrupted):
    """The server's file does not match the bytes received so far."""


def fetch(url: str, folder: Path, report: Report) -> Path:
    """The local copy of `url`, downloaded unless the cache in `folder` has it."""
    return _fetch(url, folder / _key(url) / _name(url), url, report)


def checksum(file: Path) -> str:
    """The SHA-256 of a fetched file, recorded when the download finished."""
    try:
        return str(_read_json(file.with_name(f"{file.name}.json"))["sha256"])
    except KeyError:
        message = f"{file} has no recorded checksum; delete the file to download it again"
        raise DataError(message) from None


@dataclass(frozen=True)
class Repository:
    kind: str  # "datasets" or "models"
    name: str  # OWNER/NAME, or NAME alone
    shown: str  # the name used in messages
    cache: Path

    def fetch(
        self, choose: Callable[[list[str]], list[str]], report: Report, together: bool = False
    ) -> list[Path]:
        """Local copies of the files that `choose` picks from all paths; cached, so later calls need
        no network. Each has its own folder, as names may repeat, unless they go `together`."""
        url = f"{_endpoint()}/api/{self.kind}/{quote(self.name)}/tree/main?recursive=true"
        listing = self.cache / f"{_key(url)}.json"
        prefix = "" if self.kind == "models" else f"{self.kind}/"

        def address(path: str) -> str:
            return f"{_endpoint()}/{prefix}{quote(self.name)}/resolve/main/{quote(path)}"

        def local(path: str) -> Path:
            return self.cache / _key(url if together else address(path)) / _name(address(path))

        chosen: list[str] = []
        with contextlib.suppress(NanolmError):  # a missing file may have been added since
            chosen = choose(_read_json(listing).get("paths", []))
        if not chosen or not all(_whole(local(path)) for path in chosen):
            paths = _list(self.shown, url)
            chosen = choose(paths)
            with _locked(self.cache, report):
                _write_json(listing, {"url": url, "paths": paths})
        return [_fetch(address(path), local(path), self.shown, report) for path in chosen]


def _list(name: str, url: str) -> list[str]:
    """The paths of all files in a repository; the listing is paginated."""

    def page() -> tuple[bytes, str]:
        with _open(url, name, {}) as response:
            return b"".join(_blocks(response)), response.headers.get("Link", "")

    paths: list[str] = []
    while True:
        try:
            data, links = _retry(page)
            paths += [str(entry["path"]) for entry in json.loads(data) if entry["type"] == "file"]
        except _Interrupted as error:
            raise DataError(f"{name}: {error}; run the same command to try again") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            message = f"{name}: {url} did not return a list of files; check HF_ENDPOINT"
            raise DataError(message) from None
        link = re.search(r'<([^>]*)>[^,]*;\s*rel="?next\b', links)
        if link is None:
            return paths
        following = urljoin(url, link[1])
        if _origin(following) != _origin(url) or following == url:
            message = f"refusing to follow the link to the next page of its file list, {following}"
            raise DataError(f"{name}: {message}")
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
        again = "resume" if _resumable(_read_json(record_file)) else "start over"
        state = f"{arrived:,} bytes of {file.name} were downloaded"
        raise DataError(f"{shown}: {error}. {state}; run the same command to {again}") from None
    # In this order, so that a kill in between leaves a part file that is known to be complete.
    whole = {"size": part.stat().st_size, "sha256": files.sha256(part)}
    _write_json(record_file, {**_read_json(record_file), **whole})
    files.replace(part, file)


def _receive(url: str, part: Path, record_file: Path, shown: str, report: Report) -> None:
    """One request for the missing rest of the part file."""
    record = _read_json(record_file)
    done = part.stat().st_size if part.exists() else 0
    if done and done == record.get("size"):
        return
    resumed = bool(done and _resumable(record))
    headers = {"Range": f"bytes={done}-", "If-Range": record["validator"]} if resumed else {}
    try:
        with _open(url, shown, headers) as response:
            # `If-Range` takes a strong ETag or a date.
            tag = response.headers.get("ETag", "")
            validator = tag if tag.startswith('"') else response.headers.get("Last-Modified")
            if response.status == 206:
                size = record.get("size") or 0
                rest = f"bytes {done}-{size - 1}/{size}"
                same = validator in (None, record.get("validator"))
                if not (headers and same and response.headers.get("Content-Range") == rest):
                    raise _StartOver("the server sent the wrong part of the file")
            else:
                # Truncated before its record changes, so old bytes never get a new validator.
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
        raise _Interrupted("the connection closed early")


def _resumable(record: dict[str, Any]) -> bool:
    return bool(record.get("validator") and record.get("size"))


def _blocks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The body as it arrives. Network errors are caught here, apart from disk errors."""
    try:
        while block := response.read1(RECEIVED_BYTES):
            yield block
    except (OSError, http.client.HTTPException) as error:
        raise _Interrupted(f"the connection was lost ({error})") from None
    if response.length:  # read1 counts down the remaining bytes
        raise _Interrupted("the connection closed early")


def _retry(action: Callable[[], T]) -> T:
    for wait in WAITS:
        try:
            return action()
        except _Interrupted:
            time.sleep(wait)
    return action()


class _Redirects(HTTPRedirectHandler):
    def redirect_request(self, req: Request, *rest: Any, **named: Any) -> Request | None:
        url = rest[-1]  # the target
        if urlsplit(url).scheme not in ("https", req.type):
            raise DataError(f"{req.full_url} redirects to {url}, which is not safe to follow")
        request = super().redirect_request(req, *rest, **named)
        return request and _authorised(request)


def _open(url: str, shown: str, headers: dict[str, str]) -> http.client.HTTPResponse:
    """Request `url`; errors call it `shown`."""
    headers = {"User-Agent": "nanolm", "Accept-Encoding": "identity", **headers}
    try:
        request = Request(quote(url, safe=string.punctuation), headers=headers)
        return build_opener(_Redirects).open(_authorised(request), timeout=TIMEOUT)  # type: ignore[no-any-return]
    except HTTPError as error:
        error.close()
        status = f"(HTTP {error.code})"
        if error.code == 416:
            raise _StartOver("the server does not have the requested part of the file") from None
        if error.code not in (401, 403, 404, 410):
            answer = f"HTTP {error.code} ({' '.join(str(error.reason).split())})"
            raise DataError(f"{shown}: the server returned {answer}; try again later") from None
        if _is_hub(url):  # which does not say whether a private repository exists
            cure = "check the spelling, or set HF_TOKEN to an access token that can read it"
            raise UsageError(f"the Hub has no public {shown} {status}; {cure}") from None
        missing = f"does not exist {status}; check the spelling"
        closed = f"is not public {status}; download it another way and pass the file instead"
        raise UsageError(f"{shown} {missing if error.code > 403 else closed}") from None
    except (ValueError, http.client.InvalidURL):
        raise UsageError(f"{shown} is not a valid URL") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(error, URLError) and not isinstance(reason, TimeoutError):
            cure = "check the network connection, or download it elsewhere and pass the local path"
            raise DataError(f"{shown} could not be reached ({reason}); {cure}") from None
        raise _Interrupted(f"the connection was lost ({reason})") from None


def _authorised(request: Request) -> Request:
    """Add the user's token to requests to the Hub; urllib does not send it to another host."""
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
    raise UsageError(f"{url} cannot be downloaded; a URL must start with https://HOST/")


def _name(url: str) -> str:
    """The file name of the local copy of `url`; it keeps the suffix, which gives the format."""
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
        kept = f"the bytes downloaded so far are kept. {problem.cure}, then run the command again."
        raise DiskFull(f"{problem.what}: cannot write to {folder}; {kept}") from None


def _read_json(file: Path) -> dict[str, Any]:
    """The contents of `file`; empty if it is missing or damaged."""
    try:
        values = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _write_json(file: Path, values: dict[str, Any]) -> None:
    files.write_atomically(file, json.dumps(values, indent=1) + "\n")
