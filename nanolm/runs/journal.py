"""Atomic changes of several files, even if the process is killed.

    >>> moved = ("move", "checkpoints/step-8", "earlier/step-8")
    >>> commit(folder, "rolling back to step 4", [moved, ("link", "best", "earlier/step-8")])
    >>> recover(folder)  # in the next process, after a kill

All operations are first written to JOURNAL.json, atomically. From then on the change will be made,
by this process or by the next one. Operations are idempotent. `commit` and `recover` need the
folder's lock. A folder may come from anywhere, so no operation reaches outside it.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanolm import files
from nanolm.errors import DataError
from nanolm.runs.checkpoint import EARLIER, point

JOURNAL = "JOURNAL.json"
FORMAT = 1
KINDS = {"move": 1, "link": 1, "write": 1, "discard": 0}  # arguments after the path
# Other folders may be links.
INSIDE = re.compile(rf"((checkpoints|{EARLIER})/)?(?!\.\.?$)[^/\\:]+")
Operation = tuple[str, ...]  # its kind, then a path and, by kind, another path or a text


def commit(folder: Path, what: str, operations: Sequence[Operation]) -> None:
    """Carry out all of `operations` or none; `what` describes them in messages."""
    entry = {"format": FORMAT, "what": what, "operations": operations}
    text = json.dumps({**entry, "sha256": checksum(entry)}, indent=1) + "\n"
    files.write_atomically(folder / JOURNAL, text)
    recover(folder)


def recover(folder: Path) -> str | None:
    """Finish the change that was committed in `folder`, if any; returns its description."""
    if not (folder / JOURNAL).is_file():
        return None
    what, operations = read(folder / JOURNAL)
    for kind, name, *rest in operations:
        path = folder / name
        if kind == "move" and path.exists():
            (target := folder / rest[0]).parent.mkdir(exist_ok=True)
            path.rename(target)
            files.flush(target.parent)
        elif kind == "link":
            point(path, folder / rest[0])
        elif kind == "write":
            files.write_atomically(path, rest[0])
        elif kind == "discard":
            files.discard(path)
        if path.parent.is_dir():
            files.flush(path.parent)
    (folder / JOURNAL).unlink()
    return what


def read(file: Path) -> tuple[str, list[Operation]]:
    try:
        entry: dict[str, Any] = json.loads(file.read_bytes())
        if entry["format"] > FORMAT:
            raise DataError(f"{file} was written by a newer nanolm; upgrade nanolm to continue")
        if entry.pop("sha256") != checksum(entry) or not all(map(sound, entry["operations"])):
            raise ValueError("it does not match its checksum")
        return entry["what"], entry["operations"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{file} cannot be read ({error}), so an interrupted operation is incomplete"
        raise DataError(f"{problem}; rename the file to use the folder as it is") from None


def sound(operation: Sequence[str]) -> bool:
    """Whether it is a known operation that stays inside its folder."""
    kind, name, *rest = operation
    paths = [name, *rest] if kind in ("move", "link") else [name]
    deep = kind in ("move", "discard") or "/" not in name
    known = kind in KINDS and len(rest) == KINDS[kind] and all(isinstance(w, str) for w in rest)
    return known and deep and all(map(INSIDE.fullmatch, paths))


def checksum(entry: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entry).encode()).hexdigest()
