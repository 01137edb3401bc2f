"""The EMA of the weights: its value, and that it is evaluated and saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_MODEL
from safetensors.torch import load_file
from torch import nn

import nanolm
from nanolm.evaluation import evaluate
from nanolm.training.ema import EMA, averaged
from nanolm.training.trainer import Trainer


def by_hand(seen: list[torch.Tensor], keep: float) -> torch.Tensor:
    """Each step's share of the EMA, computed backwards from the last."""
    shares, left = [], 1.0
    for step in range(len(seen), 0, -1):
        shares.append(left * max(1 - keep, 1 / step))
        left -= shares[-1]
    assert left == pytest.approx(0)
    return sum(share * value for share, value in zip(shares, reversed(seen), strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("steps", [1, 3, 4, 5, 40])
def test_the_ema(steps: int) -> None:
    torch.manual_seed(1)
    parameter = nn.Parameter(torch.randn(3, 2))
    ema = EMA({"it": parameter}, 0.75)
    seen = []
    for step in range(1, steps + 1):
        parameter.data.add_(torch.randn(3, 2))
        seen.append(parameter.detach().clone())
        ema.update(step)
    with averaged(ema):
        assert torch.allclose(parameter, by_hand(seen, 0.75), atol=1e-6)
        if steps <= 4:
            assert torch.allclose(parameter, torch.stack(seen).mean(dim=0), atol=1e-6)
    assert torch.equal(parameter, seen[-1])


def test_the_ema_is_evaluated_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    tasks: list[Any] = []
    train_step = Trainer.train_step

    def watched(trainer: Trainer, lr: float) -> Any:
        numbers = train_step(trainer, lr)
        tasks.append(trainer.task)
        parameters = trainer.task.parameters()
        seen.append({name: value.detach().clone() for name, value in parameters.items()})
        return numbers

    monkeypatch.setattr(Trainer, "train_step", watched)
    settings: dict[str, Any] = {**TINY_MODEL, "steps": 30, "average": 0.8, "evaluations": 1}
    found = nanolm.train("embedded:tiny", out=tmp_path / "run", threads=1, **settings)
    saved = load_file(tmp_path / "run" / "last" / "optimizer.safetensors")
    model = nanolm.load(tmp_path / "run").model
    for name, kept in model.named_parameters():
        mean = by_hand([weights[name] for weights in seen], 0.8)
        assert torch.allclose(kept, mean, atol=1e-5)
        assert torch.equal(saved[f"{name}.now"], seen[-1][name])
        assert not torch.equal(kept, seen[-1][name])
    text = tasks[0].job.text
    again = evaluate(model, text.tokenizer, text.val, settings["context"])
    assert found.val_bits_per_byte == pytest.approx(again.bits_per_byte, rel=1e-5)
