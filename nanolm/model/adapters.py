"""LoRA: each weight matrix stays frozen, and the product of two low-rank matrices is added to it.

    >>> adapters = Adapters(model, rank=8)     # no change yet: the second matrix starts at 0
    >>> with adapters.merged(): ...            # here the weights include the adapters

The low-rank matrices are stored outside the model, so its parameters keep their names. Fused
kernels and compiled blocks would skip them: train with the plain modules. `peft.py` saves them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nanolm.errors import UsageError
from nanolm.model.base import Model

RANK = 8
LORA_SCALE = 2.0  # multiplies the update, so that one learning rate suits all weights
LowRank = tuple[Tensor, Tensor]  # (rank, inputs) and (outputs, rank)


class Adapters(nn.Module):
    """Low-rank matrices for every linear layer of `model` except its output layer."""

    def __init__(self, model: Model, rank: int = RANK) -> None:
        super().__init__()
        self.base = [model]  # in a list, so that it is not a submodule
        self.layers = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Linear) and layer is not model.head
        }
        if not self.layers:
            raise UsageError("--train lora: only for Transformers, and this model is recurrent")
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        for name, layer in self.layers.items():
            key = name.replace(".", "/")  # torch treats dots as a path
            down = torch.randn(rank, layer.in_features) / layer.in_features**0.5
            self.down[key] = nn.Parameter(down.to(layer.weight.device))
            up = torch.zeros(layer.out_features, rank)
            self.up[key] = nn.Parameter(up.to(layer.weight.device))
            layer.register_forward_hook(self.hook(key))
        self.active = True

    def hook(self, key: str) -> Any:
        def add(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            if self.active:
                output = output + LORA_SCALE * ((inputs[0] @ self.down[key].T) @ self.up[key].T)
            return output

        return add

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Inside this context, the low-rank matrices are merged into the weights of the layers."""
        kept = {name: layer.weight.detach().clone() for name, layer in self.layers.items()}
        self.active = False
        try:
            merge_adapters(self.base[0], self.state_dict())
            yield
        finally:
            with torch.no_grad():
                for name, layer in self.layers.items():
                    layer.weight.copy_(kept[name])
            self.active = True

    def low_rank(self, prefix: str = "") -> dict[str, LowRank]:
        """Copies of the matrices, by the name of the parameter that they are added to."""
        copies = {name: value.clone() for name, value in self.state_dict().items()}
        keys = {name: name.replace(".", "/") for name in self.layers}
        return {
            f"{prefix}{name}.weight": (copies[f"down.{key}"], copies[f"up.{key}"])
            for name, key in keys.items()
        }

    @torch.no_grad()
    def load_low_rank(self, matrices: dict[str, LowRank], prefix: str = "") -> None:
        for name in self.layers:
            key, (down, up) = name.replace(".", "/"), matrices[f"{prefix}{name}.weight"]
            self.down[key].copy_(down)
            self.up[key].copy_(up)


def merge_adapters(base: Model, tensors: dict[str, Tensor]) -> None:
    """Merge the LoRA matrices `down.NAME` and `up.NAME` into the linear layers of `base`."""
    for name, layer in base.named_modules():
        key = name.replace(".", "/")
        if isinstance(layer, nn.Linear) and f"up.{key}" in tensors:
            more = LORA_SCALE * (tensors[f"up.{key}"] @ tensors[f"down.{key}"])
            with torch.no_grad():
                layer.weight += more.to(layer.weight.device)
