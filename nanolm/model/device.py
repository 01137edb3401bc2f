"""Chooses device and dtype, and captures CUDA graphs."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nanolm.errors import UsageError
from nanolm.machine import available_threads
from nanolm.model.fast.training import kernels_for_gpu

SMALL = 100_000_000  # bytes of weights; below, more threads hardly help (docs/experiments.md)


def choose_device(asked: str) -> tuple[str, str]:
    """The device to use, and the reason; a UsageError if the requested one is not available."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if asked == "auto":
        if there["cuda"]:
            return "cuda", torch.cuda.get_device_name()
        return ("mps", "an Apple GPU") if there["mps"] else ("cpu", "no GPU found")
    if asked not in ("cpu", *there):
        raise UsageError(f"--device {asked}: choose from auto, cpu, cuda, mps")
    if not there.get(asked, True):
        raise UsageError(f"--device {asked}: no such GPU is available; try --device cpu")
    return asked, "as requested"


def choose_dtype(asked: str, device: str) -> tuple[str, str]:
    """The precision of matrix products, and the reason; a UsageError if it is not available."""
    if asked == "float8" and not (device == "cuda" and has_float8()):
        needs = "needs Triton and a GPU with compute capability 8.9 or higher"
        raise UsageError(f"--dtype float8: {needs}; try --dtype bfloat16")
    if asked != "auto":
        return asked, "as requested"
    if device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return "bfloat16", "this GPU supports it"
    if device == "cuda" and torch.cuda.get_device_capability() >= (7, 0):
        return "float16", "fast on this GPU, which does not support bfloat16"
    return "float32", f"the safe choice on {device}"


def has_float8() -> bool:
    """Whether the GPU supports float8 products and our kernels are available."""
    return kernels_for_gpu(float8=True) is not None


@contextmanager
def graph_capture(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Record GPU work without running it. Work from other threads would break the capture, and so
    would the garbage collector if it freed the graph of an earlier model."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
            yield
    finally:
        if collecting:
            gc.enable()


def free_memory() -> None:
    """Release the GPU memory of deleted models."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def use_fitting_threads(model: nn.Module) -> None:
    """Set the threads for fast decoding, by a fixed rule so that results are reproducible."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    torch.set_num_threads(1 if size < SMALL else available_threads())
