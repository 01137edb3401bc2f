"""Sampling as a runner, in this process or, with the model in a folder, in one of its own.

>>> RunnerProcess("nanolm.bench.sampling", folder="runs/novel/best", tokens=64, bits=8).step()
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanolm.bench.process import serve_steps
from nanolm.generation.language_model import LanguageModel, Sample
from nanolm.generation.sampling_params import SamplingParams


@dataclass(frozen=True)
class SamplingRunner:
    model: LanguageModel
    rows: int
    params: SamplingParams
    prompt: str = ""

    def step(self) -> None:
        samples = [Sample(self.prompt, number) for number in range(self.rows)]
        for _ in self.model.stream(samples, self.params):
            pass

    def wait(self) -> None:
        """Nothing to wait for: sampled tokens are complete."""


def whole_text(tokens: int, **how: Any) -> SamplingParams:
    """Parameters for exactly this many tokens; greedy by default."""
    return SamplingParams(tokens=tokens, min_tokens=tokens, **(how or {"greedy": True}))


def step_of(
    folder: str, tokens: int, bits: int | None = None, prompt: str = "", **how: Any
) -> Callable[[], None]:
    from nanolm.model.device import use_fitting_threads
    from nanolm.model.fast.quantized import quantize
    from nanolm.model.huggingface import load_model
    from nanolm.text.tokenizer_files import load_tokenizer

    model = load_model(Path(folder))
    use_fitting_threads(model)  # before the weights shrink, as `nanolm sample` does
    if bits:
        quantize(model, bits)
    loaded = LanguageModel(model, load_tokenizer(Path(folder)))
    return SamplingRunner(loaded, 1, whole_text(tokens, **how), prompt).step


if __name__ == "__main__":
    serve_steps(step_of)
