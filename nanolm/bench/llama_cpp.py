"""llama.cpp as a peer: it generates text with the model of a GGUF file, in a process of its own.

    >>> runner = llama_cpp(Path("novel.Q8_0.gguf"), prompt=[0], tokens=64, threads=2)
    >>> runner.step()

The package from PyPI does not use all instructions of new processors; one built from source may be
faster.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanolm.bench.process import RunnerProcess, serve_steps
from nanolm.bench.settings import LLAMA_CPP
from nanolm.errors import UsageError


def llama_cpp(file: Path, prompt: list[int], tokens: int, threads: int) -> RunnerProcess:
    """Generate the whole text greedily in each step."""
    check_installed()
    how = {"prompt": prompt, "tokens": tokens, "threads": threads}
    return RunnerProcess(__name__, file=str(file), **how)


def check_installed() -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        raise UsageError(f"--against {LLAMA_CPP}: try `pip install xllamacpp`")


def step_of(file: str, prompt: list[int], tokens: int, threads: int) -> Callable[[], None]:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = file, len(prompt) + tokens, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_gpu_layers, params.verbosity = 0, -1
    server = xllamacpp.Server(params)
    request: dict[str, Any] = {"prompt": prompt, "n_predict": tokens, "temperature": 0}
    request |= {"ignore_eos": True, "cache_prompt": False}

    def step() -> None:
        answer = server.handle_completions(request)
        assert answer["usage"]["completion_tokens"] == tokens, answer

    return step


if __name__ == "__main__":
    serve_steps(step_of)
