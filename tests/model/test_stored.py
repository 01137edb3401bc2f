"""A model described without torch matches the one that torch builds."""

import json
from pathlib import Path

import pytest
import torch
from models import PUBLISHED_FAMILIES, SHAPE, every_gpt, gpt_config
from safetensors.torch import save_file

from nanolm.errors import ModelError
from nanolm.model.build import build_model
from nanolm.model.classifier import Classifier
from nanolm.model.config import ClassifierConfig, ModelConfig, configure
from nanolm.model.shapes import parameter_shapes, parameters_by_part
from nanolm.model.stored import stored_dtype

RECURRENT = [
    configure(family, **SHAPE | {"tied": tied}) for family in ("rnn", "lstm") for tied in (0, 1)
]


def shapes(model: object) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(value.shape)) for name, value in model.named_parameters()]  # type: ignore[attr-defined]


def test_shapes_are_those_of_the_model() -> None:
    others = [gpt_config(**changes) for changes in PUBLISHED_FAMILIES.values()]
    others += [gpt_config(attention_bias=which) for which in ("none", "all")]
    others.append(gpt_config(head_width=6))
    for config in (*every_gpt(qk_norm=True)[::11], *every_gpt(qk_norm=False)[::11], *others):
        assert list(parameter_shapes(config).items()) == shapes(build_model(config)), config


@pytest.mark.parametrize("config", RECURRENT)
def test_shapes_of_recurrent_models(config: ModelConfig) -> None:
    model = build_model(config)
    assert list(parameter_shapes(config).items()) == shapes(model)
    assert sum(parameters_by_part(config).values()) == model.parameter_count()


@pytest.mark.parametrize("tied", [True, False])
def test_shapes_of_a_classifier(tied: bool) -> None:
    config = ClassifierConfig(base=gpt_config(tied=tied), labels=("a", "b", "c"), window=8)
    assert list(parameter_shapes(config).items()) == shapes(Classifier(config))
    assert parameters_by_part(config)["classification head"] == 3 * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_stored_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    base, partial = tmp_path / "base", tmp_path / "partial"
    base.mkdir()
    partial.mkdir()
    large, small = torch.zeros(4, 4, dtype=dtype), torch.zeros(4)
    save_file({"model.x": large, "model.norm": small}, base / "model.safetensors")
    save_file({"score.weight": small}, partial / "trained.safetensors")
    (partial / "base.json").write_text(json.dumps({"folder": str(base), "fingerprint": ""}))
    assert stored_dtype(base) == stored_dtype(partial) == str(dtype).removeprefix("torch.")
    (partial / "base.json").write_text(json.dumps({"folder": "nowhere", "fingerprint": ""}))
    assert stored_dtype(partial) == "float32"
    (partial / "base.json").write_text(json.dumps({"folder": str(partial)}))  # a circle
    assert stored_dtype(partial) == "float32"
    (partial / "base.json").write_text("[]")
    with pytest.raises(ModelError, match=r"base\.json"):
        stored_dtype(partial)
