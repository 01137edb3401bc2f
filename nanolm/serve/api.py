"""Turns a request into rows of a batch, and their tokens into a response in OpenAI's format."""

import json
import math
import secrets
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import accumulate, islice
from math import isnan
from typing import Any

from nanolm.generation.batch import BatchRow
from nanolm.generation.sampling_params import DECLARATIONS, SamplingParams
from nanolm.generation.transcript import token_name
from nanolm.pairs.translator import TranslateParams
from nanolm.serve.engine import Limits, Tokens
from nanolm.serve.models import ServedClassifier, ServedLanguageModel, ServedTranslator
from nanolm.serve.request_models import API_NAMES, APIError

CHUNK = 16_384  # characters of a response that are sent at a time, roughly
ITEMS = 32  # items of a list that are encoded at a time
encode = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=list
).encode  # iterators become lists


def parse(given: dict[str, Any], writer: ServedLanguageModel, limits: Limits) -> "Answer":
    """The response to a request for completions, or for chat completions if it has messages."""
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
    echoed = given.get("echo", False)

    def encode_prompt(text: str) -> list[int]:
        if not echoed:
            return tokenizer.encode_prompt(text)
        # Exactly this text, whose tokens the client may know.
        return [*tokenizer.begin, *tokenizer.encode(text)] or [tokenizer.end_of_text]

    prompts = [
        encode_prompt(each) if isinstance(each, str) else each
        for each in (prompt if several else [prompt])
    ]
    limit = limits.longest(writer.base.window())
    for ids in prompts:
        if len(ids) > limit:
            problem = f"the prompt has {len(ids):,} tokens; the limit is {limit:,}"
            raise APIError(problem, param="prompt")
        if max(ids) >= tokenizer.vocab_size:
            last = tokenizer.vocab_size - 1
            raise APIError(f"the prompt contains token id {max(ids)}; the largest is {last}")
    fields = {API_NAMES.get(name, name): name for name in DECLARATIONS}
    values = {fields[name]: value for name, value in given.items() if name in fields}
    values.setdefault("tokens", min(SamplingParams.tokens, limits.tokens))
    values["tokens"] = max(1, values["tokens"])  # unless it is 0, see `generates`
    values.setdefault("seed", secrets.randbelow(1_000_000))
    values["min_tokens"] = min(values.get("min_tokens", 0), values["tokens"])
    params = SamplingParams(**values)
    if problems := params.problems():
        raise APIError("; ".join(problems))
    numbers = range(given.get("n", 1))
    bias = {int(id): value for id, value in given.get("logit_bias", {}).items()}
    if bias and max(bias) >= tokenizer.vocab_size:
        last = tokenizer.vocab_size - 1
        raise APIError(f"logit_bias contains token id {max(bias)}; the largest is {last}")
    rows = [
        BatchRow(ids, params, number, top or 0, bias=bias) for ids in prompts for number in numbers
    ]
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
        self.rows, self.logprobs, self.echo = rows, logprobs, given.get("echo", False)
        self.generates = given.get("max_tokens") != 0
        self.usage_wanted = given.get("stream_options", {}).get("include_usage")
        self.tokenizer = writer.tokenizer
        self.offsets = [0] * len(rows)  # characters sent so far
        # Tokens of all texts, without those of echoed prompts.
        self.written = -sum(len(row.prompt) for row in rows) if self.echo else 0
        self.about = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": writer.name,
        }

    def whole(self, texts: dict[int, Tokens]) -> Iterator[bytes]:
        choices = [self.choice(place, tokens) for place, tokens in sorted(texts.items())]
        answer = {**self.about, "object": self.object, "choices": choices, "usage": self.usage()}
        return chunks(json_pieces(answer))

    def parts(self, place: int, tokens: Tokens) -> Iterator[str]:
        for part in tokens.parts(ITEMS):
            choice = self.choice(place, part, "delta")
            yield event({**self.about, "object": self.object_of_parts, "choices": [choice]})

    def last(self) -> str:
        shape = {**self.about, "object": self.object_of_parts, "choices": [], "usage": self.usage()}
        return (event(shape) if self.usage_wanted else "") + "data: [DONE]\n\n"

    def usage(self) -> dict[str, int]:
        prompt = sum(len(row.prompt) for row in self.rows if row.number == 0)
        counts = {"prompt_tokens": prompt, "completion_tokens": self.written}
        return counts | {"total_tokens": prompt + self.written}

    def choice(self, place: int, tokens: Tokens, kind: str = "message") -> dict[str, Any]:
        self.written += len(tokens)
        return {
            "index": place,
            **self.content(tokens.text.decode(), kind),
            "logprobs": self.logprob_fields(place, tokens) if self.logprobs else None,
            "finish_reason": {"": None, "length": "length"}.get(tokens.stopped, "stop"),
        }

    def content(self, text: str, kind: str) -> dict[str, Any]:
        return {"text": text}

    def logprob_fields(self, place: int, tokens: Tokens) -> dict[str, Any]:
        """Lists are iterators: materialized, they would take far more memory than `tokens`."""
        name, before = partial(token_name, self.tokenizer), self.offsets[place]
        self.offsets[place] += sum(tokens.lengths)
        return {
            "tokens": map(name, tokens.ids),
            "token_logprobs": (None if isnan(each) else finite(each) for each in tokens.logprobs),
            "top_logprobs": (
                None if top is None else {name(id): finite(logprob) for id, logprob in top}
                for top in self.alternatives(tokens)
            ),
            "text_offset": islice(accumulate(tokens.lengths, initial=before), len(tokens)),
            # Not part of OpenAI's API: two tokens can have the same text, but not the same id.
            "ids": iter(tokens.ids),
            "alternatives": (
                [
                    {"id": id, "token": name(id), "logprob": finite(logprob)}
                    for id, logprob in top or ()
                ]
                for top in self.alternatives(tokens)
            ),
        }

    def alternatives(self, tokens: Tokens) -> Iterator[list[tuple[int, float]] | None]:
        """None for the first token of an echoed prompt, which follows nothing."""
        for logprob, top in zip(tokens.logprobs, tokens.alternatives(), strict=True):
            yield None if isnan(logprob) else top


class ChatAnswer(Answer):
    object, prefix = "chat.completion", "chatcmpl"
    object_of_parts = "chat.completion.chunk"

    def content(self, text: str, kind: str) -> dict[str, Any]:
        rest = {"refusal": None} if kind == "message" else {}
        return {kind: {"role": "assistant", "content": text, **rest}}

    def logprob_fields(self, place: int, tokens: Tokens) -> dict[str, Any]:
        content = (
            self.token(token.id, token.logprob)
            | {"top_logprobs": [self.token(*each) for each in token.top]}
            for token in tokens
        )
        return {"content": content, "refusal": None}

    def token(self, id: int, logprob: float) -> dict[str, Any]:
        token = self.tokenizer.tokens[id]
        return {
            "token": token_name(self.tokenizer, id),
            "logprob": finite(logprob),
            "bytes": list(token) if token else None,
        }


def finite(logprob: float) -> float:
    """JSON has no infinity. OpenAI also uses -9999."""
    return logprob if math.isfinite(logprob) else -9999.0


def event(value: dict[str, Any]) -> str:
    return f"data: {encode(value)}\n\n"


def json_pieces(value: Any) -> Iterator[str]:
    """`value` as JSON, piece by piece. Iterators become lists, a few items at a time."""
    if isinstance(value, Iterator):
        comma = "["
        while items := list(islice(value, ITEMS)):
            yield comma + encode(items)[1:-1]
            comma = ","
        yield "[]" if comma == "[" else "]"
    elif isinstance(value, dict | list) and value:
        mapping, comma = isinstance(value, dict), ""
        yield "{" if mapping else "["
        for each in value:
            yield f"{comma}{encode(each)}:" if mapping else comma
            yield from json_pieces(value[each] if mapping else each)
            comma = ","
        yield "}" if mapping else "]"
    else:
        yield encode(value)


def chunks(pieces: Iterable[str]) -> Iterator[bytes]:
    """The same text in chunks of about `CHUNK` characters."""
    held, size = [], 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= CHUNK:
            yield "".join(held).encode()
            held, size = [], 0
    if held:
        yield "".join(held).encode()


def labels_json(model: ServedClassifier, results: Iterable[dict[str, float]]) -> dict[str, Any]:
    data = [
        {"index": place, "label": best, "probability": each[best], "probabilities": each}
        for place, each in enumerate(results)
        for best in [next(iter(each))]  # the first is the most likely
    ]
    return {"object": "list", "model": model.name, "data": data}


def translate_params(given: dict[str, Any], limits: Limits) -> TranslateParams:
    names = ("beams", "length_penalty", "temperature", "seed", "max_tokens")
    values = {name: given[name] for name in names if name in given}
    values.setdefault("seed", secrets.randbelow(1_000_000))
    return TranslateParams(**values, batch=limits.rows)


def translations_json(model: ServedTranslator, results: list[dict[str, Any]]) -> Iterator[bytes]:
    """Weights are written row by row: as objects, they would take far more memory."""
    for each in results:
        each["score"] = finite(each["score"])
        for part in each["alignment"] or ():
            part["weights"] = ([round(weight, 4) for weight in row] for row in part["weights"])
    return chunks(json_pieces({"object": "list", "model": model.name, "translations": results}))
