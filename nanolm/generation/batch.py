"""Generates many texts together, one token at a time; they join and leave between steps.

    >>> batch = Batch(CachedDecoder(model, 8, 100), Sampler(tokenizer, 8, model.device), 100)
    >>> batch.join([BatchRow([1, 2, 3], SamplingParams(tokens=20))])
    >>> while batch.busy():
    ...     for row, token in batch.step(): ...

On a GPU, a step is one CUDA graph, and the CPU reads sampled tokens while the next steps run.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import NamedTuple

import torch
from torch import Tensor

from nanolm.generation.decoding import CachedDecoder, Decoder
from nanolm.generation.sampler import ActiveFilters, Sampler
from nanolm.generation.sampling_params import SamplingParams
from nanolm.model.cache import zeros
from nanolm.model.device import graph_capture

MAX_STEPS_IN_FLIGHT = 8  # so that a GPU never waits for the CPU to read tokens
MAX_CUDA_GRAPHS = 64  # beyond that, all are captured again


@dataclass(eq=False)
class BatchRow:
    prompt: list[int]
    params: SamplingParams
    number: int = 0  # among rows with the same prompt; each has its own random numbers
    top: int = 0  # most likely tokens to report at each step
    # Tokens sampled before it joined; generation continues after them.
    written: "array[int]" = field(default_factory=lambda: array("i"))
    bias: dict[int, float] = field(default_factory=dict)  # to add to the logits of tokens


class SampledToken(NamedTuple):
    id: int
    logprob: float  # of the model, before penalties and filters
    top: list[tuple[int, float]]  # the most likely tokens, likewise


class InFlightStep(NamedTuple):
    rows: list[BatchRow]
    drawn: Tensor  # in CPU memory
    top: int
    copied: torch.cuda.Event | None


class Batch:
    """Rows of up to `length` tokens each, prompt included. A step computes the smallest of `sizes`
    that all rows fit in; without `sizes`, exactly the number of rows."""

    def __init__(
        self, decoder: Decoder, sampler: Sampler, length: int, sizes: Sequence[int] = ()
    ) -> None:
        self.decoder, self.sampler, self.sizes = decoder, sampler, sizes
        self.device = sampler.values.device
        self.recording = self.device.type == "cuda" and isinstance(decoder, CachedDecoder)
        self.rows: list[BatchRow] = []  # by index in the batch
        self.lengths: list[int] = []
        self.ends: list[int] = []  # maximum lengths
        self.ids = zeros((sampler.rows, length), torch.long, self.device)
        # On the device; inactive rows keep length 1.
        self.lengths_there = torch.ones(sampler.rows, dtype=torch.long, device=self.device)
        self.active = torch.zeros_like(self.lengths_there)  # 1 for active rows, else 0
        self.graphs: dict[tuple[int, ActiveFilters], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.tried: set[tuple[int, ActiveFilters]] = set()  # steps that ran without a graph
        self.in_flight: deque[InFlightStep] = deque()
        for row in range(sampler.rows):
            decoder.forget(row)

    def busy(self) -> bool:
        return bool(self.rows or self.in_flight)

    @torch.inference_mode()
    def join(self, rows: list[BatchRow]) -> None:
        """Add rows and read their prompts; if one of them fails, none joins."""
        if not rows:
            return
        prompts = [row.prompt + list(row.written) for row in rows]
        lengths = [len(prompt) for prompt in prompts]
        ends = [len(row.prompt) + row.params.tokens for row in rows]
        places = slice(len(self.rows), len(self.rows) + len(rows))
        assert places.stop <= self.sampler.rows
        assert max(ends) <= self.ids.shape[1]
        padded = torch.zeros(len(rows), max(lengths), dtype=torch.long)
        for filled, prompt in zip(padded, prompts, strict=True):
            filled[: len(prompt)] = torch.tensor(prompt)
        self.ids[places, : max(lengths)] = padded.to(self.device)
        self.lengths_there[places] = torch.tensor(lengths, device=self.device)
        self.active[places] = 1
        self.rows += rows
        self.lengths += lengths
        self.ends += ends
        try:
            for place, (row, ids) in enumerate(zip(rows, prompts, strict=True), places.start):
                written = len(row.written)
                self.sampler.begin(place, row.params, ids, row.number, row.top, written, row.bias)
            self.decoder.prepare(self.ids, self.lengths)
        except Exception:
            for row in reversed(rows):  # last first, so that none has to be moved
                self.leave(row)
            raise

    @torch.inference_mode()
    def leave(self, row: BatchRow) -> None:
        """Remove a row; the last row takes its place. Tokens in flight are still delivered."""
        if row not in self.rows:
            return
        place, last = self.rows.index(row), len(self.rows) - 1
        if place < last:
            written = slice(self.lengths[last])
            self.ids[place, written] = self.ids[last, written]
            self.lengths_there[place] = self.lengths_there[last]
            for part in (self.decoder, self.sampler):
                part.move(last, place)
            self.rows[place] = self.rows[last]
            self.lengths[place] = self.lengths[last]
            self.ends[place] = self.ends[last]
        self.lengths_there[last], self.active[last] = 1, 0
        self.decoder.forget(last)
        self.sampler.end(last)
        del self.rows[last], self.lengths[last], self.ends[last]

    def step(self) -> Iterator[tuple[BatchRow, SampledToken]]:
        """Generate one more token per row, and yield the tokens that are ready."""
        if self.rows:
            self.launch()
        while self.in_flight:
            rows, drawn, top, copied = self.in_flight[0]
            if copied:
                if self.rows and len(self.in_flight) <= MAX_STEPS_IN_FLIGHT and not copied.query():
                    return
                copied.synchronize()
            self.in_flight.popleft()
            for row, (id, logprob, *rest) in zip(rows, drawn[: len(rows)].tolist(), strict=True):
                likely: list[tuple[int, float]] = []
                if row.top:
                    count = min(row.top, top)  # the vocabulary may be smaller
                    ids = map(int, rest[:count])
                    likely = list(zip(ids, rest[top : top + count], strict=True))
                yield row, SampledToken(int(id), logprob, likely)

    @torch.inference_mode()
    def launch(self) -> None:
        size = next((size for size in self.sizes if size >= len(self.rows)), len(self.rows))
        self.decoder.prepare(self.ids, self.lengths + [0] * (size - len(self.rows)))
        self.sampler.prepare(size)
        key = (size, self.sampler.active)
        # The first time, run without a graph, which compiles everything. Then capture it.
        if self.recording and key in self.tried and key not in self.graphs:
            if len(self.graphs) >= MAX_CUDA_GRAPHS:
                self.graphs.clear()
            graph = torch.cuda.CUDAGraph()
            with graph_capture(graph):
                drawn = self.compute(size)
            self.graphs[key] = (graph, drawn)
        if key in self.graphs:
            graph, drawn = self.graphs[key]
            graph.replay()
        else:
            drawn = self.compute(size)
            if len(self.tried) > 10 * MAX_CUDA_GRAPHS:
                self.tried.clear()
            self.tried.add(key)
        copied = None
        if self.device.type == "cuda":
            place = torch.empty_like(drawn, device="cpu", pin_memory=True)
            place.copy_(drawn, non_blocking=True)
            drawn, copied = place, torch.cuda.Event()
            copied.record()
        self.in_flight.append(InFlightStep(list(self.rows), drawn, self.sampler.active.top, copied))
        self.lengths = [length + 1 for length in self.lengths]
        if any(map(eq, self.lengths, self.ends)):
            over = zip(self.rows, self.lengths, self.ends, strict=True)
            # Last first, so that none is moved only to be removed.
            for row in reversed([row for row, length, end in over if length == end]):
                self.leave(row)

    def compute(self, size: int) -> Tensor:
        """Sample one more token for the first rows; returns ids and log probabilities."""
        logits = self.decoder.logits(self.ids[:size], self.lengths_there[:size])
        ids, known = self.sampler.sample(logits)
        self.ids[:size].scatter_(1, self.lengths_there[:size, None], ids[:, None])
        self.lengths_there[:size] += self.active[:size]
        return known
