"""Beam search: the most likely whole text, found by extending several candidates at once.

Greedy decoding can miss the most likely text. Beam search keeps the best `beams` prefixes, extends
each with every token, and keeps the best of the results. Finished texts are scored by their mean
log probability. The search ends when no running beam can beat them. The rules are those of
`transformers` with a length penalty of 1.
"""

from dataclasses import dataclass, replace

import torch

from nanolm.choice import Report
from nanolm.generation.batch import BatchRow, SampledToken
from nanolm.generation.decoding import Decoder
from nanolm.generation.sampler import Sampler
from nanolm.generation.sampling_params import SamplingParams
from nanolm.generation.transcript import Transcript
from nanolm.text.tokenizer import Tokenizer

EXCLUDED_SCORE = -1e9


@dataclass(frozen=True)
class Beam:
    score: float  # its log probability after penalties
    tokens: tuple[SampledToken, ...] = ()

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def mean(self) -> float:
        return self.score / len(self.tokens)


@torch.inference_mode()
def beam_search(
    decoder: Decoder, tokenizer: Tokenizer, row: BatchRow, report: Report = lambda *how_far: None
) -> list[Beam]:
    """The best `row.params.beams` completions of the prompt, the best first."""
    prompt, params, device = row.prompt, row.params, decoder.model.device
    width, vocabulary = params.beams, tokenizer.vocab_size
    sampler = Sampler(tokenizer, width, device)
    for beam in range(width):
        sampler.begin(beam, params, prompt)
    ids = torch.zeros(width, len(prompt) + params.tokens, dtype=torch.long, device=device)
    ids[:, : len(prompt)] = torch.tensor(prompt)
    # All rows begin with the same text, so only the first may be extended.
    running = [Beam(0.0), *[Beam(EXCLUDED_SCORE)] * (width - 1)]
    finished: list[Beam] = []
    for step in range(params.tokens):
        length = len(prompt) + step
        decoder.prepare(ids, [length] * width)
        logits = decoder.logits(ids, torch.full((width,), length, device=device))
        own = logits[:, :vocabulary].float().log_softmax(dim=-1)  # (beams, vocabulary)
        scores = torch.tensor([[beam.score] for beam in running], device=device)
        together = (scores + sampler.scores(own)).flatten()
        # Enough that `width` remain if every candidate that can end does.
        endings = len(tokenizer.stops) + (width if params.stop else 0)
        best = together.topk(min((endings + 1) * width, len(together)))
        top = own.topk(min(row.top, vocabulary))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        likely = [list(zip(*pair, strict=True)) for pair in pairs]
        going: list[tuple[int, Beam]] = []  # source row, and the extended beam
        columns = (best.values, best.indices, own.flatten()[best.indices])
        chosen = zip(*(column.tolist() for column in columns), strict=True)
        for rank, (score, place, logprob) in enumerate(chosen):
            source, id = divmod(place, vocabulary)
            token = SampledToken(id, logprob, likely[source])
            after = Beam(score, (*running[source].tokens, token))
            ended = id in tokenizer.stops or step == params.tokens - 1
            if ended or stopped(after, params, tokenizer):
                if rank < width:
                    finished.append(after)
            elif len(going) < width:
                going.append((source, after))
        finished = sorted(finished, key=Beam.mean, reverse=True)[:width]
        if not going or (len(finished) == width and going[0][1].mean() <= finished[-1].mean()):
            break
        source, first = going[0]  # fill up with copies that cannot win
        going += [(source, replace(first, score=EXCLUDED_SCORE))] * (width - len(going))
        running = [beam for _, beam in going]
        from_rows = torch.tensor([source for source, _ in going], device=device)
        for part in (decoder, sampler):
            part.select(from_rows)
        ids.copy_(ids[from_rows])
        ids[:, length] = torch.tensor([beam.tokens[-1].id for beam in running], device=device)
        sampler.accept(ids[:, length])
        report("searching", step + 1, params.tokens)
    return finished


def stopped(beam: Beam, params: SamplingParams, tokenizer: Tokenizer) -> bool:
    transcript = Transcript(params.stop)
    for count, id in enumerate(beam.ids if params.stop else [], start=1):
        transcript.add(tokenizer.tokens[id], heed_stops=count >= params.min_tokens)
    return transcript.stopped
