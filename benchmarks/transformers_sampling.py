"""Generation with `transformers`, for `sampling.py`; on a CPU in a process of its own."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from nanolm.bench.process import serve_steps


def load(folder: Path, dtype: torch.dtype, device: str) -> Callable[..., None]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()

    def generate(prompt: list[int], tokens: int, rows: int, **how: Any) -> None:
        ids = torch.tensor([prompt] * rows, device=device)
        how = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens, **how}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        assert out.shape == (rows, len(prompt) + tokens)

    return generate


def step_of(folder: str, prompt: list[int], tokens: int) -> Callable[[], None]:
    return partial(load(Path(folder), torch.float32, "cpu"), prompt, tokens, 1)


if __name__ == "__main__":
    serve_steps(step_of)
