"""The same model sizes trained with other libraries, for comparison."""

from collections.abc import Callable
from typing import Any

import torch

from nanolm.bench.machine import wait_for
from nanolm.bench.plain import compile_if_possible
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
