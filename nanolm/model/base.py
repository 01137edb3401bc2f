"""The interface of all models: token ids in, logits out, and a cache for generation.

>>> model = build_model(config)
>>> cache = model.init_cache(batch=1, length=100)
>>> model(first_ids, cache), model(next_ids, cache)  # same as both in one call
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nanolm.model.config import ModelConfig


class Embedding(nn.Embedding):
    """An embedding without its own initialization: the model initializes or loads it."""

    def reset_parameters(self) -> None:
        pass


class StackedLinear(nn.Linear):
    """Several linear layers with the same input, fused into one product; `rows` outputs each."""

    def __init__(self, inputs: int, rows: list[int], bias: bool) -> None:
        super().__init__(inputs, sum(rows), bias)
        self.rows = rows


class Network(nn.Module, ABC):
    """What language models and sequence-to-sequence models have in common."""

    config: ModelConfig
    token_embedding: nn.Embedding
    head: nn.Linear

    @property
    def device(self) -> torch.device:
        return self.token_embedding.weight.device

    @abstractmethod
    def init_weights(self) -> None:
        """Initialize the weights randomly."""

    @abstractmethod
    def init_cache(self, batch: int, length: int, fixed: bool = False) -> Any:
        """An empty cache for `batch` rows of up to `length` tokens: a `KVCache` or similar. With
        `fixed`, its tensors never move, so that a step can be captured into a CUDA graph."""

    def muon_parameters(self) -> dict[str, list[int]]:
        """The weight matrices of hidden layers, with the row counts of those stacked in each."""
        return {
            f"{name}.weight": getattr(layer, "rows", [layer.out_features])
            for name, layer in self.named_modules()
            if isinstance(layer, nn.Linear) and layer is not self.head
        }

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Disable dropout inside a `with` block."""
        was_training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(was_training)

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


class Model(Network):
    """Ids of shape (batch, time) in, logits of shape (batch, time, vocabulary) out."""

    allows_padding: ClassVar[bool]  # rows of different lengths can be padded to one batch

    @abstractmethod
    def hidden_states(self, ids: Tensor, cache: Any = None) -> Tensor:
        """Everything but the head: (batch, time, dim)."""

    def frozen_states(self, ids: Tensor, layers: int) -> Tensor | None:
        """The output of the first `layers`, (batch, time, dim); None if not supported."""
        return None

    def hidden_states_from(self, x: Tensor, layers: int) -> Tensor:
        """`hidden_states`, continued from the output of `frozen_states`."""
        raise NotImplementedError

    @abstractmethod
    def cache_bytes(self, length: int) -> int:
        """Bytes of the cache for one row of `length` tokens."""

    def window(self) -> int | None:
        """The most tokens it can attend to; None if unlimited."""
        return self.config.context
