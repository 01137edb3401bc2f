"""nanoGPT's recipe in plain PyTorch, for comparison: a GPT-2 without biases, and its training loop.

>>> Plain(configure("gpt2", vocab_size=512, **shape), rows=16, device="cpu").step()
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanolm.bench.machine import wait_for
from nanolm.model.config import GPTConfig


class Plain:
    """A training loop with 16-bit autocast, fused attention and fused AdamW; on a GPU, compiled.
    Like nanoGPT, it returns the logits with the loss."""

    def __init__(
        self,
        config: GPTConfig,
        rows: int,
        device: str,
        dtype: str = "bfloat16",
        note: Callable[[str], None] = print,
    ) -> None:
        self.device, self.dtype = device, getattr(torch, dtype)
        self.model: Any = PlainGPT(config).to(device)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=device != "mps")
        self.batches = torch.randint(config.vocab_size, (4, rows, config.context + 1))
        self.batches = self.batches.to(device)
        self.count = 0
        compile_if_possible(self, "nanogpt", note)

    def step(self) -> None:
        ids = self.batches[self.count % 4]
        self.count += 1
        with torch.autocast(self.device, self.dtype, enabled=self.device == "cuda"):
            _, loss = self.model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def wait(self) -> None:
        wait_for(self.device)


def compile_if_possible(peer: Any, name: str, note: Callable[[str], None]) -> None:
    """On a GPU, compile the model of a peer, or note why not."""
    if peer.device != "cuda":
        return
    model, peer.model = peer.model, torch.compile(peer.model)
    try:
        peer.step()
    except Exception as error:  # a compiler has many ways to fail
        peer.model = model
        peer.optimizer.zero_grad()
        note(f"{name} runs uncompiled: {type(error).__name__}")


class PlainGPT(nn.Module):
    """A GPT-2 without biases, as short as PyTorch allows."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.places = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim, bias=False)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # (batch, time, vocabulary)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class PlainBlock(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, dim = config.heads, config.dim
        self.first, self.second = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = (
            nn.Linear(dim, 4 * dim, bias=False),
            nn.Linear(4 * dim, dim, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, dim = x.shape
        parts = self.qkv(self.first(x)).split(dim, dim=2)
        q, k, v = (part.view(batch, time, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, dim))
        y = self.down(F.gelu(self.up(self.second(x))))
        total: Tensor = x + y
        return total
