"""Folders and files that are whole or not there: written aside, flushed, renamed into place.

    >>> commit(Path("runs/x/checkpoints"), "step-00000120", write)   # write(folder) fills it
    >>> verify(Path("runs/x/checkpoints/step-00000120"))

A folder's MANIFEST.json, written last, has the size and SHA-256 of every file, and its own. A kill
at any moment leaves nothing or the whole; a flipped bit or a cut-off file is found and named. What
is damaged is never deleted, but renamed.
"""

import contextlib
import errno
import glob
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from nanolm.errors import DataError, DiskFull, ModelError, NanolmError

MANIFEST = "MANIFEST.json"
TEMPORARY, TRASH, DAMAGED = ".tmp-", ".trash-", "damaged-"
FORMAT = 2  # of the JSON files of runs and checkpoints; those of version 0.1.0 do not say: 1


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
        parent.mkdir(exist_ok=True)  # and not what it is in, which may have been moved
        temporary.mkdir()
        write(temporary)
        files = sorted(temporary.iterdir())
        os.umask(mask := os.umask(0))
        for file in files:
            file.chmod(0o666 & ~mask)  # safetensors makes files that only their owner can read
            flush(file)
        entries = {f.name: {"size": f.stat().st_size, "sha256": sha256(f)} for f in files}
        (temporary / MANIFEST).write_text(_manifest(entries), encoding="utf-8")
        flush(temporary / MANIFEST)
        flush(temporary)
        if final.exists():  # left by a run that was resumed from further back
            retire(final)
        temporary.rename(final)
        flush(parent)
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


def verify(folder: Path) -> set[str]:
    """Raise ModelError, naming the file, unless everything is as the manifest says; returns the
    names of all files that it has."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise ModelError(f"{manifest} is missing, or no file")
    try:
        values = json.loads(manifest.read_bytes())
        entries: dict[str, Any] = values["files"]
        sound = all(
            Path(name).name == name and set(entry) == {"size", "sha256"}
            for name, entry in entries.items()
        )
        # Its content counts: a copy to another system may have changed its line ends.
        if not sound or values["sha256"] != _checksum(entries, values.get("format")):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelError(f"{manifest} is damaged: it does not match its own checksum") from None
    check_format(manifest, values)
    for name, entry in entries.items():
        file = folder / name
        if not file.is_file():
            raise ModelError(f"{file} is missing")
        if (size := file.stat().st_size) != entry["size"]:
            raise ModelError(f"{file} is damaged: {size:,} bytes, not {entry['size']:,}")
        if sha256(file) != entry["sha256"]:
            raise ModelError(f"{file} is damaged: its contents do not match its checksum")
    return {MANIFEST, *entries}


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
    """Remove what a killed process left half done (of the file or folder `name`, if given)."""
    for pattern in (TEMPORARY, TRASH):
        for path in parent.glob(f"{pattern}{name}*"):
            remove(path)


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
        if not (problem := disk_problem(error)):
            raise
        text = f"{problem.what}: {file} cannot be written, and is as it was before"
        raise DiskFull(f"{text}. {problem.cure}, then run the same command again.") from None


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
    flush(temporary)
    os.replace(temporary, file)
    flush(file.parent)


def _manifest(entries: dict[str, Any]) -> str:
    values = {"format": FORMAT, "files": entries, "sha256": _checksum(entries, FORMAT)}
    return json.dumps(values, indent=1)  # no line end: cut by a byte, it is damaged


def _checksum(entries: dict[str, Any], version: int | None) -> str:
    covered = entries if version is None else [version, entries]
    return hashlib.sha256(json.dumps(covered).encode()).hexdigest()


def check_format(file: Path, values: Any) -> None:
    """Refuse what a newer version has written, or somebody else."""
    version = values.get("format", 1) if isinstance(values, dict) else None
    if not isinstance(version, int) or version < 1:
        raise DataError(f"{file} is not nanolm's: it is no JSON object with a format")
    if version > FORMAT:
        newer = f"format {version}; this one reads up to {FORMAT}"
        raise DataError(f"{file} was written by a newer nanolm ({newer}): upgrade nanolm")


def check_fields(stored: Any) -> None:
    """Raise ValueError unless the fields of a dataclass, as JSON gave them, are of their types."""
    for name, hint in get_type_hints(type(stored)).items():
        if not _fits(value := getattr(stored, name), hint):
            raise ValueError(f"{name} is {value!r:.80}")


def _fits(value: Any, hint: Any) -> bool:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if hint is Any:
        return True
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if kind is tuple:
        return isinstance(value, list | tuple)
    if kind is list:
        return isinstance(value, list) and all(_fits(each, parts[0]) for each in value)
    if kind is dict:
        return isinstance(value, dict) and all(_fits(each, parts[1]) for each in value.values())
    return isinstance(value, kind)


def retire(folder: Path) -> str:
    """Remove a folder that is superseded, if it can be; if not, it is set aside: returns what to
    report about that."""
    if why := why_keep(folder):
        return f"{why}; it is kept as {set_aside(folder)}"
    discard(folder)
    return ""


def why_keep(folder: Path) -> str:
    """Nothing if it is whole and holds nothing else, so that it can be removed when superseded."""
    try:
        known = verify(folder)
    except NanolmError as error:
        return str(error)
    names = (file for file in folder.iterdir() if not file.name.startswith("."))
    return next((f"{file} is not nanolm's" for file in names if file.name not in known), "")


def set_aside(path: Path) -> Path:
    """Give what is damaged a name that says so, out of the way."""
    return path.rename(name_aside(path))


def name_aside(path: Path) -> Path:
    return free_name(path.with_name(f"{DAMAGED}{path.name}"))


def free_name(path: Path) -> Path:
    """`path`, or with a number behind it."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    names = itertools.chain([path], numbered)
    return next(name for name in names if not os.path.lexists(name))


def discard(path: Path) -> None:
    """Remove a file, or a folder: renamed first, so that a kill leaves none with files missing."""
    if path.is_dir() and not path.is_symlink():
        trash = path.with_name(f"{TRASH}{path.name}-{os.getpid()}")
        remove(trash)  # of another process of this number, as in containers
        path = path.rename(trash)
    remove(path)


def remove(path: Path) -> None:
    """A file, a link or a folder, as far as it is there and can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def flush(path: Path) -> None:
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
