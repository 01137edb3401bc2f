"""A hundred steps whose results must never change by accident.

In float64, the losses agree on all machines to far more digits than are kept here, so if any
changes, the computation has changed. If that is intended,

    python -m pytest tests/training/test_golden.py --golden

writes them again, and the diff shows the changes.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import nanolm
from nanolm.model import positions
from nanolm.model.positions import rotation_table
from nanolm.planning import tuning
from nanolm.pretraining import language

NAMES = ("loss", "lr", "grad_norm")
FILE = Path(__file__).with_name("golden.json")
FAMILIES = ("modern", "gpt2")


def coarse(x: Tensor) -> Tensor:
    """Without the bits that differ between machines, because of sines and cosines."""
    return (x * 256).round() / 256


def losses(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The metrics of a whole run: mean loss, learning rate and norm every ten steps."""
    build = language.NextToken.__init__

    def in_float64(self: language.NextToken, *rest: object) -> None:
        build(self, *rest)  # type: ignore[arg-type]
        self.network.double()
        numbers = np.random.default_rng(7)
        for parameter in self.network.parameters():
            if parameter.dim() > 1 and parameter.any():  # drawn, which machines do differently
                drawn = numbers.integers(-1000, 1001, tuple(parameter.shape))
                parameter.data = torch.from_numpy(drawn).double() / 30_000

    def table(*rest: Any) -> tuple[Tensor, ...]:
        return tuple(coarse(part) for part in rotation_table(*rest))

    monkeypatch.setattr(positions, "rotation_table", table)
    monkeypatch.setattr(language.NextToken, "__init__", in_float64)
    monkeypatch.setattr(tuning, "available_threads", lambda: 1)
    nanolm.train(
        "embedded:tiny", out=folder / family, family=family, steps=100, layers=2, heads=2,
        dim=32, context=32, batch=8, seed=7, evaluations=2, tokenizer="char", dtype="float32",
        device="cpu", val_split="end",
    )  # fmt: skip
    lines = [json.loads(line) for line in (folder / family / "metrics.jsonl").open()]
    return [
        f"step {line['step']}: " + " ".join(f"{name} {line[name]:.6g}" for name in NAMES)
        for line in lines
        if "loss" in line
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_golden_curve(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    found = losses(family, tmp_path, monkeypatch)
    golden = json.loads(FILE.read_text()) if FILE.exists() else {}
    if request.config.getoption("--golden"):
        golden[family] = found
        FILE.write_text(json.dumps(golden, indent=1) + "\n")
    assert len(found) == 10
    assert found == golden[family]


def test_float32_gives_the_same_bits_again(tmp_path: Path) -> None:
    weights = []
    for name in ("one", "two"):
        nanolm.train(
            "embedded:tiny", out=tmp_path / name, steps=100, layers=1, heads=2, dim=16, context=16,
            batch=4, threads=1,
        )  # fmt: skip
        weights.append(nanolm.load(tmp_path / name).model.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
