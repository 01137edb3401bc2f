"""Orthogonalized updates: as computed from singular values, for any memory layout."""

import pytest
import torch
import torch.nn.functional as F
from models import of_family
from torch import Tensor, nn

from nanolm.training import muon
from nanolm.training.muon import LARGEST, MOMENTUM, POLYNOMIALS, Muon, orthogonalize
from nanolm.training.optim import Optimizers

SHAPES = {"square": (48, 48), "tall": (96, 48), "wide": (32, 80)}


def gradients(parameters: dict[str, nn.Parameter], step: int) -> dict[str, Tensor]:
    torch.manual_seed(step)
    return {name: torch.randn_like(parameter) for name, parameter in parameters.items()}


def exact(matrix: Tensor) -> Tensor:
    """The polynomials of Muon, applied to singular values."""
    u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / (values**8).sum() ** (1 / 8) / LARGEST**0.5
    for a, b, c in POLYNOMIALS:
        values = a * values + b * values**3 + c * values**5
    result: Tensor = u * values @ v
    return result


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e9])
def test_singular_values_follow_the_polynomials(shape: tuple[int, int], size: float) -> None:
    torch.manual_seed(1)
    x = size * torch.randn(3, *shape) @ torch.randn(shape[1], shape[1])
    found = orthogonalize(x)
    for one, matrix in zip(found, x, strict=True):
        torch.testing.assert_close(one.double(), exact(matrix), atol=1e-3, rtol=0)
    assert torch.linalg.svdvals(found).max() < 1.3
    assert not orthogonalize(torch.zeros(1, *shape)).any()


@pytest.mark.parametrize("size", 10.0 ** -torch.arange(7, 25, 3))
def test_rounding_noise_is_not_enlarged(size: float) -> None:
    torch.manual_seed(1)
    values = torch.linalg.svdvals(orthogonalize(size * torch.randn(1, 64, 64)))
    assert values.isfinite().all() and values.max() < 1.3


def test_a_parameter_without_a_gradient_stays() -> None:
    two = {name: nn.Parameter(torch.randn(8, 8)) for name in "ab"}
    before = {name: value.detach().clone() for name, value in two.items()}
    optimizer = Optimizers(two, "muon", 0.0, {"a": [8], "b": [8]})
    two["b"].grad = torch.randn(8, 8)
    optimizer.set_lr(1e-2)
    optimizer.step()
    assert torch.equal(two["a"], before["a"]) and not torch.equal(two["b"], before["b"])


def test_an_update_is_orthogonalized_nesterov_momentum() -> None:
    torch.manual_seed(1)
    ours = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    wanted = {name: value.detach().double() for name, value in ours.items()}
    momenta = {name: torch.zeros_like(value) for name, value in wanted.items()}
    optimizer = Optimizers(ours, "muon", 0.1, {name: [len(value)] for name, value in ours.items()})
    for step in range(5):
        for name, value in gradients(ours, step).items():
            ours[name].grad = value
            momenta[name].lerp_(value.double(), 1 - MOMENTUM)
            update = exact(value.double().lerp(momenta[name], MOMENTUM))
            if name == "tall":
                update = F.normalize(update, dim=1) * update.norm() / len(update) ** 0.5
            scale = 1e-2 * 0.2 * max(update.shape) ** 0.5
            wanted[name] = wanted[name] * (1 - 1e-2 * 0.1) - scale * update
        optimizer.set_lr(1e-2)
        optimizer.step()
    for name, value in wanted.items():
        torch.testing.assert_close(ours[name].double(), value, atol=1e-4, rtol=1e-4)


def test_rows_of_tall_updates_have_equal_norms() -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 24, 8)
    found = x * muon.equal_rows(x)
    norms = torch.linalg.vector_norm(found, dim=2)
    torch.testing.assert_close(norms, norms[:, :1].expand_as(norms))
    torch.testing.assert_close(found.norm(dim=(1, 2)), x.norm(dim=(1, 2)))


def test_fused_matrices_are_each_their_own() -> None:
    """Queries, keys, values, gate and up, stacked."""
    model = of_family("modern", dim=32, heads=4, kv_heads=2).train()
    rows = model.muon_parameters()
    parameters = {name: dict(model.named_parameters())[name] for name in rows}
    apart = {
        f"{name} {number}": nn.Parameter(piece.detach().clone())
        for name, parameter in parameters.items()
        for number, piece in enumerate(parameter.split(rows[name]))
    }
    assert any(len(pieces) == 3 for pieces in rows.values())
    assert any(len(pieces) == 2 for pieces in rows.values())
    optimizer = Optimizers(parameters, "muon", 0.1, rows)
    other = Optimizers(apart, "muon", 0.1, {name: [len(p)] for name, p in apart.items()})
    for step in range(3):
        for name, value in gradients(parameters, step).items():
            parameters[name].grad = value
            for number, piece in enumerate(value.split(rows[name])):
                apart[f"{name} {number}"].grad = piece.clone()
        for each in (optimizer, other):
            each.set_lr(1e-2)
            each.step()
    for name, parameter in parameters.items():
        pieces: list[Tensor] = [apart[f"{name} {number}"] for number in range(len(rows[name]))]
        torch.testing.assert_close(parameter, torch.cat(pieces), atol=1e-6, rtol=1e-5)


def test_what_overflows_changes_nothing() -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    optimizer = Optimizers({"weight": weight}, "muon", 0.1, {"weight": [8]})
    before = weight.detach().clone()
    weight.grad = torch.full((8, 8), torch.nan)
    optimizer.set_lr(1e-2)
    optimizer.step(torch.tensor(1.0), torch.tensor(1.0))
    assert torch.equal(weight, before)
    (only,) = optimizer.all()
    assert isinstance(only, Muon)
    assert all(bool((value == 0).all()) for value in optimizer.state_tensors().values())


def test_its_state_can_be_resumed_elsewhere() -> None:
    one, two = (of_family("modern", dim=32).train() for _ in range(2))
    two.load_state_dict(one.state_dict())
    optimizers = [
        Optimizers(dict(model.named_parameters()), "muon", 0.1, model.muon_parameters())
        for model in (one, two)
    ]

    def step(index: int, number: int) -> None:
        names = optimizers[index].parameters
        for name, value in gradients(names, number).items():
            names[name].grad = value
        optimizers[index].set_lr(1e-2)
        optimizers[index].step()

    step(0, 1)
    two.load_state_dict(one.state_dict())
    optimizers[1].load_state_tensors(optimizers[0].state_tensors())
    for index in (0, 1):
        step(index, 2)
    for (name, a), (_, b) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(a, b), name
