"""One token after the other: the model, the draw, and nothing that waits.

Each new token needs only its own row of the network, since what the model knows of the tokens
behind is kept (`Cached`). `Naive` computes everything anew each time: slow, obvious, and what the
tests hold the cache to.

    >>> network = Cached(model, rows=1, length=100)
    >>> decoder = Decoder(network, sampler, [[1, 2, 3]], tokens=97)
    >>> [step.ids for step in decoder.steps()]
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from nanolm.generation.sampler import Sampler
from nanolm.model.base import Model
from nanolm.model.device import recording
from nanolm.model.gpt import GPT

AHEAD = 8  # steps that a GPU may be ahead of what was looked at, so that it never waits for it


def first_visible(length: int, context: int | None) -> int:
    """The first of `length` tokens that the model still sees, whatever its kind of positions.

    All of them while they fit, as they always do in a recurrent model (None). Past that, the
    window moves on by half a context at a time, so that the cache is filled anew once every half
    context instead of at every token. Positions count from the first token that is seen.
    """
    if context is None:
        return 0
    hop = max(1, context // 2)
    return -(-max(0, length - context) // hop) * hop


class Network(Protocol):
    """Logits of the next token, for rows of ids of different lengths."""

    def prepare(self, ids: Tensor, lengths: list[int]) -> None:
        """What has to be done on the CPU before `logits`."""

    def logits(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """(rows, vocabulary), from the first `lengths` of `ids` (rows, time)."""

    def select(self, rows: Tensor) -> None:
        """Let row i be what row rows[i] was."""


class Naive:
    """Logits by running all that is visible through the model, row by row."""

    def __init__(self, model: Model, rows: int, length: int) -> None:
        self.model = model

    def prepare(self, ids: Tensor, lengths: list[int]) -> None:
        pass

    def logits(self, ids: Tensor, lengths: Tensor) -> Tensor:
        rows = []
        for row, length in zip(ids, lengths.tolist(), strict=True):
            start = first_visible(length, self.model.window())
            rows.append(self.model(row[None, start:length])[0, -1])  # (vocabulary,)
        return torch.stack(rows)

    def select(self, rows: Tensor) -> None:
        pass


class Cached:
    """The same logits, computing only what is new: the last token of every row."""

    def __init__(self, model: Model, rows: int, length: int) -> None:
        self.model = model
        on_a_gpu = model.device.type == "cuda"
        self.memory = model.remember(rows, length, fixed=on_a_gpu)
        self.step = one_token(model, self.memory) if on_a_gpu else None
        self.starts: list[int | None] = [None] * rows  # the first token that is remembered

    def prepare(self, ids: Tensor, lengths: list[int]) -> None:
        """Read all but the last token, at the beginning and when a row's window moves on."""
        starts = [first_visible(length, self.model.window()) for length in lengths]
        unread: dict[int, list[int]] = {}  # rows that can be read together
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            if start != self.starts[row]:
                unread.setdefault(0 if self.model.padded else length, []).append(row)
        for rows in unread.values():
            self.read(ids, rows, [starts[row] for row in rows], [lengths[row] - 1 for row in rows])
        self.starts = list(starts)

    def read(self, ids: Tensor, rows: list[int], starts: list[int], ends: list[int]) -> None:
        """Let the memory of `rows` be what the ids from `starts` to `ends` leave behind."""
        sizes = [end - start for start, end in zip(starts, ends, strict=True)]
        # Shorter rows are filled up behind their end, where nothing real can see it.
        together = ids.new_zeros(len(rows), max(sizes))
        for number, row in enumerate(rows):
            together[number, : sizes[number]] = ids[row, starts[number] : ends[number]]
        memory = self.model.remember(len(rows), max(sizes))
        if max(sizes):
            self.model.body(together, memory)
        self.memory.put(rows, memory, sizes)

    def logits(self, ids: Tensor, lengths: Tensor) -> Tensor:
        last = ids.gather(1, lengths[:, None] - 1)  # (rows, 1)
        if self.step:
            try:
                return self.step(last)
            except Exception:  # triton needs a C compiler, and fails in many ways without
                self.step = None
        logits: Tensor = self.model(last, self.memory)  # (rows, 1, vocabulary)
        return logits[:, -1]

    def select(self, rows: Tensor) -> None:
        self.memory.select(rows)


def one_token(model: Model, memory: Any) -> Callable[[Tensor], Tensor] | None:
    """The model's step in as few kernels as can be, where there are any for it."""
    try:
        from nanolm.model.kernels import OneToken
    except ImportError:  # triton does not come with every torch
        return None
    return OneToken(cast(GPT, model), memory) if OneToken.possible(model, memory) else None


class Step(NamedTuple):
    """What one step gave, a list a row."""

    ids: list[int]
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


class Decoder:
    """Steps of a network and a sampler. On a GPU they are one CUDA graph, and the CPU looks at
    what was drawn while the next steps are under way."""

    def __init__(
        self, network: Network, sampler: Sampler, prompts: list[list[int]], tokens: int
    ) -> None:
        self.network, self.sampler = network, sampler
        self.tokens = tokens
        self.device = sampler.numbers.device
        self.lengths = [len(prompt) for prompt in prompts]
        self.lengths_there = torch.tensor(self.lengths, device=self.device)  # the same, on a GPU
        self.ids = torch.zeros(
            len(prompts), max(self.lengths) + tokens, dtype=torch.long, device=self.device
        )
        for row, prompt in enumerate(prompts):
            self.ids[row, : len(prompt)] = torch.tensor(prompt)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.drawn = torch.empty(0)  # of the graph: always in one place

    @torch.inference_mode()
    def steps(self) -> Iterator[Step]:
        """Draw `tokens` times; the caller may end it at any time."""
        cuda = self.device.type == "cuda"
        waiting: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        places: list[Tensor] = []  # in the CPU's memory, used in turn
        for number in range(self.tokens):
            self.network.prepare(self.ids, self.lengths)
            self.sampler.prepare()
            if cuda and number == 1 and isinstance(self.network, Cached):
                self.capture()  # after one step as it is, which sets up and compiles everything
            if self.graph:
                self.graph.replay()
                drawn = self.drawn
            else:
                drawn = self.step()
            self.lengths = [length + 1 for length in self.lengths]
            if not cuda:
                yield self.read(drawn)
                continue
            if len(places) <= AHEAD:
                places.append(torch.empty_like(drawn, device="cpu", pin_memory=True))
            place = places[number % (AHEAD + 1)]
            place.copy_(drawn, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            waiting.append((place, copied))
            if len(waiting) > AHEAD:
                yield self.next_of(waiting)
        while waiting:
            yield self.next_of(waiting)

    def step(self) -> Tensor:
        """One token more in every row, and what is to be known of it."""
        logits = self.network.logits(self.ids, self.lengths_there)
        ids, known = self.sampler.draw(logits)
        self.ids.scatter_(1, self.lengths_there[:, None], ids[:, None])
        self.lengths_there += 1
        return known

    def capture(self) -> None:
        """Record a step, without running it."""
        self.graph = torch.cuda.CUDAGraph()
        with recording(self.graph):
            self.drawn = self.step()

    def next_of(self, waiting: deque[tuple[Tensor, torch.cuda.Event]]) -> Step:
        place, copied = waiting.popleft()
        copied.synchronize()
        return self.read(place)

    def read(self, drawn: Tensor) -> Step:
        top = self.sampler.top
        ids, logprobs, top_ids, top_logprobs = drawn.split([1, 1, top, top], dim=1)
        return Step(
            ids[:, 0].long().tolist(),
            logprobs[:, 0].tolist(),
            top_ids.long().tolist(),
            top_logprobs.tolist(),
        )
