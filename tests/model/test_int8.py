import copy

import pytest
import torch
from models import lively
from torch import nn

from nanolm.model.config import configure
from nanolm.model.fast.int8 import FEW_ROWS, MULTIPLE, Int8Linear, to_int8


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_nearly_what_the_layer_gives(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    layer = nn.Linear(96, 77, bias=bias)
    with torch.no_grad():
        layer.weight *= torch.logspace(-3, 3, 77)[:, None]  # each row has its own scale
        x = torch.randn(rows, 1, 96)
        expected, found = layer(x), Int8Linear(layer)(x)
    usual = x.norm(dim=-1, keepdim=True) * layer.weight.norm(dim=1) / 96**0.5
    assert found.shape == expected.shape
    assert ((found - expected).abs() / usual).max() < 0.2


@pytest.mark.parametrize("family", ["modern", "gpt2", "lstm"])
@pytest.mark.parametrize("dim", [2 * MULTIPLE, 2 * MULTIPLE - 8])
def test_a_model_stays_nearly_itself(family: str, dim: int) -> None:
    shape = {"vocab_size": 300, "layers": 2, "heads": 4, "dim": dim, "context": 16}
    model = lively(configure(family, **shape), std=0.05)
    quick = copy.deepcopy(model)
    to_int8(quick)
    left = [module.in_features for module in quick.modules() if isinstance(module, nn.Linear)]
    assert all(inputs % MULTIPLE for inputs in left)
    assert bool(left) == (dim % MULTIPLE != 0)
    ids = torch.randint(300, (1, 16))
    memory = quick.init_cache(1, 16)
    with torch.no_grad():
        whole = model(ids).log_softmax(-1)
        steps = torch.cat([quick(id[None, None], memory) for id in ids[0]], dim=1)
    assert (steps.log_softmax(-1) - whole).abs().mean() < 0.02 * whole.std()
