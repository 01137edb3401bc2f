"""The interface of sequence-to-sequence models: a source in, logits of the target out.

>>> memory = model.encode(source, mask)  # once for each source
>>> model.decode(target, memory)  # hidden states of the target, to which the head is applied
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from nanolm.model.base import Embedding, Network
from nanolm.model.config import Seq2SeqConfig


@dataclass
class Memory:
    """What the decoder knows about the source."""

    states: Tensor  # the encoder's output, (batch, source, dim)
    mask: Tensor  # (batch, source): True for tokens, False for padding
    final: tuple[Tensor, ...] = ()  # recurrent: the decoder's first state, (batch, layers, dim)
    # The keys and values of each decoder layer, computed once and then reused.
    keys_values: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    def select(self, rows: Tensor) -> "Memory":
        """Row rows[i] as row i, as beam search needs."""
        kept = {n: tuple(t[rows] for t in both) for n, both in self.keys_values.items()}
        final = tuple(state[rows] for state in self.final)
        return Memory(self.states[rows], self.mask[rows], final, kept)


class Seq2Seq(Network):
    """Source (batch, source) and target (batch, target) in, logits (batch, target, vocabulary) out:
    position t of the target predicts token t + 1."""

    config: Seq2SeqConfig

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = Embedding(config.vocab_size, config.dim)
        if config.source_vocab_size is not None:
            self.source_embedding = Embedding(config.source_vocab_size, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight

    @property
    def attends(self) -> bool:
        """Whether the decoder attends to the source."""
        return getattr(self.config, "attention", "") != "none"

    def embed_source(self, ids: Tensor) -> Tensor:
        shared = self.config.source_vocab_size is None
        x: Tensor = (self.token_embedding if shared else self.source_embedding)(ids)
        return x  # (batch, source, dim)

    @abstractmethod
    def encode(self, source: Tensor, mask: Tensor) -> Memory:
        """Read the source; `mask` (batch, source) is True for tokens and False for padding."""

    @abstractmethod
    def decode(
        self,
        target: Tensor,
        memory: Memory,
        cache: Any = None,
        cross_weights: list[Tensor] | None = None,
    ) -> Tensor:
        """Hidden states of the target, (batch, target, dim). Each layer that attends to the source
        appends its weights, (batch, heads, target, source), to `cross_weights`."""

    def cache_bytes(self, length: int) -> int:
        """Bytes of the cache for one row of `length` tokens, at most."""
        size = self.token_embedding.weight.element_size()
        return 2 * self.config.layers * self.config.dim * length * size

    def forward(self, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        logits: Tensor = self.head(self.decode(target, self.encode(source, mask)))
        return logits  # (batch, target, vocabulary)
