"""Fine-tuning a pretrained model: cached features, a head that starts from the probe, and
checkpoints that refer to the base model."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY_MODEL
from safetensors.torch import save_file
from torch import Tensor

import nanolm
from nanolm.classification import task
from nanolm.classification.classifier import load
from nanolm.classification.data import split_data
from nanolm.classification.finetune import FinetuneResult, finetune
from nanolm.classification.settings import FinetuneSettings
from nanolm.errors import ModelError, UsageError
from nanolm.model.adapters import LowRank
from nanolm.model.classifier import Classifier
from nanolm.model.gpt import GPT, Block
from nanolm.model.huggingface import BaseModel, save_partial
from nanolm.runs.checkpoint import list_checkpoints
from nanolm.runs.info import describe
from nanolm.text.tokenizer import Tokenizer
from nanolm.training.events import Event, Progressed

PARTIAL = ("head", "last-1", "lora")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "films.tsv"
    rows = [
        f"the {noun} was {word}\t{label}\n"
        for noun in ("film", "plot", "cast", "song", "end", "set", "food", "room", "view", "tune")
        for label, words in enumerate((("good", "fine", "great"), ("bad", "poor", "awful")))
        for word in words
    ]
    file.write_text("text\tlabel\n" + "".join(rows))
    return file


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("base") / "tiny"
    nanolm.train("embedded:tiny", out=out, steps=30, **{**TINY_MODEL, "layers": 2, "context": 32})
    return out


def run(
    data: Path,
    base: Path,
    out: Path,
    notify: Callable[[Event], None] = lambda event: None,
    **settings: Any,
) -> FinetuneResult:
    values = {"data": str(data), "start_from": str(base), "batch": 8, "threads": 1, **settings}
    return finetune(FinetuneSettings.from_dict(values), out, notify)


def stop_at(step: int) -> Callable[[Event], None]:
    def press(event: Event) -> None:
        if isinstance(event, Progressed) and event.record["step"] == step:
            signal.raise_signal(signal.SIGINT)

    return press


@pytest.mark.parametrize(("train", "block"), [("head", 0), ("head", 1), ("last-1", 0)])
def test_each_text_goes_through_a_frozen_layer_once(
    train: str, block: int, data: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    forward = Block.forward

    def count(self: Block, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        if self.attention.layer == block:
            rows.append(len(x))
        return forward(self, x, *rest)

    monkeypatch.setattr(Block, "forward", count)
    monkeypatch.setattr(task, "with_kernels", lambda *how: None)  # which do not call it
    run(data, base, tmp_path / "run", train=train, steps=30, dtype="float32")
    assert sum(rows) == 60  # training and validation texts


@pytest.mark.parametrize("train", ["head", "last-1"])
def test_what_is_kept_gives_the_same_logits(
    train: str, data: Path, base: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    result = run(data, base, out, train=train, steps=10, val_fraction=0.4)
    split = split_data(FinetuneSettings(data=(str(data),), val_fraction=0.4), lambda *_: None)
    logits = load(out, print).logits(split.val.texts)
    assert result.val
    assert (logits.argmax(axis=1) == split.val.truth).mean() == result.val.accuracy


def test_kept_states_are_what_the_body_computes(base: Path) -> None:
    model = nanolm.load(base).model
    assert isinstance(model, GPT)
    ids = torch.randint(200, (3, 9))
    with torch.inference_mode():
        states = model.frozen_states(ids, 1)
        assert states is not None
        torch.testing.assert_close(model.hidden_states_from(states, 1), model.hidden_states(ids))


@pytest.mark.parametrize("train", ["head", "last-1", "lora", "all"])
def test_no_way_to_train_is_worse_than_where_it_starts(
    train: str, data: Path, base: Path, tmp_path: Path
) -> None:
    """Even with a high learning rate: the probe is evaluated too, and kept if nothing is better."""
    out = tmp_path / "run"
    run(data, base, out, train=train, steps=12, lr=0.5, val_fraction=0.4)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    (first,) = [line for line in lines if line["step"] == 0]
    result = json.loads((out / "run.json").read_text())["result"]
    assert first["val_accuracy"] > 0.6
    assert result["val"]["loss"] <= first["val_loss"] + 1e-6


def test_the_head_starts_from_the_probe(data: Path, base: Path, tmp_path: Path) -> None:
    losses: list[object] = []
    run(data, base, tmp_path / "run", losses.append, train="head", steps=11)
    first = next(e.record for e in losses if isinstance(e, Progressed) and "loss" in e.record)
    assert first["loss"] < np.log(2)


@pytest.mark.parametrize("train", PARTIAL)
def test_an_unfinished_run_is_a_classifier(
    train: str, data: Path, base: Path, tmp_path: Path
) -> None:
    out, whole = tmp_path / "run", tmp_path / "whole"
    assert run(data, base, out, stop_at(10), train=train, steps=30).stopped == "interrupted"
    last = (out / "last").resolve()
    assert not (last / "model.safetensors").exists()
    assert (last / "base.json").exists()
    texts = ["the film was bad", "a great room"]
    before = load(last, print).logits(texts)
    assert describe(str(out), print).parameters == load(last, print).model.parameter_count()
    run(data, base, out, train=train, steps=30)
    run(data, base, whole, train=train, steps=30)
    for step in list_checkpoints(whole / "checkpoints"):
        for file in step.rglob("*.safetensors"):
            other = out / "checkpoints" / step.name / file.relative_to(step)
            assert other.read_bytes() == file.read_bytes(), other
    final = load(out, print)
    assert (out / "best/model.safetensors").exists()
    assert final.logits(texts).tolist() == load(whole, print).logits(texts).tolist()
    if train != "head":  # the initial head may be best
        assert final.logits(texts).tolist() != before.tolist()


@pytest.mark.parametrize("train", PARTIAL)
def test_checkpoints_hold_what_changed(train: str, data: Path, base: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(data, base, out, train=train, steps=10)
    weights = (out / "best/model.safetensors").stat().st_size
    for folder in list_checkpoints(out / "checkpoints"):
        trained = sum(
            file.stat().st_size
            for file in folder.rglob("*.safetensors")
            if file.name != "optimizer.safetensors"
        )
        assert trained < 0.6 * weights
        if train == "head":
            assert trained < 1000


def test_a_base_that_moved_or_changed_is_named(data: Path, base: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(base, tmp_path / "base", symlinks=True)
    out = tmp_path / "run"
    run(data, mine, out, stop_at(10), train="last-1", steps=30)
    mine.rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=r"which no longer exists.*Restore"):
        load(out, print)
    (tmp_path / "elsewhere").rename(mine)
    load(out, print)
    file = (mine / "best").resolve() / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ModelError, match="now has different weights"):
        load(out, print)


def test_a_finished_run_needs_no_base(data: Path, base: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(base, tmp_path / "base", symlinks=True)
    run(data, mine, tmp_path / "run", train="lora", steps=5)
    shutil.rmtree(mine)
    assert load(tmp_path / "run", print).classify("the film was bad")


@pytest.mark.parametrize("train", ["head", "lora"])
def test_a_large_base_is_not_copied(
    train: str, data: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finished classifier refers to it too, and is the one that would have been copied."""
    small, large = tmp_path / "small", tmp_path / "large"
    run(data, base, small, train=train, steps=5)
    monkeypatch.setattr(task, "LARGE_COPY", 1000)
    monkeypatch.setattr(task, "TRAINED_SHARE", 0.99)
    said: list[str] = []
    run(data, base, large, lambda event: said.append(str(event)), train=train, steps=5)
    assert not [*large.glob("**/model.safetensors")]
    texts = ["the film was bad", "a great room"]
    assert load(large, print).logits(texts).tolist() == load(small, print).logits(texts).tolist()
    assert any("best needs" in line and "--to FOLDER" in line for line in said)
    facts = describe(str(large), print)
    readers = ["nanolm", "peft (adapter)"] if train == "lora" else ["nanolm"]
    assert facts.readers == readers and facts.why_only.startswith("the frozen weights are in")
    result = run(data, base, tmp_path / "all", train="all", steps=2)
    assert (Path(result.run) / "best/model.safetensors").exists()


def test_fine_tuning_goes_on_from_an_unfinished_run(data: Path, base: Path, tmp_path: Path) -> None:
    run(data, base, tmp_path / "first", stop_at(10), train="lora", steps=30)
    assert run(data, tmp_path / "first", tmp_path / "second", train="lora", steps=3).val


def test_checkpoints_with_adapters_in_a_file(
    data: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they were saved before there was a folder for peft: they load, and training goes on."""
    run(data, base, tmp_path / "whole", train="lora", steps=30)

    def save_old(
        model: Classifier,
        base: BaseModel,
        trained: dict[str, Tensor],
        low_rank: dict[str, LowRank],
        folder: Path,
        tokenizer: Tokenizer,
    ) -> None:
        save_partial(model, base, trained, {}, folder, tokenizer)
        tensors: dict[str, Tensor] = {}
        for name, (down, up) in low_rank.items():
            key = name.removeprefix("base.").removesuffix(".weight").replace(".", "/")
            tensors |= {f"down.{key}": down, f"up.{key}": up}
        save_file(tensors, folder / "adapters.safetensors")

    with monkeypatch.context() as patch:
        patch.setattr("nanolm.classification.task.save_partial", save_old)
        run(data, base, tmp_path / "old", stop_at(10), train="lora", steps=30)
    assert (tmp_path / "old/last/adapters.safetensors").exists()
    assert load(tmp_path / "old/last", print).classify("the film was bad")
    run(data, base, tmp_path / "old", train="lora", steps=30)
    new, old = (load(tmp_path / name / "last", print) for name in ("whole", "old"))
    assert old.logits(["a great room"]).tolist() == new.logits(["a great room"]).tolist()


def test_peft_loads_the_adapter_of_a_run(data: Path, base: Path, tmp_path: Path) -> None:
    """With the calibrated head, onto the language model; so do we."""
    hf_peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    run(data, base, tmp_path / "run", train="lora", steps=30, lr=1e-2)
    folder, start = tmp_path / "run/best/adapter", (base / "best").resolve()
    classifier = load(tmp_path / "run", print)
    ids = torch.tensor([classifier.tokenizer.encode_prompt("the film was bad")])
    lengths = torch.tensor([ids.shape[1]])
    model = transformers.AutoModelForSequenceClassification.from_pretrained(start, num_labels=2)
    with torch.no_grad():
        logits = classifier.model(ids, lengths)
        theirs = hf_peft.PeftModel.from_pretrained(model, folder).eval()(ids).logits
        again = load(start, print, adapter=str(tmp_path / "run")).model(ids, lengths)
    torch.testing.assert_close(theirs, logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(again, logits, rtol=0, atol=1e-5)


def test_lora_is_not_for_recurrent_models(data: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"family": "rnn", "layers": 1, "dim": 16, "steps": 2}
    nanolm.train("embedded:tiny", out=tmp_path / "rnn", **how)
    with pytest.raises(UsageError, match="only for Transformers"):
        run(data, tmp_path / "rnn", tmp_path / "run", train="lora", steps=2)


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    """Texts that can only be memorized."""
    file, random = tmp_path / "noise.tsv", np.random.default_rng(0)
    rows = [f"text {random.integers(10**9)}\t{random.integers(2)}\n" for _ in range(60)]
    file.write_text("text\tlabel\n" + "".join(rows))
    return file


@pytest.mark.parametrize("asked", [{"steps": 48}, {"epochs": 8}])
def test_steps_that_were_asked_for_are_done(
    asked: dict[str, Any], noise: Path, base: Path, tmp_path: Path
) -> None:
    how = {"lr": 0.02, "evaluations": 8, "train": "all", "language_loss": 0.0, **asked}
    result = run(noise, base, tmp_path / "run", **how)
    assert (result.stopped, result.steps) == ("steps", 48)
    result = run(noise, base, tmp_path / "patient", patience=2, **how)
    assert result.stopped == "enough"
