"""The API, with OpenAI's own client and with invalid requests."""

import http.client
import json
import re
import shlex
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from conftest import Cli, program
from servers import Served, Start

import nanolm
from nanolm.generation.sampling_params import DECLARATIONS

README = Path(__file__).parents[2] / "README.md"


def post(server: Served, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"content-type": "application/json", **headers})
    answer = connection.getresponse()
    text = answer.read()
    found = {name.lower(): value for name, value in answer.getheaders()}
    connection.close()
    return answer.status, found, json.loads(text) if text.startswith(b"{") else text


def sampled(cli: Cli, server: Served, *arguments: object) -> dict[str, Any]:
    result = cli("sample", server.folder / "writer", "--json", *arguments)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_models_are_listed(served: Served) -> None:
    listed = served.client().models.list().data
    assert [model.id for model in listed] == ["writer", "other", "labels"]
    assert str(served.folder) not in listed[0].model_dump_json()  # paths are not revealed
    kinds = [model.model_dump()["kind"] for model in listed]
    assert kinds == ["language model", "language model", "classifier"]


def test_a_declared_parameter_is_in_the_document(served: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    connection.request("GET", "/openapi.json")
    document = json.loads(connection.getresponse().read())
    connection.close()
    for request in ("CompletionRequest", "ChatRequest"):
        field = document["components"]["schemas"][request]["properties"]["typical_p"]
        assert field["anyOf"][0] == {"exclusiveMinimum": 0, "maximum": 1, "type": "number"}
        assert field["description"] == DECLARATIONS["typical_p"].help
        assert field["x-slider"]["off"] == 1


def test_answers_on_one_connection_come_at_once(served: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    taken = []
    for _ in range(40):
        began = time.monotonic()
        connection.request("GET", "/v1/models")
        assert json.loads(connection.getresponse().read())
        taken.append(time.monotonic() - began)
    connection.close()
    assert statistics.median(taken) < 0.03  # 0.04 if each waits for the previous acknowledgement


@pytest.mark.parametrize(
    "arguments",
    [{"temperature": 0}, {"seed": 7}, {"seed": 1, "top_p": 0.7}, {"seed": 1, "typical_p": 0.3}],
)
def test_a_completion_is_what_sample_writes(
    served: Served, cli: Cli, arguments: dict[str, Any]
) -> None:
    """Greedy and sampled, also beyond the context length."""
    options = [part for name, value in arguments.items() for part in (option(name), value)]
    expected = sampled(cli, served, "--prompt", "the cat", "--tokens", 60, *options)
    found = served.client().completions.create(
        model="writer", prompt="the cat", max_tokens=60, extra_body=arguments
    )
    assert found.choices[0].text == expected["text"]
    assert found.usage
    assert found.usage.completion_tokens == len(expected["tokens"])


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def test_streaming_gives_the_same_text_in_parts(served: Served) -> None:
    client = served.client()
    asked: dict[str, Any] = {"model": "writer", "prompt": "the dog", "max_tokens": 40, "seed": 3}
    whole = client.completions.create(**asked)
    parts = list(
        client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(part.choices[0].text for part in parts[:-1]) == whole.choices[0].text
    assert [part.choices[0].finish_reason for part in parts[:-1]][-1] == "length"
    assert parts[-1].usage == whole.usage


def test_log_probabilities(served: Served, cli: Cli) -> None:
    expected = sampled(
        cli, served, "--prompt", "the", "--tokens", 12, "--greedy", "--show", "top=5"
    )
    found = served.client().completions.create(
        model="writer", prompt="the", max_tokens=12, temperature=0, logprobs=5
    )
    chances = found.choices[0].logprobs
    assert chances and chances.token_logprobs and chances.top_logprobs and chances.text_offset
    assert chances.token_logprobs == pytest.approx(expected["logprobs"], abs=1e-5)
    assert chances.model_dump()["ids"] == expected["tokens"]
    for place, top in zip(chances.model_dump()["alternatives"], expected["top"], strict=True):
        assert [each["id"] for each in place] == [each["id"] for each in top]
    text = found.choices[0].text
    ends = [*chances.text_offset[1:], len(text)]
    assert "".join(text[a:b] for a, b in zip(chances.text_offset, ends, strict=True)) == text


def test_stop_n_and_seed(served: Served) -> None:
    client = served.client()
    asked: dict[str, Any] = {"model": "writer", "prompt": "a", "max_tokens": 80, "seed": 5}
    several = client.completions.create(**asked, n=3)
    texts = [choice.text for choice in several.choices]
    assert len(set(texts)) == 3
    assert [choice.text for choice in client.completions.create(**asked, n=3).choices] == texts
    stop = texts[0][20:23]
    cut = client.completions.create(**asked, stop=[stop, "never to be seen"]).choices[0]
    assert (cut.text, cut.finish_reason) == (texts[0][: texts[0].find(stop)], "stop")
    prompts = client.completions.create(
        model="writer", prompt=["a", "the cat"], max_tokens=5, temperature=0
    )
    alone = client.completions.create(model="writer", prompt="the cat", max_tokens=5, temperature=0)
    assert prompts.choices[1].text == alone.choices[0].text


def test_ids_are_a_prompt_too(served: Served) -> None:
    status, _, tokens = post(served, "/v1/tokenize", {"model": "writer", "text": "the cat"})
    assert (status, "".join(tokens["tokens"])) == (200, "the cat")
    asked = {"model": "writer", "max_tokens": 9, "temperature": 0}
    by_ids = post(served, "/v1/completions", {**asked, "prompt": tokens["ids"]})[2]
    by_text = post(served, "/v1/completions", {**asked, "prompt": "the cat"})[2]
    assert by_ids["choices"] == by_text["choices"]


def test_chat(served: Served) -> None:
    client = served.client()
    messages: Any = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "the cat?"}]},
    ]
    found = client.chat.completions.create(
        model="writer",
        messages=messages,
        max_completion_tokens=15,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    plain = client.completions.create(
        model="writer",
        prompt="system: be brief\nuser: the cat?\nassistant:",
        max_tokens=15,
        temperature=0,
    )
    choice = found.choices[0]
    assert choice.message.content == plain.choices[0].text
    assert choice.logprobs and choice.logprobs.content
    assert len(choice.logprobs.content) == 15
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    parts = client.chat.completions.create(
        model="writer", messages=messages, max_tokens=15, temperature=0, stream=True
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == choice.message.content


def test_classify_is_what_classify_says(served: Served, cli: Cli) -> None:
    texts = ["the cat", "a tree and a dog, " * 30]
    result = cli("classify", served.folder / "labels", "--json", *texts)
    expected = [json.loads(line)["probabilities"] for line in result.stdout.splitlines()]
    status, _, found = post(served, "/v1/classify", {"model": "labels", "input": texts})
    assert status == 200
    for each, wanted in zip(found["data"], expected, strict=True):
        assert each["probabilities"] == pytest.approx(wanted, abs=1e-6)
        assert each["label"] == max(wanted, key=wanted.__getitem__)


@pytest.mark.parametrize("name", ["writer", "labels"])
def test_inspect_gives_a_page(served: Served, name: str) -> None:
    status, _, found = post(served, "/v1/inspect", {"model": name, "text": "the cat sat"})
    assert status == 200
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    connection.request("GET", found["page"])
    page = connection.getresponse().read().decode()
    assert "What the model sees" in page
    refused = post(served, "/v1/inspect", {"model": "other", "text": "the cat sat"})
    assert refused[0] == 404  # an LSTM has no attention
    assert refused[2]["error"]["message"] == "model must be one of writer, labels"


@pytest.mark.parametrize("name", ["writer", "other"])
def test_a_walk_is_a_page(served: Served, name: str) -> None:
    text = "the cat sat on the mat. " * 20  # only its end is shown
    status, _, found = post(served, "/v1/walk", {"model": name, "text": text})
    assert status == 200
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    connection.request("GET", found["page"])
    assert "A walk through the model" in connection.getresponse().read().decode()
    assert post(served, "/v1/walk", {"model": "labels", "text": "the cat"})[0] == 404
    assert post(served, "/v1/walk", {"model": name, "ids": [10**6]})[0] == 400


WRONG: list[tuple[Any, int, str]] = [
    ({"max_tokens": -1}, 400, "max_tokens must be greater than or equal to 0"),
    ({"temperature": "hot"}, 400, "temperature must be a valid number"),
    ({"temperatur": 1}, 400, "temperatur is not a known field; did you mean temperature?"),
    ({"model": "writr"}, 404, "model must be one of writer, other; did you mean writer?"),
    ({"model": "labels"}, 404, "model must be one of writer, other"),
    ({"n": 17}, 400, "n must be less than or equal to 16"),
    ({"stop": ["a"] * 17}, 400, "stop must have at most 16 items"),
    ({"prompt": [99999]}, 400, "prompt[0] must be less than or equal to"),
    ({"prompt": "\ud800"}, 400, "prompt must be a valid string, unable to parse"),
    ([], 400, "the body must be an object"),
    ({"\ud800": 1}, 400, "must be a valid string"),
    ({"max_tokens": True}, 400, "max_tokens must be a valid integer"),
    ({"max_tokens": 1.5}, 400, "max_tokens must be a valid integer"),
    ({"max_tokens": "5"}, 400, "max_tokens must be a valid integer"),
    ({"temperature": True}, 400, "temperature must be a valid number"),
    ({"top_p": 0}, 400, "top_p must be greater than 0"),
    (b'{"temperature": 1e400}', 400, "temperature must be a finite number"),
    (b'{"seed": 1' + b"0" * 400 + b"}", 400, "seed must be less than or equal to"),
    ({"stop": [5]}, 400, "stop[0] must be a valid string"),
    ({"prompt": {}}, 400, "prompt must be a string, a list of token ids, or"),
    ({"prompt": 5}, 400, "prompt must be a string, a list of token ids, or"),
    ({"stop": 5}, 400, "stop must be a string or a list of"),
    ({"prompt": ["a", 5]}, 400, "prompt[1] must be a valid string"),
    ({"prompt": []}, 400, "prompt must have at least 1 item"),
    ({"stream_options": {"usage": 1}}, 400, "stream_options.usage"),
    (b"{", 400, "not valid JSON"),
    (b'{"temperature": NaN}', 400, "NaN is not JSON"),
    (b"[" * 100_000, 400, "not valid JSON"),
    (b"\xff", 400, "not valid JSON"),
    (b" " * (1 << 20) + b"{}", 413, "1,048,576 bytes"),
    ({"prompt": "ab " * 20_000}, 400, "the limit is 16,384"),
    ({"n": 16, "max_tokens": 4096, "logprobs": 20}, 400, "reduce n, max_tokens"),
    ({"ban": ["x" * 13]}, 400, "ban[0] must have at most 12 characters"),
    ({"stream_options": {str(n): n for n in range(50_000)}}, 400, "stream_options.0"),
]


@pytest.mark.parametrize(("body", "status", "message"), WRONG)
def test_what_is_wrong_is_said(served: Served, body: Any, status: int, message: str) -> None:
    found, headers, answer = post(served, "/v1/completions", body)
    assert (found, headers["content-type"]) == (status, "application/json")
    assert message in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_whole_numbers_and_null(served: Served) -> None:
    """2.0 is an integer in JSON Schema, and null means not given."""
    body = {"model": "writer", "max_tokens": 2.0, "prompt": [1.0, 2], "stop": None, "top_k": None}
    status, _, answer = post(served, "/v1/completions", body)
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 2)
    status, _, answer = post(served, "/v1/chat/completions", {"messages": [{"role": "user"}]})
    assert (status, answer["error"]["message"]) == (400, "messages[0].content is missing")


def test_the_client_raises_what_it_should(served: Served) -> None:
    client = served.client()
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nothing", prompt="a")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="writer", prompt="a", max_tokens=10**6)


def test_other_methods_and_paths(served: Served) -> None:
    assert post(served, "/v1/models", {})[0] == 405
    assert post(served, "/v1/nothing", {})[0] == 404
    assert post(served, "/v1/completions", {}, **{"content-type": "text/plain"})[0] == 415
    for path in ("/../etc/passwd", "/page.css/../../app.py", "/look/..%2f..%2fx", "/%00"):
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
        connection.request("GET", path)
        assert connection.getresponse().status == 404


def test_whoever_goes_away_is_not_written_for(start: Start) -> None:
    """Soon: long before the text would have been finished."""
    server = start("--max-tokens", 1_000_000, "--timeout", 600)
    client = server.client()
    stream = client.completions.create(
        model="writer",
        prompt="a",
        max_tokens=900_000,
        stream=True,
        extra_body={"min_tokens": 10**6},
    )
    next(iter(stream))
    assert health(server)["writing"] == 1
    stream.response.close()
    until(lambda: health(server)["writing"] == 0)


def test_too_many_are_told_to_come_again(start: Start) -> None:
    server = start("--batch", 2, "--queue", 3, "--max-tokens", 1_000_000)
    body = {"model": "writer", "max_tokens": 900_000, "min_tokens": 900_000, "stream": True}
    connections = []
    for _ in range(5):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        connections.append(connection)
    until(lambda: health(server) == {"status": "ok", "models": 3, "writing": 2, "waiting": 3})
    status, headers, answer = post(server, "/v1/completions", body)
    assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
    assert 1 <= int(headers["retry-after"]) <= 60
    status, _, answer = post(server, "/v1/completions", {"model": "writer", "n": 6})
    assert status == 400
    assert re.search(r"\b6 texts.* limit is 5$", answer["error"]["message"])
    for connection in connections:
        connection.close()
    until(lambda: health(server)["writing"] == health(server)["waiting"] == 0)


def test_tokens_are_bounded(start: Start) -> None:
    """Also by default, and after the longest possible prompt."""
    server = start("--max-tokens", 3, names=("writer",))
    for body in ({}, {"max_tokens": 3}, {"min_tokens": 3}, {"prompt": [1] * 16_384}):
        status, _, answer = post(server, "/v1/completions", body)
        assert (status, answer["usage"]["completion_tokens"] <= 3) == (200, True)
    assert post(server, "/v1/completions", {"max_tokens": 4})[0] == 400
    assert post(server, "/v1/completions", {"prompt": [1] * 16_385})[0] == 400


def test_time_is_bounded(start: Start) -> None:
    server = start("--timeout", 1, "--max-tokens", 1_000_000)
    began = time.monotonic()
    body = {"model": "writer", "max_tokens": 900_000, "min_tokens": 900_000}
    status, _, answer = post(server, "/v1/completions", body)
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
    assert 0 < answer["usage"]["completion_tokens"] < 900_000
    assert time.monotonic() - began < 10


def test_a_stop_lets_what_is_written_be_finished(start: Start) -> None:
    server = start("--max-tokens", 100_000)
    asked: Any = {"model": "writer", "prompt": "a", "extra_body": {"min_tokens": 1000}}
    stream = server.client().completions.create(**asked, max_tokens=1000, stream=True)
    parts = iter(stream)
    next(parts)
    server.process.terminate()
    reasons = [part.choices[0].finish_reason for part in parts]
    assert reasons[-1] == "length"
    assert server.process.wait(30) == 0
    with pytest.raises(openai.APIConnectionError):
        server.client().models.list()


def test_the_curl_lines_of_the_readme(served: Served) -> None:
    """As documented, except for the port and the model."""
    lines = README.read_text(encoding="utf-8").replace("\\\n", "").splitlines()
    commands = [line.strip() for line in lines if line.strip().startswith("curl ")]
    assert len(commands) >= 3
    for command in commands:
        here = command.replace("127.0.0.1:8000", f"127.0.0.1:{served.port}")
        here = here.replace("stories", "writer").replace("reviews", "labels")
        result = subprocess.run(shlex.split(here), capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, here
        assert '"error"' not in result.stdout, result.stdout
        assert result.stdout.startswith(("{", "data: {"))


def test_a_port_in_use_is_told_before_anything_is_loaded(served: Served, cli: Cli) -> None:
    result = cli("serve", served.folder / "writer", "--port", served.port)
    assert result.returncode == 2
    assert f"try --port {served.port + 1}" in result.stderr


def test_without_the_extra_it_says_what_to_install(cli: Cli, tmp_path: Path) -> None:
    code = "import sys; sys.modules['starlette'] = None; from nanolm.cli.main import main; main()"
    command = [program()[0], "-c", code, "serve", "runs/x"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert result.returncode == 2
    assert "pip install 'nanolm[serve]'" in result.stderr


def health(server: Served) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/health")
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return found


def until(condition: Any, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("options", [
    {"temperature": 0.5}, {"temperature": 2, "top_k": 3}, {"temperature": 0},
    {"temperature": 1, "frequency_penalty": 1.5},
])  # fmt: skip
def test_probabilities_after_filters(served: Served, options: dict[str, float]) -> None:
    writer = nanolm.load(served.folder / "writer")
    ids = writer.tokenizer.encode("the cat sat on the mat. the cat")
    with torch.no_grad():
        logits = writer.model(torch.tensor([ids]))[0, -1]
    most = logits.topk(20).indices.tolist()
    for id in ids[-3:]:  # the last three count as generated
        logits[id] -= options.get("frequency_penalty", 0)
    least = logits.topk(int(options.get("top_k", len(logits)))).values[-1]
    logits[logits < least] = -torch.inf
    expected = (logits / max(options["temperature"], 1e-6)).softmax(0)
    body = {"model": "writer", "prompt": ids, "generated": 3, "logprobs": 20, **options}
    status, _, found = post(served, "/v1/probabilities", body)
    assert status == 200, found
    assert found["ids"] == most
    assert found["sampled"] == pytest.approx(expected[most].tolist(), abs=1e-5)
    assert found["candidates"] == int((expected > 0).sum())


def test_probabilities_are_bounded(served: Served) -> None:
    body = {"model": "writer", "prompt": [1] * 2049, "logprobs": 6}
    status, _, found = post(served, "/v1/probabilities", body)
    assert (status, "the limit is 2,048" in found["error"]["message"]) == (400, True)
    assert post(served, "/v1/probabilities", {"prompt": [10**6]})[0] == 400
