"""From logits to the next token: penalties, bans, filters and sampling.

    >>> sampler = Sampler(tokenizer, rows=2, device=device)
    >>> sampler.begin(0, SamplingParams(top_k=1), prompt)
    >>> sampler.begin(1, SamplingParams(temperature=1.2, seed=7), other_prompt)
    >>> sampler.sample(logits)  # (2, vocabulary)

Each row has its own parameters. Everything happens on the device of the logits, in tensors that are
never reallocated: nothing waits for the CPU, and a CUDA graph can replay it.
"""

import random
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanolm.generation.banned_texts import BannedTexts
from nanolm.generation.sampling_params import DECLARATIONS, TYPES, SamplerState, SamplingParams
from nanolm.text.tokenizer import Tokenizer

RANDOM_BLOCK = 256  # random numbers per row that are drawn at a time
TOP_SIZES = (0, 1, 6, 20, 100)  # `top` is rounded up to one of these, to limit CUDA graphs
NO_BIAS: Mapping[int, float] = MappingProxyType({})
EFFECTS = {name: each for name, each in DECLARATIONS.items() if each.penalty or each.filter}
COLUMNS = {name: place for place, name in enumerate((*EFFECTS, "greedy", "step"))}


class ActiveFilters(NamedTuple):
    """What a step must do for any of its rows. Each combination has its own CUDA graph."""

    sampled: bool = False  # in some rows
    greedy: bool = False  # in some rows
    limits: tuple[tuple[str, int], ...] = ()  # of parameters with an effect
    bans: int = 0  # version of the assignment of bans to rows; 0: no bans
    top: int = 0  # most likely tokens to report
    biased: bool = False  # some rows have a logit bias


class Sampler:
    def __init__(self, tokenizer: Tokenizer, rows: int, device: torch.device) -> None:
        self.tokenizer, self.vocab_size = tokenizer, tokenizer.vocab_size
        self.rows = rows
        # Sums over the vocabulary need more than single precision; MPS has no float64.
        wide = torch.float32 if device.type == "mps" else torch.float64
        self.params: list[SamplingParams | None] = [None] * rows  # None: inactive
        self.tops = [0] * rows
        self.sources = [random.Random(0) for _ in range(rows)]
        self.steps = [0] * rows  # tokens sampled so far
        self.numbers = torch.zeros(rows, RANDOM_BLOCK, dtype=wide, device=device)
        self.values = torch.ones(rows, len(COLUMNS), dtype=wide, device=device)
        self.stops = torch.zeros(self.vocab_size, dtype=torch.bool, device=device)
        self.stops[sorted(tokenizer.stops)] = True
        self.suppressed: Tensor | None = None  # (vocabulary,)
        if tokenizer.unseen:
            self.suppressed = torch.zeros_like(self.stops)
            self.suppressed[sorted(tokenizer.unseen)] = True
        # As in `SamplerState`; empty until a penalty needs them.
        self.seen = torch.zeros(rows, 0, dtype=torch.bool, device=device)
        self.counts = torch.zeros(rows, 0, device=device)
        self.bias = torch.zeros(rows, 0, device=device)  # of logits; empty until a row has one
        self.biased = [False] * rows
        self.states = torch.zeros(rows, dtype=torch.long, device=device)  # of `BannedTexts`
        self.bans: dict[tuple[str, ...], BannedTexts] = {}
        self.banned: list[tuple[BannedTexts, Tensor]] = []  # with their rows
        self.changes = 0  # of the assignment of bans to rows

    def begin(
        self,
        row: int,
        params: SamplingParams,
        prompt: list[int],
        number: int = 0,
        top: int = 0,
        written: int = 0,
        bias: Mapping[int, float] = NO_BIAS,
    ) -> None:
        """Start a row, whose random numbers depend only on its seed and `number`. The `top` most
        likely tokens are reported. The last `written` of the prompt were sampled before. `bias` is
        added to the logits of tokens."""
        device = self.values.device
        self.params[row], self.tops[row], self.steps[row] = params, top, written
        self.sources[row] = source = random.Random(params.seed * 1_000_003 + number)
        drawn = [source.random() for _ in range(-(-written // RANDOM_BLOCK) * RANDOM_BLOCK)]
        if drawn:
            last = torch.tensor(drawn[-RANDOM_BLOCK:], dtype=torch.float64)
            self.numbers[row] = last.to(self.numbers)
        values: list[Any] = [params.effects.get(name, each.off) for name, each in EFFECTS.items()]
        values += [params.effectively_greedy, written]
        self.values[row] = torch.tensor(values, dtype=self.values.dtype).to(device)
        tracked = {EFFECTS[name].tracks for name in params.effects}
        for name in tracked - {""}:
            table = getattr(self, name)
            if not table.shape[1]:
                table = table.new_zeros(self.rows, self.vocab_size)
                setattr(self, name, table)
            table[row] = 0
        if "seen" in tracked:
            self.seen[row, torch.tensor(prompt, device=device)] = True
        if "counts" in tracked and written:
            again = torch.tensor(prompt[-written:]).bincount(minlength=self.vocab_size)
            self.counts[row] = again.to(self.counts)
        self.biased[row] = bool(bias)
        if bias and not self.bias.shape[1]:
            self.bias = self.bias.new_zeros(self.rows, self.vocab_size)
        if self.bias.shape[1]:
            self.bias[row] = 0
            self.bias[row, list(bias)] = torch.tensor(list(bias.values())).to(self.bias)
        if params.ban:
            if params.ban not in self.bans:
                self.bans[params.ban] = BannedTexts(params.ban, self.tokenizer, device)
            self.states[row] = self.bans[params.ban].after(prompt)
        self.__dict__.pop("active", None)

    def end(self, row: int) -> None:
        self.params[row], self.tops[row], self.biased[row] = None, 0, False
        self.__dict__.pop("active", None)

    def move(self, source: int, target: int) -> None:
        """Move the state of one row to another; the source becomes inactive."""
        for kept in (self.numbers, self.values, self.states, self.seen, self.counts, self.bias):
            if kept.numel():
                kept[target] = kept[source]
        lists: tuple[list[Any], ...] = (self.params, self.tops, self.sources, self.steps)
        for each in (*lists, self.biased):
            each[target] = each[source]
        self.end(source)

    @cached_property
    def active(self) -> ActiveFilters:
        """The filters in effect now; drops bans that no row uses anymore."""
        rows: dict[tuple[str, ...], list[int]] = {}
        for row, params in enumerate(self.params):
            if params and params.ban:
                rows.setdefault(params.ban, []).append(row)
        if rows or self.bans:
            self.changes += 1
            self.bans = {ban: self.bans[ban] for ban in rows}
            self.banned = [
                (self.bans[ban], torch.tensor(which, device=self.values.device))
                for ban, which in rows.items()
            ]
        used = [params for params in self.params if params]
        sampled = sum(not params.effectively_greedy for params in used)
        most: dict[str, Any] = {}
        for params in used:
            for name, value in params.effects.items():
                most[name] = max(value, most.get(name, value))
        limits = []
        for name in sorted(most, key=COLUMNS.__getitem__):
            largest = most[name] if EFFECTS[name].filter and TYPES[name] is int else 1
            # Rounded up to a power of two, to limit the number of CUDA graphs.
            limits.append((name, min(1 << (largest - 1).bit_length(), self.vocab_size)))
        top = next((size for size in TOP_SIZES if size >= max(self.tops)), max(self.tops))
        return ActiveFilters(
            sampled=sampled > 0,
            greedy=sampled < len(used),
            limits=tuple(limits),
            bans=self.changes if rows else 0,
            top=min(top, self.vocab_size),
            biased=any(self.biased),
        )

    def prepare(self, rows: int) -> None:
        """The work on the CPU before a step of the first `rows`."""
        some = [
            row
            for row, params in enumerate(self.params[:rows])
            if params and self.steps[row] % RANDOM_BLOCK == 0 and not params.effectively_greedy
        ]
        if some:
            drawn = [[self.sources[row].random() for _ in range(RANDOM_BLOCK)] for row in some]
            self.numbers[some] = torch.from_numpy(np.array(drawn)).to(self.numbers)
        self.steps[:rows] = [step + 1 for step in self.steps[:rows]]

    def sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """From logits (rows, vocabulary) to ids (rows,), and (rows, 2 + 2 * top): the id, its log
        probability, the most likely ids, and theirs, all before penalties and filters."""
        active, rows = self.active, len(logits)
        logits = logits[:, : self.vocab_size]  # some models pad their vocabulary
        scores = self.scores(logits)
        if active.sampled:
            number = self.numbers[:rows].gather(1, self.value("step", rows).long() % RANDOM_BLOCK)
            ids = inverse_cdf(self.apply("filter", scores.float()).softmax(dim=-1), number)
            if active.greedy:
                ids = torch.where(self.value("greedy", rows)[:, 0] > 0, scores.argmax(dim=-1), ids)
        else:
            ids = scores.argmax(dim=-1)
        self.accept(ids)
        own = logits.log_softmax(dim=-1, dtype=torch.float32)
        parts = [ids[:, None], own.gather(1, ids[:, None])]
        if active.top:
            top = own.topk(active.top)
            parts += [top.indices, top.values]
        return ids, torch.cat([part.to(self.numbers.dtype) for part in parts], dim=1)

    def value(self, name: str, rows: int) -> Tensor:
        """A parameter of each row: (rows, 1)."""
        return self.values[:rows, COLUMNS[name], None]

    def scores(self, logits: Tensor) -> Tensor:
        """Logits after the bias, penalties and bans."""
        if self.active.biased:
            logits = logits + self.bias[: len(logits)]
        if self.suppressed is not None:
            logits = logits.masked_fill(self.suppressed, -torch.inf)
        logits = self.apply("penalty", logits)
        for bans, which in self.banned if self.active.bans else []:
            free = logits[which].masked_fill(bans.banned[self.states[which]], -torch.inf)
            logits = logits.index_copy(0, which, free)
        return logits

    def apply(self, kind: str, logits: Tensor) -> Tensor:
        """Apply the active effects of this kind, in the order of declaration."""
        rows = len(logits)
        seen, counts, step = self.seen[:rows], self.counts[:rows], self.value("step", rows)
        for name, limit in self.active.limits:
            if effect := getattr(EFFECTS[name], kind):
                state = SamplerState(limit, step, self.stops, seen, counts)
                logits = effect(logits, self.value(name, rows), state)
        return logits

    def accept(self, ids: Tensor) -> None:
        active, rows = self.active, len(ids)
        tracked = {EFFECTS[name].tracks for name, _ in active.limits}
        if "seen" in tracked:
            self.seen[:rows].scatter_(1, ids[:, None], True)
        if "counts" in tracked:
            one = torch.ones_like(self.counts[:rows, :1])
            self.counts[:rows].scatter_add_(1, ids[:, None], one)
        for bans, which in self.banned if active.bans else []:
            self.states[which] = bans.next[self.states[which], ids[which]].long()
        self.value("step", rows).add_(1)

    def select(self, rows: Tensor) -> None:
        """Replace row i by row rows[i]."""
        for kept in (self.seen, self.counts, self.states):
            kept[: len(rows)] = kept[rows]


def inverse_cdf(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """The token of each row (rows,) at which the cumulative probability exceeds its number."""
    reached = probabilities.cumsum(dim=-1, dtype=numbers.dtype)
    # Scaled to the last sum, which rounding keeps from being exactly 1.
    ids = torch.searchsorted(reached, numbers * reached[:, -1:], right=True).squeeze(-1)
    return ids.clamp(max=probabilities.shape[-1] - 1)  # a diverged model gives NaN
