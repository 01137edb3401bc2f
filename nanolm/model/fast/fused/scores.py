"""Cross-entropy that overwrites the logits with their gradients."""
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanolm.model.fast.fused.launch import warps, width

CHUNK = 4096  # logits processed at a time, measured on an H200


@triton.jit  # type: ignore[untyped-decorator]
def cross_entropy_kernel(  # type: ignore[no-untyped-def]
    logits,  # (rows, columns), overwritten with their gradient
    targets,
    losses,
    low,  # a float8 copy of the gradient, times `steep`
    steep,
    STRIDE: tl.constexpr,  # between rows
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,  # each processes eight columns at a time
    ROUND: tl.constexpr,
):
    """One row per program, in two passes. Each lane keeps its own sum, scaled to the largest logit
    it has seen, so lanes do not wait for each other until the end of the first pass."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * STRIDE
    low += row * STRIDE
    target = tl.load(targets + row)
    right = tl.load(logits + target).to(tl.float32)
    place = tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    largest, total = tl.full((LANES,), -1e30, tl.float32), tl.zeros((LANES,), tl.float32)
    for first in range(0, COLUMNS, 8 * LANES):
        column = first + place
        part = tl.load(
            logits + column, column < COLUMNS, float("-inf"), eviction_policy="evict_last"
        ).to(tl.float32)
        before = largest
        largest = tl.maximum(largest, tl.max(part, 1))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(part - largest[:, None]), 1)
    top = tl.max(largest, 0)
    norm = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    tl.store(losses + row, norm - right)
    # In reverse, because the values read last are most likely still cached.
    for before_last in range(0, COLUMNS, 8 * LANES):
        column = (COLUMNS - 1) // (8 * LANES) * (8 * LANES) - before_last + place
        inside = column < COLUMNS
        part = tl.load(logits + column, inside, 0.0, eviction_policy="evict_first").to(tl.float32)
        result = tl.exp(part - norm) - tl.where(column == target, 1.0, 0.0)
        tl.store(logits + column, result, inside, eviction_policy="evict_first")
        if ROUND:
            small = (result * steep).to(low.dtype.element_ty)
            tl.store(low + column, small, inside, eviction_policy="evict_first")


def cross_entropy_(
    logits: Tensor,
    targets: Tensor,
    columns: int | None = None,
    low: Tensor | None = None,
    steep: float = 1.0,
) -> Tensor:
    """The loss of each row, (rows,) in float32. Overwrites `logits` (rows, vocabulary) with their
    gradient, softmax(logits) - onehot(targets). Columns after the first `columns` are unchanged.

    If `low`, of the same width, is given, the gradient is also written there, times `steep`.
    """
    if not logits.is_contiguous():
        raise ValueError("logits must be contiguous, because they are overwritten")
    rows, stride = logits.shape
    columns = columns or stride
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = max(128, min(CHUNK, width(columns)))
    shape = {"STRIDE": stride, "COLUMNS": columns, "LANES": block // 8, "num_warps": warps(block)}
    given = (logits, targets.contiguous(), losses, logits if low is None else low, steep)
    cross_entropy_kernel[(rows,)](*given, ROUND=low is not None, **shape)
    return losses
