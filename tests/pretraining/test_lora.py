"""LoRA of a language model: `nanolm train --from RUN --train lora`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Killed, before_step, kill
from journeys import lines, weights
from safetensors.torch import load_file
from torch import Tensor

import nanolm
from nanolm.errors import DataError, ModelError, UsageError
from nanolm.model import peft
from nanolm.model.adapters import Adapters
from nanolm.model.huggingface import load_model
from nanolm.pretraining import language
from nanolm.pretraining.extend import extend
from nanolm.runs.folder import find_model
from nanolm.training.settings import TrainSettings

HOW: dict[str, Any] = {"train": "lora", "context": 16, "batch": 4, "threads": 1, "device": "cpu"}
HOW |= {"steps": 12, "evaluations": 3, "lr": 1e-2}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two texts of different words, and a model of the first."""
    folder = tmp_path_factory.mktemp("lora")
    for name, words in {
        "cats": ("cats", "sat on", "mats"),
        "dogs": ("dogs", "ran to", "logs"),
    }.items():
        one, two, three = words
        text = "".join(f"The {n} {one} {two} {n * 7 % 13} {three}.\n" for n in range(400))
        (folder / f"{name}.txt").write_text(text)
    shape: dict[str, Any] = {"layers": 2, "heads": 2, "dim": 32, "context": 16, "batch": 8}
    how: dict[str, Any] = {"tokenizer": "byte", "steps": 60, "threads": 1, "device": "cpu"}
    nanolm.train(folder / "cats.txt", out=folder / "cats", **shape, **how)
    return folder


def learn(texts: Path, out: Path, **more: Any) -> Any:
    return nanolm.train(
        texts / "dogs.txt", out=out, **{"start_from": texts / "cats", **HOW, **more}
    )


def logits(folder: Path) -> Tensor:
    with torch.no_grad():
        found: Tensor = load_model(find_model(folder, pytest.fail))(torch.arange(16)[None])
    return found


def test_it_learns_another_text(texts: Path, tmp_path: Path) -> None:
    """Much better than the model it starts from, of which nothing changes."""
    before = nanolm.load(texts / "cats").model
    start = learn(texts, tmp_path / "start", steps=1, lr=1e-9).val_loss
    assert learn(texts, tmp_path / "run", steps=60).val_loss < start - 0.5
    optimizer = load_file(tmp_path / "run/last/optimizer.safetensors")
    assert all(name == "step" or name.startswith("adapters.") for name in optimizer)
    assert not (tmp_path / "run/last/model.safetensors").exists()
    reference = json.loads((tmp_path / "run/last/base.json").read_text())
    base = load_model(Path(reference["folder"]))
    for name, value in base.named_parameters():
        assert torch.equal(value, before.get_parameter(name))


@pytest.mark.parametrize("train", ["lora", "all"])
def test_tokens_that_neither_text_has_are_never_generated(
    train: str, texts: Path, tmp_path: Path
) -> None:
    before = nanolm.load(texts / "cats").tokenizer.unseen
    learn(texts, tmp_path / "run", train=train, steps=2)
    after = nanolm.load(tmp_path / "run").tokenizer.unseen
    assert {ord(c) for c in "Zé"} <= after < before  # "c" is in one text, "g" in the other
    assert {ord("c"), ord("g")}.isdisjoint(after) and ord("g") in before


def test_the_finished_model_needs_no_other_folder(texts: Path, tmp_path: Path) -> None:
    shutil.copytree(texts / "cats", tmp_path / "cats", symlinks=True)
    learn(texts, tmp_path / "run", start_from=tmp_path / "cats")
    torch.testing.assert_close(logits(tmp_path / "run/best"), logits(tmp_path / "run/last"))
    merged = logits(tmp_path / "run")
    assert (merged - logits(texts / "cats")).abs().max() > 0.01
    with torch.no_grad():  # its adapter does the same to the base model
        base, adapter = find_model(texts / "cats", pytest.fail), tmp_path / "run/best/adapter"
        again = load_model(base, adapter=adapter)(torch.arange(16)[None])
    torch.testing.assert_close(again, merged)
    shutil.rmtree(tmp_path / "cats")
    assert torch.equal(logits(tmp_path / "run"), merged)
    with pytest.raises(ModelError, match="no longer exists"):
        logits(tmp_path / "run/last")


def test_peft_loads_the_adapter_of_a_run(texts: Path, tmp_path: Path) -> None:
    hf_peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    learn(texts, tmp_path / "run")
    base = find_model(texts / "cats", pytest.fail)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    for name in ("best", "last"):
        theirs = hf_peft.PeftModel.from_pretrained(model, tmp_path / f"run/{name}/adapter").eval()
        with torch.no_grad():
            found = theirs(torch.arange(16)[None]).logits
        torch.testing.assert_close(found, logits(tmp_path / "run"), rtol=0, atol=1e-5)
        model = theirs.unload()


@pytest.mark.parametrize("more", [{}, {"average": 0.8}, {"dropout": 0.1}])
def test_killed_and_resumed_it_is_the_same(
    more: dict[str, Any], texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(texts, tmp_path / "whole", save_every=5, **more)
    with monkeypatch.context() as patch:
        before_step(patch, 8, kill)
        with pytest.raises(Killed):
            learn(texts, tmp_path / "killed", save_every=5, **more)
    assert logits(tmp_path / "killed").isfinite().all()  # unfinished, it can be used
    learn(texts, tmp_path / "killed", save_every=5, **more)
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole") != []
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")
    assert torch.equal(logits(tmp_path / "killed"), logits(tmp_path / "whole"))


def test_another_base_model_is_refused(texts: Path, tmp_path: Path) -> None:
    shutil.copytree(texts / "cats", tmp_path / "cats", symlinks=True)
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, 8, kill)
        with pytest.raises(Killed):
            learn(texts, tmp_path / "run", start_from=tmp_path / "cats")
    nanolm.train(
        texts / "cats.txt", out=tmp_path / "new", layers=2, heads=2, dim=32, context=16, steps=2,
        tokenizer="byte", device="cpu", threads=1,
    )  # fmt: skip
    shutil.rmtree(tmp_path / "cats")
    (tmp_path / "new").rename(tmp_path / "cats")
    with pytest.raises(DataError, match="the model to start from has changed"):
        learn(texts, tmp_path / "run", start_from=tmp_path / "cats")


def test_extended(texts: Path, tmp_path: Path) -> None:
    """From before the decay; the best of before is kept."""
    learn(texts, tmp_path / "run")
    before = logits(tmp_path / "run")
    result = extend(tmp_path / "run", {"steps": 8})
    assert result.steps == 20
    (earlier,) = (tmp_path / "run/earlier").iterdir()
    torch.testing.assert_close(logits(earlier), before)
    assert not torch.equal(logits(tmp_path / "run"), before)


def test_an_adapter_is_merged_first(texts: Path, tmp_path: Path) -> None:
    learn(texts, tmp_path / "first")
    adapter = str(tmp_path / "first")
    learn(texts, tmp_path / "all", train=None, adapter=adapter, steps=1, lr=1e-9)
    torch.testing.assert_close(logits(tmp_path / "all"), logits(tmp_path / "first"))
    learn(texts, tmp_path / "second", adapter=adapter, steps=1, lr=1e-9)
    torch.testing.assert_close(logits(tmp_path / "second"), logits(tmp_path / "first"))
    torch.testing.assert_close(logits(tmp_path / "second/last"), logits(tmp_path / "first"))
    values = json.loads((tmp_path / "second/best/adapter" / peft.CONFIG).read_text())
    assert values["base_model_name_or_path"].endswith("first/checkpoints/final/adapter merged")
    learn(texts, tmp_path / "third", start_from=tmp_path / "first/last", steps=1, lr=1e-9)
    torch.testing.assert_close(logits(tmp_path / "third/last"), logits(tmp_path / "first"))


def test_fast_paths_stand_aside(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused kernels and compiled blocks would skip the adapters."""
    monkeypatch.setattr(language, "with_kernels", lambda *_: pytest.fail("kernels"))
    monkeypatch.setattr(language, "compile_model", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr(language, "missing_compiler", lambda device: None)
    learn(texts, tmp_path / "run", steps=3)


def test_the_head_is_not_adapted(texts: Path) -> None:
    model = load_model(find_model(texts / "cats", pytest.fail))
    assert "head" not in Adapters(model).layers


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "from scratch": ({"start_from": None}, "--train lora needs --from"),
    "compiled": ({"compile": True}, "--train lora and --compile"),
    "sharded": ({"shard": True}, "--train lora and --shard"),
    "float8": ({"dtype": "float8"}, "--train lora and --dtype float8"),
    "muon": ({"optimizer": "muon"}, "--train lora and --optimizer muon"),
    "another": ({"train": "head"}, "--train head: choose from all, lora"),
    "adapter of none": ({"train": None, "start_from": None, "adapter": "x"}, "--adapter x needs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_combined(case: str) -> None:
    more, message = REFUSED[case]
    values = {"corpus": ["x"], "start_from": "base", "train": "lora", **more}
    settings = TrainSettings.from_dict({n: v for n, v in values.items() if v is not None})
    assert any(problem.startswith(message) for problem in settings.problems())


def test_recurrent_models_are_refused(texts: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"family": "rnn", "layers": 1, "dim": 16, "context": 16, "steps": 2}
    nanolm.train(texts / "cats.txt", out=tmp_path / "rnn", tokenizer="byte", device="cpu", **how)
    with pytest.raises(UsageError, match="only for Transformers"):
        learn(texts, tmp_path / "run", start_from=tmp_path / "rnn")
    assert not (tmp_path / "run").exists()


def test_no_such_adapter(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=peft.CONFIG):
        learn(texts, tmp_path / "run", adapter=str(tmp_path))
