"""Finds links and code blocks in Markdown files, and runs the blocks as a reader would.

bash runs each line of a ```bash block, and the lines after `$ ` of a ```console block. Each
`nanolm` is a fork of a process that has loaded all modules, with smaller settings (`shrink`). A
```python block runs in the test process.

The page itself says which lines do not run here, in a comment at the end of the line
(`# needs a network`, `# runs until Ctrl-C`) or above the rest of a block. Lines that end in
`# takes 10 minutes` run in the slow tests only.
"""

import json
import os
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from commands import Loaded

from nanolm.cli.train import command as train

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"(^|  )# (needs|runs until) ")
LONG = re.compile(r"nanolm (sweep|compare) |nanolm .*--seeds |  # takes ")
# The `nanolm` that bash finds: sends its arguments, folder, process id and environment.
STAND_IN = """#!{python} -IS
import json, os, socket, sys
channel = socket.socket(socket.AF_UNIX)
channel.connect({address!r})
sent = [sys.argv[1:], os.getcwd(), os.getpid(), dict(os.environ)]
channel.sendall(json.dumps(sent).encode() + b"\\n")
sys.exit(int(channel.makefile().readline()))
"""
BUDGETS = ("--minutes", "--steps", "--epochs", "--tokens", "--budget", "--seeds", "--seconds")
SIZES = ("--preset", "--layers", "--heads", "--dim", "--context", "--batch", "--limit")
ONE_STEP = ("--steps", "1", "--evaluations", "1", "--threads", "1", "--batch", "2")
TINY = ("--layers", "1", "--dim", "16", "--context", "16")


@dataclass(frozen=True)
class Block:
    language: str
    text: str

    def commands(self) -> list[str]:
        """Each command that runs here, with its continuation lines."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "bash":
            lines = list(takewhile(lambda line: not NOT_RUN.match(line), lines))
        else:  # the other lines are output
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [line for line in lines if line[:1] not in ("", "#") and not NOT_RUN.search(line)]

    def runs(self, slow: bool) -> bool:
        """Whether any part of it runs in the slow tests, or in the others."""
        python = self.language == "python" and not slow
        return python or any(bool(LONG.search(line)) == slow for line in self.commands())


def blocks(document: Path) -> list[Block]:
    return [Block(*parts) for parts in FENCE.findall(document.read_text(encoding="utf-8"))]


def prose(document: Path) -> str:
    """The text without code blocks."""
    return FENCE.sub("", document.read_text(encoding="utf-8"))


def links(document: Path) -> list[str]:
    """The targets of all links and images, in Markdown and HTML."""
    text = re.sub(r"`[^`\n]*`", "`", prose(document))
    return re.findall(r"\]\(([^()\s]+)\)", text) + re.findall(
        r'(?:href|src(?:set)?)="([^"]+)"', text
    )


def anchors(document: Path) -> set[str]:
    """Of all headings, by the rules that GitHub and mkdocs share."""
    headings = re.findall(r"^#+ (.+?)(?: #+)?$", prose(document), re.MULTILINE)
    plain = [re.sub(r"\]\([^)]*\)|[`*\[\]]", "", heading) for heading in headings]
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain]
    assert len(set(slugs)) == len(slugs), f"{document.name}: a heading occurs twice"
    return set(slugs)


def shrink(arguments: list[str]) -> list[str]:
    """The same command with the smallest settings."""
    if not arguments or {"--help", "--plan", "--list-presets"} & set(arguments):
        return arguments
    verb = arguments[0]
    added: tuple[str, ...] = ()
    dropped: tuple[str, ...] = BUDGETS
    match verb:
        case "train":
            if "--extend" in arguments:
                added = ("--steps", "1")
            else:
                dropped += SIZES
                shape = TINY if {"--from", "--config"}.isdisjoint(arguments) else ()
                added = (*ONE_STEP, *shape)
        case "sweep":
            dropped += SIZES
            added = ("--minutes", "0.02", "--trials", "1", "--preset", "nano", "--evaluations", "1")
        case "finetune" | "finetune-sentiment":
            added = ONE_STEP
            if "--seeds" in arguments:
                added += ("--seeds", "2")
        case "train-pairs":
            dropped += SIZES
            shape = TINY if "--from" not in arguments else ()
            added = (*ONE_STEP[:-1], "64", "--limit", "40", *shape)
        case "translate":
            added = ("--max-tokens", "5")
        case "compare":
            added = ("--budget", "0.01", "--seeds", "1", "--limit", "20")
        case "sample":
            added = ("--tokens", "5")
        case "bench":
            added = ("--seconds", "0.01")
        case _:
            dropped = ()
    kept = iter(arguments)
    small = [word for word in kept if not (word in dropped and next(kept))]
    return [*small, *added]


@dataclass
class Runner:
    """Runs the blocks of a document in order, in `folder`."""

    loaded: Loaded
    folder: Path
    address: str = ""  # of a running server; replaces 127.0.0.1:8000
    slow: bool = False  # run only long commands, instead of all others
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: set[tuple[str, ...]] = field(default_factory=set)  # arguments after `shrink`
    names: dict[str, Any] = field(default_factory=dict)  # defined by earlier Python blocks

    def run(self, document: Path) -> int:
        """Run all blocks; returns the number of commands and Python blocks."""
        count = 0
        with Forks(self) as path:
            for block in blocks(document):
                if block.language == "python" and not self.slow:
                    self.run_python(block.text)
                    count += 1
                for command in block.commands():
                    if bool(LONG.search(command)) == self.slow:
                        self.run_command(self.here(command), path)
                        count += 1
        return count

    def here(self, text: str) -> str:
        return text.replace("127.0.0.1:8000", self.address) if self.address else text

    def run_command(self, command: str, path: str) -> None:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=self.folder,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, f"{command}\nexit code {done.returncode}\n{done.stdout}"

    def run_python(self, text: str) -> None:
        script = self.folder / "block.py"
        script.write_text(self.here(text), encoding="utf-8")
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            self.names = runpy.run_path(str(script), init_globals=self.names)
        finally:
            os.chdir(before)


class Forks:
    """A context in which `nanolm` on the PATH it returns starts a fork of the loaded process."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.socket = runner, socket.socket(socket.AF_UNIX)
        self.folder = tempfile.TemporaryDirectory(
            prefix="nanolm-docs-"
        )  # socket paths must be short

    def __enter__(self) -> str:
        address, program = (Path(self.folder.name, name) for name in ("socket", "nanolm"))
        self.socket.bind(str(address))
        self.socket.listen()
        program.write_text(STAND_IN.format(python=sys.executable, address=str(address)))
        program.chmod(0o755)
        threading.Thread(target=self.accept, daemon=True).start()
        installed = str(Path(sys.executable).parent)  # torchrun
        return os.pathsep.join([self.folder.name, installed, os.environ["PATH"]])

    def __exit__(self, *error: object) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self.socket.close()
        self.folder.cleanup()

    def accept(self) -> None:
        for channel in iter(self.connection, None):
            threading.Thread(target=self.fork, args=(channel,), daemon=True).start()

    def connection(self) -> socket.socket | None:
        try:
            return self.socket.accept()[0]
        except OSError:  # closed by __exit__
            return None

    def fork(self, channel: socket.socket) -> None:
        with channel, channel.makefile("r", encoding="utf-8") as lines:
            arguments, folder, pid, environment = json.loads(lines.readline())
            small = shrink(arguments)
            with self.runner.lock:
                if small[:1] == ["train"] and tuple(small) in self.runner.done:
                    # Only options that `shrink` drops are different: check that they are valid.
                    train.make_context("train", arguments[1:])
                    channel.sendall(b"0\n")
                    return
                self.runner.done.add(tuple(small))
                started = self.runner.loaded.ask(
                    arguments=small,
                    folder=folder,
                    environment=environment,
                    streams=[f"/proc/{pid}/fd/{number}" for number in range(3)],
                    privileged=True,
                    file_bytes=None,
                    ignored=(),
                )
                code = self.runner.loaded.ask(wait=started)
            channel.sendall(f"{code}\n".encode())
