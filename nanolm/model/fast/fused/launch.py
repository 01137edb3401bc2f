"""How kernels are launched, as measured on an H200."""

import torch
import triton
import triton.language as tl

PROCESSORS = 132  # of an H200
STAGES = tl.constexpr(3)  # so far ahead a loop reads what comes next


def available() -> bool:
    """Whether there is a GPU to run this on, given that triton could be imported."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def width(n: int) -> int:
    """The power of two in which `n` numbers fit."""
    return int(triton.next_power_of_2(n))


def warps(numbers: int) -> int:
    """Eight numbers for every thread: 16 bytes of bfloat16, the most it can read at once."""
    return max(1, min(16, numbers // 256))


def for_row(block: int) -> int:
    """Warps for a row that has to be read to its end before its scale is known."""
    return max(1, min(8, block // 2048))
