"""GGUF files that strangers may send, each good but for one thing."""

import os
import struct
import tempfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nanolm.gguf.blocks import FORMATS
from nanolm.gguf.file import MAGIC, aligned, packed, packed_text, read_header
from nanolm.model.build import build_model
from nanolm.model.config import configure
from nanolm.model.huggingface import save_model
from nanolm.runs.export_gguf import export_gguf
from nanolm.text.tokenizer import train_tokenizer

FILE = "model.gguf"
GGML = "tokenizer.ggml."
HUGE = 1 << 62


@dataclass
class Info:
    """A row of the table of tensors."""

    name: bytes
    shape: list[int]
    code: int
    offset: int
    length: int | None = None  # of the name, as the file says


@dataclass
class Draft:
    """A file before it is written, with everything in it that can be wrong."""

    keys: list[tuple[bytes, bytes]]  # packed
    infos: list[Info]
    data: bytes
    magic: bytes = MAGIC
    version: int = 3
    key_count: int | None = None
    tensor_count: int | None = None
    cut: int | None = None
    size: int = 0  # beyond the data there is nothing, not even on the disk

    def bytes(self) -> bytes:
        counts = [
            len(each) if count is None else count
            for each, count in ((self.infos, self.tensor_count), (self.keys, self.key_count))
        ]
        header = self.magic + struct.pack("<IQQ", self.version, *counts)
        header += b"".join(key + value for key, value in self.keys)
        for info in self.infos:
            length = len(info.name) if info.length is None else info.length
            header += struct.pack("<Q", length) + info.name
            header += struct.pack(f"<I{len(info.shape)}Q", len(info.shape), *info.shape)
            header += struct.pack("<IQ", info.code, info.offset)
        whole = header.ljust(aligned(len(header)), b"\0") + self.data
        return whole[: self.cut]

    def find(self, name: str) -> Info:
        return next(info for info in self.infos if info.name == name.encode())


@cache
def good() -> Draft:
    shape: dict[str, Any] = {"vocab_size": 258, "layers": 2, "heads": 2, "dim": 32, "context": 32}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save_model(build_model(configure("modern", **shape)), folder, train_tokenizer([], "byte"))
        export_gguf(place, folder / FILE, "q8_0", lambda text: None)
        header = read_header(folder / FILE)
        data = (folder / FILE).read_bytes()[header.data :]
    keys = [(packed_text(key), packed(value)) for key, value in header.values.items()]
    infos = [
        Info(info.name.encode(), list(info.shape[::-1]), FORMATS[info.format].code, info.offset)
        for info in header.tensors.values()
    ]
    return Draft(keys, infos, data)


Damage = Callable[[Path], object]


def damaged(change: Callable[[Draft], object]) -> Damage:
    def damage(folder: Path) -> None:
        draft = deepcopy(good())
        change(draft)
        (folder / FILE).write_bytes(draft.bytes())
        os.truncate(folder / FILE, max(draft.size, (folder / FILE).stat().st_size))

    return damage


def draft(**values: Any) -> Damage:
    return damaged(lambda draft: vars(draft).update(values))


def key(name: str, value: Any) -> Damage:
    """Another value, already packed or not; ... takes it out."""

    def change(draft: Draft) -> None:
        draft.keys = [pair for pair in draft.keys if pair[0] != packed_text(name)]
        if value is not ...:
            new = value if isinstance(value, bytes) else packed(value)
            draft.keys.append((packed_text(name), new))

    return damaged(change)


def raw(kind: int, payload: bytes) -> bytes:
    return struct.pack("<I", kind) + payload


def array(kind: int, count: int, payload: bytes = b"") -> bytes:
    return raw(9, struct.pack("<IQ", kind, count) + payload)


def info(which: str, **values: Any) -> Damage:
    return damaged(lambda draft: vars(draft.find(which)).update(values))


def scale(bits: int) -> Damage:
    """Another scale of the first block of the first tensor."""

    def change(draft: Draft) -> None:
        draft.data = struct.pack("<H", bits) + draft.data[2:]

    return damaged(change)


def special(id: Any) -> Damage:
    return key(f"{GGML}eos_token_id", id)


NORM, EMBEDDING = "output_norm.weight", "token_embd.weight"
NESTED = array(9, 1, array(9, 1, array(9, 1))[4:])
CASES: dict[str, tuple[Damage, str]] = {
    # The beginning
    "empty": (lambda folder: (folder / FILE).write_bytes(b""), "is not a GGUF file"),
    "three bytes": (draft(cut=3), "is not a GGUF file"),
    "another magic": (draft(magic=b"GGML"), "is not a GGUF file"),
    "a pickle": (lambda folder: (folder / FILE).write_bytes(b"\x80\x04K\x01."), "not a GGUF file"),
    "only a magic": (draft(cut=4), "truncated"),
    "version 1": (draft(version=1), "it has version 1"),
    "version 4": (draft(version=4), "it has version 4"),
    "big-endian": (draft(version=3 << 24), "big-endian"),
    "cut in the counts": (draft(cut=20), "truncated"),
    "2^62 tensors": (draft(tensor_count=HUGE), "the limit is"),
    "19,000 tensors": (draft(tensor_count=19_000), "no room for 19,000 tensors"),
    "2^62 keys": (draft(key_count=HUGE), "the limit is"),
    "a key too many": (damaged(lambda d: vars(d).update(key_count=len(d.keys) + 1)), ""),
    "a key too few": (damaged(lambda d: vars(d).update(key_count=len(d.keys) - 1)), ""),
    # Keys and values
    "cut in the keys": (draft(cut=300), "truncated"),
    "an endless key": (
        damaged(lambda d: d.keys.insert(0, (struct.pack("<Q", HUGE), b""))),
        "which is too long",
    ),
    "a long key": (key("k" * 1000, 1), "which is too long"),
    "an empty key": (key("", 1), "the name of a key is ''"),
    "a key of escape codes": (key("\x1b[2J", 1), "the name of a key is '\\x1b[2J'"),
    "a key that is not UTF-8": (
        damaged(lambda d: d.keys.append((struct.pack("<Q", 2) + b"\xff\xfe", packed(1)))),
        "not valid UTF-8",
    ),
    "a key twice": (damaged(lambda d: d.keys.append(d.keys[0])), "duplicate key"),
    "an unknown type": (key("x", raw(13, b"")), "x has the unknown type 13"),
    "type 2^32 - 1": (key("x", raw(0xFFFFFFFF, b"")), "unknown type"),
    "neither true nor false": (key("x", raw(7, b"\x02")), "instead of true or false"),
    "an endless text": (key("x", raw(8, struct.pack("<Q", HUGE))), "which is too long"),
    "a text of 2^64 - 1": (key("x", raw(8, b"\xff" * 8)), "which is too long"),
    "a text that is not UTF-8": (key("x", raw(8, struct.pack("<Q", 1) + b"\xff")), "UTF-8"),
    "an endless array": (key("x", array(4, HUGE)), "the limit is"),
    "an array of bytes without bytes": (key("x", array(0, 1_900_000)), "no room for 1,900,000"),
    "an array of texts without texts": (key("x", array(8, 1_900_000)), "no room for 1,900,000"),
    "an array of an unknown type": (key("x", array(77, 1)), "unknown type 77"),
    "arrays in arrays": (key("x", NESTED), "an array of arrays"),
    "arrays in 100,000 arrays": (key("x", struct.pack("<IIQ", 9, 9, 1) * 100_000), "of arrays"),
    "3,000,000 values": (key("x", array(0, 3_000_000, bytes(3_000_000))), "the limit is"),
    "100 MB of text": (
        damaged(
            lambda d: vars(d).update(
                keys=[(packed_text("x"), raw(8, struct.pack("<Q", 100_000_000)))], size=200_000_000
            )
        ),
        "which is too long",
    ),
    # The table
    "cut in the table": (damaged(lambda d: vars(d).update(data=b"", cut=-500)), "truncated"),
    "a tensor with an endless name": (info(NORM, length=HUGE), "which is too long"),
    "a tensor without a name": (info(NORM, name=b""), "the name of a tensor is ''"),
    "a tensor twice": (info(NORM, name=b"token_embd.weight"), "duplicate tensor"),
    "no dimensions": (info(NORM, shape=[]), "has 0 dimensions"),
    "5 dimensions": (info(NORM, shape=[32, 1, 1, 1, 1]), "has 5 dimensions"),
    "a tensor of nothing": (info(NORM, shape=[0]), "does not fit in the file"),
    "2^62 rows": (info(EMBEDDING, shape=[32, HUGE]), "does not fit in the file"),
    "a product of 2^64": (info(EMBEDDING, shape=[1 << 32, 1 << 32]), "does not fit in the file"),
    "half a block": (info(EMBEDDING, shape=[16, 516]), "not whole Q8_0 blocks"),
    "Q6_K": (info(EMBEDDING, code=14), "has type Q6_K; nanolm reads F32"),
    "Q5_0": (info(EMBEDDING, code=6), "has type Q5_0"),
    "F64": (info(NORM, code=28), "has type F64"),
    "a type that does not exist": (info(NORM, code=999), "has type number 999"),
    "an offset beyond the end": (info(NORM, offset=HUGE), "offset 4,611"),
    "an offset between": (info(NORM, offset=7), "offset 7 instead of"),
    "tensors that overlap": (info(NORM, offset=0), "offset 0 instead of"),
    "another alignment": (key("general.alignment", 64), "instead of"),
    "alignment 0": (key("general.alignment", 0), "must be a power of two"),
    "alignment 3": (key("general.alignment", 3), "must be a power of two"),
    "alignment 2^31": (key("general.alignment", 1 << 31), "must be a power of two"),
    "alignment as text": (key("general.alignment", "32"), "must be a power of two"),
    "half the data": (draft(cut=-5000), "it is truncated: the last"),
    "no data": (draft(data=b""), "it is truncated: the last"),
    "more data": (draft(size=1_000_000), "bytes follow the last tensor"),
    # The model
    "no tensors": (damaged(lambda d: vars(d).update(infos=[], data=b"")), "no token_embd.weight"),
    "two tensors too few": (  # one could be that of tied embeddings
        damaged(lambda d: vars(d).update(infos=d.infos[:-2], data=d.data[: d.infos[-2].offset])),
        "missing",
    ),
    "a tensor of another name": (info(NORM, name=b"evil.weight"), "evil.weight: not part of this"),
    "a tensor of another shape": (info(NORM, shape=[16, 2]), "but the config implies (32,)"),
    "an infinite scale": (scale(0x7C00), "its values are not finite"),
    "a scale that is no number": (scale(0x7E00), "its values are not finite"),
    "no architecture": (key("general.architecture", ...), "general.architecture is missing"),
    "another architecture": (key("general.architecture", "mamba"), "nanolm does not support"),
    "a number as architecture": (key("general.architecture", 7), "nanolm does not support"),
    "no layers": (key("qwen3.block_count", ...), "qwen3: block_count is missing"),
    "0 layers": (key("qwen3.block_count", 0), "must be an integer from 1"),
    "4 billion layers": (key("qwen3.block_count", 0xFFFFFFFF), "must be at most 1,000"),
    "fewer layers": (key("qwen3.block_count", 1), "not part of this model"),
    "heads for each layer": (key("qwen3.attention.head_count", [2, 2]), "must be an integer"),
    "heads that do not fit": (key("qwen3.attention.head_count", 3), "not a multiple of"),
    "experts": (key("qwen3.expert_count", 8), "mixtures of experts"),
    "a sliding window": (key("qwen3.attention.sliding_window", 8), "nanolm does not support it"),
    "a base that is no number": (key("qwen3.rope.freq_base", float("nan")), "rope.freq_base is"),
    "a base of 1": (key("qwen3.rope.freq_base", 1.0), "rope-base"),
    "an odd scaling": (key("qwen3.rope.scaling.type", "longrope"), "this RoPE scaling"),
    "a part that rotates": (key("qwen3.rope.dimension_count", 4), "another width"),
    "an endless context": (key("qwen3.context_length", raw(10, b"\xff" * 8)), "context_length is"),
    # The tokenizer
    "no tokens": (key(f"{GGML}tokens", ...), "tokens is missing"),
    "tokens that are numbers": (key(f"{GGML}tokens", [1, 2]), "must be a list of texts"),
    "a token twice": (key(f"{GGML}tokens", ["a"] * 258), "has duplicates"),
    "too many tokens": (
        key(f"{GGML}tokens", [f"t{number}" for number in range(300)]),
        "token_type is",
    ),
    "types of other tokens": (key(f"{GGML}token_type", [1, 2]), "a number for each token"),
    "no merges": (key(f"{GGML}merges", ...), "merges is missing"),
    "merges of nothing": (key(f"{GGML}merges", ["q q"]), "the result of a merge is not a token"),
    "merges of three": (key(f"{GGML}merges", ["a b c"]), "not a valid tokenizer.json"),
    "another tokenizer": (key(f"{GGML}model", "bert"), "nanolm reads gpt2"),
    "a SentencePiece tokenizer": (key(f"{GGML}model", "llama"), "scores is missing"),
    "an unknown pattern": (key(f"{GGML}pre", "what"), "nanolm reads llama-bpe"),
    "a list as pattern": (key(f"{GGML}pre", ["llama-bpe"]), "nanolm reads llama-bpe"),
    "an end that is no token": (special(9999), "must be the id of a token"),
    "an end that is no number": (special("0"), "must be the id of a token"),
}
