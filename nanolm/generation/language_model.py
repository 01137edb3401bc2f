"""A model with its tokenizer: text in, text out.

>>> language_model = load("runs/stories", note=print)
>>> language_model.generate("Once upon a time", seed=1)
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanolm.choice import Report
from nanolm.errors import NOT_FINITE, ModelError, UsageError
from nanolm.generation.batch import Batch, BatchRow, SampledToken
from nanolm.generation.beam_search import Beam, beam_search
from nanolm.generation.decoding import CachedDecoder, Decoder, first_visible
from nanolm.generation.sampler import Sampler
from nanolm.generation.sampling_params import SamplingParams
from nanolm.generation.transcript import Transcript
from nanolm.model.base import Model
from nanolm.model.huggingface import load_model, suppressed_tokens
from nanolm.model.seq2seq import Seq2Seq
from nanolm.runs.folder import find_adapter, find_named, model_tokenizer
from nanolm.text.tokenizer import Tokenizer

# Samples beyond MAX_BATCH_ROWS, or beyond a KV cache of this size (on a GPU, a quarter of the free
# memory), are generated in further batches.
KV_CACHE_BYTES = 1 << 30
MAX_BATCH_ROWS = 256


@dataclass
class Sample:
    """One completion of a prompt, as far as it has been generated."""

    prompt: str = ""
    number: int = 0  # among samples of the same prompt; each has its own random numbers
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the model, before any filter
    top: list[list[tuple[int, float]]] = field(default_factory=list)  # the most likely, likewise
    text: str = ""  # without the prompt and without a stop text
    stopped: str = ""  # "end" (of text), "stop" (text), "length" (maximum number of tokens)

    def add(self, token: SampledToken, piece: str, stopped: str) -> None:
        self.tokens.append(token.id)
        self.logprobs.append(token.logprob)
        if token.top:
            self.top.append(token.top)
        self.text += piece
        self.stopped = stopped


class TextBuilder:
    """Builds a text from tokens, and fills `sample` if there is one."""

    def __init__(self, sample: Sample | None, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.sample, self.params, self.tokenizer = sample, params, tokenizer
        self.transcript = Transcript(params.stop)
        self.count = 0
        self.stopped = ""  # as in `Sample`

    def add(self, token: SampledToken) -> str:
        """The text that is final now."""
        transcript = self.transcript
        self.count += 1
        enough = self.count >= self.params.min_tokens
        piece = transcript.add(self.tokenizer.tokens[token.id], heed_stops=enough)
        if transcript.stopped:
            self.stopped = "stop"
        elif token.id in self.tokenizer.stops:
            self.stopped = "end"
        elif self.count == self.params.tokens:
            self.stopped = "length"
        if self.stopped:
            piece += transcript.finish()
        if self.sample:
            self.sample.add(token, piece, self.stopped)
        return piece


@dataclass(frozen=True)
class LanguageModel:
    model: Model
    tokenizer: Tokenizer

    def generate(self, prompt: str = "", **params: Any) -> str:
        """The text that follows `prompt`; `params` are those of `SamplingParams`."""
        sample = Sample(prompt)
        list(self.stream([sample], SamplingParams(**params)))
        return sample.text

    def unseen(self, prompt: str) -> int:
        """The number of tokens at the beginning of a prompt that are beyond the context length."""
        return first_visible(len(self.tokenizer.encode_prompt(prompt)), self.model.window())

    def stream(
        self,
        samples: list[Sample],
        params: SamplingParams,
        top: int = 0,
        path: type[Decoder] = CachedDecoder,
        report: Report = lambda *how_far: None,
    ) -> Iterator[tuple[int, str]]:
        """Fill `samples` together, yielding (index, new text) once final: whole characters, and no
        beginning of a stop text. The `top` most likely tokens are kept at each step."""
        if problems := params.problems():
            raise UsageError("\n".join(problems))
        rows = [
            BatchRow(self.tokenizer.encode_prompt(sample.prompt), params, sample.number, top)
            for sample in samples
        ]
        # Not a generator itself, so that invalid parameters raise here.
        return self._parts(samples, rows, path, report)

    def _parts(
        self, samples: list[Sample], rows: list[BatchRow], path: type[Decoder], report: Report
    ) -> Iterator[tuple[int, str]]:
        done, total = 0, sum(row.params.tokens for row in rows)
        size = max_rows(self.model, longest(rows), MAX_BATCH_ROWS)
        with self.model.eval_mode():
            for first in range(0, len(samples), size):
                part = slice(first, first + size)
                write = partial(self._search, report) if rows[0].params.beams > 1 else self._write
                for row, text in write(path, samples[part], rows[part]):
                    yield first + row, text
                    done += 1
                    report("generating", done, total)

    def _write(
        self, path: type[Decoder], samples: list[Sample], rows: list[BatchRow]
    ) -> Iterator[tuple[int, str]]:
        device, left, length = self.model.device, len(rows), longest(rows)
        decoder, sampler = path(self.model, left, length), Sampler(self.tokenizer, left, device)
        # On a GPU always one size, since each size needs its own CUDA graph.
        batch = Batch(decoder, sampler, length, (left,) if device.type == "cuda" else ())
        builders = {
            row: (number, TextBuilder(sample, row.params, self.tokenizer))
            for number, (sample, row) in enumerate(zip(samples, rows, strict=True))
        }
        batch.join(rows)
        while left:
            for row, token in batch.step():
                number, builder = builders[row]
                if builder.stopped:
                    continue
                if math.isnan(token.logprob):
                    raise ModelError(NOT_FINITE)
                piece = builder.add(token)
                if builder.stopped:
                    batch.leave(row)
                    left -= 1
                yield number, piece

    def _search(
        self, report: Report, path: type[Decoder], samples: list[Sample], rows: list[BatchRow]
    ) -> Iterator[tuple[int, str]]:
        """Beam search, which yields each text only at the end."""
        known: dict[str, list[Beam]] = {}  # by prompt: several samples may have the same
        for number, (sample, row) in enumerate(zip(samples, rows, strict=True)):
            if sample.prompt not in known:
                decoder = path(self.model, row.params.beams, longest([row]))
                search = (decoder, self.tokenizer, [row.prompt], row.params, row.top)
                for ended in beam_search(*search, report=report):
                    known |= ((sample.prompt, beams) for _, beams in ended)
            beams = known[sample.prompt]
            builder = TextBuilder(sample, row.params, self.tokenizer)
            for token in beams[min(sample.number, len(beams) - 1)].tokens:
                if math.isnan(token.logprob):
                    raise ModelError(NOT_FINITE)
                builder.add(token)
            yield number, sample.text


def longest(rows: list[BatchRow]) -> int:
    return max((len(row.prompt) + row.params.tokens for row in rows), default=1)


def max_rows(model: Model | Seq2Seq, length: int, most: int) -> int:
    """The number of rows of this length that the KV cache may hold, at least 1."""
    room = KV_CACHE_BYTES
    if model.device.type == "cuda":
        room = torch.cuda.mem_get_info(model.device)[0] // 4
    return max(1, min(most, room // model.cache_bytes(length)))


def load(
    path: str | Path,
    note: Callable[[str], None],
    progress: Report = lambda *how_far: None,
    adapter: str | None = None,
) -> LanguageModel:
    """The model of a run, a checkpoint, a model folder of a known architecture, or hf://NAME. The
    LoRA `adapter` is merged into it."""
    return load_folder(find_named(path, note, progress), adapter)


def load_folder(folder: Path, adapter: str | None = None) -> LanguageModel:
    tokenizer = model_tokenizer(folder)  # first, since its errors are found sooner
    tokenizer.unseen = suppressed_tokens(folder, tokenizer.vocab_size)
    return LanguageModel(load_model(folder, adapter=find_adapter(adapter)), tokenizer)
