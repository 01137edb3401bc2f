"""The registry of optimizers: light to import, and each entry has PyTorch's interface."""

import subprocess
import sys

import pytest
import torch
from models import of_family

from nanolm.training.adamw import AdamW
from nanolm.training.muon import Muon
from nanolm.training.optim import BaseOptimizer, Optimizers
from nanolm.training.optimizers import OPTIMIZERS


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_is_one_of_torch(name: str) -> None:
    kind = OPTIMIZERS[name].load()
    assert issubclass(kind, BaseOptimizer) and issubclass(kind, torch.optim.Optimizer)


def test_the_command_line_can_know_them_without_torch() -> None:
    code = "import sys, nanolm.training.optimizers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_making_one_does_not_import_the_compiler() -> None:
    code = (
        "import sys, torch; from nanolm.training.optim import Optimizers\n"
        "Optimizers({'x': torch.nn.Parameter(torch.zeros(2, 2))}).step()\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    model = of_family("modern", dim=32)
    parameters, matrices = dict(model.named_parameters()), model.muon_parameters()
    muon, adamw = Optimizers(parameters, "muon", 0.1, matrices, lambda name: 2.0).all()
    assert isinstance(muon, Muon) and isinstance(adamw, AdamW)
    taken = {id(p) for group in muon.param_groups for p in group["params"]}
    assert taken == {id(parameters[name]) for name in matrices}
    for group in (*muon.param_groups, *adamw.param_groups):
        assert group["lr_scale"] == 2.0
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.1 if parameter.dim() > 1 else 0.0)
    (only,) = Optimizers(parameters, "adamw", 0.1, matrices).all()
    assert isinstance(only, AdamW)
