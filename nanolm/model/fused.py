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
    return 4, max(2, min(16, block // 512)), 4


def for_turned_backward(numbers: int) -> tuple[int, int]:
    """Warps, and programs for each processor."""
    return max(2, min(16, numbers // 512)), 8


# SwiGLU


@triton.jit  # type: ignore[untyped-decorator]
def swiglu_kernel(x, out, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out (rows, hidden) = silu(gate) * up, with x (rows, 2 * hidden) the gate, then up."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < HIDDEN
    x += row * 2 * HIDDEN
    gate = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + HIDDEN + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + i, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def swiglu_backward_kernel(x, grad, dx, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
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
    tl.store(dx + i, d * up * share * (1 + gate * (1 - share)), mask=inside)
    tl.store(dx + HIDDEN + i, d * gate * share, mask=inside)


class Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        hidden = x.shape[-1] // 2
        out = x.new_empty(*x.shape[:-1], hidden)
        block = min(1024, width(hidden))
        grid = (out.numel() // hidden, triton.cdiv(hidden, block))
        swiglu_kernel[grid](x, out, HIDDEN=hidden, BLOCK=block, num_warps=warps(block))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx, hidden = torch.empty_like(x), x.shape[-1] // 2
        block = min(1024, width(hidden))
        grid = (grad.numel() // hidden, triton.cdiv(hidden, block))
        swiglu_backward_kernel[grid](
            x, grad.contiguous(), dx, HIDDEN=hidden, BLOCK=block, num_warps=warps(block)
        )
        return dx


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up: (..., 2 * hidden) in, the gate first, (..., hidden) out."""
    out: Tensor = Swiglu.apply(x)  # type: ignore[no-untyped-call]
    return out


# GELU, by the formula with tanh, which is 2 * sigmoid(2 * x) - 1


@triton.jit  # type: ignore[untyped-decorator]
def gelu_kernel(x, out, count, FACTOR: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    part = tl.load(x + i, mask=i < count, other=0.0).to(tl.float32)
    inner = FACTOR * (part + 0.044715 * part * part * part)
    tl.store(out + i, part * tl.sigmoid(inner), mask=i < count)


@triton.jit  # type: ignore[untyped-decorator]
def gelu_backward_kernel(x, grad, dx, count, FACTOR: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    part = tl.load(x + i, mask=i < count, other=0.0).to(tl.float32)
    d = tl.load(grad + i, mask=i < count, other=0.0).to(tl.float32)
    share = tl.sigmoid(FACTOR * (part + 0.044715 * part * part * part))
    slope = FACTOR * (1 + 3 * 0.044715 * part * part)
    tl.store(dx + i, d * share * (1 + part * (1 - share) * slope), mask=i < count)


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        grid = (triton.cdiv(x.numel(), 1024),)
        gelu_kernel[grid](x, out, x.numel(), FACTOR=GELU, BLOCK=1024, num_warps=4)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        grid = (triton.cdiv(x.numel(), 1024),)
        gelu_backward_kernel[grid](
            *(x, grad.contiguous(), dx, x.numel()), FACTOR=GELU, BLOCK=1024, num_warps=4
        )
        return dx


def gelu_tanh(x: Tensor) -> Tensor:
    out: Tensor = Gelu.apply(x)  # type: ignore[no-untyped-call]
    return out


# Queries and keys, normed and turned


@triton.jit  # type: ignore[untyped-decorator]
def halves(x, place, real, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two halves of the vectors of some heads."""
    left = tl.load(x + place, mask=real, other=0.0)
    right = tl.load(x + HALF + place, mask=real, other=0.0)
    return left.to(tl.float32), right.to(tl.float32)


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
    v,
    time,
    epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # half the width of a head
    NORM: tl.constexpr,
    # The powers of two in which they fit:
    Q_ROWS: tl.constexpr, KV_ROWS: tl.constexpr, LANES: tl.constexpr, V_LANES: tl.constexpr,
):  # fmt: skip
    """The heads of one token a program."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)[None, :]
    angle = (tl.program_id(0) % time) * 2 * HALF + lane
    cosine = tl.load(cosines + angle, mask=lane < HALF, other=0.0)
    sine = tl.load(sines + angle, mask=lane < HALF, other=0.0)
    qkv += token * (HEADS + 2 * KV_HEADS) * 2 * HALF
    q += token * HEADS * 2 * HALF
    k += token * KV_HEADS * 2 * HALF
    v += token * KV_HEADS * 2 * HALF

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

    i = tl.arange(0, V_LANES)
    inside = i < KV_HEADS * 2 * HALF
    values = tl.load(qkv + KV_HEADS * 2 * HALF + i, mask=inside, other=0.0)
    tl.store(v + i, values, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def unturned_heads(  # type: ignore[no-untyped-def]
    x, grad, weight, cosine, sine, place, real, epsilon, left_sum, right_sum,
    HALF: tl.constexpr, LANES: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The gradient of some heads, and that of the weights of their norm added to its sums."""
    left, right = halves(grad, place, real, HALF)
    left, right = left * cosine + right * sine, right * cosine - left * sine
    if NORM:
        lane = tl.arange(0, LANES)[None, :]
        x_left, x_right = halves(x, place, real, HALF)
        scale = inverse_size(x_left, x_right, epsilon, HALF)
        x_left, x_right = x_left * scale, x_right * scale
        left_sum += left * x_left
        right_sum += right * x_right
        left_weight, right_weight = halves(weight, lane, lane < HALF, HALF)
        left, right = left * left_weight, right * right_weight
        along = (tl.sum(left * x_left, 1) + tl.sum(right * x_right, 1))[:, None] / (2 * HALF)
        left, right = (left - x_left * along) * scale, (right - x_right * along) * scale
    return left, right, left_sum, right_sum


@triton.jit  # type: ignore[untyped-decorator]
def turned_backward_kernel(  # type: ignore[no-untyped-def]
    qkv, query_weight, key_weight, cosines, sines, dq, dk, dv,
    dqkv,  # like qkv: all of it is written
    sums,  # of the gradients of the two weights, (2, head_dim), float32, at first zero
    tokens, time, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    Q_ROWS: tl.constexpr, KV_ROWS: tl.constexpr, LANES: tl.constexpr, V_LANES: tl.constexpr,
):  # fmt: skip
    """One program for many tokens."""
    program = tl.program_id(0)
    lane = tl.arange(0, LANES)[None, :]
    q_place, q_real = spots(HEADS, Q_ROWS, HALF, LANES)
    k_place, k_real = spots(KV_HEADS, KV_ROWS, HALF, LANES)
    i = tl.arange(0, V_LANES)
    inside = i < KV_HEADS * 2 * HALF
    q_left, q_right = tl.zeros((Q_ROWS, LANES), tl.float32), tl.zeros((Q_ROWS, LANES), tl.float32)
    k_left, k_right = tl.zeros((KV_ROWS, LANES), tl.float32), tl.zeros((KV_ROWS, LANES), tl.float32)
    for row in range(program, tokens, tl.num_programs(0)):
        token = tl.cast(row, tl.int64)
        angle = (row % time) * 2 * HALF + lane
        cosine = tl.load(cosines + angle, mask=lane < HALF, other=0.0)
        sine = tl.load(sines + angle, mask=lane < HALF, other=0.0)
        first_key = token * KV_HEADS * 2 * HALF
        start = token * (HEADS + 2 * KV_HEADS) * 2 * HALF
        values = tl.load(dv + first_key + i, mask=inside, other=0.0)
        left, right, q_left, q_right = unturned_heads(
            qkv + start, dq + token * HEADS * 2 * HALF, query_weight, cosine, sine, q_place, q_real,
            epsilon, q_left, q_right, HALF, LANES, NORM,
        )  # fmt: skip
        tl.store(dqkv + start + q_place, left, mask=q_real)
        tl.store(dqkv + start + HALF + q_place, right, mask=q_real)
        start += HEADS * 2 * HALF
        left, right, k_left, k_right = unturned_heads(
            qkv + start, dk + first_key, key_weight, cosine, sine, k_place, k_real,
            epsilon, k_left, k_right, HALF, LANES, NORM,
        )  # fmt: skip
        tl.store(dqkv + start + k_place, left, mask=k_real)
        tl.store(dqkv + start + HALF + k_place, right, mask=k_real)
        tl.store(dqkv + start + KV_HEADS * 2 * HALF + i, values, mask=inside)
    if NORM:
        j = tl.arange(0, LANES)
        tl.atomic_add(sums + j, tl.sum(q_left, 0), mask=j < HALF)
        tl.atomic_add(sums + HALF + j, tl.sum(q_right, 0), mask=j < HALF)
        tl.atomic_add(sums + 2 * HALF + j, tl.sum(k_left, 0), mask=j < HALF)
        tl.atomic_add(sums + 3 * HALF + j, tl.sum(k_right, 0), mask=j < HALF)


def shape_of_heads(qkv: Tensor, heads: int, kv_heads: int, norm: bool) -> dict[str, Any]:
    """What the kernels for `turned` are compiled for."""
    head_dim = int(qkv.shape[3])
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
        ctx.epsilon = epsilon
        batch, time, _, head_dim = qkv.shape
        q = qkv.new_empty(batch, time, heads, head_dim)
        k = qkv.new_empty(batch, time, kv_heads, head_dim)
        v = torch.empty_like(k)
        shape = shape_of_heads(qkv, heads, kv_heads, query_weight is not None)
        # Where there are no weights, something must stand in their place.
        weights = [qkv if weight is None else weight for weight in (query_weight, key_weight)]
        turned_kernel[(batch * time,)](
            qkv, *weights, cosines, sines, q, k, v, time, epsilon, **shape
        )
        return q, k, v

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        qkv, query_weight, key_weight, cosines, sines = ctx.saved_tensors
        dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
        batch, time, _, head_dim = qkv.shape
        tokens, norm = batch * time, query_weight is not None
        shape = shape_of_heads(qkv, dq.shape[2], dk.shape[2], norm)
        shape["num_warps"], programs = for_turned_backward(shape["Q_ROWS"] * 2 * shape["LANES"])
        programs = min(PROCESSORS * programs, tokens) if norm else tokens
        dqkv = torch.empty_like(qkv)
        weights = [qkv if weight is None else weight for weight in (query_weight, key_weight)]
        sums = qkv.new_zeros(2, head_dim, dtype=torch.float32)
        turned_backward_kernel[(programs,)](
            qkv,
            *weights,
            cosines,
            sines,
            dq,
            dk,
            dv,
            dqkv,
            sums,
            tokens,
            time,
            ctx.epsilon,
            **shape,
        )
        gradients = sums.to(query_weight.dtype).unbind() if norm else (None, None)
        return dqkv, *gradients, None, None, None, None, None


def turned(qkv: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, RMS-normed where there are weights and turned by their positions, and the
    values as they are: (batch, time, heads or kv_heads, head_dim) each.

    `qkv` is (batch, time, heads + 2 * kv_heads, head_dim); the rest are the weights of queries and
    keys (or None), the tables of `positions.rotation_table` from the position of the first token
    on, heads, kv_heads and epsilon. The values are copied, for then the backward kernel writes the
    whole gradient of `qkv`.
    """
    found: tuple[Tensor, Tensor, Tensor] = Turned.apply(qkv, *rest)  # type: ignore[no-untyped-call]
    return found


# Norms


@triton.jit  # type: ignore[untyped-decorator]
def norm_kernel(  # type: ignore[no-untyped-def]
    x,  # (rows, width)
    y, weight, bias,
    total,  # x + y
    out, rows, epsilon, WIDTH: tl.constexpr,
    LAYER: tl.constexpr,  # LayerNorm, else RMSNorm
    ADD: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some rows a program."""
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


@triton.jit  # type: ignore[untyped-decorator]
def norm_backward_kernel(  # type: ignore[no-untyped-def]
    x,  # what was normed, (rows, width)
    weight,
    grad,  # of the norm
    later,  # the gradient of x from elsewhere, added to the result
    dx,
    sums,  # of the gradients of weight and bias, (2, width), float32, at first zero
    rows, epsilon, WIDTH: tl.constexpr, LAYER: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program for many rows, some of them together."""
    i = tl.arange(0, BLOCK)
    gain = tl.load(weight + i, mask=i < WIDTH, other=0.0).to(tl.float32)[None, :]
    weight_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    bias_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
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
    tl.atomic_add(sums + i, tl.sum(weight_sum, 0), mask=i < WIDTH)
    if BIAS:
        tl.atomic_add(sums + WIDTH + i, tl.sum(bias_sum, 0), mask=i < WIDTH)


def shape_of_norm(dim: int, layer: bool, add: bool, bias: bool) -> dict[str, Any]:
    """What the kernels for norms are compiled for."""
    return {"WIDTH": dim, "BLOCK": width(dim), "LAYER": layer, "ADD": add, "BIAS": bias}


def launch_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float, layer: bool
) -> tuple[Tensor, Tensor]:
    """What is normed, and its norm."""
    dim = x.shape[-1]
    rows = x.numel() // dim
    total = x if y is None else torch.empty_like(x)
    out = torch.empty_like(x)
    shape = shape_of_norm(dim, layer, y is not None, bias is not None)
    together, shape["num_warps"] = for_norm(shape["BLOCK"])
    norm_kernel[(triton.cdiv(rows, together),)](
        *(x, x if y is None else y, weight, weight if bias is None else bias, total, out),
        *(rows, epsilon),
        ROWS=together,
        **shape,
    )
    return total, out


def launch_norm_backward(
    ctx: Any, grad: Tensor, later: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of what was normed, of the weight and of the bias."""
    x, weight = ctx.saved_tensors
    grad, dim = grad.contiguous(), x.shape[-1]
    rows = x.numel() // dim
    shape = shape_of_norm(dim, ctx.layer, later is not None, ctx.bias)
    together, shape["num_warps"], programs = for_norm_backward(shape["BLOCK"])
    dx = torch.empty_like(x)
    sums = x.new_zeros(2, dim, dtype=torch.float32)
    norm_backward_kernel[(min(PROCESSORS * programs, triton.cdiv(rows, together)),)](
        *(x, weight, grad, grad if later is None else later.contiguous(), dx, sums),
        *(rows, ctx.epsilon),
        ROWS=together,
        **shape,
    )
    dweight, dbias = sums.to(weight.dtype).unbind()
    return dx, dweight, dbias if ctx.bias else None


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, layer: bool
    ) -> Tensor:
        ctx.epsilon, ctx.layer, ctx.bias = epsilon, layer, bias is not None
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        return launch_norm(x, None, weight, bias, epsilon, layer)[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *launch_norm_backward(ctx, grad, None), None, None


class AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        layer: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.epsilon, ctx.layer, ctx.bias = epsilon, layer, bias is not None
        ctx.set_materialize_grads(False)  # behind the last norm nobody needs the sum
        total, out = launch_norm(x.contiguous(), y.contiguous(), weight, bias, epsilon, layer)
        ctx.save_for_backward(total, weight)
        return total, out

    @staticmethod
    def backward(ctx: Any, later: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:  # the norm is of no use to anybody
            return later, later, None, None, None, None
        dx, dweight, dbias = launch_norm_backward(ctx, grad, later)
        return dx, dx, dweight, dbias, None, None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`x` scaled to length √dim over its last dimension, then by `weight`."""
    out: Tensor = Norm.apply(x, weight, None, epsilon, False)  # type: ignore[no-untyped-call]
    return out


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x + y, and its `rms_norm`; both in the precision of `x`."""
    found: tuple[Tensor, Tensor] = AddNorm.apply(x, y, weight, None, epsilon, False)  # type: ignore[no-untyped-call]
    return found


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    out: Tensor = Norm.apply(x, weight, bias, epsilon, True)  # type: ignore[no-untyped-call]
    return out


def add_layer_norm(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """x + y, and its `layer_norm`; both in the precision of `x`."""
    found: tuple[Tensor, Tensor] = AddNorm.apply(x, y, weight, bias, epsilon, True)  # type: ignore[no-untyped-call]
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
        rows = grad.reshape(-1, grad.shape[-1])  # (rows, outputs)
        dweight = torch.mm(rows.T, x.flatten(0, -2), out_dtype=torch.float32)
        dbias = None
        if ctx.bias:  # a product adds up faster than torch's sum; of 8 rows, because 1 is slow
            dbias = torch.mm(rows.new_ones(8, len(rows)), rows, out_dtype=torch.float32)[0]
        return (rows @ low).view_as(x), dweight, dbias, None


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


# Embeddings


class Lookup(torch.autograd.Function):
    """Rows of a small table. The gradient is a product: sorting the ids would take longer."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = len(table)
        return F.embedding(ids, table).to(dtype)

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
    scale,
    STRIDE: tl.constexpr,  # from a row to the next
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,  # each of which looks at eight columns together
):
    """One row a program, in two passes. Every lane adds up on its own, scaled to the largest logit
    that it has seen: until the end of the first pass they need not wait for each other."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * STRIDE
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
        result = (tl.exp(part - norm) - tl.where(column == target, 1.0, 0.0)) * scale
        tl.store(logits + column, result, inside, eviction_policy="evict_first")


def cross_entropy_(
    logits: Tensor, targets: Tensor, scale: float = 1.0, columns: int | None = None
) -> Tensor:
    """The loss of each row, (rows,) in float32; `logits` (rows, vocabulary) become their gradient:
    scale * (softmax(logits) - onehot(targets)). All targets must be within the vocabulary, which is
    the first `columns` where there are more for some other reason; these stay as they are."""
    if not logits.is_contiguous():
        raise ValueError("logits that are written over must be contiguous")
    rows, stride = logits.shape
    columns = columns or stride
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = max(128, min(CHUNK, width(columns)))
    shape = {"STRIDE": stride, "COLUMNS": columns, "LANES": block // 8, "num_warps": warps(block)}
    cross_entropy_kernel[(rows,)](logits, targets.contiguous(), losses, scale, **shape)
    return losses
