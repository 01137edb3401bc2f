"""How a run begins, the same way for `train` and `finetune`."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import gpt_config

from nanolm.choice import Choice, Chosen
from nanolm.classification.settings import FinetuneSettings
from nanolm.errors import DataError, TooLittleTime
from nanolm.model.build import build_model
from nanolm.pretraining.begin import RunStart
from nanolm.training.settings import Settings, TrainSettings

REQUESTS = [TrainSettings(("embedded:tiny",), steps=5), FinetuneSettings(start_from="none")]
PRINTS = {"corpus": "abc"}


def begin(request: Settings, out: Path, notes: list[str] | None = None) -> RunStart[Any]:
    seen: list[str] = [] if notes is None else notes
    return RunStart(request, out, lambda event: seen.append(str(event)))


@pytest.mark.parametrize("request_", REQUESTS, ids=["train", "finetune"])
def test_a_run_is_recorded_once_and_resumed_with_its_own_settings(
    request_: Settings, tmp_path: Path
) -> None:
    model, notes = build_model(gpt_config()), list[str]()
    resolved = replace(request_, lr=0.1, device="cpu")
    start = begin(request_, tmp_path / "run", notes)
    with start.locked():
        assert start.fresh and start.checkpoint(PRINTS) is None
        start.record(resolved, [Choice("lr", 0.1, "why not")], PRINTS, model)
    assert any("lr: 0.1 (why not)" in note for note in notes)
    assert tomllib.loads(start.run.config_file.read_text())["lr"] == 0.1
    facts = start.run.facts()
    assert facts["parameters"] == model.parameter_count()
    again = begin(request_, tmp_path / "run", notes)
    with again.locked():
        assert not again.fresh and again.settings.lr == 0.1
        assert again.checkpoint(PRINTS) is None  # it was killed before the first
        again.record(resolved, [], {}, model)
        with pytest.raises(DataError, match="the corpus has changed"):
            again.checkpoint({"corpus": "other"})
    assert notes[-1].endswith("starting at step 0")
    assert start.run.facts() == facts
    with pytest.raises(DataError, match=r"--lr: automatic .*, 0\.2 now"):
        begin(replace(request_, lr=0.2), tmp_path / "run")


@pytest.mark.parametrize("request_", REQUESTS, ids=["train", "finetune"])
def test_what_happens_between_the_choice_and_the_lock_is_seen(
    request_: Settings, tmp_path: Path
) -> None:
    model = build_model(gpt_config())
    late = begin(request_, tmp_path / "run")
    first = begin(request_, tmp_path / "run")
    with first.locked():
        first.record(replace(request_, lr=0.1), [], PRINTS, model)
    with late.locked():
        assert not late.fresh and late.settings.lr == 0.1
    facts = first.run.facts()
    first.run.update({**facts, "result": {"stopped": TooLittleTime.stopped}})
    anew = begin(request_, tmp_path / "run")
    with anew.locked():
        assert anew.fresh and anew.settings.lr is None and not anew.run.exists()
    first.run.update({**facts, "result": {"stopped": "steps"}})
    with pytest.raises(DataError, match="is finished"), late.locked():
        pass


def test_only_what_was_left_open_is_chosen() -> None:
    chosen = Chosen(TrainSettings((), lr=0.1))
    chosen.choose("lr", 0.2, "not taken")
    chosen.choose("device", "cpu", "no GPU")
    chosen.fill(lr=0.3, batch=8)
    chosen.set("lr", 0.4, "too high", "lower")
    assert chosen.settings == TrainSettings((), lr=0.4, device="cpu", batch=8)
    assert [str(choice) for choice in chosen.choices] == [
        "device: cpu (no GPU)",
        "lr: lower (too high)",
    ]
