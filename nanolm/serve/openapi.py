"""The OpenAPI document of the server: its requests are the models that they are checked by."""

from typing import Any, Literal

from pydantic import create_model
from pydantic.json_schema import models_json_schema

from nanolm import __version__
from nanolm.serve.request_models import RequestModels

STATUS = {
    "400": "Something in the request is wrong; the message says what.",
    "401": "The key is missing or wrong.",
    "403": "By a name or from a page that is not allowed.",
    "404": "No such model, or no such path.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "415": "The body is not said to be JSON.",
    "429": "Too much is waiting; Retry-After says for how many seconds.",
    "500": "Computing failed.",
    "503": "The server does not write any more, or has not enough memory for this request.",
}


def response(name: str, /, **fields: Any) -> Any:
    """The shape of an answer, or of a part of one: all of it is always there."""
    required: Any = {field: (kind, ...) for field, kind in fields.items()}
    return create_model(name, **required)


def array(items: Any) -> Any:
    return list[items]


PROBLEM = response("Error", message=str, type=str, param=str | None, code=str | None)
ERROR = response("ErrorResponse", error=PROBLEM)
MODEL = response(
    "Model",
    id=str,
    object=Literal["model"],
    created=int,
    owned_by=str,
    kind=Literal["language model", "classifier"],
    context=int,
    vocabulary=int,
    parameters=int,
    max_tokens=int,
    attention=bool,
    labels=list[str] | None,
)
MODELS = response("ModelList", object=Literal["list"], data=array(MODEL))
USAGE = response("Usage", prompt_tokens=int, completion_tokens=int, total_tokens=int)
ALTERNATIVE = response("Alternative", id=int, token=str, logprob=float)
LOGPROBS = response(  # by the model itself, before any filter
    "CompletionLogprobs",
    tokens=list[str],
    token_logprobs=list[float],
    top_logprobs=list[dict[str, float]],
    text_offset=list[int],
    ids=list[int],  # this and alternatives are nanolm's own
    alternatives=array(array(ALTERNATIVE)),
)
TOKEN = {"token": str, "logprob": float, "bytes": list[int] | None}
CHAT_TOKEN = response("ChatToken", **TOKEN, top_logprobs=array(response("TopLogprob", **TOKEN)))
CHAT_LOGPROBS = response("ChatLogprobs", content=array(CHAT_TOKEN), refusal=None)
MESSAGE = response("Message", role=Literal["assistant"], content=str, refusal=None)
CHOICE = {"index": int, "finish_reason": Literal["stop", "length"] | None}
ANSWER = {"id": str, "created": int, "model": str, "usage": USAGE}
TEXTS = array(response("Choice", **CHOICE, text=str, logprobs=LOGPROBS | None))
MESSAGES = response("ChatChoice", **CHOICE, message=MESSAGE, logprobs=CHAT_LOGPROBS | None)
COMPLETION = response("Completion", **ANSWER, object=Literal["text_completion"], choices=TEXTS)
CHAT = response(
    "ChatCompletion", **ANSWER, object=Literal["chat.completion"], choices=array(MESSAGES)
)
LABEL = response("Label", index=int, label=str, probability=float, probabilities=dict[str, float])
LABELS = response("Classification", object=Literal["list"], model=str, data=array(LABEL))
TOKENS = response("Tokenization", model=str, ids=list[int], tokens=list[str])
INSPECTION = response("Inspection", page=str)
HEALTH = response("Health", status=Literal["ok"], models=int, writing=int, waiting=int)
EVENT = response("Event", data=str)


def document(requests: RequestModels) -> dict[str, Any]:
    operations = {
        "/health": ("Is the server there, and how much is it doing?", None, HEALTH),
        "/v1/models": ("The models that are served.", None, MODELS),
        "/v1/completions": (
            "Write on from a prompt. Defaults are those of `nanolm sample`. With stream, "
            "server-sent events come, each with what is new of one text, and [DONE] at the end.",
            requests.completion,
            COMPLETION,
        ),
        "/v1/chat/completions": (
            "Write the assistant's next message. Models that were not trained for it just go on.",
            requests.chat,
            CHAT,
        ),
        "/v1/classify": ("The labels of texts.", requests.classification, LABELS),
        "/v1/tokenize": ("A text as a model's tokens.", requests.tokenization, TOKENS),
        "/v1/inspect": (
            "A page that shows what a model sees in a text: its path here, for a while.",
            requests.inspection,
            INSPECTION,
        ),
    }
    used = [model for _, *models in operations.values() for model in models if model]
    schemas, definitions = models_json_schema(
        [(model, "validation") for model in (*used, ERROR, EVENT)],
        ref_template="#/components/schemas/{model}",
    )

    def content(model: Any, kind: str = "application/json") -> dict[str, Any]:
        return {kind: {"schema": schemas[model, "validation"]}}

    paths = {}
    for path, (summary, request, answer) in operations.items():
        free = path == "/health"
        errors = tuple(STATUS) if request else ("403", "503") if free else ("401", "403")
        done = content(answer)
        if answer in (COMPLETION, CHAT):  # JSON as above in part, or [DONE]
            done |= content(EVENT, "text/event-stream")
        responses = {"200": {"description": "Done.", "content": done}} | {
            status: {"description": STATUS[status], "content": content(ERROR)} for status in errors
        }
        about: dict[str, Any] = {"summary": summary, "responses": responses}
        if not free:
            about["security"] = [{}, {"key": []}]
        if request:
            about["requestBody"] = {"required": True, "content": content(request)}
        paths[path] = {"post" if request else "get": about}
    return {
        "openapi": "3.1.0",
        "info": {"title": "nanolm", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
