"""Run folders work after any copy: without links, packed and unpacked, read-only."""

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Commands, Loaded
from conftest import Cli, unpacked

from nanolm import files
from nanolm.runs import checkpoint
from nanolm.runs.folder import Run


def with_folders(run: Path, copy: Path) -> None:
    shutil.copytree(run, copy, symlinks=False)


def with_small_files(run: Path, copy: Path) -> None:
    """Links as git on Windows and many unpackers write them."""
    shutil.copytree(run, copy, symlinks=True)
    for name in ("best", "last"):
        target = os.readlink(copy / name)
        (copy / name).unlink()
        (copy / name).write_bytes(target.encode() + b"\r\n")


def zipped(run: Path, copy: Path) -> None:
    with zipfile.ZipFile(copy.with_suffix(".zip"), "w") as archive:
        for file in run.rglob("*"):
            archive.write(file, file.relative_to(run))
        for name in ("best", "last"):
            for file in (run / name).iterdir():
                archive.write(file, f"{name}/{file.name}")
    with zipfile.ZipFile(copy.with_suffix(".zip")) as archive:
        archive.extractall(copy)


def without_links(run: Path, copy: Path) -> None:
    shutil.copytree(run, copy, symlinks=True)
    for name in ("best", "last"):
        (copy / name).unlink()


COPIES = [with_folders, with_small_files, zipped, without_links]
Copy = Callable[[Path, Path], None]


@pytest.fixture(params=COPIES, ids=lambda copy: copy.__name__)
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        copy: Copy = request.param
        copy(unpacked(name, tmp_path / "original"), tmp_path / "copy")
        return tmp_path / "copy"

    return make


def test_a_copy_is_read(copied: Callable[[str], Path], cli: Cli) -> None:
    run = copied("finished")
    for words in (("sample", run, "--tokens", 3), ("info", run), ("report", run), ("doctor", run)):
        result = cli(*words)
        assert result.returncode == 0, result.stderr
    assert json.loads(cli("info", run, "--json").stdout)["folder"].endswith("step-00000030")


def test_a_copy_resumes(copied: Callable[[str], Path], cli: Cli) -> None:
    run = copied("unfinished")
    result = cli("train", "--config", run / "config.toml", "--out", run)
    assert result.returncode == 0, result.stderr
    assert "at step 20" in result.stderr
    assert Run(run).facts()["result"]["steps"] == 40
    linked_and_whole(run)


def test_a_copy_extends(copied: Callable[[str], Path], cli: Cli) -> None:
    run = copied("finished")
    result = cli("train", "--extend", run, "--steps", 10)
    if not (run / "last").exists():
        assert result.returncode in (0, 3)
        return
    assert result.returncode == 0, result.stderr
    assert Run(run).facts()["result"]["steps"] == 40
    assert (run / "earlier" / "step-00000030").is_dir()
    linked_and_whole(run)


def linked_and_whole(run: Path) -> None:
    for name in ("best", "last"):
        assert (run / name).is_symlink()
        files.verify(run / name)
    assert not list(run.glob(f"{files.DAMAGED}*")) and not list(run.glob(".t*"))


def test_a_folder_that_is_no_copy_is_set_aside(committed: Path, tmp_path: Path) -> None:
    """Instead of a link: another model, a damaged one, or the user's own files."""
    parent = tmp_path / "checkpoints"
    parent.mkdir()
    step = committed.rename(parent / committed.name)
    for number, change in enumerate(("weights", "notes.txt", files.MANIFEST)):
        link = tmp_path / f"best-{number}"
        shutil.copytree(step, link)
        (link / change).write_bytes(b"my own")
        checkpoint.point(link, step)
        assert checkpoint.follow(link) == step.resolve()
        aside = link.with_name(f"damaged-{link.name}")
        assert (aside / change).read_bytes() == b"my own"


READ: list[tuple[object, ...]] = [("runs", "--folder", ".."), ("info", "."), ("doctor", ".")]
READ += [("sample", ".", "--tokens", 3), ("report", ".", "--terminal")]
WRITE: list[tuple[object, ...]] = [("train", "--extend", ".", "--steps", 5), ("report", ".")]
WRITE += [("runs", "rm", ".", "--yes")]


def test_a_read_only_run_is_read_and_else_refused(tmp_path: Path, loaded: Loaded) -> None:
    run = unpacked("finished", tmp_path)
    entries = [entry for entry in (run, *run.rglob("*")) if not entry.is_symlink()]
    for entry in entries:
        entry.chmod(0o555 if entry.is_dir() else 0o444)
    before = files_of(run)
    commands = Commands(loaded, run)
    for words in READ:
        code, text = commands.run(*words, privileged=False)
        assert code == 0, text
    for words in WRITE:
        code, text = commands.run(*words, privileged=False)
        assert code == 3 and "Permission denied" in text, text
    assert files_of(run) == before
    for entry in entries:
        entry.chmod(0o755)


def files_of(run: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
