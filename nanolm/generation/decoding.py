"""The next token's logits, one token after the other.

`CachedDecoder` keeps keys and values (or a recurrent state), so each step computes one token.
`NaiveDecoder` runs the whole visible text each time: slow, obvious, the tests' reference.
"""

import contextlib
import sys
from collections.abc import Callable
from operator import lt
from typing import Any

import torch
from torch import Tensor

from nanolm.model.base import Model

PREFILL_TOKENS = 32_768  # tokens of prompts, with what fills them up, that are read together


def first_visible(length: int, context: int | None) -> int:
    """The first of `length` tokens that the model still sees; a recurrent model (None) sees all.
    Past the context, the window moves on by half a context at a time, so that the cache is refilled
    that often and not at every token. Positions count from the first token that is seen."""
    if context is None:
        return 0
    hop = max(1, context // 2)
    return -(-max(0, length - context) // hop) * hop


class Decoder:
    """Logits of the next token, for rows of ids of different lengths."""

    def __init__(self, model: Model, rows: int, length: int) -> None:
        self.model = model

    def prepare(self, ids: Tensor, lengths: list[int]) -> None:
        """On the CPU, before `logits` of rows so long; 0 where nothing is written."""

    def logits(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """(rows, vocabulary), from the first `lengths` of `ids` (rows, time)."""
        raise NotImplementedError

    def select(self, rows: Tensor) -> None:
        """Let row i be what row rows[i] was."""

    def move(self, source: int, target: int) -> None:
        """Let one row be what another was."""

    def forget(self, row: int) -> None:
        """Nothing is written in this row, until it is given something new."""


class NaiveDecoder(Decoder):
    def logits(self, ids: Tensor, lengths: Tensor) -> Tensor:
        rows = []
        for row, length in zip(ids, lengths.tolist(), strict=True):
            start = first_visible(length, self.model.window())
            rows.append(self.model(row[None, start:length])[0, -1])  # (vocabulary,)
        return torch.stack(rows)


class CachedDecoder(Decoder):
    def __init__(self, model: Model, rows: int, length: int) -> None:
        super().__init__(model, rows, length)
        self.memory = model.init_cache(rows, length, fixed=model.device.type == "cuda")
        self.steps: dict[int, Callable[[Tensor], Tensor] | None] = {}  # by the number of rows
        # A row of fewer tokens than this needs nothing read again; 1: nothing was read.
        self.enough = [1] * rows

    def prepare(self, ids: Tensor, lengths: list[int]) -> None:
        """Read all but the last token, at the beginning and when a row's window moves on."""
        self.memory.use(len(lengths))
        if all(map(lt, lengths, self.enough)):
            return
        unread: dict[int, list[int]] = {}  # rows that can be read together
        for row, length in enumerate(lengths):
            if length >= self.enough[row]:
                unread.setdefault(0 if self.model.allows_padding else length, []).append(row)
        window = self.model.window()
        for every in unread.values():
            longest = max(lengths[row] - first_visible(lengths[row], window) for row in every)
            many = max(1, PREFILL_TOKENS // longest)
            for rows in (every[place : place + many] for place in range(0, len(every), many)):
                starts = [first_visible(lengths[row], window) for row in rows]
                self.read(ids, rows, starts, [lengths[row] - 1 for row in rows])
                for row, start in zip(rows, starts, strict=True):
                    self.enough[row] = sys.maxsize if window is None else start + window + 1

    def read(self, ids: Tensor, rows: list[int], starts: list[int], ends: list[int]) -> None:
        """Let the memory of `rows` be what the ids from `starts` to `ends` leave behind."""
        sizes = [end - start for start, end in zip(starts, ends, strict=True)]
        # Shorter rows are filled up behind their end, where nothing real can see it.
        together = ids.new_zeros(len(rows), max(sizes))
        for number, row in enumerate(rows):
            together[number, : sizes[number]] = ids[row, starts[number] : ends[number]]
        memory = self.model.init_cache(len(rows), max(sizes))
        if max(sizes):
            self.model.hidden_states(together, memory)
        self.memory.put(rows, memory, sizes)

    def logits(self, ids: Tensor, lengths: Tensor) -> Tensor:
        last = ids.gather(1, lengths[:, None] - 1)  # (rows, 1)
        if step := self.fused(len(ids)):
            try:
                return step(last)
            except Exception:  # triton needs a C compiler, and fails in many ways without
                self.steps = dict.fromkeys(range(len(self.enough) + 1))
        logits: Tensor = self.model(last, self.memory)  # (rows, 1, vocabulary)
        return logits[:, -1]

    def fused(self, rows: int) -> Callable[[Tensor], Tensor] | None:
        """The model's step in as few kernels as can be, where there are any for it."""
        if rows not in self.steps:
            self.steps[rows] = None
            if self.model.device.type == "cuda":
                with contextlib.suppress(ImportError):  # triton does not come with every torch
                    from nanolm.model.fast.decoding import OneToken

                    model: Any = self.model
                    if OneToken.supports(model, self.memory):
                        self.steps[rows] = OneToken(model, self.memory, rows)
        return self.steps[rows]

    def select(self, rows: Tensor) -> None:
        self.memory.select(rows)

    def move(self, source: int, target: int) -> None:
        self.memory.move(source, target)
        self.enough[target] = self.enough[source]

    def forget(self, row: int) -> None:
        self.memory.forget(row)
        self.enough[row] = 1
