"""Every model that the switches can make, small enough to try them all."""

import itertools
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F

from nanolm.model.base import Model
from nanolm.model.build import build_model, build_seq2seq
from nanolm.model.config import (
    FeedForwardKind,
    GPTConfig,
    ModelConfig,
    Norm,
    NormPlace,
    Positions,
    RopeScaling,
    Seq2SeqConfig,
    configure,
)
from nanolm.model.huggingface import save_model
from nanolm.model.seq2seq import Seq2Seq
from nanolm.pairs.translator import Translator
from nanolm.text.tokenizer import END_OF_TEXT, train_tokenizer
from nanolm.text.tokenizer_files import read_json

SHAPE = {"vocab_size": 40, "layers": 2, "heads": 4, "dim": 16, "context": 8}
SWITCHES: dict[str, tuple[Any, ...]] = {
    "positions": get_args(Positions),
    "norm": get_args(Norm),
    "norm_place": get_args(NormPlace),
    "feed_forward": get_args(FeedForwardKind),
    "qk_norm": (True, False),
    "bias": (True, False),
    "tied": (True, False),
    "kv_heads": (1, 2, 4),
}
# Switches of published models, which the command line does not offer; the usual values first.
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, "none", "qkv", "all"),
    "qk_norm_whole": (False, True),
    "parallel_residual": (False, True),
    "rotary_dims": (None, 2),
    "unrotated_layers": ((), (0,)),
    "sliding_window": (None, 3),
}
PUBLISHED_FAMILIES: dict[str, dict[str, Any]] = {  # changes of `gpt_config`
    "qwen2": {"qk_norm": False, "attention_bias": "qkv", "kv_heads": 2},
    "mistral": {"qk_norm": False, "sliding_window": 3, "kv_heads": 2},
    "smollm3": {"qk_norm": False, "unrotated_layers": (1,), "tied": True},
    "olmo2": {"norm_place": "branch", "qk_norm_whole": True, "kv_heads": 2},
    "gpt_neox": {
        **{"norm": "layer", "feed_forward": "gelu", "qk_norm": False, "bias": True},
        **{"parallel_residual": True, "rotary_dims": 2},
    },
}
SCALINGS = (
    None,
    RopeScaling("linear", 4.0),
    RopeScaling("llama3", 8.0, 8, 1.0, 4.0),
    RopeScaling("yarn", 4.0, 8, 1.0, 32.0, 1.13),
)


def gpt_config(**changes: Any) -> GPTConfig:
    config = configure("modern", **SHAPE | changes)
    assert isinstance(config, GPTConfig)
    return config


def every_gpt(**fixed: Any) -> list[GPTConfig]:
    """All combinations of the switches that are not fixed."""
    open_switches = {name: values for name, values in SWITCHES.items() if name not in fixed}
    return [
        gpt_config(**fixed, **dict(zip(open_switches, values, strict=True)))
        for values in itertools.product(*open_switches.values())
    ]


def lively(config: ModelConfig, std: float = 0.3) -> Model:
    """A model whose every weight is random: fresh ones are zero in places, with nothing to see."""
    torch.manual_seed(0)
    model = build_model(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model.eval()


def of_family(family: str, **changes: Any) -> Model:
    return lively(configure(family, **SHAPE | changes))


def small_vocabulary(folder: Path, size: int) -> Path:
    """A model of so many tokens, as one may come from elsewhere."""
    import tokenizers

    names = [END_OF_TEXT, *(f"w{number}" for number in range(1, size))]
    words = {name: id for id, name in enumerate(names)}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=END_OF_TEXT))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens([END_OF_TEXT])
    folder.mkdir(parents=True)
    shape = {"layers": 1, "heads": 2, "dim": 16, "context": 16}
    model = lively(configure("gpt2", vocab_size=size, **shape), std=0.4)
    save_model(model, folder, read_json(library.to_str(), folder / "tokenizer.json"))
    return folder


def lively_seq2seq(family: str, std: float = 0.15, **changes: Any) -> Seq2Seq:
    """A sequence-to-sequence model whose every weight is random."""
    config = configure(family, **SHAPE | changes)
    assert isinstance(config, Seq2SeqConfig)
    torch.manual_seed(0)
    model = build_seq2seq(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model.eval()


@cache
def copyist(family: str, **changes: Any) -> Translator:
    """A model that has learned a little to copy letters: it ends after different numbers of tokens,
    and is unsure enough that the beams differ."""
    tokenizer = train_tokenizer([], "byte")
    shape = {"layers": 1, "heads": 2, "dim": 32, "context": 64, **changes}
    config = configure(family, vocab_size=tokenizer.vocab_size, **shape)
    assert isinstance(config, Seq2SeqConfig)
    torch.manual_seed(0)
    model = build_seq2seq(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    end, padding = tokenizer.end_of_text, tokenizer.padding
    for _ in range(60):
        lengths = torch.randint(1, 13, (32, 1))
        places, letters = torch.arange(13), torch.randint(97, 105, (32, 13))
        ids = letters.where(places < lengths, end).where(places <= lengths, padding)
        target = torch.cat([torch.full((32, 1), end), ids[:, :-1]], dim=1)
        logits = model(ids, places <= lengths, target)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), ignore_index=padding)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return Translator(model.eval(), tokenizer)
