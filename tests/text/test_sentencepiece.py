"""SentencePiece models: the ids must be those of the `sentencepiece` package.

Set NANOLM_TEST_DATA to a folder with texts in many languages to test those as well.
"""

import io
import json
import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanolm.errors import ModelError, NanolmError
from nanolm.text.encoding import dropped_characters
from nanolm.text.tokenizer import Tokenizer
from nanolm.text.tokenizer_files import load_tokenizer, read_json
from nanolm.text.tokenizer_files.sentencepiece import parse_model, sentencepiece_to_json

LINES = [
    "The cat isn't here. The cats are 1234 miles away!",
    "Schön, aaaa aa aaa. abab ababab. x²+½ <b>bold</b> the end  of it.",
    "日本語の文章です。 Привет, мир! the cat sat on the mat and the rat sat.",
    "def f(x):    return [x, 2 * x]  # the    code",
] * 3
TEXTS = st.text() | st.text("The cat a.<s>/0x41\n\t\u2581é日 ab ", max_size=60)
SHORT = [
    "",
    " ",
    "  ",
    "<s>",
    "</s>a",
    "<0x41>",
    "a<unk>b",
    "\u2581",
    " \u2581 ",
    "a\u2581 ",
    "a ",
    " a",
]
OPTIONS: dict[str, dict[str, Any]] = {
    "Llama 2": {"model_type": "bpe", "byte_fallback": True},
    "BPE": {"model_type": "bpe", "character_coverage": 0.98},
    "BPE, no prefix": {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": False},
    "BPE, fewer spaces": {"model_type": "bpe", "remove_extra_whitespaces": True},
}
few = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


def trained(**options: Any) -> bytes:
    model = io.BytesIO()
    options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False} | options
    options = {"vocab_size": 420, "hard_vocab_limit": False, "minloglevel": 2} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, **options
    )
    return model.getvalue()


@cache
def model_of(name: str) -> bytes:
    return trained(**OPTIONS[name])


def write(folder: Path, model: bytes, config: dict[str, Any] | None = None) -> Path:
    (folder / "tokenizer.model").write_bytes(model)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@cache
def pair(name: str, folder: Path) -> tuple[Tokenizer, Any]:
    file = folder / f"{name}.model"
    file.write_bytes(model_of(name))
    return load_tokenizer(file), sentencepiece.SentencePieceProcessor(model_file=str(file))


@pytest.mark.parametrize("name", OPTIONS)
def test_ids_are_those_of_sentencepiece(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer, theirs = pair(name, tmp_path_factory.mktemp("model"))

    def same(text: str) -> None:
        assert tokenizer.encode(text) == theirs.encode(text), text

    given(TEXTS)(few(same))()
    for text in (*SHORT, *LINES):
        same(text)
    same("\n".join(LINES))
    again = read_json(tokenizer.to_json(), Path("tokenizer.json"))
    assert again.encode(LINES[1]) == tokenizer.encode(LINES[1])
    assert tokenizer.vocab_size == theirs.get_piece_size()
    assert (tokenizer.end_of_text, tokenizer.begin) == (theirs.eos_id(), ())


def test_ids_of_real_texts(tmp_path: Path) -> None:
    folder = Path(os.environ.get("NANOLM_TEST_DATA") or "no such folder") / "multilingual"
    if not folder.exists():
        pytest.skip("NANOLM_TEST_DATA has no texts")
    for name in ("Llama 2", "BPE", "BPE, fewer spaces"):
        tokenizer, theirs = pair(name, tmp_path)
        for file in sorted(folder.glob("*.txt")):
            text = file.read_bytes()[:60_000].decode(errors="replace")
            assert tokenizer.encode(text) == theirs.encode(text), file.name


def test_as_the_tokenizer_of_llama(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "pad_token": "<pad>"}
    folder = write(tmp_path, model_of("Llama 2"), config)
    tokenizer, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    saved = tmp_path / "saved"
    saved.mkdir()
    tokenizer.save(saved, context=64)
    again = AutoTokenizer.from_pretrained(saved)
    for text in LINES:
        ids = theirs.encode(text)
        assert tokenizer.encode_prompt(text) == again.encode(text) == ids
        assert load_tokenizer(saved).encode_prompt(text) == ids
        assert tokenizer.decode(ids) == text
    assert len(again) == len(theirs) == tokenizer.vocab_size
    assert (tokenizer.begin, tokenizer.end_of_text) == ((1,), 2)
    assert tokenizer.special[tokenizer.padding] == "<pad>"
    assert tokenizer.encode_special("a</s>")[-1] == 2


@pytest.mark.parametrize(
    ("config", "begin"),
    [
        (None, (1,)),
        ({"tokenizer_class": "LlamaTokenizerFast"}, (1,)),
        ({"add_bos_token": False}, ()),
        ({"bos_token": "</s>"}, (2,)),
    ],
)
def test_llama_begins_with_a_token(
    config: dict[str, Any] | None, begin: tuple[int, ...], tmp_path: Path
) -> None:
    assert load_tokenizer(write(tmp_path, model_of("Llama 2"), config)).begin == begin


def test_user_defined_pieces_are_matched(tmp_path: Path) -> None:
    options = {"model_type": "bpe", "user_defined_symbols": ["<tool>", "at!"]}
    file = tmp_path / "x.model"
    file.write_bytes(trained(**options, add_dummy_prefix=False))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(file))
    tokenizer = load_tokenizer(file)
    for text in ("<tool>a", "the cat! <tool><tool >", "at!at!at", " <tool> "):
        assert tokenizer.encode(text) == theirs.encode(text)
    file.write_bytes(trained(**options))
    with pytest.raises(ModelError, match="user-defined pieces"):
        load_tokenizer(file)


REFUSED: dict[str, dict[str, Any]] = {
    r"normalizes texts \(nmt_nfkc\)": {"normalization_rule_name": "nmt_nfkc"},
    "not a BPE model": {"model_type": "char"},
    "a Unigram model": {"model_type": "unigram"},
    "mark spaces": {"treat_whitespace_as_suffix": True},
    "contains a space": {"user_defined_symbols": ["a b"], "add_dummy_prefix": False},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_tokenizers_does_differently_is_refused(reason: str, tmp_path: Path) -> None:
    file = tmp_path / "spiece.model"
    file.write_bytes(trained(**{"model_type": "bpe"} | REFUSED[reason]))
    with pytest.raises(ModelError, match=rf"spiece\.model cannot be converted.*{reason}"):
        load_tokenizer(tmp_path)


def test_another_class_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, model_of("BPE"), {"tokenizer_class": "PegasusTokenizer"})
    with pytest.raises(ModelError, match=r"PegasusTokenizer.*save_pretrained"):
        load_tokenizer(folder)


def message(*fields: tuple[int, bytes | int]) -> bytes:
    """A protobuf message of these numbers and values."""

    def varint(value: int) -> bytes:
        parts = []
        while value > 127:
            parts.append(value & 127 | 128)
            value >>= 7
        return bytes([*parts, value])

    return b"".join(
        varint(number << 3 | 2) + varint(len(value)) + value
        if isinstance(value, bytes)
        else varint(number << 3) + varint(value)
        for number, value in fields
    )


PIECE = message((1, b"a"))
HOSTILE = {
    "empty": b"\n",
    "truncated": model_of("Llama 2")[:5000],
    "a huge length": b"\n\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
    "an endless number": b"\n" + b"\xff" * 100,
    "groups": b"\x0b" * 100_000 + b"\n",
    "deep": message((1, b"\n" * 1000)),
    "not UTF-8": message((1, message((1, b"\xff")))),
    "two pieces": message((1, PIECE), (1, PIECE)),
    "a number for a name": message((1, message((1, 5)))),
    "a short score": message((1, message((1, b"a"), (2, b"abc")))),
    "text for a number": message((1, PIECE), (2, message((3, b"x")))),
    "a number for settings": message((1, PIECE), (2, 5)),
    "not a number": message((1, PIECE + b"\x15\x00\x00\xc0\x7f")),
    "no unknown piece": message((1, PIECE)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(b"\n" + HOSTILE[name][1:])
    with pytest.raises(ModelError, match=r"tokenizer\.model"):
        load_tokenizer(tmp_path)
    file.write_bytes(HOSTILE[name])
    with pytest.raises(ModelError, match=r"tokenizer\.model"):
        sentencepiece_to_json(file)


def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    model, dice = trained(vocab_size=300, model_type="bpe"), random.Random(0)
    file = tmp_path / "tokenizer.model"
    refused: list[str] = []
    for _ in range(200):
        damaged = bytearray(model)
        for _ in range(dice.choice([1, 3, 30])):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        file.write_bytes(bytes(damaged[: dice.choice([None, dice.randrange(len(damaged))])]))
        try:
            assert load_tokenizer(file).vocab_size
        except NanolmError as error:
            refused.append(str(error))
    assert 100 < len(refused) < 200
    assert all("tokenizer.model" in text for text in refused)


def test_fields_that_are_not_known_are_skipped() -> None:
    model = model_of("Llama 2")
    more = message((9, b"x"), (10, 3)) + b"\x59" + bytes(8) + b"\x5d" + bytes(4)
    assert parse_model(model + more) == parse_model(model)
    assert (
        len(parse_model(model).pieces)
        == sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size()
    )


def test_characters_without_a_token_are_reported(tmp_path: Path) -> None:
    tokenizer = pair("BPE", tmp_path)[0]
    lost = "2 of 12 characters dropped (no token in this tokenizer), for example '👍'"
    assert dropped_characters(tokenizer, "the  cat\n\t👍👍") == lost
    assert "of the first 100,000 characters" in dropped_characters(tokenizer, "é" * 200_000)
    assert dropped_characters(tokenizer, " the cat ") == ""
    assert dropped_characters(pair("Llama 2", tmp_path)[0], "👍\t\u0301") == ""
    whole = json.loads(tokenizer.to_json())
    joined = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["é", -1.0], ["ö", -1.0]]}
    whole |= {"model": joined, "normalizer": {"type": "NFC"}, "added_tokens": [], "decoder": None}
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<unk>"}')
    tokenizer = read_json(json.dumps(whole), tmp_path / "tokenizer.json")
    assert dropped_characters(tokenizer, "e\u0301o\u0308") == ""
    assert "1 of 3" in dropped_characters(tokenizer, "e\u0301x")
