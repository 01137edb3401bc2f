"""Exported to GGUF: llama.cpp gives the same tokens and texts, and nanolm reads it back."""

import json
import math
import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_cpp import LlamaCpp, greedy, largest_difference
from models import gpt_config, lively

import nanolm
from nanolm.model.base import Model
from nanolm.model.config import GPTConfig, RopeScaling, configure
from nanolm.model.huggingface import load_model, save_model
from nanolm.runs.export_gguf import Export, export_gguf
from nanolm.text.tokenizer import BYTE_LEVEL, Tokenizer, train_tokenizer
from nanolm.text.tokenizer_files import read_json

TEXT = Path(__file__).parents[2] / "data" / "stories.txt"
SHAPE: dict[str, Any] = {"layers": 2, "heads": 2, "dim": 32, "context": 256}
FAMILIES = {"qwen3": "modern", "llama": "llama", "gpt2": "gpt2"}


def silent(text: str) -> None:
    pass


def tokenizer_of(kind: str) -> Tokenizer:
    text = TEXT.read_text(encoding="utf-8")[:100_000]
    if kind != "gpt2":
        return train_tokenizer([text, "naïve 日本 🎉\t"], kind, 400)
    # Merges as those of GPT-2, which also splits as it does.
    whole = json.loads(train_tokenizer([text], "bpe", 400).to_json())
    whole["pre_tokenizer"] = {**BYTE_LEVEL, "use_regex": True}
    return read_json(json.dumps(whole), Path("tokenizer.json"))


def saved(folder: Path, model: Model, tokenizer: Tokenizer) -> Path:
    folder.mkdir()
    save_model(model, folder, tokenizer)
    return folder


def exported(folder: Path, dtype: str | None = "f32") -> Export:
    return export_gguf(str(folder), folder.with_suffix(".gguf"), dtype, silent)


def strings(count: int) -> Iterator[str]:
    """White space, contractions, digits, many scripts, and what nobody types."""
    dice = random.Random(count)
    ranges = ((0x20, 0x7F), (0x20, 0x7F), (0xA0, 0x500), (0x900, 0xE00), (0x3000, 0xA000))
    # Characters that all versions of Unicode since 3.2 know.
    assigned = [
        [chr(n) for n in range(*each) if unicodedata.ucd_3_2_0.category(chr(n)) != "Cn"]
        for each in (*ranges, (0x1F300, 0x1F600), (0x1D400, 0x1D800), (0x20000, 0x2A000))
    ]
    assigned = [part for part in assigned if part]
    edges = [*"  \t\n\r\u00a0\u3000\u2028'sdmtSLve.,!?#019aBÉß", "'ll", "'RE", "\r\n", "🎉", "👩‍🚀"]
    for number in range(count):
        pools = assigned if number % 2 else [edges]
        length = dice.randint(1, 30)
        text = "".join(dice.choice(dice.choice(pools)) for _ in range(length))
        yield text.replace("\u2581", "")


def check_ids(llama: LlamaCpp, tokenizer: Tokenizer, texts: list[str]) -> None:
    wrong = [text for text in texts if llama.encode(text) != tokenizer.encode(text)]
    assert not wrong, wrong[:5]
    wrong = [text for text in texts if llama.decode(tokenizer.encode(text)) != text]
    assert not wrong, wrong[:5]


@pytest.mark.parametrize("kind", ["char", "byte", "bpe", "gpt2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_gives_the_same(family: str, kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind)
    config = configure(FAMILIES[family], vocab_size=tokenizer.vocab_size, **SHAPE)
    model = lively(config, std=0.15)
    made = exported(saved(tmp_path / "model", model, tokenizer))
    assert made.architecture == family
    with LlamaCpp(made.file) as llama:
        check_ids(llama, tokenizer, list(strings(100)))
        prompt = tokenizer.encode("Once upon a time")
        ids = llama.greedy(prompt, 200)
        assert ids == greedy(model, prompt, 200, [tokenizer.end_of_text])
        assert largest_difference(llama, model, prompt) < 1e-3
    again = nanolm.load(made.file)
    assert again.model.config == config
    assert again.tokenizer.encode("Once upon a 1234 time") == tokenizer.encode(
        "Once upon a 1234 time"
    )
    for ours, theirs in zip(model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    if kind != "gpt2":
        assert again.tokenizer.fingerprint() == tokenizer.fingerprint()


def variant(**changes: Any) -> GPTConfig:
    return gpt_config(vocab_size=258, context=64, **changes)


VARIANTS: dict[str, GPTConfig] = {
    "grouped keys": variant(kv_heads=2),
    "llama, grouped keys": variant(kv_heads=2, qk_norm=False),
    "wide heads": variant(head_width=12),
    "tied": variant(tied=True),
    "gpt2, not tied": variant(
        **{"positions": "learned", "norm": "layer", "feed_forward": "gelu_tanh"},
        **{"qk_norm": False, "bias": True, "norm_epsilon": 1e-5},
    ),
    "llama with biases": variant(qk_norm=False, bias=True),
    "another base": variant(rope_base=500_000.0),
    "linear": variant(rope_scaling=RopeScaling("linear", 4.0)),
    "yarn": variant(rope_scaling=RopeScaling("yarn", 4.0, 8, 1.0, 32.0, 0.1 * math.log(4) + 1)),
    "llama3": variant(
        qk_norm=False,
        head_width=16,
        rope_base=500_000.0,
        rope_scaling=RopeScaling("llama3", 32.0, 8192, 1.0, 4.0),
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_that_llama_cpp_knows(name: str, tmp_path: Path) -> None:
    config = VARIANTS[name]
    model = lively(config)
    made = exported(saved(tmp_path / "model", model, train_tokenizer([], "byte")))
    again = load_model(made.file)
    assert again.config == config
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with LlamaCpp(made.file, context=64) as llama:
        assert largest_difference(llama, model, list(b"cats and")) < 2e-3
