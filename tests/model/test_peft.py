"""LoRA adapters in the format of peft: ours there, theirs here, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import PUBLISHED_FAMILIES, gpt_config, of_family
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanolm.errors import ModelError
from nanolm.model import peft
from nanolm.model.adapters import Adapters
from nanolm.model.base import Model
from nanolm.model.build import build_model
from nanolm.model.classifier import Classifier
from nanolm.model.config import ClassifierConfig
from nanolm.model.huggingface import load_classifier, load_model, save_model
from nanolm.text.tokenizer import train_tokenizer

FAMILIES = ("llama", "modern", "gpt2")  # modern is Qwen3
KV = {"llama": {"kv_heads": 2}, "modern": {"kv_heads": 2}, "gpt2": {}}
LABELS = ("bad", "fair", "good")
# What a module of the first layer is called, and the parameter and the rows that it is here.
NAMES = {
    "llama": ("model.layers.0.self_attn.k_proj", "blocks.0.attention.qkv.weight", slice(16, 24)),
    "modern": ("model.layers.0.mlp.up_proj", "blocks.0.feed_forward.up.weight", slice(48, 96)),
    "gpt2": ("transformer.h.0.attn.c_attn", "blocks.0.attention.qkv.weight", slice(0, 48)),
}


def small(family: str, **changes: Any) -> Model:
    if family in PUBLISHED_FAMILIES:
        return build_model(gpt_config(**PUBLISHED_FAMILIES[family] | {"vocab_size": 258} | changes))
    hidden = {} if family == "gpt2" else {"hidden": 48}
    return of_family(family, **KV[family] | hidden | {"vocab_size": 258} | changes)


def saved(model: Model | Classifier, folder: Path) -> Path:
    folder.mkdir()
    save_model(model, folder, train_tokenizer(["some text"], "byte"))
    return folder


def trained(model: Model, rank: int = 4) -> Adapters:
    """Adapters that change something."""
    adapters = Adapters(model, rank)
    for parameter in adapters.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return adapters


def ours(model: Model, folder: Path) -> tuple[Path, Path, Tensor]:
    """A base model, an adapter for it, and the logits of both."""
    base = saved(model, folder / "base")
    adapters = trained(model)
    peft.save_adapter(model.config, adapters.low_rank(), {}, folder / "adapter", str(base))
    with torch.no_grad():
        return base, folder / "adapter", model(ids())


def assert_close(logits: Tensor, others: Tensor) -> None:
    torch.testing.assert_close(logits, others, rtol=0, atol=1e-5)


def ids() -> Tensor:
    return torch.arange(8)[None]


@pytest.mark.parametrize("family", FAMILIES)
def test_names_shapes_and_scale(family: str, tmp_path: Path) -> None:
    """Each module has its rows of the product, by hand."""
    base, folder, _ = ours(small(family), tmp_path)
    tensors = load_file(folder / peft.WEIGHTS)
    values = json.loads((folder / peft.CONFIG).read_text())
    name, parameter, rows = NAMES[family]
    a, b = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    assert a.shape == (4, 16) and len(b) == rows.stop - rows.start and values["r"] == 4
    before, after = (
        load_model(base, adapter=adapter).get_parameter(parameter) for adapter in (None, folder)
    )
    scale = values["lora_alpha"] / values["r"]
    torch.testing.assert_close(after[rows], before[rows] + scale * (b @ a))
    assert values["task_type"] == "CAUSAL_LM"
    assert values["base_model_name_or_path"] == str(base)
    assert name.rpartition(".")[2] in values["target_modules"]


@pytest.mark.parametrize("family", [*FAMILIES, *PUBLISHED_FAMILIES])
def test_merging_gives_the_same_logits(family: str, tmp_path: Path) -> None:
    base, folder, logits = ours(small(family), tmp_path)
    with torch.no_grad():
        merged = load_model(base, adapter=folder)(ids())
        assert (merged - load_model(base)(ids())).abs().max() > 0.1
    assert_close(merged, logits)


@pytest.mark.parametrize("family", [*FAMILIES, *PUBLISHED_FAMILIES])
def test_peft_loads_ours(family: str, tmp_path: Path) -> None:
    hf_peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    base, folder, logits = ours(small(family), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        theirs = hf_peft.PeftModel.from_pretrained(model, folder).eval()(ids()).logits
    assert_close(theirs, logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_our_classifier(family: str, tmp_path: Path) -> None:
    """Onto the language model; the head comes with the adapter. And so do we."""
    hf_peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    base = saved(small(family), tmp_path / "base")
    model = load_model(base)
    config = ClassifierConfig(base=model.config, labels=LABELS, window=8)
    classifier = Classifier(config, model).eval()
    adapters = trained(classifier.base)
    whole = {"score.weight": classifier.score.weight}
    folder = tmp_path / "adapter"
    peft.save_adapter(config, adapters.low_rank("base."), whole, folder, str(base))
    with torch.no_grad():
        logits = classifier(ids(), torch.tensor([8]))
        again = load_classifier(base, adapter=folder)
        assert again.config.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
        assert_close(again(ids(), torch.tensor([8])), logits)
        of_theirs = transformers.AutoModelForSequenceClassification
        theirs = of_theirs.from_pretrained(base, num_labels=len(LABELS), pad_token_id=257)
        theirs = hf_peft.PeftModel.from_pretrained(theirs, folder).eval()
        assert_close(theirs(ids()).logits, logits)


THEIRS: dict[str, dict[str, Any]] = {
    "some modules": {"r": 3, "lora_alpha": 5},
    "rank-stabilized": {"r": 4, "lora_alpha": 3, "use_rslora": True},
    "patterns": {"r": 2, "rank_pattern": {"TARGET": 5}, "alpha_pattern": {"0.WITHIN.TARGET": 7}},
    "head": {"r": 2, "modules_to_save": ["lm_head"]},
    "embedding": {"r": 2, "modules_to_save": ["EMBEDDING"]},
}
WORDS = {
    "llama": {"TARGET": "k_proj", "WITHIN": "self_attn", "EMBEDDING": "embed_tokens"},
    "gpt2": {"TARGET": "c_attn", "WITHIN": "attn"},
}
TARGETS = {"llama": ["q_proj", "k_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}


@pytest.mark.parametrize(
    ("family", "case"),
    [
        (family, case)
        for family in FAMILIES
        for case in THEIRS
        if family != "gpt2" or case not in ("head", "embedding")  # these are tied
    ],
)
def test_theirs_merged_here(family: str, case: str, tmp_path: Path) -> None:
    """With matrices of their own for queries, keys and values."""
    hf_peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    kind, text = "gpt2" if family == "gpt2" else "llama", json.dumps(THEIRS[case])
    for word, name in WORDS[kind].items():
        text = text.replace(word, name)
    base = saved(small(family), tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    wanted = hf_peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=TARGETS[kind], **json.loads(text)
    )
    torch.manual_seed(1)
    theirs = hf_peft.get_peft_model(model, wanted).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        logits = theirs(ids()).logits
        merged = load_model(base, adapter=tmp_path / "adapter")(ids())
        assert (logits - load_model(base)(ids())).abs().max() > 0.01
    assert_close(merged, logits)


def edited(folder: Path, **changes: Any) -> None:
    file = folder / peft.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def renamed(change: Callable[[str], str]) -> Callable[[Path], None]:
    def rename(folder: Path) -> None:
        tensors = load_file(folder / peft.WEIGHTS)
        save_file({change(name): value for name, value in tensors.items()}, folder / peft.WEIGHTS)

    return rename


@pytest.mark.parametrize(
    "spelled",
    [
        lambda name: name.replace(".weight", ".default.weight"),
        lambda name: name.replace("base_model.model.model.", "base_model.model."),
        lambda name: name.removeprefix("base_model.model."),
    ],
)
def test_other_spellings(spelled: Callable[[str], str], tmp_path: Path) -> None:
    base, folder, logits = ours(small("llama"), tmp_path)
    renamed(spelled)(folder)
    with torch.no_grad():
        assert_close(load_model(base, adapter=folder)(ids()), logits)


def pickled(folder: Path) -> None:
    (folder / peft.WEIGHTS).rename(folder / peft.PICKLE)


def without_one(folder: Path) -> None:
    tensors = load_file(folder / peft.WEIGHTS)
    tensors.popitem()
    save_file(tensors, folder / peft.WEIGHTS)


def infinite(folder: Path) -> None:
    tensors = load_file(folder / peft.WEIGHTS)
    save_file({name: value / 0 for name, value in tensors.items()}, folder / peft.WEIGHTS)


def truncated(folder: Path) -> None:
    data = (folder / peft.WEIGHTS).read_bytes()
    (folder / peft.WEIGHTS).write_bytes(data[: len(data) // 2])


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edited(folder, **changes)


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "DoRA": (config(use_dora=True), "use_dora is True"),
    "biases": (config(bias="all"), "bias is 'all'"),
    "another method": (config(peft_type="IA3"), "peft_type is 'IA3'"),
    "some layers": (config(layers_to_transform=[0]), "layers_to_transform is"),
    "changed base": (config(init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
    "unknown field": (config(new_trick={"a": 1}), "new_trick is"),
    "a pattern": (config(rank_pattern={"(a+)+$": 2}), "is a pattern"),
    "a pattern of modules": (config(target_modules=".*proj"), "must be a list of names"),
    "no method": (config(peft_type=None), "peft_type is None"),
    "rank of text": (config(r="8"), "r is '8'"),
    "no rank": (config(r=0), "r is 0"),
    "another rank": (config(r=3), "implies (3, 16)"),
    "an infinite scale": (config(lora_alpha=float("inf")), "lora_alpha is inf"),
    "rank of a list": (config(rank_pattern=[1]), "rank_pattern is"),
    "tied": (config(modules_to_save=["wte"]), "tied to the output layer"),
    "LoRA of the embedding": (config(target_modules=["wte"]), "LoRA for wte"),
    "other modules": (config(target_modules=["q_proj"]), "none of them is in this model"),
    "pickle": (pickled, "could run code"),
    "missing": (without_one, "missing"),
    "unknown tensor": (renamed(lambda name: name.replace("c_fc", "c_gate")), "not part of this"),
    "not finite": (infinite, "not finite"),
    "half a file": (truncated, "cannot be read"),
    "no config": (lambda folder: (folder / peft.CONFIG).unlink(), "does not exist"),
    "broken config": (lambda folder: edit_text(folder, "{"), "cannot be read"),
    "deep config": (lambda folder: edit_text(folder, '{"a":' * 5000 + "1" + "}" * 5000), "deep"),
}


def edit_text(folder: Path, text: str) -> None:
    (folder / peft.CONFIG).write_text(text)


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    base, folder, _ = ours(small("gpt2"), tmp_path)
    spoil, message = REFUSED[case]
    spoil(folder)
    with pytest.raises(ModelError) as error:
        load_model(base, adapter=folder)
    assert message in str(error.value)


def test_another_base_is_named_with_every_problem(tmp_path: Path) -> None:
    base, folder, _ = ours(small("llama"), tmp_path)
    other = saved(small("llama", dim=32), tmp_path / "other")
    with pytest.raises(ModelError) as error:
        load_model(other, adapter=folder)
    assert f"trained on {base}, does not fit {other}" in str(error.value)
    assert str(error.value).count("implies") == 20 and "more" in str(error.value)


def test_a_language_model_adapter_has_no_head(tmp_path: Path) -> None:
    base, folder, _ = ours(small("llama"), tmp_path)
    with pytest.raises(ModelError, match="not an adapter of a classifier"):
        load_classifier(base, adapter=folder)
