"""The models that a server offers, under names that do not reveal their paths.

>>> names_of(["runs/novel", "runs/reviews/best"])
['novel', 'reviews']
"""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nanolm.classification.classifier import TextClassifier
from nanolm.classification.metrics import softmax
from nanolm.formats import counted
from nanolm.generation.language_model import LanguageModel
from nanolm.inspect.attribution import attribute
from nanolm.inspect.heads import describe_heads
from nanolm.inspect.inspection import Inspection, inspect_text
from nanolm.inspect.page import inspection_page
from nanolm.model.base import Model
from nanolm.model.classifier import Classifier
from nanolm.model.device import use_fitting_threads
from nanolm.model.gpt import GPT
from nanolm.text.tokenizer import Tokenizer

MAX_INSPECTED_TOKENS = 256  # attention grows with their square
RUN_SUBFOLDERS = {"best", "last", "checkpoints"}  # of a run; not used as names


@dataclass(frozen=True)
class ServedModel:
    name: str
    created: int  # seconds since 1970
    loaded: LanguageModel | TextClassifier

    @property
    def tokenizer(self) -> Tokenizer:
        return self.loaded.tokenizer

    @property
    def base(self) -> Model:
        """The model without a classifier's head."""
        model = self.loaded.model
        return model.base if isinstance(model, Classifier) else model

    @property
    def attention(self) -> bool:
        return isinstance(self.base, GPT)

    def facts(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "nanolm",
            "kind": "language model",
            "context": self.base.config.context,
            "vocabulary": self.tokenizer.vocab_size,
            "parameters": self.base.parameter_count(),
            "attention": self.attention,
            "labels": None,
        }

    def inspect(self, ids: list[int]) -> Callable[[], str]:
        """Inspect a text. The result renders the page, which takes longer."""
        ids = ids[-min(MAX_INSPECTED_TOKENS, self.base.window() or MAX_INSPECTED_TOKENS) :]
        return partial(self.page, inspect_text(self.base, ids))

    def page(self, seen: Inspection, attribution: Any = None) -> str:
        layers, heads = seen.attention.shape[:2]
        shape = f"{counted(layers, 'layer')} of {counted(heads, 'head')}"
        facts = {"model": self.name, "tokens": f"{len(seen.ids):,}", "attention": shape}
        patterns = describe_heads(seen.attention, seen.ids)
        return inspection_page(self.tokenizer, seen, patterns, facts, attribution=attribution)


@dataclass(frozen=True)
class ServedLanguageModel(ServedModel):
    loaded: LanguageModel

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
    loaded: TextClassifier

    def facts(self) -> dict[str, Any]:
        return super().facts() | {
            "kind": "classifier",
            "parameters": self.loaded.model.parameter_count(),
            "labels": list(self.loaded.labels),
        }

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
