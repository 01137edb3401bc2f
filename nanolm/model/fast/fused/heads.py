"""Norms and rotary positions of queries and keys, between their product and attention."""
# ruff: noqa: N803

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanolm.model.fast.fused import launch
from nanolm.model.fast.fused.launch import STAGES, warps, width
from nanolm.model.fast.fused.norms import emptied_sums, empty
from nanolm.model.fast.fused.rounding import in_float8, room_for_rounded, row_scale


@triton.jit  # type: ignore[untyped-decorator]
def halves(x, place, real, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two halves of the vectors of some heads."""
    left = tl.load(x + place, mask=real, other=0.0)
    right = tl.load(x + HALF + place, mask=real, other=0.0)
    return left.to(tl.float32), right.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def spots(HEADS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The offsets of the left halves of some heads, and a mask of the valid ones."""
    head, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, LANES)[None, :]
    return head * 2 * HALF + lane, (head < HEADS) & (lane < HALF)


@triton.jit  # type: ignore[untyped-decorator]
def inverse_size(left, right, epsilon, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
    return (1 / tl.sqrt(squares / (2 * HALF) + epsilon))[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def norm_rope_heads(  # type: ignore[no-untyped-def]
    x, weight, cosine, sine, out, epsilon, HEADS: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr, LANES: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    place, real = spots(HEADS, ROWS, HALF, LANES)
    left, right = halves(x, place, real, HALF)
    if NORM:
        lane = tl.arange(0, LANES)[None, :]
        scale = inverse_size(left, right, epsilon, HALF)
        left_weight, right_weight = halves(weight, lane, lane < HALF, HALF)
        left, right = left * scale * left_weight, right * scale * right_weight
    tl.store(out + place, left * cosine - right * sine, mask=real)
    tl.store(out + HALF + place, right * cosine + left * sine, mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def qk_norm_rope_kernel(  # type: ignore[no-untyped-def]
    qkv,  # (tokens, heads + 2 * kv_heads, head_dim)
    query_weight, key_weight,
    cosines,  # (places, head_dim); the right half repeats the left
    sines,
    q,  # (tokens, heads, head_dim)
    k,  # (tokens, kv_heads, head_dim)
    sums,  # (4 * half,), for the backward pass
    time, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # half the width of a head
    NORM: tl.constexpr,
    # Rounded up to powers of two:
    Q_ROWS: tl.constexpr, KV_ROWS: tl.constexpr, LANES: tl.constexpr, V_LANES: tl.constexpr,
):  # fmt: skip
    """One program per token, for all heads."""
    if tl.program_id(0) == 0:
        empty(sums, 4 * HALF, 4 * LANES)
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)[None, :]
    angle = (tl.program_id(0) % time) * 2 * HALF + lane
    cosine = tl.load(cosines + angle, mask=lane < HALF, other=0.0)
    sine = tl.load(sines + angle, mask=lane < HALF, other=0.0)
    qkv += token * (HEADS + 2 * KV_HEADS) * 2 * HALF
    q += token * HEADS * 2 * HALF
    norm_rope_heads(qkv, query_weight, cosine, sine, q, epsilon, HEADS, Q_ROWS, HALF, LANES, NORM)
    qkv += HEADS * 2 * HALF
    k += token * KV_HEADS * 2 * HALF
    norm_rope_heads(qkv, key_weight, cosine, sine, k, epsilon, KV_HEADS, KV_ROWS, HALF, LANES, NORM)


@triton.jit  # type: ignore[untyped-decorator]
def norm_rope_heads_backward(  # type: ignore[no-untyped-def]
    qkv, weight, cosines, sines, grad, dqkv, sums, tokens, time, epsilon,
    FIRST: tl.constexpr,  # index of the first of these heads
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    SOME: tl.constexpr,  # number of these heads
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
def qk_norm_rope_backward_kernel(  # type: ignore[no-untyped-def]
    qkv, query_weight, key_weight, cosines, sines, dq, dk, dv,
    dqkv,  # like qkv, written completely
    sums,  # of the gradients of the two weights, (2, head_dim), float32, initially zero
    tokens, time, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    Q_ROWS: tl.constexpr, KV_ROWS: tl.constexpr, LANES: tl.constexpr, V_LANES: tl.constexpr,
):  # fmt: skip
    """One program for the queries of many tokens, or their keys, or their values."""
    if tl.program_id(1) == 0:
        norm_rope_heads_backward(
            qkv, query_weight, cosines, sines, dq, dqkv, sums, tokens, time, epsilon,
            0, HEADS, KV_HEADS, HEADS, HALF, NORM, Q_ROWS, LANES,
        )  # fmt: skip
    elif tl.program_id(1) == 1:
        norm_rope_heads_backward(
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
    """Compile-time constants of the `qk_norm_rope` kernels."""
    lanes = width(head_dim // 2)
    shape = {"HEADS": heads, "KV_HEADS": kv_heads, "HALF": head_dim // 2, "NORM": norm}
    blocks = {"Q_ROWS": width(heads), "KV_ROWS": width(kv_heads), "LANES": lanes}
    blocks |= {"V_LANES": width(kv_heads * head_dim), "num_warps": warps(width(heads) * 2 * lanes)}
    return shape | blocks


class QKNormRoPE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cosines: Tensor,
        sines: Tensor,
        heads: int,
        kv_heads: int,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        epsilon: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv, cosines, sines = qkv.contiguous(), cosines.contiguous(), sines.contiguous()
        ctx.save_for_backward(qkv, query_weight, key_weight, cosines, sines)
        batch, time, head_dim = *qkv.shape[:2], cosines.shape[-1]
        ctx.epsilon, ctx.sums = epsilon, qkv.new_empty(2, head_dim, dtype=torch.float32)
        q = qkv.new_empty(batch, time, heads, head_dim)
        k = qkv.new_empty(batch, time, kv_heads, head_dim)
        shape = shape_of_heads(head_dim, heads, kv_heads, query_weight is not None)
        # Without weights, the kernel still needs a pointer.
        weights = [qkv if weight is None else weight for weight in (query_weight, key_weight)]
        given = (qkv, *weights, cosines, sines, q, k, ctx.sums, time, epsilon)
        qk_norm_rope_kernel[(batch * time,)](*given, **shape)
        return q, k, qkv[:, :, -kv_heads * head_dim :].view(batch, time, kv_heads, head_dim)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        qkv, query_weight, key_weight, cosines, sines = ctx.saved_tensors
        dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
        (batch, time), head_dim = qkv.shape[:2], cosines.shape[-1]
        tokens, norm = batch * time, query_weight is not None
        shape = shape_of_heads(head_dim, dq.shape[2], dk.shape[2], norm)
        shape["num_warps"] = max(2, min(16, shape["Q_ROWS"] * 2 * shape["LANES"] // 512))
        programs = min(launch.PROCESSORS * 8, tokens) if norm else tokens
        dqkv, sums = torch.empty_like(qkv), emptied_sums(ctx)
        weights = [qkv if weight is None else weight for weight in (query_weight, key_weight)]
        given = (qkv, *weights, cosines, sines, dq, dk, dv, dqkv, sums, tokens, time, ctx.epsilon)
        qk_norm_rope_backward_kernel[(programs, 3)](*given, **shape)
        gradients = sums.to(query_weight.dtype).unbind() if norm else (None, None)
        return dqkv, None, None, None, None, *gradients, None


def qk_norm_rope(qkv: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, RMS-normed if there are weights and rotated by their positions, and the
    unchanged values: (batch, time, heads or kv_heads, head_dim) each.

    `qkv` is (batch, time, (heads + 2 * kv_heads) * head_dim); `rest` is the cosines and sines from
    position 0, heads, kv_heads, the norm weights of queries and keys (or None) and epsilon.
    Values are returned so that the backward kernel writes the whole gradient of `qkv`.
    """
    return QKNormRoPE.apply(qkv, *rest)  # type: ignore[no-any-return, no-untyped-call]


@triton.jit  # type: ignore[untyped-decorator]
def unsplit_kernel(  # type: ignore[no-untyped-def]
    dq, dk, dv,
    dqkv,  # (tokens, q_width + 2 * kv_width)
    low, scales, Q_WIDTH: tl.constexpr, KV_WIDTH: tl.constexpr, Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """One token per program."""
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
        parts = (heads, kv_heads, kv_heads)
        return qkv.unflatten(2, (sum(parts), -1)).split(parts, dim=2)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv = (part.flatten(2).contiguous() for part in (dq, dk, dv))
        (batch, time, wide), narrow = dq.shape, dk.shape[2]
        dqkv = dq.new_empty(batch, time, wide + 2 * narrow)
        shape = {"Q_WIDTH": wide, "KV_WIDTH": narrow, "num_warps": warps(width(wide))}
        shape |= {"Q_BLOCK": width(wide), "KV_BLOCK": width(narrow), "ROUND": ctx.rounding}
        low = room_for_rounded(dqkv, ctx.rounding)
        unsplit_kernel[(batch * time,)](dq, dk, dv, dqkv, *low, **shape)
        return dqkv, None, None, None


def split(qkv: Tensor, *rest: Any, rounding: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, (batch, time, heads or kv_heads, head_dim) each, from `qkv` as
    above; `rest` is heads and kv_heads."""
    return Split.apply(qkv, *rest, rounding)  # type: ignore[no-any-return, no-untyped-call]
