"""Files of tiktoken ranks: a token in base64 and its rank on each line."""

import base64
import json
from pathlib import Path
from typing import Any, NamedTuple

from nanolm.errors import ModelError
from nanolm.text.tokenizer import END_OF_TEXT
from nanolm.text.tokenizer_files.byte_level import QWEN
from nanolm.text.tokenizer_files.merges import content
from nanolm.text.tokenizer_files.published import PUBLISHED, Ranks, ranks_json
from nanolm.text.tokenizer_files.tokenizer_json import CLOSE_TURN, OPEN_TURN, read, read_settings
from nanolm.text.words import SPLIT


class ModelRanks(NamedTuple):
    """The ranks of a model, which the file is recognized by, and what it does not contain."""

    kind: str
    suffix: str  # of the file
    ranks: int
    pattern: str
    normalizer: dict[str, str] | None
    special: tuple[str, ...]  # special tokens, which follow the ranks
    defaults: dict[str, Any]  # of tokenizer_config.json


def reserved(*numbers: int) -> list[str]:
    return [f"<|reserved_special_token_{number}|>" for number in numbers]


BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
LLAMA_3 = ModelRanks(
    *("Llama 3", ".model", 128_000, SPLIT, None),
    special=(
        *(BEGIN, END, *reserved(0, 1, 2, 3), "<|start_header_id|>", "<|end_header_id|>"),
        *(*reserved(4), "<|eot_id|>", *reserved(*range(5, 251))),
    ),
    defaults={"bos_token": BEGIN, "eos_token": END, "add_bos_token": True},
)
QWEN_1 = ModelRanks(
    *("Qwen", ".tiktoken", 151_643, QWEN, {"type": "NFC"}),
    special=(END_OF_TEXT, OPEN_TURN, CLOSE_TURN, *(f"<|extra_{number}|>" for number in range(205))),
    defaults={"eos_token": END_OF_TEXT},
)
MODELS = (LLAMA_3, QWEN_1)


def read_ranks(file: Path) -> Ranks | tuple[str, dict[str, Any]]:
    """The encoding in a file, identified by its number of ranks: one of OpenAI's, or that of a
    model as a tokenizer.json with the defaults of tokenizer_config.json."""
    tokens = read_tokens(file)
    for known in PUBLISHED.values():
        if known.ranks == len(tokens):
            return Ranks(known, tokens)
    for model in MODELS:
        if (model.ranks, model.suffix) == (len(tokens), file.suffix):
            names = {len(tokens) + number: name for number, name in enumerate(model.special)}
            try:
                listed = read_settings(file).get("added_tokens_decoder") or {}
                names |= {int(id): content(token) for id, token in listed.items()}
            except (TypeError, ValueError, AttributeError, KeyError):
                raise ModelError(
                    f"{file}: the special tokens of its folder are not valid"
                ) from None
            text = ranks_json(tokens, model.pattern, names, whole_words=True)
            if model.normalizer:
                text = json.dumps(json.loads(text) | {"normalizer": model.normalizer})
            return text, model.defaults
    counts = {known.kind: known.ranks for known in PUBLISHED.values()}
    counts |= {f"{model.kind} (*{model.suffix})": model.ranks for model in MODELS}
    listed = ", ".join(f"{kind} has {count:,}" for kind, count in counts.items())
    problem = f"has {len(tokens):,} ranks, which matches no known encoding"
    raise ModelError(f"{file} {problem} ({listed})")


def read_tokens(file: Path) -> list[bytes]:
    """The tokens in the order of their ranks."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read(file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            word, rank = line.split()
            token = base64.b64decode(word, validate=True)
            if ranks.setdefault(token, int(rank)) != int(rank):
                raise ValueError
        except ValueError:
            message = f"{file}, line {number}: expected a new token in base64 and its rank"
            raise ModelError(message) from None
    tokens = sorted(ranks, key=ranks.__getitem__)
    if [ranks[token] for token in tokens] != list(range(len(tokens))):
        raise ModelError(f"{file}: the ranks must be the numbers from 0 to {len(tokens) - 1:,}")
    if sum(len(token) == 1 for token in tokens) < 256:
        raise ModelError(f"{file}: every byte must be a token")
    return tokens
