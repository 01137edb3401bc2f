"""The OpenAPI document of the server: its requests are the schemas that they are checked by."""

from typing import Any

from nanolm import __version__
from nanolm.serve.api import MAX_TOP, Schemas
from nanolm.serve.schema import Schema

STATUS = {
    "400": "Something in the request is wrong; the message says what.",
    "401": "The key is missing or wrong.",
    "403": "ParsedRequest by a name or a page that is not allowed.",
    "404": "No such model, or no such path.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "415": "The body is not said to be JSON.",
    "429": "Too much is waiting; Retry-After says for how many seconds.",
    "500": "Computing failed.",
    "503": "The server does not write any more.",
}
JSON = "application/json"
STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}


def shape(properties: dict[str, Schema], **rest: Any) -> Schema:
    """Of an answer: all of it is always there."""
    return {"type": "object", "properties": properties, "required": list(properties), **rest}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


ERROR = shape(
    {
        "error": shape(
            {"message": STRING, "type": STRING, "param": maybe(STRING), "code": maybe(STRING)}
        )
    }
)
MODEL = shape(
    {
        "id": STRING,
        "object": {"enum": ["model"]},
        "created": INTEGER,
        "owned_by": STRING,
        "kind": {"enum": ["language model", "classifier"]},
        "context": INTEGER,
        "vocabulary": INTEGER,
        "parameters": INTEGER,
        "max_tokens": INTEGER,
        "attention": {"type": "boolean"},
        "labels": maybe(array(STRING)),
    }
)
USAGE = shape({"prompt_tokens": INTEGER, "completion_tokens": INTEGER, "total_tokens": INTEGER})
REASON = maybe({"enum": ["stop", "length"]})
CHANCES = maybe(
    shape(
        {
            "tokens": array(STRING),
            "token_logprobs": array(NUMBER),
            "top_logprobs": array({"type": "object", "additionalProperties": NUMBER}),
            "text_offset": array(INTEGER),
            "ids": array(INTEGER),
            "alternatives": array(
                array(shape({"id": INTEGER, "token": STRING, "logprob": NUMBER}))
            ),
        },
        description="By the model itself, before any knob; ids and alternatives are nanolm's own.",
    )
)
TOKEN = {"token": STRING, "logprob": NUMBER, "bytes": maybe(array(INTEGER))}
CHAT_CHANCES = maybe(
    shape(
        {
            "content": array(shape({**TOKEN, "top_logprobs": array(shape(TOKEN))})),
            "refusal": {"type": "null"},
        }
    )
)
ABOUT: dict[str, Schema] = {"id": STRING, "created": INTEGER, "model": STRING}


def answered(kind: str, choice: Schema) -> Schema:
    kinds = {"object": {"enum": [kind]}, "choices": array(choice), "usage": USAGE}
    return shape({**ABOUT, **kinds})


COMPLETION = answered(
    "text_completion",
    shape({"index": INTEGER, "text": STRING, "logprobs": CHANCES, "finish_reason": REASON}),
)
MESSAGE = shape({"role": {"enum": ["assistant"]}, "content": STRING, "refusal": {"type": "null"}})
CHAT = answered(
    "chat.completion",
    shape(
        {"index": INTEGER, "message": MESSAGE, "logprobs": CHAT_CHANCES, "finish_reason": REASON}
    ),
)
LABELS = shape(
    {
        "object": {"enum": ["list"]},
        "model": STRING,
        "data": array(
            shape(
                {
                    "index": INTEGER,
                    "label": STRING,
                    "probability": NUMBER,
                    "probabilities": {"type": "object", "additionalProperties": NUMBER},
                }
            )
        ),
    }
)
TOKENS = shape({"model": STRING, "ids": array(INTEGER), "tokens": array(STRING)})
LOOK = shape({"page": STRING})
HEALTH = shape(
    {"status": {"enum": ["ok"]}, "models": INTEGER, "writing": INTEGER, "waiting": INTEGER}
)


def document(schemas: Schemas) -> dict[str, Any]:
    paths = {
        "/health": got("Is the server there, and how much is it doing?", HEALTH, free=True),
        "/v1/models": got(
            "The models that are served.",
            shape({"object": {"enum": ["list"]}, "data": array(MODEL)}),
        ),
        "/v1/completions": asked(
            "Write on from a prompt. Defaults are those of `nanolm sample`; up to "
            f"{MAX_TOP} of the likeliest tokens are told at each place. With stream, "
            "server-sent events come, each with what is new of one text, and [DONE] at the end.",
            schemas.completion,
            COMPLETION,
            streamed=True,
        ),
        "/v1/chat/completions": asked(
            "Write the assistant's next message. Models that were not trained for it just go on.",
            schemas.chat,
            CHAT,
            streamed=True,
        ),
        "/v1/classify": asked("The labels of texts.", schemas.classification, LABELS),
        "/v1/tokenize": asked(
            "A text as the tokens that a model is given.", schemas.tokenization, TOKENS
        ),
        "/v1/inspect": asked(
            "A page that shows what a model sees in a text: its path on this server, where it is "
            "kept for a while.",
            schemas.inspection,
            LOOK,
        ),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "nanolm", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def got(about: str, answer: Schema, free: bool = False) -> dict[str, Any]:
    errors = ("403", "503") if free else ("401", "403")
    return {"get": operation(about, answer, errors, free)}


def asked(about: str, request: Schema, answer: Schema, streamed: bool = False) -> dict[str, Any]:
    body = {"required": True, "content": {JSON: {"schema": request}}}
    found = operation(about, answer, tuple(STATUS))
    if streamed:
        events = shape({"data": STRING}, description="An event: JSON as above in part, or [DONE].")
        found["responses"]["200"]["content"]["text/event-stream"] = {"schema": events}
    return {"post": {**found, "requestBody": body}}


def operation(
    about: str, answer: Schema, errors: tuple[str, ...], free: bool = False
) -> dict[str, Any]:
    fine = {"description": "Done.", "content": {JSON: {"schema": answer}}}
    told = {
        status: {"description": STATUS[status], "content": {JSON: {"schema": ERROR}}}
        for status in errors
    }
    security: dict[str, Any] = {} if free else {"security": [{}, {"key": []}]}
    return {"summary": about, "responses": {"200": fine, **told}, **security}
