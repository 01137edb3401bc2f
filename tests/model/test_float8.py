"""Products in float8: rounding in kernels, and the results."""

import pytest
import torch
from torch import Tensor
from triton_here import DEVICE, GPU

from nanolm.model.config import configure
from nanolm.model.fast import float8, fused
from nanolm.model.fast.training import speedups_of
from nanolm.planning.trial import SpeedTrial
from nanolm.training import loss

pytestmark = pytest.mark.gpu
needs_products = pytest.mark.skipif(
    not GPU or not float8.available(), reason="needs a GPU with float8"
)


def some(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(torch.bfloat16 if GPU else torch.float32)


def check_rounded(x: Tensor, found: tuple[Tensor, Tensor]) -> None:
    """Every row to three bits, with its largest value scaled to the largest float8."""
    low, scales = found
    assert low.shape == x.shape and low.dtype == torch.float8_e4m3fn
    again = low.float() * scales.unsqueeze(-1)
    most = x.float().abs().amax(-1)
    torch.testing.assert_close(scales, most / 448, rtol=0.01, atol=1e-30)
    # Half a step of the last bit, and of the smallest value.
    error = (again - x.float()).abs()
    right = (error <= x.float().abs() * 0.07 + most.unsqueeze(-1) * 2e-5).float().mean()
    assert float(right) >= (1.0 if GPU else 0.9)  # the interpreter forgets to carry


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("add", [True, False])
def test_norms_round_both_ways(kind: str, add: bool) -> None:
    x, y, weight = some(3, 5, 48), some(3, 5, 48), torch.ones(48, device=DEVICE)
    x.requires_grad_()
    total, out = float8.add_norm(x, y if add else None, weight, None, 1e-5, kind == "layer")
    wanted = fused.add_norm(x, y if add else None, weight, None, 1e-5, kind == "layer")
    assert torch.equal(total, wanted[0]) and torch.equal(out, wanted[1])
    check_rounded(out.detach(), out.rounded)  # type: ignore[attr-defined]
    seen: list[Tensor] = []
    x.register_hook(seen.append)
    (1e-9 * (out.float().square().sum() + total.float().sum())).backward()
    check_rounded(seen[0], seen[0].rounded)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["swiglu", "gelu_tanh"])
@pytest.mark.parametrize("wide", [96, 2_200])
def test_nonlinearities_round_both_ways(kind: str, wide: int) -> None:
    x = some(3, 2, wide).requires_grad_()
    out = getattr(float8, kind)(x)
    assert torch.equal(out, getattr(fused, kind)(x))
    check_rounded(out.detach(), out.rounded)
    seen: list[Tensor] = []
    x.register_hook(seen.append)
    (1e-9 * out.float().square().sum()).backward()
    check_rounded(seen[0], seen[0].rounded)  # type: ignore[attr-defined]


def test_split_rounds_in_the_backward_pass() -> None:
    qkv = some(2, 3, 8 * 16).requires_grad_()
    q, k, v = float8.split(qkv, 4, 2)
    assert torch.equal(torch.cat([q, k, v], dim=2).flatten(2), qkv)
    seen: list[Tensor] = []
    qkv.register_hook(seen.append)
    (q.square().sum() + k.sum() + 3 * v.sum()).backward()
    check_rounded(seen[0], seen[0].rounded)  # type: ignore[attr-defined]
    wanted = torch.cat([2 * q, torch.ones_like(k), 3 * torch.ones_like(v)], dim=2).flatten(2)
    assert torch.equal(seen[0], wanted.detach())


def test_a_row_of_zeros_and_one_that_is_not_finite() -> None:
    x = some(3, 48)
    x[0], x[1, 0] = 0.0, torch.nan
    low, scales = float8.rounded_rows(x)
    assert bool((low[0].float() * scales[0] == 0).all())
    check_rounded(x[2:], (low[2:], scales[2:, 0]))


def test_weights_are_rounded_and_transposed() -> None:
    weight = some(70, 48).float()
    (found,) = float8.rounded_weights([weight], [None])
    again = found.weight.float() * found.scale
    assert torch.equal(found.sideways.float().T * found.scale, again)
    assert bool((found.scales == found.scale).all()) and len(found.scales) == 70
    assert not GPU or float((again - weight).norm() / weight.norm()) < 0.04
    (same,) = float8.rounded_weights([2 * weight], [found])
    assert same is found
    torch.testing.assert_close(found.weight.float() * found.scale, 2 * again)


@needs_products
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_about_those_of_bfloat16(bias: bool) -> None:
    torch.manual_seed(1)
    layer = torch.nn.Linear(96, 208, bias=bias, device=DEVICE)
    x = some(4, 64, 96).requires_grad_()
    found = {}
    for name, kernels in (("float8", float8), ("bfloat16", fused)):
        kernels.refresh([layer], torch.bfloat16)
        y = kernels.linear(layer, x)
        assert y.dtype == torch.bfloat16
        y.backward(torch.ones_like(y) + y.detach())
        found[name] = [y.detach(), *(p.grad for p in (x, *layer.parameters()))]
        x.grad = None
        layer.zero_grad()
    for ours, wanted in zip(*found.values(), strict=True):
        difference = float((ours.float() - wanted.float()).norm() / wanted.float().norm())
        assert difference < 0.05


@needs_products
def test_the_loss_of_a_large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr(loss, "SCORES", 1 << 18)  # in pieces, the last one smaller
    head = torch.nn.Linear(96, 1_050, bias=False, device=DEVICE)
    x, targets = some(8, 100, 96).requires_grad_(), torch.randint(1_050, (8, 100), device=DEVICE)
    found = []
    for kernels in (None, float8):
        if kernels:
            head.scores = kernels.Scores
        with torch.autocast("cuda", torch.bfloat16):
            lost = loss.next_token_loss(head, x, targets)
        lost.backward()
        found.append([lost.detach(), x.grad, head.weight.grad])
        x.grad = head.weight.grad = None
    for ours, wanted in zip(*found, strict=True):
        assert float((ours.float() - wanted.float()).norm() / wanted.float().norm()) < 0.06


@needs_products
@pytest.mark.parametrize("family", ["modern", "gpt2"])
def test_a_model_learns_the_same_in_float8(family: str) -> None:
    shape = {"layers": 2, "heads": 2, "dim": 64, "context": 32, "vocab_size": 1_040}
    losses = {}
    for dtype in ("bfloat16", "float8"):
        torch.manual_seed(3)
        trial = SpeedTrial(configure(family, **shape), rows=16, device="cuda", dtype=dtype)
        assert speedups_of(trial.model).kernels is (float8 if dtype == "float8" else fused)
        trial.batches = trial.batches % 7  # something to learn
        numbers = [trial.update((trial.batches[i % 4],), 1e-3)[1].item() for i in range(60)]
        losses[dtype] = sum(numbers[-10:]) / 10
        trial.close()
    assert losses["bfloat16"] < 2.1
    assert losses["float8"] == pytest.approx(losses["bfloat16"], rel=0.01)
