"""Tokenizers in GGUF files, converted from and to a tokenizer.json.

    >>> values, notes = tokenizer_values(tokenizer, vocab_size=1024)
    {'tokenizer.ggml.model': 'gpt2', 'tokenizer.ggml.pre': 'llama-bpe', ...}

The format has byte-level BPE ("gpt2"), whose split pattern it knows by name, and SentencePiece BPE
("llama"). Characters are written as the latter, with nothing to merge.
"""

import json
from math import isfinite
from pathlib import Path
from typing import Any, TypeGuard

from nanolm.errors import ModelError
from nanolm.gguf.file import Header
from nanolm.text.saving import BPE_MODEL, BYTE_LEVEL, ISOLATED, LOWERCASE, tokenizer_json
from nanolm.text.tokenizer import END_OF_TEXT, Characters, Tokenizer
from nanolm.text.tokenizer_files.byte_level import AFFIXES, DIGITS, MISTRAL, QWEN, split_pattern
from nanolm.text.tokenizer_files.published import CL100K, GPT2, O200K
from nanolm.text.tokenizer_files.sentencepiece import (
    BPE,
    BYTE_FALLBACK,
    DUMMY_PREFIX,
    MODEL_TYPE,
    NORMALIZER,
    REMOVE_SPACES,
    TRAINER,
    Piece,
    SentencePiece,
    bpe_model,
    model_to_json,
    opening,
    unsupported,
)
from nanolm.text.tokenizer_files.tokenizer_json import Contents, check
from nanolm.text.words import SPLIT

PREFIX, TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens
BLANK = "\u2581"  # how SentencePiece writes a space
UNWRITABLE = "<U+2581>"  # the token of the same character in a text
# The names of split patterns, the first being the one that is written.
PATTERNS = {
    SPLIT: ("llama-bpe", "llama3", "llama-v3"),
    QWEN: ("qwen2", "deepseek-r1-qwen"),
    GPT2.portable: ("gpt-2", "phi-2"),
    DIGITS: ("smollm", "starcoder", "refact", "command-r"),
    CL100K.portable: ("dbrx",),
    O200K.portable: ("gpt-4o",),
    MISTRAL: ("tekken",),
}
WRITTEN = {pattern: names[0] for pattern, names in PATTERNS.items()}
WRITTEN |= {CL100K.pattern: "dbrx", GPT2.pattern: "gpt-2"}
READ = {name: pattern for pattern, names in PATTERNS.items() for name in names}
BEGINS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # add_bos_token unless the file says no
APPROXIMATE = {  # where the pattern of llama.cpp is not quite that of the model
    "gpt-4o": "some words with letters outside of ASCII",
    "tekken": "some words with letters outside of ASCII",
}


def tokenizer_values(tokenizer: Tokenizer, vocab_size: int) -> tuple[dict[str, Any], list[str]]:
    """The key-value pairs of a tokenizer for a model of `vocab_size`, and what llama.cpp does
    otherwise. ModelError if it cannot run the tokenizer at all."""
    notes: list[str] = []
    if isinstance(tokenizer, Characters):
        values, spelled, types = character_values(tokenizer, notes)
    else:
        contents = check(tokenizer.to_json(), Path("tokenizer.json"))
        of_pieces = contents.merges and contents.whole["model"].get("byte_fallback")
        described = sentencepiece_values if of_pieces else byte_level_values
        values, spelled, types = described(contents, notes)
    names = [spelled.get(id, f"[UNUSED{id}]") for id in range(vocab_size)]
    if len(set(names)) < len(names):
        raise ModelError("GGUF cannot express this tokenizer: two tokens have the same name")
    if "scores" in values:
        values["scores"] += [0.0] * (vocab_size - len(values["scores"]))
    values |= {"tokens": names, "token_type": [types.get(id, UNUSED) for id in range(vocab_size)]}
    values |= {"bos_token_id": tokenizer.start_of_text, "eos_token_id": tokenizer.end_of_text}
    values |= {"padding_token_id": tokenizer.padding, "add_bos_token": bool(tokenizer.begin)}
    if others := sorted(tokenizer.stops - {tokenizer.end_of_text, *tokenizer.begin}):
        values["eot_token_id"] = others[0]
    if len(tokenizer.begin) > 1:
        raise ModelError("GGUF cannot express a tokenizer that adds several tokens before a text")
    named = {f"{PREFIX}{key}": value for key, value in values.items()}
    if template := chat_template(tokenizer):
        named[TEMPLATE] = template
    return named, notes


def chat_template(tokenizer: Tokenizer) -> str | None:
    template = tokenizer.config.get("chat_template")
    for each in template if isinstance(template, list) else ():  # several, by name
        if isinstance(each, dict) and each.get("name") == "default":
            template = each.get("template")
    return template.encode(errors="replace").decode() if isinstance(template, str) else None


Spelled = tuple[dict[str, Any], dict[int, str], dict[int, int]]  # values, names and types of tokens


def character_values(tokenizer: Characters, notes: list[str]) -> Spelled:
    spelled = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    types = dict.fromkeys(spelled, BYTE)
    for id, character in enumerate(tokenizer.characters, start=256):
        spelled[id], types[id] = BLANK if character == " " else character, NORMAL
        if character == BLANK:
            spelled[id], types[id] = UNWRITABLE, UNUSED
            notes.append(f"llama.cpp reads the character {BLANK} (U+2581) as a space")
    if " " not in tokenizer.characters:  # it is then a byte
        spelled[ord(" ")], types[ord(" ")] = BLANK, NORMAL
    spelled |= tokenizer.special
    types |= dict.fromkeys(tokenizer.special, CONTROL)
    values = {"model": "llama", "pre": "default", "add_space_prefix": False}
    values |= {"scores": [0.0] * tokenizer.vocab_size, "remove_extra_whitespaces": False}
    return values, spelled, types


def byte_level_values(contents: Contents, notes: list[str]) -> Spelled:
    model, merges = contents.whole["model"], contents.merges
    pattern = split_pattern(contents.whole.get("pre_tokenizer"))
    options = ("unk_token", "dropout", "byte_fallback", *AFFIXES)
    if merges is None or any(model.get(key) for key in options):
        raise ModelError("GGUF cannot express this tokenizer: it is not byte-level BPE")
    if pattern not in WRITTEN:
        raise ModelError("llama.cpp does not know how this tokenizer splits text into words")
    name = WRITTEN[pattern]
    if name in APPROXIMATE:
        notes.append(f"llama.cpp gives {APPROXIMATE[name]} other tokens")
    if contents.whole.get("normalizer") == LOWERCASE:
        notes.append("llama.cpp does not convert text to lowercase; prompts must be in lowercase")
    elif contents.whole.get("normalizer"):
        notes.append("llama.cpp does not normalize text (NFC) as this tokenizer does")
    types = dict.fromkeys(contents.vocabulary.values(), NORMAL)
    for new in contents.added:
        types[new["id"]] = CONTROL if new.get("special") else USER_DEFINED
    values = {"model": "gpt2", "pre": name, "merges": [f"{a} {b}" for a, b in merges]}
    return values, {id: name for name, id in contents.ids.items()}, types


def sentencepiece_values(contents: Contents, notes: list[str]) -> Spelled:
    """BPE with byte tokens and marked spaces, as transformers converts it from SentencePiece."""
    blank = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
    prepend = {"type": "Prepend", "prepend": BLANK}
    match contents.whole.get("normalizer"), contents.whole.get("pre_tokenizer"):
        case {"type": "Sequence", "normalizers": [*steps]}, None if steps in (
            [prepend, blank],
            [blank, prepend],
            [blank],
        ):
            prefix = prepend in steps
        case None, {"type": "Metaspace", "replacement": "\u2581", "split": False, **how}:
            prefix = how.get("prepend_scheme") != "never"
        case _:
            raise ModelError("GGUF cannot express how this tokenizer marks spaces")
    spelled = {id: name for name, id in contents.ids.items()}
    types = dict.fromkeys(spelled, NORMAL)
    for byte in range(256):
        if (name := f"<0x{byte:02X}>") not in contents.ids:
            raise ModelError("GGUF cannot express this tokenizer: it has no token for some bytes")
        types[contents.ids[name]] = BYTE
    for new in contents.added:
        types[new["id"]] = CONTROL if new.get("special") else USER_DEFINED
    if (unknown := contents.whole["model"].get("unk_token")) in contents.ids:
        types[contents.ids[unknown]] = UNKNOWN
    # The two pieces whose union has the highest score are merged.
    scores = [0.0] * (max(spelled) + 1)
    order = dict.fromkeys(left + right for left, right in contents.merges or ())
    for rank, name in enumerate(order, start=1):
        scores[contents.ids[name]] = -float(rank)
    pieces = [
        Piece(spelled.get(id, ""), score, types.get(id, 0)) for id, score in enumerate(scores)
    ]
    model = SentencePiece(pieces, {BYTE_FALLBACK: 1}, {})
    if bpe_model(model)["merges"] != contents.merges:
        notes.append("llama.cpp merges more pairs than this tokenizer, so some words may differ")
    values = {"model": "llama", "pre": "default", "add_space_prefix": prefix, "scores": scores}
    return {**values, "remove_extra_whitespaces": False}, spelled, types


def tokenizer_of(header: Header) -> tuple[str, dict[str, Any], dict[str, int]]:
    """The contents of the tokenizer.json and the tokenizer_config.json with the same meaning, and
    the ids of all tokens."""
    values = {k.removeprefix(PREFIX): v for k, v in header.values.items() if k.startswith(PREFIX)}
    kind, tokens = values.get("model"), values.get("tokens")
    if kind not in ("gpt2", "llama"):
        raise wrong(
            header, "model", kind, "nanolm reads gpt2 (byte-level BPE) and llama (SentencePiece)"
        )
    if not is_list(tokens, str) or not tokens:
        raise wrong(header, "tokens", tokens, "must be a list of texts")
    types = values.get("token_type", [NORMAL] * len(tokens))
    if not is_list(types, int) or len(types) != len(tokens):
        raise wrong(header, "token_type", types, "must have a number for each token")
    used = {id: token for id, token in enumerate(tokens) if types[id] != UNUSED}
    ids = {token: id for id, token in used.items()}
    if len(ids) < len(used):
        raise ModelError(f"{header.path}: {PREFIX}tokens has duplicates")
    begin, settings = read_special(header, values, used)
    if kind == "llama":
        own = own_characters(values, tokens)
        text = own.to_json() if own else sentencepiece_json(header, values, types, begin or "")
        return text, settings, ids
    added = {id: token for id, token in used.items() if types[id] in (CONTROL, USER_DEFINED)}
    last = list(added) == list(range(len(used) - len(added), len(used)))
    vocabulary = {token: id for token, id in ids.items() if not last or id not in added}
    text = tokenizer_json(byte_level_parts(header, values, vocabulary), added)
    if begin is not None or USER_DEFINED in types:
        whole = json.loads(text)
        for new in whole["added_tokens"]:
            new["special"] = types[new["id"]] == CONTROL
        whole["post_processor"] = begin and opening(begin, ids[begin])
        text = json.dumps(whole, ensure_ascii=False)
    return text, settings, ids


def own_characters(values: dict[str, Any], tokens: list[str]) -> Characters | None:
    """The character tokenizer that would be written like this."""
    original = {BLANK: " ", UNWRITABLE: BLANK}
    end = tokens.index(END_OF_TEXT) if END_OF_TEXT in tokens else 0
    characters = [original.get(token, token) for token in tokens[256:end]]
    if all(len(each) == 1 for each in characters) and len({*characters}) == len(characters):
        tokenizer = Characters(characters)
        expected, _ = tokenizer_values(tokenizer, len(tokens)) if end else ({}, [])
        if expected and all(values.get(k.removeprefix(PREFIX)) == v for k, v in expected.items()):
            return tokenizer
    return None


def sentencepiece_json(header: Header, values: dict[str, Any], types: list[int], begin: str) -> str:
    """The tokenizer.json of a SentencePiece model, which the format reduces to scores and types."""
    tokens, scores = values["tokens"], values.get("scores")
    if not is_list(scores, float) or len(scores) != len(tokens) or not all(map(isfinite, scores)):
        raise wrong(header, "scores", scores, "must have a number for each token")
    pieces = [Piece(*each) for each in zip(tokens, scores, types, strict=True)]
    trainer = {**TRAINER, MODEL_TYPE: BPE, BYTE_FALLBACK: int(BYTE in types)}
    spaces = (values.get("add_space_prefix", True), values.get("remove_extra_whitespaces", False))
    normalizer = {**NORMALIZER, DUMMY_PREFIX: spaces[0], REMOVE_SPACES: spaces[1]}
    model = SentencePiece(pieces, trainer, normalizer)
    if problem := unsupported(model):
        raise ModelError(f"{header.path}: its SentencePiece tokenizer is not supported: {problem}")
    return model_to_json(model, {}, begin)


def read_special(
    header: Header, values: dict[str, Any], used: dict[int, str]
) -> tuple[str | None, dict[str, Any]]:
    """The token before every text, if any, and the special tokens as in tokenizer_config.json."""
    names = {key: f"{key}_token_id" for key in ("bos", "eos", "eot", "padding")}
    ids = {key: values[name] for key, name in names.items() if name in values}
    for key, id in ids.items():
        if type(id) is not int or id not in used:
            raise wrong(header, names[key], id, "must be the id of a token")
    settings = {f"{key}_token": used[ids[key]] for key in ("bos", "eos") if key in ids}
    if "padding" in ids:
        settings["pad_token"] = used[ids["padding"]]
    adds = values.get("add_bos_token", values["model"] == "llama" or values.get("pre") in BEGINS)
    begin = settings.get("bos_token") if adds else None
    if isinstance(template := header.values.get(TEMPLATE), str):
        settings["chat_template"] = template
    return begin, settings | {"eos_token_id": [ids[key] for key in ("eos", "eot") if key in ids]}


def byte_level_parts(
    header: Header, values: dict[str, Any], vocabulary: dict[str, int]
) -> dict[str, Any]:
    name, merges = values.get("pre"), values.get("merges")
    if not isinstance(name, str) or name not in READ:
        raise wrong(header, "pre", name, f"nanolm reads {', '.join(READ)}")
    if not is_list(merges, str):
        raise wrong(header, "merges", merges, "must be a list of texts")
    byte_level, pattern = {**BYTE_LEVEL, "use_regex": False}, READ[name]
    split: dict[str, Any] = {"type": "Split", "pattern": {"Regex": pattern}, **ISOLATED}
    steps = [split, byte_level]
    if pattern in (GPT2.portable, DIGITS):
        digits = {"type": "Digits", "individual_digits": True}
        steps = [digits] * (pattern == DIGITS) + [{**BYTE_LEVEL, "use_regex": True}]
    pairs = [merge.split(" ") for merge in merges]
    return {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": byte_level,
        "model": {**BPE_MODEL, "vocab": vocabulary, "merges": pairs},
    }


def is_list(value: Any, kind: type) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and all(type(each) is kind for each in value)


def wrong(header: Header, key: str, value: Any, why: str) -> ModelError:
    shown = "missing" if value is None else repr(value)
    return ModelError(f"{header.path}: {PREFIX}{key} is {shown[:80]}: {why}")
