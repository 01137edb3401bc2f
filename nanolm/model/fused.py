"""What stands between the matrices of a Transformer, in one kernel each, for training on a GPU.

    >>> gate_and_up = torch.randn(2, 5, 96, device="cuda", requires_grad=True)
    >>> swiglu(gate_and_up).shape
    torch.Size([2, 5, 48])

All of it waits for memory, so what counts is that every number is read once and written once; the
backward kernels above all write the gradient of a fused product into one piece, without pasting it
together. Arithmetic is in float32, results are in the precision of the input. The plain twins that
the tests hold this to are `nonlinearity`, `make_norm` and `Attention` in `gpt.py`. All functions
but `cross_entropy_` can be differentiated.
"""
# ruff: noqa: N803

import math
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

PROCESSORS = 132  # of an H200
STAGES = tl.constexpr(3)  # so far ahead a loop reads what comes next
CHUNK = 4096  # logits looked at together, measured on an H200
FEW = 512  # rows of a table
GELU = 2 * math.sqrt(2 / math.pi)


def available() -> bool:
    """Whether there is a GPU to run this on, given that triton could be imported."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def width(n: int) -> int:
    """The power of two in which `n` numbers fit."""
    return int(triton.next_power_of_2(n))


def warps(numbers: int) -> int:
    """Eight numbers for every thread: 16 bytes of bfloat16, the most it can read at once."""
    return max(1, min(16, numbers // 256))


def for_norm(block: int) -> tuple[int, int]:
    """Rows together, and warps; measured on an H200, as all of these."""
    return 2, max(2, min(16, block // 512))


def for_norm_backward(block: int) -> tuple[int, int, int]:
    """The same, and programs for each processor: they add up the gradients of the weights."""
    return max(1, 4096 // block), max(2, min(16, block // 128)), 2


def for_row(block: int) -> int:
    """Warps for a row that has to be read to its end before its scale is known."""
    return max(1, min(8, block // 2048))


def for_turned_backward(numbers: int) -> tuple[int, int]:
    """Warps, and programs for each processor."""
    return max(2, min(16, numbers // 512)), 8


# Rounding to float8, while the numbers are at hand: for products in it (`float8.py`)


@triton.jit
def row_scale(largest):  # type: ignore[no-untyped-def]
    """What a row is divided by, so that its largest number becomes the largest there is."""
    return tl.maximum(largest, 1e-30) / 448.0


@triton.jit
def in_float8(part, scale):  # type: ignore[no-untyped-def]
    return tl.minimum(tl.maximum(part * (1 / scale), -448.0), 448.0).to(tl.float8e4nv)


@triton.jit  # type: ignore[untyped-decorator]
def round_again(  # type: ignore[no-untyped-def]
    x, low, scales, row, most, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """A row that this program has just written; each thread reads what it wrote itself."""
    scale = row_scale(tl.max(most, 0))
    tl.store(scales + row, scale)
    for first in tl.static_range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        i, inside = row * WIDTH + column, column < WIDTH
        part = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(low + i, in_float8(part, scale), mask=inside)


def room_for_rounded(x: Tensor, rounding: bool) -> tuple[Tensor, Tensor]:
    """The same numbers in float8, and a scale for each row; or something in their place."""
    if not rounding:
        return x, x
    scales = x.new_empty(*x.shape[:-1], dtype=torch.float32)
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), scales


def with_rounded(x: Tensor, found: tuple[Tensor, Tensor], rounding: bool) -> Tensor:
    """Whoever gets this very tensor need not round it; whoever gets another made of it, must."""
    if rounding:
        x.rounded = found  # type: ignore[attr-defined]
    return x


# SwiGLU


@triton.jit  # type: ignore[untyped-decorator]
def swiglu_kernel(  # type: ignore[no-untyped-def]
    x, out, low, scales, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr
):
    """out (rows, hidden) = silu(gate) * up, with x (rows, 2 * hidden) the gate, then up."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < HIDDEN
    x += row * 2 * HIDDEN
    gate = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + HIDDEN + i, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * HIDDEN + i, result, mask=inside)
    if ROUND:
        scale = row_scale(tl.max(tl.abs(result), 0))
        tl.store(scales + row, scale)
        tl.store(low + row * HIDDEN + i, in_float8(result, scale), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    x, grad, dx, low, scales, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr
):
    """dx (rows, 2 * hidden) from grad (rows, hidden)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < HIDDEN
    x += row * 2 * HIDDEN
    dx += row * 2 * HIDDEN
    gate = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + HIDDEN + i, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad + row * HIDDEN + i, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    to_gate, to_up = d * up * share * (1 + gate * (1 - share)), d * gate * share
    tl.store(dx + i, to_gate, mask=inside)
    tl.store(dx + HIDDEN + i, to_up, mask=inside)
    if ROUND:
        scale = row_scale(tl.max(tl.maximum(tl.abs(to_gate), tl.abs(to_up)), 0))
        tl.store(scales + row, scale)
        low += row * 2 * HIDDEN
        tl.store(low + i, in_float8(to_gate, scale), mask=inside)
        tl.store(low + HIDDEN + i, in_float8(to_up, scale), mask=inside)


class Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: bool) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.rounding = rounding
        hidden = x.shape[-1] // 2
        out = x.new_empty(*x.shape[:-1], hidden)
        low = room_for_rounded(out, rounding)
        grid, shape = shape_of_rows(out, rounding)
        swiglu_kernel[grid](x, out, *low, HIDDEN=hidden, **shape)
        return with_rounded(out, low, rounding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        low = room_for_rounded(dx, ctx.rounding)
        grid, shape = shape_of_rows(grad, ctx.rounding)
        swiglu_backward_kernel[grid](x, grad.contiguous(), dx, *low, HIDDEN=grad.shape[-1], **shape)
        return with_rounded(dx, low, ctx.rounding), None


def shape_of_rows(x: Tensor, whole: bool) -> tuple[tuple[int, int], dict[str, Any]]:
    """The programs for all rows of x, in blocks or as a whole, and what they are compiled for."""
    wide = x.shape[-1]
    fits = min(1024, width(wide), max(256, wide & -wide))  # without a rest, where that is possible
    block = width(wide) if whole else fits
    grid = (x.numel() // wide, triton.cdiv(wide, block))
    return grid, {
        "BLOCK": block,
        "ROUND": whole,
        "num_warps": for_row(block) if whole else warps(block),
    }


def swiglu(x: Tensor, rounding: bool = False) -> Tensor:
    """silu(gate) * up: (..., 2 * hidden) in, the gate first, (..., hidden) out."""
    out: Tensor = Swiglu.apply(x, rounding)  # type: ignore[no-untyped-call]
    return out


# GELU, by the formula with tanh, which is 2 * sigmoid(2 * x) - 1


@triton.jit  # type: ignore[untyped-decorator]
def gelu_kernel(  # type: ignore[no-untyped-def]
    x, out, low, scales, FACTOR: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SPAN: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """A block of a row, or a whole row, one after the other."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros((BLOCK,), tl.float32)
    for first in tl.static_range(0, SPAN, BLOCK):
        column = tl.program_id(1) * BLOCK + first + tl.arange(0, BLOCK)
        i, inside = row * WIDTH + column, column < WIDTH
        part = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
        result = part * tl.sigmoid(FACTOR * (part + 0.044715 * part * part * part))
        tl.store(out + i, result, mask=inside)
        most = tl.maximum(most, tl.abs(result))
    if ROUND:
        round_again(out, low, scales, row, most, WIDTH, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def gelu_backward_kernel(  # type: ignore[no-untyped-def]
    x, grad, dx, low, scales, FACTOR: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SPAN: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros((BLOCK,), tl.float32)
    for first in tl.static_range(0, SPAN, BLOCK):
        column = tl.program_id(1) * BLOCK + first + tl.arange(0, BLOCK)
        i, inside = row * WIDTH + column, column < WIDTH
        part = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(grad + i, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(FACTOR * (part + 0.044715 * part * part * part))
        slope = FACTOR * (1 + 3 * 0.044715 * part * part)
        result = d * share * (1 + part * (1 - share) * slope)
        tl.store(dx + i, result, mask=inside)
        most = tl.maximum(most, tl.abs(result))
    if ROUND:
        round_again(dx, low, scales, row, most, WIDTH, BLOCK)


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: bool) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.rounding = rounding
        out = torch.empty_like(x)
        low = room_for_rounded(out, rounding)
        grid, shape = shape_of_gelu(x, rounding)
        gelu_kernel[grid](x, out, *low, **shape)
        return with_rounded(out, low, rounding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        low = room_for_rounded(dx, ctx.rounding)
        grid, shape = shape_of_gelu(x, ctx.rounding)
        gelu_backward_kernel[grid](x, grad.contiguous(), dx, *low, **shape)
        return with_rounded(dx, low, ctx.rounding), None


def shape_of_gelu(x: Tensor, whole: bool) -> tuple[tuple[int, int], dict[str, Any]]:
    """Programs for all of x, and what they are compiled for."""
    grid, shape = shape_of_rows(x, False)
    wide, block = x.shape[-1], shape["BLOCK"]
    shape |= {"FACTOR": GELU, "WIDTH": wide, "SPAN": wide if whole else block, "ROUND": whole}
    return (grid[0], 1 if whole else grid[1]), shape


def gelu_tanh(x: Tensor, rounding: bool = False) -> Tensor:
    out: Tensor = Gelu.apply(x, rounding)  # type: ignore[no-untyped-call]
    return out


# Queries and keys, normed and turned


@triton.jit  # type: ignore[untyped-decorator]
def halves(x, place, real, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two halves of the vectors of some heads."""
    left = tl.load(x + place, mask=real, other=0.0)
    right = tl.load(x + HALF + place, mask=real, other=0.0)
    return left.to(tl.float32), right.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def empty(sums, COUNT: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """For a kernel of the way back to add to; here it costs nothing."""
    lane = tl.arange(0, LANES)
    tl.store(sums + lane, tl.zeros((LANES,), tl.float32), mask=lane < COUNT)


@triton.jit  # type: ignore[untyped-decorator]
def spots(HEADS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the left halves of some heads stand, and which of these places there are."""
    head, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, LANES)[None, :]
    return head * 2 * HALF + lane, (head < HEADS) & (lane < HALF)


@triton.jit  # type: ignore[untyped-decorator]
def inverse_size(left, right, epsilon, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
    return (1 / tl.sqrt(squares / (2 * HALF) + epsilon))[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def turned_heads(  # type: ignore[no-untyped-def]
    x, weight, cosine, sine, place, real, epsilon, HALF: tl.constexpr, LANES: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    left, right = halves(x, place, real, HALF)
    if NORM:
        lane = tl.arange(0, LANES)[None, :]
        scale = inverse_size(left, right, epsilon, HALF)
        left_weight, right_weight = halves(weight, lane, lane < HALF, HALF)
        left, right = left * scale * left_weight, right * scale * right_weight
    return left * cosine - right * sine, right * cosine + left * sine


@triton.jit  # type: ignore[untyped-decorator]
def turned_kernel(  # type: ignore[no-untyped-def]
    qkv,  # (tokens, heads + 2 * kv_heads, head_dim)
    query_weight,
    key_weight,
    cosines,  # (places, head_dim); the right half repeats the left
    sines,
    q,  # (tokens, heads, head_dim)
    k,  # (tokens, kv_heads, head_dim)
    sums,  # (4 * half,), for the way back
    time,
    epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # half the width of a head
    NORM: tl.constexpr,
    # The powers of two in which they fit:
    Q_ROWS: tl.constexpr, KV_ROWS: tl.constexpr, LANES: tl.constexpr, V_LANES: tl.constexpr,
):  # fmt: skip
    """The heads of one token a program."""
    if tl.program_id(0) == 0:
        empty(sums, 4 * HALF, 4 * LANES)
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)[None, :]
    angle = (tl.program_id(0) % time) * 2 * HALF + lane
    cosine = tl.load(cosines + angle, mask=lane < HALF, other=0.0)
    sine = tl.load(sines + angle, mask=lane < HALF, other=0.0)
    qkv += token * (HEADS + 2 * KV_HEADS) * 2 * HALF
    q += token * HEADS * 2 * HALF
    k += token * KV_HEADS * 2 * HALF

    place, real = spots(HEADS, Q_ROWS, HALF, LANES)
    left, right = turned_heads(
        qkv, query_weight, cosine, sine, place, real, epsilon, HALF, LANES, NORM
    )
    tl.store(q + place, left, mask=real)
    tl.store(q + HALF + place, right, mask=real)

    place, real = spots(KV_HEADS, KV_ROWS, HALF, LANES)
    qkv += HEADS * 2 * HALF
    left, right = turned_heads(
        qkv, key_weight, cosine, sine, place, real, epsilon, HALF, LANES, NORM
    )
    tl.store(k + place, left, mask=real)
    tl.store(k + HALF + place, right, mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def unturned(  # type: ignore[no-untyped-def]
    qkv, weight, cosines, sines, grad, dqkv, sums, tokens, time, epsilon,
    FIRST: tl.constexpr,  # of these heads among all
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    SOME: tl.constexpr,  # heads that it is about
    HALF: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The gradients of some heads, and of the weight of their norm."""
    lane = tl.arange(0, LANES)[None, :]
    place, real = spots(SOME, ROWS, HALF, LANES)
    left_weight, right_weight = 1.0, 1.0
    if NORM:
        left_weight, right_weight = halves(weight, lane, lane < HALF, HALF)
    left_sum, right_sum = tl.zeros((ROWS, LANES), tl.float32), tl.zeros((ROWS, LANES), tl.float32)
    for row in tl.range(tl.program_id(0), tokens, tl.num_programs(0), num_stages=STAGES):
        token = tl.cast(row, tl.int64)
        start = (token * (HEADS + 2 * KV_HEADS) + FIRST) * 2 * HALF
        left, right = halves(grad + token * SOME * 2 * HALF, place, real, HALF)
        angle = (row % time) * 2 * HALF + lane
        cosine = tl.load(cosines + angle, mask=lane < HALF, other=0.0)
        sine = tl.load(sines + angle, mask=lane < HALF, other=0.0)
        if NORM:
            x_left, x_right = halves(qkv + start, place, real, HALF)
        left, right = left * cosine + right * sine, right * cosine - left * sine
        if NORM:
            scale = inverse_size(x_left, x_right, epsilon, HALF)
            x_left, x_right = x_left * scale, x_right * scale
            left_sum += left * x_left
            right_sum += right * x_right
            left, right = left * left_weight, right * right_weight
            along = (tl.sum(left * x_left, 1) + tl.sum(right * x_right, 1))[:, None] / (2 * HALF)
            left, right = (left - x_left * along) * scale, (right - x_right * along) * scale
        tl.store(dqkv + start + place, left, mask=real)
        tl.store(dqkv + start + HALF + place, right, mask=real)
    if NORM:
        j = tl.arange(0, LANES)
        tl.atomic_add(sums + j, tl.sum(left_sum, 0), mask=j < HALF)
        tl.atomic_add(sums + HALF + j, tl.sum(right_sum, 0), mask=j < HALF)


@triton.jit  # type: ignore[untyped-decorator]
def turned_backward_kernel(  # type: ignore[no-untyped-def]
    qkv, query_weight, key_weight, cosines, sines, dq, dk, dv,
    dqkv,  # like qkv: all of it is written
    sums,  # of the gradients of the two weights, (2, head_dim), float32, at first zero
    tokens, time, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    Q_ROWS: tl.constexpr, KV_ROWS: tl.constexpr, LANES: tl.constexpr, V_LANES: tl.constexpr,
):  # fmt: skip
    """The queries of many tokens, or their keys, or their values."""
    if tl.program_id(1) == 0:
        unturned(
            qkv, query_weight, cosines, sines, dq, dqkv, sums, tokens, time, epsilon,
            0, HEADS, KV_HEADS, HEADS, HALF, NORM, Q_ROWS, LANES,
        )  # fmt: skip
    elif tl.program_id(1) == 1:
        unturned(
            qkv, key_weight, cosines, sines, dk, dqkv, sums + 2 * HALF, tokens, time, epsilon,
            HEADS, HEADS, KV_HEADS, KV_HEADS, HALF, NORM, KV_ROWS, LANES,
        )  # fmt: skip
    else:
        i = tl.arange(0, V_LANES)
        inside = i < KV_HEADS * 2 * HALF
        for row in range(tl.program_id(0), tokens, tl.num_programs(0)):
            token = tl.cast(row, tl.int64)
            values = tl.load(dv + token * KV_HEADS * 2 * HALF + i, mask=inside, other=0.0)
            start = (token * (HEADS + 2 * KV_HEADS) + HEADS + KV_HEADS) * 2 * HALF
            tl.store(dqkv + start + i, values, mask=inside)


def shape_of_heads(head_dim: int, heads: int, kv_heads: int, norm: bool) -> dict[str, Any]:
    """What the kernels for `turned` are compiled for."""
    lanes = width(head_dim // 2)
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HALF": head_dim // 2,
        "NORM": norm,
        "Q_ROWS": width(heads),
        "KV_ROWS": width(kv_heads),
        "LANES": lanes,
        "V_LANES": width(kv_heads * head_dim),
        "num_warps": warps(width(heads) * 2 * lanes),
    }


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        cosines: Tensor,
        sines: Tensor,
        heads: int,
        kv_heads: int,
        epsilon: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv, cosines, sines = qkv.contiguous(), cosines.contiguous(), sines.contiguous()
        ctx.save_for_backward(qkv, query_weight, key_weight, cosines, sines)
        batch, time, head_dim = *qkv.shape[:2], cosines.shape[-1]
        ctx.epsilon, ctx.sums = epsilon, room_for_sums(qkv, head_dim)
        q = qkv.new_empty(batch, time, heads, head_dim)
        k = qkv.new_empty(batch, time, kv_heads, head_dim)
        shape = shape_of_heads(head_dim, heads, kv_heads, query_weight is not None)
        # Where there are no weights, something must stand in their place.
        weights = [qkv if weight is None else weight for weight in (query_weight, key_weight)]
        turned_kernel[(batch * time,)](
            qkv, *weights, cosines, sines, q, k, ctx.sums, time, epsilon, **shape
        )
        return q, k, qkv[:, :, -kv_heads * head_dim :].view(batch, time, kv_heads, head_dim)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        qkv, query_weight, key_weight, cosines, sines = ctx.saved_tensors
        dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
        (batch, time), head_dim = qkv.shape[:2], cosines.shape[-1]
        tokens, norm = batch * time, query_weight is not None
        shape = shape_of_heads(head_dim, dq.shape[2], dk.shape[2], norm)
        shape["num_warps"], programs = for_turned_backward(shape["Q_ROWS"] * 2 * shape["LANES"])
        programs = min(PROCESSORS * programs, tokens) if norm else tokens
        dqkv = torch.empty_like(qkv)
        weights = [qkv if weight is None else weight for weight in (query_weight, key_weight)]
        sums = emptied_sums(ctx)
        turned_backward_kernel[(programs, 3)](
            *(qkv, *weights, cosines, sines, dq, dk, dv, dqkv, sums),
            *(tokens, time, ctx.epsilon),
            **shape,
        )
        gradients = sums.to(query_weight.dtype).unbind() if norm else (None, None)
        return dqkv, *gradients, None, None, None, None, None


def turned(qkv: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, RMS-normed where there are weights and turned by their positions, and the
    values as they are: (batch, time, heads or kv_heads, head_dim) each.

    `qkv` is (batch, time, (heads + 2 * kv_heads) * head_dim); the rest are the weights of queries
    and keys (or None), the tables of `positions.rotation_table` from the position of the first
    token on, heads, kv_heads and epsilon. The values are returned too, for then the backward kernel
    writes the whole gradient of `qkv`.
    """
    found: tuple[Tensor, Tensor, Tensor] = Turned.apply(qkv, *rest)  # type: ignore[no-untyped-call]
    return found


# Queries, keys and values as they are


@triton.jit  # type: ignore[untyped-decorator]
def unsplit_kernel(  # type: ignore[no-untyped-def]
    dq, dk, dv,
    dqkv,  # (tokens, q_width + 2 * kv_width)
    low, scales, Q_WIDTH: tl.constexpr, KV_WIDTH: tl.constexpr, Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """One token a program."""
    token = tl.program_id(0).to(tl.int64)
    q_column, k_column = tl.arange(0, Q_BLOCK), tl.arange(0, KV_BLOCK)
    q_inside, k_inside = q_column < Q_WIDTH, k_column < KV_WIDTH
    q = tl.load(dq + token * Q_WIDTH + q_column, mask=q_inside, other=0.0)
    k = tl.load(dk + token * KV_WIDTH + k_column, mask=k_inside, other=0.0)
    v = tl.load(dv + token * KV_WIDTH + k_column, mask=k_inside, other=0.0)
    start = token * (Q_WIDTH + 2 * KV_WIDTH)
    tl.store(dqkv + start + q_column, q, mask=q_inside)
    tl.store(dqkv + start + Q_WIDTH + k_column, k, mask=k_inside)
    tl.store(dqkv + start + Q_WIDTH + KV_WIDTH + k_column, v, mask=k_inside)
    if ROUND:
        q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
        kv_most = tl.max(tl.maximum(tl.abs(k), tl.abs(v)), 0)
        scale = row_scale(tl.maximum(tl.max(tl.abs(q), 0), kv_most))
        tl.store(scales + token, scale)
        tl.store(low + start + q_column, in_float8(q, scale), mask=q_inside)
        tl.store(low + start + Q_WIDTH + k_column, in_float8(k, scale), mask=k_inside)
        tl.store(low + start + Q_WIDTH + KV_WIDTH + k_column, in_float8(v, scale), mask=k_inside)


class Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: int, kv_heads: int, rounding: bool
    ) -> tuple[Tensor, ...]:
        ctx.rounding = rounding
        head_dim = qkv.shape[2] // (heads + 2 * kv_heads)
        parts = (heads, kv_heads, kv_heads)
        q, k, v = qkv.unflatten(2, (sum(parts), head_dim)).split(parts, dim=2)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv = (part.flatten(2).contiguous() for part in (dq, dk, dv))
        batch, time, wide = dq.shape
        narrow = dk.shape[2]
        dqkv = dq.new_empty(batch, time, wide + 2 * narrow)
        low = room_for_rounded(dqkv, ctx.rounding)
        widths = {"Q_WIDTH": wide, "KV_WIDTH": narrow}
        blocks = {"Q_BLOCK": width(wide), "KV_BLOCK": width(narrow)}
        unsplit_kernel[(batch * time,)](
            *(dq, dk, dv, dqkv, *low),
            ROUND=ctx.rounding,
            num_warps=warps(width(wide)),
            **widths,
            **blocks,
        )
        return with_rounded(dqkv, low, ctx.rounding), None, None, None


def split(qkv: Tensor, *rest: Any, rounding: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values: (batch, time, heads or kv_heads, head_dim) each.

    `qkv` is (batch, time, (heads + 2 * kv_heads) * head_dim); the rest are heads and kv_heads.
    """
    found: tuple[Tensor, Tensor, Tensor] = Split.apply(qkv, *rest, rounding)  # type: ignore[no-untyped-call]
    return found


# Norms


@triton.jit  # type: ignore[untyped-decorator]
def norm_kernel(  # type: ignore[no-untyped-def]
    x,  # (rows, width)
    y, weight, bias,
    total,  # x + y
    out,
    low, scales,  # of out
    sums,  # (2 * width,), for the way back
    rows, epsilon, WIDTH: tl.constexpr,
    LAYER: tl.constexpr,  # LayerNorm, else RMSNorm
    ADD: tl.constexpr, BIAS: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Some rows a program."""
    if tl.program_id(0) == 0:
        empty(sums, 2 * WIDTH, 2 * BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    i = tl.arange(0, BLOCK)
    place = row.to(tl.int64) * WIDTH + i[None, :]
    inside = (row < rows) & (i < WIDTH)[None, :]
    part = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        part += tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
        rounded = part.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        part = rounded.to(tl.float32)  # which is what the backward kernel will read
    gain = tl.load(weight + i, mask=i < WIDTH, other=0.0).to(tl.float32)[None, :]
    if LAYER:
        part = tl.where(inside, part - tl.sum(part, 1)[:, None] / WIDTH, 0.0)
    part = part / tl.sqrt(tl.sum(part * part, 1)[:, None] / WIDTH + epsilon) * gain
    if BIAS:
        part += tl.load(bias + i, mask=i < WIDTH, other=0.0).to(tl.float32)[None, :]
    tl.store(out + place, part, mask=inside)
    if ROUND:
        scale = row_scale(tl.max(tl.abs(part), 1))[:, None]
        tl.store(scales + row, scale, mask=row < rows)
        tl.store(low + place, in_float8(part, scale), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def norm_backward_kernel(  # type: ignore[no-untyped-def]
    x,  # what was normed, (rows, width)
    weight,
    grad,  # of the norm
    later,  # the gradient of x from elsewhere, added to the result
    dx,
    low, scales,  # of dx
    sums,  # of the gradients of weight and bias, (2, width), float32, at first zero
    rows, epsilon, WIDTH: tl.constexpr, LAYER: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    ROUND: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program for many rows, some of them together."""
    i = tl.arange(0, BLOCK)
    gain = tl.load(weight + i, mask=i < WIDTH, other=0.0).to(tl.float32)[None, :]
    weight_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    bias_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, rows, step, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        place = row.to(tl.int64) * WIDTH + i[None, :]
        inside = (row < rows) & (i < WIDTH)[None, :]
        part = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            more = tl.load(later + place, mask=inside, other=0.0).to(tl.float32)
        if LAYER:
            part = tl.where(inside, part - tl.sum(part, 1)[:, None] / WIDTH, 0.0)
        scaled = d * gain
        along = tl.sum(scaled * part, 1)[:, None] / WIDTH
        scale = 1 / tl.sqrt(tl.sum(part * part, 1)[:, None] / WIDTH + epsilon)
        weight_sum += d * part * scale
        if BIAS:
            bias_sum += d
        if LAYER:
            scaled -= tl.sum(scaled, 1)[:, None] / WIDTH
        result = (scaled - part * (along * scale * scale)) * scale
        if ADD:
            result += more
        tl.store(dx + place, result, mask=inside)
        if ROUND:
            size = row_scale(tl.max(tl.abs(result), 1))[:, None]
            tl.store(scales + row, size, mask=row < rows)
            tl.store(low + place, in_float8(result, size), mask=inside)
    tl.atomic_add(sums + i, tl.sum(weight_sum, 0), mask=i < WIDTH)
    if BIAS:
        tl.atomic_add(sums + WIDTH + i, tl.sum(bias_sum, 0), mask=i < WIDTH)


def shape_of_norm(ctx: Any, dim: int, add: bool) -> dict[str, Any]:
    """What the kernels for norms are compiled for."""
    kind = {"LAYER": ctx.layer, "BIAS": ctx.bias, "ROUND": ctx.rounding}
    return {"WIDTH": dim, "BLOCK": width(dim), "ADD": add, **kind}


def room_for_sums(x: Tensor, dim: int) -> Tensor:
    """Of two gradients of weights; a kernel of the way forward empties it."""
    return x.new_empty(2, dim, dtype=torch.float32)


def emptied_sums(ctx: Any) -> Tensor:
    """What the way forward has made room for: once, for then it is full."""
    sums: Tensor = ctx.sums
    ctx.sums = None
    if sums is None:
        raise RuntimeError("the way back through a kernel can be gone once")
    return sums


class AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        layer: bool,
        rounding: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # behind the last norm nobody needs the sum
        ctx.epsilon, ctx.layer, ctx.rounding = epsilon, layer, rounding
        ctx.add, ctx.bias = y is not None, bias is not None
        x, dim = x.contiguous(), x.shape[-1]
        rows = x.numel() // dim
        total = x if y is None else torch.empty_like(x)
        out, ctx.sums = torch.empty_like(x), room_for_sums(x, dim)
        low = room_for_rounded(out, rounding)
        shape = shape_of_norm(ctx, dim, y is not None)
        together, shape["num_warps"] = for_norm(shape["BLOCK"])
        # Where there is nothing to add, something must stand in its place.
        inputs = (x, x if y is None else y.contiguous(), weight, weight if bias is None else bias)
        norm_kernel[(triton.cdiv(rows, together),)](
            *inputs, total, out, *low, ctx.sums, rows, epsilon, ROWS=together, **shape
        )
        ctx.save_for_backward(total, weight)
        return total, with_rounded(out, low, rounding)

    @staticmethod
    def backward(ctx: Any, later: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:  # the norm is of no use to anybody
            return later, later if ctx.add else None, None, None, None, None, None
        x, weight = ctx.saved_tensors
        grad, dim = grad.contiguous(), x.shape[-1]
        rows = x.numel() // dim
        shape = shape_of_norm(ctx, dim, later is not None)
        together, shape["num_warps"], programs = for_norm_backward(shape["BLOCK"])
        dx, sums = torch.empty_like(x), emptied_sums(ctx)
        low = room_for_rounded(dx, ctx.rounding)
        norm_backward_kernel[(min(PROCESSORS * programs, triton.cdiv(rows, together)),)](
            *(x, weight, grad, grad if later is None else later.contiguous(), dx, *low, sums),
            *(rows, ctx.epsilon),
            ROWS=together,
            **shape,
        )
        dweight, dbias = sums.to(weight.dtype).unbind()
        with_rounded(dx, low, ctx.rounding)
        to_bias = dbias if ctx.bias else None
        return dx, dx if ctx.add else None, dweight, to_bias, None, None, None


def add_norm(
    x: Tensor, y: Tensor | None, *rest: Any, rounding: bool = False
) -> tuple[Tensor, Tensor]:
    """x + y, or x, and its norm; both in the precision of `x`.

    The rest are the weight, the bias or None, epsilon, and whether it is a LayerNorm and not an
    RMSNorm.
    """
    found: tuple[Tensor, Tensor] = AddNorm.apply(x, y, *rest, rounding)  # type: ignore[no-untyped-call]
    return found


# Matrices


class Product(torch.autograd.Function):
    """x @ weight.T + bias by a `low` copy of the weights.

    The gradient of the weights is summed in float32 by the product itself.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor) -> Tensor:
        ctx.save_for_backward(x, low)
        ctx.bias = bias is not None
        return F.linear(x, low, None if bias is None else bias.to(low.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        return grad @ low, *weight_gradients(x, grad, ctx.bias), None


def weight_gradients(x: Tensor, grad: Tensor, bias: bool) -> tuple[Tensor, Tensor | None]:
    """Of x @ weight.T + bias, from the gradient of that."""
    rows = grad.reshape(-1, grad.shape[-1])  # (rows, outputs)
    dweight = torch.mm(rows.T, x.flatten(0, -2), out_dtype=torch.float32)
    dbias = None
    if bias:  # a product adds up faster than torch's sum; of 8 rows, because 1 is slow
        dbias = torch.mm(rows.new_ones(8, len(rows)), rows, out_dtype=torch.float32)[0]
    return dweight, dbias


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """What `layer` makes of x."""
    low = getattr(layer, "low", None)
    if low is None or low.dtype != x.dtype:
        y: Tensor = layer(x)
    else:
        y = Product.apply(x, layer.weight, layer.bias, low)  # type: ignore[no-untyped-call]
    return y


def refresh(layers: list[nn.Linear], dtype: torch.dtype) -> None:
    """Copy their weights as they are now into the precision that products are computed in."""
    for layer in layers:
        if getattr(layer, "low", None) is None or layer.low.dtype != dtype:
            layer.low = torch.empty_like(layer.weight, dtype=dtype)
    with torch.no_grad():
        torch._foreach_copy_([layer.low for layer in layers], [layer.weight for layer in layers])  # type: ignore[misc]


@triton.jit  # type: ignore[untyped-decorator]
def multiply_kernel(x, factor, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    part = tl.load(x + i, mask=i < count, other=0.0).to(tl.float32)
    tl.store(x + i, part * tl.load(factor), mask=i < count)


def multiply_(x: Tensor, factor: Tensor) -> Tensor:
    """By one number in float32, whatever x is in: torch takes three times as long."""
    grid = (triton.cdiv(x.numel(), 1024),)
    multiply_kernel[grid](x, factor, x.numel(), BLOCK=1024, num_warps=warps(1024))
    return x


def padded(weight: Tensor, multiple: int) -> Tensor:
    """With rows of zeros, so that their number can be divided: a GPU is slow with others."""
    return F.pad(weight, (0, 0, 0, -len(weight) % multiple)) if len(weight) % multiple else weight


# Embeddings


class Lookup(torch.autograd.Function):
    """Rows of a small table. The gradient is a product: sorting the ids would take longer."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = len(table)
        return F.embedding(ids, table.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        flat = grad.flatten(0, -2)  # (places, dim)
        columns = -(-ctx.rows // 8) * 8  # a GPU is slow with others
        chosen = flat.new_zeros(len(flat), columns).scatter_(1, ids.flatten()[:, None], 1.0)
        return torch.mm(chosen.T, flat, out_dtype=torch.float32)[: ctx.rows], None, None


def embedding(table: nn.Embedding, ids: Tensor) -> Tensor:
    """The vectors of `ids`, in the precision that products are computed in."""
    low = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    if low is None or table.num_embeddings > FEW:
        x: Tensor = table(ids)
    else:
        x = Lookup.apply(table.weight, ids, low)  # type: ignore[no-untyped-call]
    return x


# The loss


@triton.jit  # type: ignore[untyped-decorator]
def cross_entropy_kernel(  # type: ignore[no-untyped-def]
    logits,  # (rows, columns), overwritten with their gradient
    targets,
    losses,
    low,  # the gradient once more, times `steep`
    steep,
    STRIDE: tl.constexpr,  # from a row to the next
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,  # each of which looks at eight columns together
    ROUND: tl.constexpr,
):
    """One row a program, in two passes. Every lane adds up on its own, scaled to the largest logit
    that it has seen: until the end of the first pass they need not wait for each other."""
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
    # Backwards, for what was read last is the likeliest to be near still.
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
    """The loss of each row, (rows,) in float32; `logits` (rows, vocabulary) become their gradient:
    softmax(logits) - onehot(targets). All targets must be within the vocabulary, which is
    the first `columns` where there are more for some other reason; these stay as they are.

    Where there is a `low` of the same width, the gradient also goes there, times `steep`.
    """
    if not logits.is_contiguous():
        raise ValueError("logits that are written over must be contiguous")
    rows, stride = logits.shape
    columns = columns or stride
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = max(128, min(CHUNK, width(columns)))
    shape = {"STRIDE": stride, "COLUMNS": columns, "LANES": block // 8, "num_warps": warps(block)}
    given = (logits, targets.contiguous(), losses, logits if low is None else low, steep)
    cross_entropy_kernel[(rows,)](*given, ROUND=low is not None, **shape)
    return losses
