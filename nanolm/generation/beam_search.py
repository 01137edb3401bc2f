"""Beam search: the most likely whole text, found by extending several candidates at once.

Greedy decoding can miss the most likely text. Beam search keeps the best `beams` prefixes, extends
each with every token, and keeps the best of the results. Finished texts are scored by their log
probability divided by their length (to the power of the length penalty). The search ends when no
running beam can beat them. The rules are those of `transformers`.

Many prompts are searched at once, and none influences another. With one beam, the sampler chooses
the only candidate, which is greedy decoding or sampling.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanolm.choice import Report
from nanolm.generation.batch import SampledToken
from nanolm.generation.decoding import Decoder
from nanolm.generation.sampler import Sampler
from nanolm.generation.sampling_params import SamplingParams
from nanolm.generation.transcript import Transcript
from nanolm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Beam:
    score: float  # its log probability after penalties, divided by a power of its length
    tokens: tuple[SampledToken, ...]

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


@torch.inference_mode()
def beam_search(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    params: SamplingParams,
    top: int = 0,
    length_penalty: float = 1.0,
    best: int | None = None,
    report: Report = lambda *how_far: None,
) -> Iterator[list[tuple[int, list[Beam]]]]:
    """After each step, the prompts whose searches have ended: the index of each with its `best`
    completions, or all of them, the best first. All prompts have the same length. Beam b of prompt
    n is row n * beams + b of `decoder`. The `top` most likely tokens are kept at each step."""
    search = BeamSearch(decoder, tokenizer, prompts, params, top, length_penalty)
    for step in range(params.tokens):
        search.extend(step)
        report("searching", step + 1, params.tokens)
        last = step == params.tokens - 1
        done: list[bool] = search.done.tolist()  # the only device sync of a step
        if last or 2 * sum(done) >= len(done):
            ready = [n for n, ended in enumerate(done) if ended or last]
            yield list(search.results(ready, best))
            running = [n for n, ended in enumerate(done) if not ended and not last]
            if not running:
                return
            search.keep(running)
        else:
            yield []


class BeamSearch:
    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        prompts: list[list[int]],
        params: SamplingParams,
        top: int,
        length_penalty: float,
    ) -> None:
        device, width = decoder.model.device, params.beams
        self.decoder, self.tokenizer, self.params = decoder, tokenizer, params
        self.top, self.length_penalty = min(top, tokenizer.vocab_size), length_penalty
        self.sampler = Sampler(tokenizer, len(prompts) * width, device)
        for row in range(len(prompts) * width):
            self.sampler.begin(row, params, prompts[row // width])
        self.stops = torch.tensor(sorted(tokenizer.stops), device=device)
        self.prompts = list(range(len(prompts)))  # the index of each prompt still searched
        shape = (len(prompts), width)
        # The prompts and the tokens so far, (prompts, beams, time).
        self.ids = torch.tensor(prompts, device=device)[:, None].repeat(1, width, 1)
        # For each token of the running beams: the id, its log probability, the `top` most likely
        # ids, and their log probabilities. The same for the finished ones.
        self.written = torch.zeros(*shape, 0, 2 + 2 * self.top, device=device)
        self.finished = self.written.clone()
        self.lengths = torch.zeros(shape, dtype=torch.long, device=device)  # of the finished
        self.finished_scores = torch.full(shape, -math.inf, device=device)
        # All beams begin with the same text, so only the first may be extended.
        self.scores = self.finished_scores.clone()
        self.scores[:, 0] = 0
        self.done = torch.zeros(len(prompts), dtype=torch.bool, device=device)

    def extend(self, step: int) -> None:
        """Add a token to every beam."""
        count, width = self.scores.shape
        power = (step + 1) ** self.length_penalty
        scores, parents, tokens, entries = self.candidates()  # (prompts, candidates) each
        # (prompts, candidates, tokens, 2 + 2 * top)
        texts = torch.cat([gather(self.written, parents), entries[:, :, None]], dim=2)
        ended = torch.isin(tokens, self.stops) | (step == self.params.tokens - 1)
        if self.params.stop:
            ended |= self.stopped(texts[..., 0])

        # The rest are only there so that enough beams remain if the first ones have ended.
        ending = ended & ~self.done[:, None]
        ending[:, width:] = False
        final_scores = (scores / power).masked_fill(~ending, -math.inf)
        best = torch.cat([self.finished_scores, final_scores], dim=1).topk(width)
        self.finished_scores = best.values
        finished = torch.cat([F.pad(self.finished, (0, 0, 0, 1)), texts], dim=1)
        self.finished = gather(finished, best.indices)
        lengths = torch.cat([self.lengths, torch.full_like(tokens, step + 1)], dim=1)
        self.lengths = lengths.gather(1, best.indices)

        going = scores.masked_fill(ended, -math.inf).topk(width)
        self.scores, self.written = going.values, gather(texts, going.indices)
        parents, tokens = (each.gather(1, going.indices) for each in (parents, tokens))
        self.ids = torch.cat([gather(self.ids, parents), tokens[..., None]], dim=2)
        self.done |= self.scores[:, 0] / power <= self.finished_scores[:, -1]
        if width > 1:
            first_rows = width * torch.arange(count, device=parents.device)
            rows = (parents + first_rows[:, None]).flatten()
            self.decoder.select(rows)
            self.sampler.select(rows)
            self.sampler.accept(tokens.flatten())

    def candidates(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The best extensions of all beams of each prompt: scores, beams and tokens, (prompts,
        candidates) each, and their entries in `written`."""
        count, width = self.scores.shape
        ids, vocabulary = self.ids.flatten(0, 1), self.tokenizer.vocab_size
        rows, length = ids.shape
        self.decoder.prepare(ids, [length] * rows)
        logits = self.decoder.logits(ids, torch.full((rows,), length, device=ids.device))
        own = logits[:, :vocabulary].float().log_softmax(dim=-1)  # (rows, vocabulary)
        if width == 1:
            self.sampler.prepare(count)
            tokens = self.sampler.sample(logits)[0][:, None]
            parents = torch.zeros_like(tokens)
            scores = self.scores + own.gather(1, tokens)
        else:
            penalized = self.scores.flatten()[:, None] + self.sampler.scores(own)
            # Enough that `width` remain if every candidate that can end does.
            endings = len(self.stops) + (width if self.params.stop else 0)
            best = penalized.view(count, -1).topk(min((endings + 1) * width, width * vocabulary))
            scores, parents = best.values, best.indices // vocabulary
            tokens = best.indices % vocabulary
        parts = [tokens[..., None], gather(own.view(count, width, -1), parents, tokens)[..., None]]
        if self.top:
            likely = own.view(count, width, -1).topk(self.top)
            parts += [gather(likely.indices, parents), gather(likely.values, parents)]
        return scores, parents, tokens, torch.cat([part.float() for part in parts], dim=-1)

    def stopped(self, texts: Tensor) -> Tensor:
        """Whether each text, as ids (prompts, candidates, tokens), contains a stop text."""
        found = [[self.has_stop(ids) for ids in each] for each in texts.long().tolist()]
        return torch.tensor(found, device=texts.device)

    def has_stop(self, ids: list[int]) -> bool:
        transcript = Transcript(self.params.stop)
        for count, id in enumerate(ids, start=1):
            heed_stops = count >= self.params.min_tokens
            transcript.add(self.tokenizer.tokens[id], heed_stops)
        return transcript.stopped

    def results(self, which: list[int], best: int | None) -> Iterator[tuple[int, list[Beam]]]:
        rows = torch.tensor(which, device=self.done.device)
        parts = (self.finished_scores, self.lengths, self.finished)
        each = zip(*(part[rows, :best].tolist() for part in parts), strict=True)
        for n, (scores, lengths, texts) in zip(which, each, strict=True):
            beams = [
                Beam(score, tuple(sampled(token) for token in text[:length]))
                for score, length, text in zip(scores, lengths, texts, strict=True)
                if score != -math.inf
            ]
            yield self.prompts[n], beams

    def keep(self, which: list[int]) -> None:
        """Continue with these prompts only."""
        kept, width = torch.tensor(which, device=self.done.device), self.scores.shape[1]
        rows = kept[:, None] * width + torch.arange(width, device=kept.device)
        self.decoder.keep(rows.flatten())
        self.sampler.select(rows.flatten())
        self.prompts = [self.prompts[n] for n in which]
        for name in ("ids", "written", "finished", "lengths", "finished_scores", "scores", "done"):
            setattr(self, name, getattr(self, name)[kept])


def gather(values: Tensor, *indices: Tensor) -> Tensor:
    """values[n, indices[0][n, i], ...] for each n and i."""
    first = torch.arange(len(values), device=values.device)[:, None]
    return values[first, *indices]


def sampled(entry: list[float]) -> SampledToken:
    id, logprob, *top = entry
    half = len(top) // 2
    likely = zip(map(int, top[:half]), top[half:], strict=True)
    return SampledToken(int(id), logprob, list(likely))
