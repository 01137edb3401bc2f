"""The arithmetic and memory traffic of a step, counted by hand."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanolm.bench.costs import Counter, costs, operations

A, B = torch.randn(10, 20), torch.randn(20, 30)
IDS = torch.tensor([1, 5, 5])
HEADS = torch.randn(2, 3, 8, 4)  # (batch, heads, time, head_dim)
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"

# An operator's name, a call, its operations, and the number of 4-byte values it moves.
COUNTED: dict[str, tuple[Callable[[], object], int, float]] = {
    "mm": (lambda: A @ B, 2 * 10 * 20 * 30, 200 + 600 + 300),
    "mul": (lambda: A * A[0], 0, 200 + 20 + 200),
    "add": (lambda: A.clone().add_(A), 0, 200 + 200 + 200),
    "zero": (lambda: A.clone().zero_(), 0, 200),
    "copy": (lambda: A.clone().copy_(A), 0, 200 + 200),
    "view": (lambda: A.view(-1), 0, 0),
    "sum": (lambda: A[:1].expand(1000, 20).sum(), 0, 20 + 1),
    # Ids have 8 bytes; the rows that are looked up are read and written.
    "embedding": (lambda: F.embedding(IDS, A), 0, 2 * 3 + 60 + 60),
    # Two products of (8, 4) by (4, 8) in six heads, half of each; besides three inputs and the
    # output, one float32 value per row.
    ATTENTION: (
        lambda: F.scaled_dot_product_attention(HEADS, HEADS, HEADS, is_causal=True),
        2 * 6 * 8 * 8 * 4,
        4 * 192 + 48,
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_work_of_an_operator(name: str) -> None:
    call, operations, numbers = COUNTED[name]
    with Counter() as counter:
        call()
    work = counter.work[f"aten::{name}"]
    assert (work.operations, work.bytes) == (operations, 4 * numbers)


ADDED = torch.ops.aten.addmm
BIAS, BATCH = torch.randn(30), torch.randn(4, 10, 20)
FLOAT = torch.float32


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "shape"),
    [
        (ADDED.default, (BIAS, A, B), {}, (10, 30)),
        (ADDED.default, (BIAS, A, B), {"beta": 1, "alpha": 1}, (10, 30)),
        # The overload used on a GPU, with the output dtype as another argument.
        (ADDED.dtype, (BIAS, A, B, FLOAT), {}, (10, 30)),
        (torch.ops.aten.mm.dtype, (A, B, FLOAT), {}, (10, 30)),
        (torch.ops.aten.bmm.default, (BATCH, B.expand(4, 20, 30)), {}, (4, 10, 30)),
        (torch.ops.aten.baddbmm.default, (BIAS, BATCH, B.expand(4, 20, 30)), {}, (4, 10, 30)),
        (torch.ops.aten._scaled_mm.default, (A, B, BIAS, BIAS), {"out_dtype": FLOAT}, (10, 30)),
    ],
)
def test_operations_of_every_overload(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]
) -> None:
    count = operations(func, args, kwargs, torch.empty(shape))
    assert count == 2 * math.prod(shape) * 20


def test_adamw_reads_and_writes_four() -> None:
    """It moves weights, moments, and gradients, which it scales."""
    weight = torch.zeros(1000, requires_grad=True)
    weight.grad = torch.ones(1000)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.grad_scale = torch.ones(())  # type: ignore[attr-defined]
    with Counter() as counter:
        optimizer.step()
    moved = counter.work["aten::_fused_adamw"].bytes
    assert 8 * 4000 <= moved < 8 * 4000 + 100  # and the number of the step


@dataclass
class Update:
    """Forward and backward through a matrix."""

    weight: Tensor

    def step(self) -> None:
        x = torch.ones(64, len(self.weight), dtype=torch.float64)
        (x.float() @ self.weight).square().sum().backward()

    def wait(self) -> None:
        pass


def test_costs_of_an_update() -> None:
    weight = torch.randn(256, 128, requires_grad=True)
    products, copies = 1e9, 1e9
    found = costs(Update(weight), "cpu", products, copies)
    by_name = {cost.operator: cost for cost in found.costs}
    times = [cost.milliseconds for cost in found.costs]
    assert times == sorted(times, reverse=True)
    assert sum(cost.share for cost in found.costs) <= 1
    assert by_name["mm"].calls == 2  # forward, and the gradient of the weight
    assert by_name["mm"].limit == pytest.approx(1000 * 2 * 2 * 64 * 256 * 128 / products)
    assert by_name["mm"].times_limit == pytest.approx(by_name["mm"].milliseconds / 8.388608)
    # Operators inside a conversion are not listed again.
    assert by_name["_to_copy"].limit == pytest.approx(1000 * 64 * 256 * (8 + 4) / copies)
    assert "empty_strided" not in by_name
