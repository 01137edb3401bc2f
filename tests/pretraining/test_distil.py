"""Several models are trained first, and one ordinary model learns their mean prediction."""

import json
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from faults import before_step, press
from journeys import SETTINGS, same

import nanolm
from nanolm.errors import DataError, ModelError, UsageError
from nanolm.model.build import build_model
from nanolm.model.config import configure
from nanolm.planning import recipe
from nanolm.pretraining import distil
from nanolm.pretraining.distil import Ensemble, mean_predictions
from nanolm.pretraining.extend import extend
from nanolm.pretraining.train import TrainResult
from nanolm.runs.checkpoint import list_checkpoints
from nanolm.runs.doctor import TEACHING, examine
from nanolm.runs.folder import Run, find_model
from nanolm.runs.info import describe
from nanolm.text.tokens import Batches
from nanolm.training.events import Event, Note
from nanolm.training.feed import DeviceSource
from nanolm.training.settings import TrainSettings

SMALL: dict[str, Any] = {**SETTINGS, "steps": 8, "evaluations": 2, "teachers": 2}


def train(out: Path, **more: Any) -> TrainResult:
    return nanolm.train("embedded:tiny", out=out, **(SMALL | more))


def test_one_ordinary_run_is_left(tmp_path: Path) -> None:
    events: list[Event] = []
    result = train(tmp_path / "run", notify=events.append)
    assert result.steps == 8 and result.stopped == "steps"
    facts = json.loads((tmp_path / "run/run.json").read_text())
    assert [teacher["steps"] for teacher in facts["teachers"]] == [8, 8]
    seeds = {teacher["seed"] for teacher in facts["teachers"]}
    assert len(seeds) == 2 and SMALL.get("seed", 1) not in seeds
    assert not (tmp_path / "run/teachers").exists()
    notes = [event.text for event in events if isinstance(event, Note)]
    assert [note.split(":")[0] for note in notes[:2]] == ["teacher 1 of 2", "teacher 2 of 2"]
    model = nanolm.load(tmp_path / "run").model
    assert model.config.dropout == 0
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2  # the evaluations of the student
    history = describe(str(tmp_path / "run"), pytest.fail).history
    assert history and history.distilled.startswith("distilled from 2 models with ")
    assert history.distilled in (tmp_path / "run/report.html").read_text()
    with pytest.raises(DataError, match="--from"):
        extend(tmp_path / "run", {"steps": 5})


def test_the_first_teacher_corrects_the_forecast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "MOST_GAIN", 0.5)
    events: list[Event] = []
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} is a number.\n\n" for number in range(4_000)))
    nanolm.train(str(text), out=tmp_path / "run", notify=events.append, **SMALL)
    facts = json.loads((tmp_path / "run/run.json").read_text())
    planned, corrected = (facts["forecast"][name] for name in ("bits_per_byte", "corrected"))
    assert corrected == pytest.approx(facts["teachers"][0]["val_bits_per_byte"] * 0.75)
    (note,) = (e.text for e in events if isinstance(e, Note) and e.text.startswith("forecast:"))
    assert f"{corrected:.3f} " in note and f" {planned:.3f}" in note
    (line, *_) = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    both = fmean(teacher["val_bits_per_byte"] for teacher in facts["teachers"])
    assert json.loads(line)["forecast_bits_per_byte"] == pytest.approx(both * 0.75)


@pytest.mark.parametrize("columns", [50, 9])
def test_the_mean_prediction(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every token of every window, from the tokens before it in that window."""
    monkeypatch.setattr(distil, "CHUNK_TOKENS", 24)
    config = configure("modern", vocab_size=50, layers=1, heads=2, dim=16, context=8)
    models = [build_model(config).eval() for _ in range(3)]
    for model in models:
        torch.nn.init.normal_(model.head.weight)
    tokens = np.random.default_rng(1).integers(50, size=61).astype(np.uint16)
    batches = Batches(tokens, 8, 2, 1, offsets=2)
    starts = batches.all_starts().tolist()
    assert starts == list(range(0, 48, 4))
    assert {int(start) for index in range(6) for start in batches.starts(index)} == set(starts)
    found = mean_predictions(models, DeviceSource(batches, "cpu"), columns)
    ids = torch.from_numpy(tokens.astype(np.int64))
    for number, start in enumerate(starts):
        for length in (1, 5, 8):
            x, row = ids[None, start : start + length], number * 8 + length - 1
            with torch.no_grad():
                mean = torch.stack([model(x)[0, -1].softmax(dim=0) for model in models]).mean(0)
            wanted = mean
            if columns == 9:
                assert found.ids is not None
                top = mean.topk(9)
                assert set(found.ids[row].tolist()) == set(top.indices.tolist())
                wanted = torch.cat([top.values, 1 - top.values.sum()[None]])
            torch.testing.assert_close(found.probabilities[row].float(), wanted, atol=1e-3, rtol=0)


def test_only_the_most_likely_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If memory is short. A resumed run keeps as many as before."""
    monkeypatch.setattr(distil, "soft_target_columns", lambda *_: 3)
    train(tmp_path / "whole")
    with monkeypatch.context() as patch:
        before_step(patch, 5, press)
        for _ in range(3):  # in both teachers, and in the student
            assert train(tmp_path / "run").stopped == "interrupted"
    monkeypatch.setattr(distil, "soft_target_columns", lambda *_: 1_000)
    train(tmp_path / "run")
    assert same(tmp_path / "run", tmp_path / "whole")


def test_interrupted_with_the_teachers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "whole")
    run, results = tmp_path / "run", list[TrainResult]()
    with monkeypatch.context() as patch:
        before_step(patch, 3, press)
        for _ in range(2):
            results.append(train(run))
            with pytest.raises(ModelError, match="teachers"):
                find_model(run, pytest.fail)
            assert examine(run).state == TEACHING and examine(run).sound()
        results.append(train(run))  # in the student
        assert list_checkpoints(run / "checkpoints")
    results.append(train(run))
    assert [result.stopped for result in results] == ["interrupted"] * 3 + ["steps"]
    seconds = [result.seconds for result in results]
    assert seconds == sorted(seconds)  # those of earlier processes count
    assert same(run, tmp_path / "whole")


@pytest.mark.parametrize("more", [{"start_from": "runs/x"}, {"family": "lstm"}])
def test_what_cannot_be_distilled(more: dict[str, Any], tmp_path: Path) -> None:
    sizes = dict.fromkeys(("layers", "heads", "dim"))
    with pytest.raises(UsageError, match="--teachers 2"):
        train(tmp_path / "run", **sizes, **more)


def test_a_run_that_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "whole")
    run, moved = tmp_path / "run", tmp_path / "moved"
    before_step(monkeypatch, 3, lambda: run.exists() and run.rename(moved))
    assert train(run).run == str(moved)
    assert same(moved, tmp_path / "whole")
    assert not run.exists() and not (moved / "teachers").exists()


@pytest.mark.parametrize(("elapsed", "enough"), [(30.0, False), (45.0, True)])
def test_a_slow_machine_has_fewer_teachers(elapsed: float, enough: bool, tmp_path: Path) -> None:
    """Another ten seconds would leave the student 20 of 60, or 5."""
    settings = TrainSettings(("a.txt",), minutes=1.0, teachers=4)
    job: Any = SimpleNamespace(settings=settings, run=Run(tmp_path))
    notes: list[Event] = []
    ensemble = Ensemble(job, lambda: elapsed, notes.append)
    assert not ensemble.are_enough()
    ensemble.state.teachers.append({"seconds": 10.0})
    assert ensemble.are_enough() is enough
    assert ["1 teacher instead of 4" in str(note) for note in notes] == [True] * enough
