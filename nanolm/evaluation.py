"""Evaluates a model on a text: loss, perplexity, bits per byte and accuracy, in one pass.

    >>> evaluate(model, tokenizer, prepared.val, window=256, stride=128).bits_per_byte

Bits per byte divides by the bytes of the text, not by its tokens, so models with different
tokenizers are comparable. The markers between documents have no bytes and are not counted.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from nanolm.choice import Report
from nanolm.errors import NOT_FINITE, ModelError
from nanolm.generation.language_model import LanguageModel
from nanolm.machine import cache_folder
from nanolm.model.base import Model
from nanolm.text import mix
from nanolm.text.corpus import read_corpus
from nanolm.text.decoding import Reading
from nanolm.text.documents import plain_json
from nanolm.text.sources import find_sources
from nanolm.text.store import dropped_from, encode_corpus, mapped
from nanolm.text.tokenizer import Tokenizer
from nanolm.text.tokens import Store
from nanolm.training.distributed import ALONE, World

MOST_LOGITS = 1 << 24  # per batch, 4 bytes each
BLOCK = 1 << 20  # bytes to read at a time
CONTINUATION = bytes(range(0x80, 0xC0))  # every byte of a UTF-8 character except the first
# One token of a text; rank 1 is the most likely. A numpy type, because a text may have many.
SURPRISE = np.dtype([("id", "u4"), ("bits", "f4"), ("rank", "u4")])
Surprises = npt.NDArray[np.void]


@dataclass(frozen=True)
class Score:
    loss: float  # nats per token
    bits_per_byte: float
    bits_per_character: float
    tokens: int
    bytes: int
    characters: int
    window: int  # size of the windows, in tokens
    top_1_accuracy: float | None = None  # the actual token was the most likely one
    top_5_accuracy: float | None = None  # or among the top five; None if not requested
    # The first tokens one by one, including start of text at the beginning of each document.
    surprises: Surprises = field(default_factory=lambda: np.empty(0, SURPRISE), compare=False)
    # Bits per byte of each part of a mix.
    bits_by_part: dict[str, float] = field(default_factory=dict, compare=False)

    @property
    def perplexity(self) -> float:
        """As uncertain as a uniform choice among this many tokens."""
        return math.exp(min(self.loss, 700.0))  # e^710 overflows


def evaluate_texts(
    models: Sequence[tuple[LanguageModel, int]],
    names: tuple[str, ...],
    reading: Reading,
    device: str,
    report: Report,
    stride: int | None = None,
    keep: int = 0,
    full_windows: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> list[Score]:
    """Score the texts given by `names` with each model, in windows of the given size."""
    cache = cache_folder()
    sources = find_sources(names, cache, report, reading.encoding)
    for text in [*sources.notes, *plain_json(sources.files, reading)]:
        note(text)
    scores = []
    with read_corpus(sources, reading, cache, report) as corpus:
        # Count the first bytes of characters, without the markers before documents.
        blocks = (corpus.read(at, at + BLOCK) for at in range(0, corpus.length, BLOCK))
        characters = sum(len(block.translate(None, CONTINUATION)) for block in blocks)
        characters -= corpus.documents
        for each, window in models:
            model, tokenizer = each.model.to(device), each.tokenizer
            if dropped := dropped_from(corpus, tokenizer):
                note(dropped)
            with tempfile.TemporaryFile(dir=cache) as file:  # which a kill cannot leave behind
                encode_corpus(corpus, tokenizer, file, report)
                ids = mapped(file, tokenizer)
                score = evaluate(
                    *(model, tokenizer, ids, window, None, report, stride, True, keep),
                    full_windows=full_windows,
                )
                if not math.isfinite(score.loss):
                    raise ModelError(NOT_FINITE)
                # Per byte of the original text: some tokenizers add to it or lose parts of it.
                bits = score.loss * score.tokens / math.log(2)
                score = replace(score, bits_per_byte=bits / max(1, corpus.size))
                score = replace(score, bits_per_character=bits / max(1, characters))
                scores.append(replace(score, bytes=corpus.size, characters=characters))
                model.cpu()  # free memory for the next model
    return scores


def weighted_mean(parts: Sequence[mix.Part], scores: Sequence[Score]) -> Score:
    """The score of a mix: losses and bits are means by weight, the rest are sums."""
    return Score(
        loss=mix.mean(parts, [score.loss for score in scores]),
        bits_per_byte=mix.mean(parts, [score.bits_per_byte for score in scores]),
        bits_per_character=mix.mean(parts, [score.bits_per_character for score in scores]),
        tokens=sum(score.tokens for score in scores),
        bytes=sum(score.bytes for score in scores),
        characters=sum(score.characters for score in scores),
        window=scores[0].window,
        bits_by_part={p.name: s.bits_per_byte for p, s in zip(parts, scores, strict=True)},
    )


@torch.inference_mode()
def evaluate(
    model: Model,
    tokenizer: Tokenizer,
    ids: Store,
    window: int,
    limit: int | None = None,
    report: Report = lambda *how_far: None,
    stride: int | None = None,
    ranked: bool = False,
    keep: int = 0,
    world: World = ALONE,
    full_windows: bool = False,
) -> Score:
    """Score `ids` (or about `limit` tokens from all over it) in windows `stride` tokens apart;
    without a `stride`, windows do not overlap. With `full_windows`, the last one begins earlier, to
    have as much context as the others. With `ranked`, also computes the rank of each token
    among all predictions, and keeps the first `keep` tokens one by one. All processes of `world`
    share the work and get the same result, bit-identical to that of a single process."""
    characters_of = [len(token.translate(None, CONTINUATION)) for token in tokenizer.tokens]
    sizes = torch.from_numpy(np.stack([tokenizer.byte_lengths(), characters_of], axis=1))
    text = torch.zeros(2, dtype=torch.int64)  # bytes and characters
    counts = torch.zeros(3, dtype=torch.int64)  # tokens, top-1 hits, top-5 hits
    nats: dict[int, float] = {}  # by batch
    kept, room = [np.empty(0, SURPRISE)], keep
    every = -(-len(ids) // limit) if limit else 1
    with model.eval_mode():
        how = (window, stride or window, full_windows, ranked)
        parts = scored(model, ids, *how, report, every, world)
        for number, targets, losses, ranks in parts:
            counted = targets != tokenizer.start_of_text
            nats[number] = losses[counted].sum().item()
            counts[0] += counted.sum()
            text += sizes[targets].sum(dim=0)
            if ranks is None:
                continue
            counts[1:] += (ranks[counted, None] <= torch.tensor([1, 5])).sum(dim=0)
            part = np.empty(min(room, len(targets)), SURPRISE)
            bits = losses.abs() / math.log(2)  # abs turns -0.0, of a certain token, into 0.0
            for name, value in (("id", targets), ("bits", bits), ("rank", ranks)):
                part[name] = value[: len(part)].numpy()
            kept.append(part)
            room -= len(part)
    by_batch = torch.zeros(world.all_reduce_max(max(nats, default=-1) + 1), dtype=torch.float64)
    for number, total in nats.items():
        by_batch[number] = total
    # For each batch, all processes but one add zero, so nothing is rounded.
    world.all_reduce_sum(by_batch, counts, text)
    all_nats, (size, characters) = sum(by_batch.tolist()), text.tolist()
    tokens, top_1, top_5 = counts.tolist()
    all_bits, some = all_nats / math.log(2), max(1, tokens)
    return Score(
        loss=all_nats / some,
        bits_per_byte=all_bits / max(1, size),
        bits_per_character=all_bits / max(1, characters),
        tokens=tokens,
        bytes=size,
        characters=characters,
        window=window,
        top_1_accuracy=top_1 / some if ranked else None,
        top_5_accuracy=top_5 / some if ranked else None,
        surprises=np.concatenate(kept),
    )


def scored(
    model: Model,
    ids: Store,
    window: int,
    stride: int,
    full_windows: bool,
    ranked: bool,
    report: Report,
    every: int,
    world: World,
) -> Iterator[tuple[int, Tensor, Tensor, Tensor | None]]:
    """Yields (batch number, ids, nats, ranks) for each batch of windows, covering every token but
    the first, in order. With several processes, each one yields its own batches. A window starts
    every `stride` tokens and scores only new targets: the first window all of its targets, the
    others their last `stride`, with the rest as context. Only every `every`-th window is scored."""
    targets = len(ids) - 1
    window = max(1, min(window, targets))
    stride = min(stride, window)
    old = window - stride  # targets already scored by the previous window
    starts = range(0, targets - window + stride, stride)[::every]
    rows = max(1, MOST_LOGITS // (window * model.config.vocab_size))
    size = max(1, MOST_LOGITS // (rows * model.config.vocab_size))  # tokens of each row at a time
    for number, done in enumerate(range(0, len(starts), rows)):
        if number % world.size != world.rank:
            continue
        begin = np.array(starts[done : done + rows])[:, None]  # (rows, 1)
        scored_before = begin + old
        scored_before[: not done] = 0  # the very first window scores all of its targets
        if full_windows:
            begin = np.minimum(begin, targets - window)
        places = begin + np.arange(window + 1)  # (rows, window + 1)
        # The last window may reach beyond the text. By causality, the padding affects no score.
        part = torch.from_numpy(ids[np.minimum(places, targets)].astype(np.int64))
        new = torch.from_numpy((places > scored_before) & (places <= targets))[:, 1:]
        skip = old if done else 0
        x, y, new = part[:, :-1], part[:, 1 + skip :], new[:, skip:]
        seen = model.hidden_states(x.to(model.device))[:, skip:]  # (rows, time, dim)
        losses, ranks = [], []
        # A long window has more logits than fit in memory.
        for some, right in zip(seen.split(size, 1), y.to(seen.device).split(size, 1), strict=True):
            logits = model.head(some).float()  # (rows, time, vocabulary)
            nats = F.cross_entropy(logits.flatten(0, 1), right.flatten(), reduction="none")
            losses.append(nats.cpu().double().view_as(right))
            if ranked:  # 1 + the number of more likely tokens; last if the logit is NaN
                behind = ~(logits <= logits.gather(2, right[..., None]))
                ranks.append(1 + behind.sum(dim=2).cpu())
        rank = torch.cat(ranks, dim=1)[new] if ranked else None
        yield number, y[new], torch.cat(losses, dim=1)[new], rank
        report("evaluating", min(done + rows, len(starts)), len(starts))
