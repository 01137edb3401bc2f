"""Folders and files that are whole or not there: written aside, flushed, renamed into place.

    >>> commit(Path("runs/x/checkpoints"), "step-00000120", write)   # write(folder) fills it
    >>> verify(Path("runs/x/checkpoints/step-00000120"))

A folder's MANIFEST.json, written last, has the size and SHA-256 of every file, and its own. A kill
at any moment leaves nothing or the whole; a flipped bit or a cut-off file is found and named.
"""

import contextlib
import errno
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nanolm.errors import DiskFull, ModelError

MANIFEST = "MANIFEST.json"
TEMPORARY, TRASH = ".tmp-", ".trash-"


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
        if not no_room(error):
            raise
        place = next(each for each in (parent, *parent.absolute().parents) if each.exists())
        free = f"{shutil.disk_usage(place).free / 1e6:,.1f} MB are free"
        raise DiskFull(
            f"the disk is full: no room for {final} ({size / 1e6:,.1f} MB or more; {free}); what "
            "was saved before is intact. Free some space and run the same command again to go on."
        ) from None
    return final


def no_room(error: Exception) -> bool:
    """Is the disk full? safetensors says so in words alone."""
    full = (errno.ENOSPC, errno.EDQUOT)
    said = any(f"(os error {number})" in str(error) for number in full)
    return said or (isinstance(error, OSError) and error.errno in full)


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
    with replacing(file) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a path to write to; what is written there replaces `file`, or vanishes."""
    temporary = aside(file)
    try:
        yield temporary
        replace(temporary, file)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        if not no_room(error):
            raise
        raise DiskFull(f"the disk is full: no room for {file}; it is as it was before") from None


def aside(file: Path) -> Path:
    """Where to write what will replace `file`; what a killed process left there is removed."""
    for left in file.parent.glob(f"{TEMPORARY}{glob.escape(file.name)}-*"):
        if not _alive(left.name.rpartition("-")[2]):
            with contextlib.suppress(OSError):
                left.unlink()
    return file.with_name(f"{TEMPORARY}{file.name}-{os.getpid()}")


def _alive(process: str) -> bool:
    """Whether another process has this number; True where that cannot be told."""
    if os.name == "nt" or not process.isdecimal():
        return True
    try:
        os.kill(int(process), 0)
    except PermissionError:  # somebody else's
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return int(process) != os.getpid()


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
