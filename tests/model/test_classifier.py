"""A classifier on disk and in memory: transformers reads and computes the same as we do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from models import SHAPE

from nanolm.errors import ModelError
from nanolm.model.classifier import Classifier
from nanolm.model.config import ClassifierConfig, Pool, configure
from nanolm.model.huggingface import load_classifier, load_model, save_model, split_weights
from nanolm.model.stored import load_config
from nanolm.text.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer([], "byte")
LABELS = ("negative", "so-so", "positive")
FAMILIES = ("gpt2", "llama", "modern")


def make(family: str, pool: Pool = "last", labels: tuple[str, ...] = LABELS) -> Classifier:
    torch.manual_seed(0)
    base = configure(family, **SHAPE | {"vocab_size": TOKENIZER.vocab_size})
    config = ClassifierConfig(base=base, labels=labels, pool=pool, window=8, long="tail")
    model = Classifier(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    lengths = torch.tensor([8, 3, 1, 5])
    ids = torch.randint(0, 250, (4, 8))
    filling = torch.arange(8) >= lengths[:, None]
    return ids.masked_fill(filling, TOKENIZER.padding), lengths


@pytest.mark.parametrize("pool", ["last", "mean", "max"])
@pytest.mark.parametrize("family", [*FAMILIES, "rnn", "lstm"])
def test_saved_and_loaded(family: str, pool: Pool, tmp_path: Path) -> None:
    model = make(family, pool)
    save_model(model, tmp_path, TOKENIZER)
    again = load_classifier(tmp_path)
    assert again.config == model.config
    ids, lengths = batch()
    assert torch.equal(again(ids, lengths), model(ids, lengths))
    kind = json.loads((tmp_path / "config.json").read_text())["model_type"]
    assert (kind == "nanolm") == (pool != "last" or family in ("rnn", "lstm"))


@pytest.mark.parametrize("pool", ["last", "mean", "max"])
@pytest.mark.parametrize("family", ["modern", "gpt2", "lstm"])
def test_padding_is_never_seen(family: str, pool: Pool) -> None:
    model = make(family, pool)
    ids, lengths = batch()
    alone = torch.cat(
        [model(row[None, :length], length[None]) for row, length in zip(ids, lengths, strict=True)]
    )
    other = torch.where(ids == TOKENIZER.padding, 7, ids)
    for given in (ids, other):
        torch.testing.assert_close(model(given, lengths), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_has_the_same_logits_and_gradients(family: str, tmp_path: Path) -> None:
    model = make(family)
    save_model(model, tmp_path, TOKENIZER)
    theirs, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values())
    assert theirs.config.id2label == dict(enumerate(LABELS))
    ids, lengths = batch()
    truth = torch.tensor([0, 2, 1, 2])
    mask = (ids != TOKENIZER.padding).long()
    given = theirs(input_ids=ids, attention_mask=mask, labels=truth)
    logits = model(ids, lengths)
    torch.testing.assert_close(logits, given.logits, atol=1e-4, rtol=1e-4)
    loss = F.cross_entropy(logits, truth)
    torch.testing.assert_close(loss, given.loss, atol=1e-4, rtol=1e-4)
    loss.backward()
    given.loss.backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    found = dict(split_weights(model))
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_theirs_is_read(family: str, tmp_path: Path) -> None:
    """As transformers writes it: without our fields, and without default labels."""
    model = make(family, labels=("LABEL_0", "LABEL_1"))
    (tmp_path / "ours").mkdir()
    save_model(model, tmp_path / "ours", TOKENIZER)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    for name in ("window", "long_texts"):
        delattr(theirs.config, name)
    theirs.save_pretrained(tmp_path / "theirs")
    values = json.loads((tmp_path / "theirs/config.json").read_text())
    values.pop("id2label", None)
    values.pop("label2id", None)
    (tmp_path / "theirs/config.json").write_text(json.dumps(values))
    again = load_classifier(tmp_path / "theirs")
    assert again.config.labels == ("LABEL_0", "LABEL_1")
    assert again.config.window == again.config.base.context
    ids, lengths = batch()
    torch.testing.assert_close(again(ids, lengths), model(ids, lengths), atol=1e-5, rtol=1e-5)


def test_the_one_is_not_taken_for_the_other(tmp_path: Path) -> None:
    save_model(make("modern"), tmp_path, TOKENIZER)
    with pytest.raises(ModelError, match=r"is a classifier, .*`nanolm classify"):
        load_model(tmp_path)
    base = make("modern").base.config
    language = transformers.Qwen3ForCausalLM  # fields of a language model's folder
    values = json.loads((tmp_path / "config.json").read_text())
    values["architectures"] = [language.__name__]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert load_config(tmp_path) == base
    with pytest.raises(ModelError, match=r"is a language model, .*`nanolm finetune"):
        load_classifier(tmp_path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"id2label": {"0": "only"}}, "at least two labels"),
        ({"id2label": {"0": "a", "2": "b"}}, "at least two labels"),
        ({"id2label": {"0": "a", "1": "a"}}, "at least two labels"),
        ({"id2label": {"0": "a", "1": 2}}, "at least two labels"),
        ({"id2label": ["a", "b"]}, "at least two labels"),
        ({"id2label": {"0": "a", "1": "b"}}, "score.weight"),
        ({"problem_type": "regression"}, "regression"),
        ({"window": 0}, "integer"),
        ({"window": 99}, "must be from 1 to 8"),
        ({"long_texts": "sideways"}, "strategy for long texts"),
        ({"architectures": ["Qwen3ForTokenClassification"]}, "neither"),
    ],
    ids=str,
)
def test_an_invalid_config_is_reported(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    save_model(make("modern"), tmp_path, TOKENIZER)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises(ModelError, match=complaint):
        load_classifier(tmp_path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"labels": ["one"]}, "at least two labels"),
        ({"pool": "median"}, "pooling"),
        ({"more": 1}, "more is 1: this version"),
        ({"base": 3}, "must be an object"),
        ({"base": {"kind": "classifier"}}, "must"),
        ({"base": {"kind": "transformer"}}, "must be"),
    ],
    ids=str,
)
def test_an_invalid_config_of_ours_is_reported(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    save_model(make("modern", "mean"), tmp_path, TOKENIZER)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises(ModelError, match=complaint):
        load_classifier(tmp_path)
