"""The folder on disk, held to what `transformers` makes of it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanolm.errors import ModelError
from nanolm.generation.knobs import Knobs
from nanolm.generation.language_model import LanguageModel, Sample
from nanolm.model.config import FAMILIES, configure
from nanolm.model.gpt import GPT
from nanolm.model.huggingface import load_model, save_model
from nanolm.text.loading import load_tokenizer
from nanolm.text.tokenizer import train_tokenizer

TEXT = "the cat sat on the mat. the dog sat on the log. " * 3


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tokenizer = train_tokenizer([TEXT], "bpe", 290)
    torch.manual_seed(0)
    config = configure(
        request.param, vocab_size=tokenizer.vocab_size, layers=3, heads=3, dim=48, context=256
    )
    model = GPT(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    save_model(model, tmp_path, tokenizer)
    return tmp_path


def test_transformers_gives_the_same_logits_and_text(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ours = LanguageModel(load_model(folder), load_tokenizer(folder))
    for length in (1, 7, 256):
        ids = torch.randint(ours.tokenizer.vocab_size, (2, length))
        with torch.no_grad():
            torch.testing.assert_close(ours.model(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
    for text in ["the cat", " <|endoftext|> Łódź 12345\r\n\n", "a" * 500, ""]:
        assert tokenizer(text)["input_ids"] == ours.tokenizer.encode(text)
        assert tokenizer.decode(ours.tokenizer.encode(text)) == text
    samples = [Sample()]
    for _ in ours.stream("the cat", Knobs(tokens=200, greedy=True), samples):
        pass
    prompt = torch.tensor([ours.tokenizer.encode("the cat")])
    written = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=200
    )
    assert written[0, prompt.shape[1] :].tolist() == samples[0].tokens


def test_what_is_loaded_is_what_was_saved(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder)
    again = tmp_path / "again"
    again.mkdir()
    save_model(model, again, load_tokenizer(folder))
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    assert load_model(again).config == model.config


def test_faults_in_the_weights_are_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    norm = next(name for name in tensors if name.endswith(("model.norm.weight", "ln_f.weight")))
    wrong = {**tensors, norm: torch.ones(7), "surplus": torch.ones(1)}
    missing = next(name for name in tensors if "h.1." in name or "layers.1." in name)
    del wrong[missing]
    save_file(wrong, file)
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert f"{norm}: (7,) where config.json says (48,)" in message
    assert "surplus: not part of this model" in message
    assert missing in message


def test_a_config_that_lies_allocates_nothing(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 10**12}))
    with pytest.raises(ModelError, match="where config"):
        load_model(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "bert"},
        {"vocab_size": None},
        {"vocab_size": "many"},
        {"tie_word_embeddings": "maybe"},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}, "n_positions": 0},
        {"activation_function": "relu", "hidden_act": "relu"},
        {"architectures": ["GPT2ForSequenceClassification"]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_config_we_do_not_read_is_refused(folder: Path, change: dict[str, object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    changed = {name: value for name, value in change.items() if name in config}
    assert changed
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert any(name in message or repr(value) in message for name, value in changed.items())


@pytest.mark.parametrize("contents", [b"", b"{", b"[]", b"\xff\xfe"])
def test_broken_files_are_named(folder: Path, contents: bytes) -> None:
    (folder / "model.safetensors").write_bytes(contents)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load_model(folder)
    (folder / "config.json").write_bytes(contents)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(folder)
