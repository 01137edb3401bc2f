"""What all models have in common, whatever is inside: ids in, logits out, and a memory.

>>> model = build_model(config)
>>> memory = model.remember(batch=1, length=100)
>>> model(first_ids, memory), model(next_ids, memory)  # as if both had been given at once
"""

from abc import ABC, abstractmethod
from typing import Protocol

from torch import nn

from nanolm.model.config import ModelConfig


class Memory(Protocol):
    """What a model keeps of the tokens behind it, so that each is computed once."""

    length: int  # tokens behind

    def forget(self) -> None:
        """Begin again with no token behind."""


class Embedding(nn.Embedding):
    """One that leaves its numbers to the model, which draws them anew or has them from a file."""

    def reset_parameters(self) -> None:
        pass


class Model(nn.Module, ABC):
    """Ids of shape (batch, time) in, logits of shape (batch, time, vocabulary) out."""

    config: ModelConfig
    token_embedding: nn.Embedding
    head: nn.Linear

    @abstractmethod
    def remember(self, batch: int, length: int) -> Memory:
        """An empty memory for `batch` rows of up to `length` tokens."""

    @abstractmethod
    def initialise(self) -> None:
        """Draw fresh weights."""

    def window(self) -> int | None:
        """How many tokens it can look at together; None where there is no end to it."""
        return self.config.context

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())
