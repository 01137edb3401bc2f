"""vocab.json with merges.txt, and what a saved tokenizer keeps: the same as in `transformers`."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from nanolm.text.tokenizer import END_OF_TEXT, Tokenizer
from nanolm.text.tokenizer_files import load_tokenizer
from nanolm.text.tokenizer_files.byte_level import ByteLevelFile

TEXTS = [
    "The cat isn't here. The cats are 1234 miles away!\nSchön, aaaa.\n\n\tThe end  of it. ",
    "12345 IT'S e\u0301a\u0308 x²+½. 日本語の文章です。 Привет, мир!\r\n",
    " two  spaces, 'LL <mask> </s><s> <|endoftext|> a <|im_start|>user\nhi<|im_end|>",
    "",
    " ",
]
CLASSES = ["GPT2Tokenizer", "Qwen2Tokenizer", "CLIPTokenizer", "RobertaTokenizer"]
USED = {  # special tokens that are in the vocabulary of the class
    "GPT2Tokenizer": [END_OF_TEXT],
    "Qwen2Tokenizer": [],
    "CLIPTokenizer": ["<|startoftext|>", END_OF_TEXT],
    "RobertaTokenizer": ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
}


@cache
def learned(suffix: str) -> tuple[dict[str, int], list[str]]:
    library = tokenizers.Tokenizer(models.BPE(end_of_word_suffix=suffix))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=[*alphabet], end_of_word_suffix=suffix, show_progress=False
    )
    library.train_from_iterator([*TEXTS, TEXTS[0].lower()], trainer)
    model = json.loads(library.to_str())["model"]
    return model["vocab"], [" ".join(pair) for pair in model["merges"]]


def folder_of(
    folder: Path, kind: str, config: dict[str, Any] | None = None, model_type: str = ""
) -> Path:
    """The two files as saved by models of this class."""
    vocab, merges = learned("</w>" if kind == "CLIPTokenizer" else "")
    names = [*vocab]
    if kind == "CLIPTokenizer":
        names += [f"{name}</w>" for name in names if f"{name}</w>" not in vocab]
    names = [*names, *USED.get(kind, [])]
    if kind == "RobertaTokenizer":
        random.Random(0).shuffle(names)
    folder.mkdir(exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({name: id for id, name in enumerate(names)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type or "gpt2"}))
    return folder


def check_same(tokenizer: Tokenizer, theirs: Any) -> None:
    """The ids of `theirs`, both with special tokens as text and as tokens."""
    for text in TEXTS:
        theirs.split_special_tokens = theirs._tokenizer.encode_special_tokens = True
        assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False), text
        theirs.split_special_tokens = theirs._tokenizer.encode_special_tokens = False
        assert tokenizer.encode_special(text) == theirs.encode(text, add_special_tokens=False), text
    ids = theirs.encode("The cat")
    prompt = tokenizer.encode_prompt("The cat")
    assert prompt == ids[: len(prompt)]
    assert len(ids) - len(prompt) <= 1


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("fast", ["", "Fast"])
def test_the_class_decides_how_a_text_is_split(kind: str, fast: str, tmp_path: Path) -> None:
    import transformers

    folder = folder_of(tmp_path, kind, {"tokenizer_class": kind + fast})
    tokenizer = load_tokenizer(folder)
    check_same(tokenizer, getattr(transformers, kind).from_pretrained(folder))
    assert isinstance(tokenizer, ByteLevelFile) == (kind in ("GPT2Tokenizer", "Qwen2Tokenizer"))
    saved = tmp_path / "saved"
    saved.mkdir()
    tokenizer.save(saved, context=64)
    check_same(load_tokenizer(saved), transformers.AutoTokenizer.from_pretrained(saved))
    if kind == "CLIPTokenizer":
        assert tokenizer.decode(tokenizer.encode("The CATS")) == "the cats "
        assert sum(tokenizer.byte_lengths()[tokenizer.encode("The CATS")]) == len("the cats ")
