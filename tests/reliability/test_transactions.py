"""Changes of several files: killed before any of them, it is the old state or the new one."""

import itertools
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_MODEL, Tally, weights
from faults import killed_at
from journeys import lines

import nanolm
from nanolm.files import verify
from nanolm.pretraining.extend import extend
from nanolm.runs.folder import Run, find_model

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
