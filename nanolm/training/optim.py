"""Optimizers with PyTorch's interface, and `Optimizers`, which holds all those of a model.

    >>> optimizers = Optimizers(dict(model.named_parameters()), "adamw", weight_decay=0.1)
    >>> optimizers.set_lr(1e-3)

Weight decay applies to matrices only; on norms and biases it does not help. Parameters can be split
among worker threads, each with its own optimizers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nanolm.training.distributed import copy_full_tensor
from nanolm.training.optimizers import OPTIMIZERS

K = TypeVar("K")


class BaseOptimizer(torch.optim.Optimizer):
    """As in torch's fused optimizers, `step` divides gradients by `grad_scale` and changes nothing
    if `found_inf` is 1. On a GPU, the learning rate of a group is a tensor, so that a step captured
    into a CUDA graph reads its current value."""

    moments: tuple[str, ...]  # names of the state of each parameter, of the parameter's shape
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    # Without its decorator, which would import torch._dynamo and take seconds.
    add_param_group = torch.optim.Optimizer.add_param_group.__wrapped__  # type: ignore[attr-defined]

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    def init_state(self) -> None:
        """Allocate the state: with AdamW, twice what the parameters take."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {n: torch.zeros_like(parameter) for n in self.moments}


class Optimizers:
    """All parameters of a model, each with the optimizer that updates it."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        name: str = "adamw",
        weight_decay: float = 0.0,
        muon_parameters: Mapping[str, Sequence[int]] | None = None,
        lr_scale: Callable[[str], float] = lambda name: 1.0,
        workers: int = 1,
    ) -> None:
        """`muon_parameters` maps the parameters for Muon to the row counts of the matrices
        stacked in them; `lr_scale` returns the learning rate multiplier of a parameter."""
        self.parameters = parameters
        self.by_worker: list[list[BaseOptimizer]] = []
        self.worker_parameters: list[list[nn.Parameter]] = []
        self.lr_tensors: dict[float, Tensor] = {}  # on a GPU, by scale
        spec, on_gpu = OPTIMIZERS[name], next(iter(parameters.values())).is_cuda
        taken: Mapping[str, Any] = dict.fromkeys(parameters)  # by the chosen optimizer
        if spec.takes == "matrices":
            taken = muon_parameters or {}
        sizes = {key: parameter.numel() for key, parameter in parameters.items()}
        for share in split_evenly(sizes, workers):
            groups: dict[tuple[bool, bool, float], dict[str, Any]] = {}
            for key in share:
                alike = (key in taken, parameters[key].dim() >= 2, lr_scale(key))
                group = groups.setdefault(alike, {"params": [], "rows": []})
                group["params"].append(parameters[key])
                group["rows"].append(taken.get(key))
            for (_, matrix, scale), group in groups.items():
                decay = weight_decay if matrix else 0.0
                group |= {"weight_decay": decay, "lr_scale": scale, "lr": 0.0}
                if on_gpu:
                    group["lr"] = self.lr_tensors.setdefault(scale, torch.zeros((), device="cuda"))
            self.worker_parameters.append([p for some in groups.values() for p in some["params"]])
            self.by_worker.append([])
            for is_taken, by in ((True, spec), (False, OPTIMIZERS["adamw"])):
                if its := [group for alike, group in groups.items() if alike[0] == is_taken]:
                    self.by_worker[-1].append(by.load()(its))

    def all(self) -> list[BaseOptimizer]:
        return [optimizer for optimizers in self.by_worker for optimizer in optimizers]

    def init_state(self) -> None:
        for optimizer in self.all():
            if not optimizer.state:
                optimizer.init_state()

    def set_lr(self, lr: float) -> None:
        for scale, tensor in self.lr_tensors.items():
            tensor.fill_(lr * scale)
        if not self.lr_tensors:
            for optimizer in self.all():
                for group in optimizer.param_groups:
                    group["lr"] = lr * group["lr_scale"]

    def step(
        self, grad_scale: Tensor | None = None, found_inf: Tensor | None = None, worker: int = 0
    ) -> None:
        """Update the parameters of one worker (see `BaseOptimizer`)."""
        self.init_state()
        for optimizer in self.by_worker[worker]:
            optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
            optimizer.step()

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """The whole state by name: `NAME.exp_avg` etc., and the `step` that all share."""
        self.init_state()
        names: dict[Tensor, str] = {value: name for name, value in self.parameters.items()}
        tensors: dict[str, Tensor] = {}
        for optimizer in self.all():
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    tensors.setdefault(key if key == "step" else f"{names[parameter]}.{key}", value)
        return tensors

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        for name, value in self.state_tensors().items():
            copy_full_tensor(value, tensors[name])
        for optimizer in self.all():
            for state in optimizer.state.values():
                if "step" in state:
                    state["step"].copy_(tensors["step"])


def split_evenly(sizes: Mapping[K, int], parts: int) -> list[list[K]]:
    """Split the keys into `parts` lists of about the same total size."""
    split: list[list[K]] = [[] for _ in range(parts)]
    totals = [0] * parts
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        smallest = totals.index(min(totals))
        split[smallest].append(key)
        totals[smallest] += sizes[key]
    return split
