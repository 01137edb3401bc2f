"""The files of a tokenizer as Hugging Face `tokenizers` and `transformers` expect them."""

import json
from typing import Any

from nanolm.text.bpe import Pair

# tokenizer.json spells bytes as printable characters: printable Latin-1 as itself, the other 68
# bytes as the characters from U+0100 on, in order.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
SPELLING = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + n) for n, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))
}

_UNSET = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
_OFF = ("fuse_unk", "byte_fallback", "ignore_merges")
BPE_MODEL: dict[str, Any] = {"type": "BPE", **dict.fromkeys(_UNSET), **dict.fromkeys(_OFF, False)}
ISOLATED = {"behavior": "Isolated", "invert": False}
LOWERCASE = {"type": "Lowercase"}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}


def byte_level_json(
    tokens: list[bytes],
    merges: list[Pair],
    pattern: str,
    special: dict[int, str],
    ignore_merges: bool = False,  # whether a word that is a token is not merged from others
    normalizer: dict[str, str] | None = None,
) -> str:
    """tokenizer.json for byte-level BPE: split by `pattern`, then apply `merges` in order."""
    spelled = {id: spell(token) for id, token in enumerate(tokens) if token}
    byte_level = {**BYTE_LEVEL, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, **ISOLATED}
    model = {**BPE_MODEL, "ignore_merges": ignore_merges}
    vocabulary = {token: id for id, token in spelled.items()}
    pairs = [[spelled[left], spelled[right]] for left, right in merges]
    parts = {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        "model": {**model, "vocab": vocabulary, "merges": pairs},
    }
    return tokenizer_json(parts, special)


def tokenizer_json(parts: dict[str, Any], special: dict[int, str] | list[dict[str, Any]]) -> str:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    if isinstance(special, dict):
        flags |= {"special": True}
        special = [{"id": id, "content": text, **flags} for id, text in special.items()]
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": special}
    whole |= {"normalizer": None, "post_processor": None, **parts}
    return json.dumps(whole, ensure_ascii=False, indent=1) + "\n"


def spell(token: bytes) -> str:
    return "".join(SPELLING[byte] for byte in token)


def tokenizer_config(
    special: dict[str, str], context: int, kept: dict[str, Any], end: bool = False
) -> str:
    """The contents of tokenizer_config.json. What is `kept` of another model's file comes last."""
    config: dict[str, Any] = {
        # Without the class, transformers 5 uses the tokenizer of the model's family instead.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        # As here, a special token spelled out in a text is plain text.
        "split_special_tokens": True,
        **kept,
    }
    if end:
        for key in ("add_bos_token", "add_eos_token"):  # would replace what `with_end` adds
            config.pop(key, None)
        config["model_input_names"] = ["input_ids", "attention_mask"]
    return json.dumps(config, indent=1) + "\n"


def with_end(tokenizer_json: str, end: str, id: int) -> str:
    """The contents of a tokenizer.json that adds the token `end` to every text."""
    text, added = (
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": end, "type_id": 0}},
    )
    second = {"Sequence": {"id": "B", "type_id": 0}}
    processor = {
        "type": "TemplateProcessing",
        "single": [text, added],
        "pair": [text, added, second, added],
        "special_tokens": {end: {"id": end, "ids": [id], "tokens": [end]}},
    }
    whole = json.loads(tokenizer_json) | {"post_processor": processor}
    return json.dumps(whole, ensure_ascii=False, indent=1) + "\n"
