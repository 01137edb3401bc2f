"""llama.cpp as a peer: it generates text with the model of a GGUF file, in a process of its own.

    >>> llama_cpp = LlamaCpp(Path("novel.Q8_0.gguf"), prompt=[0], tokens=64, threads=2)
    >>> llama_cpp.step()

In the same process, both it and torch would be slower (measured). The package from PyPI does not
use all instructions of new processors; one built from source may be faster.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from nanolm.bench.settings import LLAMA_CPP
from nanolm.errors import UsageError
from nanolm.machine import module_command

STDOUT = 1
READY = "ready"  # a line of the process: the model is loaded, or a text complete


class LlamaCpp:
    def __init__(self, file: Path, prompt: list[int], tokens: int, threads: int) -> None:
        check_installed()
        request = {"file": str(file), "prompt": prompt, "tokens": tokens, "threads": threads}
        command, pipe = module_command(__name__, json.dumps(request)), subprocess.PIPE
        self.process = subprocess.Popen(**command, stdin=pipe, stdout=pipe, text=True)
        self.wait_until_ready()

    def step(self) -> None:
        """Generate the whole text greedily."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        assert self.process.stdout
        if not any(line.strip() == READY for line in self.process.stdout):
            raise UsageError(f"--against {LLAMA_CPP}: its process stopped")

    def wait(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def check_installed() -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        raise UsageError(f"--against {LLAMA_CPP}: try `pip install xllamacpp`")


def generate(file: str, prompt: list[int], tokens: int, threads: int) -> None:
    """Generate the text once for every line of stdin."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = file, len(prompt) + tokens, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_gpu_layers, params.verbosity = 0, -1
    server = xllamacpp.Server(params)
    request: dict[str, Any] = {"prompt": prompt, "n_predict": tokens, "temperature": 0}
    request |= {"ignore_eos": True, "cache_prompt": False}
    say_ready()
    for _ in sys.stdin:
        answer = server.handle_completions(request)
        assert answer["usage"]["completion_tokens"] == tokens, answer
        say_ready()


def say_ready() -> None:
    os.write(STDOUT, f"{READY}\n".encode())


if __name__ == "__main__":
    generate(**json.loads(sys.argv[1]))
