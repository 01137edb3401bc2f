import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nanolm
from nanolm.errors import DataError, ModelError, UsageError
from nanolm.runs.folder import Run, append, find_model, runs_by_age


def test_a_run_in_use_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path / "x")
    refused = pytest.raises(DataError, match=f"another process \\({os.getpid()}\\)")
    with run.locked(), refused, Run(tmp_path / "x").locked():
        pass
    with run.locked():  # free again
        pass


def test_what_failed_before_there_was_a_run_leaves_no_folder(tmp_path: Path) -> None:
    def interrupted(run: Run, begun: bool = False) -> None:
        with run.locked():
            append(run, run.log.name, "the plan\n")
            if begun:
                run.begin({}, {"request": {}, "fingerprints": {}})
            raise KeyboardInterrupt

    (tmp_path / "there").mkdir()
    for name, begun in (("new", False), ("there", False), ("begun", True)):
        with pytest.raises(KeyboardInterrupt):
            interrupted(Run(tmp_path / name), begun)
    assert {path.name for path in tmp_path.iterdir()} == {"there", "begun"}


def test_a_killed_process_does_not_hold_the_run(tmp_path: Path) -> None:
    code = (
        "import os, pathlib; from nanolm.runs.folder import Run\n"
        f"with Run(pathlib.Path({str(tmp_path)!r})).locked(): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    with Run(tmp_path).locked():
        pass


def test_files_are_cut_back_and_never_padded(tmp_path: Path) -> None:
    run = Run(tmp_path)
    append(run, run.metrics.name, "one\n")
    lengths = run.lengths()
    append(run, run.metrics.name, "two\n")
    append(run, run.samples.name, "later")
    run.cut_back(lengths)
    assert run.metrics.read_text() == "one\n"
    assert run.samples.read_text() == ""
    run.cut_back({"metrics.jsonl": 100})
    assert run.metrics.read_text() == "one\n"
    run.cut_back({})  # killed before the first checkpoint
    assert run.metrics.read_text() == ""


def test_what_a_run_means(trained: Path, tmp_path: Path) -> None:
    best = (trained / "best").resolve()
    assert find_model(trained, pytest.fail) == best
    assert find_model(best, pytest.fail) == best
    copy = shutil.copytree(best, tmp_path / "elsewhere")
    assert find_model(copy, pytest.fail) == copy
    with pytest.raises(UsageError, match="does not exist"):
        find_model(tmp_path / "none", pytest.fail)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json and no valid checkpoint"):
        find_model(tmp_path / "empty", pytest.fail)


def test_a_damaged_best_gives_way_to_another(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run", symlinks=True)
    best = (run / "best").resolve()
    with (best / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\x55")
    reports: list[str] = []
    found = find_model(run, reports.append)
    assert found != best
    with pytest.warns(UserWarning, match="damaged"):
        nanolm.load(run)
    assert "model.safetensors is damaged" in reports[0]
    with pytest.raises(ModelError, match="damaged"):
        find_model(best, pytest.fail)


def test_the_newest_run(trained: Path, tmp_path: Path) -> None:
    assert runs_by_age(tmp_path / "runs") == []
    for name, age in (("old", 1000), ("new", 2000), ("older", 500)):
        run = shutil.copytree(trained, tmp_path / "runs" / name, symlinks=True)
        for folder in (run / "checkpoints").iterdir():
            os.utime(folder, (age, age))
    (tmp_path / "runs" / "unfinished").mkdir()
    assert [run.name for run in runs_by_age(tmp_path / "runs")] == ["new", "old", "older"]


@pytest.mark.parametrize("contents", ["", "{", "[]", "{}", '{"request": 1, "fingerprints": {}}'])
def test_a_damaged_run_json_is_named(contents: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(contents)
    with pytest.raises(DataError, match=r"run\.json (cannot be read|was not written by nanolm)"):
        Run(tmp_path).finished()
