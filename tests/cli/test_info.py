import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import Cli

import nanolm
from nanolm.errors import ModelError
from nanolm.runs.info import TESTED_READER, describe


def test_a_run_is_described(cli: Cli, trained: Path) -> None:
    shown = cli("info", trained)
    assert shown.returncode == 0, shown.stderr
    assert shown.stderr == ""
    for part in (
        "qwen3, readable by nanolm and transformers",
        "positions rope",
        "60 steps of 4 x 16",
    ):
        assert part in " ".join(shown.stdout.split())
    assert max(map(len, shown.stdout.splitlines())) <= 100
    for place in ("", "best", "last", "checkpoints/step-00000060"):
        found = json.loads(cli("info", trained / place, "--json").stdout)
        assert found["parameters"] == nanolm.load(trained).model.parameter_count()
        assert sum(found["parts"].values()) == found["parameters"]
        assert found["architecture"]["heads"] == 2
        assert found["history"]["corpus"] == ["embedded:tiny"]
        assert found["readers"] == ["nanolm", TESTED_READER.format("AutoModelForCausalLM")]


def test_a_format_only_nanolm_reads(cli: Cli, corpus: Path, tmp_path: Path) -> None:
    nanolm.train(corpus, out=tmp_path / "run", family="rnn", layers=1, dim=8, steps=2)
    found = json.loads(cli("info", "run", "--json").stdout)
    assert (found["model_type"], found["readers"]) == ("nanolm", ["nanolm"])
    assert "recurrent" in found["why_only"]
    assert len(found["parts"]) == 3 and "token embedding" in found["parts"]


@pytest.mark.parametrize("what", ["nothing", "empty"])
def test_not_a_model(what: str, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    shown = cli("info", what)
    assert shown.returncode == (2 if what == "nothing" else 4)
    assert shown.stderr.startswith("error: ")


@pytest.mark.parametrize("name", ["state.json", "run.json", "config.toml", "MANIFEST.json"])
@pytest.mark.parametrize(
    "contents", [None, "[" * 100_000, '{"step": 1e999}', '{"files": {"a": 5}, "result": 5}']
)
def test_broken_files_beside_the_model(
    name: str, contents: str | None, trained: Path, tmp_path: Path
) -> None:
    """A run folder from elsewhere, with a pipe or garbage in place of a file."""
    run = tmp_path / "run"
    shutil.copytree(trained, run, symlinks=True)
    best = run / "checkpoints/step-00000060"
    if name != "MANIFEST.json":
        (best / "MANIFEST.json").unlink()  # so the other files are not verified
    file = (run if name in ("run.json", "config.toml") else best) / name
    file.unlink()
    if contents is None:
        os.mkfifo(file)
    else:
        file.write_text(contents)
    for place in (run, best):
        with contextlib.suppress(ModelError):
            assert describe(str(place), note=lambda text: None).parameters > 0
    (run / "best").unlink()
    os.mkfifo(run / "best")
    with contextlib.suppress(ModelError):
        describe(str(run), note=lambda text: None)


def test_the_documented_reader_is_the_tested_one() -> None:
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text()
    version = TESTED_READER.split()[1]
    assert f"\ntransformers=={version}." in constraints
