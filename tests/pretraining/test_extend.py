"""A finished run, trained for longer."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_MODEL, Cli, lines, weights
from faults import Killed

import nanolm
from nanolm.errors import DataError, UsageError
from nanolm.pretraining.extend import extend
from nanolm.training.events import Progressed
from nanolm.training.schedule import DECAY

SETTINGS: dict[str, Any] = {**TINY_MODEL, "threads": 1, "weight_decay": 0.1, "dropout": 0.1}


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    nanolm.train("embedded:tiny", out=run, steps=40, **SETTINGS)
    return run


def test_as_if_requested_from_the_start(finished: Path, tmp_path: Path) -> None:
    earlier = (finished / "best").resolve().name
    result = extend(finished, {"steps": 20})
    nanolm.train("embedded:tiny", out=tmp_path / "once", steps=60, **SETTINGS)
    assert (result.steps, result.stopped) == (60, "steps")
    steps = [line["step"] for line in lines(finished) if "loss" in line]
    assert steps == sorted(set(steps))  # steps after the rollback are not logged twice
    # Warmup was a share of the shorter run; everything else is the same.
    once = json.loads((tmp_path / "once/run.json").read_text())["result"]
    assert result.val_bits_per_byte == pytest.approx(once["val_bits_per_byte"], rel=0.05)
    assert nanolm.load(finished / "earlier" / earlier).generate("the", tokens=3)
    assert len(json.loads((finished / "run.json").read_text())["earlier"]) == 1


def test_it_rolls_back_to_before_the_decay(finished: Path) -> None:
    rates = {line["step"]: line["lr"] for line in lines(finished) if "lr" in line}
    seen: list[Any] = []
    extend(finished, {"steps": 40}, seen.append)
    first = next(event.record for event in seen if isinstance(event, Progressed))
    assert 40 * (1 - DECAY) <= first["step"] <= 40 * (1 - DECAY) + 10
    again = {line["step"]: line["lr"] for line in lines(finished) if "lr" in line}
    assert again[30] > rates[30]
    assert again[40] == pytest.approx(max(rates.values()))


def test_after_a_kill_the_same_command_resumes(finished: Path) -> None:
    def kill(event: object) -> None:
        if isinstance(event, Progressed) and event.record["step"] >= 50:
            raise Killed

    with pytest.raises(Killed):
        extend(finished, {"steps": 40}, kill)
    assert nanolm.load(finished).generate("the", tokens=3)
    with pytest.raises(DataError, match="not finished"):
        extend(finished, {"steps": 10})
    assert extend(finished, {"steps": 40}).steps == 80
    whole = weights(finished)
    assert extend(finished, {"tokens": 640}).steps == 90
    assert weights(finished) != whole


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "exactly one of --minutes, --steps and --tokens"),
        ({"steps": 3, "minutes": 1.0}, "exactly one of --minutes, --steps and --tokens"),
        ({"steps": 0}, "from"),
    ],
)
def test_the_budget_must_be_given(finished: Path, more: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        extend(finished, more)


def test_the_command_line(finished: Path, cli: Cli) -> None:
    shown = cli("train", "--extend", finished, "--steps", 10, "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["steps"] == 50
    assert "is kept in" in shown.stderr
    shown = cli("train", "--extend", finished, "--steps", 10, "--lr", 1, "x.txt")
    assert shown.returncode == 2
    assert "leave out --lr, corpus" in shown.stderr or "--lr" in shown.stderr
    shown = cli("train", "--extend", finished.parent / "none", "--minutes", 1)
    assert (shown.returncode, "no such run" in shown.stderr) == (2, True)
