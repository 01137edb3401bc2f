"""Published model families, compared with `transformers`: random configs, and those on the Hub."""

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from journeys import counts
from models import PUBLISHED_FAMILIES, gpt_config, lively
from safetensors.torch import load_file, save_file
from test_huggingface import LLAMA3, YARN, check_parity, randomized
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from nanolm.errors import ModelError
from nanolm.model.adapters import Adapters
from nanolm.model.build import build_model
from nanolm.model.config import GPTConfig, ModelConfig
from nanolm.model.config_json import config_from_json, model_type
from nanolm.model.fast.quantized import quantize
from nanolm.model.huggingface import load_classifier, load_model, save_model
from nanolm.model.rope_json import rotary_share
from nanolm.model.shapes import parameter_shapes
from nanolm.model.stored import load_config
from nanolm.text.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer([], "byte")
NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
FAMILIES = ("llama", pytest.param("qwen3", marks=pytest.mark.slow), *PUBLISHED_FAMILIES)
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def drawn(family: str, seed: int) -> dict[str, Any]:
    """A random config of a family, as transformers takes it."""
    draw = random.Random(f"{family} {seed}")
    heads, width = draw.choice([2, 4]), draw.choice([8, 10, 16])
    values = SIZES | {
        "num_hidden_layers": draw.choice([2, 5]),
        "num_attention_heads": heads,
        "hidden_size": heads * width,
        "tie_word_embeddings": draw.choice([True, False]),
    }
    if family == "gpt_neox":
        rope = {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 4 / width}
        values |= {
            "use_parallel_residual": draw.choice([True, False]),
            "attention_bias": draw.choice([True, False]),
            "hidden_act": draw.choice(["gelu", "gelu_new", "gelu_fast", "relu", "silu"]),
            "layer_norm_eps": draw.choice([1e-5, 1e-3]),
        }
        return values | draw.choice(
            [{"rotary_pct": 2.5 / width}, {"rope_parameters": rope}, {"rotary_emb_base": 500}]
        )
    values["num_key_value_heads"] = draw.choice([1, 2, heads])
    values["rms_norm_eps"] = draw.choice([1e-6, 1e-3])
    values |= draw.choice([{}, {"head_dim": 6}, {"head_dim": 20, "rope_theta": 1e5}])
    values |= draw.choice([{}, {"rope_scaling": LLAMA3}, {"rope_scaling": YARN}])
    for name in ("attention_bias", "mlp_bias"):
        values[name] = draw.choice([True, False])  # families without it ignore it
    if family == "mistral":
        values["sliding_window"] = draw.choice([None, 3, 50, 256, 4096])
    if family == "smollm3":
        flags = [draw.randint(0, 1) for _ in range(7)]
        values |= draw.choice([{}, {"no_rope_layer_interval": 2}, {"no_rope_layers": flags}])
    return values


def written_by_transformers(family: str, values: dict[str, Any], folder: Path) -> Any:
    config = AutoConfig.for_model(family, **{**copy.deepcopy(values), **NO_ENDS})
    theirs = randomized(AutoModelForCausalLM.from_config(config))
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize("seeds", counts(1, 6))
@pytest.mark.parametrize("family", FAMILIES)
def test_random_configs(family: str, seeds: int, tmp_path: Path) -> None:
    for seed in range(seeds):
        folder, again = tmp_path / str(seed), tmp_path / f"{seed} again"
        theirs = written_by_transformers(family, drawn(family, seed), folder)
        ours = load_model(folder)
        check_parity(ours, theirs)
        again.mkdir()
        save_model(ours, again, TOKENIZER)
        assert load_config(again) == ours.config
        back, report = AutoModelForCausalLM.from_pretrained(again, output_loading_info=True)
        assert not any(report.values())
        ids = torch.randint(300, (2, 256))
        with torch.no_grad():
            torch.testing.assert_close(back(ids).logits, ours(ids), atol=1e-4, rtol=0)
            quick = copy.deepcopy(ours)
            quantize(quick, 8)
            exact, rounded = (model(ids).log_softmax(-1) for model in (ours, quick))
        assert (rounded - exact).abs().mean() < 0.05 * exact.std()


# Besides sizes, exactly the fields that are on the Hub.
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Qwen2.5-0.5B": (
        494_032_768,
        {
            "architectures": ["Qwen2ForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151643,
            "hidden_act": "silu",
            "hidden_size": 896,
            "initializer_range": 0.02,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 24,
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_mrope": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    "Mistral-7B-v0.1": (
        7_241_732_096,
        {
            "architectures": ["MistralForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 32000,
        },
    ),
    "Mistral-7B-v0.3": (
        7_248_023_552,
        {
            "architectures": ["MistralForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 32768,
        },
    ),
    "SmolLM3-3B": (
        3_075_098_624,
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 128000,
            "eos_token_id": 128012,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "layer_types": ["full_attention"] * 36,
            "max_position_embeddings": 65536,
            "max_window_layers": 28,
            "mlp_bias": False,
            "model_type": "smollm3",
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 4,
            "pad_token_id": 128004,
            "pretraining_tp": 2,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "use_cache": False,
            "use_sliding_window": False,
            "vocab_size": 128256,
        },
    ),
    "OLMo-2-0425-1B": (
        1_484_916_736,
        {
            "architectures": ["Olmo2ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "eos_token_id": 100257,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "model_type": "olmo2",
            "num_attention_heads": 16,
            "num_hidden_layers": 16,
            "num_key_value_heads": 16,
            "pad_token_id": 100277,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 500000,
            "tie_word_embeddings": False,
            "vocab_size": 100352,
        },
    ),
    "pythia-70m": (
        70_426_624,
        {
            "architectures": ["GPTNeoXForCausalLM"],
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_act": "gelu",
            "hidden_size": 512,
            "initializer_range": 0.02,
            "intermediate_size": 2048,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048,
            "model_type": "gpt_neox",
            "num_attention_heads": 8,
            "num_hidden_layers": 6,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "use_cache": True,
            "use_parallel_residual": True,
            "vocab_size": 50304,
        },
    ),
    "TinyLlama-1.1B": (
        1_100_048_384,
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "max_position_embeddings": 2048,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 22,
            "num_key_value_heads": 4,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_on_the_hub(name: str, tmp_path: Path) -> None:
    """They have their published size; shrunk, with all other fields, the same logits."""
    parameters, values = PUBLISHED[name]
    config = config_from_json(values, Path(name))
    assert isinstance(config, ModelConfig)
    with torch.device("meta"):
        assert build_model(config).parameter_count() == parameters
    few: dict[str, Any] = {n: value[:4] for n, value in values.items() if isinstance(value, list)}
    smaller = {"sliding_window": 20, "num_key_value_heads": 2}
    few |= {name: value for name, value in smaller.items() if values.get(name)}
    small = {**values, **SIZES, **few, "dtype": "float32", **NO_ENDS}
    small.pop("torch_dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(small))
    theirs = randomized(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)))
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(small))  # not as transformers rewrites it
    ids = torch.randint(300, (2, 100))
    with torch.no_grad():
        found = load_model(tmp_path)(ids)
        torch.testing.assert_close(found, theirs(ids).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", PUBLISHED_FAMILIES)
def test_classifiers(family: str, tmp_path: Path) -> None:
    values = {**drawn(family, 0), **NO_ENDS, "pad_token_id": 0, "num_labels": 3}
    config = AutoConfig.for_model(family, **values)
    theirs = randomized(AutoModelForSequenceClassification.from_config(config))
    theirs.save_pretrained(tmp_path)
    ours = load_classifier(tmp_path)
    ids, lengths = torch.randint(1, 300, (3, 40)), torch.tensor([40, 17, 1])
    real = torch.arange(40) < lengths[:, None]
    ids = ids * real
    with torch.no_grad():
        expected = theirs(ids, attention_mask=real.long()).logits
        torch.testing.assert_close(ours(ids, lengths), expected, atol=1e-4, rtol=0)
        again = tmp_path / "again"
        again.mkdir()
        save_model(ours, again, TOKENIZER)
        back = AutoModelForSequenceClassification.from_pretrained(again)
        back.config.pad_token_id = 0
        found = back(ids, attention_mask=real.long()).logits
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        adapters = Adapters(ours.base, rank=2)
        for parameter in adapters.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        adapted = ours(ids, lengths)
        assert not torch.allclose(adapted, expected, atol=1e-2)
        with adapters.merged():
            torch.testing.assert_close(ours(ids, lengths), adapted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", PUBLISHED_FAMILIES)
def test_each_family_is_saved_as_itself(family: str) -> None:
    assert model_type(gpt_config(**PUBLISHED_FAMILIES[family])) == (family, "")


def test_grouped_heads_are_not_those_of_gpt_neox() -> None:
    config = gpt_config(**PUBLISHED_FAMILIES["gpt_neox"], kv_heads=2)
    assert model_type(config) == ("nanolm", "gpt_neox does not support --kv-heads 2")


def test_a_share_of_a_head_survives_rounding() -> None:
    """transformers multiplies and rounds down, which would often lose one component."""
    for width in range(2, 130):
        config = gpt_config(**PUBLISHED_FAMILIES["gpt_neox"] | {"heads": 1, "dim": width})
        for dims in range(2, width, 2):
            assert int(width * rotary_share(replace(config, rotary_dims=dims))) == dims


@pytest.mark.parametrize("scaling", [LLAMA3, YARN], ids=["llama3", "yarn"])
@pytest.mark.parametrize("inside", [True, False])
def test_the_original_context_beside_the_scaling(
    scaling: dict[str, Any], inside: bool, tmp_path: Path
) -> None:
    rope = {key: value for key, value in scaling.items() if inside or "original" not in key}
    more = {"rope_scaling": rope, "original_max_position_embeddings": 40}
    theirs = written_by_transformers("llama", {**SIZES, **more}, tmp_path)
    config = {**SIZES, **more, "model_type": "llama", "rope_theta": scaling["rope_theta"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours, ids = load_model(tmp_path), torch.randint(300, (2, 200))
    assert isinstance(ours.config, GPTConfig) and ours.config.rope_scaling
    assert ours.config.rope_scaling.original_context == 40
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=0)


def test_gpt2_with_the_names_of_other_families() -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
    for more in ({}, {"n_embd": 64, "n_layer": 3}):  # transformers prefers the others
        values = {**more, **sizes, "model_type": "gpt2"}
        expected = transformers.GPT2Config(**values)
        config = config_from_json(values, Path("config.json"))
        assert isinstance(config, GPTConfig)
        assert (config.dim, config.layers) == (expected.n_embd, expected.n_layer) == (32, 4)
        assert (config.heads, config.context, config.hidden) == (4, 256, 128)


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("qwen2", {"use_sliding_window": True}, "a sliding window"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 4}, "a sliding window"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers is [1, 0]: must have a 0 or a 1"),
        ("smollm3", {"no_rope_layers": [1, 0, "a", {}]}, "must have a 0 or a 1"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("mistral", {"sliding_window": "wide"}, "sliding_window is 'wide'"),
        ("olmo2", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "this RoPE scaling"),
        ("olmo2", {"partial_rotary_factor": 0.5}, "partial rotary embeddings"),
        ("gpt_neox", {"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ("gpt_neox", {"rotary_pct": 0.4}, "rotary_dims is 3: must be even"),
        ("gpt_neox", {"rotary_pct": 2.0}, "rotary_dims is 16: must be even, from 2 to"),
        ("gpt_neox", {"rotary_pct": 0}, "rotary_dims is 0"),
        ("gpt_neox", {"head_dim": 16}, "head_dim is 16"),
        ("gpt_neox", {"architectures": ["GPTNeoXForQuestionAnswering"]}, "architectures"),
        ("gpt_neox", {"num_hidden_layers": 10**9}, "must be at most 1,000"),
        ("smollm3", {"num_hidden_layers": 10**9}, "must be at most 1,000"),
    ],
)
def test_what_is_not_supported_is_named(family: str, change: dict[str, Any], words: str) -> None:
    values = {**SIZES, "num_key_value_heads": 2, "model_type": family, **change}
    with pytest.raises(ModelError) as caught:
        config_from_json(values, Path("config.json"))
    assert words in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


OWN = {"model_type": "nanolm", "kind": "transformer", **vars(gpt_config(positions="alibi"))}
NEW = (
    *("attention_bias", "qk_norm_whole", "parallel_residual"),
    *("rotary_dims", "unrotated_layers", "sliding_window"),
)


def test_files_of_older_versions_lack_newer_switches() -> None:
    old = {name: value for name, value in OWN.items() if name not in NEW}
    assert config_from_json(old, Path("config.json")) == gpt_config(positions="alibi")
    del old["heads"]
    with pytest.raises(ModelError, match="heads is missing"):
        config_from_json(old, Path("config.json"))


def test_a_model_that_an_older_version_saved_in_our_format(tmp_path: Path) -> None:
    """It would now be saved as GPT-NeoX, with other names."""
    sequential = {"parallel_residual": False, "rotary_dims": None}
    config = gpt_config(**PUBLISHED_FAMILIES["gpt_neox"] | sequential)
    assert model_type(config)[0] == "gpt_neox"
    values = {**OWN, **vars(config)}
    old = {name: value for name, value in values.items() if name not in NEW}
    (tmp_path / "config.json").write_text(json.dumps(old))
    model = lively(config)
    save_file(dict(model.named_parameters()), tmp_path / "model.safetensors")
    ids = torch.randint(40, (2, 8))
    assert torch.equal(load_model(tmp_path)(ids), model(ids))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"unrotated_layers": [0, "a"]}, "unrotated_layers is"),
        ({"unrotated_layers": [9]}, "must be from 0 to 1"),
        ({"attention_bias": "some"}, "attention_bias is 'some'"),
        ({"parallel_residual": True, "norm_place": "post"}, "needs --norm-place pre"),
        ({"sliding_window": 4}, "without ALiBi"),
        ({"qk_norm_whole": 1}, "qk_norm_whole is 1"),
    ],
)
def test_wrong_switches_in_our_format(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        config_from_json({**OWN, **change}, Path("config.json"))
    assert words in str(caught.value)


def test_shapes_match_those_on_disk(tmp_path: Path) -> None:
    """Tensors under other names, and buffers of old versions of GPT-NeoX, which are ignored."""
    theirs = written_by_transformers("gpt_neox", SIZES, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in ("bias", "masked_bias", "rotary_emb.inv_freq"):
        tensors[f"gpt_neox.layers.0.attention.{name}"] = torch.ones(3)
    save_file(tensors, file)
    ours = load_model(tmp_path)
    count = sum(torch.Size(shape).numel() for shape in parameter_shapes(ours.config).values())
    assert count == sum(parameter.numel() for parameter in theirs.parameters())
