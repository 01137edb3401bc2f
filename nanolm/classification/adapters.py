"""LoRA: each weight matrix stays frozen, and the product of two low-rank matrices is added to it.

    >>> adapters = Adapters(classifier, rank=8)     # no change yet: the second matrix starts at 0
    >>> with adapters.merged(): ...                 # here the weights include the adapters

The low-rank matrices are stored outside the model, so its parameters keep their names.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nanolm.model.base import Model
from nanolm.model.classifier import LORA_SCALE, merge_adapters

RANK = 8


class Adapters(nn.Module):
    """Low-rank matrices for every linear layer of `model` except its output layer."""

    def __init__(self, model: Model, rank: int = RANK) -> None:
        super().__init__()
        self.base = [model]  # in a list, so that it is not a submodule
        modules = model.named_modules()
        self.layers = {name: each for name, each in modules if isinstance(each, nn.Linear)}
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
