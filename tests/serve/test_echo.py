"""Echoed prompts with their log probabilities, logit bias, and other fields of OpenAI's API."""

import json
import re
import urllib.error
import urllib.request
from typing import Any

import pytest
import torch
from servers import Served

from nanolm.generation.language_model import load
from nanolm.serve.request_models import number_pattern


def ask(server: Served, **body: Any) -> Any:
    """The choices of a completion, or what is wrong."""
    data = json.dumps({"model": "writer", **body}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", data)
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["choices"]
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]


@pytest.mark.parametrize("name", ["writer", "other"])
def test_log_probabilities_of_prompts(name: str, served: Served) -> None:
    """As the model itself gives them; also of a prompt of the context and one token more."""
    writer = load(served.folder / name, print)
    prompts = [[writer.tokenizer.end_of_text, *range(65, 65 + n)] for n in (0, 1, 5, 32)]
    how: dict[str, Any] = {"model": name, "echo": True, "logprobs": 2, "temperature": 0}
    choices = ask(served, prompt=prompts, max_tokens=1, **how)
    alone = [ask(served, prompt=ids, max_tokens=0, **how)[0] for ids in prompts]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for ids, choice, only in zip(prompts, choices, alone, strict=True):
        found = choice["logprobs"]
        assert found["ids"][:-1] == only["logprobs"]["ids"] == ids
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        with torch.no_grad():
            expected = writer.model(torch.tensor([ids])[:, :32])[0].log_softmax(-1)
        for place, id in enumerate(ids[1:]):
            assert found["token_logprobs"][place + 1] == pytest.approx(
                expected[place, id].item(), abs=1e-4
            )
            top = [each["id"] for each in found["alternatives"][place + 1]]
            assert top == expected[place].topk(2).indices.tolist()
            if top[0] == id:  # as lm-evaluation-harness finds out whether it is the greedy token
                values = found["top_logprobs"][place + 1].values()
                assert found["token_logprobs"][place + 1] == max(values)
        values = only["logprobs"]["token_logprobs"][1:]
        assert values == pytest.approx(found["token_logprobs"][1:-1], abs=1e-4)
        assert only["text"] == choice["text"][: len(only["text"])] == bytes(ids[1:]).decode()
        assert (only["finish_reason"], choice["finish_reason"]) == ("length", "length")
        assert found["text_offset"] == [0, *range(len(ids))]


def test_the_text_goes_on(served: Served) -> None:
    how: dict[str, Any] = {"prompt": "the cat", "max_tokens": 6, "temperature": 0, "n": 2}
    plain, echoed = ask(served, **how), ask(served, **how, echo=True)
    assert [each["text"] for each in echoed] == [f"the cat{each['text']}" for each in plain]
    client = served.client()
    parts = list(
        client.completions.create(
            model="writer",
            prompt="the cat",
            max_tokens=6,
            temperature=0,
            echo=True,
            logprobs=1,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(part.choices[0].text for part in parts[:-1]) == echoed[0]["text"]
    usage = parts[-1].usage
    assert usage and usage.completion_tokens == 6
    whole = client.completions.create(
        model="writer", prompt="the cat", max_tokens=6, temperature=0, echo=True, logprobs=1
    )
    assert whole.usage == usage
    chances = whole.choices[0].logprobs
    assert chances and chances.tokens and chances.text_offset
    for token, place in zip(chances.tokens, chances.text_offset, strict=True):
        if token.isascii() and "\\" not in token:
            assert whole.choices[0].text[place:].startswith(token)


def test_a_prompt_beyond_the_context_is_scored_in_windows(served: Served) -> None:
    writer = load(served.folder / "writer", print)
    ids = [writer.tokenizer.end_of_text, *(97 + n % 26 for n in range(70))]
    (choice,) = ask(served, prompt=ids, max_tokens=0, echo=True, logprobs=0)
    found = choice["logprobs"]["token_logprobs"]
    for begin, first, end in ((0, 0, 32), (32, 32, 64), (38, 64, 70)):
        with torch.no_grad():
            logits = writer.model(torch.tensor([ids[begin:end]]))[0].log_softmax(-1)
        expected = [logits[at - begin, ids[at + 1]].item() for at in range(first, end)]
        assert found[first + 1 : end + 1] == pytest.approx(expected, abs=1e-4)


def test_what_an_echo_may_cost(served: Served) -> None:
    ids = [97] * 4000
    refused = ask(served, prompt=[ids] * 16, max_tokens=1, echo=True, logprobs=20)
    assert refused[0] == 400
    assert "exceed the limit of" in refused[1]
    assert ask(served, prompt=ids * 5, max_tokens=0, echo=True)[0] == 400
    assert len(ask(served, prompt=[ids] * 4, max_tokens=0, echo=True, logprobs=1)) == 4


def test_logit_bias(served: Served) -> None:
    how: dict[str, Any] = {"prompt": ["the cat"] * 3, "max_tokens": 8, "seed": 1, "logprobs": 0}
    usual = ask(served, **how)[0]["logprobs"]["ids"]
    for choice in ask(served, **how, logit_bias={str(ord("q")): 100}):
        assert choice["text"] == "q" * 8
    banned = {str(id): -100 for id in usual}
    for choice in ask(served, **how, logit_bias=banned):
        assert not {str(id) for id in choice["logprobs"]["ids"]} & set(banned)
    assert ask(served, **how)[0]["logprobs"]["ids"] == usual  # nothing is left of it
    message = served.client().chat.completions.create(
        model="writer",
        messages=[{"role": "user", "content": "a"}],
        max_tokens=3,
        logit_bias={str(ord("q")): 100},
        response_format={"type": "text"},
    )
    assert message.choices[0].message.content == "qqq"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"logit_bias": {"300": 1}}, "logit_bias.300"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5 must be less than or equal to 100"),
        ({"logit_bias": {str(n): 1 for n in range(301)}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, 'response_format.type must be "text"'),
        ({"prompt": ["a"] * 65}, "prompt must have at most 64 items"),
    ],
)
def test_what_is_not_possible(body: dict[str, Any], said: str, served: Served) -> None:
    status, message = ask(served, **body)
    assert status == 400
    assert said in message


def test_no_tokens(served: Served) -> None:
    for choice in ask(served, prompt=["a", "b"], max_tokens=0, logprobs=1):
        assert (choice["text"], choice["finish_reason"]) == ("", "length")
        assert choice["logprobs"]["tokens"] == []


@pytest.mark.parametrize("most", [0, 7, 10, 299, 300, 50256])
def test_numbers_in_keys(most: int) -> None:
    matches = re.compile(number_pattern(most)).fullmatch
    assert [n for n in range(1000) if matches(str(n))] == list(range(min(1000, most + 1)))
    assert matches(str(most))
    assert not matches(str(most + 1))


def test_one_model(served: Served) -> None:
    import openai

    client = served.client()
    assert client.models.retrieve("other") == client.models.list().data[1]
    with pytest.raises(openai.NotFoundError, match="served are writer, other, labels"):
        client.models.retrieve("another")
