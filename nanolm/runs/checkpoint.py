"""Checkpoints that are whole or not there: written aside, flushed, and renamed into place.

    >>> commit(Path("runs/x/checkpoints"), "step-00000120", write)   # write(folder) fills it
    >>> verify(Path("runs/x/checkpoints/step-00000120"))

A checkpoint exists only when its MANIFEST.json does: the size and SHA-256 of every file, and
last of the manifest itself. It is written into a temporary folder, every file is flushed to the
disk, the manifest is written last, and one rename makes it visible. A kill at any moment leaves
either no checkpoint or a whole one; a flipped bit or a cut-off file is found and named.
"""

import contextlib
import errno
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


def commit(parent: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Make `parent/name` out of what `write` puts into the folder it is given."""
    final = parent / name
    temporary = parent / f"{TEMPORARY}{name}-{os.getpid()}"
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        files = sorted(temporary.iterdir())
        mode = 0o666 & ~_umask()  # safetensors makes files that only their owner can read
        for file in files:
            file.chmod(mode)
            _flush(file)
        manifest = temporary / MANIFEST
        manifest.write_text(_manifest(files), encoding="utf-8")
        _flush(manifest)
        _flush(temporary)
        if final.exists():  # left by a run that was resumed from further back
            _discard(final)
        temporary.rename(final)
        _flush(parent)
    except OSError as error:
        needed = sum(file.stat().st_size for file in temporary.glob("*")) / 1e6
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(
            f"the disk is full: no room for {final} (more than {needed:.0f} MB); what was saved "
            "before is intact. Free some space and run the same command again to go on."
        ) from None
    return final


def verify(folder: Path) -> None:
    """Raise ModelError, naming the file, unless everything is as the manifest says."""
    manifest = _read_manifest(folder)
    for name, entry in manifest.items():
        file = folder / name
        if not file.is_file():
            raise ModelError(f"{file} is missing")
        if file.stat().st_size != entry["size"]:
            raise ModelError(
                f"{file} is damaged: {file.stat().st_size:,} bytes, not {entry['size']:,}"
            )
        if _sha256(file) != entry["sha256"]:
            raise ModelError(f"{file} is damaged: its contents do not match its checksum")


def newest_valid(parent: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that verifies; each damaged one on the way is reported."""
    for folder in reversed(list_checkpoints(parent)):
        try:
            verify(folder)
        except ModelError as error:
            report(f"{error}; using the checkpoint before it")
            continue
        return folder
    return None


def list_checkpoints(parent: Path) -> list[Path]:
    """All committed checkpoints, oldest first."""
    return sorted(folder for folder in parent.glob("step-*") if folder.is_dir())


def discard_after(parent: Path, kept: Path | None) -> None:
    """Remove what is newer than `kept`: damaged, and in the way of what comes next."""
    for folder in list_checkpoints(parent):
        if kept is None or folder.name > kept.name:
            _discard(folder)


def prune(parent: Path, keep: set[str]) -> None:
    """Remove all but the two newest checkpoints and those named in `keep`."""
    for folder in list_checkpoints(parent)[:-2]:
        if folder.name not in keep:
            _discard(folder)


def sweep(parent: Path) -> None:
    """Remove what a killed process left half done."""
    for pattern in (TEMPORARY, TRASH):
        for folder in parent.glob(pattern + "*"):
            shutil.rmtree(folder, ignore_errors=True)


def point(link: Path, target: Path) -> None:
    """Make `link` lead to `target`, in one step; a small file where links cannot be made."""
    relative = os.path.relpath(target, link.parent)
    temporary = link.with_name(f"{TEMPORARY}{link.name}-{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    try:
        temporary.symlink_to(relative, target_is_directory=True)
    except OSError:
        temporary.write_text(relative, encoding="utf-8")
    os.replace(temporary, link)


def follow(link: Path) -> Path | None:
    """Where `link` leads, if anywhere."""
    try:
        if link.is_symlink() or link.is_dir():
            target = link.resolve()
        else:
            target = link.parent / link.read_text(encoding="utf-8")
        return target if target.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # not there, a loop, or no text
        return None


def write_atomically(file: Path, text: str) -> None:
    """Replace `file` by `text`, or leave it as it was."""
    temporary = file.with_name(f"{TEMPORARY}{file.name}-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    _flush(temporary)
    os.replace(temporary, file)
    _flush(file.parent)


def _manifest(files: list[Path]) -> str:
    entries = {file.name: {"size": file.stat().st_size, "sha256": _sha256(file)} for file in files}
    own = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
    return json.dumps({"files": entries, "sha256": own}, indent=1) + "\n"


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    try:
        values = json.loads(file.read_bytes())
        entries: dict[str, Any] = values["files"]
        # Written anew, it must be the file byte for byte: a flip in its white space counts too.
        own = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
        anew = json.dumps({"files": entries, "sha256": own}, indent=1) + "\n"
        if anew.encode() != file.read_bytes():
            raise ValueError
    except FileNotFoundError:
        raise ModelError(f"{file} is missing") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ModelError(f"{file} is damaged: it does not match its own checksum") from None
    return entries


def _discard(folder: Path) -> None:
    """Rename first, so that a kill halfway leaves no checkpoint with files missing."""
    trash = folder.with_name(f"{TRASH}{folder.name}-{os.getpid()}")
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot flush a folder
    with _opened(path) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
