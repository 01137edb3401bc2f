"""Recurrent encoder-decoders: one fixed vector between them (the bottleneck), or attention.

    >>> config = configure("seq2seq-lstm", vocab_size=300, layers=1, dim=32, context=64)
    >>> RecurrentSeq2Seq(config)(source, mask, target).shape  # (batch, target, 300)

The encoder reads the source in both directions, and its last states become the decoder's first
(Sutskever et al., 2014). Without attention, this vector is all that the decoder knows. With
attention, each of its states also looks up source states. As in Luong et al. (2015), that happens
after the recurrent layers, so training computes all positions at once, for both kinds of scores.
"""

import math

import torch
from torch import Tensor, nn

from nanolm.model.config import RecurrentSeq2SeqConfig
from nanolm.model.rnn import CELLS, Cell, RecurrentState
from nanolm.model.seq2seq import Memory, Seq2Seq


class RecurrentSeq2Seq(Seq2Seq):
    config: RecurrentSeq2SeqConfig

    def __init__(self, config: RecurrentSeq2SeqConfig) -> None:
        super().__init__(config)
        dim, cell = config.dim, CELLS[config.cell]
        self.encoder = nn.ModuleList(
            Bidirectional(cell(dim), cell(dim), dim) for _ in range(config.encoder_layers)
        )
        self.bridge = nn.Linear(dim, cell.parts * config.layers * dim)
        self.decoder = nn.ModuleList(cell(dim) for _ in range(config.layers))
        if config.attention != "none":
            self.attention = {"additive": AdditiveScores, "dot": DotScores}[config.attention](dim)
            self.combine = nn.Linear(2 * dim, dim, bias=False)
        if not self.token_embedding.weight.is_meta:  # on the meta device, weights are loaded later
            self.init_weights()

    def encode(self, source: Tensor, mask: Tensor) -> Memory:
        x = self.scaled(self.embed_source(source))
        for number, layer in enumerate(self.encoder):
            y, last = layer(x, mask)
            x = x + self.dropout(y) if number else self.dropout(y)
        first = torch.tanh(self.bridge(last)).unflatten(1, (-1, self.config.layers, x.shape[2]))
        return Memory(x, mask, first.unbind(dim=1))  # (batch, layers, dim) each

    def decode(
        self,
        target: Tensor,
        memory: Memory,
        cache: "DecoderState | None" = None,
        cross_weights: list[Tensor] | None = None,
    ) -> Tensor:
        x = self.scaled(self.token_embedding(target))
        for number, cell in enumerate(self.decoder):
            assert isinstance(cell, Cell)
            before = tuple(part[:, number] for part in memory.final)
            if cache and cache.begun:
                before = cache.states[number]
            # For single tokens, the explicit loop of the slides has no kernel setup cost.
            y, after = (cell.written_out if cache and target.shape[1] == 1 else cell)(x, before)
            if cache:
                cache.keep(number, after)
            x = x + self.dropout(y) if number else self.dropout(y)
        if cache:
            cache.begun = True
        if self.config.attention != "none":
            scores = self.attention(x, memory)  # (batch, target, source)
            weights = scores.masked_fill(~memory.mask[:, None], -torch.inf).softmax(dim=-1)
            context = weights.to(x.dtype) @ memory.states  # (batch, target, dim)
            x = self.dropout(torch.tanh(self.combine(torch.cat([context, x], dim=-1))))
            if cross_weights is not None:
                cross_weights.append(weights[:, None])
        return x  # (batch, target, dim)

    def scaled(self, x: Tensor) -> Tensor:
        """Embeddings of unit size, as the recurrent layers need; a tied head needs small ones."""
        y: Tensor = self.dropout(x * math.sqrt(self.config.dim))
        return y

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, Cell):
                module.init_weights()
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=1 / math.sqrt(self.config.dim))

    def init_cache(self, batch: int, length: int, fixed: bool = False) -> "DecoderState":
        return DecoderState(self.config, batch, self.token_embedding.weight)


class DecoderState(RecurrentState):
    """The state of every decoder layer. The first tokens start from the encoder's last states."""

    begun = False


class Bidirectional(nn.Module):
    """Two recurrent layers, one from left to right and one from right to left."""

    def __init__(self, rightward: Cell, leftward: Cell, dim: int) -> None:
        super().__init__()
        self.rightward, self.leftward = rightward, leftward
        self.out = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The states (batch, source, dim), and the last of both directions (batch, dim)."""
        lengths = mask.sum(dim=1, keepdim=True)  # (batch, 1)
        positions = torch.arange(x.shape[1], device=x.device)
        # Reverses the tokens of a row in place; padding stays on the right, where it comes last.
        order = torch.where(positions < lengths, lengths - 1 - positions, positions)
        start = (x.new_zeros(len(x), x.shape[2]),) * self.rightward.parts
        right, _ = self.rightward(x, start)
        left, _ = self.leftward(reorder(x, order), start)
        ends = [reorder(states, lengths - 1)[:, 0] for states in (right, left)]
        both = torch.cat([right, reorder(left, order)], dim=-1)  # (batch, source, 2 * dim)
        return self.out(both), self.out(torch.cat(ends, dim=-1))


def reorder(x: Tensor, order: Tensor) -> Tensor:
    """x[i, order[i, j]] at [i, j]: (batch, positions, dim)."""
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))


class DotScores(nn.Module):
    """Luong et al. (2015): the score of source state s for decoder state h is h · s."""

    def __init__(self, dim: int) -> None:
        super().__init__()

    def forward(self, h: Tensor, memory: Memory) -> Tensor:
        scores: Tensor = h @ memory.states.transpose(1, 2)
        return scores  # (batch, target, source)


class AdditiveScores(nn.Module):
    """Bahdanau et al. (2015): the score of source state s for decoder state h is
    v · tanh(W h + U s), a small neural network."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query = nn.Linear(dim, dim, bias=False)  # W
        self.key = nn.Linear(dim, dim, bias=False)  # U
        self.score = nn.Linear(dim, 1, bias=False)  # v

    def forward(self, h: Tensor, memory: Memory) -> Tensor:
        if 0 not in memory.keys_values:
            memory.keys_values[0] = (self.key(memory.states),)
        (keys,) = memory.keys_values[0]  # (batch, source, dim)
        pairs = torch.tanh(self.query(h)[:, :, None] + keys[:, None])
        scores: Tensor = self.score(pairs).squeeze(3)  # from (batch, target, source, dim)
        return scores  # (batch, target, source)
