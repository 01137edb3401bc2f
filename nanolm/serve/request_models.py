"""Pydantic models of the requests, built for the served models and the limits.

    >>> checked({"prompt": "a", "max_tokens": 5}, RequestModels(models, limits).completion)

The sampling fields come from `SamplingParams`; the rest follow OpenAI. Null counts as not given.
"""

import itertools
import re
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, Literal, Union

import pydantic
from pydantic import Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from nanolm.errors import NanolmError, did_you_mean
from nanolm.generation.sampling_params import DECLARATIONS, GROUPS, TYPES, SamplingParams
from nanolm.pairs.translator import TranslateParams
from nanolm.serve.engine import MAX_TOP_LOGPROBS, Limits
from nanolm.serve.models import ServedClassifier, ServedLanguageModel, ServedModel, ServedTranslator

API_NAMES = {"tokens": "max_tokens"}  # OpenAI's names
TEXTS = "a string or a list of strings"
PARTS = "a string or a list of text parts"
Bias = Annotated[float, Field(ge=-100, le=100)]
MAX_BIASES = 300  # as in OpenAI's API
MAX_PROMPTS = 64
PROMPTS = "a string, a list of token ids, or a list of either"
CHAT = (
    "If the tokenizer has <|im_start|> and <|im_end|>, messages are formatted as ChatML. "
    "Otherwise, each message becomes a line `role: content`, the prompt ends in `assistant:`, and "
    "generation stops at the next `user:` line."
)


class APIError(NanolmError):
    def __init__(
        self, message: str, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        about = {"type": kinds.get(self.status, default), "code": self.code}
        # Text from a request may contain a lone surrogate, which UTF-8 cannot encode.
        message, param = (
            text and text.encode(errors="backslashreplace").decode()
            for text in (str(self), self.param)
        )
        return {"error": {"message": message, "param": param, **about}}


class RequestModel(pydantic.BaseModel):
    """Rejects unknown fields, and converts nothing: "1" and true are not numbers."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


record: Any = partial(pydantic.create_model, __base__=RequestModel)


def text(most: int, least: int = 0) -> Any:
    return Annotated[str, Field(min_length=least, max_length=most)]


def listed(items: Any, most: int, least: int = 1) -> Any:
    return Annotated[list[items], Field(min_length=least, max_length=most)]


def whole(least: int, most: int) -> Any:
    """An integer; 2.0 is one, as in JSON Schema."""
    as_integer = pydantic.BeforeValidator(
        lambda value: int(value) if isinstance(value, float) and value.is_integer() else value
    )
    return Annotated[int, Field(ge=least, le=most), as_integer]


def one_of(allowed: str, **kinds: Any) -> Any:
    """One of several kinds of input, chosen by the first item, which gives clearer errors."""

    def kind_of(value: Any) -> str | None:
        first = value[0] if isinstance(value, list) and value else None
        by_type = {list: "prompts", int: "ids", float: "ids"}
        kind = by_type.get(type(first), "texts") if isinstance(value, list) else "text"
        if kind == "text" and not isinstance(value, str):
            return None
        return f"<{kind if kind in kinds else 'texts'}>"

    about = Discriminator(kind_of, "wrong_kind", f"must be {allowed}")
    tagged = tuple(Annotated[kind, Tag(f"<{name}>")] for name, kind in kinds.items())
    return Annotated[Union[tagged], about]  # noqa: UP007


def number_pattern(most: int) -> str:
    """A regular expression for the numbers from 0 to `most`, which JSON has as strings in keys."""
    digits = str(most)
    shorter = [f"[0-9]{{1,{len(digits) - 1}}}"] if len(digits) > 1 else []
    less = [
        f"{digits[:place]}[0-{int(digit) - 1}][0-9]{{{len(digits) - place - 1}}}"
        for place, digit in enumerate(digits)
        if digit != "0"
    ]
    return "|".join([*shorter, *less, digits])


def optional(kind: Any, default: Any = None, help: str | None = None, **extra: Any) -> Any:
    return kind | None, Field(default, description=help, json_schema_extra=extra or None)


def sampling_field(name: str, limit: int | None, least: float | None = None) -> Any:
    about, default = DECLARATIONS[name], getattr(SamplingParams, name)
    least, most = about.range[0] if least is None else least, limit or about.range[1]
    bounds: Any = {"gt" if about.above else "ge": least, "le": most}
    kind: Any = Annotated[float, Field(**bounds)]
    if TYPES[name] is int:
        kind = whole(int(least), int(most))
        default = default if default is None else min(default, int(most))
    if not about.slider:
        return optional(kind, None, about.help)
    return optional(kind, default, about.help, **slider(*about.slider, off=about.off))


def slider(least: float, most: float, step: float, off: float | None = None) -> dict[str, Any]:
    """The range of its slider in the playground; at `off` the field is not sent."""
    return {"x-slider": {"min": least, "max": most, "step": step, "off": off}}


class RequestModels:
    def __init__(self, models: dict[str, ServedModel], limits: Limits) -> None:
        vocabulary = max((m.tokenizer.vocab_size for m in models.values()), default=1)
        longest = max((limits.longest(m.window) for m in models.values()), default=1)
        ids, words = listed(whole(0, vocabulary - 1), longest), text(limits.body)
        limit = {"tokens": limits.tokens, "min_tokens": limits.tokens, "seed": 2**53}
        common: dict[str, Any] = {
            "model": name_of(models, ServedLanguageModel),
            "n": optional(whole(1, 16), 1, "Number of completions.", **slider(1, 6, 1)),
        }
        for name, about in sorted(DECLARATIONS.items(), key=lambda row: GROUPS.index(row[1].group)):
            if about.served and TYPES[name] is not str:
                common[API_NAMES.get(name, name)] = sampling_field(name, limit.get(name))
        token_id = Annotated[str, Field(pattern=f"^({number_pattern(vocabulary - 1)})$")]
        # Each byte of a banned text takes a row as long as the vocabulary.
        bans = listed(text(12, 1), 3, 0)
        stops = one_of(TEXTS, text=text(200, 1), texts=listed(text(200, 1), 16, 0))
        common |= {
            "ban": optional(bans, help="Never generate any of these texts, even within a word."),
            "stop": optional(stops, help="Stop before this text, or before any text in a list."),
            "logit_bias": optional(
                Annotated[
                    dict[token_id, Bias],
                    Field(max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False}),
                ],
                help="Add these values to the logits of tokens, given by their ids.",
            ),
            "response_format": optional(
                record("ResponseFormat", type=(Literal["text"], ...)),
                help="Only text is supported.",
            ),
            "stream": optional(bool, False),
            "stream_options": optional(record("StreamOptions", include_usage=optional(bool))),
            "user": optional(
                text(200), help="Identifier of the end user. Users take turns in the queue."
            ),
        }
        user = common["user"]
        prompts = one_of(
            PROMPTS,
            text=words,
            texts=listed(words, MAX_PROMPTS),
            ids=ids,
            prompts=listed(ids, MAX_PROMPTS),
        )
        prompt = prompts, Field("", description=f"{PROMPTS.capitalize()}.")
        logprobs = optional(
            whole(0, MAX_TOP_LOGPROBS), help="Number of most likely tokens to return per position."
        )
        echo = "Return the prompt before the completion, with logprobs if requested."
        completion = {
            "prompt": prompt,
            "echo": optional(bool, False, echo),
            "logprobs": logprobs,
            **common,
            "max_tokens": sampling_field("tokens", limits.tokens, least=0),
        }
        self.completion = record("CompletionRequest", **completion)
        generated = "Number of tokens at the end of the prompt that penalties count as generated."
        completion["generated"] = optional(whole(0, longest), 0, generated)
        self.probabilities = record("ProbabilitiesRequest", **completion)
        part = record("TextPart", type=(Literal["text"], ...), text=(words, ...))
        message = record(
            "RequestMessage",
            role=(Literal["system", "developer", "user", "assistant"], ...),
            content=(one_of(PARTS, text=words, texts=listed(part, 64)), ...),
            name=optional(text(64)),
        )
        self.chat = record(
            "ChatRequest",
            messages=(listed(message, 256), Field(description=CHAT)),
            logprobs=optional(bool, False),
            top_logprobs=logprobs,
            max_completion_tokens=common["max_tokens"],
            **common,
        )
        inputs = one_of(TEXTS, text=words, texts=listed(words, 64)), ...
        named = name_of(models, ServedClassifier)
        self.classification = record("ClassifyRequest", model=named, input=inputs)
        self.translation = record(
            "TranslateRequest",
            model=name_of(models, ServedTranslator),
            text=(inputs[0], Field(description=f"{TEXTS.capitalize()} to translate.")),
            **translation_fields(limits),
            user=user,
        )
        named = name_of(models)
        self.tokenization = record("TokenizeRequest", model=named, text=(words, ...))
        named = name_of({name: model for name, model in models.items() if model.attention})
        given = {"text": (words, ""), "ids": (ids | None, None)}
        self.inspection = record("InspectRequest", model=named, **given)
        named = name_of(models, ServedLanguageModel)
        self.walk = record("WalkRequest", model=named, **given)


def translation_fields(limits: Limits) -> dict[str, Any]:
    default, temperature = TranslateParams, DECLARATIONS["temperature"].range
    penalty = (
        "Divide log probabilities by the length raised to this power. "
        "Values above 1 favor longer texts."
    )
    hot = "Sample with this temperature instead of using beam search."
    return {
        "beams": optional(
            whole(1, 16), default.beams, "Number of beams for beam search.", **slider(1, 8, 1)
        ),
        "length_penalty": optional(
            Annotated[float, Field(ge=-10, le=10)],
            default.length_penalty,
            penalty,
            **slider(0, 2, 0.1),
        ),
        "temperature": optional(
            Annotated[float, Field(ge=temperature[0], le=temperature[1])],
            help=hot,
            **slider(0, 2, 0.05, off=0),
        ),
        "seed": sampling_field("seed", 2**53),
        "max_tokens": optional(
            whole(1, limits.tokens),
            help="Maximum number of tokens per translation. The default is the context length.",
        ),
        "alignment": optional(
            bool, False, "Also return how much each target token attended to each source token."
        ),
    }


def name_of(models: dict[str, ServedModel], kind: type[ServedModel] = ServedModel) -> Any:
    names = [name for name, model in models.items() if isinstance(model, kind)]
    must = f"must be a {kind.kind}, but none is served"
    if names:
        must = f"must be one of {', '.join(names[:20])}"

    def check_kind(name: Any) -> Any:
        if isinstance(name, str) and name in models and name not in names:
            why = {"why": f"{must}; {advice([models[name]])}"}
            raise PydanticCustomError("wrong_model", "{why}", why)
        return name

    about = "Name of a model from /v1/models. The default is the first one."
    if not names:
        names, about = ["none"], "No model of this kind is served."
    known: Any = Literal[tuple(names)]
    checks = pydantic.BeforeValidator(check_kind)
    return Annotated[known, checks], Field(names[0], description=about)


def advice(models: Iterable[ServedModel]) -> str:
    """What each model is for."""
    uses = (f"{each.name} is a {each.kind}: use {each.path}" for each in models)
    return "; ".join(itertools.islice(uses, 20))


def checked(body: Any, model: type[pydantic.BaseModel]) -> dict[str, Any]:
    """The given fields; APIError reports the first problem."""
    try:
        return model.model_validate(body).model_dump(exclude_unset=True, exclude_none=True)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
    path = [each for each in first["loc"] if not str(each).startswith("<")]  # without Tags
    where = "".join(f"[{each}]" if isinstance(each, int) else f".{each[:80]}" for each in path)[1:]
    match first["type"]:
        case "extra_forbidden":
            problem = "is not a known field" + did_you_mean(where, [*model.model_fields])
        case "missing":
            problem = "is missing"
        case "model_type":
            problem = "must be an object"
        case "literal_error":
            known = re.findall("'([^']*)'", first["ctx"]["expected"])
            names = f"one of {', '.join(known[:20])}" if len(known) > 1 else f'"{"".join(known)}"'
            problem = f"must be {names}{did_you_mean(first['input'], known)}"
        case _:
            problem = re.sub("^(Input|String|List) should", "must", first["msg"])
    status = 404 if where == "model" and isinstance(first["input"], str) else 400
    code = "model_not_found" if where == "model" else None
    raise APIError(f"{where or 'the body'} {problem}", status, where or None, code)
