"""Log probabilities of the tokens of given texts, computed in batches.

    >>> texts = [ScoredText([5, 3, 8]), ScoredText([5, 9])]
    >>> for _ in score(model, texts): ...
    >>> texts[0].logprobs  # of 3 and 8

A text that exceeds the context is scored in windows, the last of which ends with the text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanolm.errors import NOT_FINITE, ModelError
from nanolm.model.base import Model

BATCH_TOKENS = {"cpu": 2048, "cuda": 65_536, "mps": 16_384}  # including padding
MOST_LOGITS = 1 << 22  # computed at a time, 4 bytes each


@dataclass
class ScoredText:
    ids: list[int]
    top: int = 0  # most likely tokens to find at each position

    def __post_init__(self) -> None:
        targets = len(self.ids) - 1  # the first token follows nothing
        self.logprobs = torch.zeros(targets)
        self.top_ids = torch.zeros(targets, self.top, dtype=torch.int32)
        self.top_logprobs = torch.zeros(targets, self.top)


@torch.inference_mode()
def score(model: Model, texts: Sequence[ScoredText], vocab_size: int) -> Iterator[int]:
    """Fill in the log probabilities, yielding after each batch the tokens scored so far. Only the
    first `vocab_size` tokens are among the most likely: some models pad their vocabulary."""
    most, total = BATCH_TOKENS[model.device.type], 0
    for batch in batches(texts, model.window(), most):
        ids = torch.zeros(len(batch), max(end - begin for begin, _, end, _ in batch)).long()
        for row, (begin, _, end, text) in zip(ids, batch, strict=True):
            row[: end - begin] = torch.tensor(text.ids[begin:end])
        seen = model.hidden_states(ids.to(model.device))  # (rows, time, dim)
        places = [slice(first - begin, end - begin) for begin, first, end, _ in batch]
        wanted = torch.cat([row[place] for row, place in zip(seen, places, strict=True)])
        targets = [id for _, first, end, text in batch for id in text.ids[first + 1 : end + 1]]
        found = evaluate_head(
            model, wanted, targets, max(text.top for *_, text in batch), vocab_size
        )
        done = 0
        for _, first, end, text in batch:
            here = slice(done, done := done + end - first)
            text.logprobs[first:end] = found[0][here]
            text.top_ids[first:end] = found[1][here, : text.top]
            text.top_logprobs[first:end] = found[2][here, : text.top]
        total += done
        yield total


def evaluate_head(
    model: Model, hidden: Tensor, targets: list[int], top: int, vocab_size: int
) -> list[Tensor]:
    """For vectors (time, dim): the log probabilities of the targets, and the `top` most likely
    tokens with theirs. Only some are computed at a time, since a vocabulary can be large."""
    size, parts = max(1, MOST_LOGITS // model.config.vocab_size), []
    ids = torch.tensor(targets, device=hidden.device)[:, None]
    for some, right in zip(hidden.split(size), ids.split(size), strict=True):
        logprobs = model.head(some).float().log_softmax(dim=-1)  # (time, vocabulary)
        likely = logprobs[:, :vocab_size].topk(top)
        parts.append((logprobs.gather(1, right)[:, 0], likely.indices.int(), likely.values))
    found = [torch.cat(part).cpu() for part in zip(*parts, strict=True)]
    if not found[0].isfinite().all():
        raise ModelError(NOT_FINITE)
    return found


Window = tuple[int, int, int, ScoredText]  # first input, first target to score, end, their text


def batches(texts: Sequence[ScoredText], window: int | None, most: int) -> Iterator[list[Window]]:
    """Windows of similar length together, up to `most` tokens with padding."""
    windows: list[Window] = []
    for text in texts:
        targets = len(text.ids) - 1
        size = window or max(1, targets)
        ends = [*range(size, targets, size), targets] if targets else []
        windows += [(max(0, end - size), at * size, end, text) for at, end in enumerate(ends)]
    windows.sort(key=lambda each: each[2] - each[0])
    batch: list[Window] = []
    for each in windows:
        if batch and (len(batch) + 1) * (each[2] - each[0]) > most:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch
