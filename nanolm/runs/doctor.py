"""Is a run whole? Every checkpoint verified, and which one would be used.

>>> examine(Path("runs/novel")).to_go_on
'step-00000120'
"""

from dataclasses import dataclass
from pathlib import Path

from nanolm import files
from nanolm.errors import DataError, ModelError, NanolmError, UsageError
from nanolm.runs import checkpoint
from nanolm.runs.folder import Run, find_model


@dataclass(frozen=True)
class Checked:
    """One checkpoint, or a model folder."""

    name: str
    bytes: int
    problem: str  # nothing, if it is whole
    links: tuple[str, ...]  # of "best" and "last", those that lead here


@dataclass(frozen=True)
class Examined:
    """What `nanolm doctor RUN` shows."""

    folder: str
    state: str  # "finished", "unfinished", or "a model folder"
    problems: tuple[str, ...]  # with the run's own files
    checkpoints: tuple[Checked, ...]
    to_go_on: str | None  # the checkpoint that training would go on from
    to_use: str | None  # the one that `sample`, `classify` and all others would take
    left_behind: tuple[str, ...]  # by what was killed; the next start removes it

    def sound(self) -> bool:
        damaged = any(each.problem for each in self.checkpoints)
        return not damaged and not self.problems and self.to_use is not None


def examine(path: Path) -> Examined:
    """Read all of it; nothing is changed."""
    if not path.is_dir():
        raise UsageError(f"{path} does not exist, or is no folder")
    run = Run(path)
    folders = checkpoint.list_checkpoints(run.checkpoints)
    final = run.checkpoints / "final"
    folders += [final] if final.is_dir() else []
    if not run.exists() and not folders:
        return model_folder(path)
    found = [verified(folder, run) for folder in folders]
    whole = [each.name for each in found if not each.problem and each.name.startswith("step-")]
    state, problems = read_files(run)
    try:
        use: str | None = find_model(path, lambda text: None).name
    except NanolmError:
        use = None
    parents = [parent for parent in (path, run.checkpoints) if parent.is_dir()]
    left = [
        entry.name
        for parent in parents
        for entry in sorted(parent.iterdir())
        if entry.name.startswith((files.TEMPORARY, files.TRASH))
    ]
    go_on = whole[-1] if whole and state == "unfinished" else None
    return Examined(str(path), state, tuple(problems), tuple(found), go_on, use, tuple(left))


def model_folder(path: Path) -> Examined:
    """One that is no run: a checkpoint, or a model from elsewhere, which has no checksums."""
    if not (path / "config.json").exists():
        raise ModelError(f"{path} is neither a run nor a model folder")
    problem = trouble(path) if (path / files.MANIFEST).exists() else ""
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    found = Checked(path.name, size, problem, ())
    use = None if problem else path.name
    return Examined(str(path), "a model folder", (), (found,), None, use, ())


def verified(folder: Path, run: Run) -> Checked:
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    links = [
        name
        for name in ("best", "last")
        if (target := checkpoint.follow(run.path / name)) and target.samefile(folder)
    ]
    return Checked(folder.name, size, trouble(folder), tuple(links))


def trouble(folder: Path) -> str:
    try:
        files.verify(folder)
    except ModelError as error:
        return str(error)
    return ""


def read_files(run: Run) -> tuple[str, list[str]]:
    """Whether the run is finished, and what is wrong with the files that say so."""
    problems, state = [], "unfinished"
    try:
        if run.finished():
            state = "finished"
    except DataError as error:
        problems.append(str(error))
    try:
        run.settings()
    except DataError as error:
        problems.append(str(error))
    return state, problems
