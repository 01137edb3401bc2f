"""llama.cpp itself, as a server for one GGUF file.

>>> with LlamaCpp(file) as llama:
...     llama.encode("cats"), llama.greedy([1, 2, 3], 20)
"""

import json
import urllib.request
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from nanolm.model.base import Model


class LlamaCpp:
    def __init__(self, file: Path, context: int = 512) -> None:
        x = pytest.importorskip("xllamacpp")
        params = x.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = str(file), context, 1
        params.warmup = params.fit_params = False
        params.verbosity = -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        # As exact as it can be: nothing is rounded to half precision on the way.
        params.cache_type_k = params.cache_type_v = x.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server = x.Server(params)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        del self.server  # which stops it

    def ask(self, route: str, **body: Any) -> Any:
        head = {"content-type": "application/json"}
        address = f"{self.server.listening_address}/{route}"
        request = urllib.request.Request(address, json.dumps(body).encode(), head)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=120) as answer:
            return json.loads(answer.read())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.ask("tokenize", content=text, parse_special=False)["tokens"]
        return ids

    def decode(self, ids: list[int]) -> str:
        return str(self.ask("detokenize", tokens=ids)["content"])

    def greedy(self, prompt: list[int], tokens: int) -> list[int]:
        """The most likely tokens, without those that end a text."""
        how = {"temperature": 0, "ignore_eos": True, "return_tokens": True}
        ids: list[int] = self.ask("completion", prompt=prompt, n_predict=tokens, **how)["tokens"]
        return ids

    def logprobs(self, prompt: list[int]) -> dict[int, float]:
        """Of the ten tokens that are most likely to come next."""
        # It chooses a letter, because it tells nothing about a token that is half a character.
        how = {"n_probs": 10, "n_predict": 1, "logit_bias": [[self.encode("a")[0], 1000]]}
        (step,) = self.ask("completion", prompt=prompt, **how)["completion_probabilities"]
        return {each["id"]: each["logprob"] for each in step["top_logprobs"]}


def greedy(model: Model, prompt: list[int], tokens: int, never: list[int]) -> list[int]:
    """The same by nanolm."""
    ids: list[int] = []
    with torch.inference_mode():
        cache, new = model.init_cache(1, len(prompt) + tokens), torch.tensor([prompt])
        for _ in range(tokens):
            logits = model(new, cache)[0, -1]
            logits[never] = -torch.inf
            ids.append(int(logits.argmax()))
            new = torch.tensor([ids[-1:]])
    return ids


def largest_difference(llama: LlamaCpp, model: Model, ids: list[int]) -> float:
    """Of log-probabilities after each of `ids`."""
    with torch.inference_mode():
        ours: list[list[float]] = model(torch.tensor([ids]))[0].log_softmax(dim=-1).tolist()
    theirs = [llama.logprobs(ids[: place + 1]) for place in range(len(ids))]
    assert all(len(found) == 10 for found in theirs)
    return max(
        abs(ours[place][id] - float(value))
        for place, found in enumerate(theirs)
        for id, value in found.items()
    )
