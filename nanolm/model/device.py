"""Which device to run on, and what is recorded there to be run again."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nanolm.errors import UsageError
from nanolm.machine import available_threads
from nanolm.model.fast.training import training_kernels

SMALL = 100_000_000  # bytes of weights; below, a second thread hardly helps (docs/experiments.md)


def choose_device(asked: str) -> tuple[str, str]:
    """The device to use and why; one that is asked for and not there is a UsageError."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if asked == "auto":
        if there["cuda"]:
            return "cuda", torch.cuda.get_device_name()
        return ("mps", "an Apple GPU") if there["mps"] else ("cpu", "no GPU found")
    if asked not in ("cpu", *there):
        raise UsageError(f"--device {asked}: there is auto, cpu, cuda, mps")
    if not there.get(asked, True):
        raise UsageError(f"--device {asked}: no such GPU can be used here; try --device cpu")
    return asked, "as asked"


def choose_dtype(asked: str, device: str) -> tuple[str, str]:
    """The numbers of large products and why; those that cannot be had are a UsageError."""
    if asked == "float8" and not (device == "cuda" and has_float8()):
        needs = "needs a GPU of compute capability 8.9 or more, and Triton"
        raise UsageError(f"--dtype float8: {needs}; try --dtype bfloat16")
    if asked != "auto":
        return asked, "as asked"
    if device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return "bfloat16", "this GPU supports it"
    if device == "cuda" and torch.cuda.get_device_capability() >= (7, 0):
        return "float16", "this GPU is fast with it, and has no bfloat16"
    return "float32", f"the safe choice on {device}"


def has_float8() -> bool:
    """Whether the GPU multiplies such numbers, and there are kernels for it."""
    return training_kernels(float8=True) is not None


@contextmanager
def graph_capture(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Record what the GPU is told to do, without doing it. Other threads would spoil that, and so
    would the garbage collector when it frees the graph of an earlier model."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
            yield
    finally:
        if collecting:
            gc.enable()


def free_memory() -> None:
    """Give back what a model that is no longer there had of a GPU."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def use_fitting_threads(model: nn.Module) -> None:
    """As many as make single tokens fast: by a rule, so that the same text comes out again."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    torch.set_num_threads(1 if size < SMALL else available_threads())
