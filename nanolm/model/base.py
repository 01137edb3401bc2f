"""What all models have in common, whatever is inside: ids in, logits out, and a memory.

>>> model = build_model(config)
>>> memory = model.remember(batch=1, length=100)
>>> model(first_ids, memory), model(next_ids, memory)  # as if both had been given at once
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from nanolm.model.config import ModelConfig


class Memory(Protocol):
    """What a model keeps of the tokens behind it, so that each is computed once."""

    def put(self, rows: list[int], other: Self, lengths: list[int]) -> None:
        """Let `rows` be what the first so many tokens of the rows of `other` left behind."""

    def select(self, rows: Tensor) -> None:
        """Let row i be what row rows[i] was."""

    def use(self, rows: int) -> None:
        """Let the first `rows` take part from now on."""

    def move(self, source: int, target: int) -> None:
        """Let one row be what another was."""

    def forget(self, row: int) -> None:
        """Nothing is behind this row, and it stays so."""


class Embedding(nn.Embedding):
    """One that leaves its numbers to the model, which draws them anew or has them from a file."""

    def reset_parameters(self) -> None:
        pass


class Model(nn.Module, ABC):
    """Ids of shape (batch, time) in, logits of shape (batch, time, vocabulary) out."""

    config: ModelConfig
    token_embedding: nn.Embedding
    head: nn.Linear
    padded: ClassVar[bool]  # may rows of different lengths be filled up and given together?

    @property
    def device(self) -> torch.device:
        return self.token_embedding.weight.device

    @abstractmethod
    def body(self, ids: Tensor, memory: Any = None) -> Tensor:
        """All but the last layer: (batch, time, dim)."""

    def frozen_states(self, ids: Tensor, layers: int) -> Tensor | None:
        """What the first `layers` layers make of the ids: (batch, time, dim). None where a model
        cannot be cut there."""
        return None

    def body_from(self, x: Tensor, layers: int) -> Tensor:
        """`body` from what `frozen_states` gave."""
        raise NotImplementedError

    @abstractmethod
    def remember(self, batch: int, length: int, fixed: bool = False) -> Any:
        """An empty `Memory` for `batch` rows of up to `length` tokens.

        With `fixed` it stays in one place, so that one step can be captured and repeated.
        """

    def matrices(self) -> dict[str, list[int]]:
        """The parameters that turn vectors inside the model into others; each with the rows of the
        matrices that lie in it, one below the other."""
        return {}

    @abstractmethod
    def initialise(self) -> None:
        """Draw fresh weights."""

    @abstractmethod
    def memory_bytes(self, length: int) -> int:
        """What the memory of one row of `length` tokens takes."""

    @contextmanager
    def at_rest(self) -> Iterator[None]:
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
