"""Warned before the end: a closed terminal, Slurm's warning, a CPU limit. All save and go on."""

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from commands import Commands
from conftest import Tally, program
from faults import steps_of, wait_for_step
from journeys import Journey, counts, journeys, same
from torch import nn

from nanolm import evaluation
from nanolm.classification import classifier
from nanolm.files import verify
from nanolm.pairs import evaluation as pair_evaluation
from nanolm.pairs import task as pair_task
from nanolm.pretraining import language
from nanolm.runs.checkpoint import list_checkpoints
from nanolm.training.checkpointer import Checkpointer
from nanolm.training.interrupt import StopRequest

INTERRUPTED = 75
EAGER = {"NANOLM_TRAIN_COMPILE": "no"}  # compiling takes its time
WARNINGS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)


@pytest.mark.parametrize("times", counts(3, 60))
def test_a_warning_saves(
    times: int, journey: Journey, commands: Commands, tmp_path: Path, tally: Tally
) -> None:
    """Each of them, even if it comes several times; the weights are those of a whole run."""
    survived, steps, run = 0, 40 * times + 60, tmp_path / "stopped"
    for each in range(times):
        command = commands.start(*journey.words("stopped", steps=steps))
        wait_for_step(run, 40 * each + 10)
        for _ in range(1 + each % 2):
            with contextlib.suppress(ProcessLookupError):
                command.send(WARNINGS[each % 3])
        code, said = command.wait(), command.said()
        well = code == INTERRUPTED and "run the same command again" in said
        survived += well and "Traceback" not in said
        if not well:
            print(f"number {each}: exit code {code}\n{said}")  # noqa: T201
    if times > 3:
        for name in ("stopped", "whole"):
            code, said = commands.run(*journey.words(name, steps=steps))
            assert code == 0, said
        assert same(run, tmp_path / "whole")
    tally(f"SIGHUP, SIGUSR1 or SIGXCPU, {journey.name}", times, survived)


def test_under_nohup_a_closed_terminal_is_nothing(commands: Commands, tmp_path: Path) -> None:
    words = journeys(tmp_path)["training"].words("run", steps=60)
    command = commands.start(*words, ignored=(signal.SIGHUP,))
    wait_for_step(tmp_path / "run", 10)
    command.send(signal.SIGHUP)
    assert command.wait() == 0, command.said()


TOGETHER = {
    "sweep": ["sweep", "embedded:tiny", "--minutes", 1, "--over", "lr=0.001:0.01", "--trials", 2],
    "compare": ["compare", "labeled.tsv", "--budget", 1, "--only", "transformer"],
    "compare, of pairs": ["compare", "pairs.tsv", "--budget", 1, "--only", "modern"],
    "seeds": ["finetune", "labeled.tsv", "--from", "none", "--minutes", 1, "--seeds", 2],
}


@pytest.mark.parametrize("words", TOGETHER.values(), ids=TOGETHER)
def test_a_terminal_closed_on_many_runs(
    words: list[object], commands: Commands, tmp_path: Path
) -> None:
    journeys(tmp_path)
    small = ["--preset", "nano", "--tokenizer", "byte"] * (words[0] != "compare")
    command = commands.start(*words, *small, "--out", "all")
    deadline = time.monotonic() + 60
    while not (started := list(tmp_path.glob("all/**/metrics.jsonl"))):
        assert time.monotonic() < deadline, command.said()
        time.sleep(0.01)
    wait_for_step(started[0].parent, 10)
    command.send(signal.SIGHUP)
    assert command.wait() == INTERRUPTED, command.said()
    assert "Traceback" not in command.said()
    assert list_checkpoints(started[0].parent / "checkpoints")


def watched_until_step(master: int, run: Path, step: int) -> None:
    """Read what a terminal shows, as long as it is open."""
    deadline = time.monotonic() + 60
    while step not in steps_of(run):
        assert time.monotonic() < deadline
        if select.select([master], [], [], 0.01)[0]:
            os.read(master, 65536)
    os.close(master)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_terminal_that_is_closed(options: list[str], commands: Commands, tmp_path: Path) -> None:
    """From then on every write fails; the run is saved all the same."""
    master, slave = os.openpty()
    terminal = dict.fromkeys(("stdout", "stderr"), os.ttyname(slave))
    words = [*journeys(tmp_path)["training"].words("run", steps=30_000), *options]
    command = commands.start(
        *words, streams=terminal, environment={"TERM": "xterm-256color", **EAGER}
    )
    watched_until_step(master, tmp_path / "run", 10)
    os.close(slave)
    time.sleep(0.2)  # it goes on, whatever it says
    command.send(signal.SIGHUP)
    assert command.wait() == INTERRUPTED
    verify(list_checkpoints(tmp_path / "run/checkpoints")[-1])


@pytest.mark.slow
def test_a_terminal_of_its_own_that_is_closed(tmp_path: Path) -> None:
    """The system sends the signal, as to a program in a window that is closed."""
    master, slave = os.openpty()
    process = subprocess.Popen(
        program(*journeys(tmp_path)["training"].words("run", steps=30_000)),
        cwd=tmp_path,
        env={**os.environ, **EAGER},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    watched_until_step(master, tmp_path / "run", 10)
    assert process.wait(60) == INTERRUPTED
    verify(list_checkpoints(tmp_path / "run/checkpoints")[-1])


def test_handlers_of_others_stay() -> None:
    """Of whoever trains from Python; and a signal is its sender's again after training."""

    def theirs(number: int, frame: object) -> None:
        pass

    before = {number: signal.getsignal(number) for number in WARNINGS}
    try:
        signal.signal(signal.SIGUSR1, theirs)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopRequest() as outer, StopRequest() as inner:
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGHUP)
            assert not inner.requested
            signal.raise_signal(signal.SIGXCPU)
            assert inner.requested
            assert outer.requested
        assert signal.getsignal(signal.SIGUSR1) is theirs
        signal.raise_signal(signal.SIGXCPU)  # comes every second, and is known by now
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


SLOW = 0.5  # seconds for a batch of held-out data
SOON = 4.0  # seconds; an evaluation would take 7 or more


def interrupted(journey: Journey, run: Path, moment: tuple[type, str]) -> float:
    """Send SIGTERM to a process that evaluates from this method on, or after it; returns how many
    seconds it went on."""
    marker = run.parent / f"{run.name}-evaluates"
    if (pid := os.fork()) == 0:
        method, forward, slow = getattr(*moment), nn.Embedding.forward, list[bool]()

        def begin(*arguments: Any) -> Any:
            if moment[0] is Checkpointer:
                method(*arguments)
            slow.append(True)
            return None if moment[0] is Checkpointer else method(*arguments)

        def embed(*arguments: Any) -> Any:
            if slow:
                marker.touch()
                time.sleep(SLOW)
            return forward(*arguments)

        setattr(*moment, begin)
        nn.Embedding.forward = embed  # type: ignore[method-assign, assignment]
        stopped = journey.go(run).stopped
        os._exit(INTERRUPTED if stopped == "interrupted" else 0)
    deadline = time.monotonic() + 60
    while not marker.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(SLOW / 2)
    start = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == INTERRUPTED
    marker.unlink()
    return time.monotonic() - start


def test_a_signal_while_it_evaluates(
    journey: Journey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both during training and at its end; the evaluation is done again, and logged once."""
    for module in (language, pair_task):
        monkeypatch.setattr(module, "LEAST_EVALUATED_TOKENS", 64)  # all of it only at the end
    monkeypatch.setattr(evaluation, "MOST_LOGITS", 1)
    monkeypatch.setattr(pair_evaluation, "SCORED_TOKENS", {"cpu": 1})
    monkeypatch.setattr(classifier, "BATCH_TOKENS", {"cpu": 1})
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert interrupted(journey, run, (journey.task, "evaluate")) < SOON
    assert interrupted(journey, run, (Checkpointer, "load_best")) < SOON
    assert journey.go(run).stopped == journey.go(whole).stopped == "steps"
    assert same(run, whole)
    samples = [each / "samples.md" for each in (run, whole)]
    assert not samples[1].exists() or samples[0].read_bytes() == samples[1].read_bytes()
