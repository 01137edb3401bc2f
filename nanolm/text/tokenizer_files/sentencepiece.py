"""A SentencePiece file (tokenizer.model, spiece.model), converted to a tokenizer.json.

The ids are those of the `sentencepiece` package. A model whose ids `tokenizers` cannot reproduce
for every text is refused. The file is a protobuf message, and only its known fields are read.
"""

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nanolm.errors import ModelError
from nanolm.text.saving import BPE_MODEL, tokenizer_json
from nanolm.text.tokenizer_files.merges import CURE, added_tokens, content, tokenizer_class
from nanolm.text.tokenizer_files.tokenizer_json import read_bytes, read_settings

MOST_PIECES = 1_000_000  # the largest real models have 260,000
MOST_SPLITS = 100_000_000  # sum of squared lengths of pieces; real models have up to 20 million
BLANK = "\u2581"  # how SentencePiece writes a space
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # types of pieces
UNIGRAM, BPE = 1, 2  # types of models
# The numbers of fields of the trainer's settings, with their defaults.
MODEL_TYPE, SUFFIX, BYTE_FALLBACK, BOS_ID, EOS_ID, PAD_ID = 3, 24, 35, 41, 42, 43
TRAINER = {MODEL_TYPE: UNIGRAM, SUFFIX: 0, BYTE_FALLBACK: 0, BOS_ID: 1, EOS_ID: 2, PAD_ID: -1}
# Those of the normalizer's.
NAME, CHARACTERS_MAP, DUMMY_PREFIX, REMOVE_SPACES, ESCAPE_SPACES = range(1, 6)
NORMALIZER = {NAME: b"", CHARACTERS_MAP: b"", DUMMY_PREFIX: 1, REMOVE_SPACES: 1, ESCAPE_SPACES: 1}


class Piece(NamedTuple):
    text: str
    score: float
    type: int


class SentencePiece(NamedTuple):
    pieces: list[Piece]
    trainer: dict[int, Any]
    normalizer: dict[int, Any]


def is_sentencepiece(file: Path) -> bool:
    """Whether it is a message that begins with a piece; files of ranks are plain text."""
    return read_bytes(file)[:1] == b"\n"


def sentencepiece_to_json(file: Path) -> tuple[str, dict[str, Any]]:
    """A tokenizer.json, and what a tokenizer_config.json would say by default."""
    kind = tokenizer_class(file)
    if kind not in ("", "LlamaTokenizer"):
        problem = f"nanolm does not know which ids {kind:.80} gives to its pieces"
        raise ModelError(f"{file.parent} has no tokenizer.json, and {problem}; {CURE}")
    try:
        model = parse_model(read_bytes(file))
    except (ValueError, TypeError, struct.error):
        raise ModelError(f"{file} is damaged, or not a SentencePiece model") from None
    if problem := unsupported(model):
        raise ModelError(f"{file} cannot be converted to a tokenizer.json: {problem}; {CURE}")
    pieces, trainer, _ = model
    names = {"bos_token": BOS_ID, "eos_token": EOS_ID, "pad_token": PAD_ID}
    numbered = {key: trainer[field] for key, field in names.items()}
    defaults: dict[str, Any] = {
        key: pieces[id].text for key, id in numbered.items() if 0 <= id < len(pieces)
    }
    vocabulary = {piece.text: id for id, piece in enumerate(pieces)}
    added = {new["content"]: new for new in added_tokens(file, vocabulary, defaults)}
    defaults |= {"add_bos_token": True} if kind == "LlamaTokenizer" else {}
    settings = defaults | read_settings(file)
    begin = content(settings["bos_token"]) if settings.get("bos_token") else ""
    return model_to_json(model, added, begin if settings.get("add_bos_token") else ""), defaults


def model_to_json(model: SentencePiece, added: dict[str, dict[str, Any]], begin: str) -> str:
    """A tokenizer.json with these `added` tokens and the special pieces, which adds the token
    `begin` before every text."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for id, piece in enumerate(model.pieces):
        if piece.type in (UNKNOWN, CONTROL, USER_DEFINED):
            special = piece.type != USER_DEFINED
            new = {"id": id, "content": piece.text, **flags, "special": special}
            added.setdefault(piece.text, new)
    blank = {"type": "Replace", "pattern": {"String": BLANK}, "content": " "}
    decoders = [blank, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if model.normalizer[DUMMY_PREFIX]:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": [*normalizers(model.normalizer)]},
        "pre_tokenizer": None,
        "post_processor": opening(begin, added[begin]["id"]) if begin else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": bpe_model(model),
    }
    return tokenizer_json(parts, sorted(added.values(), key=lambda new: new["id"]))


def parse_model(data: bytes) -> SentencePiece:
    """The known fields of the message; ValueError if it is malformed."""
    pieces: list[Piece] = []
    trainer, normalizer = dict[int, Any](TRAINER), dict[int, Any](NORMALIZER)
    for number, value in fields(data):
        if number == 1:
            piece: dict[int, Any] = {1: b"", 2: bytes(4), 3: NORMAL, **dict(fields(value))}
            (score,) = struct.unpack("<f", piece[2])
            pieces.append(Piece(str(piece[1], "utf-8"), score, piece[3]))
            if len(pieces) > MOST_PIECES or not math.isfinite(score):
                raise ValueError
        elif number in (2, 3):
            known = trainer if number == 2 else normalizer
            for key, entry in fields(value):
                if key in known:
                    if type(entry) is not type(known[key]):
                        raise ValueError
                    known[key] = entry
    if not pieces or len({piece.text for piece in pieces}) < len(pieces):
        raise ValueError
    return SentencePiece(pieces, trainer, normalizer)


def fields(data: Any) -> Iterator[tuple[int, Any]]:
    """The number and value of each field of a protobuf message: an int or bytes."""
    if not isinstance(data, bytes):
        raise ValueError
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while shift < 70 and at < len(data):
            byte = data[at]
            value |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                return value - (1 << 64) if value >> 63 else value  # negative numbers have 64 bits
        raise ValueError

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(key & 7) or (varint() if key & 7 == 2 else -1)
        if not 0 <= size <= len(data) - at:
            raise ValueError
        yield key >> 3, data[at : at + size]
        at += size


def unsupported(model: SentencePiece) -> str:
    """Why `tokenizers` would give other ids for some texts; empty if it would not."""
    pieces, trainer, normalizer = model
    types = {piece.type for piece in pieces}
    normal = {piece.text for piece in pieces if piece.type == NORMAL}
    alone = {text for text in normal if len(text) == 1}
    if trainer[MODEL_TYPE] == UNIGRAM:
        return "it is a Unigram model, in which tokenizers adds up scores more precisely"
    if trainer[MODEL_TYPE] != BPE:
        return "it is not a BPE model"
    if normalizer[CHARACTERS_MAP]:
        name = str(normalizer[NAME], "utf-8", "replace")
        return f"it normalizes texts ({name:.40}), which tokenizers does differently"
    if trainer[SUFFIX] or not normalizer[ESCAPE_SPACES]:
        return "it does not mark spaces at the beginning of words"
    if not types <= {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE}:
        return "it has unused pieces"
    if sum(piece.type == UNKNOWN for piece in pieces) != 1:
        return "it must have one piece for unknown characters"
    bytes_ = {piece.text for piece in pieces if piece.type == BYTE}
    if trainer[BYTE_FALLBACK] and bytes_ != {f"<0x{byte:02X}>" for byte in range(256)}:
        return "it has no piece for some bytes"
    if USER_DEFINED in types and (normalizer[DUMMY_PREFIX] or normalizer[REMOVE_SPACES]):
        return "it has user-defined pieces and changes the spaces around them"
    if any({" ", BLANK} & {*piece.text} for piece in pieces if piece.type == USER_DEFINED):
        return "a user-defined piece contains a space"
    if sum(len(text) ** 2 for text in normal) > MOST_SPLITS:
        return "its pieces are too long"
    if not set().union(*normal) <= alone:
        return "a character of a piece is not a piece"
    longer = [piece for piece in pieces if piece.type == NORMAL and len(piece.text) > 1]
    if len({piece.score for piece in longer}) < len(longer):
        return "several pieces have the same score"
    return ""


def normalizers(normalizer: dict[int, Any]) -> Iterator[dict[str, Any]]:
    """Spaces as SentencePiece writes them. Only `remove_extra_whitespaces` needs patterns."""

    def replace(pattern: dict[str, str], new: str) -> dict[str, Any]:
        return {"type": "Replace", "pattern": pattern, "content": new}

    if normalizer[REMOVE_SPACES]:
        yield replace({"Regex": r"\A +"}, "")
        yield replace({"Regex": " {2,}"}, " ")
    yield replace({"String": " "}, BLANK)
    if normalizer[REMOVE_SPACES]:
        yield replace({"Regex": rf"{BLANK}+\z"}, "")
    if normalizer[DUMMY_PREFIX]:
        yield {"type": "Prepend", "prepend": BLANK}


def bpe_model(model: SentencePiece) -> dict[str, Any]:
    """The two pieces with the highest score are merged, whichever two they are made of."""
    normal = {piece.text: piece.score for piece in model.pieces if piece.type == NORMAL}
    vocabulary = {piece.text: id for id, piece in enumerate(model.pieces)}
    merges = [
        (text[:at], text[at:])
        for text in sorted(normal, key=lambda text: -normal[text])
        for at in range(1, len(text))
        if text[:at] in normal and text[at:] in normal
    ]
    unknown = next((piece.text for piece in model.pieces if piece.type == UNKNOWN), None)
    fallback = bool(model.trainer[BYTE_FALLBACK])
    options = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": fallback}
    return {**BPE_MODEL, **options, "vocab": vocabulary, "merges": merges}


def opening(name: str, id: int) -> dict[str, Any]:
    """A post-processor that adds this token before every text."""
    first, text = (
        {"SpecialToken": {"id": name, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    second = {"Sequence": {"id": "B", "type_id": 1}}
    special = {name: {"id": name, "ids": [id], "tokens": [name]}}
    single = {"single": [first, text], "pair": [first, text, first, second]}
    return {"type": "TemplateProcessing", **single, "special_tokens": special}
