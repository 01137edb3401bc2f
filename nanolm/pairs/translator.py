"""A sequence-to-sequence model with its tokenizers: a source text in, a target text out.

    >>> translator = Translator.load("runs/de-en", note=print)
    >>> translator.translate("Ein Hund bellt.").text

Sources of similar length are translated together; the result of one does not depend on the others.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self, overload

import regex
import torch
from torch import Tensor

from nanolm.choice import Report
from nanolm.errors import NOT_FINITE, ModelError, refuse
from nanolm.generation.beam_search import Beam, beam_search
from nanolm.generation.decoding import Seq2SeqDecoder
from nanolm.generation.language_model import max_rows
from nanolm.generation.sampling_params import SamplingParams
from nanolm.generation.transcript import token_name
from nanolm.model.device import choose_device, choose_dtype, use_fitting_threads
from nanolm.model.huggingface import BEAMS, load_seq2seq, suppressed_tokens
from nanolm.model.seq2seq import Memory, Seq2Seq
from nanolm.runs.folder import find_named, model_tokenizers
from nanolm.text.tokenizer import Tokenizer

BATCH_TOKENS = {"cpu": 8192, "cuda": 131_072, "mps": 32_768}  # of the sources, for each beam
SENTENCE_END = regex.compile(
    r"\p{STerm}+[\p{Pe}\p{Pf}\"']*\s+|[\u3002\uff01\uff1f]+[\p{Pe}\p{Pf}]*|\n\s*"
)
TOKEN_CHARACTERS = 16  # at most this many characters per token in a part of a long input


@dataclass(frozen=True)
class TranslateParams:
    """Beam search by default, greedy decoding with one beam, sampling with a temperature."""

    beams: int = BEAMS
    length_penalty: float = 1.0  # 0 compares log probabilities, 1 their mean over the tokens
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    max_tokens: int | None = None  # the model's context length unless given, and at most that
    batch: int | None = None  # sources that are translated together; by their length unless given

    @property
    def samples(self) -> bool:
        return (self.temperature, self.top_k, self.top_p) != (None, None, None)

    def sampling(self, tokens: int) -> SamplingParams:
        return SamplingParams(
            tokens=tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            greedy=not self.samples,
            beams=1 if self.samples else self.beams,
            seed=self.seed,
        )

    def problems(self) -> list[str]:
        sampling = self.sampling(1 if self.max_tokens is None else self.max_tokens)
        found = replace(sampling, beams=self.beams).problems()
        found = [problem.replace("--tokens", "--max-tokens") for problem in found]
        if not abs(self.length_penalty) <= 10:
            found.append(f"--length-penalty {self.length_penalty}: must be from -10 to 10")
        if self.batch is not None and self.batch < 1:
            found.append(f"--batch {self.batch}: must be 1 or more")
        return found


@dataclass(frozen=True)
class Translation:
    source: str
    text: str
    score: float  # the log probability divided by a power of the number of tokens; 0 at best
    tokens: list[int]
    notes: list[str] = field(default_factory=list)
    parts: list[tuple[str, list[int]]] = field(default_factory=list)  # sources with their tokens

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Alignment:
    """How much each target token attended to each source token when it was predicted."""

    source_tokens: list[str]
    target_tokens: list[str]
    weights: list[Tensor]  # (heads, target, source) for each layer; empty without attention

    def mean(self) -> list[list[float]]:
        """The mean of all heads, (target, source)."""
        average: list[list[float]] = torch.cat(self.weights).mean(dim=0).tolist()
        return average


@dataclass(frozen=True)
class Translator:
    """The result of `nanolm.load` for a sequence-to-sequence model."""

    model: Seq2Seq
    tokenizer: Tokenizer  # of the target, and of the source unless there is another
    source_tokenizer: Tokenizer | None = None

    @classmethod
    def load(
        cls, path: str | Path, note: Callable[[str], None], progress: Report = lambda *how_far: None
    ) -> Self:
        """The model of a run, a checkpoint, a model folder of a known architecture, or hf://NAME."""
        return cls.load_folder(find_named(path, note, progress))

    @classmethod
    def load_folder(cls, folder: Path) -> Self:
        target, source = model_tokenizers(folder)
        target.unseen = suppressed_tokens(folder, target.vocab_size)
        return cls(load_seq2seq(folder), target, source)

    def on(self, device: str, dtype: str) -> Self:
        """The same translator on a device ("auto": the best available)."""
        where, _ = choose_device(device)
        precision, _ = choose_dtype(dtype, where)
        if where == "cpu":
            use_fitting_threads(self.model)
        return replace(self, model=self.model.to(where, getattr(torch, precision)))

    @overload
    def translate(
        self, sources: str, params: TranslateParams | None = None, **options: Any
    ) -> Translation: ...

    @overload
    def translate(
        self, sources: Sequence[str], params: TranslateParams | None = None, **options: Any
    ) -> list[Translation]: ...

    def translate(
        self, sources: str | Sequence[str], params: TranslateParams | None = None, **options: Any
    ) -> Translation | list[Translation]:
        """The translation of a text, or of each text; `options` are those of `TranslateParams`."""
        params = params or TranslateParams(**options)
        texts = [sources] if isinstance(sources, str) else list(sources)
        translations = list(self.stream([texts], params))
        return translations[0] if isinstance(sources, str) else translations

    def stream(
        self,
        parts: Iterable[list[str]],
        params: TranslateParams,
        report: Report = lambda *how_far: None,
    ) -> Iterator[Translation]:
        """Translations in the order of the sources, each as soon as those before it are ready. The
        sources of a part are sorted by length and batched."""
        refuse(params.problems())  # here, before anything is read
        return chain.from_iterable(self.steps(parts, params, report))

    def steps(
        self,
        parts: Iterable[list[str]],
        params: TranslateParams,
        report: Report = lambda *how_far: None,
    ) -> Iterator[list[Translation]]:
        """The same in steps, of a token for each text of a batch; most yield no translation."""
        for sources in parts:
            cuts = [self.cut(source) for source in sources]
            places = [(n, place) for n, cut in enumerate(cuts) for place in range(len(cut))]
            found: list[list[Beam | None]] = [[None] * len(cut) for cut in cuts]
            done = ready = 0  # parts of sources; whole sources
            texts = [part for cut in cuts for part in cut]
            for ended in chain([[]], self._search(texts, params)):
                for number, beam in ended:
                    n, place = places[number]
                    found[n][place] = beam
                    done += 1
                    report("translating", done, len(texts))
                translations = []
                while ready < len(sources) and None not in found[ready]:
                    beams = [beam for beam in found[ready] if beam]
                    translations.append(self._joined(sources[ready], cuts[ready], beams, params))
                    ready += 1
                yield translations

    def cut(self, source: str) -> list[str]:
        """A source in parts that fit the context: of whole sentences if possible, else of whole
        words. Nothing if it is blank."""
        text = source.encode(errors="replace").decode().strip()  # without lone surrogates
        parts = []
        while text:
            size = self._fitting(text)
            parts.append(text[:size])
            text = text[size:].lstrip()
        return parts

    def _fitting(self, text: str) -> int:
        """The characters at the beginning of `text` that fit, up to the end of a sentence."""
        room = self.model.config.context - 1  # without the end
        start = text[: TOKEN_CHARACTERS * room]  # encoding all of it for each part would be slow
        ids = self.encoder.encode(start)
        if len(ids) <= room and start == text:
            return len(text)
        size = limit = min(len(start), len(self.encoder.decode(ids[:room])))
        while limit:
            ends = [end.end() for end in SENTENCE_END.finditer(text, 0, limit)]
            ends = ends or [space.end() for space in regex.finditer(r"\s+", text[:limit])]
            size = max(ends, default=limit)
            if len(self.encoder.encode(text[:size].rstrip())) <= room:
                break
            limit = size - 1  # cutting a word may have added tokens
        return max(1, size)

    @property
    def encoder(self) -> Tokenizer:
        return self.source_tokenizer or self.tokenizer

    def source_ids(self, source: str) -> list[int]:
        most = self.model.config.context - 1
        return [*self.encoder.encode(source.strip())[:most], self.encoder.end_of_text]

    @torch.inference_mode()
    def _search(
        self, sources: list[str], params: TranslateParams
    ) -> Iterator[list[tuple[int, Beam]]]:
        """After each step, the best target of each source whose search ended, with its index."""
        ids = [self.source_ids(source) for source in sources]
        order = sorted(range(len(ids)), key=lambda n: len(ids[n]))
        device, most = self.model.device, max(1, self.model.config.context - 1)  # without the start
        sampling = params.sampling(min(params.max_tokens or most, most))
        start = [self.tokenizer.start_of_text]
        with self.model.eval_mode():
            while order:
                batch = self._batch(order, ids, sampling, params.batch)
                del order[: len(batch)]
                memory = self._encode([ids[n] for n in batch])
                # Computes the keys and values of the sources, before there is a copy for each beam.
                self.model.decode(torch.tensor([start] * len(batch), device=device), memory)
                rows = torch.arange(len(batch), device=device).repeat_interleave(sampling.beams)
                decoder = Seq2SeqDecoder(self.model, memory.select(rows), sampling.tokens)
                search = (decoder, self.tokenizer, [start] * len(batch), sampling)
                penalty = params.length_penalty
                for ended in beam_search(*search, length_penalty=penalty, best=1):
                    for _, beams in ended:
                        if not beams or any(math.isnan(token.logprob) for token in beams[0].tokens):
                            raise ModelError(NOT_FINITE)
                    yield [(batch[n], beams[0]) for n, beams in ended]

    def _batch(
        self, order: list[int], ids: list[list[int]], sampling: SamplingParams, most: int | None
    ) -> list[int]:
        """The next sources, as many as fit. They are sorted by length."""
        tokens, beams = BATCH_TOKENS[self.model.device.type], sampling.beams
        rows = max_rows(self.model, sampling.tokens, tokens)
        size = max(1, min(rows // beams, most or len(order), len(order)))
        while size > 1 and size * beams * len(ids[order[size - 1]]) > tokens:
            size -= 1
        return order[:size]

    def _encode(self, ids: list[list[int]]) -> Memory:
        device, longest = self.model.device, max(map(len, ids))
        padding = self.encoder.padding
        padded = [row + [padding] * (longest - len(row)) for row in ids]
        lengths = torch.tensor([len(row) for row in ids])
        mask = torch.arange(longest) < lengths[:, None]  # (batch, source)
        return self.model.encode(torch.tensor(padded).to(device), mask.to(device))

    def _joined(
        self, source: str, parts: list[str], beams: list[Beam], params: TranslateParams
    ) -> Translation:
        notes, text, tokens, logprob = [], "", list[int](), 0.0
        if len(parts) > 1:
            most = f"the model's context of {self.model.config.context:,} tokens"
            notes.append(f"the input exceeds {most}; translated in {len(parts):,} parts")
        for part, beam in zip(parts, beams, strict=True):
            text += self.tokenizer.decode(beam.ids) + " " * part[-1].isspace()
            tokens += beam.ids
            logprob += beam.score * len(beam.ids) ** params.length_penalty
            if beam.ids[-1] not in self.tokenizer.stops:
                notes.append(f"the translation was cut off after {len(beam.ids):,} tokens")
        score = logprob / len(tokens) ** params.length_penalty if tokens else 0.0
        pairs = [(part, beam.ids) for part, beam in zip(parts, beams, strict=True)]
        return Translation(source, text, score, tokens, notes, pairs)

    @torch.inference_mode()
    def alignment(self, source: str, target: str | Sequence[int]) -> Alignment:
        """The attention from each token of a target (a text, or its ids) to those of the source."""
        tokenizer, most = self.tokenizer, self.model.config.context
        ids = tokenizer.encode(target) if isinstance(target, str) else list(target)
        ids = [*(id for id in ids if id not in tokenizer.stops), tokenizer.end_of_text][:most]
        sources = self.source_ids(source)
        weights: list[Tensor] = []
        with self.model.eval_mode():
            inputs = torch.tensor([[tokenizer.start_of_text, *ids[:-1]]], device=self.model.device)
            self.model.decode(inputs, self._encode([sources]), cross_weights=weights)
        return Alignment(
            [token_name(self.encoder, id) for id in sources],
            [token_name(tokenizer, id) for id in ids],
            [layer[0].float().cpu() for layer in weights],
        )
