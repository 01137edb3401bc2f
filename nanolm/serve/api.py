"""From a request to rows of a batch, and from their tokens to an answer in OpenAI's shape."""

import json
import math
import secrets
import time
from collections.abc import Iterable
from typing import Any

from nanolm.generation.batch import BatchRow, SampledToken
from nanolm.generation.sampling_params import DECLARATIONS, SamplingParams
from nanolm.generation.transcript import token_name
from nanolm.serve.engine import Limits, TokenEvent
from nanolm.serve.models import ServedClassifier, ServedLanguageModel
from nanolm.serve.request_models import API_NAMES, APIError


def parse(given: dict[str, Any], writer: ServedLanguageModel, limits: Limits) -> "Answer":
    """What will answer a request for completions, or for chat completions: those have messages."""
    tokenizer, prompt, top = writer.tokenizer, given.get("prompt", ""), given.get("logprobs")
    if "messages" in given:
        messages = [(each["role"], joined(each["content"])) for each in given["messages"]]
        prompt, stop = writer.conversation(messages)
        stops = given.get("stop", [])
        given = {**given, "stop": [*([stops] if isinstance(stops, str) else stops), *stop]}
        if "max_completion_tokens" in given:
            given["max_tokens"] = given["max_completion_tokens"]
        top = given.get("top_logprobs", 0) if given.get("logprobs") else None
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    prompts = [
        tokenizer.encode_prompt(each) if isinstance(each, str) else each
        for each in (prompt if several else [prompt])
    ]
    limit = limits.longest(writer.base.window())
    for ids in prompts:
        if len(ids) > limit:
            raise APIError(f"the prompt has {len(ids):,} tokens; at most {limit:,}", param="prompt")
        if max(ids) >= tokenizer.vocab_size:
            last = tokenizer.vocab_size - 1
            raise APIError(f"the prompt has the token {max(ids)}; the last one is {last}")
    fields = {API_NAMES.get(name, name): name for name in DECLARATIONS}
    values = {fields[name]: value for name, value in given.items() if name in fields}
    values.setdefault("tokens", min(SamplingParams.tokens, limits.tokens))
    values.setdefault("seed", secrets.randbelow(1_000_000))
    values["min_tokens"] = min(values.get("min_tokens", 0), values["tokens"])
    params = SamplingParams(**values)
    if problems := params.problems():
        raise APIError("; ".join(problems))
    numbers = range(given.get("n", 1))
    rows = [BatchRow(ids, params, number, top or 0) for ids in prompts for number in numbers]
    kind = ChatAnswer if "messages" in given else Answer
    return kind(given, writer, rows, logprobs=top is not None)


def joined(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


class Answer:
    object, prefix = "text_completion", "cmpl"
    object_of_parts = "text_completion"

    def __init__(
        self,
        given: dict[str, Any],
        writer: ServedLanguageModel,
        rows: list[BatchRow],
        logprobs: bool,
    ) -> None:
        self.given, self.rows, self.logprobs = given, rows, logprobs
        self.tokenizer = writer.tokenizer
        self.offsets = [0] * len(rows)  # characters that were given before
        self.written = 0  # tokens, of all texts
        self.about = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": writer.name,
        }

    def whole(self, texts: list[list[TokenEvent]]) -> dict[str, Any]:
        choices = [self.choice(place, events) for place, events in enumerate(texts)]
        return {**self.about, "object": self.object, "choices": choices, "usage": self.usage()}

    def part(self, place: int, events: list[TokenEvent]) -> str:
        choice = self.choice(place, events, "delta")
        return event({**self.about, "object": self.object_of_parts, "choices": [choice]})

    def last(self) -> str:
        shape = {**self.about, "object": self.object_of_parts, "choices": [], "usage": self.usage()}
        usage_wanted = self.given.get("stream_options", {}).get("include_usage")
        return (event(shape) if usage_wanted else "") + "data: [DONE]\n\n"

    def usage(self) -> dict[str, int]:
        prompt = sum(len(row.prompt) for row in self.rows if row.number == 0)
        counts = {"prompt_tokens": prompt, "completion_tokens": self.written}
        return counts | {"total_tokens": prompt + self.written}

    def choice(self, place: int, events: list[TokenEvent], kind: str = "message") -> dict[str, Any]:
        tokens = [(each.piece, each.token) for each in events if each.token]
        self.written += len(tokens)
        return {
            "index": place,
            **self.content("".join(each.piece for each in events), kind),
            "logprobs": self.chances(place, tokens) if self.logprobs else None,
            "finish_reason": {"": None, "length": "length"}.get(events[-1].stopped, "stop"),
        }

    def content(self, text: str, kind: str) -> dict[str, Any]:
        return {"text": text}

    def chances(self, place: int, tokens: list[tuple[str, SampledToken]]) -> dict[str, Any]:
        offsets = []
        for piece, _ in tokens:
            offsets.append(self.offsets[place])
            self.offsets[place] += len(piece)
        alternatives = [
            [
                {"id": id, "token": token_name(self.tokenizer, id), "logprob": finite(logprob)}
                for id, logprob in token.top
            ]
            for _, token in tokens
        ]
        return {
            "tokens": [token_name(self.tokenizer, token.id) for _, token in tokens],
            "token_logprobs": [finite(token.logprob) for _, token in tokens],
            "top_logprobs": [{each["token"]: each["logprob"] for each in a} for a in alternatives],
            "text_offset": offsets,
            # Ours: texts of tokens can be the same, their ids cannot.
            "ids": [token.id for _, token in tokens],
            "alternatives": alternatives,
        }


class ChatAnswer(Answer):
    object, prefix = "chat.completion", "chatcmpl"
    object_of_parts = "chat.completion.chunk"

    def content(self, text: str, kind: str) -> dict[str, Any]:
        rest = {"refusal": None} if kind == "message" else {}
        return {kind: {"role": "assistant", "content": text, **rest}}

    def chances(self, place: int, tokens: list[tuple[str, SampledToken]]) -> dict[str, Any]:
        content = [
            self.token(token.id, token.logprob)
            | {"top_logprobs": [self.token(*each) for each in token.top]}
            for _, token in tokens
        ]
        return {"content": content, "refusal": None}

    def token(self, id: int, logprob: float) -> dict[str, Any]:
        token = self.tokenizer.tokens[id]
        return {
            "token": token_name(self.tokenizer, id),
            "logprob": finite(logprob),
            "bytes": list(token) if token else None,
        }


def finite(logprob: float) -> float:
    """What JSON can hold; OpenAI writes so little for what cannot be."""
    return logprob if math.isfinite(logprob) else -9999.0


def event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


def labels_json(labeller: ServedClassifier, chances: Iterable[dict[str, float]]) -> dict[str, Any]:
    data = [
        {"index": place, "label": best, "probability": each[best], "probabilities": each}
        for place, each in enumerate(chances)
        for best in [next(iter(each))]  # the first is the likeliest
    ]
    return {"object": "list", "model": labeller.name, "data": data}
