"""Read and validate an untrusted tokenizer.json: its tokens, ids and merges, and the special tokens
given by the files next to it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanolm.errors import ModelError
from nanolm.text.saving import SPELLING
from nanolm.text.tokenizer import END_OF_TEXT

LARGEST_FILE = 64_000_000  # bytes; the largest real ones (260,000 tokens) have 35 million
MOST_VALUES = 5_000_000  # JSON values, which take memory; the largest real ones have 2 million
LARGEST_ID = 2_000_000  # memory grows with the largest id, and a file can contain any number

BYTE_OF_CHARACTER = {character: byte for byte, character in SPELLING.items()}
OPEN_TURN, CLOSE_TURN = "<|im_start|>", "<|im_end|>"
USUAL_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", CLOSE_TURN, "<eos>")
# What a tokenizer_config.json says about special tokens, beyond those that every model has.
KEPT = (
    *("chat_template", "split_special_tokens", "add_bos_token", "add_eos_token"),
    *("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"),
    *("bos_token", "unk_token", "sep_token", "cls_token", "mask_token"),
)


@dataclass(frozen=True)
class Contents:
    """A tokenizer.json whose tokens, ids and merges are valid."""

    file: Path
    text: str
    whole: dict[str, Any]
    vocabulary: dict[str, int]
    added: list[dict[str, Any]]
    ids: dict[str, int]  # of both
    merges: list[tuple[str, str]] | None  # None if it is not BPE
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of tokenizer_config.json
    alone: bool = False  # whether files next to it do not belong to it


def check(
    text: str, file: Path, defaults: Mapping[str, Any] | None = None, alone: bool = False
) -> Contents:
    """The contents of a tokenizer.json; ModelError if they are invalid."""
    whole = parse(text, file)
    try:
        model, added = whole["model"], whole.get("added_tokens") or []
        vocabulary, merges = model["vocab"], None
        if isinstance(vocabulary, list):  # Unigram's: each token with its score
            vocabulary = {token: id for id, (token, _) in enumerate(vocabulary)}
        ids = {new["content"]: new["id"] for new in added} | vocabulary
        "".join(ids).encode()  # fails unless all are valid strings
        if not all(type(id) is int and 0 <= id < LARGEST_ID for id in ids.values()):
            raise ModelError(f"{file}: ids must be numbers from 0 to {LARGEST_ID:,}")
        if not ids or len(set(ids.values())) < len(ids):
            raise ModelError(f"{file}: it has no tokens, or two with the same id")
        if "merges" in model and model.get("type", "BPE") == "BPE":
            pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
            merges = [(left, right) for left, right in pairs]
            prefix = len(model.get("continuing_subword_prefix") or "")
            if not all(left and left + right[prefix:] in vocabulary for left, right in merges):
                raise ModelError(f"{file}: the result of a merge is not a token")
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ModelError(f"{file} is not a valid tokenizer.json: entries are missing") from None
    return Contents(file, text, whole, vocabulary, added, ids, merges, defaults or {}, alone)


def special_tokens(contents: Contents, ids: dict[str, int]) -> dict[str, Any]:
    """The special-token arguments of `Tokenizer`, from tokenizer.json and the files next to it."""
    file = contents.file
    tokens = {id: token for token, id in ids.items()}
    settings, configs = contents.defaults, [contents.defaults]
    if not contents.alone:
        settings = {**settings, **read_settings(file)}
        configs = [read_near(file, name) for name in ("generation_config.json", "config.json")]

    def named(key: str) -> list[int]:
        token = settings.get(f"{key}_token")
        token = token.get("content") if isinstance(token, dict) else token
        return [ids[token]] if isinstance(token, str) and token in ids else []

    def numbered(key: str) -> list[int]:
        values = [config.get(f"{key}_token_id") for config in configs]
        lists = [value if isinstance(value, list) else [value] for value in values]
        return [id for part in lists for id in part if type(id) is int and id in tokens]

    usual = [ids[name] for name in USUAL_ENDS if name in ids]
    ends = [*named("eos"), *numbered("eos"), *usual, *named("bos"), *numbered("bos")]
    if not ends:
        cure = "set eos_token in tokenizer_config.json"
        raise ModelError(f"{file}: there is no end-of-text token; {cure}")
    end, padding = ends[0], [*named("pad"), ends[0]][0]
    opening = opening_tokens(contents.whole.get("post_processor"))
    begin = tuple(ids[name] for name in opening if name in ids)
    if not settings.keys().isdisjoint(("add_bos_token", "add_eos_token")):
        # For transformers, these replace what tokenizer.json adds to a text.
        begin = tuple(named("bos")) if settings.get("add_bos_token") else ()
    stops = {end, *begin, *numbered("eos")}
    turn = (ids.get(OPEN_TURN, -1), ids.get(CLOSE_TURN, -1))
    return {
        "end_of_text": end,
        "padding": padding,
        "begin": begin,
        "stops": stops,
        "special": {id: tokens[id] for id in (end, padding, *begin)},
        # Only if the model has learned to end its turn with it.
        "turn": turn if turn[0] >= 0 and turn[1] in stops else None,
        "spelled": {new["content"]: new["id"] for new in contents.added if new.get("special")},
        "config": {"split_special_tokens": False}
        | {key: settings[key] for key in KEPT if key in settings and shallow(settings[key])},
    }


def opening_tokens(processor: Any) -> list[str]:
    """The special tokens that this part of a tokenizer.json adds before a text."""
    match processor:
        case {"type": "Sequence", "processors": [*parts]}:
            return [name for part in parts for name in opening_tokens(part)]
        case {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": str(name)}}, *rest]}:
            return [name, *opening_tokens({"type": "TemplateProcessing", "single": rest})]
        case {"type": "RobertaProcessing" | "BertProcessing", "cls": [str(name), _]}:
            return [name]
    return []


def read_settings(file: Path) -> dict[str, Any]:
    """What the files next to `file` say about special tokens and chat templates."""
    settings = read_near(file, "special_tokens_map.json") | read_near(file, "tokenizer_config.json")
    template = file.with_name("chat_template.jinja")
    return settings | ({"chat_template": read(template)} if template.exists() else {})


def read_near(file: Path, name: str) -> dict[str, Any]:
    """The JSON file of this name in the same folder; nothing if there is none."""
    near = file.with_name(name)
    return parse(read(near), near) if near.exists() else {}


def shallow(value: Any, depth: int = 4) -> bool:
    """Whether it can be written as JSON, which needs more of the stack than reading."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(shallow(each, depth - 1) for each in inside)


def parse(text: str, file: Path) -> dict[str, Any]:
    if sum(map(text.count, ",[{")) > MOST_VALUES:
        raise ModelError(f"{file} has over {MOST_VALUES:,} values: too many for a tokenizer")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ModelError(f"{file} is not a valid JSON object")
    return values


def read(file: Path) -> str:
    try:
        return read_bytes(file).decode()
    except ValueError as error:
        raise ModelError(f"{file} cannot be read: {error}") from None


def read_bytes(file: Path) -> bytes:
    try:
        if not file.is_file():
            raise ModelError(f"{file} {'is not a file' if file.exists() else 'does not exist'}")
        if file.stat().st_size > LARGEST_FILE:
            raise ModelError(f"{file} has over {LARGEST_FILE:,} bytes: too large for a tokenizer")
        return file.read_bytes()
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
