"""vocab.json with merges.txt, and what a saved tokenizer keeps: the same as in `transformers`."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from models import of_family
from tokenizers import models, pre_tokenizers, trainers

import nanolm
from nanolm.errors import ModelError
from nanolm.model.huggingface import save_model
from nanolm.pretraining.extend import extend
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


LISTED = {
    str(number): {"content": name, "special": special, "normalized": False, "lstrip": False}
    for number, (name, special) in enumerate(
        [(END_OF_TEXT, True), ("<|im_start|>", True), ("<|im_end|>", True), ("<tool>", False)]
    )
}


def qwen(folder: Path, **changes: Any) -> Path:
    """A folder as Qwen's: its special tokens are not in the vocabulary."""
    size = len(learned("")[0])
    decoder = {str(size + int(id)): token for id, token in LISTED.items()}
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}<|im_end|>\\n"
        "{% endfor %}{{ bos_token or '-' }}"
    )
    config: dict[str, Any] = {"added_tokens_decoder": decoder, "eos_token": "<|im_end|>"}
    config |= {
        "bos_token": None,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": ["<|im_start|>"],
    }
    return folder_of(folder, "Qwen2Tokenizer", config | {"chat_template": template} | changes)


@pytest.mark.parametrize("named", [True, False])
def test_special_tokens_beside_the_vocabulary(named: bool, tmp_path: Path) -> None:
    import transformers

    folder = qwen(tmp_path, **{"tokenizer_class": "Qwen2Tokenizer"} if named else {})
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    tokenizer = load_tokenizer(folder)
    check_same(tokenizer, transformers.Qwen2Tokenizer.from_pretrained(folder))
    start, end = (tokenizer.spelled[name] for name in ("<|im_start|>", "<|im_end|>"))
    assert (tokenizer.end_of_text, tokenizer.turn) == (end, (start, end))
    assert tokenizer.encode_special("<|im_start|>a<tool>")[0] == start
    assert tokenizer.encode("a<tool>")[-1] == tokenizer.vocab_size - 1
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"]["9999"] = {"content": "<far>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="'<far>' is 9999"):
        load_tokenizer(folder)


def test_added_tokens_of_older_versions(tmp_path: Path) -> None:
    import transformers

    folder = folder_of(tmp_path, "Qwen2Tokenizer", {"tokenizer_class": "Qwen2Tokenizer"})
    size = len(learned("")[0])
    names = [END_OF_TEXT, "<|im_start|>", "<|im_end|>"]
    (folder / "added_tokens.json").write_text(
        json.dumps({name: size + n for n, name in enumerate(names)})
    )
    special = {"eos_token": "<|im_end|>", "additional_special_tokens": names[1:]}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.special[tokenizer.end_of_text] == "<|im_end|>"
    check_same(tokenizer, transformers.Qwen2Tokenizer.from_pretrained(folder))


@pytest.mark.parametrize(
    ("config", "model_type", "named"),
    [
        ({"tokenizer_class": "BlenderbotTokenizer"}, "gpt2", "BlenderbotTokenizer"),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "gpt2", "PreTrainedTokenizer"),
        ({}, "whisper", "whisper"),
        ({}, "llama", "LlamaTokenizer"),
    ],
)
def test_other_classes_are_refused(
    config: dict[str, Any], model_type: str, named: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, "", config, model_type)
    with pytest.raises(ModelError, match=rf"{named}.*AutoTokenizer\.from_pretrained\(NAME\)"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "wrong",
    [
        {"eos_token": 5},
        {"bos_token": {"name": "x"}},
        {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"x": {"content": "<a>"}}},
        {"additional_special_tokens": 3},
        {"extra_special_tokens": [[]]},
    ],
    ids=str,
)
def test_damaged_special_tokens_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="special tokens of its folder"):
        load_tokenizer(folder_of(tmp_path, "GPT2Tokenizer", wrong))


def test_settings_that_cannot_be_written_are_left_out(tmp_path: Path) -> None:
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    folder = folder_of(tmp_path, "GPT2Tokenizer", {"chat_template": deep, "cls_token": "\ud800"})
    with pytest.raises(ModelError):
        load_tokenizer(folder)
    folder = folder_of(tmp_path, "GPT2Tokenizer", {"chat_template": deep})
    tokenizer = load_tokenizer(folder)
    assert "chat_template" not in tokenizer.config
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        load_tokenizer(folder)


MESSAGES = [{"role": "user", "content": "The cat?"}, {"role": "assistant", "content": "a <b>"}]


def check_chat(folder: Path, source: Path) -> None:
    from transformers import AutoTokenizer

    theirs, saved = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert saved.encode(text) == theirs.encode(text)
    for tokenize in (False, True):
        chat = [each.apply_chat_template(MESSAGES, tokenize=tokenize) for each in (saved, theirs)]
        assert chat[0] == chat[1]
    assert saved.bos_token == theirs.bos_token
    assert len(saved) == len(theirs)


@pytest.mark.parametrize("apart", [False, True])
def test_a_run_keeps_the_chat_template(apart: bool, tmp_path: Path) -> None:
    source = qwen(tmp_path / "source", tokenizer_class="Qwen2Tokenizer")
    if apart:
        config = json.loads((source / "tokenizer_config.json").read_text())
        template = config.pop("chat_template")
        (source / "tokenizer_config.json").write_text(json.dumps(config))
        (source / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer = load_tokenizer(source)
    model = of_family("modern", vocab_size=tokenizer.vocab_size)
    base = tmp_path / "base"
    base.mkdir()
    save_model(model, base, tokenizer)
    check_chat(base, source)
    run = tmp_path / "run"
    nanolm.train("embedded:tiny", start_from=base, out=run, steps=4, threads=1, batch=2)
    extend(run, {"steps": 2})
    check_chat(run / "last", source)
    if apart:
        return
    rows = tmp_path / "rows.tsv"
    rows.write_text("text\tlabel\n" + "good cat\tyes\nbad dog\tno\n" * 20, encoding="utf-8")
    nanolm.finetune(rows, start_from=run, out=tmp_path / "tuned", steps=2, threads=1)
    check_chat(tmp_path / "tuned" / "last", source)
