"""Muon's kernels against the functions that they replace."""

import pytest
import torch
from torch import Tensor, nn

from nanolm.training import muon
from nanolm.training.optim import Optimizers

kernels = pytest.importorskip("nanolm.training.muon_kernels", exc_type=ImportError)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not kernels.available(), reason="needs a newer GPU"),
]
SHAPES = [(3, 48, 48), (2, 128, 128), (5, 136, 264), (4, 384, 1024), (2, 1024, 384), (1, 768, 768)]


def like_gradients(*shape: int) -> Tensor:
    """A few directions are much larger than others."""
    torch.manual_seed(1)
    rough = torch.randn(*shape, device="cuda")
    u, values, v = torch.linalg.svd(rough, full_matrices=False)
    falling = torch.logspace(0, -3, values.shape[1], device="cuda")
    result: Tensor = 1e-4 * u * falling @ v
    return result


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_half_of_a_symmetric_product(shape: tuple[int, int, int]) -> None:
    x = torch.randn(*shape, device="cuda").bfloat16()
    for each in (x, x.mT):
        assert kernels.fits(each)
        wanted = each.float() @ each.float().mT
        found = kernels.symmetric_product(each, each)
        assert torch.equal(found, found.mT)
        torch.testing.assert_close(found, wanted.bfloat16(), atol=0.1, rtol=0.01)
        scaled = kernels.symmetric_product(found, found, 2e-3, found, -0.5)
        exact = found.double()
        exact = 2e-3 * exact @ exact - 0.5 * exact
        torch.testing.assert_close(scaled, exact.bfloat16(), atol=0.1, rtol=0.01)


def test_a_weighted_sum() -> None:
    x, y = torch.randn(2, 3, 40, 40, device="cuda").bfloat16()
    a, b = torch.rand(2, 3, 1, 1, device="cuda")
    wanted = (a * x + b * y).bfloat16()
    torch.testing.assert_close(kernels.weighted_sum(x, a, y, b), wanted, atol=0.02, rtol=0.02)
    torch.testing.assert_close(kernels.weighted_sum(x, a), (a * x).bfloat16(), atol=0, rtol=0.02)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_about_the_same_updates_as_in_float32(shape: tuple[int, int, int]) -> None:
    x = like_gradients(*shape)
    found, wanted = muon.orthogonalize(x), muon.orthogonalize(x.cpu())
    error = (found.float().cpu() - wanted).norm() / wanted.norm()
    assert error < 0.1
    assert torch.linalg.svdvals(found.float()).max() < 1.8
    assert not muon.orthogonalize(torch.zeros_like(x)).any()


def test_about_the_same_steps_as_on_a_cpu() -> None:
    torch.manual_seed(1)
    shapes = {"fused": (384, 128), "tall": (256, 128), "wide": (128, 256), "odd": (20, 12)}
    rows = {"fused": [128] * 3, "tall": [256], "wide": [128], "odd": [20]}
    cpu = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    gpu = {name: nn.Parameter(value.detach().cuda()) for name, value in cpu.items()}
    before = {name: value.detach().clone() for name, value in cpu.items()}
    both = [Optimizers(each, "muon", 0.1, rows) for each in (cpu, gpu)]
    for step in range(4):
        for name, value in cpu.items():
            value.grad = torch.randn_like(value)
            gpu[name].grad = value.grad.cuda()
        overflow = float(step == 2)  # changes nothing
        for optimizers, device in zip(both, ("cpu", "cuda"), strict=True):
            if overflow and device == "cuda":
                gpu["tall"].grad = torch.full_like(gpu["tall"], torch.nan)
            optimizers.set_lr(1e-2)
            scale, found_inf = (torch.tensor(x, device=device) for x in (2.0, overflow))
            optimizers.step(scale, found_inf)
    for name, value in gpu.items():
        moved = (cpu[name] - before[name]).norm()
        assert (value.cpu() - cpu[name]).norm() < 0.06 * moved, name
