"""Verifies every checkpoint of a run, and says which one would be used."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nanolm import files
from nanolm.errors import DataError, ModelError, NanolmError, UsageError
from nanolm.runs import checkpoint
from nanolm.runs.folder import TEACHERS, Run, resolve_model
from nanolm.runs.journal import JOURNAL

TEACHING = "training its teachers"  # there is no other model yet
LEFT = (files.TEMPORARY, files.TRASH, JOURNAL)


@dataclass(frozen=True)
class CheckpointHealth:
    name: str
    bytes: int
    problem: str  # empty if it is intact
    links: tuple[str, ...]  # those of "best" and "last" that point here


@dataclass(frozen=True)
class Diagnosis:
    folder: str
    state: str  # "finished", "unfinished", "training its teachers" or "a model folder"
    problems: tuple[str, ...]  # with the other files of the run
    checkpoints: tuple[CheckpointHealth, ...]
    to_go_on: str | None  # the checkpoint that training would resume from
    to_use: str | None  # the one that `sample`, `classify` and other commands would use
    left_behind: tuple[str, ...]  # by killed processes; the next start removes them
    set_aside: tuple[str, ...] = ()  # because it was damaged

    def sound(self) -> bool:
        damaged = any(each.problem for each in self.checkpoints)
        usable = self.to_use is not None or self.state == TEACHING
        return not damaged and not self.problems and usable


def examine(path: Path) -> Diagnosis:
    """Check the whole folder without changing it."""
    if not path.is_dir():
        raise UsageError(f"{path} does not exist or is not a folder")
    run = Run(path)
    folders = checkpoint.list_checkpoints(run.checkpoints)
    folders += [final] if (final := run.checkpoints / "final").is_dir() else []
    if not run.exists() and not folders:
        if not (path / "config.json").exists():
            raise ModelError(f"{path} is neither a run nor a model folder")
        model = check(path)
        to_use = None if model.problem else path.name
        return Diagnosis(str(path), "a model folder", (), (model,), None, to_use, ())
    checked = tuple(check(folder, run) for folder in folders)
    whole = [each.name for each in checked if not each.problem and each.name.startswith("step-")]
    state, problems = "unfinished", []
    try:
        teaching = not folders and (path / TEACHERS).is_dir()
        state = "finished" if run.finished() else TEACHING if teaching else state
    except DataError as error:
        problems.append(str(error))
    try:
        run.settings()
    except DataError as error:
        problems.append(str(error))
    to_use = None
    with suppress(NanolmError):
        to_use = resolve_model(path, lambda text: None).name
    names = [each.name for each in (*sorted(path.iterdir()), *sorted(run.checkpoints.glob("*")))]
    left_behind = tuple(name for name in names if name.startswith(LEFT))
    aside = tuple(name for name in names if name.startswith(files.DAMAGED))
    to_go_on = whole[-1] if whole and state == "unfinished" else None
    return Diagnosis(
        str(path), state, tuple(problems), checked, to_go_on, to_use, left_behind, aside
    )


def check(folder: Path, run: Run | None = None) -> CheckpointHealth:
    """Check a checkpoint of `run`, or a model folder, which may have no manifest of checksums."""
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    targets = {name: checkpoint.follow(run.path / name) for name in ("best", "last") if run}
    links = tuple(name for name, target in targets.items() if target and target.samefile(folder))
    problem = ""
    try:
        if run or (folder / files.MANIFEST).exists():
            files.verify(folder)
    except (NanolmError, OSError) as error:
        problem = str(error)
    return CheckpointHealth(folder.name, size, problem, links)
