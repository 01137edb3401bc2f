"""A run folder that is moved or removed while it is being trained."""

import itertools
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Command, Commands
from faults import before_step, steps_of, wait_for_step
from safetensors.torch import save_file
from torch import Tensor

import nanolm
from nanolm.errors import DataError
from nanolm.runs.checkpoint import list_checkpoints
from nanolm.runs.folder import Run

TINY: dict[str, Any] = {"layers": 1, "heads": 2, "dim": 16, "context": 16, "batch": 4}
TINY |= {"threads": 1, "workers": 1}
WORDS = [word for name, value in TINY.items() for word in (f"--{name}", value)]


def start(commands: Commands, run: Path, steps: int = 100_000) -> Command:
    words = ("train", "embedded:tiny", "--out", run, "--steps", steps, *WORDS)
    return commands.start(*words, "--save-every", 10, "--no-compile")


@pytest.mark.parametrize("parent", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_moved_run_goes_on_where_it_is(parent: bool, commands: Commands, tmp_path: Path) -> None:
    run, moved = tmp_path / "runs" / "here", tmp_path / "there"
    command = start(commands, run)
    wait_for_step(run, 20)
    (run.parent if parent else run).rename(moved)
    moved = moved / "here" if parent else moved
    wait_for_step(moved, max(steps_of(moved)) + 30)
    command.send(signal.SIGINT)
    assert command.wait() == 75, command.said()
    assert f"{run} was moved to {moved}" in command.said()
    assert f"--out {moved}" in command.said()
    assert not run.exists()
    assert len(list_checkpoints(moved / "checkpoints")) >= 2
    again, done = start(commands, moved), max(steps_of(moved))
    wait_for_step(moved, done + 10)
    again.send(signal.SIGINT)
    assert again.wait() == 75 and f"resuming {moved} at step" in again.said()


def test_a_removed_run_ends_with_a_message(commands: Commands, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "here"
    command = start(commands, run)
    wait_for_step(run, 20)
    shutil.rmtree(run, ignore_errors=True)
    assert command.wait() == 3, command.said()
    said = command.said()  # which names a missing file if a step met a half removed folder
    assert f"{run} was removed while it was being trained" in said or f"{run}/" in said[-400:]
    assert "Traceback" not in said
    again = start(commands, run, steps=20)
    assert again.wait() == 0, again.said()


@pytest.mark.parametrize("moment", ["", "checkpoints", "run.json"])
def test_a_removed_run_does_not_come_back(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a partly removed one."""
    run = tmp_path / "run"

    def remove() -> None:
        target = run / moment
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    settings = {**TINY, "steps": 40, "save_every": 5}
    with monkeypatch.context() as patch:
        before_step(patch, 20, remove)
        if moment == "checkpoints":
            nanolm.train("embedded:tiny", out=run, **settings)
            assert Run(run).finished()
            return
        with pytest.raises(DataError, match="was removed while it was being trained"):
            nanolm.train("embedded:tiny", out=run, **settings)
    assert run.exists() == bool(moment)


@pytest.mark.parametrize("moment", ["before writing", "after writing"])
def test_a_run_moved_in_the_middle_of_a_save(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    from nanolm import files
    from nanolm.training import checkpointer

    flush = files.flush

    def move(path: Path) -> None:
        if "step-00000020" in str(path) and run.exists():
            run.rename(moved)

    def flush_and_move(path: Path) -> None:
        flush(path)
        move(path)

    def move_and_save(tensors: dict[str, Tensor], path: Path) -> None:
        move(path)
        save_file(tensors, path)

    notes: list[str] = []
    if moment == "before writing":
        monkeypatch.setattr(checkpointer, "save_file", move_and_save)
    else:
        monkeypatch.setattr(files, "flush", flush_and_move)
    settings = {**TINY, "steps": 40, "save_every": 10}
    result = nanolm.train(
        "embedded:tiny", out=run, notify=lambda event: notes.append(str(event)), **settings
    )
    assert result.run == str(moved) and not run.exists()
    assert Run(moved).finished() and not list(moved.glob("checkpoints/.*"))
    assert any("was moved to" in note for note in notes)


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_moved_just_after_its_path_was_read(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path in hand is no longer where the run is, at any place that uses it."""
    read = Run.path.fget  # type: ignore[attr-defined]
    settings = {**TINY, "steps": 30, "save_every": 5, "evaluations": 3, "compile": False}
    for number in itertools.count(1, every):
        run, moved, reads = tmp_path / f"{number}", tmp_path / f"{number} moved", itertools.count(1)

        def path(
            self: Run, number: int = number, reads: Iterator[int] = reads, moved: Path = moved
        ) -> Path:
            found: Path = read(self)
            if self.begun and next(reads) == number:
                found.rename(moved)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(Run, "path", property(path))
            nanolm.train("embedded:tiny", out=run, **settings)
        where = Run(moved if moved.exists() else run)
        assert where.finished() and run.exists() != moved.exists(), number
        for name in ("best", "last"):
            assert (where.path / name / "model.safetensors").is_file(), number
        states = [
            json.loads((each / "state.json").read_text())
            for each in where.path.glob("checkpoints/step-*")
        ]
        assert all(state["lengths"]["metrics.jsonl"] for state in states if state["step"] > 10)
        if run.exists():
            break  # its path is read no more often
    assert number > 50
