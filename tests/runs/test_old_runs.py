"""Run folders that version 0.1.0 wrote: they load, resume and extend, and keep their split."""

import json
from pathlib import Path

import pytest
from conftest import Cli, unpacked

import nanolm
from nanolm.runs.folder import Run


@pytest.fixture
def old(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return unpacked(request.param, tmp_path)


@pytest.mark.parametrize("old", ["finished", "unfinished"], indirect=True)
def test_a_model_loads(old: Path) -> None:
    assert nanolm.load(old).generate("the", tokens=5, seed=1)


@pytest.mark.parametrize("old", ["classifier"], indirect=True)
def test_a_classifier_loads(old: Path) -> None:
    found = nanolm.load_classifier(old).classify("The food was good.")
    assert set(found) == {"negative", "positive"}


@pytest.mark.parametrize("old", ["unfinished"], indirect=True)
def test_a_run_resumes_with_its_own_split(old: Path, cli: Cli) -> None:
    known = Run(old).facts()["fingerprints"]
    result = cli("train", "--config", old / "config.toml", "--out", old, "--resume", "--json")
    assert result.returncode == 0, result.stderr
    assert f"resuming {old} at step 20" in result.stderr
    facts = Run(old).facts()
    assert facts["fingerprints"] == known and facts["result"]["steps"] == 40
    steps = [json.loads(line)["step"] for line in Run(old).metrics.read_text().splitlines()]
    assert steps == sorted(steps) and steps[-1] == 40


@pytest.mark.parametrize("old", ["finished"], indirect=True)
def test_a_run_extends_with_its_own_split(old: Path, cli: Cli) -> None:
    before = Run(old).facts()
    result = cli("train", "--extend", old, "--steps", 10, "--json")
    assert result.returncode == 0, result.stderr
    after = Run(old).facts()
    assert after["result"]["steps"] == 40
    assert after["fingerprints"] == before["fingerprints"]
    assert Run(old).settings()["val_split"] == "end"


@pytest.mark.parametrize("old", ["finished", "unfinished", "classifier"], indirect=True)
def test_a_run_is_listed_described_and_reported(old: Path, cli: Cli) -> None:
    listed = cli("runs", "--folder", old.parent, "--json")
    assert json.loads(listed.stdout)["run"] == str(old)
    assert cli("info", old, "--json").returncode == 0
    assert cli("report", old).returncode == 0
    assert cli("doctor", old).returncode == 0
