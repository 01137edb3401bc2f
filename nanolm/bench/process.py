"""Runners in processes of their own: in one process, two libraries slow each other down (measured).

>>> runner = RunnerProcess("nanolm.bench.sampling", folder="runs/novel/best", tokens=64)
>>> runner.step()

The module calls `serve_steps` with a function that takes these arguments and returns a step.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from nanolm.errors import UsageError
from nanolm.machine import module_command

STDOUT = 1
READY = "ready"  # a line of the process: it has started, or a step is complete


class RunnerProcess:
    def __init__(self, module: str, **arguments: Any) -> None:
        self.module, pipe = module, subprocess.PIPE
        command = module_command(module, json.dumps(arguments))
        self.process = subprocess.Popen(**command, stdin=pipe, stdout=pipe, text=True)
        try:
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def step(self) -> None:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        assert self.process.stdout
        if not any(line.strip() == READY for line in self.process.stdout):
            code = self.process.wait()
            raise UsageError(f"the process of {self.module} stopped with exit code {code}")

    def wait(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def serve_steps(make: Callable[..., Callable[[], object]]) -> None:
    """In the process: run a step for every line of stdin."""
    step = make(**json.loads(sys.argv[1]))
    ready = f"\n{READY}\n".encode()  # libraries may have printed half a line
    os.write(STDOUT, ready)
    for _ in sys.stdin:
        step()
        os.write(STDOUT, ready)
