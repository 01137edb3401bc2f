"""8-bit and 4-bit weights: nearly the same outputs."""

import copy
from typing import Any

import pytest
import torch
from models import lively
from torch import nn

from nanolm.errors import UsageError
from nanolm.model.config import configure
from nanolm.model.fast import native, quantized
from nanolm.model.fast.quantized import (
    FEW_ROWS,
    OUR_FEW_ROWS,
    DynamicInt4Linear,
    Int4Linear,
    Int8Linear,
    NativeInt4Linear,
    QuantizedLinear,
    int4_kind,
    quantize,
    works,
)

FOUR_BITS = [Int4Linear, DynamicInt4Linear] + [NativeInt4Linear] * native.available()
KINDS: dict[Any, float] = {Int8Linear: 0.2, **dict.fromkeys(FOUR_BITS, 1.0)}


@pytest.mark.parametrize("rows", [1, OUR_FEW_ROWS, FEW_ROWS, FEW_ROWS + 1, 70])
@pytest.mark.parametrize("inputs", [24, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_nearly_what_the_layer_gives(
    kind: type[QuantizedLinear], dtype: torch.dtype, inputs: int, rows: int
) -> None:
    if not works(kind):
        pytest.skip("torch has no such kernel here")
    torch.manual_seed(rows)
    layer = nn.Linear(inputs, 77, bias=rows > 1)
    with torch.no_grad():
        layer.weight *= torch.logspace(-1, 1, 77)[:, None]  # each row has its own scale
        x = torch.randn(rows, 3, inputs)[:, -1:]  # not contiguous
        expected = layer(x)
        found = kind(layer.to(dtype))(x.to(dtype))
    usual = x.norm(dim=-1, keepdim=True) * layer.weight.float().norm(dim=1) / inputs**0.5
    assert found.shape == expected.shape and found.dtype == dtype
    assert ((found.float() - expected).abs() / usual).max() < KINDS[kind]


@pytest.mark.parametrize("kind", [kind for kind in FOUR_BITS if kind is not DynamicInt4Linear])
def test_4_bits_by_hand(kind: type[QuantizedLinear]) -> None:
    """Each group of 32 weights has 16 values at equal distances, which are exact if they fit."""
    torch.manual_seed(0)
    groups = torch.randint(16, (64, 3, 32)).float()
    groups[:, :, 0], groups[:, :, 1] = 0, 15
    scale = 2.0 ** torch.randint(-3, 4, (64, 3, 1))
    low = 4 * torch.randint(-8, 4, (64, 3, 1))
    layer = nn.Linear(96, 64, bias=False)
    with torch.no_grad():
        layer.weight.copy_((scale * (groups + low)).flatten(1))
        quick, inputs = kind(layer), torch.eye(96)
        for few in (inputs[:, None], inputs[None]):  # one row at a time, and many
            assert torch.equal(
                torch.cat([quick(x) for x in few.split(1)]).view(96, 64).T, layer.weight
            )


def test_weights_that_are_all_equal() -> None:
    layer = nn.Linear(64, 32, bias=False)
    for value in (0.0, -1.5):
        with torch.no_grad():
            layer.weight.fill_(value)
            for kind in {Int8Linear, *FOUR_BITS} - {DynamicInt4Linear}:
                found = kind(layer)(torch.ones(1, 1, 64))
                torch.testing.assert_close(
                    found, torch.full_like(found, 64 * value), rtol=0.02, atol=0
                )


def test_a_kernel_that_fails_or_is_wrong_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Int8Linear):
        def multiply(self, rows: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("not in this build")

    class Wrong(Int8Linear):
        def multiply(self, rows: torch.Tensor) -> torch.Tensor:
            return 2 * super().multiply(rows)

    assert not works(Fails) and not works(Wrong) and works(Int8Linear)
    for first, other, expected in ((Fails, Int8Linear, Int8Linear), (Wrong, Fails, None)):
        for name, kind in (("Native", Fails), ("", first), ("Dynamic", other)):
            monkeypatch.setattr(quantized, f"{name}Int4Linear", kind)
        int4_kind.cache_clear()
        if expected:
            assert int4_kind() is expected
            continue
        with pytest.raises(UsageError, match="try --int8"):
            int4_kind()
    int4_kind.cache_clear()


@pytest.mark.parametrize(("bits", "error"), [(8, 0.02), (4, 0.2)])
@pytest.mark.parametrize("family", ["modern", "gpt2", "lstm"])
@pytest.mark.parametrize("dim", [64, 40])
def test_a_model_stays_nearly_itself(family: str, dim: int, bits: int, error: float) -> None:
    shape = {"vocab_size": 300, "layers": 2, "heads": 4, "dim": dim, "context": 16}
    model = lively(configure(family, **shape), std=0.05)
    quick = copy.deepcopy(model)
    quantize(quick, bits)
    assert not any(isinstance(module, nn.Linear) for module in quick.modules())
    assert isinstance(quick.head, Int8Linear)
    ids = torch.randint(300, (1, 16))
    memory = quick.init_cache(1, 16)
    with torch.no_grad():
        whole = model(ids).log_softmax(-1)
        steps = torch.cat([quick(id[None, None], memory) for id in ids[0]], dim=1)
    assert (steps.log_softmax(-1) - whole).abs().mean() < error * whole.std()
