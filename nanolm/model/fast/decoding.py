"""Decodes one token with five kernels per layer, so that launches do not keep a GPU waiting.

With one row, most of the time goes into reading weights and launching kernels. So norms, biases and
nonlinearities are fused into the matrix kernels. Sums are in float32.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanolm.model.cache import KVCache
from nanolm.model.config import Switches, unsupported
from nanolm.model.fast.fused.heads import halves
from nanolm.model.fast.training import FUSED_ATTENTION, FUSED_BLOCKS
from nanolm.model.gpt import GPT, Attention, AttentionInputs, Block

NO_NORM, RMS, LAYER = 0, 1, 2
NONLINEARITIES = {"none": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "relu2": 4, "swiglu": 5}
FEW_ROWS = 4  # with more, cuBLAS reads the weights once for all rows and is faster (measured)
BEHIND = 256  # earlier tokens that attention processes at a time
# Models with other switches use the plain path.
KNOWN: Switches = {**FUSED_BLOCKS, **FUSED_ATTENTION, "feed_forward": tuple(NONLINEARITIES)}


@triton.jit  # type: ignore[untyped-decorator]
def linear_kernel(  # type: ignore[no-untyped-def]
    x,  # (rows, inputs), float32
    weight,  # (outputs, inputs); for SwiGLU twice as many outputs, the gate first
    bias,
    norm_weight,
    norm_bias,
    out,  # (rows, outputs), float32
    inputs,
    outputs,
    epsilon,
    NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    ADD: tl.constexpr,  # add to the contents of `out`
    IN: tl.constexpr,  # inputs, rounded up to a power of two
    OUT: tl.constexpr,  # outputs at a time
    TURNS: tl.constexpr,  # iterations over OUT outputs
    EARLY: tl.constexpr,  # start while the previous kernel is still running
):
    """out = nonlinearity(norm(x) @ weight.T + bias), or out += with ADD."""
    row = tl.program_id(1)
    i = tl.arange(0, IN)
    inside = i < inputs
    o = tl.program_id(0) * OUT * TURNS + tl.arange(0, OUT)
    # Load weights before waiting for the previous kernel, which computes `x`.
    places = o[:, None] * inputs + i[None, :]
    both = (o < outputs)[:, None] & inside[None, :]
    w = tl.load(weight + places, mask=both, other=0.0)
    if KIND == 5:
        v = tl.load(weight + outputs * inputs + places, mask=both, other=0.0)
    if NORM > 0:
        gain = tl.load(norm_weight + i, mask=inside, other=0.0).to(tl.float32)
    if NORM_BIAS:
        shift = tl.load(norm_bias + i, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.load(x + row * inputs + i, mask=inside, other=0.0)
    if NORM == 2:
        part = tl.where(inside, part - tl.sum(part, 0) / inputs, 0.0)
    if NORM > 0:
        part = part / tl.sqrt(tl.sum(part * part, 0) / inputs + epsilon) * gain
    if NORM_BIAS:
        part += shift
    for turn in tl.static_range(TURNS):
        if turn > 0:
            o += OUT
            places = o[:, None] * inputs + i[None, :]
            both = (o < outputs)[:, None] & inside[None, :]
            w = tl.load(weight + places, mask=both, other=0.0)
            if KIND == 5:
                v = tl.load(weight + outputs * inputs + places, mask=both, other=0.0)
        real = o < outputs
        y = tl.sum(w.to(tl.float32) * part[None, :], 1)
        if BIAS:
            y += tl.load(bias + o, mask=real, other=0.0)
        if KIND == 1:
            y = tl.maximum(y, 0.0)
        elif KIND == 2:
            y = 0.5 * y * (1 + tl.erf(y * 0.7071067811865476))
        elif KIND == 3:
            y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
        elif KIND == 4:
            y = tl.maximum(y, 0.0)
            y = y * y
        elif KIND == 5:
            up = tl.sum(v.to(tl.float32) * part[None, :], 1)
            if BIAS:
                up += tl.load(bias + outputs + o, mask=real, other=0.0)
            y = y * tl.sigmoid(y) * up
        if ADD:
            y += tl.load(out + row * outputs + o, mask=real, other=0.0)
        tl.store(out + row * outputs + o, y, mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def normed(  # type: ignore[no-untyped-def]
    left, right, weight, bias, place, real, epsilon, HALF: tl.constexpr, NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr,
):  # fmt: skip
    if NORM == 2:
        mean = (tl.sum(left, 0) + tl.sum(right, 0)) / (2 * HALF)
        left = tl.where(real, left - mean, 0.0)
        right = tl.where(real, right - mean, 0.0)
    scale = 1 / tl.sqrt((tl.sum(left * left, 0) + tl.sum(right * right, 0)) / (2 * HALF) + epsilon)
    left_weight, right_weight = halves(weight, place, real, HALF)
    left, right = left * scale * left_weight, right * scale * right_weight
    if NORM_BIAS:
        left_bias, right_bias = halves(bias, place, real, HALF)
        left, right = left + left_bias, right + right_bias
    return left, right


@triton.jit  # type: ignore[untyped-decorator]
def attention_kernel(  # type: ignore[no-untyped-def]
    qkv,  # (rows, heads + 2 * kv_heads, head_dim), float32
    keys,  # (rows, kv_heads, capacity, head_dim)
    values,
    lengths,  # (rows,)
    cosines,  # (places, head_dim)
    sines,
    query_weight,
    query_bias,
    key_weight,
    key_bias,
    out,  # (rows, heads, head_dim), float32
    capacity,
    heads,
    kv_heads,
    epsilon,
    scale,
    NORM: tl.constexpr,
    NORM_BIAS: tl.constexpr,
    ROTATE: tl.constexpr,
    HALF: tl.constexpr,  # half the width of a head
    LANES: tl.constexpr,  # the next power of two
    BLOCK: tl.constexpr,  # earlier tokens at a time
    EARLY: tl.constexpr,
):
    """Attention of the new token of each row: one program per row and head."""
    row, head = tl.program_id(0), tl.program_id(1)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    group = heads // kv_heads
    kv_head = head // group
    here = tl.load(lengths + row)
    place = tl.arange(0, LANES)
    real = place < HALF
    qkv += row * (heads + 2 * kv_heads) * 2 * HALF
    q0, q1 = halves(qkv + head * 2 * HALF, place, real, HALF)
    k0, k1 = halves(qkv + (heads + kv_head) * 2 * HALF, place, real, HALF)
    v0, v1 = halves(qkv + (heads + kv_heads + kv_head) * 2 * HALF, place, real, HALF)
    if NORM > 0:
        q0, q1 = normed(
            q0, q1, query_weight, query_bias, place, real, epsilon, HALF, NORM, NORM_BIAS
        )
        k0, k1 = normed(k0, k1, key_weight, key_bias, place, real, epsilon, HALF, NORM, NORM_BIAS)
    if ROTATE:
        cosine = tl.load(cosines + here * 2 * HALF + place, mask=real, other=0.0)
        sine = tl.load(sines + here * 2 * HALF + place, mask=real, other=0.0)
        q0, q1 = q0 * cosine - q1 * sine, q1 * cosine + q0 * sine
        k0, k1 = k0 * cosine - k1 * sine, k1 * cosine + k0 * sine
    start = (row * kv_heads + kv_head).to(tl.int64) * capacity * 2 * HALF
    keys += start
    values += start
    if head % group == 0:  # one of the heads that share them stores them
        new = here * 2 * HALF + place
        tl.store(keys + new, k0, mask=real)
        tl.store(keys + HALF + new, k1, mask=real)
        tl.store(values + new, v0, mask=real)
        tl.store(values + HALF + new, v1, mask=real)
    # Start with the token itself, then earlier ones; sums are scaled to the largest score so far.
    largest = (tl.sum(q0 * k0, 0) + tl.sum(q1 * k1, 0)) * scale
    total = 1.0
    for first in range(0, here, BLOCK):
        behind = first + tl.arange(0, BLOCK)
        there = behind < here
        spots = behind[:, None] * 2 * HALF + place[None, :]
        both = there[:, None] & real[None, :]
        past0, past1 = halves(keys, spots, both, HALF)
        scores = (tl.sum(past0 * q0[None, :], 1) + tl.sum(past1 * q1[None, :], 1)) * scale
        scores = tl.where(there, scores, float("-inf"))
        before = largest
        largest = tl.maximum(largest, tl.max(scores, 0))
        shrink = tl.exp(before - largest)
        shares = tl.exp(scores - largest)
        past0, past1 = halves(values, spots, both, HALF)
        v0 = v0 * shrink + tl.sum(past0 * shares[:, None], 0)
        v1 = v1 * shrink + tl.sum(past1 * shares[:, None], 0)
        total = total * shrink + tl.sum(shares, 0)
    out += (row * heads + head) * 2 * HALF
    tl.store(out + place, v0 / total, mask=real)
    tl.store(out + HALF + place, v1 / total, mask=real)


class OneToken:
    """A step with one new token per row: ids (rows, 1) in, logits (rows, vocabulary) out."""

    def __init__(self, model: GPT, cache: KVCache, rows: int) -> None:
        """For the first `rows` rows of the cache."""
        self.model, self.cache, self.few = model, cache, rows <= FEW_ROWS
        config, like = model.config, model.token_embedding.weight
        self.dtype = torch.float32 if self.few else like.dtype
        # These GPUs can start a kernel while the previous one is still running.
        new = torch.version.hip is None and torch.cuda.get_device_capability(like.device)[0] >= 9
        early = self.few and new
        self.launch = {"EARLY": early, **({"launch_pdl": True} if early else {})}

        def room(width: int) -> Tensor:
            return torch.empty(rows, width, dtype=self.dtype, device=like.device)

        self.qkv = room((config.heads + 2 * config.kv_heads) * config.head_dim)
        self.attended = room(config.heads * config.head_dim)
        self.hidden = room(config.hidden)
        self.out = room(config.vocab_size)

    @staticmethod
    def supports(model: Any, cache: Any) -> bool:
        if not (isinstance(model, GPT) and isinstance(cache, KVCache) and cache.fixed):
            return False
        return model.config.head_dim % 2 == 0 and not unsupported(model.config, KNOWN)

    def __call__(self, ids: Tensor) -> Tensor:
        model, cache = self.model, self.cache
        positions = cache.next_positions(1)  # (rows, 1)
        inputs = AttentionInputs(positions, cache.kv_length(positions))
        if model.config.positions == "rope":
            self.tables = model.tables.at_least(inputs.kv_length, model.device)
        x = model.embed(ids, inputs)[:, 0].to(self.dtype)  # (rows, dim)
        for block in cast(Iterable[Block], model.blocks):
            attention, feed_forward = block.attention, block.feed_forward
            if self.few:
                self.linear(x, attention.qkv, self.qkv, norm=block.attention_norm)
                self.attend(attention, self.qkv)
                self.linear(self.attended, attention.out, x, add=True)
                norm = block.feed_forward_norm
                self.linear(x, feed_forward.up, self.hidden, norm, feed_forward.kind)
                self.linear(self.hidden, feed_forward.out, x, add=True)
            else:
                self.attend(attention, attention.qkv(block.attention_norm(x)))
                x = x + attention.out(self.attended)
                x = x + feed_forward(block.feed_forward_norm(x))
        cache.advance(1)
        if self.few:
            return self.linear(x, model.head, self.out, norm=model.norm)
        return model.head(model.norm(x))  # type: ignore[no-any-return]

    def attend(self, attention: Attention, qkv: Tensor) -> None:
        """Store the new keys and values, and attend with the new queries."""
        config, cache = self.model.config, self.cache
        rotate = config.positions == "rope" and attention.rotated
        tables = self.tables if rotate else (None, None)
        norms = (attention.query_norm, attention.key_norm) if config.qk_norm else (None, None)
        (norm, query, query_bias), (_, key, key_bias) = map(parts_of_norm, norms)
        half, capacity = config.head_dim // 2, cache.keys.shape[3]
        block = min(BEHIND, triton.next_power_of_2(capacity))
        shape = {"HALF": half, "LANES": triton.next_power_of_2(half), "BLOCK": block}
        shape |= {"NORM": norm, "NORM_BIAS": query_bias is not None, "ROTATE": rotate}
        attention_kernel[(len(qkv), config.heads)](
            *(qkv, cache.keys[attention.layer], cache.values[attention.layer], cache.lengths),
            *(*tables, query, query_bias, key, key_bias, self.attended),
            *(capacity, config.heads, config.kv_heads, config.norm_epsilon, config.head_dim**-0.5),
            **shape | {"num_warps": 4, **self.launch},
        )

    def linear(
        self,
        x: Tensor,
        layer: nn.Linear,
        out: Tensor,
        norm: nn.Module | None = None,
        nonlinearity: str = "none",
        add: bool = False,
    ) -> Tensor:
        """`out`, filled by `linear_kernel`."""
        (rows, inputs), outputs = x.shape, out.shape[1]
        kind, norm_weight, norm_bias = parts_of_norm(norm)
        padded = triton.next_power_of_2(inputs)
        # Measured on an H200: small programs, so that every multiprocessor gets several; the
        # vocabulary is large enough for larger ones.
        each, turns = (4, 1) if outputs < 16_384 else (8, 2)
        linear_kernel[(triton.cdiv(outputs, each * turns), rows)](
            *(x, layer.weight, layer.bias, norm_weight, norm_bias, out),
            *(inputs, outputs, self.model.config.norm_epsilon),
            **{"NORM": kind, "NORM_BIAS": norm_bias is not None, "BIAS": layer.bias is not None},
            **{"KIND": NONLINEARITIES[nonlinearity], "ADD": add, "IN": padded, "OUT": each},
            **{"TURNS": turns, "num_warps": max(1, min(16, each * padded // 2048)), **self.launch},
        )
        return out


def parts_of_norm(norm: nn.Module | None) -> tuple[int, Tensor | None, Tensor | None]:
    """The kind of norm, its weight and its bias."""
    match norm:
        case nn.LayerNorm():
            return LAYER, norm.weight, norm.bias
        case nn.RMSNorm():
            return RMS, norm.weight, None
    return NO_NORM, None, None
