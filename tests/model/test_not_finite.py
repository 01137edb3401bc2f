"""Non-finite weights are refused when a model is loaded; so are those that overflow."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Cli
from journeys import journeys
from safetensors.torch import load_file, save_file
from torch import Tensor

import nanolm
from nanolm.errors import NOT_FINITE, ModelError
from nanolm.model.finite import checked
from nanolm.model.huggingface import load_model, save_model
from nanolm.model.stored import WEIGHTS
from nanolm.text.tokenizer import train_tokenizer


def change(folder: Path, edit: Callable[[str, Tensor], object], file: str = WEIGHTS) -> Path:
    tensors = load_file(folder / file)
    for name, tensor in tensors.items():
        edit(name, tensor)
    save_file(tensors, folder / file, {"format": "pt"})
    (folder / "MANIFEST.json").unlink(missing_ok=True)
    return folder


@pytest.fixture
def model(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree((trained / "best").resolve(), tmp_path / "model"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_number_that_is_not_finite(value: float, model: Path) -> None:
    def spoil(name: str, tensor: Tensor) -> None:
        if "norm" in name or "ln_f" in name:
            tensor.view(-1)[0] = value

    change(model, spoil)
    with pytest.raises(ModelError, match=r"model\.safetensors: .*norm.*: its values are not fin"):
        load_model(model)


def words(model: Path) -> list[list[Any]]:
    return [
        ["eval", model, "text.txt"],
        ["sample", model, "--tokens", 5],
        ["sample", model, "--tokens", 5, "--beams", 2],
        ["inspect", model, "The cats", "--out", "page.html"],
        ["serve", model, "--port", 0],
        ["finetune", "labeled.tsv", "--from", model, "--steps", 3, "--out", "tuned"],
        ["train", "text.txt", "--from", model, "--steps", 3, "--out", "more"],
    ]


@pytest.mark.parametrize("size", [1e38, 1e19, 1e10, 1e6])
def test_finite_weights_that_overflow(size: float, model: Path) -> None:
    """Before a norm, overflow becomes zero and looks like an untrained model."""
    change(model, lambda name, tensor: tensor.div_(tensor.abs().max()).mul_(size))
    with pytest.raises(ModelError, match=f"too large to compute with|{NOT_FINITE} .*model.safet"):
        load_model(model)


def test_every_command_says_so(model: Path, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The cats sat on the mats.\n" * 200)
    journeys(tmp_path)
    change(model, lambda name, tensor: tensor.fill_(1e38))
    for each in words(model):
        shown = cli(*each)
        assert shown.returncode == 4, (each, shown)
        assert "too large to compute with" in shown.stderr
        assert shown.stdout == ""
        assert "Traceback" not in shown.stderr
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize("family", ["gpt2", "modern", "lstm"])
def test_large_weights_that_compute_are_used(family: str, tmp_path: Path) -> None:
    from models import of_family

    made = of_family(family)
    with torch.no_grad():
        made.token_embedding.weight.mul_(1000 / made.token_embedding.weight.std())
    save_model(made, tmp_path, train_tokenizer([], "byte"))
    load_model(tmp_path)


def test_outputs_that_are_not_finite(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any reason: here the head is broken after loading."""
    writer = nanolm.load(model)
    with torch.no_grad():
        writer.model.head.weight.fill_(torch.inf)
    with pytest.raises(ModelError, match="not finite"):
        writer.generate("The", tokens=3)
    with pytest.raises(ModelError, match="not finite"):
        checked(writer.model, "here")


def test_a_classifier_and_its_adapters(tmp_path: Path) -> None:
    journey = journeys(tmp_path)["fine-tuning"]
    journey.go(tmp_path / "whole", steps=3)
    folder = Path(shutil.copytree((tmp_path / "whole/best").resolve(), tmp_path / "copy"))
    change(folder, lambda name, tensor: tensor.mul_(1e30) if name == "score.weight" else None)
    with pytest.raises(ModelError, match=r"score\.weight"):
        nanolm.load_classifier(folder)
    classifier = nanolm.load_classifier(tmp_path / "whole")
    with torch.no_grad():
        classifier.model.score.weight.fill_(torch.nan)
    with pytest.raises(ModelError, match="not finite"):
        classifier.classify("a good soup")
