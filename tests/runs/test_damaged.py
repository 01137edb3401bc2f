"""Run folders with damaged, newer or foreign files: nothing that cannot be read is deleted."""

import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from conftest import TINY_MODEL, Cli, write
from faults import before_step, flip, press

import nanolm
from nanolm import files
from nanolm.errors import DataError, ModelError
from nanolm.runs import checkpoint
from nanolm.runs.folder import Run
from nanolm.training.state import State, read_state

CRLF = (b"\n", b"\r\n")
SETTINGS = {"steps": 40, "save_every": 10, **TINY_MODEL}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted at step 31."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, 30, press)
        nanolm.train("embedded:tiny", out=run, **SETTINGS)
    return run


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run", symlinks=True))


def resume(run: Path, notes: list[str]) -> None:
    nanolm.train(
        "embedded:tiny", out=run, notify=lambda event: notes.append(str(event)), **SETTINGS
    )


def contents(folder: Path) -> set[str]:
    """Hashes of all files that do not grow."""
    known = (file for file in folder.rglob("*") if file.is_file())
    return {files.sha256(file) for file in known if file.name not in (".lock", "log.txt")}


def convert(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(*CRLF))


def test_line_ends_of_a_manifest_do_not_matter(run: Path) -> None:
    for manifest in run.glob("checkpoints/*/MANIFEST.json"):
        convert(manifest)
    notes: list[str] = []
    resume(run, notes)
    assert any("resuming" in note and "at step 31" in note for note in notes)


def test_where_no_checkpoint_is_whole_nothing_is_deleted(run: Path, cli: Cli) -> None:
    for file in run.glob("checkpoints/*/state.json"):
        convert(file)
    before = contents(run)
    result = cli("train", "--config", run / "config.toml", "--out", run)
    assert result.returncode == 4, result.stderr
    assert "state.json is damaged" in result.stderr
    assert f"nanolm doctor {run}" in result.stderr and "--out" in result.stderr
    assert before <= contents(run)


def test_a_run_without_its_checkpoints_does_not_start_over(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    before = Run(run).metrics.read_bytes()
    with pytest.raises(ModelError, match="checkpoints"):
        resume(run, [])
    assert Run(run).metrics.read_bytes() == before


def test_a_damaged_checkpoint_is_set_aside(run: Path) -> None:
    weights = run / "checkpoints" / "step-00000031" / "model.safetensors"
    flip(weights, random.Random(1))
    before, notes = contents(run / "checkpoints"), list[str]()
    resume(run, notes)
    aside = run / "checkpoints" / "damaged-step-00000031"
    assert aside.is_dir() and any(str(aside) in note for note in notes)
    assert files.sha256(aside / "model.safetensors") in before


def test_pruning_sets_aside_what_is_damaged(tmp_path: Path) -> None:
    for step in range(1, 5):
        files.commit(tmp_path, f"step-{step:08}", write)
    for step in (1, 2):
        (tmp_path / f"damaged-step-{step:08}").mkdir() if step == 1 else None
        (tmp_path / f"step-{step:08}" / "weights").write_bytes(b"other")
    reports: list[str] = []
    checkpoint.prune(tmp_path, set(), reports.append)
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == [
        *("damaged-step-00000001", "damaged-step-00000001-2", "damaged-step-00000002"),
        *("step-00000003", "step-00000004"),
    ]
    assert "weights is damaged" in reports[0] and "damaged-step-00000001-2" in reports[0]


def test_a_damaged_folder_in_the_way_of_a_commit_is_set_aside(committed: Path) -> None:
    (committed / "weights").write_bytes(b"other")
    files.commit(committed.parent, committed.name, write)
    files.verify(committed)
    aside = committed.with_name(f"damaged-{committed.name}")
    assert (aside / "weights").read_bytes() == b"other"


def test_the_texts_are_compared_before_anything_is_moved(run: Path) -> None:
    (run / "checkpoints" / "step-00000031" / "state.json").write_text("{}")
    facts = Run(run).facts()
    Run(run).update({**facts, "fingerprints": {"corpus": "other"}})
    with pytest.raises(DataError, match="has changed since"):
        resume(run, [])
    assert (run / "checkpoints" / "step-00000031").is_dir()


def test_a_newer_format_is_named(run: Path) -> None:
    step = run / "checkpoints" / "step-00000031"
    reads: list[tuple[Path, Callable[[], object]]] = [(run / "run.json", Run(run).facts)]
    reads += [(step / "state.json", partial(read_state, step))]
    for file, read in reads:
        values = json.loads(file.read_text())
        assert values["format"] == files.FORMAT
        file.write_text(json.dumps(values | {"format": 99}))
        with pytest.raises(DataError, match=f"{file} was written by a newer nanolm .format 99;"):
            read()
        file.write_text(json.dumps(values | {"format": "x"}))
        with pytest.raises(DataError, match="not written by nanolm"):
            read()


def test_a_checkpoint_of_a_newer_version_is_not_taken_for_damaged(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(files, "FORMAT", 3)
        step = files.commit(run / "checkpoints", "step-00000035", write)
    with pytest.raises(DataError, match="written by a newer nanolm"):
        resume(run, [])
    assert step.is_dir()


@pytest.mark.parametrize("change", [{"step": "3"}, {"sums": []}, {"best": 1}, {"unknown": 1}])
def test_a_state_of_wrong_types_is_named(change: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({**json.loads(State().to_json()), **change}))
    with pytest.raises(ModelError, match=r"state\.json cannot be read"):
        read_state(tmp_path)


BROKEN = ["", "[]", '{"format": 9}', '{"request": {}, "fingerprints": {}, "parameters": "x"}']
BROKEN += ['{"request": {}, "fingerprints": {}, "result": {"steps": []}}', "[" * 100_000]


def test_a_broken_run_does_not_hide_the_others(run: Path, cli: Cli) -> None:
    for number, text in enumerate(BROKEN):
        other = shutil.copytree(run, run.parent / f"broken-{number}", symlinks=True)
        (other / "run.json").write_text(text)
    result = cli("runs", "--folder", run.parent, "--json")
    assert result.returncode == 0, result.stderr
    assert [json.loads(line)["run"] for line in result.stdout.splitlines()] == [str(run)]
    for number in range(len(BROKEN)):
        assert f"broken-{number} skipped: " in result.stderr
        assert f"broken-{number}/run.json" in result.stderr
