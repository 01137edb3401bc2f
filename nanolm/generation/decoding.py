"""Logits of the next token, step by step.

`CachedDecoder` uses a KV cache (or a recurrent state), so each step computes one token.
`NaiveDecoder` runs the whole visible text at each step: slow and simple, as a reference in tests.
`Seq2SeqDecoder` generates targets, each from its source.
"""

import contextlib
import sys
from collections.abc import Callable
from operator import lt
from typing import Any

import torch
from torch import Tensor

from nanolm.model.base import Model, Network
from nanolm.model.fast.cpu_decoding import OneRow
from nanolm.model.fast.native.decoding import NativeOneRow
from nanolm.model.seq2seq import Memory, Seq2Seq

PREFILL_TOKENS = 32_768  # prompt tokens, padding included, in one forward pass


def first_visible(length: int, context: int | None) -> int:
    """The index of the first of `length` tokens that the model sees; a recurrent model (None) sees
    all. Beyond the context length, the window moves by half a context at a time, so that the cache
    is rarely refilled. Positions count from the first visible token."""
    if context is None:
        return 0
    hop = max(1, context // 2)
    return -(-max(0, length - context) // hop) * hop


class Decoder:
    """Logits of the next token, for rows of ids of different lengths."""

    model: Network

    def __init__(self, model: Model, rows: int, length: int) -> None:
        self.model = model

    def prepare(self, ids: Tensor, lengths: list[int]) -> None:
        """Called before `logits` with the lengths of all rows; 0 for inactive rows."""

    def logits(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """(rows, vocabulary), from the first `lengths` of `ids` (rows, time)."""
        raise NotImplementedError

    def select(self, rows: Tensor) -> None:
        """Replace row i by row rows[i], which has the same prompt."""

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, as the first ones."""
        self.select(rows)

    def move(self, source: int, target: int) -> None:
        """Copy one row to another."""

    def forget(self, row: int) -> None:
        """Mark a row as inactive."""


class NaiveDecoder(Decoder):
    model: Model

    def logits(self, ids: Tensor, lengths: Tensor) -> Tensor:
        rows = []
        for row, length in zip(ids, lengths.tolist(), strict=True):
            start = first_visible(length, self.model.window())
            rows.append(self.model(row[None, start:length])[0, -1])  # (vocabulary,)
        return torch.stack(rows)


class CachedDecoder(Decoder):
    model: Model

    def __init__(self, model: Model, rows: int, length: int) -> None:
        super().__init__(model, rows, length)
        self.memory = model.init_cache(rows, length, fixed=model.device.type == "cuda")
        self.steps: dict[int, Callable[[Tensor], Tensor] | None] = {}  # by the number of rows
        # The length at which a row must be read (again); 1 before the first time.
        self.enough = [1] * rows

    def prepare(self, ids: Tensor, lengths: list[int]) -> None:
        """Read all but the last token of new rows and of rows whose window moves."""
        self.memory.use(len(lengths))
        if all(map(lt, lengths, self.enough)):
            return
        unread: dict[int, list[int]] = {}  # rows by length, or together if padding is allowed
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
        """Fill the cache of `rows` with the ids from `starts` to `ends`."""
        sizes = [end - start for start, end in zip(starts, ends, strict=True)]
        # Shorter rows are padded at the end, which the causal mask hides.
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
            except Exception:  # triton needs a C compiler, and fails in many ways without one
                self.steps = dict.fromkeys(range(len(self.enough) + 1))
        logits: Tensor = self.model(last, self.memory)  # (rows, 1, vocabulary)
        return logits[:, -1]

    def fused(self, rows: int) -> Callable[[Tensor], Tensor] | None:
        """The model's step as fused kernels, where they exist."""
        if rows not in self.steps:
            self.steps[rows] = None
            model: Any = self.model
            where = model.device.type
            if where == "cuda":
                with contextlib.suppress(ImportError):  # not every build of torch has triton
                    from nanolm.model.fast.decoding import OneToken

                    if OneToken.supports(model, self.memory):
                        self.steps[rows] = OneToken(model, self.memory, rows)
            elif where == "cpu" and rows == 1 and OneRow.supports(model, self.memory):
                kind = NativeOneRow if NativeOneRow.supports(model) else OneRow
                self.steps[rows] = kind(model, self.memory)
        return self.steps[rows]

    def select(self, rows: Tensor) -> None:
        self.memory.select(rows)

    def move(self, source: int, target: int) -> None:
        self.memory.move(source, target)
        self.enough[target] = self.enough[source]

    def forget(self, row: int) -> None:
        self.memory.forget(row)
        self.enough[row] = 1


class Seq2SeqDecoder(Decoder):
    """The target of each row begins with a single token, and its source never changes. The keys and
    values of the source are computed once."""

    model: Seq2Seq

    def __init__(self, model: Seq2Seq, memory: Memory, length: int) -> None:
        self.model, self.memory = model, memory
        self.cache = model.init_cache(len(memory.mask), length)

    def logits(self, ids: Tensor, lengths: Tensor) -> Tensor:
        last = ids.gather(1, lengths[:, None] - 1)  # (rows, 1)
        logits: Tensor = self.model.head(self.model.decode(last, self.memory, self.cache))
        return logits[:, -1]

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)

    def keep(self, rows: Tensor) -> None:
        self.memory = self.memory.select(rows)
        self.cache.select(rows)
        self.cache.use(len(rows))
