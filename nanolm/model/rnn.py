"""Recurrent language models: the baseline for Transformers.

    >>> config = configure("lstm", vocab_size=300, layers=2, dim=32, context=16)
    >>> Recurrent(config)(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 300])

Each layer keeps one state for all earlier tokens, so memory does not grow with the context.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import Tensor, nn

from nanolm.model.base import Embedding, Model
from nanolm.model.config import RecurrentConfig, RecurrentSeq2SeqConfig

State = tuple[Tensor, ...]  # (batch, dim) each: h, and for an LSTM also c


class Recurrent(Model):
    config: RecurrentConfig
    allows_padding = False  # padding would change the state

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(CELLS[config.cell](config.dim) for _ in range(config.layers))
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        if not self.token_embedding.weight.is_meta:  # on the meta device, weights are loaded later
            self.init_weights()

    def forward(self, ids: Tensor, cache: "RecurrentState | None" = None) -> Tensor:
        return self.head(self.hidden_states(ids, cache))  # type: ignore[no-any-return]

    def hidden_states(self, ids: Tensor, cache: "RecurrentState | None" = None) -> Tensor:
        x: Tensor = self.dropout(self.token_embedding(ids))  # (batch, time, dim)
        states = cache.states if cache else self.init_cache(len(ids), ids.shape[1]).states
        for number, layer in enumerate(self.layers):
            # For single tokens, the explicit loop of the slides has no kernel setup cost.
            assert isinstance(layer, Cell)
            step = layer.written_out if cache and ids.shape[1] == 1 else layer
            y, after = step(x, states[number])
            if cache:
                cache.keep(number, after)
            # Residual connections between layers: without them, three LSTM layers learned nothing
            # in 150 steps (docs/experiments.md). A single layer is as in the lectures.
            x = x + self.dropout(y) if number else self.dropout(y)
        return x

    def init_weights(self) -> None:
        size = 1 / math.sqrt(self.config.dim)
        nn.init.normal_(self.token_embedding.weight, std=size if self.config.tied else 1)
        if not self.config.tied:
            nn.init.normal_(self.head.weight, std=0.02)
        for cell in self.layers:
            assert isinstance(cell, Cell)
            cell.init_weights()

    def init_cache(self, batch: int, length: int, fixed: bool = False) -> "RecurrentState":
        return RecurrentState(self.config, batch, self.token_embedding.weight)

    def cache_bytes(self, length: int) -> int:
        return 2 * self.config.layers * self.config.dim * self.token_embedding.weight.element_size()

    def window(self) -> int | None:
        return None  # the state has no limit


class RecurrentState:
    """The state of every layer after the tokens so far, with the methods of a `KVCache`."""

    def __init__(
        self, config: RecurrentConfig | RecurrentSeq2SeqConfig, batch: int, like: Tensor
    ) -> None:
        # Allocated once, as CUDA graphs require.
        self.whole = like.new_zeros(config.layers, CELLS[config.cell].parts, batch, config.dim)
        self.use(batch)

    def use(self, rows: int) -> None:
        self.states: list[State] = [tuple(layer[:, :rows]) for layer in self.whole]  # views

    def keep(self, layer: int, state: State) -> None:
        for kept, new in zip(self.states[layer], state, strict=True):
            kept.copy_(new)

    def put(self, rows: list[int], other: Self, lengths: list[int]) -> None:
        self.whole[:, :, rows] = other.whole

    def select(self, rows: Tensor) -> None:
        self.whole[:, :, : len(rows)] = self.whole[:, :, rows]

    def move(self, source: int, target: int) -> None:
        self.whole[:, :, target] = self.whole[:, :, source]

    def forget(self, row: int) -> None:
        self.whole[:, :, row] = 0


class Cell(nn.Module, ABC):
    """A recurrent layer: computes the next state from each input and the previous state."""

    gates: int  # vectors of width dim computed at each position
    parts: int = 1  # tensors in the state
    kernel: Any  # torch's kernel for all positions at once

    def __init__(self, dim: int, inputs: int | None = None) -> None:
        """`inputs` is the input width, by default that of the state."""
        super().__init__()
        rows = self.gates * dim
        self.input_weight = nn.Parameter(torch.empty(rows, inputs or dim))  # W_x
        self.state_weight = nn.Parameter(torch.empty(rows, dim))  # W_h
        self.bias = nn.Parameter(torch.empty(rows))

    def init_weights(self) -> None:
        nn.init.normal_(self.input_weight, std=1 / math.sqrt(self.input_weight.shape[1]))
        for gate in self.state_weight.chunk(self.gates):
            nn.init.orthogonal_(gate)  # rotates the state without shrinking or growing it
        nn.init.zeros_(self.bias)

    @abstractmethod
    def step(self, x: Tensor, state: State) -> State:
        """The next state, from the product W_x x_t + b, (batch, gates * dim)."""

    def written_out(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """The same as `forward`, as on the slides: one position at a time."""
        inputs = x @ self.input_weight.T + self.bias  # (batch, time, gates * dim)
        outputs = []
        for now in inputs.unbind(dim=1):  # (batch, gates * dim) each
            state = self.step(now, state)
            outputs.append(state[0])
        return torch.stack(outputs, dim=1), state  # (batch, time, dim)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """`x` is (batch, time, dim); torch's kernels have (1, batch, dim) states and two biases."""
        weights = [self.input_weight, self.state_weight, self.bias, torch.zeros_like(self.bias)]
        weights = [weight.float() for weight in weights]
        if x.is_cuda:  # cuDNN wants contiguous weights
            sizes = [weight.numel() for weight in weights]
            whole = torch.cat([weight.flatten() for weight in weights]).split(sizes)
            weights = [part.view_as(weight) for part, weight in zip(whole, weights, strict=True)]
        before = [part[None].float() for part in state]
        hidden = before if len(before) > 1 else before[0]
        # In full precision: under autocast, cuDNN would use float16, which overflows. TF32 is
        # allowed in training only.
        exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
        with (
            torch.autocast(x.device.type, enabled=False),
            contextlib.nullcontext() if self.training else exact,
        ):
            flags = (True, 1, 0.0, self.training, False, True)
            output, *after = self.kernel(x.float(), hidden, weights, *flags)
        return output.to(x.dtype), tuple(part[0] for part in after)


class Elman(Cell):
    """h_t = tanh(W_h h_{t-1} + W_x x_t + b)."""

    gates, kernel = 1, torch.rnn_tanh

    def step(self, x: Tensor, state: State) -> State:
        (h,) = state
        return (torch.tanh(h @ self.state_weight.T + x),)


class LSTM(Cell):
    """Long short-term memory: gates control what the cell c takes in, keeps and outputs as h."""

    gates, parts, kernel = 4, 2, torch.lstm

    def init_weights(self) -> None:
        super().init_weights()
        nn.init.ones_(self.bias.chunk(4)[1])  # start by keeping the cell state

    def step(self, x: Tensor, state: State) -> State:
        h, c = state
        take, keep, new, show = (h @ self.state_weight.T + x).chunk(4, dim=-1)  # (batch, dim) each
        c = keep.sigmoid() * c + take.sigmoid() * new.tanh()
        return show.sigmoid() * c.tanh(), c


class GRU(Cell):
    """Gated recurrent unit: gates control how much of h is used for the new value and is kept."""

    gates, kernel = 3, torch.gru

    def step(self, x: Tensor, state: State) -> State:
        (h,) = state
        use, keep, new = (h @ self.state_weight.T).chunk(3, dim=-1)  # (batch, dim) each
        use_in, keep_in, new_in = x.chunk(3, dim=-1)
        use, keep = (use + use_in).sigmoid(), (keep + keep_in).sigmoid()
        return (keep * h + (1 - keep) * (new_in + use * new).tanh(),)


CELLS: dict[str, type[Cell]] = {"rnn": Elman, "lstm": LSTM, "gru": GRU}
