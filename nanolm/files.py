"""Folders and files that are whole or not there: written aside, flushed, renamed into place.

    >>> commit(Path("runs/x/checkpoints"), "step-00000120", write)   # write(folder) fills it
    >>> verify(Path("runs/x/checkpoints/step-00000120"))

A folder's MANIFEST.json, written last, has the size and SHA-256 of every file, and its own. A kill
at any moment leaves nothing or the whole; a flipped bit or a cut-off file is found and named.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nanolm.errors import DiskFull, ModelError

MANIFEST = "MANIFEST.json"
TEMPORARY, TRASH = ".tmp-", ".trash-"


class DiskProblem(NamedTuple):
    what: str
    cure: str


FREE = "Free some space"
DISK_PROBLEMS = {
    errno.ENOSPC: DiskProblem("the disk is full", FREE),
    errno.EDQUOT: DiskProblem("the disk quota is used up", FREE),
    errno.EFBIG: DiskProblem("the limit on file size is reached", "Raise it (`ulimit -f`)"),
    errno.EROFS: DiskProblem("the file system is read-only", "Make it writable"),
    errno.EIO: DiskProblem("the disk reports an input/output error", "Check the disk"),
}


def commit(parent: Path, name: str, write: Callable[[Path], None], size: int = 0) -> Path:
    """Make `parent/name` out of what `write` puts into the folder it is given: about `size` bytes,
    where that is known."""
    final = parent / name
    temporary = parent / f"{TEMPORARY}{name}-{os.getpid()}"
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        files = sorted(temporary.iterdir())
        os.umask(mask := os.umask(0))
        for file in files:
            file.chmod(0o666 & ~mask)  # safetensors makes files that only their owner can read
            _flush(file)
        entries = {f.name: {"size": f.stat().st_size, "sha256": sha256(f)} for f in files}
        (temporary / MANIFEST).write_text(_manifest(entries), encoding="utf-8")
        _flush(temporary / MANIFEST)
        _flush(temporary)
        if final.exists():  # left by a run that was resumed from further back
            discard(final)
        temporary.rename(final)
        _flush(parent)
    except Exception as error:
        size = max(size, sum(file.stat().st_size for file in temporary.glob("*")))
        shutil.rmtree(temporary, ignore_errors=True)
        if not (problem := disk_problem(error)):
            raise
        place = next(each for each in (parent, *parent.absolute().parents) if each.exists())
        free = ""
        with contextlib.suppress(OSError):
            free = f"; {shutil.disk_usage(place).free / 1e6:,.1f} MB are free"
        raise DiskFull(
            f"{problem.what}: {final} cannot be written ({size / 1e6:,.1f} MB or more{free}); what "
            f"was saved before is intact. {problem.cure}, then run the same command again to go on."
        ) from None
    return final


def disk_problem(error: BaseException) -> DiskProblem | None:
    """What is wrong with the disk, if that is what `error` says; safetensors says it in words."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (said := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(said[1])
    return DISK_PROBLEMS.get(number or 0)


def verify(folder: Path) -> None:
    """Raise ModelError, naming the file, unless everything is as the manifest says."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise ModelError(f"{manifest} is missing, or no file")
    try:
        entries: dict[str, Any] = json.loads(manifest.read_bytes())["files"]
        sound = all(
            Path(name).name == name and set(entry) == {"size", "sha256"}
            for name, entry in entries.items()
        )
        # Written anew, it must be the file byte for byte: a flip in its white space counts too.
        if not sound or _manifest(entries).encode() != manifest.read_bytes():
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelError(f"{manifest} is damaged: it does not match its own checksum") from None
    for name, entry in entries.items():
        file = folder / name
        if not file.is_file():
            raise ModelError(f"{file} is missing")
        if (size := file.stat().st_size) != entry["size"]:
            raise ModelError(f"{file} is damaged: {size:,} bytes, not {entry['size']:,}")
        if sha256(file) != entry["sha256"]:
            raise ModelError(f"{file} is damaged: its contents do not match its checksum")


class InUse(Exception):
    """Another process holds the lock; the text is its number."""


@contextlib.contextmanager
def locked(file: Path, wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock `file`; the system lets go even after a kill. When another process holds it:
    with `wait`, say so and wait for it; else InUse is raised."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+", encoding="utf-8") as stream:
        try:
            import fcntl
        except ImportError:  # Windows: no lock, best effort
            yield
            return
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait is None:
                stream.seek(0)
                raise InUse(stream.read().strip() or "unknown") from None
            wait()
            fcntl.flock(stream, fcntl.LOCK_EX)
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        yield


def in_use(file: Path) -> bool:
    """Whether a process holds the lock `file`, as far as that can be told."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        with file.open("rb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def sweep(parent: Path, name: str = "") -> None:
    """Remove what a killed process left half done (of the folder `name`, if that is given)."""
    for pattern in (TEMPORARY, TRASH):
        for folder in parent.glob(f"{pattern}{name}*"):
            shutil.rmtree(folder, ignore_errors=True)


def write_atomically(file: Path, text: str) -> None:
    """Replace `file` by `text`, or leave it as it was."""
    temporary = file.with_name(f"{TEMPORARY}{file.name}-{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8", newline="")
        replace(temporary, file)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        if not (problem := disk_problem(error)):
            raise
        text = f"{problem.what}: {file} cannot be written, and is as it was before"
        raise DiskFull(f"{text}. {problem.cure}, then run the same command again.") from None


def replace(temporary: Path, file: Path) -> None:
    """Put a finished file into its place, safely on the disk."""
    _flush(temporary)
    os.replace(temporary, file)
    _flush(file.parent)


def _manifest(entries: dict[str, Any]) -> str:
    own = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
    return json.dumps({"files": entries, "sha256": own}, indent=1) + "\n"


def discard(folder: Path) -> None:
    """Rename first, so that a kill halfway leaves no folder with files missing."""
    trash = folder.with_name(f"{TRASH}{folder.name}-{os.getpid()}")
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot flush a folder
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
