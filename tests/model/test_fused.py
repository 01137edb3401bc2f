"""Training kernels against the plain functions; without a GPU under TRITON_INTERPRET=1."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import PUBLISHED_FAMILIES, every_gpt, gpt_config, lively
from torch import Tensor
from triton_here import DEVICE, GPU

from nanolm.model.config import GPTConfig
from nanolm.model.fast import fused
from nanolm.model.fast.fused import launch
from nanolm.model.fast.training import speed_up
from nanolm.model.gpt import NONLINEARITIES, RMSNorm
from nanolm.model.positions import rotate, rotation_table
from nanolm.training.loss import next_token_loss

pytestmark = pytest.mark.gpu
EPSILON = 1e-5
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16] if GPU else [torch.float32]
)


def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype, part: float = 1e-5) -> None:
    """Within the precision, relative to each value or to the largest one."""
    part = part if dtype == torch.float32 else 0.02
    most = part * max(1.0, float(wanted.detach().abs().max()))
    torch.testing.assert_close(found.float(), wanted.float(), rtol=part, atol=most)


def alike(
    ours: Callable[..., Any], plain: Callable[..., Any], inputs: list[Tensor], part: float = 1e-5
) -> None:
    """The same results and the same gradients; the plain ones are computed in float32."""
    exact = [x.detach().float().requires_grad_() for x in inputs]
    found, wanted = ours(*inputs), plain(*exact)
    if isinstance(found, Tensor):
        found, wanted = (found,), (wanted,)
    dtype = inputs[0].dtype
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == dtype
        close(a, b, dtype, part)
    # Gradients that are not contiguous, as those of attention may be.
    grads = [torch.randn_like(a.mT).mT for a in found]
    torch.autograd.backward(found, grads)
    torch.autograd.backward(wanted, [g.float() for g in grads])
    for x, y in zip(inputs, exact, strict=True):
        assert x.grad is not None and y.grad is not None and x.grad.dtype == x.dtype
        close(x.grad, y.grad, dtype, part)


@every_dtype
@pytest.mark.parametrize("hidden", [128, 48, 1100])
def test_swiglu(hidden: int, dtype: torch.dtype) -> None:
    alike(fused.swiglu, NONLINEARITIES["swiglu"], [some(3, 2, 2 * hidden, dtype=dtype)])


@every_dtype
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (6, 3, 10), (3, 1, 64)])
def test_qk_norm_rope(
    heads: int, kv_heads: int, head_dim: int, norm: bool, dtype: torch.dtype
) -> None:
    config = gpt_config(heads=heads, kv_heads=kv_heads, dim=heads * head_dim)
    cosines, sines = (table.to(DEVICE) for table in rotation_table(9, config))
    batch, time = 2, 5

    def ours(qkv: Tensor, *weights: Tensor) -> Any:
        query, key = weights or (None, None)
        return fused.qk_norm_rope(qkv, cosines, sines, heads, kv_heads, query, key, EPSILON)

    def plain(qkv: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        parts = [heads, kv_heads, kv_heads]
        q, k, v = qkv.unflatten(2, (sum(parts), head_dim)).split(parts, dim=2)
        if weights:
            q = F.rms_norm(q, (head_dim,), weights[0], EPSILON)
            k = F.rms_norm(k, (head_dim,), weights[1], EPSILON)
        here = (cosines[:time], sines[:time])
        q, k = (rotate(t.transpose(1, 2), here).transpose(1, 2) for t in (q, k))
        return q, k, v

    weights = [some(head_dim), some(head_dim)] if norm else []
    qkv = some(batch, time, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    alike(ours, plain, [qkv, *weights])


def test_tables_that_are_views() -> None:
    qkv = some(1, 5, 4 * 8)
    cosines, sines = rotation_table(5, gpt_config(heads=2, kv_heads=1, dim=16))
    both = torch.stack([cosines, sines], dim=1).to(DEVICE)  # (time, 2, head_dim)
    views = fused.qk_norm_rope(qkv, both[:, 0], both[:, 1], 2, 1, None, None, EPSILON)
    tables = (cosines.to(DEVICE), sines.to(DEVICE))
    for a, b in zip(
        views, fused.qk_norm_rope(qkv, *tables, 2, 1, None, None, EPSILON), strict=True
    ):
        assert torch.equal(a, b)


@every_dtype
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("dim", [48, 256])
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("kind", ["rms", "layer", "layer with bias"])
def test_norms(
    kind: str, add: bool, dim: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "PROCESSORS", 1)  # fewer programs than rows, or more
    bias = [some(dim)] if kind == "layer with bias" else []

    def split(inputs: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor, Tensor | None]:
        xs, (weight, *bias) = list(inputs[: 1 + add]), inputs[1 + add :]
        return xs, weight, bias[0] if bias else None

    def ours(*inputs: Tensor) -> Any:
        xs, weight, bias = split(inputs)
        y = xs[1] if add else None
        return fused.add_norm(xs[0], y, weight, bias, EPSILON, kind != "rms")

    def plain(*inputs: Tensor) -> Any:
        xs, weight, bias = split(inputs)
        x = xs[0] + xs[1] if add else xs[0]
        if kind == "rms":
            y = F.rms_norm(x, (dim,), weight, EPSILON)
        else:
            y = F.layer_norm(x, (dim,), weight, bias, EPSILON)
        return x, y

    xs = [some(rows, 1, dim, dtype=dtype) for _ in range(1 + add)]
    alike(ours, plain, [*xs, some(dim), *bias])


def test_an_unused_sum_or_norm() -> None:
    x, y, weight = some(3, 48), some(3, 48), some(48)
    total, out = fused.add_norm(x, y, weight, None, EPSILON, False)
    dx, dy = torch.autograd.grad(out.square().sum(), [x, y], retain_graph=True)
    norm = RMSNorm(48, eps=EPSILON, device=DEVICE)
    norm.weight.data = weight.detach()
    (wanted,) = torch.autograd.grad(norm(x + y).square().sum(), [x])
    close(dx, wanted, x.dtype)
    assert torch.equal(dx, dy)
    dx, dweight = torch.autograd.grad(total.sum(), [x, weight], allow_unused=True)
    assert torch.equal(dx, torch.ones_like(dx))
    assert dweight is None


@every_dtype
@pytest.mark.parametrize(("rows", "columns"), [(3, 65), (5, 128), (2, 5000), (2, 50_304)])
def test_cross_entropy(rows: int, columns: int, dtype: torch.dtype) -> None:
    logits = (10 * torch.randn(rows, columns, device=DEVICE)).to(dtype)
    logits[0, :40] = -torch.inf
    targets = torch.randint(40, columns, (rows,), device=DEVICE)
    targets[-1] = columns - 1
    plain = logits.float().requires_grad_()
    wanted = F.cross_entropy(plain, targets, reduction="none")
    wanted.sum().backward()
    losses = fused.cross_entropy_(logits, targets)
    torch.testing.assert_close(losses, wanted.detach(), rtol=1e-5, atol=1e-5)
    assert plain.grad is not None
    close(logits, plain.grad, dtype)


@every_dtype
@pytest.mark.parametrize("count", [3, 1024, 2500])
def test_gelu(count: int, dtype: torch.dtype) -> None:
    alike(fused.gelu_tanh, NONLINEARITIES["gelu_tanh"], [some(2, count, dtype=dtype)])


@pytest.mark.skipif(not GPU, reason="products with another precision of the result are for GPUs")
@pytest.mark.parametrize("bias", [False, True])
def test_products(bias: bool) -> None:
    layer = torch.nn.Linear(32, 48, bias=bias, device=DEVICE)
    plain = torch.nn.Linear(32, 48, bias=bias, device=DEVICE)
    plain.load_state_dict(layer.state_dict())
    x = some(3, 5, 32, dtype=torch.bfloat16)
    y = x.detach().float().requires_grad_()
    fused.refresh([layer], torch.bfloat16)
    found, wanted = fused.linear(layer, x), plain(y)
    later = torch.randn_like(wanted)
    found.backward(later.bfloat16())
    wanted.backward(later)
    close(found, wanted, torch.bfloat16)
    pairs = [(x, y), *zip(layer.parameters(), plain.parameters(), strict=True)]
    for one, two in pairs:
        assert one.grad is not None and two.grad is not None and one.grad.dtype == one.dtype
        close(one.grad, two.grad, torch.bfloat16)


PUBLISHED = [gpt_config(**changes) for changes in PUBLISHED_FAMILIES.values()]


@pytest.mark.parametrize("config", [*random.Random(0).sample(every_gpt(), 40), *PUBLISHED], ids=str)
@pytest.mark.parametrize("low", [False, True] if GPU else [False])
def test_whole_models(config: GPTConfig, low: bool) -> None:
    """Loss and all gradients, with and without the kernels."""
    model = lively(config).to(DEVICE).train()
    ids = torch.randint(config.vocab_size, (3, config.context), device=DEVICE)

    def run(low: bool) -> dict[str, Tensor]:
        model.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=low):
            loss = next_token_loss(model.head, model.hidden_states(ids), ids)
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach(), **grads}

    exact, plain = run(False), run(low)
    speed_up(model, kernels=fused)
    ours = run(low)
    speed_up(model, recompute=True)
    for found in (ours, run(low)):
        assert set(found) == set(exact)
        for name, wanted in exact.items():
            rounding = 4 * (plain[name] - wanted).norm() + (0.05 if low else 1e-4) * wanted.norm()
            assert (found[name] - wanted).norm() <= rounding + 3e-5, name
