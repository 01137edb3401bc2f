"""The same shapes trained with other libraries, to compare with."""

from collections.abc import Callable
from typing import Any

import torch

from nanolm.bench.machine import wait_for
from nanolm.errors import UsageError
from nanolm.model.config import ModelConfig
from nanolm.model.config_json import config_to_json, model_type


class Transformers:
    """A plain loop with all that makes it fast: on a GPU 16-bit products and `torch.compile`."""

    def __init__(
        self, config: ModelConfig, rows: int, device: str, dtype: str, note: Callable[[str], None]
    ) -> None:
        self.device = device
        self.autocast_dtype = None if dtype == "float32" else getattr(torch, dtype)
        self.model = model = transformers_model(config).to(device).train()
        self.parameters = list(model.parameters())
        fused = device in ("cpu", "cuda")
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=fused)
        self.ids = torch.randint(config.vocab_size, (rows, config.context), device=device)
        if device == "cuda":
            self.model = torch.compile(model)
            try:
                self.step()
            except Exception as error:  # of its many parts, any can fail, each in its own way
                self.model = model
                self.optimizer.zero_grad()
                note(f"transformers runs uncompiled: {type(error).__name__}")

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
    """With fresh weights; a UsageError where there is no such model, or no such package."""
    family, why = model_type(config)
    if family == "nanolm":
        known = "try --family modern, llama or gpt2"
        raise UsageError(f"--against transformers: it has no such model ({why}); {known}")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, logging
    except ImportError:
        raise UsageError("--against transformers: first pip install transformers") from None
    logging.set_verbosity_error()  # it warns of what only writing needs
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_to_json(config)))
