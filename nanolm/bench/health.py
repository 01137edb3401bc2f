"""The environment: versions, device, memory and free disk space."""

import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from nanolm import __version__
from nanolm.bench.machine import processor
from nanolm.errors import NanolmError
from nanolm.formats import counted
from nanolm.machine import available_cores, cache_folder
from nanolm.model.device import choose_device, choose_dtype, has_float8
from nanolm.planning.tuning import missing_compiler

DEPENDENCIES = ("numpy", "tiktoken", "safetensors", "click", "rich")
OPTIONAL = ("triton", "tokenizers", "pyarrow", "backports.zstd", "transformers")
LITTLE_SPACE = 2e9  # bytes; a few checkpoints of GPT-2 size


def health() -> dict[str, str]:
    device, reason = choose_device("auto")
    missing = missing_compiler(device)
    return {
        "nanolm": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "torch": torch.__version__,
        "needed": ", ".join(f"{name} {version(name) or 'MISSING'}" for name in DEPENDENCIES),
        "extras": ", ".join(f"{name} {version(name) or 'no'}" for name in OPTIONAL),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": f"{processor()}, {available_cores()} of {os.cpu_count()} cores available",
        "threads": threads(),
        "memory": memory(),
        "device": f"{device} ({reason})" + gpu(device),
        "dtype": dtype(device),
        "compile": f"no: {missing}" if missing else "available (--compile)",
        "cache": room(cache_folder),
        "here": room(Path.cwd),
    }


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def threads() -> str:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES")
    given = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    return ", ".join([f"torch uses {counted(torch.get_num_threads(), 'thread')}", *given])


def memory() -> str:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = (page * os.sysconf(f"SC_{name}") for name in ("PHYS_PAGES", "AVPHYS_PAGES"))
    except (OSError, ValueError, AttributeError):  # not supported on every system
        return "unknown"
    return f"{gigabytes(total)}, {gigabytes(free)} free"


def gpu(device: str) -> str:
    if device != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info()
    major, minor = torch.cuda.get_device_capability()
    memory = f"{gigabytes(total)}, {gigabytes(free)} free"
    count = f", {torch.cuda.device_count()} GPUs" if torch.cuda.device_count() > 1 else ""
    return f", {memory}, compute capability {major}.{minor}, CUDA {torch.version.cuda}{count}"


def dtype(device: str) -> str:
    if device == "cpu":
        return "float32, or bfloat16 if that proves faster in a run"
    chosen, reason = choose_dtype("auto", device)
    float8 = "available" if device == "cuda" and has_float8() else "not available"
    return f"{chosen} ({reason}), float8 {float8}"


def room(place: Callable[[], Path]) -> str:
    try:
        folder = place()
        free = shutil.disk_usage(folder).free
    except (OSError, NanolmError) as error:
        return f"NOT USABLE: {error}"
    shown = re.sub(f"^{re.escape(str(Path.home()))}", "~", str(folder))  # hides the user name
    return f"{shown}, {gigabytes(free)} free" + (" (LOW)" if free < LITTLE_SPACE else "")


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"
