"""Atomic writes of files and folders: to a temporary name, flushed, then renamed.

    >>> commit(Path("runs/x/checkpoints"), "step-00000120", write)   # write(folder) fills it
    >>> verify(Path("runs/x/checkpoints/step-00000120"))

A folder's MANIFEST.json, written last, has the size and SHA-256 of every file, and its own
checksum. A kill at any moment leaves either nothing or a complete folder. Flipped bits and
truncated files are detected and reported by name. Damaged files are renamed, never deleted.
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
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from nanolm.errors import DataError, DiskFull, ModelError, NanolmError

MANIFEST = "MANIFEST.json"
TEMPORARY, TRASH, DAMAGED = ".tmp-", ".trash-", "damaged-"
FORMAT = 2  # of the JSON files of runs and checkpoints; version 0.1.0 wrote none, which means 1


class DiskProblem(NamedTuple):
    what: str
    cure: str


FREE = "Free some space"
DISK_PROBLEMS = {
    errno.ENOSPC: DiskProblem("the disk is full", FREE),
    errno.EDQUOT: DiskProblem("the disk quota is exceeded", FREE),
    errno.EFBIG: DiskProblem("the file size limit has been reached", "Raise it (`ulimit -f`)"),
    errno.EROFS: DiskProblem("the file system is read-only", "Make it writable"),
    errno.EIO: DiskProblem("the disk reports an input/output error", "Check the disk"),
}


def commit(
    parent: Path,
    name: str,
    write: Callable[[Path], None],
    size: int = 0,
    unlisted: Collection[str] = (),
) -> Path:
    """Create `parent/name` from what `write` puts into the folder it is given: about `size` bytes,
    if known. Users may edit the `unlisted` files, which are not in the manifest."""
    final = parent / name
    temporary = parent / f"{TEMPORARY}{name}-{os.getpid()}"
    try:
        parent.mkdir(exist_ok=True)  # but not its parents: the run may have been moved
        temporary.mkdir()
        write(temporary)
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        os.umask(mask := os.umask(0))
        for file in files:
            file.chmod(0o666 & ~mask)  # safetensors writes files that only their owner can read
            flush(file)
        entries = {
            file.relative_to(temporary).as_posix(): {
                "size": file.stat().st_size,
                "sha256": sha256(file),
            }
            for file in files
            if file.name not in unlisted
        }
        (temporary / MANIFEST).write_text(_manifest(entries), encoding="utf-8")
        flush(temporary / MANIFEST)
        for folder in {temporary, *(file.parent for file in files)}:
            flush(folder)
        if final.exists():  # left by a run that was resumed from an older checkpoint
            retire(final, unlisted)
        temporary.rename(final)
        flush(parent)
    except Exception as error:
        size = max(size, sum(file.stat().st_size for file in temporary.rglob("*")))
        shutil.rmtree(temporary, ignore_errors=True)
        if not (problem := disk_problem(error)):
            if "(os error 2)" in str(error):  # from safetensors: the folder has gone
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), final) from None
            raise
        place = next(each for each in (parent, *parent.absolute().parents) if each.exists())
        free = ""
        with contextlib.suppress(OSError):
            free = f"; {shutil.disk_usage(place).free / 1e6:,.1f} MB free"
        raise DiskFull(
            f"{problem.what}: cannot write {final} ({size / 1e6:,.1f} MB or more{free}). "
            "Everything saved earlier is intact. "
            f"{problem.cure}, then run the same command again to resume."
        ) from None
    return final


def disk_problem(error: BaseException) -> DiskProblem | None:
    """The disk problem that `error` reports, if any; safetensors reports it as text."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (said := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(said[1])
    return DISK_PROBLEMS.get(number or 0)


def verify(folder: Path) -> set[str]:
    """Raise ModelError, naming the file, unless everything matches the manifest; returns the names
    of the files in it."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise ModelError(f"{manifest} is missing or not a file")
    try:
        values = json.loads(manifest.read_bytes())
        entries: dict[str, Any] = values["files"]
        sound = all(
            not Path(name).is_absolute()
            and ".." not in Path(name).parts
            and set(entry) == {"size", "sha256"}
            for name, entry in entries.items()
        )
        # Compare the content: a copy to another system may have changed line endings.
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
            raise ModelError(f"{file} is damaged: it has {size:,} bytes, not {entry['size']:,}")
        if sha256(file) != entry["sha256"]:
            raise ModelError(f"{file} is damaged: its contents do not match its checksum")
    return {MANIFEST, *entries}


class InUse(Exception):
    """Another process holds the lock; the text is its process id."""


@contextlib.contextmanager
def locked(file: Path, wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock `file`; the system releases it even after a kill. If another process holds it,
    call `wait` and wait for it, or without `wait` raise InUse."""
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
    """Whether a process holds the lock `file`; False if that cannot be determined."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        with file.open("rb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def sweep(parent: Path, name: str = "") -> None:
    """Remove temporary files of killed processes (only those for `name`, if given)."""
    for pattern in (TEMPORARY, TRASH):
        for path in parent.glob(f"{pattern}{name}*"):
            remove(path)


def write_atomically(file: Path, text: str) -> None:
    """Replace the contents of `file` with `text`, or leave it unchanged."""
    with replacing(file) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `file` at the end, or is removed on an error."""
    temporary = aside(file)
    try:
        yield temporary
        replace(temporary, file)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        if not (problem := disk_problem(error)):
            raise
        text = f"{problem.what}: cannot write {file}, which is unchanged"
        raise DiskFull(f"{text}. {problem.cure}, then run the same command again.") from None


def aside(file: Path) -> Path:
    """The temporary path for replacing `file`, or a folder; removes those of killed processes."""
    for prefix in (TEMPORARY, TRASH):
        for left in file.parent.glob(f"{prefix}{glob.escape(file.name)}-*"):
            if not _alive(left.name.rpartition("-")[2]):
                remove(left)
    return file.with_name(f"{TEMPORARY}{file.name}-{os.getpid()}")


def _alive(process: str) -> bool:
    """Whether another process has this id; True if that cannot be determined."""
    if os.name == "nt" or not process.isdecimal():
        return True
    try:
        os.kill(int(process), 0)
    except PermissionError:  # another user's process
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return int(process) != os.getpid()


def replace(temporary: Path, file: Path) -> None:
    """Move a finished file into place and flush it to disk."""
    flush(temporary)
    os.replace(temporary, file)
    flush(file.parent)


def _manifest(entries: dict[str, Any]) -> str:
    values = {"format": FORMAT, "files": entries, "sha256": _checksum(entries, FORMAT)}
    return json.dumps(values, indent=1)  # no newline at the end: losing any byte is detected


def _checksum(entries: dict[str, Any], version: int | None) -> str:
    covered = entries if version is None else [version, entries]
    return hashlib.sha256(json.dumps(covered).encode()).hexdigest()


def check_format(file: Path, values: Any) -> None:
    """Reject files that a newer version or another program wrote."""
    version = values.get("format", 1) if isinstance(values, dict) else None
    if not isinstance(version, int) or version < 1:
        raise DataError(f'{file} was not written by nanolm: it has no valid "format" field')
    if version > FORMAT:
        newer = f"format {version}; this version reads up to {FORMAT}"
        raise DataError(f"{file} was written by a newer nanolm ({newer}); upgrade nanolm")


def check_fields(stored: Any) -> None:
    """Raise ValueError unless the fields of a dataclass, read from JSON, have their types."""
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


def retire(folder: Path, unlisted: Collection[str] = ()) -> str:
    """Remove a superseded folder if that is safe. Otherwise rename it and return a message that
    says why."""
    if why := why_keep(folder, unlisted):
        return f"{why}; the folder is kept as {set_aside(folder)}"
    discard(folder)
    return ""


def why_keep(folder: Path, unlisted: Collection[str] = ()) -> str:
    """Why not to remove a superseded folder: damage, or files of others. Empty if it is safe."""
    try:
        known = verify(folder)
    except NanolmError as error:
        return str(error)
    names = (file for file in folder.rglob("*") if not file.name.startswith("."))
    known |= {*unlisted, *(str(parent) for name in known for parent in Path(name).parents)}
    foreign = (file for file in names if file.relative_to(folder).as_posix() not in known)
    return next((f"{file} was not written by nanolm" for file in foreign), "")


def set_aside(path: Path) -> Path:
    """Rename something damaged so that it is out of the way and its name says so."""
    return path.rename(name_aside(path))


def name_aside(path: Path) -> Path:
    return free_name(path.with_name(f"{DAMAGED}{path.name}"))


def free_name(path: Path) -> Path:
    """`path`, with a number appended if it is taken."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    names = itertools.chain([path], numbered)
    return next(name for name in names if not os.path.lexists(name))


def discard(path: Path) -> None:
    """Remove a file or folder. Folders are renamed first, so that a kill leaves no partial one."""
    if path.is_dir() and not path.is_symlink():
        trash = path.with_name(f"{TRASH}{path.name}-{os.getpid()}")
        remove(trash)  # left by another process with this id, as in containers
        path = path.rename(trash)
    remove(path)


def remove(path: Path) -> None:
    """Remove a file, link or folder; errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk (fsync)."""
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
