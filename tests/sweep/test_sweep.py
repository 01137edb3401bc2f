"""Sweeps: the points drawn, which trials advance, and no repeated work after a kill."""

import json
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import TINY_MODEL

import nanolm
from nanolm.errors import DataError, UsageError
from nanolm.report.sweep import Dot, draw_sweep, place_values
from nanolm.runs.folder import Run
from nanolm.sweep.halving import affordable, cost, longest, rungs
from nanolm.sweep.page import sweep_page
from nanolm.sweep.result import SweepState, SweepTrial, combinations, in_words, ranked
from nanolm.sweep.space import Space, around, draw, parse, settings_at
from nanolm.sweep.sweep import Sweep, SweepRequest, TrialEnded, sweep
from nanolm.training.events import Event, Progressed
from nanolm.training.interrupt import StopRequest
from nanolm.training.settings import TrainSettings


class Stop(Exception):
    """Stands for a kill."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "cats.txt"
    file.write_text("".join(f"The {n} cats sat on {n * 7 % 13} mats.\n" for n in range(900)))
    return file


def request(text: Path, over: str, trials: int, minutes: float, **more: Any) -> SweepRequest:
    settings = TrainSettings((str(text),), tokenizer="char", minutes=minutes, **TINY_MODEL)
    return SweepRequest(replace(settings, **more), over, trials)


@pytest.fixture(scope="module")
def swept(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A sweep that was stopped after its first trial, killed in the second, killed again before
    that was in sweep.json, killed after the last trial, and then left to finish."""
    folder = tmp_path_factory.mktemp("sweep") / "out"
    asked = request(text, "lr=0.0001:0.001:0.02", 3, 0.1)
    told: list[tuple[int, int]] = []
    seconds = 0.0

    def go(at: object = None, stop: bool = False) -> Any:
        """Run until the event `at`."""
        nonlocal seconds

        def watch(event: Event | TrialEnded) -> None:
            here: object = type(event)
            if isinstance(event, TrialEnded):
                told.append((event.round, event.trial.number))
                here = (event.round, event.number)
            if here == at and stop:
                signal.raise_signal(signal.SIGINT)
            elif here == at:
                raise Stop

        start = time.monotonic()
        try:
            return sweep(asked, folder, watch)
        except Stop:
            return json.loads((folder / "sweep.json").read_text())
        finally:
            seconds += time.monotonic() - start

    found: dict[str, Any] = {"folder": folder, "told": told, "asked": asked}
    found["stopped"] = go((1, 1), stop=True)
    go(Progressed)
    found["unfinished"] = Run(folder / "trial-02").facts()
    state = go((1, 2))
    found["second"] = state["trials"][1].pop("results")
    (folder / "sweep.json").write_text(json.dumps(state))
    found["killed"] = go((2, 1))
    found["outcome"] = go()
    found["state"] = json.loads((folder / "sweep.json").read_text())
    return found | {"seconds": seconds}


def test_names_get_values_around_the_plan_or_those_given() -> None:
    assert parse("lr, weight-decay ,qk_norm=true:no,dropout=0:0.1:0.1") == (
        {"lr": [], "weight_decay": [], "qk_norm": [True, False], "dropout": [0.0, 0.1]},
        [],
    )
    settings = TrainSettings(
        ("x",), lr=0.003, batch=1, layers=1, seed=0, dropout=0.15, optimizer="adamw", context=64
    )
    assert around(settings, "lr") == [0.00075, 0.0015, 0.003, 0.006, 0.012]
    assert around(settings, "batch") == [1, 2]
    assert around(settings, "layers") == [1, 2]
    assert around(settings, "seed") == [0, 1, 2]
    assert around(settings, "dropout") == [0.0, 0.1, 0.15, 0.2, 0.3]
    assert around(settings, "optimizer") == ["adamw", "muon"]
    with pytest.raises(UsageError, match="--over heads: this model has no such setting"):
        around(settings, "heads")


def test_what_is_wrong_is_told_together(text: Path) -> None:
    asked = request(text, "lrr,val,norm,dropout=x:2,lr=0.1", 0, 1, lr=0.2, steps=5)
    with pytest.raises(UsageError) as caught:
        asked.check()
    for line in (
        "--over lrr: no such setting; did you mean lr?",
        "--over val: omit it; trials would not be comparable",
        "--over norm=ONE:ANOTHER",
        "--over dropout: 'x' is not a number",
        "--dropout 2.0: must be at least 0 and below 1",
        "--lr 0.2 and --over lr=: give only one of them",
        "--steps 5: a sweep is limited by time; use --minutes",
        "--trials 0: must be from 1 to 1000",
    ):
        assert line in str(caught.value)
    with pytest.raises(UsageError, match="vary: --over lr"):
        SweepRequest(TrainSettings(("x",)), "").check()
    with pytest.raises(UsageError, match="-: a pipe can be read only once"):
        SweepRequest(TrainSettings(("-",)), "lr").check()


def test_points_are_drawn_once_each_and_the_own_is_among_them() -> None:
    values: Space = {"lr": [1, 2, 3, 4, 5], "norm": ["rms", "layer"], "dropout": [0.0, 0.1]}
    own = {"lr": 3, "norm": "rms", "dropout": 0.0}
    everything = draw(values, own, 27, 1)
    assert len({tuple(point.values()) for point in everything}) == len(everything) == 20
    few = draw(values, own, 9, 1)
    assert few[0] == everything[0] == own
    assert len({tuple(point.values()) for point in few}) == 9
    assert few == draw(values, own, 9, 1) != draw(values, own, 9, 2)


def test_every_round_costs_the_same() -> None:
    assert [rungs(count) for count in (1, 3, 9, 27)] == [[1], [3, 1], [9, 3, 1], [27, 9, 3, 1]]
    assert [cost(count) for count in (1, 3, 9, 27)] == [1, 6, 27, 108]
    assert rungs(20) == [20, 6, 2, 1]
    seconds = (59, 60, 269, 270, 1079, 1080)
    assert [affordable(each, 99, by_value=False) for each in seconds] == [1, 3, 3, 9, 9, 27]
    assert longest(270, 9) == pytest.approx(10 * (0.36 + 0.6 * 3 + 9))


def test_settings_that_go_with_others_are_chosen_anew() -> None:
    asked = TrainSettings(("x",), minutes=1, hidden=100)
    base = replace(asked, lr=0.003, optimizer="muon", batch=8, context=64, dim=48, heads=4)
    base = replace(base, layers=2, kv_heads=4, workers=2, threads=2, steps=100)

    def settings(**values: Any) -> TrainSettings:
        return settings_at(values, base, asked, 30.0)

    assert settings(lr=0.003) == replace(base, minutes=0.5)
    assert settings(dim=96) == replace(base, minutes=0.5, dim=96, lr=None)
    assert settings(optimizer="adamw", lr=0.1).lr == 0.1
    longer = settings(context=128)
    assert (longer.batch, longer.steps) == (4, 100)
    assert settings(context=128, batch=8).batch == 8
    assert settings(optimizer="adamw", lr=0.003).lr == 0.003
    assert settings(batch=4).steps == 200
    assert settings(dropout=0.1).workers == 1
    recurrent = settings(family="lstm")
    assert (recurrent.heads, recurrent.kv_heads, recurrent.optimizer) == (None, None, None)
    grown = replace(base, early_context=32)
    for name, value in {"context": 48, "preset": "nano", "family": "lstm"}.items():
        point = settings_at({name: value}, grown, asked, 30.0)
        assert point.early_context is None and not point.model_problems()
    small = settings(preset="nano")
    assert (small.dim, small.batch, small.kv_heads, small.hidden) == (48, 16, None, 100)


class Pretended(Sweep):
    """Trials with known results that take no time."""

    def attempt(self, trial: SweepTrial, number: int) -> bool:
        if trial.values["bits"] is None:
            trial.error = "it diverged"
        else:
            trial.results.append({"val_bits_per_byte": trial.values["bits"] - number})
        return True


def test_the_best_third_goes_on(tmp_path: Path) -> None:
    bits = [9.0, 4.0, None, 7.0, 5.0, 3.0, None, 8.0, 6.0]
    trials = [SweepTrial(number, {"bits": found}) for number, found in enumerate(bits, start=1)]
    told: list[tuple[int, int, int]] = []

    def watch(event: Event | TrialEnded) -> None:
        assert isinstance(event, TrialEnded)
        told.append((event.round, event.rounds, event.trial.number))

    asked = TrainSettings(("x",), minutes=4.5)
    state = SweepState({}, base={}, trials=trials)
    work = Pretended(tmp_path / "sweep.json", state, asked, watch, time.monotonic())
    assert work.all_rounds(StopRequest())
    assert told[:9] == [(1, 3, number) for number in range(1, 10)]
    assert told[9:] == [(2, 3, 6), (2, 3, 2), (2, 3, 5), (3, 3, 6)]
    # No time was spent, so each round divides all of it again.
    assert state.budgets == pytest.approx([270 / 27, 270 / 6, 270], rel=0.01)


SEEDS = {  # bits per byte by value, with three seeds each
    "learned": (2.0, 2.4, 2.5),  # has the best trial of all
    "rope": (2.2, 2.1, 2.3),
    "none": (2.9, 2.8, 2.7),
    "sinusoidal": (3.0, 3.0, None),  # diverged once
}


class Quick(Sweep):
    """Trials that converge before their time is up."""

    why = "steps"

    def attempt(self, trial: SweepTrial, number: int) -> bool:
        bits = SEEDS[trial.values["positions"]][trial.values["seed"] - 1]
        if bits is None:
            trial.error = "it diverged"
        else:
            trial.results.append({"val_bits_per_byte": bits, "seconds": 1.0, "stopped": self.why})
        return True


def seeded(folder: Path, minutes: float, tried: list[str], work: type[Quick] = Quick) -> Quick:
    trials = [
        SweepTrial(3 * number + seed, {"positions": name, "seed": seed})
        for number, name in enumerate(tried)
        for seed in (1, 2, 3)
    ]
    waiting = [{"positions": name} for name in SEEDS if name not in tried]
    state = SweepState({}, base={}, trials=trials, waiting=waiting)
    asked = TrainSettings(("x",), minutes=minutes)
    return work(folder / "sweep.json", state, asked, lambda event: None, time.monotonic())


def test_the_mean_over_seeds_decides(tmp_path: Path) -> None:
    work = seeded(tmp_path, 10, list(SEEDS))
    assert work.all_rounds(StopRequest())
    trials = ranked(work.state.trials)
    found = combinations(trials)
    assert [each.values["positions"] for each in found] == ["rope", "learned", "none", "sinusoidal"]
    assert trials[0].values == {"positions": "rope", "seed": 2}
    assert found[0].rounds()[0] == pytest.approx((2.2, 0.1))
    assert found[1].score() == pytest.approx(2.3)
    work.save()
    page = sweep_page(tmp_path)
    best = "Best of 3: positions=rope. Validation bits per byte: 2.200 ± 0.100 over 3 seeds."
    assert best in page
    data = re.findall(r'<script type="application/json">(.*?)<', page)
    rounds, positions, _ = map(json.loads, data)  # and one by seed
    assert rounds["columns"][1:3] == ["round", "validation bits per byte"]
    assert [mark[2:] for mark in rounds["series"][0][1]] == [[1, 2.2, 0.1], [2, 2.2, 0.1]]
    best_trial = next(marks for name, marks in positions["series"] if name == "best")
    assert [mark[2:] for mark in best_trial] == [["rope", "2", 2.1]]
    assert "it diverged" in page
    # All seeds of the best advanced, and no others.
    assert [len(trial.results) for trial in trials[:4]] == [2, 2, 2, 1]


def test_what_there_was_no_time_for_is_tried_when_others_end_early(tmp_path: Path) -> None:
    work = seeded(tmp_path, 10, ["none"])
    assert work.all_rounds(StopRequest())
    assert work.state.waiting == []
    assert [len(each.trials) for each in combinations(work.state.trials)] == [3, 3, 3, 3]
    assert ranked(work.state.trials)[0].values["positions"] == "rope"

    class Slow(Quick):
        why = "minutes"  # then later rounds need the time

    busy = seeded(tmp_path, 0.15, ["none"], Slow)  # three more trials, and the later rounds
    assert busy.all_rounds(StopRequest())
    assert [each["positions"] for each in busy.state.waiting] == ["learned", "rope", "sinusoidal"]


def test_a_grid_of_values_is_tried_as_a_whole_if_that_can_be() -> None:
    assert affordable(85 / 3, 2, by_value=True) == 2  # two combinations, three seeds, 1.5 minutes
    assert affordable(85, 6, by_value=True) == 6
    assert affordable(85, 6, by_value=False) == 3
    assert affordable(20, 6, by_value=True) == 3
    assert affordable(2, 6, by_value=True) == 1
    assert in_words([{"lr": 0.1, "tied": True}, {"lr": 2.0}], 1) == "lr=0.1 tied=true; and 1 more"


def test_the_best_is_a_run_as_any_other(swept: dict[str, Any]) -> None:
    outcome, folder = swept["outcome"], swept["folder"]
    assert [len(trial.results) for trial in outcome.trials] == [2, 1, 1]
    scores = [trial.score() for trial in outcome.trials]
    assert scores == sorted(scores)
    best = outcome.trials[0]
    assert best.values == {"lr": 0.02} and best.bits()[1] < best.bits()[0]
    assert outcome.run == str(folder / "best") and outcome.val_bits_per_byte == best.bits()[1]
    assert Run(folder / "best").facts()["result"] == {**best.results[1], "run": outcome.run}
    assert not (folder / f"trial-{best.number:02}").exists()
    assert nanolm.load(outcome.run).generate("The ", tokens=5)
    page = sweep_page(folder)
    assert f"Best of 3: lr=0.02. Validation bits per byte: {best.bits()[1]:.3f}." in page
    assert re.search(r'class="mark".*\n.*>uniform guess<', page)


def test_nothing_is_done_twice_after_a_kill(swept: dict[str, Any]) -> None:
    stopped, outcome = swept["stopped"], swept["outcome"]
    assert stopped.run is None
    assert [len(trial.results) for trial in stopped.trials] == [1, 0, 0]
    assert "result" not in swept["unfinished"]
    # The second trial's result was missing from sweep.json and recovered from its run.
    best = outcome.trials[0].number
    assert swept["told"] == [(1, 1), (1, 2), (1, 2), (1, 3), (2, best)]
    final = {trial["number"]: trial["results"] for trial in swept["state"]["trials"]}
    assert final[1][:1] == stopped.trials[0].results
    assert final[2][:1] == swept["second"]
    assert Run(swept["folder"] / "trial-02").facts()["started"] == swept["unfinished"]["started"]
    assert list(final.values()) == [trial["results"] for trial in swept["killed"]["trials"]]
    assert swept["state"]["budgets"] == swept["killed"]["budgets"]


def test_time_is_kept(swept: dict[str, Any]) -> None:
    # A stopped trial counts in full, whenever it was stopped.
    assert 4 < swept["state"]["seconds"] < 9
    assert swept["seconds"] < 9


def test_a_finished_sweep_is_not_written_over(swept: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"nanolm sweep` can resume with these settings.* --out"):
        sweep(swept["asked"], swept["folder"])


def test_a_trial_that_cannot_be_is_a_row(text: Path, tmp_path: Path) -> None:
    outcome = sweep(request(text, "kv_heads=1:3", 2, 0.03), tmp_path / "out")
    assert [trial.values for trial in outcome.trials] == [{"kv_heads": 1}, {"kv_heads": 3}]
    assert [len(trial.results) for trial in outcome.trials] == [2, 0]
    assert "--heads 2 is not a multiple of --kv-heads 3" in (outcome.trials[1].error or "")
    with pytest.raises(UsageError, match="--heads 2 is not a multiple of --kv-heads 3"):
        sweep(request(text, "kv_heads=3:5", 2, 0.03), tmp_path / "none")


def test_the_picture_is_xml_whatever_the_names_are() -> None:
    values = [
        {"tokenizer": '"><script>\x07', "lr": 0.001, "qk_norm": True},
        {"tokenizer": "char", "lr": 0.1, "qk_norm": False},
    ]
    dots = [Dot(each, 9.0 - 8 * n, n == 1, n == 1) for n, each in enumerate(values)]
    picture = draw_sweep(dots, "<b>&").svg
    assert "clipped at 2" in picture
    root = ElementTree.fromstring(picture)
    space = "{http://www.w3.org/2000/svg}"
    assert len(list(root.iter(f"{space}circle"))) == 3 + 1 + 3 * (2 + 1)
    assert "<script" not in picture
    assert {"char", "0.001", "0.1", "true", "qk norm"} <= {
        each.text for each in root.iter(f"{space}text")
    }


def test_values_far_apart_are_spread_by_their_logarithm() -> None:
    assert place_values([10.0, 0.1, 1.0], 300)[0] == [1.0, -1.0, 0.0]
    assert place_values([0.3, 0.1, 0.2], 300)[0] == [0.3, 0.1, 0.2]
    assert place_values([0.0, 10.0, 0.1], 300)[0] == [0.0, 2.0, 1.0]
    crowded = place_values([1 + n / 1000 for n in range(100)], 300)[1]
    assert 2 <= len([text for _, text in crowded.ticks if text]) < 15
