"""Triton kernels for Muon: half of a symmetric product, and its memory-bound parts in one pass.

    >>> x = torch.randn(8, 768, 2048, device="cuda", dtype=torch.bfloat16)
    >>> symmetric_product(x, x).shape
    torch.Size([8, 768, 768])

They compute the same as the functions of `muon`, and need a GPU with a Tensor Memory Accelerator
(compute capability 9 or 10).
"""
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

TILE, DEPTH = 128, 64  # rows and columns of a tile of the result; columns of x per iteration
LAUNCH: dict[str, int] = {"num_warps": 8, "num_stages": 3}  # the fastest on an H200
BLOCK = 2048
ALIGNED = 8  # numbers of 16 bits; strides must be multiples of 16 bytes


def available() -> bool:
    ours = torch.cuda.is_available() and torch.version.hip is None
    return ours and torch.cuda.get_device_capability()[0] in (9, 10)


def fits(*matrices: Tensor) -> bool:
    """Whether `symmetric_product` supports these (count, rows, columns)."""
    return all(
        x.dtype == torch.bfloat16
        and 1 in x.stride()[1:]
        and all(side % ALIGNED == 0 for side in x.shape[1:])
        for x in matrices
    )


@triton.jit  # type: ignore[untyped-decorator]
def product_kernel(  # type: ignore[no-untyped-def]
    x, y, other, result, factor, other_factor, columns,
    TRANSPOSED: tl.constexpr, ADD: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile on or below the diagonal, stored there and, transposed, above it."""
    number, matrix = tl.program_id(0), tl.program_id(1)
    # The tile's row: number = row * (row + 1) / 2 + column. The root may be rounded up or down.
    row = ((tl.sqrt(8.0 * number + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > number, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= number, row + 1, row)
    column = number - row * (row + 1) // 2
    total = tl.zeros((TILE, TILE), tl.float32)
    for k in range(0, columns, DEPTH):
        if TRANSPOSED:
            a = x.load([matrix, k, row * TILE]).reshape(DEPTH, TILE).T
            b = y.load([matrix, k, column * TILE]).reshape(DEPTH, TILE)
        else:
            a = x.load([matrix, row * TILE, k]).reshape(TILE, DEPTH)
            b = y.load([matrix, column * TILE, k]).reshape(TILE, DEPTH).T
        total = tl.dot(a, b, total)
    total *= factor
    if ADD:
        tile = other.load([matrix, row * TILE, column * TILE]).reshape(TILE, TILE)
        total += other_factor * tile.to(tl.float32)
    low = total.to(tl.bfloat16)
    result.store([matrix, row * TILE, column * TILE], low.reshape(1, TILE, TILE))
    if row != column:
        result.store([matrix, column * TILE, row * TILE], low.T.reshape(1, TILE, TILE))


def symmetric_product(
    x: Tensor,
    y: Tensor,
    factor: float = 1.0,
    other: Tensor | None = None,
    other_factor: float = 0.0,
) -> Tensor:
    count, rows, columns = x.shape
    result = x.new_empty(count, rows, rows)
    transposed = x.stride(2) != 1
    if transposed:
        x, y, shape = x.mT, y.mT, [1, DEPTH, TILE]
    else:
        shape = [1, TILE, DEPTH]
    whole = [1, TILE, TILE]
    added = result if other is None else other
    across = triton.cdiv(rows, TILE)
    product_kernel[(across * (across + 1) // 2, count)](
        described(x, shape),
        described(y, shape),
        described(added, whole),
        described(result, whole),
        *(factor, other_factor, columns),
        TRANSPOSED=transposed,
        ADD=other is not None,
        TILE=TILE,
        DEPTH=DEPTH,
        **LAUNCH,
    )
    return result


def described(matrices: Tensor, tile: list[int]) -> TensorDescriptor:
    return TensorDescriptor(matrices, list(matrices.shape), list(matrices.stride()), tile)


@triton.jit  # type: ignore[untyped-decorator]
def nesterov_kernel(  # type: ignore[no-untyped-def]
    gradient, momentum, direction, grad_scale, found_inf, beta, count,
    SCALED: tl.constexpr, CHECKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    before = tl.load(momentum + i, mask=inside, other=0.0)
    now = tl.load(gradient + i, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        now /= tl.load(grad_scale)
    if CHECKED:
        now = tl.where(tl.load(found_inf) > 0, before, now)
    after = now + (before - now) * beta
    tl.store(momentum + i, after, mask=inside)
    low = (now + (after - now) * beta).to(direction.dtype.element_ty)
    tl.store(direction + i, low, mask=inside)


def nesterov(
    gradient: Tensor,
    momentum: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    beta: float,
) -> Tensor:
    """Update a momentum, and return the Nesterov momentum in bfloat16 (see `Muon.directions`)."""
    gradient = gradient.contiguous()
    direction = torch.empty_like(gradient, dtype=torch.bfloat16)
    if not (size := gradient.numel()):  # a shard without rows
        return direction
    scalars = (gradient if scalar is None else scalar for scalar in (grad_scale, found_inf))
    nesterov_kernel[(triton.cdiv(size, BLOCK),)](
        *(gradient, momentum, direction, *scalars, beta, size),
        SCALED=grad_scale is not None,
        CHECKED=found_inf is not None,
        BLOCK=BLOCK,
    )
    return direction


@triton.jit  # type: ignore[untyped-decorator]
def weighted_sum_kernel(  # type: ignore[no-untyped-def]
    x, y, result, x_factors, y_factors, size, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    matrix = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, place = i < size, matrix * size + i
    total = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * tl.load(x_factors + matrix)
    if ADD:
        other = tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
        total += other * tl.load(y_factors + matrix)
    tl.store(result + place, total.to(result.dtype.element_ty), mask=inside)


def weighted_sum(
    x: Tensor, x_factors: Tensor, y: Tensor | None = None, y_factors: Tensor | None = None
) -> Tensor:
    """x_factors * x + y_factors * y, with one factor for each matrix."""
    result, size = torch.empty_like(x), x[0].numel()
    other = (x, x_factors) if y is None or y_factors is None else (y, y_factors)
    weighted_sum_kernel[(triton.cdiv(size, BLOCK), len(x))](
        *(x, other[0], result, x_factors, other[1], size), ADD=y is not None, BLOCK=BLOCK
    )
    return result


@triton.jit  # type: ignore[untyped-decorator]
def multiply_add_kernel(  # type: ignore[no-untyped-def]
    matrix, kept, update, rates, columns, count, PER_ROW: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    rate = tl.load(rates + i // columns, mask=inside, other=0.0) if PER_ROW else tl.load(rates)
    moved = tl.load(matrix + i, mask=inside, other=0.0) * tl.load(kept)
    moved += tl.load(update + i, mask=inside, other=0.0).to(tl.float32) * rate
    tl.store(matrix + i, moved, mask=inside)


def multiply_add_(matrix: Tensor, kept: Tensor, update: Tensor, rates: Tensor) -> None:
    """matrix = kept * matrix + rates * update, both contiguous; with one rate or one per row."""
    size, columns = matrix.numel(), matrix.shape[1]
    grid = (triton.cdiv(size, BLOCK),)
    how = {"PER_ROW": len(rates) > 1, "BLOCK": BLOCK}
    multiply_add_kernel[grid](matrix, kept, update, rates, columns, size, **how)
