"""Killed, stopped, or started twice: nothing is lost, and what comes out is the same to the bit."""

import itertools
import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from commands import Commands
from conftest import Tally
from faults import (
    SAVED,
    Killed,
    before_evaluation,
    before_step,
    disk_fails,
    kill,
    kill_writer,
    press,
    steps_of,
    wait_for_step,
)
from journeys import Journey, counts, journeys, same

from nanolm.classification.classifier import load
from nanolm.errors import ModelError
from nanolm.files import verify
from nanolm.generation.language_model import load as load_language_model
from nanolm.runs import checkpoint
from nanolm.runs.checkpoint import list_checkpoints, newest_valid
from nanolm.runs.folder import Run

Ended = tuple[Journey, Path]
INTERRUPTED = 75


@pytest.mark.parametrize("kills", counts(1, 100))
def test_sigkill_at_any_moment(
    kills: int, journey: Journey, commands: Commands, tmp_path: Path, tally: Tally
) -> None:
    """Somewhere in each part of the run; every fourth time while it only starts again."""
    dice, steps = random.Random(kills), 40 * kills + 100  # so that none comes after the end
    survived = 0
    words = journey.words("whole", steps=steps, save_every=7)
    assert commands.run(*words)[0] == 0
    words = journey.words("killed", steps=steps, save_every=7)
    run = tmp_path / "killed"
    for number in range(kills):
        before = newest_valid(run / "checkpoints", pytest.fail)
        command = commands.start(*words)
        if number % 4 == 3:
            time.sleep(0.3 * dice.random())
        else:
            wait_for_step(run, 40 * number + 15)  # the second save waits for the first
            time.sleep(0.05 * dice.random())
        command.send(signal.SIGKILL)
        assert command.wait() == -signal.SIGKILL, command.said()
        now = newest_valid(run / "checkpoints", pytest.fail)
        survived += before is None or (now is not None and now.name >= before.name)
    code, said = commands.run(*words)
    assert code == 0, said
    assert "resuming killed at step" in said
    assert same(run, tmp_path / "whole")
    assert not list((run / "checkpoints").glob(".*"))
    tally(f"SIGKILL at a random moment, {journey.name}", kills, survived)


def test_an_error_waits_for_the_checkpoint(
    journey: Journey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who catches the error and trains again finds a run that nobody writes to any more."""
    prune, newest = checkpoint.prune, [""]

    def slowly(parent: Path, *arguments: Any) -> None:
        time.sleep(0.3)
        prune(parent, *arguments)
        newest.append(list_checkpoints(parent)[-1].name)

    monkeypatch.setattr(checkpoint, "prune", slowly)
    before_step(monkeypatch, 4, kill)  # evaluating, at steps 3 and 6, waits in any case
    with pytest.raises(Killed):
        journey.go(tmp_path / "run", save_every=2)
    assert newest[-1] == "step-00000004"


@pytest.mark.parametrize("every", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_each_moment_of_a_save(
    every: int, ended: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    journey, whole = ended
    tried = survived = 0
    for count in itertools.count(1, every):
        run = tmp_path / str(count)
        with monkeypatch.context() as patch:
            disk_fails(patch, 40 + count, Killed)  # after those of starting
            try:
                journey.go(run)
                break  # it touches the disk no more often
            except Killed:
                tried += 1
        if not Run(run).exists() or not Run(run).finished():
            journey.go(run)
        survived += same(run, whole)
    assert tried >= 100 / every
    tally(f"killed at each touch of the disk, {journey.name}", tried, survived)


@pytest.mark.parametrize("writes", counts(10, 100))
def test_a_writer_that_writes_in_place_loses_it(writes: int, tmp_path: Path, tally: Tally) -> None:
    """The same kills for our writer and for one as others have it: the trial can fail."""
    lost = {"naive": 0, "ours": 0}
    dice = random.Random(writes)
    for number, name in itertools.product(range(writes), lost):
        folder = tmp_path / f"{name}-{number}"
        folder.mkdir()
        kill_writer(name, folder, 0.1 * dice.random())
        if name == "naive":
            lost[name] += (folder / "weights").stat().st_size != SAVED
        else:
            lost[name] += newest_valid(folder, pytest.fail) is None
    assert lost["naive"] > writes / 10, lost
    tally("SIGKILL while only saving", writes, writes - lost["ours"])


@pytest.mark.parametrize(
    "stops", [[1, 10, 49], pytest.param([*range(1, 51)], marks=pytest.mark.slow)], ids=len
)
def test_stopped_at_step_k(
    stops: list[int],
    journey: Journey,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tally: Tally,
) -> None:
    whole = tmp_path / "whole"
    journey.go(whole, steps=60)
    survived = 0
    for step in stops:
        run = tmp_path / str(step)
        with monkeypatch.context() as patch:
            before_step(patch, step, press)
            assert journey.go(run, steps=60).stopped == "interrupted"
        journey.go(run, steps=60)
        survived += same(run, whole)
    tally(f"stopped at step k and resumed, {journey.name}", len(stops), survived)


@pytest.mark.parametrize("signals", counts(1, 50))
def test_signals_at_any_moment(
    signals: int, journey: Journey, commands: Commands, tmp_path: Path, tally: Tally
) -> None:
    """Saved (75), or ended before there was anything to save; never a traceback."""
    dice, steps, survived = random.Random(signals), 60 * signals + 100, 0
    run = tmp_path / "stopped"
    assert commands.run(*journey.words("whole", steps=steps))[0] == 0
    words = journey.words("stopped", steps=steps)
    for each in range(signals):
        number = dice.choice([signal.SIGINT, signal.SIGTERM])
        command = commands.start(*words)
        if each % 4:
            wait_for_step(run, 60 * each + 1)
            time.sleep(0.02 * dice.random())
        else:  # while it begins
            time.sleep(0.2 * dice.random())
        command.send(number)
        code, said = command.wait(), command.said()
        early = (130, -signal.SIGTERM)  # which a shell calls 143
        fine = code == INTERRUPTED and "run the same command again" in said
        well = (fine or code in early) and "Traceback" not in said
        survived += well
        if not well:
            print(f"signal {number} number {each}: exit code {code}\n{said}")  # noqa: T201
    code, said = commands.run(*words)
    assert code == 0, said
    assert same(run, tmp_path / "whole")
    tally(f"SIGINT or SIGTERM, {journey.name}", signals, survived)


@pytest.mark.parametrize("kills", counts(2, 20))
def test_killed_while_evaluating(
    kills: int, journey: Journey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """Each time it was committed before, so the next time it begins with that evaluation."""
    whole, run = tmp_path / "whole", tmp_path / "killed"
    how: dict[str, Any] = {"steps": 2 * kills, "evaluations": kills}
    journey.go(whole, **how)
    survived = 0
    for number in range(1, kills + 1):
        with monkeypatch.context() as patch:
            before_evaluation(patch, journey.task, min(number, 2), kill)
            with pytest.raises(Killed):
                journey.go(run, **how)
        newest = list_checkpoints(run / "checkpoints")[-1]
        verify(newest)
        survived += newest.name == f"step-{2 * number:08}"
    journey.go(run, **how)
    assert same(run, whole)
    tally(f"killed while evaluating, {journey.name}", kills, survived)


@pytest.mark.parametrize("times", counts(1, 20))
def test_a_second_process_is_refused(
    times: int,
    journey: Journey,
    commands: Commands,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tally: Tally,
) -> None:
    refused = 0
    monkeypatch.setenv("NANOLM_TRAIN_COMPILE", "no")  # which takes its time
    words = journey.words("run", steps=20_000)
    first = commands.start(*words)
    wait_for_step(tmp_path / "run", 10)
    for _ in range(times):
        code, said = commands.run(*words)
        refused += code == 3 and f"another process ({first.pid})" in said
    done = max(steps_of(tmp_path / "run"))
    wait_for_step(tmp_path / "run", done + 1)  # the first is not disturbed
    first.send(signal.SIGKILL)
    first.wait()
    tally(f"started twice, {journey.name}", times, refused)


def test_the_journeys_are_what_is_typed(commands: Commands, tmp_path: Path) -> None:
    """From Python and by the command line the same run comes out."""
    for journey in journeys(tmp_path).values():
        journey.go(tmp_path / f"{journey.name} 1")
        assert commands.run(*journey.words(f"{journey.name} 2"))[0] == 0
        assert same(tmp_path / f"{journey.name} 1", tmp_path / f"{journey.name} 2")
        assert "result" in json.loads((tmp_path / f"{journey.name} 2/run.json").read_text())
    with pytest.raises(ModelError):
        verify(tmp_path)


@pytest.mark.parametrize("every", [41, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "train"),
    [
        ("fine-tuning", "lora"),
        ("training", "lora"),
        pytest.param("fine-tuning", "head", marks=pytest.mark.slow),
    ],
)
def test_killed_while_saving_what_refers_to_a_base_model(
    every: int, kind: str, train: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """Checkpoints hold only what was trained; whatever is left can be used and goes on the same."""
    kinds = journeys(tmp_path)
    kinds["training"].go(tmp_path / "base", steps=2)
    how: dict[str, Any] = {"start_from": str(tmp_path / "base"), "train": train, "steps": 12}
    how |= {"save_every": 3, "evaluations": 2}
    fixed = ("preset", "tokenizer") if kind == "fine-tuning" else ("layers", "heads", "dim")
    how |= dict.fromkeys(fixed)
    use = load if kind == "fine-tuning" else load_language_model
    journey, whole = kinds[kind], tmp_path / "whole"
    journey.go(whole, **how)
    tried = survived = 0
    for count in itertools.count(1, every):
        run = tmp_path / str(count)
        with monkeypatch.context() as patch:
            disk_fails(patch, 40 + count, Killed)
            try:
                journey.go(run, **how)
                break
            except Killed:
                tried += 1
        usable = newest_valid(run / "checkpoints", pytest.fail) is None or use(run, print)
        if not Run(run).exists() or not Run(run).finished():
            journey.go(run, **how)
        survived += bool(usable) and same(run, whole)
    assert tried >= 80 / every
    what = f"{kind} --train {train} from a base model"
    tally(f"killed at each touch of the disk, {what}", tried, survived)


@pytest.mark.parametrize("every", [137, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_while_distilling(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """In a teacher, between two, with the student, or while the teachers are removed."""
    journey, whole = journeys(tmp_path)["training"], tmp_path / "whole"
    how: dict[str, Any] = {"teachers": 2, "steps": 20, "save_every": 5, "evaluations": 2}
    journey.go(whole, **how)
    tried = survived = 0
    for count in itertools.count(1, every):
        run = tmp_path / str(count)
        with monkeypatch.context() as patch:
            disk_fails(patch, 40 + count, Killed)
            try:
                journey.go(run, **how)
                break
            except Killed:
                tried += 1
        Run(run).settle(print)
        if not Run(run).exists() or not Run(run).finished():
            journey.go(run, **how)
        survived += same(run, whole) and not (run / "teachers").exists()
    assert tried >= 400 / every
    tally("killed at each touch of the disk, distillation", tried, survived)
