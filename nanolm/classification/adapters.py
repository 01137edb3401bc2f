"""LoRA: a large matrix stays as it is, and a product of two thin ones learns what to add to it.

    >>> adapters = Adapters(classifier, rank=8)     # nothing changes yet: the second begins at zero
    >>> with adapters.merged(): ...                 # here the large matrices have it added

The thin matrices live beside the model, so that its parameters keep their names.
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
    """Thin matrices for every linear layer of `model` that is not its output layer."""

    def __init__(self, model: Model, rank: int = RANK) -> None:
        super().__init__()
        self.base = [model]  # in a list: not a module of this one
        modules = model.named_modules()
        self.layers = {name: each for name, each in modules if isinstance(each, nn.Linear)}
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        for name, layer in self.layers.items():
            key = name.replace(".", "/")  # a name with dots would be a path to torch
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
        """Meanwhile the layers have in their own weights what the thin matrices add."""
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
