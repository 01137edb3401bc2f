"""The OpenAPI document of the server, generated from the models that validate requests."""

from typing import Any, Literal

from pydantic import create_model
from pydantic.json_schema import models_json_schema

from nanolm import __version__
from nanolm.serve.request_models import RequestModels

STATUS = {
    "400": "The request is invalid. The message says why.",
    "401": "The API key is missing or wrong.",
    "403": "The Host or Origin header is not allowed.",
    "404": "No such model, or no such path.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The Content-Type is not application/json.",
    "429": "The queue is full. Try again after the number of seconds in Retry-After.",
    "500": "Internal error.",
    "503": "Generation has stopped, there are too many connections, or memory or time ran out.",
}


def response(name: str, /, **fields: Any) -> Any:
    """The schema of a response, or of a part of one. Every field is required."""
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
    kind=Literal["language model", "classifier", "translator"],
    context=int,
    vocabulary=int,
    parameters=int,
    max_tokens=int,
    attention=bool,
    labels=list[str] | None,
    prompts=list[str],
)
MODELS = response("ModelList", object=Literal["list"], data=array(MODEL))
USAGE = response("Usage", prompt_tokens=int, completion_tokens=int, total_tokens=int)
ALTERNATIVE = response("Alternative", id=int, token=str, logprob=float)
LOGPROBS = response(  # of the model, before penalties and filters
    "CompletionLogprobs",
    tokens=list[str],
    token_logprobs=list[float | None],  # null for the first token of an echoed prompt
    top_logprobs=list[dict[str, float] | None],
    text_offset=list[int],
    ids=list[int],  # `ids` and `alternatives` are not part of OpenAI's API
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
ALIGNMENT = response(  # of a part of the text; the whole text, unless that exceeds the context
    "Alignment",
    source=list[str],  # the text that each token adds
    target=list[str],
    weights=list[list[float]],  # a row for each target token, the mean of all heads
)
TRANSLATION = response(
    "Translation",
    source=str,
    translation=str,
    score=float,  # the log probability divided by a power of the number of tokens
    notes=list[str],
    alignment=array(ALIGNMENT) | None,
)
TRANSLATIONS = response(
    "TranslationList", object=Literal["list"], model=str, translations=array(TRANSLATION)
)
TOKENS = response("Tokenization", model=str, ids=list[int], tokens=list[str], unseen=int)
# `sampled` are the probabilities after penalties, bans, temperature and filters.
PROBABILITIES = response("Probabilities", ids=list[int], sampled=list[float], candidates=int)
INSPECTION = response("Inspection", page=str)
HEALTH = response("Health", status=Literal["ok"], models=int, writing=int, waiting=int)
EVENT = response("Event", data=str)


def document(requests: RequestModels) -> dict[str, Any]:
    operations = {
        "/health": ("Server status and load.", None, HEALTH),
        "/v1/models": ("List the served models.", None, MODELS),
        "/v1/models/{id}": ("Describe a model.", None, MODEL),
        "/v1/completions": (
            "Complete a prompt. Defaults are as in `nanolm sample`. With stream, the response "
            "is a series of server-sent events, each with new tokens of one text, and then [DONE].",
            requests.completion,
            COMPLETION,
        ),
        "/v1/chat/completions": (
            "Generate the assistant's next message. A model that was not trained for chat just "
            "continues the text.",
            requests.chat,
            CHAT,
        ),
        "/v1/classify": ("Classify texts.", requests.classification, LABELS),
        "/v1/translate": (
            "Translate texts. Defaults are as in `nanolm translate`. The alignment is null for "
            "models without attention.",
            requests.translation,
            TRANSLATIONS,
        ),
        "/v1/tokenize": ("Split a text into a model's tokens.", requests.tokenization, TOKENS),
        "/v1/probabilities": (
            "Compute the probabilities with which the most likely next tokens would be sampled.",
            requests.probabilities,
            PROBABILITIES,
        ),
        "/v1/inspect": (
            "Create a page with a model's attention and predictions for a text. Returns its path.",
            requests.inspection,
            INSPECTION,
        ),
        "/v1/walk": (
            "Create a page with every number of one forward pass over a text. Returns its path.",
            requests.walk,
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
        named = path.endswith("{id}")
        errors += ("404",) * named
        done = content(answer)
        if answer in (COMPLETION, CHAT):  # parts of the same JSON, then [DONE]
            done |= content(EVENT, "text/event-stream")
        responses = {"200": {"description": "OK.", "content": done}} | {
            status: {"description": STATUS[status], "content": content(ERROR)} for status in errors
        }
        about: dict[str, Any] = {"summary": summary, "responses": responses}
        if not free:
            about["security"] = [{}, {"key": []}]
        if named:
            id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
            about["parameters"] = [id]
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
