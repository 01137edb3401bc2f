"""A model with its tokenizer: text in, text out, piece by piece.

    >>> language_model = load("runs/stories", note=print)
    >>> language_model.generate("Once upon a time", seed=1)

Each new token needs only its own row of the network, since the keys and values of the tokens
behind are kept (`Cached`). `Naive` computes everything anew each time: slow, obvious, and what
the tests hold the cache to.
"""

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanolm.choice import Report
from nanolm.download import HUB
from nanolm.errors import UsageError
from nanolm.generation.knobs import Knobs
from nanolm.generation.sampler import Sampler
from nanolm.model.base import Model
from nanolm.model.huggingface import load_model
from nanolm.runs.folder import find_model, find_or_download, model_tokenizer
from nanolm.text.tokenizer import Tokenizer


def first_visible(length: int, context: int | None) -> int:
    """The first of `length` tokens that the model still sees.

    All of them while they fit, as they always do in a recurrent model (None). Past that, the
    window moves on by half a context at a time, so that the cache is filled anew once every half
    context instead of at every token.
    """
    if context is None:
        return 0
    hop = max(1, context // 2)
    return -(-max(0, length - context) // hop) * hop


class Naive:
    """Logits of the next token by running the whole visible text through the model."""

    def __init__(self, model: Model, batch: int, length: int) -> None:
        self.model = model

    def next_logits(self, ids: Tensor) -> Tensor:
        start = first_visible(ids.shape[1], self.model.window())
        logits: Tensor = self.model(ids[:, start:])  # (batch, time, vocabulary)
        return logits[:, -1]


class Cached:
    """The same logits, computing only what is new since the last call."""

    def __init__(self, model: Model, batch: int, length: int) -> None:
        self.model = model
        self.memory = model.remember(batch, length)
        self.start = 0

    def next_logits(self, ids: Tensor) -> Tensor:
        start = first_visible(ids.shape[1], self.model.window())
        if start != self.start:
            self.start = start
            self.memory.forget()
        logits: Tensor = self.model(ids[:, start + self.memory.length :], self.memory)
        return logits[:, -1]


@dataclass
class Sample:
    """One continuation of the prompt, as far as it has been written."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # by the model itself, before any filter
    text: str = ""
    stopped: str = ""  # "end" (of text) or "length" (as many tokens as asked for)


@dataclass(frozen=True)
class LanguageModel:
    """What `nanolm.load` gives."""

    model: Model
    tokenizer: Tokenizer

    def generate(self, prompt: str = "", **knobs: Any) -> str:
        """The text that follows `prompt`; `knobs` are those of `Knobs`."""
        samples = [Sample()]
        for _ in self.stream(prompt, Knobs(**knobs), samples):
            pass
        return samples[0].text

    def stream(
        self,
        prompt: str,
        knobs: Knobs,
        samples: list[Sample],
        path: Callable[[Model, int, int], Naive | Cached] = Cached,
    ) -> Iterator[tuple[int, str]]:
        """Fill `samples` together, giving (number of the sample, new text) as it comes.

        A character whose bytes span several tokens is given when its last byte is there.
        """
        if problems := knobs.problems():
            raise UsageError("\n".join(problems))
        prompt_ids = self.tokenizer.encode_prompt(prompt)
        return self._write(prompt_ids, knobs, samples, path)  # mistakes are told before it runs

    def _write(
        self,
        prompt_ids: list[int],
        knobs: Knobs,
        samples: list[Sample],
        path: Callable[[Model, int, int], Naive | Cached],
    ) -> Iterator[tuple[int, str]]:
        rows = len(samples)
        start = len(prompt_ids)
        device = self.model.head.weight.device
        ids = torch.zeros(rows, start + knobs.tokens, dtype=torch.long, device=device)
        ids[:, :start] = torch.tensor(prompt_ids, device=device)
        decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in samples]
        sampler = Sampler(knobs, rows)
        network = path(self.model, rows, start + knobs.tokens)
        was_training = self.model.training
        self.model.eval()
        try:
            for position in range(start, start + knobs.tokens):
                with torch.inference_mode():
                    logits = network.next_logits(ids[:, :position])  # (rows, vocabulary)
                    logits = logits[:, : self.tokenizer.vocab_size]  # some models have spare rows
                    drawn = sampler.draw(logits)  # (rows,)
                    chances = logits.float().log_softmax(dim=-1).gather(1, drawn[:, None])
                    ids[:, position] = drawn
                last = position == start + knobs.tokens - 1
                for row, (sample, id) in enumerate(zip(samples, drawn.tolist(), strict=True)):
                    if sample.stopped:
                        continue
                    sample.tokens.append(id)
                    sample.logprobs.append(chances[row].item())
                    if id in self.tokenizer.stops:
                        sample.stopped = "end"
                    elif last:
                        sample.stopped = "length"
                    piece = decoders[row].decode(self.tokenizer.tokens[id], bool(sample.stopped))
                    sample.text += piece
                    yield row, piece
                if all(sample.stopped for sample in samples):
                    return
        finally:
            self.model.train(was_training)


def load(
    path: str | Path, note: Callable[[str], None], progress: Report = lambda *how_far: None
) -> LanguageModel:
    """The model in a run folder, a checkpoint or any model folder of a known family, or hf://."""
    if str(path).startswith(HUB):
        folder = find_or_download(str(path), note, progress)
    else:
        folder = find_model(path, note)
    tokenizer = model_tokenizer(folder)  # first, since it is told sooner what is wrong with it
    return LanguageModel(load_model(folder), tokenizer)
