"""Orthogonalized updates: the same as torch's, for any memory layout."""

import pytest
import torch
import torch.nn.functional as F
from models import of_family
from torch import Tensor, nn

from nanolm.training import muon
from nanolm.training.muon import ITERATIONS, MOMENTUM, Muon, orthogonalize
from nanolm.training.optim import Optimizers

SHAPES = {"square": (48, 48), "tall": (96, 48), "wide": (32, 80)}


def gradients(parameters: dict[str, nn.Parameter], step: int) -> dict[str, Tensor]:
    torch.manual_seed(step)
    return {name: torch.randn_like(parameter) for name, parameter in parameters.items()}


@pytest.mark.parametrize("steps", [ITERATIONS, 5])
def test_torch_has_the_same_muon(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except for the equal row norms of tall matrices."""
    monkeypatch.setattr(muon.orthogonalize, "__defaults__", (steps,))
    monkeypatch.setattr(muon, "equalize_", lambda matrices: None)
    torch.manual_seed(1)
    ours = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    theirs = {name: nn.Parameter(value.detach().clone()) for name, value in ours.items()}
    rows = {name: [len(value)] for name, value in ours.items()}
    optimizer = Optimizers(ours, "muon", 0.1, rows)
    torchs = torch.optim.Muon(
        theirs.values(),
        lr=1e-2,
        weight_decay=0.1,
        momentum=MOMENTUM,
        ns_steps=steps,
        adjust_lr_fn="match_rms_adamw",
    )
    before = {name: value.detach().clone() for name, value in ours.items()}
    for step in range(5):
        for name, value in gradients(ours, step).items():
            ours[name].grad, theirs[name].grad = value, value.clone()
        optimizer.set_lr(1e-2)
        optimizer.step()
        torchs.step()
    for name in SHAPES:
        moved = (theirs[name] - before[name]).norm()
        assert (ours[name] - theirs[name]).norm() < 0.01 * moved  # theirs is in bfloat16


def test_rows_of_tall_updates_have_equal_norms() -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 8, 24)  # transposed: 24 rows of 8
    before = x.clone()
    muon.equalize_(x)
    norms = torch.linalg.vector_norm(x, dim=1)
    torch.testing.assert_close(norms, norms[:, :1].expand_as(norms))
    torch.testing.assert_close(x.norm(dim=(1, 2)), before.norm(dim=(1, 2)))
    torch.testing.assert_close(F.normalize(x, dim=1), F.normalize(before, dim=1))


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


def test_singular_values_come_near_one() -> None:
    torch.manual_seed(2)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(6, 32, 64)))
    assert values.min() > 0.5 and values.max() < 1.3


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
