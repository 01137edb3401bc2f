"""What several tests share: one thread, the program as a user runs it, and a trained model."""

import os

# One thread: two test processes share the cores, and results stay bit for bit the same. Said before
# torch is imported: threads of its own would not survive a fork.
os.environ["OMP_NUM_THREADS"] = "1"

import contextlib
import hashlib
import json
import random
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Commands, Loaded
from hypothesis import settings
from journeys import Journey, journeys
from loopback import Server

import nanolm
from nanolm import download
from nanolm.files import commit
from nanolm.pairs import task
from nanolm.pretraining import language
from nanolm.text.corpus import Corpus
from nanolm.text.words import MARK

torch.set_num_threads(1)

# The same examples every time; `make test-slow` draws new ones. On a busy machine, any of them can
# take long.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")

# Prepared texts go where they vanish with the tests.
_cache = tempfile.TemporaryDirectory(prefix="nanolm-tests-")
os.environ["NANOLM_CACHE"] = _cache.name

# Runs as small as these would spend most of their time on writing samples.
language.SAMPLE_TOKENS = 8
task.MOST_TRANSLATED = 3

# What a shell starts in the background ignores Ctrl-C, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

TINY_MODEL: dict[str, Any] = {"layers": 1, "heads": 2, "dim": 16, "context": 16, "batch": 4}


def weights(run: Path) -> str:
    return hashlib.sha256((run / "last" / "model.safetensors").read_bytes()).hexdigest()


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


pytest_plugins = ["servers"]

Cli = Callable[..., subprocess.CompletedProcess[str]]


def program(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "nanolm", *map(str, arguments)]


@pytest.fixture(scope="session")
def loaded() -> Iterator[Loaded]:
    with Loaded() as process:
        yield process


@pytest.fixture
def commands(loaded: Loaded, tmp_path: Path) -> Iterator[Commands]:
    """`nanolm ARGUMENTS` in an empty folder, to be started and ended at will."""
    commands = Commands(loaded, tmp_path)
    yield commands
    commands.close()


@pytest.fixture
def cli(commands: Commands) -> Cli:
    """Run `nanolm ARGUMENTS` in an empty folder, with nothing on stdin."""

    def run(
        *arguments: object, stdin: str | bytes = "", environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = commands.start(*arguments, stdin=stdin, environment=environment)
        code = command.wait()
        return subprocess.CompletedProcess(
            list(map(str, arguments)), code, command.stream("stdout"), command.stream("stderr")
        )

    return run


Terminal = Callable[..., str]


@pytest.fixture
def terminal(commands: Commands) -> Terminal:
    """Run `nanolm ARGUMENTS` with one stream on a terminal, and return what that shows."""

    def run(*arguments: object, stream: str = "stdout", **environment: str) -> str:
        master, slave = os.openpty()
        command = commands.start(
            *arguments,
            streams={stream: os.ttyname(slave)},
            environment={"TERM": "xterm-256color", **environment},
        )
        with ThreadPoolExecutor(1) as pool:
            shown = pool.submit(shown_on, master)
            try:
                assert command.wait() == 0, command.said()
            finally:
                os.close(slave)
            return shown.result()

    return run


def shown_on(master: int) -> str:
    """What is written to a terminal until nobody has it open."""
    shown = b""
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while part := os.read(master, 65536):
            shown += part
    os.close(master)
    return shown.decode()


def write(folder: Path) -> None:
    """What a checkpoint might hold."""
    (folder / "weights").write_bytes(random.Random(1).randbytes(5000))
    (folder / "state.json").write_text('{"step": 3}')


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    return commit(tmp_path, "step-00000003", write)


def unpacked(name: str, folder: Path) -> Path:
    """A run of version 0.1.0: "finished", "unfinished" or "classifier"."""
    with tarfile.open(Path(__file__).parent / "runs" / "v0_1_0" / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


@contextlib.contextmanager
def corpus_of(*documents: str) -> Iterator[Corpus]:
    """These documents, as they are after reading."""
    with tempfile.TemporaryFile() as file:
        file.write(b"".join(MARK + document.encode() for document in documents))
        file.flush()
        yield Corpus(file, file.tell(), len(documents))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A small text of one's own."""
    file = tmp_path / "mine.txt"
    file.write_text("".join(f"The {n} cats sat on {n + 1} mats.\n" for n in range(200)))
    return file


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned the embedded tiny corpus a little."""
    run = tmp_path_factory.mktemp("trained") / "tiny"
    nanolm.train("embedded:tiny", out=run, steps=60, **TINY_MODEL)
    return run


KINDS = ("training", "fine-tuning", "pairs")


@pytest.fixture(params=KINDS)
def journey(request: pytest.FixtureRequest, tmp_path: Path) -> Journey:
    return journeys(tmp_path)[request.param]


@pytest.fixture(scope="module", params=KINDS)
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Journey, Path]:
    """A journey, and a run of it that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("ended")
    journey = journeys(folder)[request.param]
    journey.go(folder / "run")
    return journey, folder / "run"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Takes the place of the Hugging Face Hub too."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(download, "WAITS", (0.0, 0.01))
    with Server() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.root)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", action="store_true", help="write tests/training/golden.json anew")


# What was survived --------------------------------------------------------------------------------

Tally = Callable[[str, int, int], None]
ROW = "survived"


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Tally:
    """Note how often something was tried, and survived, for the table at the end."""

    def note(row: str, tried: int, survived: int) -> None:
        record_property(ROW, [row, tried, survived])
        assert survived == tried, f"{row}: {survived} of {tried}"

    return note


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One row for each promise: of several trials the one that tried most."""
    rows: dict[str, tuple[int, int]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in report.user_properties:
                if name == ROW:
                    row, tried, survived = value
                    rows[row] = max(rows.get(row, (0, 0)), (tried, survived))
    if not rows:
        return
    width = max(map(len, rows))
    terminalreporter.section("what was survived")
    terminalreporter.line(f"{'':<{width}}    tried  survived")
    for row, (tried, survived) in sorted(rows.items()):
        wrong = "" if tried == survived else "  <--"
        terminalreporter.line(f"{row:<{width}}  {tried:>7,}  {survived:>8,}{wrong}")
