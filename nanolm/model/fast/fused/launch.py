"""Launch parameters of kernels, as measured on an H200."""

import torch
import triton
import triton.language as tl

PROCESSORS = 132  # multiprocessors of an H200
STAGES = tl.constexpr(3)  # of software pipelining: how far ahead loops load


def available() -> bool:
    """Whether the GPU supports these kernels, given that Triton can be imported."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def width(n: int) -> int:
    """`n`, rounded up to a power of two."""
    return int(triton.next_power_of_2(n))


def warps(numbers: int) -> int:
    """Eight values per thread: 16 bytes of bfloat16, the most it can load at once."""
    return max(1, min(16, numbers // 256))


def for_row(block: int) -> int:
    """Warps for a row that must be read completely before its scale is known."""
    return max(1, min(8, block // 2048))
