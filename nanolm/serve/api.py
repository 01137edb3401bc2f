"""What the API takes and gives, as schemas; and from a request to rows, from rows to an answer.

The shapes are OpenAI's, so that its clients can talk to this server. Parameters that OpenAI
does not have (top_k, min_p, repetition_penalty, min_tokens, ban) are named as in nanolm.
"""

import json
import math
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from nanolm.errors import NanolmError
from nanolm.generation.batch import BatchRow, SampledToken
from nanolm.generation.sampling_params import SamplingParams
from nanolm.serve.engine import Limits, TokenEvent
from nanolm.serve.models import ServedClassifier, ServedLanguageModel, ServedModel
from nanolm.serve.schema import (
    Schema,
    integer,
    listed,
    number,
    optional,
    problems,
    record,
    text,
)
from nanolm.text.page import spelled
from nanolm.text.tokenizer import Tokenizer

MAX_CHOICES, MAX_PROMPTS, MAX_TOP = 16, 16, 20
MAX_STOPS, STOP_LENGTH = 16, 200
MAX_TEXTS = 64  # to classify together
MAX_BANNED, BANNED_LENGTH = 3, 12  # each byte takes a row of all tokens
OTHER_NAMES = {"tokens": "max_tokens"}  # what a knob is called here
DEFAULTS = {
    OTHER_NAMES.get(field.name, field.name): field.default for field in fields(SamplingParams)
}
CHAT = (
    "Where the model ends its texts with <|im_end|>, each message is put between <|im_start|> and "
    "that, after its role and a line end (ChatML). Otherwise it is `role: content` and a line end, "
    "and `assistant:` comes last; writing then stops at the next `user:` line."
)


class APIError(NanolmError):
    """A request that cannot be done, as OpenAI's clients expect to be told."""

    def __init__(
        self, message: str, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "")
        return {
            "error": {
                "message": str(self),
                "type": kind or "invalid_request_error",
                "param": self.param,
                "code": self.code,
            }
        }


class Schemas:
    """Of the requests to these models, within these limits."""

    def __init__(self, models: dict[str, ServedModel], limits: Limits) -> None:
        writers = {
            name: model for name, model in models.items() if isinstance(model, ServedLanguageModel)
        }
        labellers = [name for name, model in models.items() if isinstance(model, ServedClassifier)]
        vocabulary = max((m.tokenizer.vocab_size for m in models.values()), default=1)
        longest = max((limits.longest(m.base.window()) for m in models.values()), default=1)
        ids = listed(integer(0, vocabulary - 1), 1, longest)
        words = text(most=limits.body)
        stop = text(1, STOP_LENGTH)
        writer = name_of(list(writers))
        common: dict[str, Schema] = {
            "model": writer,
            "max_tokens": optional(
                integer(
                    1,
                    limits.tokens,
                    default=min(SamplingParams.tokens, limits.tokens),
                    description="At most so many tokens.",
                )
            ),
            "temperature": knob("temperature", number(0, 100), "0 always takes the likeliest."),
            "top_p": knob("top_p", number(1e-6, 1), "Keep the likeliest that together reach this."),
            "top_k": knob("top_k", integer(1, 1_000_000), "Keep so many of the likeliest."),
            "min_p": knob("min_p", number(0, 1), "Keep what is so likely, by the likeliest."),
            "repetition_penalty": knob(
                "repetition_penalty", number(0.01, 100), "Above 1: what was there is less likely."
            ),
            "frequency_penalty": knob(
                "frequency_penalty", number(-100, 100), "Less likely for every time it was written."
            ),
            "presence_penalty": knob(
                "presence_penalty", number(-100, 100), "Less likely once it was written."
            ),
            "min_tokens": knob("min_tokens", integer(0, limits.tokens), "No end before so many."),
            "ban": optional(
                listed(
                    text(1, BANNED_LENGTH),
                    0,
                    MAX_BANNED,
                    description="Texts never to be written.",
                )
            ),
            "stop": {
                "anyOf": [stop, listed(stop, 0, MAX_STOPS), {"type": "null"}],
                "description": "End where one of these would be written.",
            },
            "seed": optional(integer(0, 2**53, description="The same seed writes the same text.")),
            "n": optional(integer(1, MAX_CHOICES, default=1, description="So many texts.")),
            "stream": optional({"type": "boolean", "default": False}),
            "stream_options": optional(record({"include_usage": optional({"type": "boolean"})})),
            "user": optional(text(most=200, description="Users take turns when many wait.")),
        }
        prompt = {
            "anyOf": [words, listed(words, 1, MAX_PROMPTS), ids, listed(ids, 1, MAX_PROMPTS)],
            "description": "A text, its token ids, or a list of either.",
            "default": "",
        }
        top = integer(0, MAX_TOP, description="So many of the likeliest tokens at each place.")
        part = record({"type": {"enum": ["text"]}, "text": words}, ("type", "text"))
        message = record(
            {
                "role": {"enum": ["system", "developer", "user", "assistant"]},
                "content": {"anyOf": [words, listed(part, 1, 64)]},
                "name": optional(text(most=64)),
            },
            ("role", "content"),
        )
        most = dict(common["max_tokens"])
        self.completion = record({"prompt": prompt, "logprobs": optional(top), **common})
        self.chat = record(
            {
                "messages": listed(message, 1, 256, description=CHAT),
                "logprobs": optional({"type": "boolean", "default": False}),
                "top_logprobs": optional(dict(top)),
                "max_completion_tokens": most,
                **common,
            },
            ("messages",),
        )
        self.classification = record(
            {
                "model": name_of(labellers),
                "input": {"anyOf": [words, listed(words, 1, MAX_TEXTS)]},
            },
            ("input",),
        )
        every = name_of(list(models))
        self.tokenization = record({"model": every, "text": words}, ("text",))
        looking = name_of([name for name, model in models.items() if model.attention])
        self.inspection = record({"model": looking, "text": words, "ids": ids})


def knob(name: str, schema: Schema, about: str) -> Schema:
    """As the command line has it, with its default."""
    default = DEFAULTS[name]
    rest = {} if default is None else {"default": default}
    return optional({**schema, "description": about, **rest})


def name_of(models: list[str]) -> Schema:
    about = "One of /v1/models; the first one where it is left out."
    if not models:
        return {"enum": ["none"], "description": "No model of that kind is served."}
    return {"enum": models, "description": about, "default": models[0]}


def checked(value: Any, schema: Schema) -> dict[str, Any]:
    """The properties that are given, or APIError with the first thing that is wrong."""
    for where, problem in problems(value, schema):
        code = "model_not_found" if where == "model" else None
        status = 404 if where == "model" and isinstance(value.get("model"), str) else 400
        raise APIError(f"{where or 'the body'} {problem}", status, where or None, code)
    return {name: each for name, each in value.items() if each is not None}


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
    several = isinstance(prompt, list) and not isinstance(prompt[0], int | float)
    prompts = [
        writer.tokenizer.encode_prompt(each) if isinstance(each, str) else [int(id) for id in each]
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
    params = knobs_of({"max_tokens": min(SamplingParams.tokens, limits.tokens), **given})
    rows = [
        BatchRow(ids, params, which, int(top or 0))
        for ids in prompts
        for which in range(int(given.get("n", 1)))
    ]
    return ParsedRequest(
        writer,
        rows,
        sum(map(len, prompts)),
        bool(given.get("stream")),
        bool((given.get("stream_options") or {}).get("include_usage")),
        top is not None,
        given.get("user", ""),
    )


def knobs_of(given: dict[str, Any]) -> SamplingParams:
    values = {
        field.name: given[OTHER_NAMES.get(field.name, field.name)]
        for field in fields(SamplingParams)
        if OTHER_NAMES.get(field.name, field.name) in given
    }
    for name in ("tokens", "top_k", "min_tokens", "seed"):
        if name in values:
            values[name] = int(values[name])
    values.setdefault("seed", secrets.randbelow(1_000_000))
    values["min_tokens"] = min(values.get("min_tokens", 0), values["tokens"])
    params = SamplingParams(**values)
    if found := params.problems():
        raise APIError("; ".join(found))
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
