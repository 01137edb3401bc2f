"""The checkpoints of a run: listing, verifying, pruning, and the links `best` and `last`.

`nanolm.files` sees to it that a checkpoint is either whole or not there.
"""

import os
from collections.abc import Callable
from pathlib import Path

from nanolm.errors import ModelError
from nanolm.files import aside, discard, verify


def newest_valid(parent: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that verifies; each damaged one on the way is reported."""
    for folder in reversed(list_checkpoints(parent)):
        try:
            verify(folder)
            return folder
        except ModelError as error:
            report(f"{error}; using the checkpoint before it")
    return None


def list_checkpoints(parent: Path) -> list[Path]:
    """All committed checkpoints, oldest first."""
    return sorted(folder for folder in parent.glob("step-*") if folder.is_dir())


def discard_after(parent: Path, kept: Path | None) -> None:
    """Remove what is newer than `kept`: damaged, and in the way of what comes next."""
    for folder in list_checkpoints(parent):
        if kept is None or folder.name > kept.name:
            discard(folder)


def prune(parent: Path, keep: set[str]) -> None:
    for folder in list_checkpoints(parent)[:-2]:
        if folder.name not in keep:
            discard(folder)


def point(link: Path, target: Path) -> None:
    """Make `link` lead to `target`, atomically; a small file where links cannot be made."""
    relative = os.path.relpath(target, link.parent)
    temporary = aside(link)
    try:
        temporary.symlink_to(relative, target_is_directory=True)
    except OSError:
        temporary.write_text(relative, encoding="utf-8")
    os.replace(temporary, link)


def follow(link: Path) -> Path | None:
    try:
        written = link.is_file() and not link.is_symlink()
        target = link.parent / link.read_text(encoding="utf-8") if written else link.resolve()
        return target if target.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # not there, a loop, or no text
        return None
