"""A run with a time budget always trains, or reports that it was too short."""

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_MODEL, Cli
from faults import Killed, before_step, kill
from journeys import lines, same

import nanolm
from nanolm.planning import sizes
from nanolm.planning.planner import make_plan
from nanolm.planning.recipe import TINY_STEPS
from nanolm.planning.scaling_law import Forecast
from nanolm.planning.sizes import TextStats
from nanolm.pretraining import language, prepare
from nanolm.pretraining import train as pretraining
from nanolm.pretraining.extend import extend
from nanolm.report.run_data import list_runs
from nanolm.runs.folder import Run
from nanolm.text import store
from nanolm.training.budget import MIN_STEPS, Budget
from nanolm.training.events import Note, Preparing
from nanolm.training.settings import TrainSettings
from nanolm.training.state import State, read_state

SMALL: dict[str, Any] = {
    **TINY_MODEL,
    "tokenizer": "char",
    "threads": 1,
    "dtype": "float32",
    "compile": False,
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Not tiny."""
    file = tmp_path / "text.txt"
    rows = (f"{n}: the {n % 7} cats sat on {n % 11} mats, {n % 13} not.\n" for n in range(4_000))
    file.write_text("".join(rows))
    return file


@pytest.fixture
def too_short(text: Path, tmp_path: Path) -> Path:
    """A run whose time was up before it started."""
    run = tmp_path / "runs/text"
    result = nanolm.train(text, out=run, minutes=0.001, **SMALL)
    assert (result.stopped, result.steps < MIN_STEPS) == ("too little time", True)
    return run


def prepared(seen: list[object]) -> set[str]:
    return {event.what for event in seen if isinstance(event, Preparing)}


def test_less_text_is_advised_where_preparing_took_the_time() -> None:
    result = pretraining.TrainResult(
        "runs/x", 3, 100, 20.0, None, None, None, 0, "too little time", 18.0
    )
    assert "--max-bytes" in pretraining.what_to_type(result)
    assert "--max-bytes" not in pretraining.what_to_type(replace(result, setup_seconds=2.0))


def test_exit_code_8_says_what_to_type(text: Path, cli: Cli) -> None:
    shown = cli("train", text, "--minutes", 0.001, "--json", "--out", "runs/text", *options(SMALL))
    assert shown.returncode == 8
    assert json.loads(shown.stdout)["stopped"] == "too little time"
    assert "too little time" in shown.stderr
    assert "--minutes 0.5" in shown.stderr
    assert "stopped: too little time" in cli("runs").stdout


def options(settings: dict[str, Any]) -> list[str]:
    given = {name: value for name, value in settings.items() if name != "compile"}
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def test_such_a_run_is_not_finished(too_short: Path) -> None:
    assert [row.state for row in list_runs(too_short.parent, print)] == ["stopped: too little time"]


def test_it_can_be_extended_without_preparing_the_text_again(too_short: Path) -> None:
    seen: list[object] = []
    before = json.loads((too_short / "run.json").read_text())["result"]["steps"]
    result = extend(too_short, {"steps": 30}, seen.append)
    assert (result.stopped, result.steps) == ("steps", before + 30)
    assert prepared(seen) <= {"hashing the text"}


def test_the_same_command_with_more_time_starts_over(too_short: Path, text: Path) -> None:
    seen: list[object] = []
    settings = TrainSettings((str(text),), **SMALL)
    result = pretraining.train(replace(settings, minutes=0.1), too_short, seen.append)
    assert (result.run, result.stopped) == (str(too_short), "minutes")
    assert result.steps >= MIN_STEPS
    assert "encoding" not in prepared(seen)
    assert [row.state for row in list_runs(too_short.parent, print)] == ["finished"]
    with pytest.raises(nanolm.errors.DataError, match="finished"):
        pretraining.train(replace(settings, minutes=0.1), too_short)


def test_a_part_of_the_text_is_saved_and_kept(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_seconds_a_byte", lambda *_: 1e-4)
    monkeypatch.setattr(store, "LEAST_PART", 70_000)
    run, seen = tmp_path / "run", list[object]()
    result = nanolm.train(text, out=run, minutes=0.05, notify=seen.append, **SMALL)
    assert result.steps >= MIN_STEPS
    assert tomllib.loads((run / "config.toml").read_text())["max_bytes"] == 70_000
    choices = json.loads((run / "run.json").read_text())["choices"]
    assert "passages spread over the text" in choices[0]["reason"]
    seen.clear()
    extend(run, {"steps": 5}, seen.append)
    assert prepared(seen) <= {"hashing the text"}
    assert tomllib.loads((run / "config.toml").read_text())["max_bytes"] == 70_000


@pytest.mark.parametrize(
    ("step", "seconds", "progress"),
    [
        (100, 30, 0.0),  # warmup, constant rate and decay fit into the remaining time,
        (100, 40, 1 / 3),
        (100, 60, 1.0),
        (5, 58, 5 / 20),  # or into 20 steps, if those take longer,
        (5, 62, 5 / 20),
        (5, 64, 34 / 30),  # but not much longer
    ],
)
def test_time_before_the_first_step_is_no_progress(
    step: int, seconds: float, progress: float
) -> None:
    state = State(step=step, seconds=seconds, setup=30)
    assert Budget(TrainSettings((), minutes=1), state).progress() == pytest.approx(progress)


@pytest.mark.parametrize("minutes", [0.25, 3.0])
def test_minutes_do_not_change_the_plan_for_a_tiny_text(minutes: float) -> None:
    tiny = TextStats(vocab_size=300, size=3_000, tokens=1_000, ngram_bits=lambda: 2.3)
    asked = TrainSettings(("poem.txt",), device="cpu")
    plain = make_plan(asked, tiny).settings
    timed = make_plan(replace(asked, minutes=minutes), tiny).settings
    assert plain.steps == TINY_STEPS
    assert timed == replace(plain, minutes=minutes)


@pytest.mark.parametrize("gone", [0.0, 20.0])
def test_little_is_tried_where_time_is_short(gone: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine where one step takes a second."""
    clock, tried = gone, list[int]()

    def step_seconds(config: Any, batch: int, *rest: object) -> float:
        nonlocal clock
        tried.append(config.dim)
        clock += 3
        return float(config.dim / 64 * batch * config.context / 2_048)

    monkeypatch.setattr(sizes, "step_seconds", step_seconds)
    settings = TrainSettings(("a.txt",), device="cpu", minutes=0.5, threads=1, workers=1)
    text = TextStats(vocab_size=512, size=10**6, tokens=300_000, ngram_bits=lambda: None)
    plan = make_plan(replace(settings, dtype="float32"), text, None, lambda: clock)
    assert clock - gone <= 6
    assert plan.settings.dim == 64
    assert plan.settings.batch and plan.settings.batch < 16  # smaller steps, but more of them
    assert plan.forecast is None
    assert not any("bits per byte" in choice.reason for choice in plan.choices)


def test_fewer_steps_than_planned_are_reported_with_a_new_prediction(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_for: Callable[..., Any] = prepare.plan_for

    def hopeful(*rest: Any) -> Any:
        plan = plan_for(*rest)
        plan.forecast = Forecast(1.0, 5.0, passes=100.0, steps=1_000_000)
        return plan

    monkeypatch.setattr(prepare, "plan_for", hopeful)
    seen: list[object] = []
    nanolm.train(text, out=tmp_path / "run", minutes=0.05, notify=seen.append, **SMALL)
    notes = [str(event) for event in seen if isinstance(event, Note)]
    assert any("steps instead of 1,000,000: " in note for note in notes)


def test_a_wrong_forecast_is_corrected_also_after_a_kill(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_for: Callable[..., Any] = prepare.plan_for

    def wrong(*rest: Any) -> Any:
        plan = plan_for(*rest)
        plan.forecast = Forecast(5.0, None, passes=1.0, steps=60)
        return plan

    monkeypatch.setattr(prepare, "plan_for", wrong)
    whole, killed, seen = tmp_path / "whole", tmp_path / "killed", list[object]()
    how = {**SMALL, "steps": 60, "evaluations": 6, "device": "cpu"}
    result = nanolm.train(text, out=whole, notify=seen.append, **how)
    forecast = Run(whole).facts()["forecast"]
    assert forecast["corrected"] < forecast["bits_per_byte"] == 5.0
    notes = [str(event) for event in seen if "forecast: " in str(event)]
    corrected = [line.get("forecast_bits_per_byte") for line in lines(whole) if "val_loss" in line]
    assert corrected[0] == 5.0 and corrected[-1] is None
    assert f"{corrected[1]:.3f} bits per byte instead of 5.000" in notes[0] and "33%" in notes[0]
    assert f" {forecast['corrected']:.3f} " in notes[-1]
    assert corrected[-2] == pytest.approx(result.val_bits_per_byte, rel=0.1)
    assert "corrected during training" in (whole / "report.html").read_text()

    with monkeypatch.context() as patch:
        before_step(patch, 35, kill)
        with pytest.raises(Killed):
            nanolm.train(text, out=killed, **how)
    nanolm.train(text, out=killed, **how)
    assert same(killed, whole)
    assert Run(killed).facts()["forecast"] == forecast


def test_the_forecast_is_for_the_whole_validation_text(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language, "LEAST_EVALUATED_TOKENS", 64)
    monkeypatch.setattr(language, "EVALUATION_SHARE", 1e-9)
    forecasts, scores = [], []
    for times in (1, 100_000):
        monkeypatch.setattr(language, "CALIBRATION", times)
        run = tmp_path / str(times)
        nanolm.train(text, out=run, **{**SMALL, "steps": 60, "evaluations": 6, "device": "cpu"})
        evaluated = [line for line in lines(run) if "forecast_bits_per_byte" in line]
        forecasts.append([line["forecast_bits_per_byte"] for line in evaluated])
        scores.append([line["val_bits_per_byte"] for line in evaluated])
    assert scores[0] == scores[1] and forecasts[0][:2] == forecasts[1][:2]
    factor = read_state(run / "last").whole_to_part
    assert factor and factor != 1
    assert forecasts[1][-1] == pytest.approx(factor * forecasts[0][-1], rel=1e-3)


def test_fewer_steps_predict_a_higher_loss() -> None:
    forecast = Forecast(1.5, 100.0, passes=2.0, steps=1_000)
    less = forecast.at(100, 10**6, 10**6)
    assert less.steps == 100
    assert less.passes == pytest.approx(0.2)
    assert less.bits_per_byte > 1.6
