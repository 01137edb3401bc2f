"""From logits to the next token: penalties, bans, filters and the draw.

    >>> filtered(torch.tensor([[1.0, 2.0, 3.0]]), Knobs(top_k=1)).softmax(-1)
    tensor([[0., 0., 1.]])

Everything happens on the device of the logits, in tensors that stay where they are: nothing waits
for the CPU, and a CUDA graph can repeat it.
"""

import random

import numpy as np
import torch
from torch import Tensor

from nanolm.generation.bans import Bans
from nanolm.generation.knobs import Knobs
from nanolm.text.tokenizer import Tokenizer

BLOCK = 256  # random numbers of a row are made so many at a time


class Sampler:
    """Draws one token a row at every step."""

    def __init__(
        self,
        knobs: Knobs,
        tokenizer: Tokenizer,
        prompts: list[list[int]],
        numbers: list[int],
        device: torch.device,
        top: int = 0,
    ) -> None:
        """A row has the random numbers of its number, whatever is beside it."""
        self.knobs = knobs
        self.top = min(top, tokenizer.vocab_size)
        rows, self.vocab_size = len(prompts), tokenizer.vocab_size
        self.randoms = [random.Random(knobs.seed * 1_000_003 + number) for number in numbers]
        self.numbers = torch.zeros(rows, BLOCK, dtype=widest(device), device=device)
        self.step = torch.zeros((), dtype=torch.long, device=device)  # tokens drawn before
        self.steps = 0  # the same, without asking the device
        self.stops = torch.zeros(self.vocab_size, dtype=torch.bool, device=device)
        self.stops[sorted(tokenizer.stops)] = True
        self.seen: Tensor | None = None  # (rows, vocabulary): is it in the prompt or the text?
        if knobs.repetition_penalty != 1:
            self.seen = torch.zeros(rows, self.vocab_size, dtype=torch.bool, device=device)
            for row, ids in enumerate(prompts):
                self.seen[row, ids] = True
        self.written: Tensor | None = None  # (rows, vocabulary): how often in the text
        if knobs.frequency_penalty or knobs.presence_penalty:
            self.written = torch.zeros(rows, self.vocab_size, device=device)
        self.bans: Bans | None = None
        if knobs.ban:
            self.bans = Bans(knobs.ban, tokenizer, device)
            self.states = self.bans.after(prompts)  # (rows,)

    def prepare(self) -> None:
        """What has to be done on the CPU before a step."""
        if self.steps % BLOCK == 0 and not self.knobs.likeliest_only():
            drawn = [[source.random() for _ in range(BLOCK)] for source in self.randoms]
            self.numbers.copy_(torch.from_numpy(np.array(drawn)))
        self.steps += 1

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """From (rows, vocabulary) the ids, (rows,), and what is to be known of them, side by side:
        (rows, 2 + 2 * top), the id and its log-probability, the likeliest ids and theirs. They are
        the model's own, before any knob. Some models have spare rows that stand for no token.
        """
        logits = logits[:, : self.vocab_size]
        scores = self.scores(logits)
        if self.knobs.likeliest_only():
            ids = scores.argmax(dim=-1)
        else:
            number = self.numbers.gather(1, (self.step % BLOCK).expand(len(scores), 1))
            ids = drawn(filtered(scores, self.knobs).softmax(dim=-1), number)
        self.accept(ids)
        own = logits.log_softmax(dim=-1, dtype=torch.float32)
        parts = [ids[:, None], own.gather(1, ids[:, None])]
        if self.top:
            top = own.topk(self.top)
            parts += [top.indices, top.values]
        return ids, torch.cat([part.to(self.numbers.dtype) for part in parts], dim=1)

    def scores(self, logits: Tensor) -> Tensor:
        """Logits after penalties and bans."""
        knobs = self.knobs
        if self.seen is not None:
            penalty = knobs.repetition_penalty
            lower = torch.where(logits < 0, logits * penalty, logits / penalty)
            logits = torch.where(self.seen, lower, logits)
        if self.written is not None:
            often = knobs.frequency_penalty * self.written
            logits = logits - often - knobs.presence_penalty * (self.written > 0)
        if self.bans:
            logits = logits.masked_fill(self.bans.banned[self.states], -torch.inf)
        if knobs.min_tokens:
            early = self.stops & (self.step < knobs.min_tokens)
            logits = logits.masked_fill(early, -torch.inf)
        return logits

    def accept(self, ids: Tensor) -> None:
        """Take note of what was written."""
        if self.seen is not None:
            self.seen.scatter_(1, ids[:, None], True)
        if self.written is not None:
            self.written.scatter_add_(1, ids[:, None], torch.ones_like(self.written[:, :1]))
        if self.bans:
            self.states.copy_(self.bans.next[self.states, ids])  # (rows,)
        self.step += 1

    def select(self, rows: Tensor) -> None:
        """Let row i be what row rows[i] was."""
        for kept in (self.seen, self.written, self.states if self.bans else None):
            if kept is not None:
                kept.copy_(kept[rows])


def widest(device: torch.device) -> torch.dtype:
    """Sums over a vocabulary want more than single precision, where a device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def filtered(scores: Tensor, knobs: Knobs) -> Tensor:
    """Scores by temperature, with -inf for every token that is not kept."""
    scores = scores.float() / knobs.temperature
    wide = widest(scores.device)
    if knobs.top_k is not None:
        smallest = scores.topk(min(knobs.top_k, scores.shape[-1])).values[:, -1:]
        scores = scores.masked_fill(scores < smallest, -torch.inf)
    if knobs.top_p is not None:
        ordered, order = scores.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1, dtype=wide)
        before = probabilities.cumsum(dim=-1) - probabilities  # reached without this token
        dropped = torch.zeros_like(scores, dtype=torch.bool)
        dropped.scatter_(-1, order, before >= knobs.top_p)
        scores = scores.masked_fill(dropped, -torch.inf)
    if knobs.min_p is not None:
        probabilities = scores.softmax(dim=-1, dtype=wide)
        least = knobs.min_p * probabilities.amax(dim=-1, keepdim=True)
        scores = scores.masked_fill(probabilities < least, -torch.inf)
    return scores


def drawn(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """The token of each row at which the sum of the probabilities passes its number: (rows,)."""
    reached = probabilities.cumsum(dim=-1, dtype=numbers.dtype)
    # Scaled to the last sum, which rounding leaves a hair beside 1.
    ids = torch.searchsorted(reached, numbers * reached[:, -1:], right=True).squeeze(-1)
    return ids.clamp(max=probabilities.shape[-1] - 1)  # a model that has diverged has no last sum
