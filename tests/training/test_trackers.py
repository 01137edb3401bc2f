"""Metrics also go to trackers, and a failing tracker does not end a run."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_MODEL, Cli

import nanolm
from nanolm.errors import UsageError
from nanolm.training import trackers
from nanolm.training.events import Event, Note
from nanolm.training.trackers import Tracker, Trackers, known

SETTINGS: dict[str, Any] = {**TINY_MODEL, "steps": 20, "threads": 1, "device": "cpu"}


def numbers(run: Path) -> list[tuple[int, dict[str, float]]]:
    """Of metrics.jsonl."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row.pop("step"), row) for row in rows]


def test_trackers_get_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[tuple[int, dict[str, float]]] = []
    began: list[tuple[Path, int, int]] = []
    ended: list[bool] = []

    def own(run: Path, settings: dict[str, Any], step: int) -> Tracker:
        sys.stdout.write("all aboard\n")
        began.append((run, settings["steps"], step))
        return Tracker(lambda values, step: told.append((step, values)), lambda: ended.append(True))

    monkeypatch.setitem(trackers.TRACKERS, "own", own)
    events: list[Event] = []
    with Trackers(["own"], events.append) as notify:
        nanolm.train("embedded:tiny", out=tmp_path / "run", notify=notify, **SETTINGS)
    assert began == [(tmp_path / "run", 20, 0)]
    assert told == numbers(tmp_path / "run")
    assert ended == [True]
    assert capsys.readouterr().out == ""  # which is for results
    assert Note("all aboard") in events
    assert events


def test_a_failing_tracker_is_reported_and_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(run: Path, settings: dict[str, Any], step: int) -> Tracker:
        def log(values: dict[str, float], step: int) -> None:
            raise ConnectionError("no such host")

        return Tracker(log, lambda: None)

    monkeypatch.setitem(trackers.TRACKERS, "broken", broken)
    notes: list[str] = []

    def notify(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    with Trackers(["broken"], notify) as both:
        result = nanolm.train("embedded:tiny", out=tmp_path / "run", notify=both, **SETTINGS)
    assert result.steps == 20
    (failure,) = [text for text in notes if "broken failed" in text]
    assert "ConnectionError('no such host')" in failure


def test_names() -> None:
    assert known("") == []
    with pytest.raises(UsageError, match=r"--report-to wand: .* tensorboard, wandb, trackio"):
        known("wand")


def test_a_missing_tracker_is_reported_before_any_work(cli: Cli, tmp_path: Path) -> None:
    absent = [name for name in trackers.TRACKERS if importlib.util.find_spec(name) is None]
    if not absent:
        pytest.skip("all of them are installed")
    shown = cli("train", "embedded:tiny", "--report-to", absent[0])
    assert shown.returncode == 2
    assert f"try `pip install {absent[0]}`" in shown.stderr
    assert not (tmp_path / "runs").exists()


def test_tensorboard_can_be_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    reading: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    with Trackers(["tensorboard"], lambda event: None) as notify:
        nanolm.train("embedded:tiny", out=tmp_path / "run", notify=notify, **SETTINGS)
    found = reading.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    wanted = [(step, row["loss"]) for step, row in numbers(tmp_path / "run") if "loss" in row]
    scalars = [(each.step, each.value) for each in found.Scalars("loss")]
    assert [step for step, _ in scalars] == [step for step, _ in wanted]
    assert [value for _, value in scalars] == pytest.approx([value for _, value in wanted])
    assert "val_bits_per_byte" in found.Tags()["scalars"]
