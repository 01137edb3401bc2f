import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from conftest import Cli
from faults import before_step, flip, press
from journeys import journeys

import nanolm
from nanolm.bench.health import health
from nanolm.errors import ModelError, UsageError
from nanolm.runs.doctor import examine


def test_the_machine(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = cli("doctor", environment={"COLUMNS": "60"})
    assert shown.returncode == 0
    assert max(map(len, shown.stdout.splitlines())) <= 60
    found = json.loads(cli("doctor", "--json").stdout)
    assert found.keys() == health().keys()
    assert (found["nanolm"], found["torch"]) == (nanolm.__version__, torch.__version__)
    assert f" of {os.cpu_count()} cores" in found["processor"]
    monkeypatch.setenv("OMP_NUM_THREADS", "97")
    assert health()["processor"] == found["processor"]
    assert "OMP_NUM_THREADS=97" in health()["threads"]
    for title in found:
        assert f"\n{title} " in f"\n{shown.stdout}"


def test_an_unusable_cache_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOLM_CACHE", str(tmp_path / "file" / "x"))
    assert "NANOLM_CACHE" in health()["cache"] and str(tmp_path / "file" / "x") in health()["cache"]


def test_an_intact_run(trained: Path, cli: Cli) -> None:
    found = examine(trained)
    assert found.sound()
    assert (found.state, found.to_go_on) == ("finished", None)
    assert found.to_use == (trained / "best").resolve().name
    shown = cli("doctor", trained)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "best" in shown.stdout


def test_a_damaged_checkpoint_is_named_and_another_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    run = tmp_path / "run"
    before_step(monkeypatch, 20, press)
    journeys(tmp_path)["training"].go(run)
    before, newest = [entry.name for entry in examine(run).checkpoints][-2:]
    assert examine(run).to_go_on == newest
    flip(run / "last" / "optimizer.safetensors", random.Random(1))
    (run / "checkpoints" / ".tmp-step-00000021-1").mkdir()
    found = examine(run)
    assert not found.sound()
    assert (found.state, found.to_go_on) == ("unfinished", before)
    shown = cli("doctor", "run")
    assert shown.returncode == 4
    assert "optimizer.safetensors is damaged" in " ".join(shown.stdout.split())
    assert f"resumes from    {before}" in shown.stdout
    assert ".tmp-step-00000021-1" in shown.stdout
    assert json.loads(cli("doctor", "run", "--json").stdout)["to_go_on"] == before


def test_a_classifier_and_broken_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    journeys(tmp_path)["fine-tuning"].go(run)
    assert examine(run).sound()
    assert examine(run).to_use == "final"
    (run / "run.json").write_text("{")
    assert "run.json" in examine(run).problems[0]
    assert not examine(run).sound()


def test_a_model_folder(trained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree((trained / "best").resolve(), tmp_path / "model"))
    assert examine(folder).sound()
    flip(folder / "model.safetensors", random.Random(1))
    assert "model.safetensors is damaged" in examine(folder).checkpoints[0].problem
    (folder / "MANIFEST.json").unlink()  # other folders have none, so nothing can be verified
    assert examine(folder).sound()
    with pytest.raises(ModelError, match=str(tmp_path)):
        examine(tmp_path)
    with pytest.raises(UsageError, match="none"):
        examine(tmp_path / "none")
