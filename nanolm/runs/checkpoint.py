"""The checkpoints of a run: listing, verifying, pruning, and the links `best` and `last`.

`nanolm.files` writes checkpoints atomically and verifies them.
"""

import os
from collections.abc import Callable
from pathlib import Path

from nanolm.errors import ModelError
from nanolm.files import DAMAGED, MANIFEST, aside, retire, set_aside, verify

EARLIER = "earlier"  # checkpoints of a run from before it was extended


def newest_valid(parent: Path, report: Callable[[str], None]) -> Path | None:
    """The newest valid checkpoint; newer ones that are damaged are reported."""
    for folder in reversed(list_checkpoints(parent)):
        try:
            verify(folder)
            return folder
        except ModelError as error:
            report(f"{error}; trying the previous checkpoint")
    return None


def list_checkpoints(parent: Path) -> list[Path]:
    """All committed checkpoints, oldest first."""
    return sorted(folder for folder in parent.glob("step-*") if folder.is_dir())


def was_saved(run: Path) -> bool:
    """Whether there is or was a checkpoint, even a damaged one."""
    saved = (run / "checkpoints").glob(f"{DAMAGED}step-*")
    return any(saved) or any(os.path.lexists(run / name) for name in ("best", "last"))


def retire_after(parent: Path, kept: Path, report: Callable[[str], None]) -> None:
    """Remove the checkpoints that are newer than `kept`, which training will write again."""
    retire_all([each for each in list_checkpoints(parent) if each.name > kept.name], report)


def prune(parent: Path, keep: set[str], report: Callable[[str], None]) -> None:
    retire_all([each for each in list_checkpoints(parent)[:-2] if each.name not in keep], report)


def retire_all(folders: list[Path], report: Callable[[str], None]) -> None:
    for folder in folders:
        if problem := retire(folder):
            report(problem)


def point(link: Path, target: Path) -> None:
    """Point `link` to `target`, atomically. Without support for links, a text file has the path."""
    if link.is_dir() and not link.is_symlink():  # the run was copied without links
        retire(link) if follow(link) != link.resolve() else set_aside(link)
    relative = os.path.relpath(target, link.parent)
    temporary = aside(link)
    try:
        temporary.symlink_to(relative, target_is_directory=True)
    except OSError:
        temporary.write_text(relative, encoding="utf-8")
    os.replace(temporary, link)


def follow(link: Path) -> Path | None:
    """The folder that `link` points to, or its copy in `earlier` after an interrupted --extend."""
    if (target := target_of(link)) is None:
        return None
    places = (target, link.parent / EARLIER / target.name)
    return next((place for place in places if place.is_dir()), None)


def target_of(link: Path) -> Path | None:
    """The path that `link` points to, whether it exists or not. `link` is a link, or a text file
    with the path, or, in a run that was copied without links, a folder. Such a folder stands for
    the checkpoint that it duplicates, or else for itself."""
    try:
        if link.is_symlink():
            return link.resolve()
        if link.is_file():
            return link.parent / link.read_text(encoding="utf-8").strip()
        if not link.is_dir():
            return None
        folders = [*link.parent.glob("checkpoints/*"), *link.parent.glob(f"{EARLIER}/*")]
        return next((each for each in folders if same_manifest(each, link)), link).resolve()
    except (OSError, RuntimeError, ValueError):  # a loop, or not text
        return None


def same_manifest(folder: Path, other: Path) -> bool:
    one, two = folder / MANIFEST, other / MANIFEST
    return one.is_file() and two.is_file() and one.read_bytes() == two.read_bytes()
