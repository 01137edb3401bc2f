"""`nanolm runs` and `nanolm report` on the command line."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from conftest import Cli, Terminal


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """Two runs with different settings."""
    for name in ("one", "two"):
        shutil.copytree(trained, tmp_path / "runs" / name, symlinks=True)
    config = tmp_path / "runs/two/config.toml"
    config.write_text(config.read_text().replace("steps = 60", "steps = 61"))
    return tmp_path / "runs"


def test_the_table(runs: Path, cli: Cli) -> None:
    shown = cli("runs", "--sort", "run")
    head, *rows = shown.stdout.splitlines()
    assert head.split() == ["run", "corpus", "size", "steps", "bits/byte", "minutes", "state"]
    assert [row.split()[0] for row in rows] == ["runs/one", "runs/two"]
    assert rows[0].split()[-1] == "finished"
    found = [json.loads(line) for line in cli("runs", "--json").stdout.splitlines()]
    assert {row["run"] for row in found} == {"runs/one", "runs/two"}
    assert found[0]["bits_per_byte"] == pytest.approx(float(rows[0].split()[4]), abs=1e-3)
    wrong = cli("runs", "--sort", "size-of-hat")
    assert wrong.returncode == 2
    assert "--sort size-of-hat: choose from started" in wrong.stderr


def test_stopped_early_is_not_finished(runs: Path, cli: Cli) -> None:
    file = runs / "one/run.json"
    facts = json.loads(file.read_text())
    facts["result"] |= {"stopped": "enough", "best_step": 30}
    file.write_text(json.dumps(facts))
    rows = {line.split()[0]: line for line in cli("runs").stdout.splitlines()}
    assert rows["runs/one"].endswith("stopped early")
    assert rows["runs/two"].endswith("finished")
    assert cli("report", "runs/one").returncode == 0
    page = (runs / "one/report.html").read_text()
    assert re.search(r"stopped early: .* step 30 \(60 steps", page)
    assert "finished" not in page


def test_no_runs_yet(cli: Cli) -> None:
    shown = cli("runs")
    assert shown.returncode == 0
    assert "no runs in runs" in shown.stderr


def test_side_by_side(runs: Path, cli: Cli) -> None:
    shown = cli("runs", "compare", "runs/one", "runs/two")
    lines = {line.split()[0]: line.split()[1:] for line in shown.stdout.splitlines()[1:]}
    assert lines["--steps"] == ["60", "61"]
    assert lines["parameters"][0] == lines["parameters"][1]
    assert "--dim" not in lines
    assert "two runs" in cli("runs", "compare", "runs/one").stderr


def test_removing_asks_first(runs: Path, cli: Cli) -> None:
    refused = cli("runs", "rm", "runs/one")
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert (runs / "one").exists()
    assert "nowhere is not a run" in cli("runs", "rm", "runs/nowhere", "--yes").stderr
    (runs / "folder").mkdir()
    assert cli("runs", "rm", "runs/folder", "--yes").returncode == 3
    assert (runs / "folder").exists()
    assert cli("runs", "rm", "runs/one", "--yes").returncode == 0
    assert not (runs / "one").exists()
    assert (runs / "two").exists()


def test_a_run_in_use_is_not_removed(runs: Path, cli: Cli) -> None:
    from nanolm.runs.folder import Run

    with Run(runs / "one").locked():
        shown = cli("runs", "rm", "runs/one", "--yes")
    assert shown.returncode == 3
    assert "runs/one" in shown.stderr and "another process" in shown.stderr
    assert (runs / "one" / "best").exists()


def test_reports(runs: Path, cli: Cli, tmp_path: Path) -> None:
    (runs / "one/report.html").unlink()
    shown = cli("report", "runs/one")
    assert "wrote runs/one/report.html" in shown.stderr
    assert (runs / "one/report.html").stat().st_size < 300_000
    assert cli("report", "runs/one", "runs/two").returncode == 0
    assert "2 runs compared" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "runs/nowhere is not a run" in cli("report", "runs/nowhere").stderr
    facts = json.loads((runs / "two/run.json").read_text())
    (runs / "two/run.json").write_text(json.dumps(facts | {"choices": 7}))
    broken = cli("report", "runs/two")
    assert broken.returncode == 3
    assert "run.json" in broken.stderr


def test_reports_of_sweeps_and_comparisons(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "films-compare"
    folder.mkdir()
    assert "films-compare is not a run" in cli("report", "films-compare").stderr
    state = {"format": 2, "asked": {"settings": {"data": ["<films>.tsv"]}}}
    (folder / "compare.json").write_text(json.dumps(state))
    assert "no model has been trained yet" in cli("report", "films-compare").stderr
    result = {"accuracy": 0.5, "parameters": 7, "seconds": 1.0}  # as version 0.2 wrote it
    rows = {"majority": {"1": result}, "bag": {"1": {**result, "accuracy": 0.75}}}
    (folder / "compare.json").write_text(json.dumps({**state, "found": rows}))
    assert cli("report", "films-compare").returncode == 0
    page = (folder / "report.html").read_text()
    assert "Best of 2: bag of words, linear. Validation accuracy: 75.0%." in page
    assert "not finished" in page and "&lt;films&gt;.tsv" in page and "<films>" not in page
    best = {"val_bits_per_byte": 2.25, "seconds": 5.0, "stopped": "minutes"}
    trials = [
        {"number": 1, "values": {"family": "a"}, "results": [{**best, "val_bits_per_byte": 2.5}]},
        {"number": 2, "values": {"family": "b"}, "results": [best]},
    ]
    sweep = {"format": 2, "asked": {}, "budgets": [5.0], "trials": trials}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    assert cli("report", ".", "--out", "sweep.html").returncode == 0
    page = (tmp_path / "sweep.html").read_text()
    assert "Best of 2: family=b. Validation bits per byte: 2.250." in page


def test_in_the_terminal(runs: Path, terminal: Terminal) -> None:
    shown = terminal("report", "runs/one", "--terminal", COLUMNS="50")
    lines = shown.splitlines()
    assert lines[0] == "runs/one: loss by step"
    assert max(map(len, lines)) <= 50
    assert "● validation" in shown


def test_runs_of_another_version(cli: Cli, tmp_path: Path) -> None:
    """Runs from version 0.1.0."""
    for archive in (Path(__file__).parents[1] / "runs/v0_1_0").glob("*.tar.xz"):
        with tarfile.open(archive) as kept:
            kept.extractall(tmp_path / "runs", filter="data")
    rows = [json.loads(line) for line in cli("runs", "--json").stdout.splitlines()]
    states = {row["run"]: row["state"] for row in rows}
    assert states == {
        "runs/classifier": "finished",
        "runs/finished": "finished",
        "runs/unfinished": "stopped",
    }
    for run in states:
        shown = cli("info", run)
        assert shown.returncode == 0, shown.stderr
        assert cli("report", run).returncode == 0


LIGHT = {
    "runs": ["runs"],
    "info": ["info", "runs/one"],
    "report": ["report", "runs/one"],
    "compare": ["runs", "compare", "runs/one", "runs/two"],
}


@pytest.mark.parametrize("command", LIGHT)
def test_listing_runs_does_not_import_torch(command: str, runs: Path, tmp_path: Path) -> None:
    """In a separate process, since those of `cli` have everything imported. It takes at most half
    as long as importing torch; a busy machine can make one of them slow."""
    for _ in range(3):
        loaded, seconds = cpu_seconds(RUN, *LIGHT[command], folder=tmp_path)
        assert loaded == "False"
        _, limit = cpu_seconds("import torch")
        if seconds < limit / 2:
            return
    pytest.fail(f"{seconds} s, and importing torch {limit} s")


RUN = "from nanolm.cli.main import run; assert run() == 0"


def cpu_seconds(code: str, *words: str, folder: Path | None = None) -> tuple[str, float]:
    """Whether the code imported torch, and its seconds of CPU time in a new process."""
    code += (
        "\nimport resource, sys\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print('torch' in sys.modules, used.ru_utime + used.ru_stime)"
    )
    given = [sys.executable, "-c", code, *words]
    shown = subprocess.run(given, cwd=folder, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    loaded, seconds = shown.stdout.split()[-2:]
    return loaded, float(seconds)
