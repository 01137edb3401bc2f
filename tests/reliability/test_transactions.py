"""Changes of several files: killed before any of them, it is the old state or the new one."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_MODEL, Cli, Tally, weights
from faults import killed_at
from journeys import lines

import nanolm
from nanolm.cli.runs import command
from nanolm.files import verify
from nanolm.pretraining.extend import extend
from nanolm.runs.folder import Run, find_model
from nanolm.sweep.sweep import SweepRequest, TrialEnded, sweep
from nanolm.training.settings import TrainSettings

SETTINGS: dict[str, Any] = {**TINY_MODEL, "threads": 1, "device": "cpu"}
STEPS, MORE = 30, 10
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    nanolm.train("embedded:tiny", out=run, steps=STEPS, **SETTINGS)
    return run


@pytest.fixture(scope="module")
def extended(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As it is when nothing disturbs it."""
    run = copied(finished, tmp_path_factory.mktemp("extended"))
    assert extend(run, {"steps": MORE}).steps == STEPS + MORE
    return run


def copied(run: Path, parent: Path) -> Path:
    return Path(shutil.copytree(run, parent / run.name, symlinks=True))


def kills(
    points: Iterable[int], run: Path, parent: Path, action: Callable[[Path], object]
) -> Iterable[Path]:
    """Copies of `run`, in each of which `action` was killed at another point."""
    for point in points:
        copy = copied(run, parent / str(point))
        if not killed_at(point, lambda copy=copy: action(copy)):  # type: ignore[misc]
            break
        yield copy
        shutil.rmtree(copy.parent)


@pytest.mark.parametrize(
    "points", [range(4, 60, 11), pytest.param(itertools.count(1), marks=SLOW)], ids=["few", "all"]
)
def test_extending(
    points: Iterable[int], finished: Path, extended: Path, tmp_path: Path, tally: Tally
) -> None:
    """There is a model in between; the same command then ends with the same weights."""
    tried = survived = 0
    best = (finished / "best").resolve().name
    for run in kills(points, finished, tmp_path, lambda run: extend(run, {"steps": MORE})):
        model = find_model(run, lambda text: None)
        verify(model)
        whole = "result" in Run(run).facts() and not (run / "earlier").exists()
        kept = (run / "checkpoints" if whole else run / "earlier") / best
        verify(kept)
        result = extend(run, {"steps": MORE})
        same = weights(run) == weights(extended) and lines(run) == lines(extended)
        tried += 1
        survived += same and result.steps == STEPS + MORE
        assert len(Run(run).facts()["earlier"]) == 1
        assert not list(run.glob(".*-*"))
    tally("killed at each change of the disk, --extend", tried, survived)


@pytest.mark.parametrize(
    "points", [range(2, 20, 6), pytest.param(itertools.count(1), marks=SLOW)], ids=["few", "all"]
)
def test_removing(
    points: Iterable[int], finished: Path, tmp_path: Path, cli: Cli, tally: Tally
) -> None:
    """It is a run, whole, or it is none; `nanolm runs` removes what is left, and says so."""
    tried = survived = 0
    for run in kills(points, finished, tmp_path, removed):
        before = {entry.name for entry in run.parent.iterdir()}
        shown = cli("runs", "--json", "--folder", run.parent)
        listed = [json.loads(line)["run"] for line in shown.stdout.splitlines()]
        after = {entry.name for entry in run.parent.iterdir()}
        tried += 1
        if run.exists():
            survived += listed == [str(run)] and same_files(run, finished)
        else:
            survived += (
                listed == [] and not after and (not before or "removed what" in shown.stderr)
            )
    tally("killed at each change of the disk, runs rm", tried, survived)


def removed(run: Path) -> None:
    command.main(["rm", str(run), "--yes"], standalone_mode=False)


def same_files(run: Path, other: Path) -> bool:
    files, others = ({f.relative_to(each) for f in each.rglob("*")} for each in (run, other))
    return files - {Path(".lock")} == others - {Path(".lock")}


def test_what_an_older_version_left_can_be_removed(
    finished: Path, tmp_path: Path, cli: Cli
) -> None:
    """It began with run.json; a folder of somebody else is not touched."""
    run = copied(finished, tmp_path / "runs")
    (run / "run.json").write_text("{")
    assert cli("runs", "rm", "runs/run").returncode == 2  # it asks
    (run / "run.json").unlink()
    assert "`nanolm runs rm runs/run` removes" in cli("runs").stderr
    (run / "thesis.txt").write_text("mine")
    assert cli("runs", "rm", "runs/run", "--yes").returncode == 3
    (run / "thesis.txt").rename(run / "checkpoints/thesis.txt")
    assert cli("runs", "rm", "runs/run", "--yes").returncode == 3
    (run / "checkpoints/thesis.txt").unlink()
    shown = cli("runs", "rm", "runs/run", "--yes")
    assert shown.returncode == 0, shown.stderr
    assert not list((tmp_path / "runs").iterdir())
    damaged = copied(finished, tmp_path / "runs")
    (damaged / "run.json").write_text("{")
    assert cli("runs", "rm", "runs/run", "--yes").returncode == 0
    assert not list((tmp_path / "runs").iterdir())


class Stop(Exception):
    pass


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[SweepRequest, Path]:
    """A sweep before the best of its first round goes on."""
    folder = tmp_path_factory.mktemp("swept")
    text = folder / "cats.txt"
    text.write_text("".join(f"The {n} cats sat on {n * 7 % 13} mats.\n" for n in range(900)))
    settings = TrainSettings((str(text),), tokenizer="char", minutes=0.03, **SETTINGS)

    def watch(event: object) -> None:
        if isinstance(event, TrialEnded) and event.number == 2:
            raise Stop

    request = SweepRequest(settings, "lr=0.0001:0.02", 2)
    with pytest.raises(Stop):
        sweep(request, folder / "sweep", watch)
    return request, folder / "sweep"


@pytest.mark.parametrize(
    "points", [range(9, 45, 15), pytest.param(itertools.count(1), marks=SLOW)], ids=["few", "all"]
)
def test_sweeping(
    points: Iterable[int], swept: tuple[SweepRequest, Path], tmp_path: Path, tally: Tally
) -> None:
    """The winner stays the winner, and is trained for as long as without a kill."""
    tried = survived = 0
    request, before = swept
    for folder in kills(points, before, tmp_path, lambda folder: sweep(request, folder)):
        state = json.loads((folder / "sweep.json").read_text())
        if not state["finished"]:
            outcome = sweep(request, folder)
            assert outcome.run == str(folder / "best")
            assert [trial.error for trial in outcome.trials] == [None, None]
            assert [len(trial.results) for trial in outcome.trials] == [2, 1]
        assert len(Run(folder / "best").facts()["earlier"]) == 1
        verify(find_model(folder / "best", pytest.fail))
        tried += 1
        survived += json.loads((folder / "sweep.json").read_text())["finished"]
    tally("killed at each change of the disk, sweep", tried, survived)
