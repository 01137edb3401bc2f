"""The recurrent layers, compared with torch's."""

from typing import Any

import pytest
import torch
from models import of_family
from torch import Tensor, nn

from nanolm.model.rnn import GRU, LSTM, Cell, Elman, Recurrent

DIM, TIME, BATCH = 12, 20, 3


def theirs(cell: Cell) -> nn.RNN | nn.LSTM | nn.GRU:
    """torch's layer with the same weights."""
    kinds: dict[type[Cell], Any] = {Elman: nn.RNN, LSTM: nn.LSTM, GRU: nn.GRU}
    layer: nn.RNN | nn.LSTM | nn.GRU = kinds[type(cell)](DIM, DIM, batch_first=True)
    values = (cell.input_weight, cell.state_weight, cell.bias, torch.zeros_like(cell.bias))
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    layer.load_state_dict(dict(zip(names, values, strict=True)))
    return layer


@pytest.mark.parametrize("kind", [Elman, LSTM, GRU])
@pytest.mark.parametrize("way", ["forward", "written_out"])
def test_a_layer_is_that_of_torch(kind: type[Cell], way: str) -> None:
    torch.manual_seed(0)
    cell = kind(DIM)
    for parameter in cell.parameters():
        nn.init.normal_(parameter, std=0.4)
    state = tuple(torch.randn(BATCH, DIM) for _ in range(2 if kind is LSTM else 1))
    x = torch.randn(BATCH, TIME, DIM, requires_grad=True)
    ours, after = getattr(cell, way)(x, state)
    layer = theirs(cell)
    hidden = tuple(part[None] for part in state)
    expected, last = layer(x, hidden if kind is LSTM else hidden[0])
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    ends = last if isinstance(last, tuple) else (last,)
    for part, end in zip(after, ends, strict=True):
        torch.testing.assert_close(part, end[0], atol=1e-5, rtol=0)

    def gradients(output: Tensor, weights: list[Any]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output.square().sum(), [x, *weights])

    weights = [cell.input_weight, cell.state_weight, cell.bias]
    there = [layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0]
    for mine, other in zip(gradients(ours, weights), gradients(expected, there), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def test_the_elman_network_of_the_slides() -> None:
    """h_t = tanh(W_h h_{t-1} + W_x x_t + b), in plain numbers."""
    cell = Elman(2)
    cell.input_weight.data = torch.tensor([[0.5, -1.0], [2.0, 0.0]])
    cell.state_weight.data = torch.tensor([[1.0, 0.0], [-0.5, 0.25]])
    cell.bias.data = torch.tensor([0.1, -0.2])
    outputs, _ = cell(torch.tensor([[[1.0, 2.0], [0.0, 1.0]]]), (torch.zeros(1, 2),))
    first = torch.tanh(torch.tensor([0.5 - 2.0 + 0.1, 2.0 - 0.2]))
    second = torch.tanh(
        torch.stack([first[0] - 1.0 + 0.1, -0.5 * first[0] + 0.25 * first[1] - 0.2])
    )
    torch.testing.assert_close(outputs[0], torch.stack([first, second]))


@pytest.mark.parametrize("family", ["rnn", "lstm"])
def test_its_cache_never_grows(family: str) -> None:
    model = of_family(family)
    assert isinstance(model, Recurrent)
    assert model.window() is None
    memory = model.init_cache(batch=2, length=10**9)
    with torch.no_grad():
        for _ in range(3):
            model(torch.zeros(2, 100, dtype=torch.long), memory)
    sizes = [part.shape for state in memory.states for part in state]
    assert sizes == [(2, 16)] * (2 * (2 if family == "lstm" else 1))
