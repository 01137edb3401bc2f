"""No room on the disk, none in memory, and numbers that leave the finite ones."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import Commands, Loaded
from conftest import Tally
from faults import disk_holds, short_of_memory, spoil
from journeys import Journey, counts, journeys, lines, same

from nanolm.errors import DiskFull, Diverged, OutOfMemory
from nanolm.files import verify
from nanolm.pairs.settings import PairSettings
from nanolm.runs.checkpoint import list_checkpoints
from nanolm.training.guard import Guard
from nanolm.training.settings import Settings, TrainSettings

Ended = tuple[Journey, Path]


@pytest.mark.parametrize("offsets", counts(3, 50))
def test_a_disk_that_is_full_after_so_many_bytes(
    offsets: int, ended: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    journey, whole = ended
    dice, survived = random.Random(offsets), 0
    size = sum(file.stat().st_size for file in (whole / "last").iterdir())
    for number in range(offsets):
        run = tmp_path / str(number)
        with monkeypatch.context() as patch:
            disk_holds(patch, dice.randrange(size), commits=1 + number % 4)
            with pytest.raises(DiskFull, match=r"disk is full.*MB or more; .* MB free"):
                journey.go(run)
        saved = list_checkpoints(run / "checkpoints")
        for folder in saved:
            verify(folder)
        clean = not list(run.rglob(".tmp-*"))
        journey.go(run)
        survived += clean and same(run, whole)
    tally(f"disk full after so many bytes, {journey.name}", offsets, survived)


ON_A_SMALL_DISK = """
mount -t tmpfs -o size=2m tmpfs "$1" || exit 42
exec "$2" "$3" small-disk "$1" "$4"
"""


@pytest.mark.parametrize("offsets", counts(2, 50))
def test_a_small_disk_that_is_really_full(offsets: int, tmp_path: Path, tally: Tally) -> None:
    """A file system of two megabytes, filled up to some offset into the next checkpoint."""
    if sys.platform != "linux":
        pytest.skip("needs a file system of its own")
    disk = tmp_path / "disk"
    disk.mkdir()
    shell = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", ON_A_SMALL_DISK]
    places = ["sh", str(disk), sys.executable, __file__, str(offsets)]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*shell, *places], capture_output=True, encoding="utf-8", cwd=tmp_path, env=path
    )
    if done.returncode == 42 or "unshare" in done.stderr:
        pytest.skip(f"no file system can be made here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    sys.stderr.write(done.stderr)  # what was said where it was not as promised
    tally("a small disk that is full", offsets, json.loads(done.stdout))


def on_a_small_disk(disk: Path, offsets: int) -> int:
    """Let the disk be full in each of so many saves; how often all was as promised."""
    os.environ["NANOLM_CACHE"] = str(disk.parent / "cache")
    dice, survived = random.Random(offsets), 0
    journey = journeys(disk.parent)["training"]
    whole, filler = disk.parent / "whole", disk / "filler"
    journey.go(whole)
    with Loaded() as loaded:
        commands = Commands(loaded, disk.parent)
        for _ in range(offsets):
            run = disk / "run"
            filler.write_bytes(b"")
            with filler.open("r+b") as stream:
                free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
                page = os.statvfs(disk).f_frsize
                stream.write(bytes(free - page * dice.randrange(12, 60)))
            code, said = commands.run(*journey.words(run))
            for folder in list_checkpoints(run / "checkpoints"):
                verify(folder)
            clean = not list(run.rglob(".tmp-*"))
            told = code == 7 and "full" in said and "Traceback" not in said
            filler.unlink()
            code, again = commands.run(*journey.words(run))
            good = told and clean and code == 0 and same(run, whole)
            if not good:
                print(said, again, file=sys.stderr)  # noqa: T201
            survived += good
            shutil.rmtree(run)
    return survived


@pytest.mark.parametrize(
    "most", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 8)), 16]
)
def test_a_batch_that_does_not_fit(
    most: int, journey: Journey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """It goes through in parts; as many tokens a step, and the same loss."""
    pairs = journey.verb == "train-pairs"  # their batch is in tokens: 16 pairs, or a few less
    how: dict[str, Any] = {"batch": 390 if pairs else 16, "dropout": 0.0}
    notes: list[str] = []
    native = journey.go(tmp_path / "native", **how)
    short_of_memory(monkeypatch, most)
    found = journey.go(tmp_path / "short", lambda event: notes.append(str(event)), **how)
    parts = "" if pairs else f" {most} sequences"
    said = any("not enough memory" in note and parts in note for note in notes)
    assert said == (most < 16)
    close = abs(losses(tmp_path / "short") - losses(tmp_path / "native")).max() < 1e-3
    tally(
        f"out of memory beyond {most}, {journey.name}",
        1,
        int(close and found.tokens == native.tokens),
    )


def losses(run: Path) -> torch.Tensor:
    """Of training and validation, as they were logged."""
    found = [(line.get("loss"), line.get("val_loss")) for line in lines(run)]
    return torch.tensor([value for pair in found for value in pair if value is not None])


def test_not_even_one_sequence_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, journey: Journey
) -> None:
    short_of_memory(monkeypatch, 0)
    with pytest.raises(OutOfMemory, match=r"try --context \d+"):
        journey.go(tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        (TrainSettings(("x",), context=8), "more processes, --shard, or a smaller --batch"),
        (PairSettings(("x",), context=8), "more processes, or a smaller --batch"),
    ],
)
def test_one_of_many_processes_is_out_of_memory(settings: Settings, hint: str) -> None:
    step: Any = SimpleNamespace(world=SimpleNamespace(joined=True))
    state: Any = None
    guard = Guard(settings, state, step, state, print)
    with (
        pytest.raises(OutOfMemory, match=f"2 sequences of 8 tokens; try {hint}$"),
        guard.out_of_memory((torch.zeros(2, 8),)),
    ):
        raise torch.OutOfMemoryError


@pytest.mark.parametrize("times", counts(4, 20))
def test_no_finite_loss(
    times: int, journey: Journey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """Weights and moments stay what they were, to the bit; it is logged; the run goes on."""
    dice = random.Random(times)
    survived = 0
    for number in range(times):
        run, step = tmp_path / str(number), dice.randrange(30)
        factor = (torch.nan, torch.inf, -torch.inf)[number % 3]
        with monkeypatch.context() as patch:
            spoiled = spoil(patch, {step}, factor)
            assert journey.go(run).stopped == "steps"
        logged = sum(line.get("skipped", 0) for line in lines(run))
        told = f"step {step + 1:,} skipped: non-finite gradient" in (run / "log.txt").read_text()
        survived += spoiled == [(step, True)] and logged == 1 and told
    tally(f"no finite loss, {journey.name}", times, survived)


def test_ten_bad_steps_in_a_row_are_passed_over(
    journey: Journey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, notes = tmp_path / "run", list[str]()
    spoiled = spoil(monkeypatch, range(17, 27))
    result = journey.go(run, lambda event: notes.append(str(event)), steps=40, save_every=4)
    assert [index for index, _ in spoiled] == [*range(17, 27)]
    assert (result.stopped, result.steps) == ("steps", 40)
    assert any("up to step 27" in note and "back to step 16" in note for note in notes)
    state = json.loads((run / "last/state.json").read_text())
    assert (state["passed_over"], state["returns"]) == (11, 1)
    logged = [line["step"] for line in lines(run) if "lr" in line]
    assert logged == [10, 20, 30, 40]


def test_a_run_that_stays_bad_gives_up(
    journey: Journey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled = spoil(monkeypatch, range(5, 10**6))
    with pytest.raises(Diverged, match=r"3 rollbacks did not help.* smaller --lr"):
        journey.go(tmp_path / "run", steps=100, save_every=2)
    assert len(spoiled) == 40
    assert all(same for _, same in spoiled)


if __name__ == "__main__":
    print(on_a_small_disk(Path(sys.argv[2]), int(sys.argv[3])))  # noqa: T201
