"""What strangers may send: model folders, each good but for one thing, and text that is markup."""

import io
import json
import math
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hostile_gguf

from nanolm.model.build import build_model, build_seq2seq
from nanolm.model.config import Seq2SeqConfig, configure
from nanolm.model.huggingface import save_model, save_seq2seq
from nanolm.model.stored import INDEX, SOURCE_TOKENIZER, WEIGHTS
from nanolm.text.tokenizer import train_tokenizer

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
EVIL = "modeling_evil"  # a module that is never to be imported
GOOD: dict[str, dict[str, Any]] = {  # families, with what to ask `configure` for
    "gpt2": {"family": "gpt2"},
    "llama": {"family": "llama"},
    "qwen3": {"family": "modern"},
    "transformer": {"family": "modern", "norm_place": "post"},
    "recurrent": {"family": "lstm"},
}
GOOD_SEQ2SEQ: dict[str, dict[str, Any]] = {
    "marian": {"family": "encoder-decoder"},
    "separate": {"family": "encoder-decoder", "source_vocab_size": 300},  # marian too
    "pegasus": {"family": "encoder-decoder", "norm_place": "pre", "tied": False},
    "encoder-decoder": {"family": "modern-encoder-decoder"},
    "recurrent-seq2seq": {"family": "seq2seq-gru"},
}
EVERY = GOOD | GOOD_SEQ2SEQ


def save_good(name: str, folder: Path) -> None:
    """A sound folder of a family."""
    shape: dict[str, Any] = {"vocab_size": 258, "layers": 2, "heads": 2, "dim": 16, "context": 32}
    config, tokenizer = configure(**EVERY[name], **shape), train_tokenizer([], "byte")
    if isinstance(config, Seq2SeqConfig):
        source = tokenizer if config.source_vocab_size else None
        save_seq2seq(build_seq2seq(config), folder, tokenizer, source)
    else:
        save_model(build_model(config), folder, tokenizer)


# Each of these makes a function that does something to a good folder.
Damage = Callable[[Path], object]


def rewrite(name: str, **changes: Any) -> Damage:
    """Other values in a JSON file; ... takes one out."""

    def damage(folder: Path) -> None:
        values = json.loads((folder / name).read_text()) | changes
        kept = {key: value for key, value in values.items() if value is not ...}
        (folder / name).write_text(json.dumps(kept).replace('"1e400"', "1e400"))

    return damage


config, tokenizer = partial(rewrite, CONFIG), partial(rewrite, TOKENIZER)


def rope(**values: Any) -> Damage:
    return config(rope_theta=..., rope_parameters={"rope_theta": 1e4, **values})


def holds(name: str, contents: bytes, size: int = 0) -> Damage:
    """Other contents of a file, and nothing (not even on the disk) from there to `size`."""

    def damage(folder: Path) -> None:
        (folder / name).write_bytes(contents)
        os.truncate(folder / name, max(size, len(contents)))

    return damage


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Another header of the weights: the one there was, changed, or what `change` makes of it."""

    def damage(folder: Path) -> None:
        contents = (folder / WEIGHTS).read_bytes()
        end = 8 + int.from_bytes(contents[:8], "little")
        values = json.loads(contents[8:end])
        changed = change(values)
        text = (changed if isinstance(changed, str) else json.dumps(values)).encode()
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + contents[end:])

    return damage


def zero(name: str, shape: list[int]) -> Damage:
    """Another tensor, of zeros."""

    def damage(folder: Path) -> None:
        contents = (folder / WEIGHTS).read_bytes()
        size = len(contents) - 8 - int.from_bytes(contents[:8], "little")
        offsets = [size, size + 4 * math.prod(shape)]
        entry = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        header(lambda tensors: tensors.update({name: entry}))(folder)
        with (folder / WEIGHTS).open("ab") as stream:
            stream.write(bytes(offsets[1] - size))

    return damage


def ones(name: str) -> Damage:
    """Other numbers in a tensor: all ones."""

    def damage(folder: Path) -> None:
        contents = bytearray((folder / WEIGHTS).read_bytes())
        end = 8 + int.from_bytes(contents[:8], "little")
        start, stop = json.loads(contents[8:end])[name]["data_offsets"]
        contents[end + start : end + stop] = bytes([0, 0, 128, 63]) * ((stop - start) // 4)
        (folder / WEIGHTS).write_bytes(contents)

    return damage


NORM = "model.norm.weight"  # a tensor in the midst


def norm(**values: Any) -> Damage:
    return header(lambda tensors: tensors[NORM].update(values))


def moved(start: int, end: int) -> Damage:
    def change(tensors: dict[str, Any]) -> None:
        old = tensors[NORM]["data_offsets"]
        tensors[NORM]["data_offsets"] = [old[0] + start, old[1] + end]

    return header(change)


def cut(size: int) -> Damage:
    return lambda folder: os.truncate(folder / WEIGHTS, size)


def shards(*names: object, files: tuple[str, ...] = (), **values: Any) -> Damage:
    """An index of weights in several files; those of `files` are there, each with all tensors."""

    def damage(folder: Path) -> None:
        for file in files:
            shutil.copy(folder / WEIGHTS, folder / file)
        (folder / WEIGHTS).unlink()
        places = {str(number): name for number, name in enumerate(names)}
        (folder / INDEX).write_text(json.dumps({"weight_map": places} | values))

    return damage


def instead(name: str, make: Callable[[Path], object] = lambda file: None) -> Damage:
    """Something else in place of a file, or nothing."""

    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


def together(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


class Payload:
    """Unpickled, it leaves a file behind."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder.parent / "executed"

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.mark), "w")


def pickled(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes(pickle.dumps(Payload(folder)))


def zip_bomb(name: str) -> Damage:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(20_000_000))
    return holds(name, file.getvalue())


def with_code(folder: Path) -> None:
    """What `trust_remote_code` would run."""
    classes = {"AutoConfig": f"{EVIL}.Config", "AutoModelForCausalLM": f"{EVIL}.Model"}
    config(auto_map=classes, trust_remote_code=True)(folder)
    (folder / f"{EVIL}.py").write_text(f"open({str(folder.parent / 'executed')!r}, 'w')")


def doubling(folder: Path) -> None:
    """Each token is the one before it twice, under names that do not show it."""
    values = json.loads((folder / TOKENIZER).read_text())
    vocabulary = values["model"]["vocab"]
    names = [next(iter(vocabulary)), *(f"<{number}>" for number in range(31))]
    vocabulary |= {name: 255 + number for number, name in enumerate(names) if number}
    vocabulary |= {name + name: 1000 + number for number, name in enumerate(names)}
    merges = [[name, name] for name in names]
    added = [new | {"id": 2000 + new["id"]} for new in values["added_tokens"]]
    tokenizer(added_tokens=added, model=values["model"] | {"merges": merges})(folder)


def swap(name: str, old: str, new: str) -> Damage:
    return lambda folder: (folder / name).write_text((folder / name).read_text().replace(old, new))


def deep(levels: int, left: str = "[", right: str = "]") -> str:
    return left * levels + right * levels


def lists(count: int) -> bytes:
    return b'{"a": [' + b"[]," * count + b"0]}"


def layers(count: int) -> Damage:
    """More layers, and as many tensors, with nothing in them."""
    empty = {str(number): EMPTY for number in range(20_000)}
    return together(header(lambda tensors: tensors.update(empty)), config(num_hidden_layers=count))


# Hostile folders, by what is wrong with them and the file that is at fault; with words of the
# refusal. They are of the family that they begin with, or qwen3.
EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
TENFOLD = {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 10}
PROCESSOR = '{"type": "Sequence", "processors": ['
ENDLESS = "x" * 10**6
TABLE, FINAL_NORM = "model.encoder.embed_positions.weight", "model.encoder.layer_norm.weight"
MANY_CHARACTERS = train_tokenizer([chr(256 + number) for number in range(48)], "char").to_json()
A, B = "a.safetensors", "b.safetensors"
HOSTILE: dict[str, dict[str, tuple[Damage, str]]] = {
    WEIGHTS: {
        "a pickle as weights": (pickled(WEIGHTS), "not a safetensors file"),
        "a pickle alone": (
            together(pickled("pytorch_model.bin"), instead(WEIGHTS)),
            "does not load pytorch_model.bin",
        ),
        "no weights": (instead(WEIGHTS), "does not exist"),
        "a zip bomb as weights": (zip_bomb(WEIGHTS), "not a safetensors file"),
        "empty weights": (holds(WEIGHTS, b""), "header too small"),
        "a header of 2^63 bytes": (holds(WEIGHTS, b"\0" * 7 + b"\x80"), "header of 9,223"),
        "a header of 100 MB": (
            holds(WEIGHTS, (10**8).to_bytes(8, "little") + b"{", 10**8 + 8),
            "header of 100,000,000 bytes",
        ),
        "a header past the end": (holds(WEIGHTS, b"\xff\0\0\0\0\0\0\0{}"), "header"),
        "a header that is a list": (header(lambda _: "[]"), "invalid JSON"),
        "a deep header": (header(lambda _: '{"a": ' + deep(10**5)), "recursion limit"),
        "overlapping offsets": (moved(-64, -64), "invalid offset"),
        "offsets past the end": (moved(10**6, 10**6), "offset"),
        "offsets in reverse": (moved(64, -64), "offset"),
        "a negative offset": (norm(data_offsets=[-64, 0]), "integer `-64`"),
        "a hole": (header(lambda tensors: tensors.pop(NORM)), "not fully covered"),
        "the same key twice": (
            header(lambda tensors: f'{json.dumps(tensors)[:-1]}, "{NORM}": {json.dumps(EMPTY)}}}'),
            "not fully covered",
        ),
        "a shape that overflows": (norm(shape=[1 << 62, 1 << 62]), "overflow"),
        "a shape of more bytes": (norm(shape=[1 << 40]), "invalid shape"),
        "an unknown kind of number": (norm(dtype="F7"), "F7"),
        "weights cut in the header": (cut(100), "header"),
        "weights cut in the numbers": (cut(40_000), "not fully covered"),
        "weights with more behind": (cut(400_000), "not fully covered"),
        "weights that nobody may read": (lambda f: (f / WEIGHTS).chmod(0), "Permission denied"),
    },
    INDEX: {
        "a shard above": (shards("../outside.safetensors"), "'../outside.safetensors'"),
        "a shard from the root": (shards("/outside.safetensors"), "'/outside.safetensors'"),
        "config.json as a shard": (shards(CONFIG), "'config.json'"),
        "a shard with an endless name": (shards(f"{ENDLESS}.safetensors"), "'xxx"),
        "a shard with an impossible name": (shards("\0.safetensors"), "not a weight file"),
        "shards that are numbers": (shards(1, []), "weight_map"),
        "no shards": (shards(weight_map=None), "weight_map"),
    },
    A: {
        "a FIFO as a shard": (together(shards(A), instead(A, os.mkfifo)), "is not a file"),
        "a shard too few": (shards(A, B, files=(B,)), "does not exist"),
    },
    B: {"a tensor in two shards": (shards(A, B, files=(A, B)), "duplicate tensor lm_head.weight")},
    CONFIG: {
        "a pickle as config": (pickled(CONFIG), "cannot be read"),
        "a zip bomb as config": (zip_bomb(CONFIG), "cannot be read"),
        "half a config": (holds(CONFIG, b"{"), "cannot be read"),
        "a list as config": (holds(CONFIG, b"[]"), "not a JSON object"),
        "a deep config": (swap(CONFIG, "258", deep(10**5)), "recursion"),
        "a config of 100 MB": (holds(CONFIG, b"{", 10**8), "100,000,000 bytes"),
        "a config of too many lists": (holds(CONFIG, lists(10**7)), "bytes is too large"),
        "a config of lists": (holds(CONFIG, lists(600_000)), "not None"),
        "8-bit integers": (norm(dtype="I8", shape=[64]), "norm.weight: dtype I8"),
        "8-bit floats": (norm(dtype="F8_E4M3", shape=[64]), "F8_E4M3; nanolm does not support"),
        "an endless name": (header(lambda tensors: tensors.update({ENDLESS: EMPTY})), "xxx"),
        "a tensor too few": (config(num_hidden_layers=3), "layers.2.mlp.up_proj.weight: missing"),
        "a tensor too many": (config(num_hidden_layers=1), "weight: not part of this model"),
        "a tensor of another shape": (config(intermediate_size=65), "implies (65, 16)"),
        "10^9 layers": (config(num_hidden_layers=10**9), "layers 1000000000"),
        "too many layers of nothing": (layers(20_000), "layers 20000: must be at most"),
        "layers of nothing": (layers(1000), "layers.2.mlp.up_proj.weight: missing"),
        "10^12 tokens": (config(vocab_size=10**12), "implies (1000000000000, 16)"),
        "gpt2 with 10^12 positions": (config(n_positions=10**12), "implies (1000000000000, 16)"),
        "a tensor of 2^80": (config(vocab_size=1 << 40, hidden_size=1 << 40), "does not match"),
        "heads of 2^80": (
            config(num_attention_heads=1 << 40, num_key_value_heads=1 << 40, head_dim=1 << 40),
            "does not match",
        ),
        "gpt2 with heads that do not divide": (config(n_head=3), "not a multiple of --heads 3"),
        "odd heads": (config(head_dim=7), "even width per head"),
        "another type of model": (config(model_type="mamba"), "'mamba'"),
        "an endless type of model": (config(model_type=ENDLESS), "'xxx"),
        "gpt2 for something else": (config(architectures=["GPT2ForX"]), "neither a language model"),
        "gpt2 with cross-attention": (config(add_cross_attention=True), "cross-attention"),
        "recurrent of the future": (config(spin=1), "spin is 1"),
        "quantised": (config(quantization_config={"bits": 4}), "quantization_config"),
        "a sliding window": (config(use_sliding_window=True), "use_sliding_window"),
        "layers with a window": (config(layer_types=["sliding_attention"]), "layer_types"),
        "layer types that are none": (config(layer_types=7), "layer_types is 7: must be a list"),
        "long RoPE": (rope(rope_type="longrope", factor=2), "rope_type is 'longrope'"),
        "dynamic RoPE": (rope(rope_type="dynamic", factor=2), "rope_type is 'dynamic'"),
        "unheard-of RoPE": (rope(rope_type="spiral"), "rope_type is 'spiral'"),
        "RoPE by layer": (rope(full_attention={"rope_theta": 1e4}), "full_attention"),
        "RoPE in part": (rope(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
        "RoPE in part, of old": (config(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
        "RoPE of two kinds": (config(rope_theta=5e5), "rope_theta contradicts"),
        "marian for something else": (
            config(architectures=["MarianForCausalLM"]),
            "not a sequence-to-sequence model",
        ),
        "marian without a scale": (config(scale_embedding=False), "embeddings that are not scaled"),
        "marian with learned positions": (
            config(static_position_embeddings=False),
            "static_position_embeddings is False",
        ),
        "marian with norms elsewhere": (config(normalize_before=True), "normalize_before is True"),
        "marian with other heads": (config(decoder_attention_heads=4), "decoder_attention_heads"),
        "marian with two sizes": (config(decoder_vocab_size=300), "decoder_vocab_size is 300"),
        "marian with tanh": (config(activation_function="tanh"), "activation_function is 'tanh"),
        "marian, a decoder alone": (config(is_encoder_decoder=False), "without an encoder"),
        "marian, quantized": (config(quantization_config={"bits": 4}), "quantization_config"),
        "marian with 10^9 layers": (config(encoder_layers=10**9), "--encoder-layers 1000000000"),
        "marian with a layer too many": (
            config(encoder_layers=3),
            "encoder.layers.2.fc1.weight: missing",
        ),
        "marian with layers of nothing": (config(decoder_layers=900), "fewer than 902 layers"),
        "marian with 10^12 tokens": (
            config(vocab_size=10**12, decoder_vocab_size=10**12),
            "implies (1000000000000, 16)",
        ),
        "marian with 10^12 positions and a table": (
            together(config(max_position_embeddings=10**12), zero(TABLE, [16])),
            "implies (1000000000000, 16)",
        ),
        "marian with another tensor": (zero(FINAL_NORM, [16]), "not part of this"),
        "recurrent-seq2seq with another cell": (config(cell="qrnn"), "must be rnn or lstm or gru"),
        "recurrent-seq2seq with another attention": (config(attention="hard"), "attention is 'ha"),
        "recurrent-seq2seq with no source": (config(source_vocab_size=0), "source_vocab_size of 0"),
        "encoder-decoder with learned positions": (config(positions="learned"), "--positions"),
        "RoPE that overflows": (rope(rope_type="yarn", factor=2, beta_slow=1e-320), "slow=1e-320"),
    },
    TOKENIZER: {
        "a pickle as tokenizer": (pickled(TOKENIZER), "cannot be read"),
        "a zip bomb as tokenizer": (zip_bomb(TOKENIZER), "cannot be read"),
        "a deep tokenizer": (swap(TOKENIZER, "257", deep(10**5)), "is not a valid JSON"),
        "a deep part of a tokenizer": (
            swap(TOKENIZER, '_processor": null', '_processor": ' + deep(2000, PROCESSOR, "]}")),
            "",
        ),
        "a tokenizer of lists": (holds(TOKENIZER, lists(10**7)), "too many for a tokenizer"),
        "a huge id": (tokenizer(added_tokens=[{"id": 10**9, "content": "new"}]), "ids must be"),
        "a decoder that swells": (
            tokenizer(pre_tokenizer=None, decoder={"type": "Sequence", "decoders": [TENFOLD] * 9}),
            "its decoder expands",
        ),
        "a tokenizer that panics": (
            tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
            "Precompiled",
        ),
    },
    SOURCE_TOKENIZER: {
        "separate, a pickle as source tokenizer": (pickled(SOURCE_TOKENIZER), "cannot be read"),
        "separate, a FIFO as source tokenizer": (
            instead(SOURCE_TOKENIZER, os.mkfifo),
            "is not a file",
        ),
    },
    "tokenizer_config.json": {
        "a FIFO beside a foreign tokenizer": (
            together(tokenizer(), instead("tokenizer_config.json", os.mkfifo)),
            "is not a file",
        )
    },
    "": {
        "tied to another head": (config(tie_word_embeddings=True), "lm_head.weight differs"),
        "marian with a bias": (ones("final_logits_bias"), "final_logits_bias is not zero"),
        "marian tied to another embedding": (
            zero("model.encoder.embed_tokens.weight", [258, 16]),
            "encoder.embed_tokens.weight differs",
        ),
        "pegasus with other positions": (ones(TABLE), "holds non-sinusoidal positions"),
        "marian with another start": (
            config(decoder_start_token_id=3),
            "decoder_start_token_id is 3: must be 256",
        ),
        "separate, with a source tokenizer too large": (
            lambda folder: (folder / SOURCE_TOKENIZER).write_text(MANY_CHARACTERS),
            "306 tokens, its model only 300",
        ),
        "a tokenizer too large": (config(vocab_size=200), "258 tokens, its model only 200"),
        "tokens that double": (doubling, "1,032 tokens, its model only 258"),
    },
}
ODD: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to nowhere": lambda file: file.symlink_to("nowhere"),
    "a link to itself": lambda file: file.symlink_to(file.name),
}
for name in (CONFIG, WEIGHTS, TOKENIZER):
    HOSTILE[name] |= {f"{what} as {name}": (instead(name, make), "") for what, make in ODD.items()}
CASES = {
    name: (damage, (file, words))
    for file, cases in HOSTILE.items()
    for name, (damage, words) in cases.items()
}
CASES |= {
    f"gguf, {name}": (damage, (hostile_gguf.FILE, words))
    for name, (damage, words) in hostile_gguf.CASES.items()
}
HARMLESS = {"good": lambda folder: None, "with code": with_code}

TAGS = ("script", "img", "svg", "iframe", "a", "style", "b", "form", "object", "meta")
MARKUP = [f"<{tag} src=x onerror=alert(1)>" for tag in TAGS]
MARKUP += [f"</{tag}><{tag}>alert({n})</{tag}>" for n, tag in enumerate(TAGS)]
MARKUP += [f'"><{tag} onload="x">' for tag in TAGS] + [f"'{tag}' onclick='x'" for tag in TAGS]
MARKUP += ["&lt;b&gt;", "&#x3c;b>", "<!--", "]]>", "</title></style></body></html>"]
MARKUP += ["<b\n>", "\0<b>", "<\u202escript>", "javascript:alert(1)", "{{7*7}}"]
