"""The machine and its peak performance, as specified or as measured."""

import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanolm import __version__
from nanolm.bench.turns import medians
from nanolm.machine import available_threads

# Dense 16-bit FLOP/s with 32-bit accumulation (bfloat16, or float16 on GPUs without it: V100, T4),
# by the full name that the driver reports.
PEAKS = {
    r"B200": 2250e12,
    r"H100 80GB HBM3|H200|GH200 (480|144)GB.*": 989e12,
    r"H100 PCIe": 756e12,
    r"A100-(SXM4|PCIE)-(40|80)GB|A100 80GB PCIe": 312e12,
    r"L40S": 362e12,
    r"L4": 121e12,
    r"A40": 150e12,
    r"A30|GeForce RTX 4090": 165e12,
    r"GeForce RTX 3090": 71e12,
    r"V100-SXM2-(16|32)GB": 125e12,
    r"V100-PCIE-(16|32)GB": 112e12,
    r"T4": 65e12,
}
MATRIX_SIDE = {"cuda": 8192, "cpu": 1024}  # of the matrices to time
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}  # larger than any cache


def peak_of(gpu: str) -> float | None:
    """The peak operations per second of a GPU, or None if not known for certain."""
    name = re.sub(r"^(NVIDIA |Tesla )+", "", gpu)
    return next((peak for known, peak in PEAKS.items() if re.fullmatch(known, name)), None)


def facts(device: str, dtype: str) -> dict[str, Any]:
    return {
        "device": device,
        "name": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "dtype": dtype,
        "threads": available_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "nanolm": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def processor() -> str:
    listed = Path("/proc/cpuinfo")
    text = listed.read_text() if listed.exists() else ""
    if match := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
        return match[1].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class Ceiling:
    """A large operation to time, with its `amount` of work (operations or bytes)."""

    amount: int
    step: Callable[[], object]
    wait: Callable[[], object]


def product(device: str, dtype: str) -> Ceiling:
    """A product of random square matrices; constant ones use less power and run faster on a GPU."""
    side, kind = MATRIX_SIDE.get(device, 4096), getattr(torch, dtype)
    left, right = (torch.randn(side, side, device=device).to(kind) for _ in range(2))
    step = partial(torch.mm, left, right, out=torch.empty_like(left))
    return Ceiling(2 * side**3, step, partial(wait_for, device))


def copy(device: str) -> Ceiling:
    size = COPY_BYTES.get(device, 1 << 28)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return Ceiling(2 * size, partial(target.copy_, source), partial(wait_for, device))


def wait_for(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def ceilings(device: str, dtype: str, seconds: float) -> tuple[float, float]:
    """Operations per second of a large product, and bytes per second of a large copy."""
    large, memory = product(device, dtype), copy(device)
    times = medians({"product": large, "copy": memory}, seconds)
    return large.amount / times["product"], memory.amount / times["copy"]
