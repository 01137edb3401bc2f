"""Training steps on random tokens, to measure their speed without a text.

>>> trial = SpeedTrial(configure("modern", vocab_size=512, **shape), rows=16, device="cpu")
>>> trial.step()
"""

from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from nanolm.model.build import build_model
from nanolm.model.config import GPTConfig, ModelConfig
from nanolm.model.device import choose_dtype
from nanolm.planning import recipe, tuning
from nanolm.training.loss import next_token_loss
from nanolm.training.optim import Optimizers
from nanolm.training.settings import TrainSettings
from nanolm.training.step import Step

NOISE_BATCHES = 4  # more than one, so that the model cannot memorize it
LR = 1e-4


class SpeedTrial:
    """A model and its optimizer, trained on random tokens as `nanolm train` would."""

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        device: str,
        dtype: str = "auto",
        threads: int | None = None,
        compiled: bool = False,
        settings: TrainSettings | None = None,
    ) -> None:
        """`settings` holds the choices already made for this machine."""
        torch.manual_seed(1)
        settings = settings or TrainSettings((), threads=threads, dtype=dtype)
        settings = replace(settings, context=config.context, batch=rows, device=device)
        optimizer = settings.optimizer or recipe.optimizer(config, rows)[0]
        if settings.dtype == "auto" and device != "cpu":
            settings = replace(settings, dtype=choose_dtype("auto", device)[0])
        self.model = build_model(config).train()
        self.settings, self.choices = tuning.fit_to_machine(settings, self.model)
        settings = self.settings
        self.stack = ExitStack()
        self.stack.enter_context(tuning.attention_by(settings.attention))
        tuning.with_kernels(self.model.to(device), settings)
        tuning.use_attention(self.model, settings)
        if compiled and isinstance(config, GPTConfig) and not tuning.missing_compiler(device):
            tuning.compile_model(self.model)
        self.tokens = rows * config.context
        parameters, matrices = dict(self.model.named_parameters()), self.model.muon_parameters()
        with tuning.threads_for(settings.threads, settings.workers):
            how = (optimizer, 0.1, matrices)
            optimizers = Optimizers(parameters, *how, workers=settings.workers or 1)
            self.update = Step(self.loss, optimizers, settings.dtype, lambda batch: self.tokens)
        self.batches = torch.randint(config.vocab_size, (NOISE_BATCHES, rows, config.context + 1))
        if device == "cuda":
            self.batches = self.batches.pin_memory()
        self.count = 0

    def loss(self, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x = self.model.hidden_states(ids[:, :-1])
        return next_token_loss(self.model.head, x, ids[:, 1:]), {}

    def step(self) -> None:
        """One update; a GPU may still be computing it afterwards."""
        with tuning.threads_for(self.settings.threads, self.settings.workers):
            self.update((self.batches[self.count % NOISE_BATCHES],), LR)
        self.count += 1

    def wait(self) -> None:
        if self.settings.device == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        self.stack.close()
