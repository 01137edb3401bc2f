"""The models that a server offers, under names that do not reveal their paths.

>>> names_of(["runs/novel", "runs/reviews/best"])
['novel', 'reviews']
"""

import itertools
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from nanolm.classification.classifier import TextClassifier
from nanolm.classification.metrics import softmax
from nanolm.generation.batch import BatchRow
from nanolm.generation.decoding import NaiveDecoder
from nanolm.generation.language_model import LanguageModel
from nanolm.generation.sampler import Sampler
from nanolm.generation.transcript import Transcript
from nanolm.inspect.attribution import attribute
from nanolm.inspect.heads import describe_heads
from nanolm.inspect.inspection import Inspection, inspect_text
from nanolm.inspect.page import WITHOUT_NGRAMS, alignment_page, inspection_page
from nanolm.inspect.walk import walk_through, walk_window
from nanolm.inspect.walk_page import walk_page
from nanolm.model.base import Model
from nanolm.model.classifier import Classifier
from nanolm.model.device import use_fitting_threads
from nanolm.model.gpt import GPT
from nanolm.pairs.translator import TranslateParams, Translation, Translator
from nanolm.runs.folder import Run
from nanolm.serve.queues import Steps
from nanolm.text.tokenizer import Tokenizer

MAX_INSPECTED_TOKENS = 256  # attention grows with their square
SENTENCE_END = re.compile(r"(?<=[.!?…])\s+|(?<=[。！？])")  # noqa: RUF001
RUN_SUBFOLDERS = {"best", "last", "checkpoints"}  # of a run; not used as names


@dataclass(frozen=True)
class ServedModel:
    kind: ClassVar[str] = "model"
    path: ClassVar[str] = "/v1/tokenize"  # of the API that is for this kind
    name: str
    created: int  # seconds since 1970
    loaded: LanguageModel | TextClassifier | Translator
    prompts: Sequence[str] = ()  # suggestions, from its own samples

    @property
    def tokenizer(self) -> Tokenizer:
        return self.loaded.tokenizer

    @property
    def base(self) -> Model:
        """The model without a classifier's head."""
        model: Any = self.loaded.model
        base: Model = model.base if isinstance(model, Classifier) else model
        return base

    @property
    def window(self) -> int | None:
        return self.base.window()

    @property
    def attention(self) -> bool:
        return isinstance(self.base, GPT)

    def facts(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "nanolm",
            "kind": self.kind,
            "context": self.base.config.context,
            "vocabulary": self.tokenizer.vocab_size,
            "parameters": self.loaded.model.parameter_count(),
            "attention": self.attention,
            "labels": None,
            "prompts": list(self.prompts),
        }

    def inspect(self, ids: list[int]) -> Callable[[], str]:
        """Inspect a text. The result renders the page, which takes longer."""
        end = ids[-min(MAX_INSPECTED_TOKENS, self.base.window() or MAX_INSPECTED_TOKENS) :]
        return partial(self.page, inspect_text(self.base, end), shown("last", end, ids))

    def page(self, seen: Inspection, tokens: str, attribution: Any = None) -> str:
        facts = {"model": self.name, "tokens": tokens}
        facts |= WITHOUT_NGRAMS if getattr(self.loaded, "ngrams", None) else {}
        patterns = describe_heads(seen.attention, seen.ids)
        return inspection_page(self.tokenizer, seen, patterns, facts, attribution=attribution)


@dataclass(frozen=True)
class ServedLanguageModel(ServedModel):
    kind, path = "language model", "/v1/completions"
    loaded: LanguageModel

    def walk(self, ids: list[int]) -> Callable[[], str]:
        """The forward pass over the end of a text. The result renders the page."""
        end = ids[-walk_window(self.base) :]
        facts = {"model": self.name, "tokens": shown("last", end, ids)}
        return partial(walk_page, self.tokenizer, walk_through(self.base, end), facts)

    @torch.inference_mode()
    def probabilities(self, row: BatchRow, generated: int) -> dict[str, Any]:
        """The probabilities with which the most likely next tokens would be sampled, after all
        penalties, bans and filters. The last `generated` tokens of the prompt count as
        generated."""
        model, length = self.loaded.model, len(row.prompt)
        prompt = torch.tensor([row.prompt], device=model.device)  # (1, time)
        logits = NaiveDecoder(model, 1, length).logits(prompt, torch.tensor([length]))
        logits = logits[:, : self.tokenizer.vocab_size]  # (1, vocabulary)
        sampler = Sampler(self.tokenizer, 1, model.device)
        sampler.begin(0, row.params, row.prompt, written=generated, bias=row.bias)
        scores = sampler.scores(logits).float()
        if row.params.effectively_greedy:
            sampled = torch.zeros_like(scores).scatter(1, scores.argmax(-1, keepdim=True), 1)
        else:  # NaN if no token remains
            sampled = sampler.apply("filter", scores).softmax(dim=-1).nan_to_num()
        ids = logits[0].topk(min(row.top, logits.shape[1])).indices
        shares = sampled[0, ids].tolist()
        return {"ids": ids.tolist(), "sampled": shares, "candidates": int(sampled.count_nonzero())}

    def conversation(self, messages: Sequence[tuple[str, str]]) -> tuple[list[int], list[str]]:
        """The prompt's ids for (role, content) messages, and the texts that end the reply."""
        tokenizer = self.tokenizer
        if tokenizer.turn:
            start, end = tokenizer.turn
            ids = list(tokenizer.begin)
            for role, content in messages:
                # Special tokens spelled out in a message are plain text.
                ids += [start, *tokenizer.encode(f"{role}\n{content}"), end]
                ids += tokenizer.encode("\n")
            return [*ids, start, *tokenizer.encode("assistant\n")], []
        lines = "".join(f"{role}: {content}\n" for role, content in messages)
        return tokenizer.encode_prompt(f"{lines}assistant:"), ["\nuser:"]


@dataclass(frozen=True)
class ServedClassifier(ServedModel):
    kind, path = "classifier", "/v1/classify"
    loaded: TextClassifier

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"labels": list(self.loaded.labels)}

    def classify(self, texts: list[str]) -> list[dict[str, float]]:
        """The probability of each label, the most likely first."""
        if self.loaded.model.device.type == "cpu":
            use_fitting_threads(self.loaded.model)
        return [
            dict(sorted(zip(self.loaded.labels, row, strict=True), key=lambda pair: -pair[1]))
            for row in softmax(self.loaded.logits(texts)).tolist()
        ]

    def inspect(self, ids: list[int]) -> Callable[[], str]:
        config = self.loaded.model.config
        window = min(self.base.window() or MAX_INSPECTED_TOKENS, config.window or 10**9)
        start = ids[: min(MAX_INSPECTED_TOKENS, window)]
        decided = attribute(self.loaded.model, start)
        seen = Inspection(start, decided.attention, [])
        tokens = shown("first", start, ids)
        return partial(self.page, seen, tokens, (decided, self.loaded.labels))


@dataclass(frozen=True)
class ServedTranslator(ServedModel):
    kind, path = "translator", "/v1/translate"
    loaded: Translator

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the sources."""
        return self.loaded.encoder

    @property
    def window(self) -> int:
        return self.loaded.model.config.context

    @property
    def attention(self) -> bool:
        return self.loaded.model.attends

    def translate(
        self, texts: list[str], params: TranslateParams, result: Callable[[Translation], Any]
    ) -> Steps:
        """The result for each translation, in steps, for the compute thread."""
        model = self.loaded.model
        steps = self.loaded.steps([texts], params)
        while True:
            if model.device.type == "cpu":
                use_fitting_threads(model)  # another model may have run in between
            ready = next(steps, None)
            if ready is None:
                return
            yield []
            for each in ready:
                yield [result(each)]

    def inspect_in_steps(self, ids: list[int]) -> Steps:
        """Translate a text and inspect its alignment. The result renders the page."""
        text = self.tokenizer.decode(ids[:MAX_INSPECTED_TOKENS])
        params = TranslateParams(max_tokens=MAX_INSPECTED_TOKENS)
        return self.translate(self.loaded.cut(text)[:1] or [""], params, self.inspection)

    def inspection(self, translation: Translation) -> Callable[[], str]:
        seen = self.loaded.alignment(translation.source, translation.tokens)
        weights = torch.stack(seen.weights).numpy()
        texts = {"source": translation.source, "translation": translation.text}
        facts = {"model": self.name, **texts}
        return partial(alignment_page, weights, seen.source_tokens, seen.target_tokens, facts)

    def result(self, translation: Translation, alignment: bool) -> dict[str, Any]:
        return {
            "source": translation.source,
            "translation": translation.text,
            "score": translation.score,
            "notes": translation.notes,
            "alignment": [self.alignment(*part) for part in translation.parts]
            if alignment and self.attention
            else None,
        }

    def alignment(self, source: str, ids: list[int]) -> dict[str, Any]:
        """The attention of each token of a target to those of its source, averaged over heads."""
        weights = self.loaded.alignment(source, ids).mean()
        target, stops = self.loaded.tokenizer, self.loaded.tokenizer.stops
        ids = [*(id for id in ids if id not in stops), target.end_of_text][: len(weights)]
        return {
            "source": pieces(self.tokenizer, self.loaded.source_ids(source)),
            "target": pieces(target, ids),
            "weights": [array("f", row) for row in weights],
        }


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The text that each token adds; together they are the whole text."""
    transcript = Transcript()
    found = [transcript.add(tokenizer.tokens[id]) for id in ids]
    found[-1] += transcript.finish()
    return found


def shown(which: str, part: list[int], ids: list[int]) -> str:
    """The number of tokens on a page, and whether the text was truncated."""
    truncated = f"truncated: the {which} {len(part):,} of "
    return truncated * (len(part) < len(ids)) + f"{len(ids):,}"


def own_prompts(folder: Path) -> list[str]:
    """The beginnings of sentences in the latest samples of the run that a checkpoint is from."""
    run = Run(folder.resolve().parent.parent)
    if not (run.exists() and run.samples.is_file()):
        return []
    lines = reversed(run.samples.read_text(encoding="utf-8", errors="replace").splitlines())
    texts = (line[2:] for line in lines if line.startswith("> ") and "<|" not in line)
    parts = [part.strip() for text in texts for part in SENTENCE_END.split(text)]
    found = [" ".join(part.split()[:4]) for part in parts if part.count(" ") >= 4]
    if not found:  # single words, or a language without spaces
        found = [part[: min(8, len(part) // 2)] for part in parts if len(part) > 1]
    return list(dict.fromkeys(found))[:3]


def names_of(runs: Iterable[str]) -> list[str]:
    """Short, unique names without special characters."""
    names: list[str] = []
    for run in runs:
        parts = [part for part in Path(run.removeprefix("hf://")).absolute().parts if part != "/"]
        while len(parts) > 1 and (parts[-1] in RUN_SUBFOLDERS or parts[-1].startswith("step-")):
            parts.pop()
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", parts[-1] if parts else "").strip("-.") or "model"
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        names.append(next(each for each in itertools.chain([name], numbered) if each not in names))
    return names
