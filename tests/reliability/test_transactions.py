"""Changes of several files: killed before any of them, it is the old state or the new one."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_MODEL, Cli, Tally, weights
from faults import killed_at
from journeys import lines

import nanolm
from nanolm.cli.runs import command
from nanolm.errors import DataError
from nanolm.files import verify
from nanolm.pretraining.begin import with_absolute_paths
from nanolm.pretraining.extend import extend
from nanolm.pretraining.train import TrainResult
from nanolm.runs import journal
from nanolm.runs.folder import Run, find_model
from nanolm.sweep.result import SweepState, SweepTrial
from nanolm.sweep.sweep import SweepRequest, sweep
from nanolm.training.settings import TrainSettings

SETTINGS: dict[str, Any] = {**TINY_MODEL, "threads": 1, "device": "cpu"}
STEPS, MORE = 30, 10
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    nanolm.train("embedded:tiny", out=run, steps=STEPS, **SETTINGS)
    return run


@pytest.fixture(scope="module")
def extended(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As it is when nothing disturbs it."""
    run = copied(finished, tmp_path_factory.mktemp("extended"))
    assert extend(run, {"steps": MORE}).steps == STEPS + MORE
    return run


def copied(run: Path, parent: Path) -> Path:
    return Path(shutil.copytree(run, parent / run.name, symlinks=True))


def kills(
    points: Iterable[int], run: Path, parent: Path, action: Callable[[Path], object]
) -> Iterable[Path]:
    """Copies of `run`, in each of which `action` was killed at another point."""
    for point in points:
        copy = copied(run, parent / str(point))
        if not killed_at(point, lambda copy=copy: action(copy)):  # type: ignore[misc]
            break
        yield copy
        shutil.rmtree(copy.parent)


@pytest.mark.parametrize(
    "points", [range(8, 60, 13), pytest.param(itertools.count(1), marks=SLOW)], ids=["few", "all"]
)
def test_extending(
    points: Iterable[int], finished: Path, extended: Path, tmp_path: Path, tally: Tally
) -> None:
    """There is a model in between; the same command then ends with the same weights."""
    tried = survived = 0
    best = (finished / "best").resolve().name
    for run in kills(points, finished, tmp_path, lambda run: extend(run, {"steps": MORE})):
        model = find_model(run, lambda text: None)
        verify(model)
        whole = "result" in Run(run).facts() and not (run / "earlier").exists()
        kept = (run / "checkpoints" if whole else run / "earlier") / best
        verify(kept)
        result = extend(run, {"steps": MORE})
        same = weights(run) == weights(extended) and lines(run) == lines(extended)
        tried += 1
        survived += same and result.steps == STEPS + MORE
        assert len(Run(run).facts()["earlier"]) == 1
        assert not list(run.glob(".*-*"))
    tally("killed at each change of the disk, --extend", tried, survived)


@pytest.mark.parametrize(
    "points", [range(2, 20, 6), pytest.param(itertools.count(1), marks=SLOW)], ids=["few", "all"]
)
def test_removing(
    points: Iterable[int], finished: Path, tmp_path: Path, cli: Cli, tally: Tally
) -> None:
    """It is a run, whole, or it is none; `nanolm runs` removes what is left, and says so."""
    tried = survived = 0
    for run in kills(points, finished, tmp_path, removed):
        before = {entry.name for entry in run.parent.iterdir()}
        shown = cli("runs", "--json", "--folder", run.parent)
        listed = [json.loads(line)["run"] for line in shown.stdout.splitlines()]
        after = {entry.name for entry in run.parent.iterdir()}
        tried += 1
        if run.exists():
            survived += listed == [str(run)] and same_files(run, finished)
        else:
            survived += listed == [] and not after and (not before or "runs rm" in shown.stderr)
    tally("killed at each change of the disk, runs rm", tried, survived)


def removed(run: Path) -> None:
    command.main(["rm", str(run), "--yes"], standalone_mode=False)


def same_files(run: Path, other: Path) -> bool:
    files, others = ({f.relative_to(each) for f in each.rglob("*")} for each in (run, other))
    return files - {Path(".lock")} == others - {Path(".lock")}


def test_what_an_older_version_left_can_be_removed(
    finished: Path, tmp_path: Path, cli: Cli
) -> None:
    """It began with run.json; a folder of somebody else is not touched."""
    run = copied(finished, tmp_path / "runs")
    (run / "run.json").write_text("{")
    assert cli("runs", "rm", "runs/run").returncode == 2  # it asks
    (run / "run.json").unlink()
    assert "`nanolm runs rm runs/run`" in cli("runs").stderr
    (run / "thesis.txt").write_text("mine")
    assert cli("runs", "rm", "runs/run", "--yes").returncode == 3
    (run / "thesis.txt").rename(run / "checkpoints/thesis.txt")
    assert cli("runs", "rm", "runs/run", "--yes").returncode == 3
    (run / "checkpoints/thesis.txt").unlink()
    shown = cli("runs", "rm", "runs/run", "--yes")
    assert shown.returncode == 0, shown.stderr
    assert not list((tmp_path / "runs").iterdir())
    damaged = copied(finished, tmp_path / "runs")
    (damaged / "run.json").write_text("{")
    assert cli("runs", "rm", "runs/run", "--yes").returncode == 0
    assert not list((tmp_path / "runs").iterdir())


@pytest.fixture
def swept(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepRequest:
    """A sweep of two trials, before the better one is trained for longer: by steps here, so that
    what comes of it is known to the bit."""

    def by_steps(path: Path, more: dict[str, float], *rest: Any) -> TrainResult:
        assert more["minutes"] > 0
        return extend(path, {"steps": MORE}, *rest)

    monkeypatch.setattr("nanolm.sweep.sweep.extend", by_steps)
    settings = with_absolute_paths(TrainSettings(("embedded:tiny",), minutes=1.0, **SETTINGS))
    request = SweepRequest(settings, "lr=0.001:0.002", 2)
    asked = {"settings": settings.to_dict(), "over": request.over, "trials": request.trials}
    result = {**Run(finished).facts()["result"], "stopped": "minutes"}
    better, worse = result, {**result, "val_bits_per_byte": 9.0}
    trials = [SweepTrial(1, {"lr": 0.001}, [worse]), SweepTrial(2, {"lr": 0.002}, [better])]
    state = SweepState(asked, base=settings.to_dict(), trials=trials, budgets=[1.0])
    for number in (1, 2):
        shutil.copytree(finished, tmp_path / f"sweep/trial-0{number}", symlinks=True)
    (tmp_path / "sweep/sweep.json").write_text(json.dumps(asdict(state)))
    return request


@pytest.mark.parametrize(
    "points", [range(13, 50, 15), pytest.param(itertools.count(1), marks=SLOW)], ids=["few", "all"]
)
def test_sweeping(
    points: Iterable[int], swept: SweepRequest, extended: Path, tmp_path: Path, tally: Tally
) -> None:
    """The winner stays the winner, and what it comes to is the same."""
    tried = survived = 0
    kept = ("steps", "tokens", "train_loss", "val_bits_per_byte", "best_step")
    wanted = Run(extended).facts()["result"]
    for folder in kills(points, tmp_path / "sweep", tmp_path, lambda to: sweep(swept, to)):
        if not json.loads((folder / "sweep.json").read_text())["finished"]:
            outcome = sweep(swept, folder)
            assert outcome.run == str(folder / "best")
        state = json.loads((folder / "sweep.json").read_text())
        assert [trial["error"] for trial in state["trials"]] == [None, None]
        assert [len(trial["results"]) for trial in state["trials"]] == [1, 2]
        result = Run(folder / "best").facts()["result"]
        assert state["trials"][1]["results"][1] | {"run": result["run"]} == result
        tried += 1
        same = weights(folder / "best") == weights(extended)
        survived += same and [result[name] for name in kept] == [wanted[name] for name in kept]
    tally("killed at each change of the disk, sweep", tried, survived)


def test_resuming_a_sweep_goes_by_the_round(swept: SweepRequest, tmp_path: Path) -> None:
    """The one that went on is worse after it: the other was not chosen then, and is not now."""
    file = tmp_path / "sweep/sweep.json"
    state = json.loads(file.read_text())
    results = state["trials"][1]["results"]
    results.append({**results[0], "val_bits_per_byte": 9.5})
    file.write_text(json.dumps({**state, "budgets": [1.0, 3.0]}))
    outcome = sweep(swept, tmp_path / "sweep")
    assert [trial.number for trial in outcome.trials] == [1, 2]
    assert [len(trial.results) for trial in outcome.trials] == [1, 2]


def test_a_damaged_trial_is_not_dropped(swept: SweepRequest, tmp_path: Path) -> None:
    for state in (tmp_path / "sweep/trial-02/checkpoints").glob("*/state.json"):
        state.write_text("{")
    notes: list[object] = []
    outcome = sweep(swept, tmp_path / "sweep", notes.append)
    assert [trial.error for trial in outcome.trials] == [None, None]
    assert outcome.trials[0].number == 2
    assert any("using the previous result of" in str(note) for note in notes)


def test_the_name_of_the_winner_is_taken_meanwhile(
    swept: SweepRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the winner was renamed; then somebody trained on the same text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    shutil.move(tmp_path / "sweep", tmp_path / "runs/tiny-sweep")
    file = tmp_path / "runs/tiny-sweep/sweep.json"
    state = json.loads(file.read_text())
    file.write_text(json.dumps({**state, "run": "runs/tiny"}))
    (tmp_path / "runs/tiny/mine").mkdir(parents=True)
    assert sweep(swept).run == "runs/tiny-2"
    assert (tmp_path / "runs/tiny/mine").exists()


@pytest.mark.parametrize("moved", [True, False], ids=["moved", "gone"])
def test_a_best_model_that_is_not_where_it_should_be(
    moved: bool, finished: Path, extended: Path, tmp_path: Path
) -> None:
    """As a kill of an older version left it: moved, or removed, before the links were. It is found
    or missed in so many words, and the run can be extended."""
    run, notes = copied(finished, tmp_path), list[str]()
    best = (run / "best").resolve()
    (run / "earlier").mkdir()
    best.rename(run / "earlier" / best.name)
    if not moved:
        shutil.rmtree(run / "earlier")
    model = find_model(run, notes.append)
    assert (model.parent.name == "earlier") == moved
    assert str(best) in notes[0]
    assert str(model) in notes[0] or not moved
    assert extend(run, {"steps": MORE}).steps == STEPS + MORE
    assert weights(run) == weights(extended)
    assert len(list((run / "earlier").glob("*"))) == 1 if moved else not (run / "earlier").exists()


def test_extending_twice_keeps_both_models(finished: Path, tmp_path: Path) -> None:
    """Where the best of both is of the same step."""
    run = copied(finished, tmp_path)
    best = (run / "best").resolve().name
    shutil.copytree(run / "best", run / "earlier" / best)
    extend(run, {"steps": MORE})
    assert {each.name for each in (run / "earlier").iterdir()} == {best, f"{best}-2"}


def test_extending_sets_aside_what_is_damaged(finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    last = shutil.copytree((run / "last").resolve(), run / "checkpoints/step-00000031")
    (last / "model.safetensors").write_bytes(b"x")
    extend(run, {"steps": MORE})
    assert (run / "checkpoints/damaged-step-00000031/model.safetensors").read_bytes() == b"x"


def test_starting_over(finished: Path, tmp_path: Path) -> None:
    """A run that had too little time is cleared: killed there, the next start finishes it."""
    for run in kills(range(6, 30, 8), finished, tmp_path, cleared):
        notes: list[str] = []
        Run(run).settle(notes.append)
        assert Run(run).free() or same_files(run, finished)
        assert Run(run).exists() or "starting over" in notes[0]


def cleared(run: Path) -> None:
    with Run(run).locked():
        Run(run).clear()


@pytest.mark.parametrize(
    "operation",
    [
        ("discard", "../mine"),
        ("discard", "checkpoints/../../mine"),
        ("discard", "{mine}"),
        ("discard", "checkpoints/step-1/x"),
        ("move", "checkpoints", "../mine/x"),
        ("move", "../mine", "checkpoints/x"),
        ("write", "../mine/text", "theirs"),
        ("write", "elsewhere/text", "theirs"),
        ("discard", "elsewhere/text"),
        ("discard", "checkpoints/.."),
        ("move", "elsewhere/text", "text"),
        ("link", "elsewhere/text", "best"),
        ("link", "best"),
        ("write", "config.toml", 7),
        ("run", "config.toml"),
        ("discard", "."),
        ("discard", ""),
        ("discard",),
        (),
        7,
    ],
)
def test_a_journal_from_elsewhere_does_not_reach_out_of_its_folder(
    operation: Any, finished: Path, tmp_path: Path
) -> None:
    run, mine, notes = copied(finished, tmp_path), tmp_path / "mine", list[str]()
    mine.mkdir()
    (mine / "text").write_text("mine")
    (run / "elsewhere").symlink_to(mine)
    if isinstance(operation, tuple):
        operation = [str(mine) if word == "{mine}" else word for word in operation]
    entry = {"format": journal.FORMAT, "what": "bad", "operations": [operation]}
    text = json.dumps({**entry, "sha256": journal.checksum(entry)})
    (run / journal.JOURNAL).write_text(text)
    assert find_model(run, notes.append).is_dir()
    assert "cannot be read" in notes[0]
    assert (mine / "text").read_text() == "mine"
    with pytest.raises(DataError, match="rename the file"):
        extend(run, {"steps": MORE})


def test_links_do_not_lead_a_journal_out_of_its_folder(finished: Path, tmp_path: Path) -> None:
    other, run = copied(finished, tmp_path / "other"), copied(finished, tmp_path)
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to(other / "checkpoints")
    names = [f"checkpoints/{each.name}" for each in (other / "checkpoints").iterdir()]
    entry = {
        "format": journal.FORMAT,
        "what": "bad",
        "operations": [["discard", name] for name in names],
    }
    text = json.dumps({**entry, "sha256": journal.checksum(entry)})
    (run / journal.JOURNAL).write_text(text)
    find_model(run, lambda text: None)
    assert same_files(other, finished)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 2}', '{"format": "x"}'])
def test_a_journal_that_cannot_be_read(text: str, finished: Path, tmp_path: Path) -> None:
    """Models can be used, and nothing is changed."""
    run, notes = copied(finished, tmp_path), list[str]()
    (run / journal.JOURNAL).write_text(text)
    assert find_model(run, notes.append) == (run / "best").resolve()
    assert journal.JOURNAL in notes[0]
    with pytest.raises(DataError, match="newer" if "2" in text else "rename the file"):
        extend(run, {"steps": MORE})
    assert (run / journal.JOURNAL).read_text() == text


def test_a_run_with_a_damaged_journal_can_be_removed(
    finished: Path, tmp_path: Path, cli: Cli
) -> None:
    run = copied(finished, tmp_path)
    (run / journal.JOURNAL).write_text("{")
    assert cli("runs", "rm", run, "--yes").returncode == 0
    assert not run.exists()
