"""Several processes train like one: same tokens, same curve, same folder."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Command, Commands, Loaded
from journeys import journeys
from safetensors.torch import load_file

from nanolm import files
from nanolm.runs import checkpoint
from nanolm.text.tokens import Batches
from nanolm.training.distributed import World

HERE = Path(__file__).parent
TINY = (
    *("embedded:tiny", "--tokenizer", "byte", "--layers", "2", "--heads", "2", "--dim", "32"),
    *("--context", "16", "--batch", "6", "--device", "cpu", "--dtype", "float32"),
    *("--threads", "1", "--workers", "1", "--no-compile", "--optimizer", "muon"),
    *("--dropout", "0", "--average", "0", "--weight-decay", "0.1"),
)
LAUNCH = (sys.executable, "-m", "torch.distributed.run")
TOGETHER = 60.0  # seconds to start some processes on a busy machine
SOON = 30.0  # seconds for all to end after one has


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def launcher(processes: int, *more: str) -> tuple[str, ...]:
    return (*LAUNCH, "--standalone", "--nproc-per-node", str(processes), *more)


def launched(out: Path, *options: str, by: tuple[str, ...]) -> None:
    """Run a command to its end, as a user would."""
    with started(out, *options, by=by) as run:
        assert run.wait(300) == 0, (out.parent / f"{out.name}.log").read_text()


Train = Callable[..., str]


@pytest.fixture(scope="module")
def train(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Run this many processes as a launcher would; returns their output."""
    commands = Commands(loaded, tmp_path_factory.mktemp("train"))

    def train(
        out: Path, *options: str, processes: int = 1, words: tuple[str, ...] = ("train", *TINY)
    ) -> str:
        words = (*words, "--out", str(out), *options)
        if processes == 1:
            code, said = commands.run(*words)
            assert code == 0, said
            return said
        all_ = forked(commands, *words, processes=processes)
        codes, said = [each.wait() for each in all_], "".join(each.said() for each in all_)
        assert not any(codes), said
        return said

    return train


def forked(commands: Commands, *words: object, processes: int = 2) -> list[Command]:
    """Start this many processes as a launcher would, which itself takes seconds to start."""
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    told["WORLD_SIZE"] = told["LOCAL_WORLD_SIZE"] = str(processes)
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    return [commands.start(*words, environment=told | rank) for rank in ranks]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def curve(out: Path, name: str = "loss") -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[name]) for line in lines if name in line]


def apart(one: Path, other: Path, name: str = "loss") -> float:
    ours, theirs = curve(one, name), curve(other, name)
    assert [step for step, _ in ours] == [step for step, _ in theirs]
    return max(abs(a - b) for (_, a), (_, b) in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_all_processes_together_see_the_tokens_that_one_would(size: int) -> None:
    tokens = np.arange(5_000, dtype=np.uint16)
    alone = Batches(tokens, context=9, batch=7, seed=3)
    shares = [
        Batches(tokens, context=9, batch=7, seed=3, rows=World(rank, size).rows(7))
        for rank in range(size)
    ]
    for index in range(1_000):
        assert (np.concatenate([share[index] for share in shares]) == alone[index]).all()
    assert sum(World(rank, size).weight(7) for rank in range(size)) == pytest.approx(size)


@pytest.fixture(scope="module")
def alone(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    train(out, "--steps", "60", "--save-every", "20", "--evaluations", "3")
    return out


@pytest.mark.parametrize("how", ["--shard", pytest.param("--no-shard", marks=pytest.mark.slow)])
def test_two_processes_learn_what_one_does(
    how: str, train: Train, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    options = ("--steps", "60", "--save-every", "20", "--evaluations", "3", how)
    said = train(out, *options, processes=2)
    assert apart(alone, out) < 1e-4
    assert apart(alone, out, "val_loss") < 1e-4
    assert said.count(f"training {out}") == said.count(" bits per byte on the validation set") == 1
    names = {path.relative_to(out) for path in out.rglob("*") if path.suffix != ".svg"}
    assert names == {path.relative_to(alone) for path in alone.rglob("*") if path.suffix != ".svg"}
    for folder in checkpoint.list_checkpoints(out / "checkpoints"):
        files.verify(folder)
        state, before = (
            json.loads((each / "checkpoints" / folder.name / "state.json").read_text())
            for each in (out, alone)
        )
        assert (state["step"], state["tokens"]) == (before["step"], before["tokens"])
        ours, theirs = (
            load_file(each / "checkpoints" / folder.name / "optimizer.safetensors")
            for each in (out, alone)
        )
        assert {name: value.shape for name, value in ours.items()} == {
            name: value.shape for name, value in theirs.items()
        }
    assert (out / "samples.md").read_text().count("## Step") == 3


PAIRS = (
    *("--layers", "1", "--heads", "2", "--dim", "16", "--batch", "90", "--tokenizer", "char"),
    *("--device", "cpu", "--dtype", "float32", "--threads", "1", "--dropout", "0"),
    *("--val-fraction", "0.1", "--steps", "40", "--evaluations", "2", "--save-every", "20"),
)


def test_two_processes_learn_from_pairs_what_one_does(train: Train, tmp_path: Path) -> None:
    """The rows of a batch, and their lengths, differ between the processes."""
    words = ("train-pairs", journeys(tmp_path)["pairs"].text, *PAIRS)
    for name, processes in (("one", 1), ("two", 2)):
        train(tmp_path / name, words=words, processes=processes)
    assert apart(tmp_path / "one", tmp_path / "two") < 1e-4
    assert apart(tmp_path / "one", tmp_path / "two", "val_loss") < 1e-4
    one, two = ((tmp_path / name / "last/state.json").read_text() for name in ("one", "two"))
    assert json.loads(one)["tokens"] == json.loads(two)["tokens"]


def test_two_processes_learn_from_a_mix_what_one_does(train: Train, tmp_path: Path) -> None:
    for name in ("cats", "dogs"):
        lines = (f"{n % 31} {name} sat on {n % 7} mats.\n" for n in range(500))
        (tmp_path / f"{name}.txt").write_text("".join(lines))
    corpus = (f"{tmp_path}/cats.txt:0.7", f"{tmp_path}/dogs.txt:0.3")
    words = ("train", *corpus, *TINY[1:], "--steps", "20", "--evaluations", "2", "--no-shard")
    for name, processes in (("one", 1), ("two", 2)):
        train(tmp_path / name, words=words, processes=processes)
    for what in ("loss", "val_loss", "val_bits_per_byte/dogs.txt"):
        assert apart(tmp_path / "one", tmp_path / "two", what) < 1e-4


def twenty_steps(folder: Path, *by: str, how: str = "replicated") -> dict[str, torch.Tensor]:
    folder.mkdir()
    command = [*by, str(HERE / "twenty_steps.py"), str(folder), how]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    return load_file(folder / "weights.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_in_float64_the_weights_are_the_same(processes: int, tmp_path: Path) -> None:
    one = twenty_steps(tmp_path / "one", sys.executable)
    for how in ("replicated", "sharded"):
        many = twenty_steps(tmp_path / how, *launcher(processes), how=how)
        assert one.keys() == many.keys()
        for name, weights in one.items():
            assert weights.dtype == torch.float64
            assert (weights - many[name]).abs().max() < 1e-8, name


@pytest.mark.parametrize(
    "way",
    [
        "1 to 2, sharded",
        *(pytest.param(way, marks=pytest.mark.slow) for way in ("2 to 1", "1 to 2")),
    ],
)
def test_a_run_resumes_with_another_number_of_processes(
    way: str, train: Train, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    options = ["--steps", "60", "--save-every", "20", "--evaluations", "3"]
    if way.endswith("sharded"):
        options.append("--shard")
    first, then = (1, 2) if way.startswith("1") else (2, 1)
    train(out, *options, processes=first)
    for folder in checkpoint.list_checkpoints(out / "checkpoints"):
        if folder.name > "step-00000040":  # as if it had been killed there
            files.discard(folder)
    facts = json.loads((out / "run.json").read_text())
    del facts["result"]
    (out / "run.json").write_text(json.dumps(facts))
    assert "at step 40" in train(out, *options, processes=then)
    assert apart(alone, out) < 1e-4
    assert apart(alone, out, "val_loss") < 1e-4


@contextmanager
def started(out: Path, *options: str, by: tuple[str, ...]) -> Iterator[subprocess.Popen[str]]:
    command = (*by, "-m", "nanolm", "train", *TINY, "--out", str(out), *options)
    with open(out.parent / f"{out.name}.log", "a") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log, text=True, env=environment())
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(what: Any, seconds: float = TOGETHER) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)
    return found


def steps(out: Path) -> int:
    try:
        return curve(out)[-1][0]
    except (OSError, IndexError, ValueError):
        return 0


def workers(launcher: subprocess.Popen[str]) -> dict[int, int]:
    """The started processes, by rank."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            rank = [part[5:] for part in variables if part.startswith(b"RANK=")]
            if int(parent) == launcher.pid and rank:
                found[int(rank[0])] = int(folder.name)
    return found


def test_one_is_killed_or_all_are_asked_to_stop(commands: Commands, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("train", *TINY, "--out", out, "--steps", "100000", "--save-every", "50")
    first, second = forked(commands, *words)
    until(lambda: steps(out) > 60)
    second.send(signal.SIGKILL)
    begin = time.monotonic()
    assert first.wait() != 0
    assert time.monotonic() - begin < SOON
    second.wait()
    assert "one of the 2 processes exited" in first.said()
    assert "Traceback" not in first.said()
    killed = max(checkpoint.list_checkpoints(out / "checkpoints"))
    files.verify(killed)
    both = forked(commands, *words)
    until(lambda: f"resuming {out} at step {int(killed.name[5:]):,}" in both[0].said())
    until(lambda: steps(out) > int(killed.name[5:]) + 60)
    for each in both:
        each.send(signal.SIGTERM)
    assert [each.wait() for each in both] == [75, 75]
    assert "saved at step" in both[0].said()
    saved = max(checkpoint.list_checkpoints(out / "checkpoints"))
    files.verify(saved)
    assert saved > killed


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")
def test_one_is_killed_or_all_are_asked_to_stop_by_torchrun(tmp_path: Path) -> None:
    out = tmp_path / "run"
    log = tmp_path / "run.log"
    options = ("--steps", "100000", "--save-every", "50")
    with started(out, *options, by=launcher(2)) as run:
        until(lambda: steps(out) > 60)
        os.kill(workers(run)[1], signal.SIGKILL)
        begin = time.monotonic()
        assert run.wait(SOON) != 0
        assert time.monotonic() - begin < SOON
    assert "one of the 2 processes exited" in log.read_text()
    assert "Traceback" not in log.read_text().partition("torch")[0]
    killed = max(checkpoint.list_checkpoints(out / "checkpoints"))
    files.verify(killed)
    with started(out, *options, by=launcher(2)) as run:
        until(lambda: f"resuming {out} at step {int(killed.name[5:]):,}" in log.read_text())
        until(lambda: steps(out) > int(killed.name[5:]) + 60)
        run.send_signal(signal.SIGTERM)
        run.wait(SOON)
    assert "saved at step" in log.read_text()
    saved = max(checkpoint.list_checkpoints(out / "checkpoints"))
    files.verify(saved)
    assert saved > killed


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")
def test_torchrun_starts_again_what_was_killed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ("--steps", "600", "--save-every", "50")
    with started(out, *options, by=launcher(2, "--max-restarts", "1")) as run:
        until(lambda: steps(out) > 100)
        os.kill(workers(run)[1], signal.SIGKILL)
        assert run.wait(300) == 0, (tmp_path / "run.log").read_text()
    assert "resuming" in (tmp_path / "run.log").read_text()
    assert [step for step, _ in curve(out)] == list(range(10, 601, 10))


@pytest.mark.slow
def test_two_launchers_train_together(alone: Path, tmp_path: Path) -> None:
    out, port = tmp_path / "run", free_port()

    def node(rank: int) -> tuple[str, ...]:
        where = ("--master-addr", "127.0.0.1", "--master-port", str(port))
        return (*LAUNCH, "--nnodes", "2", "--node-rank", str(rank), *where, "--nproc-per-node", "1")

    options = ("--steps", "60", "--save-every", "20", "--evaluations", "3")
    with started(out, *options, by=node(0)) as one, started(out, *options, by=node(1)) as other:
        assert [one.wait(120), other.wait(120)] == [0, 0], (tmp_path / "run.log").read_text()
    assert apart(alone, out) < 1e-4
    assert (tmp_path / "run.log").read_text().count(f"training {out}") == 1


MISTAKES = {
    "too few rows": (
        ["train", *TINY, "--batch", "1", "--steps", "5"],
        "--batch 1 is shared by 2 processes",
    ),
    "an unknown option": (["train", *TINY, "--stepz", "5"], "--steps"),
    "another command": (["sample", "--prompt", "x"], "sample runs in one process"),
}


@pytest.mark.parametrize("name", ["an unknown option", "another command"])
def test_a_mistake_is_reported_once(name: str, commands: Commands) -> None:
    words, told = MISTAKES[name]
    both = forked(commands, *words)
    codes = [each.wait() for each in both]
    assert all(codes)
    errors = "".join(each.stream("stderr") for each in both)
    assert errors.count("error: ") == 1
    assert told in errors


@pytest.mark.parametrize(
    "name",
    [
        "too few rows",
        pytest.param("an unknown option", marks=pytest.mark.slow),
        pytest.param("another command", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_is_reported_once_by_torchrun(name: str, tmp_path: Path) -> None:
    words, told = MISTAKES[name]
    done = subprocess.run(
        [*launcher(2), "-m", "nanolm", *words],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1
    assert told in done.stderr


@pytest.mark.slow
def test_the_curves_of_a_thousand_steps(tmp_path: Path) -> None:
    # At a high learning rate, rounding differences soon grow.
    options = ("--steps", "1000", "--evaluations", "2", "--lr", "3e-4")
    for count in (1, 2, 4):
        launched(tmp_path / str(count), *options, by=launcher(count))
    launched(tmp_path / "sharded", *options, "--shard", by=launcher(2))
    for other in ("2", "4", "sharded"):
        assert apart(tmp_path / "1", tmp_path / other) < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("how", ["--no-shard", "--shard"])
def test_one_process_by_nccl_learns_what_plain_training_does(
    how: str, train: Train, tmp_path: Path
) -> None:
    # Otherwise a GPU sums in any order, and no two runs are alike.
    options = ("--steps", "60", "--evaluations", "3", "--device", "cuda", "--deterministic")
    train(tmp_path / "plain", *options)
    launched(tmp_path / "joined", *options, how, by=launcher(1))
    assert apart(tmp_path / "plain", tmp_path / "joined") < 1e-4
