"""The networks that came before Transformers, as in the lectures.

    >>> Averaging(words=5000, width=128, labels=2)(ids, lengths).shape  # (texts, labels)

Ids are (texts, time), padded on the right, and `lengths` is the number of tokens in each row. The
result for a text does not depend on its padding. All but the last network are classifiers.
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanolm.model.classifier import filling, pooled
from nanolm.model.config import Pool
from nanolm.model.rnn import LSTM, Elman

DROPOUT = 0.3
FILTER_SIZES = (3, 4, 5)  # words
CAUSAL_FILTER = 4  # tokens: the current one and those before it


class TextNetwork(nn.Module, ABC):
    """Computes a vector for each text, and from it a score for each label."""

    def __init__(self, width: int, labels: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(DROPOUT)
        self.score = nn.Linear(width, labels)

    @abstractmethod
    def vector(self, words: Tensor, more: Tensor, /) -> Tensor:
        """(texts, width), from words and their weights, or tokens and their lengths."""

    def forward(self, words: Tensor, more: Tensor) -> Tensor:
        logits: Tensor = self.score(self.dropout(self.vector(words, more)))  # (texts, labels)
        return logits


class Perceptron(TextNetwork):
    """A network with one hidden layer on word counts, so that words can interact."""

    def __init__(self, words: int, width: int, labels: int) -> None:
        super().__init__(width, labels)
        self.hidden = embedding(words, width, std=0.1)  # the first matrix, one row per word
        self.bias = nn.Parameter(torch.zeros(width))

    def vector(self, words: Tensor, weights: Tensor) -> Tensor:
        """`words` and `weights` are both (texts, words)."""
        summed = (self.hidden(words) * weights[..., None]).sum(dim=1)  # (texts, width)
        return torch.relu(summed + self.bias)


class Averaging(TextNetwork):
    """A deep averaging network: the mean of the word embeddings, then dense layers."""

    def __init__(self, words: int, width: int, labels: int) -> None:
        super().__init__(width, labels)
        self.embedding = embedding(words, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def vector(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = pooled(self.dropout(self.embedding(ids)), lengths, "mean")  # (texts, width)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Convolution(TextNetwork):
    """Convolution filters over a few adjacent words, with max pooling over positions."""

    def __init__(self, words: int, width: int, labels: int) -> None:
        super().__init__(len(FILTER_SIZES) * width, labels)
        self.embedding = embedding(words, width)
        filters = (nn.Conv1d(width, width, size, padding=size - 1) for size in FILTER_SIZES)
        self.filters = nn.ModuleList(filters)

    def vector(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.dropout(self.embedding(ids)).masked_fill(filling(ids, lengths)[..., None], 0)
        x = x.transpose(1, 2)  # (texts, width, time)
        best = []
        for size, layer in zip(FILTER_SIZES, self.filters, strict=True):
            fits = torch.relu(layer(x)).transpose(1, 2)  # (texts, time + size - 1, width)
            best.append(pooled(fits, lengths + size - 1, "max"))
        return torch.cat(best, dim=1)


class Recurrence(TextNetwork):
    """A recurrent network; uses the last state, the mean or the max of all states."""

    def __init__(
        self,
        words: int,
        width: int,
        labels: int,
        cell: str = "lstm",
        layers: int = 1,
        pool: Pool = "last",
        bidirectional: bool = False,
    ) -> None:
        super().__init__(width, labels)
        self.pool, self.bidirectional = pool, bidirectional
        self.embedding = embedding(words, width)
        kind = LSTM if cell == "lstm" else Elman
        directions = 2 if bidirectional else 1
        self.directions = nn.ModuleList(  # forward, then backward: a cell for each layer
            nn.ModuleList(kind(width // directions, width) for _ in range(layers))
            for _ in range(directions)
        )
        for module in self.modules():
            if isinstance(module, kind):
                module.init_weights()

    def vector(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(ids)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        mirror = lengths[:, None] - 1 - positions  # reversed order; padding stays in place
        mirror = torch.where(mirror < 0, positions, mirror)
        for number, (forward, *backward) in enumerate(zip(*self.directions, strict=True)):
            given = self.dropout(x)
            outputs = [self.run(forward, given)]
            for cell in backward:
                outputs.append(reorder(self.run(cell, reorder(given, mirror)), mirror))
            y = torch.cat(outputs, dim=2)  # (texts, time, width)
            x = x + y if number else y  # residual connections, as in `nanolm.model.rnn`
        if self.pool != "last" or not self.bidirectional:
            return pooled(x, lengths, self.pool)
        half = x.shape[2] // 2  # the last state of each direction
        return torch.cat([pooled(x[..., :half], lengths, "last"), x[:, 0, half:]], dim=1)

    def run(self, cell: Elman | LSTM, x: Tensor) -> Tensor:
        start = x.new_zeros(len(x), cell.state_weight.shape[1])
        output: Tensor = cell(x, (start, start) if isinstance(cell, LSTM) else (start,))[0]
        return output


class CausalConvolution(nn.Module):
    """A language model of gated convolutions (Dauphin et al., 2017). A layer sees only the last few
    vectors, so a prediction depends on `layers * (CAUSAL_FILTER - 1) + 1` tokens."""

    def __init__(self, vocab_size: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = embedding(vocab_size, width, std=width**-0.5)
        self.dropout = nn.Dropout(0.1)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers + 1))
        # A filter is a linear layer that moves along the text.
        self.filters = nn.ModuleList(
            nn.Linear(CAUSAL_FILTER * width, 2 * width) for _ in range(layers)
        )

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Logits of the next token, (texts, vocabulary, time)."""
        x = self.embedding(ids)  # (texts, time, width)
        for norm, layer in zip(self.norms, self.filters, strict=False):
            padded = F.pad(self.dropout(norm(x)), (0, 0, CAUSAL_FILTER - 1, 0))
            seen = padded.unfold(1, CAUSAL_FILTER, 1)  # (texts, time, width, filter)
            x = x + F.glu(layer(seen.flatten(2)), dim=2)
        logits: Tensor = self.norms[-1](x) @ self.embedding.weight.T  # (texts, time, vocabulary)
        return logits.transpose(1, 2)


def embedding(words: int, width: int, std: float = 0.3) -> nn.Embedding:
    layer = nn.Embedding(words, width)
    nn.init.normal_(layer.weight, std=std)
    return layer


def reorder(x: Tensor, positions: Tensor) -> Tensor:
    return x.gather(1, positions[..., None].expand_as(x))
