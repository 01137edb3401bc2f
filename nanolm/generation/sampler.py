"""From logits to the next token: penalties, bans, filters and the draw.

    >>> sampler = Sampler(tokenizer, rows=2, device=device)
    >>> sampler.begin(0, SamplingParams(top_k=1), prompt)
    >>> sampler.begin(1, SamplingParams(temperature=1.2, seed=7), other_prompt)
    >>> sampler.draw(logits)  # (2, vocabulary)

Each row has params of its own. Everything happens on the device of the logits, in tensors that stay
where they are: nothing waits for the CPU, and a CUDA graph can repeat it.
"""

import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanolm.generation.banned_texts import BannedTexts
from nanolm.generation.sampling_params import SamplingParams
from nanolm.text.tokenizer import Tokenizer

RANDOM_BLOCK = 256  # random numbers of a row are made so many at a time
COLUMNS = (  # what is kept of the params and the state of each row, side by side
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "min_tokens",
    "greedy",
    "step",  # tokens drawn before
)
TOP_SIZES = (0, 1, 6, 20, 100)  # as many as are kept are rounded up, or each would be a graph


class ActiveFilters(NamedTuple):
    """Which params are turned in any row: what a step has to do, and what a recorded one does."""

    drawn: bool = False  # by chance, in some rows
    greedy: bool = False  # the likeliest, in some rows
    top_k: int = 0  # at least the largest; 0: none
    top_p: bool = False
    min_p: bool = False
    repetition: bool = False
    counts: bool = False  # by how often it was written
    min_tokens: bool = False
    bans: int = 0  # a number for which rows have which; 0: none
    top: int = 0  # likeliest tokens to be told


class Sampler:
    """Draws one token a row at every step."""

    def __init__(self, tokenizer: Tokenizer, rows: int, device: torch.device) -> None:
        self.tokenizer, self.vocab_size = tokenizer, tokenizer.vocab_size
        self.rows = rows
        wide = widest(device)
        self.params: list[SamplingParams | None] = [None] * rows  # None: nothing is written there
        self.tops = [0] * rows
        self.sources = [random.Random(0) for _ in range(rows)]
        self.steps = [0] * rows  # tokens drawn before
        self.numbers = torch.zeros(rows, RANDOM_BLOCK, dtype=wide, device=device)
        self.values = torch.ones(rows, len(COLUMNS), dtype=wide, device=device)
        self.stops = torch.zeros(self.vocab_size, dtype=torch.bool, device=device)
        self.stops[sorted(tokenizer.stops)] = True
        self.suppressed: Tensor | None = None  # (vocabulary,)
        if tokenizer.unseen:
            self.suppressed = torch.zeros_like(self.stops)
            self.suppressed[sorted(tokenizer.unseen)] = True
        self.seen: Tensor | None = None  # (rows, vocabulary): is it in the prompt or the text?
        self.written: Tensor | None = None  # (rows, vocabulary): how often in the text
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
        own = {"temperature": 1.0} if params.likeliest_only() else {}  # it is not asked for
        neutral = {"top_k": self.vocab_size, "top_p": 1.0, "min_p": 0.0}
        values = [own.get(name, getattr(params, name)) for name in COLUMNS[:-2]]
        pairs = zip(COLUMNS[:-2], values, strict=True)
        values = [neutral[name] if value is None else value for name, value in pairs]
        values[1] = min(values[1], self.vocab_size)
        # The last two are no params: whether to be greedy, and how much was drawn before.
        values += [params.likeliest_only(), 0]
        self.values[row] = torch.tensor(values, dtype=self.values.dtype).to(device)
        if params.repetition_penalty != 1:
            if self.seen is None:
                shape = (self.rows, self.vocab_size)
                self.seen = torch.zeros(shape, dtype=torch.bool, device=device)
            self.seen[row] = False
            self.seen[row, torch.tensor(prompt, device=device)] = True
        if params.frequency_penalty or params.presence_penalty:
            if self.written is None:
                self.written = torch.zeros(self.rows, self.vocab_size, device=device)
            self.written[row] = 0
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
        for kept in (self.numbers, self.values, self.states):
            kept[target] = kept[source]
        for table in (self.seen, self.written):
            if table is not None:
                table[target] = table[source]
        lists: tuple[list[Any], ...] = (self.params, self.tops, self.sources, self.steps)
        for each in lists:
            each[target] = each[source]
        self.end(source)

    @property
    def turned(self) -> ActiveFilters:
        if self.known is None:
            self.known = self.see()
        return self.known

    def see(self) -> ActiveFilters:
        """Which params are turned now; bans that are no more are forgotten."""
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
        drawn = [params for params in used if not params.likeliest_only()]
        most = max((min(k.top_k or 0, self.vocab_size) for k in drawn), default=0)
        top = next((step for step in TOP_SIZES if step >= max(self.tops)), max(self.tops))
        return ActiveFilters(
            drawn=bool(drawn),
            greedy=len(drawn) < len(used),
            # A power of two, or each would be a step of its own.
            top_k=min(1 << (most - 1).bit_length(), self.vocab_size) if most else 0,
            top_p=any(params.top_p is not None for params in drawn),
            min_p=any(params.min_p is not None for params in drawn),
            repetition=any(params.repetition_penalty != 1 for params in used),
            counts=any(params.frequency_penalty or params.presence_penalty for params in used),
            min_tokens=any(params.min_tokens for params in used),
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

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """From (rows, vocabulary) the ids, (rows,), and what is to be known of them, side by side:
        (rows, 2 + 2 * top), the id and its log-probability, the likeliest ids and theirs. They are
        the model's own, before any knob. Some models have spare rows that stand for no token.
        """
        turned, rows = self.turned, len(logits)
        logits = logits[:, : self.vocab_size]
        scores = self.scores(logits)
        if turned.drawn:
            number = self.numbers[:rows].gather(1, self.value("step", rows).long() % RANDOM_BLOCK)
            ids = drawn(self.filtered(scores).softmax(dim=-1), number)
            if turned.greedy:
                greedy = self.value("greedy", rows)[:, 0] > 0
                ids = torch.where(greedy, scores.argmax(dim=-1), ids)
        else:
            ids = scores.argmax(dim=-1)
        self.accept(ids)
        own = logits.log_softmax(dim=-1, dtype=torch.float32)
        parts = [ids[:, None], own.gather(1, ids[:, None])]
        if turned.top:
            top = own.topk(turned.top)
            parts += [top.indices, top.values]
        return ids, torch.cat([part.to(self.numbers.dtype) for part in parts], dim=1)

    def value(self, name: str, rows: int) -> Tensor:
        """A knob of each row: (rows, 1)."""
        column = COLUMNS.index(name)
        return self.values[:rows, column : column + 1]

    def scores(self, logits: Tensor) -> Tensor:
        """Logits after penalties and bans."""
        turned, rows = self.turned, len(logits)
        if self.suppressed is not None:
            logits = logits.masked_fill(self.suppressed, -torch.inf)
        if turned.repetition:
            assert self.seen is not None
            logits, penalty = logits.float(), self.value("repetition_penalty", rows).float()
            lower = torch.where(logits < 0, logits * penalty, logits / penalty)
            logits = torch.where(self.seen[:rows], lower, logits)
        if turned.counts:
            assert self.written is not None
            written = self.written[:rows]
            logits = logits - self.value("frequency_penalty", rows).float() * written
            logits = logits - self.value("presence_penalty", rows).float() * (written > 0)
        for bans, which in self.banned if turned.bans else []:
            free = logits[which].masked_fill(bans.banned[self.states[which]], -torch.inf)
            logits = logits.index_copy(0, which, free)
        if turned.min_tokens:
            early = self.value("step", rows) < self.value("min_tokens", rows)
            logits = logits.masked_fill(self.stops & early, -torch.inf)
        return logits

    def filtered(self, scores: Tensor) -> Tensor:
        """Scores by temperature, with -inf for every token that is not kept."""
        turned, rows = self.turned, len(scores)
        scores = scores.float() / self.value("temperature", rows).float()
        wide = self.values.dtype
        if turned.top_k:
            largest = scores.topk(turned.top_k).values
            last = self.value("top_k", rows).long() - 1  # of a row that keeps all: beyond
            smallest = largest.gather(1, last.clamp(max=turned.top_k - 1))
            dropped = (scores < smallest) & (last < turned.top_k)
            scores = scores.masked_fill(dropped, -torch.inf)
        if turned.top_p:
            ordered, order = scores.sort(dim=-1, descending=True)
            probabilities = ordered.softmax(dim=-1, dtype=wide)
            before = probabilities.cumsum(dim=-1) - probabilities  # reached without this token
            enough = self.value("top_p", rows)
            dropped = torch.zeros_like(scores, dtype=torch.bool)
            dropped.scatter_(-1, order, (before >= enough) & (enough < 1))
            scores = scores.masked_fill(dropped, -torch.inf)
        if turned.min_p:
            probabilities = scores.softmax(dim=-1, dtype=wide)
            least = self.value("min_p", rows) * probabilities.amax(dim=-1, keepdim=True)
            scores = scores.masked_fill(probabilities < least, -torch.inf)
        return scores

    def accept(self, ids: Tensor) -> None:
        """Take note of what was written."""
        turned, rows = self.turned, len(ids)
        if turned.repetition:
            assert self.seen is not None
            self.seen[:rows].scatter_(1, ids[:, None], True)
        if turned.counts:
            assert self.written is not None
            one = torch.ones_like(self.written[:rows, :1])
            self.written[:rows].scatter_add_(1, ids[:, None], one)
        for bans, which in self.banned if turned.bans else []:
            self.states[which] = bans.next[self.states[which], ids[which]].long()
        self.value("step", rows).add_(1)

    def select(self, rows: Tensor) -> None:
        """Let row i be what row rows[i] was."""
        for kept in (self.seen, self.written, self.states):
            if kept is not None:
                kept.copy_(kept[rows])


def widest(device: torch.device) -> torch.dtype:
    """Sums over a vocabulary want more than single precision, where a device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def drawn(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """The token of each row at which the sum of the probabilities passes its number: (rows,)."""
    reached = probabilities.cumsum(dim=-1, dtype=numbers.dtype)
    # Scaled to the last sum, which rounding leaves a hair beside 1.
    ids = torch.searchsorted(reached, numbers * reached[:, -1:], right=True).squeeze(-1)
    return ids.clamp(max=probabilities.shape[-1] - 1)  # a model that has diverged has no last sum
