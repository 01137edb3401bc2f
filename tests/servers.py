"""A server with small models, as a user starts it."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import pytest
import torch
from commands import Command, Commands, Loaded
from models import lively, lively_seq2seq

from nanolm.model.classifier import Classifier
from nanolm.model.config import ClassifierConfig, configure
from nanolm.model.huggingface import save_model, save_seq2seq
from nanolm.text.tokenizer import train_tokenizer

if TYPE_CHECKING:
    import openai

SHAPE = {"layers": 2, "heads": 2, "dim": 16, "context": 32}
PAIRS: dict[str, dict[str, Any]] = {
    "translator": {},
    "endless": {"context": 1024},
    "bottleneck": {"attention": "none"},
}
TEXT = "the cat sat on the mat. the dog ran after the cat, and the cat ran up a tree. " * 8


class Process(Protocol):
    @property
    def pid(self) -> int: ...

    def terminate(self) -> None: ...

    def wait(self, timeout: float) -> int: ...


@dataclass(frozen=True)
class Served:
    """A server that runs, and where its models are."""

    url: str  # without a slash at its end
    process: Process
    folder: Path

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def client(self) -> "openai.OpenAI":
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def memory(self) -> int:
        """Bytes that it holds now."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `writer`, `other` and `labels`; with `translator`, `endless` and `bottleneck`
    for pairs. All of random weights."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer([TEXT], "bpe", 300)
    torch.manual_seed(0)
    for name, family in (("writer", "gpt2"), ("other", "lstm")):
        place = folder / name
        place.mkdir()
        model = lively(configure(family, vocab_size=tokenizer.vocab_size, **SHAPE), std=0.4)
        save_model(model, place, tokenizer)
    base = configure("modern", vocab_size=tokenizer.vocab_size, **SHAPE)
    classifier = Classifier(ClassifierConfig(base=base, labels=("bad", "good"), window=32))
    torch.nn.init.normal_(classifier.score.weight)
    for name, changes in PAIRS.items():
        family = "seq2seq-gru" if "attention" in changes else "modern-encoder-decoder"
        shape = SHAPE | {"vocab_size": tokenizer.vocab_size, "std": 0.4}
        translator = lively_seq2seq(family, **shape | changes)
        if name == "endless":
            with torch.no_grad():  # the end is never likely
                translator.token_embedding.weight[tokenizer.end_of_text] = 0
        (folder / name).mkdir()
        save_seq2seq(translator, folder / name, tokenizer)
    (folder / "labels").mkdir()
    save_model(classifier, folder / "labels", tokenizer)
    return folder


class Forked:
    """A command that is a fork of the loaded process, to be used like a Popen."""

    def __init__(self, command: Command) -> None:
        self.command, self.pid, self.code = command, command.pid, None

    code: int | None

    def terminate(self) -> None:
        if self.code is None:
            self.command.send(signal.SIGTERM)

    def wait(self, timeout: float) -> int:
        if self.code is None:
            self.code = self.command.wait()
        return self.code


Start = Callable[..., Served]


@pytest.fixture(scope="session")
def start(models: Path, loaded: Loaded) -> Iterator[Start]:
    """Starts servers; all of them end with the tests, as they should. With `fork`, one starts
    faster."""
    running: list[Process] = []
    outputs: list[IO[str]] = []  # kept open
    commands = Commands(loaded, models)

    def begin(
        *arguments: object,
        names: tuple[str, ...] = ("writer", "other", "labels"),
        fork: bool = True,
    ) -> Served:
        words = ["serve", *(models / name for name in names), "--port=0", *arguments]
        process: Process
        if fork:
            address = commands.folder / f"address-{len(running)}"
            os.mkfifo(address)
            command = commands.start(
                *words,
                streams={"stdout": str(address), "stderr": f"/proc/{os.getpid()}/fd/2"},
                open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )
            process = Forked(command)
            outputs.append(address.open())
        else:
            command_line = [sys.executable, "-m", "nanolm", *map(str, words)]
            process = popen = subprocess.Popen(command_line, stdout=subprocess.PIPE, text=True)
            assert popen.stdout
            outputs.append(popen.stdout)
        running.append(process)
        line = outputs[-1].readline().partition("#")[0].strip().rstrip("/")
        assert line.startswith("http://"), process.wait(10)
        return Served(line, process, models)

    yield begin
    for process in running:
        process.terminate()
    for process in running:
        assert process.wait(30) in (0, -9)


@pytest.fixture(scope="session")
def served(start: Start) -> Served:
    return start(fork=False)
