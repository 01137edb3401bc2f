"""From a request to rows of a batch, and from their tokens to an answer in OpenAI's shape."""

import json
import math
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nanolm.generation.batch import BatchRow, SampledToken
from nanolm.generation.sampling_params import DECLARATIONS, SamplingParams
from nanolm.serve.engine import Limits, TokenEvent
from nanolm.serve.models import ServedClassifier, ServedLanguageModel
from nanolm.serve.request_models import API_NAMES, APIError
from nanolm.text.page import spelled
from nanolm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ParsedRequest:
    """A request to write, understood."""

    writer: ServedLanguageModel
    rows: list[BatchRow]  # those of the first prompt first
    prompt_tokens: int
    streamed: bool
    usage_wanted: bool  # at the end of a stream
    chances: bool  # the tokens with their log-probabilities
    client: str


def asked_to_complete(
    given: dict[str, Any], writer: ServedLanguageModel, limits: Limits
) -> ParsedRequest:
    prompt = given.get("prompt", "")
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    prompts = [
        writer.tokenizer.encode_prompt(each) if isinstance(each, str) else each
        for each in (prompt if several else [prompt])
    ]
    return asked(given, writer, prompts, limits, given.get("logprobs"))


def asked_to_chat(
    given: dict[str, Any], writer: ServedLanguageModel, limits: Limits
) -> ParsedRequest:
    messages = [
        (
            each["role"],
            each["content"]
            if isinstance(each["content"], str)
            else "".join(part["text"] for part in each["content"]),
        )
        for each in given["messages"]
    ]
    ids, stop = writer.conversation(messages)
    stops = given.get("stop", [])
    given = {**given, "stop": [*([stops] if isinstance(stops, str) else stops), *stop]}
    if "max_completion_tokens" in given:
        given["max_tokens"] = given.pop("max_completion_tokens")
    top = given.get("top_logprobs", 0) if given.get("logprobs") else None
    return asked(given, writer, [ids], limits, top)


def asked(
    given: dict[str, Any],
    writer: ServedLanguageModel,
    prompts: list[list[int]],
    limits: Limits,
    top: int | None,
) -> ParsedRequest:
    limit = limits.longest(writer.base.window())
    for ids in prompts:
        if len(ids) > limit:
            raise APIError(f"the prompt has {len(ids):,} tokens; at most {limit:,}", param="prompt")
        if max(ids) >= writer.tokenizer.vocab_size:
            last = writer.tokenizer.vocab_size - 1
            raise APIError(f"the prompt has the token {max(ids)}; the last one is {last}")
    params = params_of({"max_tokens": min(SamplingParams.tokens, limits.tokens), **given})
    rows = [
        BatchRow(ids, params, which, top or 0)
        for ids in prompts
        for which in range(given.get("n", 1))
    ]
    return ParsedRequest(
        writer,
        rows,
        sum(map(len, prompts)),
        bool(given.get("stream")),
        bool(given.get("stream_options", {}).get("include_usage")),
        top is not None,
        given.get("user", ""),
    )


def params_of(given: dict[str, Any]) -> SamplingParams:
    fields = {API_NAMES.get(name, name): name for name in DECLARATIONS}
    values = {fields[name]: value for name, value in given.items() if name in fields}
    values.setdefault("seed", secrets.randbelow(1_000_000))
    values["min_tokens"] = min(values.get("min_tokens", 0), values["tokens"])
    params = SamplingParams(**values)
    if problems := params.problems():
        raise APIError("; ".join(problems))
    return params


class Answer:
    """The shape of an answer, whole or in parts."""

    object, prefix = "text_completion", "cmpl"
    object_of_parts = "text_completion"

    def __init__(self, asked: ParsedRequest) -> None:
        self.asked = asked
        self.tokenizer = asked.writer.tokenizer
        self.offsets = [0] * len(asked.rows)  # characters that were given before
        self.written = 0  # tokens, of all texts
        self.about = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": asked.writer.name,
        }

    def whole(self, texts: list[list[TokenEvent]]) -> dict[str, Any]:
        """From all that came of each text."""
        choices = [self.choice(place, events) for place, events in enumerate(texts)]
        return {**self.about, "object": self.object, "choices": choices, "usage": self.usage()}

    def part(self, place: int, events: list[TokenEvent]) -> str:
        """What is new of one text, as an event."""
        choice = self.choice(place, events, "delta")
        return event({**self.about, "object": self.object_of_parts, "choices": [choice]})

    def last(self) -> str:
        """The end of a stream."""
        shape = {**self.about, "object": self.object_of_parts, "choices": [], "usage": self.usage()}
        return event(shape) * self.asked.usage_wanted + "data: [DONE]\n\n"

    def usage(self) -> dict[str, int]:
        prompt = self.asked.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.written,
            "total_tokens": prompt + self.written,
        }

    def choice(self, place: int, events: list[TokenEvent], kind: str = "message") -> dict[str, Any]:
        tokens = [(each.piece, each.token) for each in events if each.token]
        self.written += len(tokens)
        return {
            "index": place,
            **self.content("".join(each.piece for each in events), kind),
            "logprobs": self.chances(place, tokens) if self.asked.chances else None,
            "finish_reason": reason(events[-1].stopped),
        }

    def content(self, text: str, kind: str) -> dict[str, Any]:
        return {"text": text}

    def chances(self, place: int, tokens: list[tuple[str, SampledToken]]) -> dict[str, Any]:
        offsets = []
        for piece, _ in tokens:
            offsets.append(self.offsets[place])
            self.offsets[place] += len(piece)
        return {
            "tokens": [written(self.tokenizer, token.id) for _, token in tokens],
            "token_logprobs": [finite(token.logprob) for _, token in tokens],
            "top_logprobs": [
                {written(self.tokenizer, id): finite(chance) for id, chance in token.top}
                for _, token in tokens
            ],
            "text_offset": offsets,
            # Ours: texts of tokens can be the same, their ids cannot.
            "ids": [token.id for _, token in tokens],
            "alternatives": [
                [
                    {"id": id, "token": written(self.tokenizer, id), "logprob": finite(chance)}
                    for id, chance in token.top
                ]
                for _, token in tokens
            ],
        }


class ChatAnswer(Answer):
    """As a message of the assistant's."""

    object, prefix = "chat.completion", "chatcmpl"
    object_of_parts = "chat.completion.chunk"

    def content(self, text: str, kind: str) -> dict[str, Any]:
        rest = {"refusal": None} if kind == "message" else {}
        return {kind: {"role": "assistant", "content": text, **rest}}

    def chances(self, place: int, tokens: list[tuple[str, SampledToken]]) -> dict[str, Any]:
        content = [
            {
                **self.token(token.id, token.logprob),
                "top_logprobs": [self.token(*each) for each in token.top],
            }
            for _, token in tokens
        ]
        return {"content": content, "refusal": None}

    def token(self, id: int, logprob: float) -> dict[str, Any]:
        token = self.tokenizer.tokens[id]
        return {
            "token": written(self.tokenizer, id),
            "logprob": finite(logprob),
            "bytes": list(token) if token else None,
        }


def written(tokenizer: Tokenizer, id: int) -> str:
    """A token as text; one that stands for none by its name."""
    return tokenizer.special.get(id) or spelled(tokenizer.tokens[id])


def finite(logprob: float) -> float:
    """What JSON can hold; OpenAI writes so little for what cannot be."""
    return logprob if math.isfinite(logprob) else -9999.0


def reason(stopped: str) -> str | None:
    return {"": None, "length": "length"}.get(stopped, "stop")


def event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


def labels_json(labeller: ServedClassifier, chances: Iterable[dict[str, float]]) -> dict[str, Any]:
    data = [
        {
            "index": place,
            "label": next(iter(each)),
            "probability": next(iter(each.values())),
            "probabilities": each,
        }
        for place, each in enumerate(chances)
    ]
    return {"object": "list", "model": labeller.name, "data": data}
