"""The checkpoints of a run: listing, verifying, pruning, and the links `best` and `last`.

`nanolm.files` sees to it that a checkpoint is either whole or not there.
"""

import os
from collections.abc import Callable
from pathlib import Path

from nanolm.errors import ModelError
from nanolm.files import DAMAGED, MANIFEST, aside, retire, set_aside, verify

EARLIER = "earlier"  # the folder of what a run came to before it was extended


def newest_valid(parent: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that verifies; each damaged one on the way is reported."""
    for folder in reversed(list_checkpoints(parent)):
        try:
            verify(folder)
            return folder
        except ModelError as error:
            report(f"{error}; trying the checkpoint before it")
    return None


def list_checkpoints(parent: Path) -> list[Path]:
    """All committed checkpoints, oldest first."""
    return sorted(folder for folder in parent.glob("step-*") if folder.is_dir())


def was_saved(run: Path) -> bool:
    """Whether there is, or was, a checkpoint, be it damaged."""
    saved = (run / "checkpoints").glob(f"{DAMAGED}step-*")
    return any(saved) or any(os.path.lexists(run / name) for name in ("best", "last"))


def retire_after(parent: Path, kept: Path, report: Callable[[str], None]) -> None:
    """Remove what is newer than `kept`, and in the way of what comes next."""
    retire_all([each for each in list_checkpoints(parent) if each.name > kept.name], report)


def prune(parent: Path, keep: set[str], report: Callable[[str], None]) -> None:
    retire_all([each for each in list_checkpoints(parent)[:-2] if each.name not in keep], report)


def retire_all(folders: list[Path], report: Callable[[str], None]) -> None:
    for folder in folders:
        if problem := retire(folder):
            report(problem)


def point(link: Path, target: Path) -> None:
    """Make `link` lead to `target`, atomically; a small file where links cannot be made."""
    if link.is_dir() and not link.is_symlink():  # by a copy of the run that had no links
        retire(link) if follow(link) != link.resolve() else set_aside(link)
    relative = os.path.relpath(target, link.parent)
    temporary = aside(link)
    try:
        temporary.symlink_to(relative, target_is_directory=True)
    except OSError:
        temporary.write_text(relative, encoding="utf-8")
    os.replace(temporary, link)


def follow(link: Path) -> Path | None:
    """The folder that `link` leads to; what an interrupted --extend has moved is in `earlier`."""
    if (target := target_of(link)) is None:
        return None
    places = (target, link.parent / EARLIER / target.name)
    return next((place for place in places if place.is_dir()), None)


def target_of(link: Path) -> Path | None:
    """What `link` names, whether that is there or not: by a link, or by the small file in its
    place. A folder there is what a copy without links has made of it: it stands for the checkpoint
    that it repeats, or else for itself."""
    try:
        if link.is_symlink():
            return link.resolve()
        if link.is_file():
            return link.parent / link.read_text(encoding="utf-8").strip()
        if not link.is_dir():
            return None
        folders = [*link.parent.glob("checkpoints/*"), *link.parent.glob(f"{EARLIER}/*")]
        return next((each for each in folders if same_manifest(each, link)), link).resolve()
    except (OSError, RuntimeError, ValueError):  # a loop, or no text
        return None


def same_manifest(folder: Path, other: Path) -> bool:
    one, two = folder / MANIFEST, other / MANIFEST
    return one.is_file() and two.is_file() and one.read_bytes() == two.read_bytes()
