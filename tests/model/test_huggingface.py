"""Model folders, compared with what `transformers` reads and writes."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from models import SHAPE, lively
from safetensors.torch import load_file, save_file
from strategies import configs
from torch import Tensor

from nanolm.errors import ModelError
from nanolm.generation.decoding import CachedDecoder
from nanolm.generation.language_model import LanguageModel, Sample
from nanolm.generation.sampling_params import SamplingParams
from nanolm.model.base import Model
from nanolm.model.build import build_model
from nanolm.model.config import FAMILIES, GPTConfig, ModelConfig, RopeScaling, configure
from nanolm.model.config_json import config_from_json, model_type
from nanolm.model.huggingface import load_model, save_model, save_weights
from nanolm.model.stored import load_config
from nanolm.text.tokenizer import train_tokenizer
from nanolm.text.tokenizer_files import load_tokenizer
from nanolm.training.optim import Optimizers

TEXT = "the cat sat on the mat. the dog sat on the log. " * 3

SMALL = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GPT2 = {"vocab_size": 300, "n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Model types and configs that transformers might write.
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),
    "gpt2, another nonlinearity": ("gpt2", {**GPT2, "activation_function": "gelu", "n_inner": 50}),
    "gpt2, swish": ("gpt2", {**GPT2, "activation_function": "swish"}),
    "gpt2, untied": ("gpt2", {**GPT2, "activation_function": "relu", "tie_word_embeddings": False}),
    "llama, grouped queries": ("llama", SMALL),
    "llama, tied, one key head": (
        "llama",
        {**SMALL, "num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ),
    "llama, biases, wide heads": (
        "llama",
        {**SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    ),
    "llama 3": ("llama", {**SMALL, "rope_parameters": LLAMA3}),
    "llama, linear": (
        "llama",
        {**SMALL, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "qwen3, wide heads": ("qwen3", {**SMALL, "head_dim": 32}),
    "qwen3, tied, yarn": (
        "qwen3",
        {**SMALL, "head_dim": 32, "rope_parameters": YARN, "tie_word_embeddings": True},
    ),
}


def randomized(model: Any) -> Any:
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


def greedy(model: Model, prompt: Tensor, count: int) -> list[int]:
    decoder = CachedDecoder(model, 1, prompt.shape[1] + count)
    ids = prompt
    with torch.inference_mode():
        for length in range(prompt.shape[1], prompt.shape[1] + count):
            decoder.prepare(ids, [length])
            best = decoder.logits(ids, torch.tensor([length])).argmax(dim=-1)
            ids = torch.cat([ids, best[:, None]], dim=1)
    return ids[0, prompt.shape[1] :].tolist()


def check_parity(ours: Model, theirs: Any) -> None:
    """The same logits for batches of any length, and the same 200 tokens."""
    size = ours.config.vocab_size
    for batch, length in ((1, 1), (3, 7), (2, 256)):
        ids = torch.randint(size, (batch, length))
        with torch.no_grad():
            torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=0)
    # Rows of different lengths, padded: real tokens must not see padding.
    ids, lengths = torch.randint(size, (3, 40)), torch.tensor([40, 17, 1])
    real = torch.arange(40) < lengths[:, None]
    with torch.no_grad():
        expected = theirs(ids, attention_mask=real.long()).logits
        torch.testing.assert_close(ours(ids)[real], expected[real], atol=1e-4, rtol=0)
    prompt = torch.randint(size, (1, 5))
    written = theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=200,
        max_new_tokens=200,
        pad_token_id=0,
        eos_token_id=None,
    )
    assert written[0, 5:].tolist() == greedy(ours, prompt, 200)


@pytest.mark.parametrize("case", THEIRS)
def test_what_transformers_writes_is_read(case: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, values = THEIRS[case]
    ends = {"bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(kind, **{**values, **ends})
    theirs = randomized(AutoModelForCausalLM.from_config(config))
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    check_parity(ours, theirs)

    again = tmp_path / "again"  # and back, in several files
    again.mkdir()
    save_model(ours, again, train_tokenizer([], "byte"), shard=30_000)
    assert len(list(again.glob("model-*.safetensors"))) > 2
    assert load_config(again) == ours.config
    back = AutoModelForCausalLM.from_pretrained(again)
    ids = torch.randint(300, (2, 200))
    with torch.no_grad():
        torch.testing.assert_close(back(ids).logits, ours(ids), atol=1e-4, rtol=0)
        torch.testing.assert_close(load_model(again)(ids), ours(ids), atol=0, rtol=0)


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tokenizer = train_tokenizer([TEXT], "bpe", 290)
    shape = {"layers": 3, "heads": 3, "dim": 48, "context": 256}
    model = lively(configure(request.param, vocab_size=tokenizer.vocab_size, **shape), std=0.15)
    save_model(model, tmp_path, tokenizer)
    return tmp_path


def ours_alone(folder: Path) -> bool:
    return model_type(load_config(folder))[0] == "nanolm"


def test_transformers_reads_what_nanolm_writes(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = LanguageModel(load_model(folder), load_tokenizer(folder))
    if ours_alone(folder):
        with pytest.raises(ValueError, match="nanolm"):
            AutoModelForCausalLM.from_pretrained(folder)
        return
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    check_parity(ours.model, theirs)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ["the cat", " <|endoftext|> Łódź 12345\r\n\n", "a" * 500, ""]:
        assert tokenizer(text)["input_ids"] == ours.tokenizer.encode(text)
        assert tokenizer.decode(ours.tokenizer.encode(text)) == text
    samples = [Sample("the cat")]
    for _ in ours.stream(samples, SamplingParams(tokens=200, greedy=True)):
        pass
    prompt = tokenizer("the cat", return_tensors="pt")
    written = theirs.generate(**prompt, do_sample=False, max_new_tokens=200)
    assert written[0, prompt["input_ids"].shape[1] :].tolist() == samples[0].tokens


def test_the_real_model_writes_the_same_text() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = Path(os.environ.get("NANOLM_TEST_DATA") or "no such folder") / "weights/stories260K"
    if not place.exists():
        pytest.skip("NANOLM_TEST_DATA has no weights/stories260K")
    theirs, tokenizer = (
        kind.from_pretrained(place) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    ours = LanguageModel(load_model(place), load_tokenizer(place))
    for text in ("Once upon a time", "Lily and Ben", ""):
        prompt = tokenizer(text, return_tensors="pt")
        assert ours.tokenizer.encode_prompt(text) == prompt["input_ids"][0].tolist()
        written = theirs.generate(**prompt, do_sample=False, max_new_tokens=300)
        expected = tokenizer.decode(written[0], skip_special_tokens=True)
        assert (text + ours.generate(text, greedy=True, tokens=300)).strip() == expected.strip()


@given(configs())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_model_is_saved_loaded_and_trained_further(config: ModelConfig) -> None:
    """Three steps, saved, loaded, three more: bit for bit six steps."""
    tokenizer = train_tokenizer([], "byte")

    def steps(model: Model, optimizer: Optimizers, first: int) -> None:
        for number in range(first, first + 3):
            torch.manual_seed(number)
            ids = torch.randint(SHAPE["vocab_size"], (2, SHAPE["context"]))
            model.train()(ids).log_softmax(-1)[..., 1].sum().neg().backward()
            optimizer.set_lr(1e-3)
            optimizer.step()
            optimizer.zero_grad()

    whole = lively(config)
    optimizer = Optimizers(dict(whole.named_parameters()), weight_decay=0.1)
    steps(whole, optimizer, 0)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        save_model(whole, place, tokenizer, shard=3000)
        save_file(optimizer.state_tensors(), place / "optimizer.safetensors")
        resumed = load_model(place)
        assert resumed.config == config
        other = Optimizers(dict(resumed.named_parameters()), weight_decay=0.1)
        other.load_state_tensors(load_file(place / "optimizer.safetensors"))
    steps(whole, optimizer, 3)
    steps(resumed, other, 3)
    for (name, one), (_, two) in zip(
        whole.named_parameters(), resumed.named_parameters(), strict=True
    ):
        assert torch.equal(one, two), name


def test_what_is_loaded_is_what_was_saved(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder)
    again = tmp_path / "again"
    again.mkdir()
    save_model(model, again, load_tokenizer(folder))
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    assert load_model(again).config == model.config


def rewrite(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value != "gone"}))


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_older_and_newer_spellings_mean_the_same(folder: Path, scaling: dict[str, Any]) -> None:
    rope = scaling or {"rope_type": "default", "rope_theta": 500_000.0}
    rewrite(folder, rope_parameters=rope, rope_theta="gone", rope_scaling="gone", dtype="float32")
    new = load_config(folder)
    inner = {key: value for key, value in rope.items() if key != "rope_theta"}
    for name in ("rope_type", "type"):
        inner = {name if key in ("rope_type", "type") else key: v for key, v in inner.items()}
        older = {"rope_theta": 500_000.0, "rope_scaling": inner if scaling else None}
        rewrite(folder, rope_parameters="gone", dtype="gone", torch_dtype="float32", **older)
        assert load_config(folder) == new
    assert isinstance(new, GPTConfig)
    assert new.rope_base == 500_000
    expected = RopeScaling("llama3", 8.0, 64, 1.0, 4.0)
    assert new.rope_scaling == (expected if scaling else None)


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
def test_folders_as_they_were_years_ago(folder: Path) -> None:
    """No prefix, masks saved too, the tied head twice, few fields in config.json."""
    model = load_model(folder)
    tensors = load_file(folder / "model.safetensors")
    old = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    old["lm_head.weight"] = old["wte.weight"].clone()
    for layer in range(3):
        old[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 256, 256).tril()
        old[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(old, folder / "model.safetensors")
    gone = dict.fromkeys(["n_inner", "tie_word_embeddings", "activation_function", "dtype"], "gone")
    rewrite(folder, **gone, n_ctx=256, resid_pdrop=0.0)
    again = load_model(folder)
    assert again.config == model.config
    ids = torch.randint(model.config.vocab_size, (1, 20))
    assert torch.equal(again(ids), model(ids))

    old["lm_head.weight"][5, 5] += 1
    save_file(old, folder / "model.safetensors")
    with pytest.raises(ModelError, match="differs from the embedding"):
        load_model(folder)


@pytest.mark.parametrize("folder", ["modern"], indirect=True)
def test_half_precision_is_read(folder: Path) -> None:
    model = load_model(folder)
    for kind in (torch.bfloat16, torch.float16, torch.float64):
        tensors = load_file(folder / "model.safetensors")
        save_file({n: t.to(kind) for n, t in tensors.items()}, folder / "model.safetensors")
        again = load_model(folder)
        assert again.head.weight.dtype == torch.float32
        torch.testing.assert_close(again.head.weight, model.head.weight, atol=1e-2, rtol=1e-2)


def test_weights_are_split_above_a_size(tmp_path: Path) -> None:
    model = lively(configure("llama", vocab_size=300, layers=2, heads=2, dim=32, context=16))
    save_weights(model, tmp_path, shard=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    sizes = {
        file: sum(t.nbytes for t in load_file(tmp_path / file).values())
        for file in set(index["weight_map"].values())
    }
    assert sum(sizes.values()) == index["metadata"]["total_size"]
    largest = 300 * 32 * 4  # one tensor is never split
    assert all(size <= max(20_000, largest) for size in sizes.values())
    assert not (tmp_path / "model.safetensors").exists()


def test_faults_in_the_weights_are_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    one, missing = sorted(tensors)[0], sorted(tensors)[-1]
    shape = tuple(tensors[one].shape)
    wrong = {**tensors, one: torch.ones(7), "surplus": torch.ones(1)}
    del wrong[missing]
    save_file(wrong, file)
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    message = str(caught.value)
    short = [name.removeprefix("transformer.").removeprefix("model.") for name in (one, missing)]
    assert f"{short[0]}: shape (7,), but the config implies {shape}" in message
    assert "surplus: not part of this model" in message
    assert f"{short[1]}: missing" in message


def test_a_config_that_lies_allocates_nothing(folder: Path) -> None:
    rewrite(folder, vocab_size=10**12)
    with pytest.raises(ModelError, match=r"the config implies"):
        load_model(folder)


@pytest.mark.parametrize(
    ("folder", "change", "words"),
    [
        ("gpt2", {"model_type": "bert"}, "not 'bert'"),
        ("gpt2", {"model_type": "gone"}, "not None"),
        ("gpt2", {"vocab_size": None}, "vocab_size"),
        ("llama", {"vocab_size": "many"}, "vocab_size is 'many'"),
        ("llama", {"tie_word_embeddings": "maybe"}, "tie_word_embeddings is 'maybe'"),
        ("gpt2", {"n_positions": 0}, "n_positions is 0"),
        ("gpt2", {"activation_function": "mish"}, "activation_function is 'mish'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "attention scaled by layer"),
        ("gpt2", {"add_cross_attention": True}, "cross-attention"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("gpt2", {"architectures": ["GPT2ForTokenClassification"]}, "architectures"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantized weights"),
        (
            "llama",
            {"rope_parameters": "gone", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "dynamic",
        ),
        ("llama", {"rope_parameters": {**YARN, "mscale": 1.0}, "rope_theta": "gone"}, "mscale"),
        ("llama", {"rope_theta": 5e5}, "older fields"),
        ("modern", {"use_sliding_window": True}, "a sliding window"),
        ("modern", {"layer_types": ["sliding_attention"]}, "a sliding window"),
        ("lstm", {"cell": "gru"}, "cell is 'gru': must be rnn or lstm"),
        ("lstm", {"surprise": 1}, "surprise"),
        ("lstm", {"kind": "other"}, "kind is 'other'"),
    ],
    indirect=["folder"],
)
def test_a_config_we_do_not_read_is_refused(
    folder: Path, change: dict[str, object], words: str
) -> None:
    rewrite(folder, **change)
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    assert words in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("contents", [b"", b"{", b"[]", b"\xff\xfe"])
def test_broken_files_are_named(folder: Path, contents: bytes) -> None:
    (folder / "model.safetensors").write_bytes(contents)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load_model(folder)
    (folder / "config.json").write_bytes(contents)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "family", "why"),
    [
        ({}, "qwen3", ""),
        ({"qk_norm": False}, "llama", ""),
        ({"qk_norm": False, "bias": True}, "llama", ""),
        ({"bias": True}, "nanolm", "llama does not support --qk-norm"),
        ({"norm_place": "post"}, "nanolm", "qwen3 does not support --norm-place post"),
        ({"qk_norm": False, "positions": "sinusoidal"}, "nanolm", "support --positions sinusoidal"),
    ],
)
def test_the_family_on_disk(changes: dict[str, Any], family: str, why: str) -> None:
    shape = {"vocab_size": 300, "layers": 3, "heads": 3, "dim": 48, "context": 64}
    found, reason = model_type(configure("modern", **shape, **changes))
    assert found == family
    assert why in reason


PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {  # configs as they are on the Hub
    "SmolLM2-135M": (
        134_515_008,
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "vocab_size": 49152,
        },
    ),
    "Qwen3-0.6B": (
        596_049_920,
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    "Llama-3.2-1B": (
        1_235_814_400,
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_size(name: str) -> None:
    parameters, values = PUBLISHED[name]
    config = config_from_json(values, Path(name))
    assert isinstance(config, ModelConfig)
    with torch.device("meta"):
        assert build_model(config).parameter_count() == parameters
