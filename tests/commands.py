"""`nanolm`, started in no time: each command is a fork of one process that has loaded everything.

    >>> with Loaded() as loaded:
    ...     commands = Commands(loaded, folder)
    ...     command = commands.start("train", "text.txt")
    ...     command.send(signal.SIGKILL)

Loading torch takes seconds, and the tests run the program some hundred times. It is the program
all the same: arguments, environment, folder, streams, signals and exit are those of a process of
its own. Run as a program, this file is what starts the commands.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import kill_points

SECONDS = 300.0  # that a command may take
SIGNALS = (signal.SIGINT, signal.SIGTERM)
STREAMS = ("stdin", "stdout", "stderr")


class Loaded:
    """The process that forks, as seen from the tests."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair()
        number = theirs.fileno()
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(number)], stdin=subprocess.DEVNULL, pass_fds=[number]
        )
        theirs.close()
        self.lines = self.channel.makefile("rw", encoding="utf-8")
        self.outputs = tempfile.TemporaryDirectory(prefix="nanolm-commands-")
        self.count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.lines.close()
        self.channel.close()  # it ends
        self.process.wait()
        self.outputs.cleanup()

    def ask(self, **request: Any) -> int:
        self.lines.write(json.dumps(request) + "\n")
        self.lines.flush()
        if "wait" in request and not select.select([self.channel], [], [], SECONDS)[0]:
            os.kill(request["wait"], signal.SIGKILL)
        return int(self.lines.readline())

    def place(self) -> Path:
        """A new folder, for the streams of a command."""
        self.count += 1
        place = Path(self.outputs.name, str(self.count))
        place.mkdir()
        return place


@dataclass(frozen=True)
class Command:
    """One that runs, or ran."""

    commands: "Commands"
    pid: int
    place: Path

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code, or the signal that ended it below zero."""
        self.commands.running.discard(self.pid)
        return self.commands.loaded.ask(wait=self.pid)

    def stream(self, name: str) -> str:
        return (self.place / name).read_text(encoding="utf-8")

    def said(self) -> str:
        return self.stream("stdout") + self.stream("stderr")


class Commands:
    """Those in one folder."""

    def __init__(self, loaded: Loaded, folder: Path) -> None:
        self.loaded, self.folder = loaded, folder
        self.running = set[int]()

    def start(
        self,
        *arguments: object,
        stdin: str | bytes = "",
        environment: dict[str, str] | None = None,
        privileged: bool = True,
        streams: dict[str, str] | None = None,
        file_bytes: int | None = None,
        open_files: int | None = None,
        ignored: tuple[int, ...] = (),
    ) -> Command:
        """`streams` are files or devices to use in place of those that are kept; no file may grow
        beyond `file_bytes`, and at most `open_files` can be open; signals can be `ignored` from the
        start, as by nohup."""
        place = self.loaded.place()
        for name in STREAMS:
            (place / name).touch()
        (place / "stdin").write_bytes(stdin.encode() if isinstance(stdin, str) else stdin)
        pid = self.loaded.ask(
            arguments=[str(argument) for argument in arguments],
            folder=str(self.folder),
            environment={**os.environ, **(environment or {})},
            streams=[(streams or {}).get(name, str(place / name)) for name in STREAMS],
            privileged=privileged,
            file_bytes=file_bytes,
            open_files=open_files,
            ignored=ignored,
        )
        self.running.add(pid)
        return Command(self, pid, place)

    def run(self, *arguments: object, **rest: Any) -> tuple[int, str]:
        """To its end: its exit code, and what it said."""
        command = self.start(*arguments, **rest)
        return command.wait(), command.said()

    def close(self) -> None:
        """End what still runs."""
        for pid in self.running:
            os.kill(pid, signal.SIGKILL)
            self.loaded.ask(wait=pid)


def serve(lines: Iterable[str], channel: socket.socket) -> None:
    """Fork what is asked for, and tell how it ended."""
    for line in lines:
        asked = json.loads(line)
        if "wait" in asked:
            answer = os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1])
        else:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            answer = os.fork()
            if answer == 0:
                become(**asked)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        channel.sendall(f"{answer}\n".encode())


def become(
    arguments: list[str],
    folder: str,
    environment: dict[str, str],
    streams: list[str],
    privileged: bool,
    file_bytes: int | None,
    ignored: list[int],
    open_files: int | None = None,
) -> None:
    """The command itself; it does not come back."""
    from nanolm.cli.main import main

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams):
        how = os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY
        os.dup2(os.open(stream, how), number)
    if not privileged:  # even root is then held by the mode of a file
        version, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        ctypes.CDLL(None).capset(version, nothing)
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))
    if open_files is not None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, hard))
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU):
        # Whatever the tests were started by, such as nohup.
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    sys.argv = ["nanolm", *arguments]
    if orders := os.environ.pop(kill_points.ORDERS, None):
        kill_points.arm(orders)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        main()
    except KeyboardInterrupt:
        os._exit(130)  # as if it had come a moment later


def load_everything() -> None:
    import nanolm

    for module in pkgutil.walk_packages(nanolm.__path__, "nanolm."):
        if module.name != "nanolm.__main__":
            with contextlib.suppress(ImportError):  # what is for GPUs needs triton
                importlib.import_module(module.name)
    gc.freeze()  # looked at by no fork, which would copy it


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, which the program does not have there
    load_everything()
    channel = socket.socket(fileno=int(sys.argv[1]))
    serve(channel.makefile(encoding="utf-8"), channel)
