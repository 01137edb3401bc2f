"""From logits to the next token: penalties, bans, filters, and a random draw.

    >>> sampler = Sampler(tokenizer, rows=2, device=device)
    >>> sampler.begin(0, SamplingParams(top_k=1), prompt)
    >>> sampler.begin(1, SamplingParams(temperature=1.2, seed=7), other_prompt)
    >>> sampler.sample(logits)  # (2, vocabulary)

Each row has params of its own. Everything happens on the device of the logits, in tensors that stay
where they are: nothing waits for the CPU, and a CUDA graph can repeat it.
"""

import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanolm.generation.banned_texts import BannedTexts
from nanolm.generation.sampling_params import (
    DECLARATIONS,
    TYPES,
    Effect,
    SamplerState,
    SamplingParams,
)
from nanolm.text.tokenizer import Tokenizer

RANDOM_BLOCK = 256  # random numbers of a row are made so many at a time
TOP_SIZES = (0, 1, 6, 20, 100)  # `top` is rounded up to one of them, or each would be a graph
EFFECTS = {name: each for name, each in DECLARATIONS.items() if each.penalty or each.filter}
COLUMNS = {name: place for place, name in enumerate((*EFFECTS, "greedy", "step"))}


class ActiveFilters(NamedTuple):
    """What a step has to do for any of its rows: a CUDA graph is recorded for each."""

    sampled: bool = False  # in some rows
    greedy: bool = False  # in some rows
    limits: tuple[tuple[str, int], ...] = ()  # of the parameters that have an effect
    bans: int = 0  # a number for which rows have which; 0: none
    top: int = 0  # likeliest tokens to report

    def tracks(self, what: str) -> bool:
        return any(EFFECTS[name].tracks == what for name, _ in self.limits)


class Sampler:
    """Samples one token a row at every step."""

    def __init__(self, tokenizer: Tokenizer, rows: int, device: torch.device) -> None:
        self.tokenizer, self.vocab_size = tokenizer, tokenizer.vocab_size
        self.rows = rows
        wide = widest(device)
        self.params: list[SamplingParams | None] = [None] * rows  # None: nothing is written there
        self.tops = [0] * rows
        self.sources = [random.Random(0) for _ in range(rows)]
        self.steps = [0] * rows  # tokens sampled before
        self.numbers = torch.zeros(rows, RANDOM_BLOCK, dtype=wide, device=device)
        self.values = torch.ones(rows, len(COLUMNS), dtype=wide, device=device)
        self.stops = torch.zeros(self.vocab_size, dtype=torch.bool, device=device)
        self.stops[sorted(tokenizer.stops)] = True
        self.suppressed: Tensor | None = None  # (vocabulary,)
        if tokenizer.unseen:
            self.suppressed = torch.zeros_like(self.stops)
            self.suppressed[sorted(tokenizer.unseen)] = True
        # As in `SamplerState`; of no columns until a penalty needs them.
        self.seen = torch.zeros(rows, 0, dtype=torch.bool, device=device)
        self.counts = torch.zeros(rows, 0, device=device)
        self.states = torch.zeros(rows, dtype=torch.long, device=device)  # of what is banned
        self.bans: dict[tuple[str, ...], BannedTexts] = {}
        self.banned: list[tuple[BannedTexts, Tensor]] = []  # and in which rows
        self.changes = 0  # of which rows have which bans
        self.known: ActiveFilters | None = None

    def begin(
        self, row: int, params: SamplingParams, prompt: list[int], number: int = 0, top: int = 0
    ) -> None:
        """Something new is written there. A row has the random numbers of its `number`, whatever
        is beside it; `top` of the likeliest tokens are to be known."""
        device = self.values.device
        self.params[row], self.tops[row], self.steps[row] = params, top, 0
        self.sources[row] = random.Random(params.seed * 1_000_003 + number)
        values = {name: effective(params, name) for name in EFFECTS}
        values |= {"greedy": params.likeliest_only(), "step": 0}
        ordered = [values[name] for name in COLUMNS]
        self.values[row] = torch.tensor(ordered, dtype=self.values.dtype).to(device)
        tracked = {EFFECTS[name].tracks for name in EFFECTS if is_active(params, name)}
        for name in tracked - {""}:
            table = getattr(self, name)
            if not table.shape[1]:
                table = table.new_zeros(self.rows, self.vocab_size)
                setattr(self, name, table)
            table[row] = 0
        if "seen" in tracked:
            self.seen[row, torch.tensor(prompt, device=device)] = True
        if params.ban:
            if params.ban not in self.bans:
                self.bans[params.ban] = BannedTexts(params.ban, self.tokenizer, device)
            self.states[row] = self.bans[params.ban].after([prompt])[0]
        self.known = None

    def end(self, row: int) -> None:
        """Nothing is written there any more."""
        self.params[row], self.tops[row] = None, 0
        self.known = None

    def move(self, source: int, target: int) -> None:
        """Let one row be what another was, and nothing that one."""
        for kept in (self.numbers, self.values, self.states, self.seen, self.counts):
            kept[target] = kept[source]
        lists: tuple[list[Any], ...] = (self.params, self.tops, self.sources, self.steps)
        for each in lists:
            each[target] = each[source]
        self.end(source)

    @property
    def active(self) -> ActiveFilters:
        if self.known is None:
            self.known = self.find_active()
        return self.known

    def find_active(self) -> ActiveFilters:
        """What has an effect now; bans that are no more are forgotten."""
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
        sampled = [params for params in used if not params.likeliest_only()]
        limits = []
        for name, about in EFFECTS.items():
            concerned = sampled if about.filter else used
            if values := [getattr(each, name) for each in concerned if is_active(each, name)]:
                most = max(values) if about.filter and TYPES[name] is int else 1
                # A power of two, or each would be a graph of its own.
                limits.append((name, min(1 << (most - 1).bit_length(), self.vocab_size)))
        top = next((size for size in TOP_SIZES if size >= max(self.tops)), max(self.tops))
        return ActiveFilters(
            sampled=bool(sampled),
            greedy=len(sampled) < len(used),
            limits=tuple(limits),
            bans=self.changes if rows else 0,
            top=min(top, self.vocab_size),
        )

    def prepare(self, rows: int) -> None:
        """What has to be done on the CPU before a step of the first `rows`."""
        some = [
            row
            for row, params in enumerate(self.params[:rows])
            if params and self.steps[row] % RANDOM_BLOCK == 0 and not params.likeliest_only()
        ]
        if some:
            drawn = [[self.sources[row].random() for _ in range(RANDOM_BLOCK)] for row in some]
            self.numbers[some] = torch.from_numpy(np.array(drawn)).to(self.numbers)
        for row in range(rows):
            self.steps[row] += 1

    def sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """From (rows, vocabulary) the ids, (rows,), and what is to be known of them, side by side:
        (rows, 2 + 2 * top), the id and its log-probability, the likeliest ids and theirs. They are
        the model's own, before any filter. Some models have spare rows that stand for no token.
        """
        active, rows = self.active, len(logits)
        logits = logits[:, : self.vocab_size]
        scores = self.scores(logits)
        if active.sampled:
            number = self.numbers[:rows].gather(1, self.value("step", rows).long() % RANDOM_BLOCK)
            ids = inverse_cdf(self.filtered(scores).softmax(dim=-1), number)
            if active.greedy:
                greedy = self.value("greedy", rows)[:, 0] > 0
                ids = torch.where(greedy, scores.argmax(dim=-1), ids)
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
        column = COLUMNS[name]
        return self.values[:rows, column : column + 1]

    def scores(self, logits: Tensor) -> Tensor:
        """Logits after penalties and bans."""
        if self.suppressed is not None:
            logits = logits.masked_fill(self.suppressed, -torch.inf)
        logits = self.apply("penalty", logits)
        for bans, which in self.banned if self.active.bans else []:
            free = logits[which].masked_fill(bans.banned[self.states[which]], -torch.inf)
            logits = logits.index_copy(0, which, free)
        return logits

    def filtered(self, scores: Tensor) -> Tensor:
        """Scores by temperature, with -inf for every token that is not kept."""
        return self.apply("filter", scores.float())

    def apply(self, kind: str, logits: Tensor) -> Tensor:
        """All that is active of this kind, in the order of its declaration."""
        rows = len(logits)
        seen, counts, step = self.seen[:rows], self.counts[:rows], self.value("step", rows)
        for name, limit in self.active.limits:
            effect: Effect | None = getattr(EFFECTS[name], kind)
            if effect:
                state = SamplerState(limit, step, self.stops, seen, counts)
                logits = effect(logits, self.value(name, rows), state)
        return logits

    def accept(self, ids: Tensor) -> None:
        """Take note of what was written."""
        active, rows = self.active, len(ids)
        if active.tracks("seen"):
            self.seen[:rows].scatter_(1, ids[:, None], True)
        if active.tracks("counts"):
            one = torch.ones_like(self.counts[:rows, :1])
            self.counts[:rows].scatter_add_(1, ids[:, None], one)
        for bans, which in self.banned if active.bans else []:
            self.states[which] = bans.next[self.states[which], ids[which]].long()
        self.value("step", rows).add_(1)

    def select(self, rows: Tensor) -> None:
        """Let row i be what row rows[i] was."""
        for kept in (self.seen, self.counts, self.states):
            kept.copy_(kept[rows])


def is_active(params: SamplingParams, name: str) -> bool:
    return getattr(params, name) not in (None, EFFECTS[name].off)


def effective(params: SamplingParams, name: str) -> Any:
    """The value of a parameter for a row; of filters in a row that is not sampled: none."""
    off = EFFECTS[name].off
    if EFFECTS[name].filter and params.likeliest_only():
        return off
    return off if getattr(params, name) is None else getattr(params, name)


def widest(device: torch.device) -> torch.dtype:
    """Sums over a vocabulary want more than single precision, where a device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def inverse_cdf(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """The token of each row at which the sum of the probabilities passes its number: (rows,)."""
    reached = probabilities.cumsum(dim=-1, dtype=numbers.dtype)
    # Scaled to the last sum, which rounding leaves a hair beside 1.
    ids = torch.searchsorted(reached, numbers * reached[:, -1:], right=True).squeeze(-1)
    return ids.clamp(max=probabilities.shape[-1] - 1)  # a model that has diverged has no last sum
