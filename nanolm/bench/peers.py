"""The same model sizes trained with other libraries, or run by them, for comparison."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanolm.bench.machine import wait_for
from nanolm.bench.plain import compile_if_possible
from nanolm.bench.settings import LLAMA_CPP
from nanolm.errors import UsageError
from nanolm.model.config import ModelConfig
from nanolm.model.config_json import config_to_json, model_type


class Transformers:
    """A plain training loop at its fastest: on a GPU, with 16-bit products and `torch.compile`."""

    def __init__(
        self, config: ModelConfig, rows: int, device: str, dtype: str, note: Callable[[str], None]
    ) -> None:
        self.device = device
        self.autocast_dtype = None if dtype == "float32" else getattr(torch, dtype)
        self.model = transformers_model(config).to(device).train()
        self.parameters = list(self.model.parameters())
        fused = device in ("cpu", "cuda")
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=fused)
        self.ids = torch.randint(config.vocab_size, (rows, config.context), device=device)
        compile_if_possible(self, "transformers", note)

    def step(self) -> None:
        dtype = self.autocast_dtype
        with torch.autocast(self.device, dtype, enabled=dtype is not None):
            loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wait(self) -> None:
        wait_for(self.device)


def transformers_model(config: ModelConfig) -> Any:
    """A model with random weights; a UsageError if transformers or the architecture is missing."""
    family, why = model_type(config)
    if family == "nanolm":
        known = "try --family modern, llama or gpt2"
        raise UsageError(f"--against transformers: no equivalent model ({why}); {known}")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, logging
    except ImportError:
        raise UsageError("--against transformers: try `pip install transformers`") from None
    logging.set_verbosity_error()  # its warnings concern generation only
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_to_json(config)))


class LlamaCpp:
    """llama.cpp, which generates one text with the model of a GGUF file on a CPU. Its packages from
    PyPI do not use all instructions of new processors; one built from source may be faster."""

    def __init__(self, file: Path, prompt: list[int], tokens: int, threads: int) -> None:
        params = xllamacpp().CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = str(file), len(prompt) + tokens, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.n_gpu_layers, params.verbosity = 0, -1
        self.server = xllamacpp().Server(params)
        self.tokens = tokens
        self.request = {"prompt": prompt, "n_predict": tokens, "temperature": 0}
        self.request |= {"ignore_eos": True, "cache_prompt": False}

    def step(self) -> None:
        """Generate the whole text greedily."""
        answer = self.server.handle_completions(self.request)
        assert answer["usage"]["completion_tokens"] == self.tokens

    def wait(self) -> None:
        """Nothing to wait for."""


def xllamacpp() -> Any:
    """llama.cpp's package for Python."""
    try:
        return importlib.import_module("xllamacpp")
    except ImportError:
        raise UsageError(f"--against {LLAMA_CPP}: try `pip install xllamacpp`") from None
