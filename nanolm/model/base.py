"""What all models have in common, whatever is inside: ids in, logits out, and a cache.

>>> model = build_model(config)
>>> cache = model.init_cache(batch=1, length=100)
>>> model(first_ids, cache), model(next_ids, cache)  # as if both had been given at once
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nanolm.model.config import ModelConfig


class Embedding(nn.Embedding):
    """One that leaves its numbers to the model, which draws them anew or has them from a file."""

    def reset_parameters(self) -> None:
        pass


class StackedLinear(nn.Linear):
    """Several linear layers of the same input in one product, which is faster: `rows` outputs."""

    def __init__(self, inputs: int, rows: list[int], bias: bool) -> None:
        super().__init__(inputs, sum(rows), bias)
        self.rows = rows


class Model(nn.Module, ABC):
    """Ids of shape (batch, time) in, logits of shape (batch, time, vocabulary) out."""

    config: ModelConfig
    token_embedding: nn.Embedding
    head: nn.Linear
    allows_padding: ClassVar[bool]  # may rows of different lengths be filled up and given together?

    @property
    def device(self) -> torch.device:
        return self.token_embedding.weight.device

    @abstractmethod
    def hidden_states(self, ids: Tensor, cache: Any = None) -> Tensor:
        """Everything but the head: (batch, time, dim)."""

    def frozen_states(self, ids: Tensor, layers: int) -> Tensor | None:
        """What the first `layers` make of the ids, (batch, time, dim); None: it cannot be cut."""
        return None

    def hidden_states_from(self, x: Tensor, layers: int) -> Tensor:
        """`hidden_states`, continued from those that `frozen_states` returned."""
        raise NotImplementedError

    @abstractmethod
    def init_cache(self, batch: int, length: int, fixed: bool = False) -> Any:
        """An empty cache for `batch` rows of up to `length` tokens: a `KVCache`, or one like it.
        With `fixed` it stays in one place, so that a step can be captured and repeated."""

    def muon_parameters(self) -> dict[str, list[int]]:
        """The matrices between hidden vectors, each with the rows of those stacked in it."""
        return {
            f"{name}.weight": getattr(layer, "rows", [layer.out_features])
            for name, layer in self.named_modules()
            if isinstance(layer, nn.Linear) and layer is not self.head
        }

    @abstractmethod
    def init_weights(self) -> None:
        """Draw fresh weights."""

    @abstractmethod
    def cache_bytes(self, length: int) -> int:
        """What the cache of one row of `length` tokens takes."""

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Without dropout meanwhile."""
        was_training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(was_training)

    def window(self) -> int | None:
        """How many tokens it can look at together; None where there is no end to it."""
        return self.config.context

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())
