"""The same code on a CUDA GPU; skipped where there is none."""

from pathlib import Path

import pytest
import torch

import nanolm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("family", ["modern", "gpt2"])
def test_train_resume_and_sample(family: str, tmp_path: Path) -> None:
    choices = []
    result = nanolm.train(
        "embedded:stories",
        out=tmp_path / "run",
        family=family,
        preset="micro",
        steps=300,
        dropout=0.1,
        notify=lambda event: choices.append(str(event)),
    )
    assert any("bfloat16" in choice or "float32" in choice for choice in choices)
    assert result.train_loss is not None
    assert result.val_bits_per_byte is not None
    assert result.train_loss < 4
    assert result.val_bits_per_byte < 2
    writer = nanolm.load(tmp_path / "run")
    on_cpu = writer.generate("Once upon a time", greedy=True, tokens=20)
    writer.model.to("cuda")
    assert len(writer.generate("Once upon a time", greedy=True, tokens=20)) > 0
    assert len(on_cpu) > 0
