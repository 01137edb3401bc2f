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
from nanolm.generation.language_model import LanguageModel
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
from nanolm.serve.queues import Steps
from nanolm.text.tokenizer import Tokenizer

MAX_INSPECTED_TOKENS = 256  # attention grows with their square
RUN_SUBFOLDERS = {"best", "last", "checkpoints"}  # of a run; not used as names


@dataclass(frozen=True)
class ServedModel:
    kind: ClassVar[str] = "model"
    path: ClassVar[str] = "/v1/tokenize"  # of the API that is for this kind
    name: str
    created: int  # seconds since 1970
    loaded: LanguageModel | TextClassifier | Translator

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
        }

    def inspect(self, ids: list[int]) -> Callable[[], str]:
        """Inspect a text. The result renders the page, which takes longer."""
        ids = ids[-min(MAX_INSPECTED_TOKENS, self.base.window() or MAX_INSPECTED_TOKENS) :]
        return partial(self.page, inspect_text(self.base, ids))

    def page(self, seen: Inspection, attribution: Any = None) -> str:
        facts = {"model": self.name, "tokens": f"{len(seen.ids):,}"}
        facts |= WITHOUT_NGRAMS if getattr(self.loaded, "ngrams", None) else {}
        patterns = describe_heads(seen.attention, seen.ids)
        return inspection_page(self.tokenizer, seen, patterns, facts, attribution=attribution)


@dataclass(frozen=True)
class ServedLanguageModel(ServedModel):
    kind, path = "language model", "/v1/completions"
    loaded: LanguageModel

    def walk(self, ids: list[int]) -> Callable[[], str]:
        """The forward pass over the end of a text. The result renders the page."""
        walk = walk_through(self.base, ids[-walk_window(self.base) :])
        return partial(walk_page, self.tokenizer, walk, {"model": self.name})

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
        ids = ids[: min(MAX_INSPECTED_TOKENS, window)]
        decided = attribute(self.loaded.model, ids)
        seen = Inspection(ids, decided.attention, [])
        return partial(self.page, seen, (decided, self.loaded.labels))


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
