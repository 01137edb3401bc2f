import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from nanolm.errors import DataError
from nanolm.text.tokenizer import (
    END_OF_TEXT,
    LONG_STRETCH,
    PADDING,
    ByteLevel,
    Tiktoken,
    Tokenizer,
    own_tokenizer,
    train_tokenizer,
)
from nanolm.text.tokenizer_files import load_tokenizer
from nanolm.text.tokenizer_files.gguf import tokenizer_values
from nanolm.text.words import lowered

TEXT = "The cat isn't here. The cats are 1234 miles away!\nSchön, aaaa.\n\n\tThe end  of it. " * 2
TOKENIZERS = {
    "bpe": train_tokenizer([TEXT], "bpe", 300),
    "words": train_tokenizer([TEXT], "bpe"),
    "char": train_tokenizer([TEXT], "char"),
    "byte": train_tokenizer([TEXT], "byte"),
}
SMALL = train_tokenizer([TEXT], "bpe", 300)
assert isinstance(SMALL, ByteLevel)
MERGES = SMALL.merges
TOKENIZERS["extended"] = SMALL.extended(["The catastrophe isn't near, dear cats. " * 2], 400)
KINDS = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
REFERENCES = {
    id(tokenizer): tokenizers.Tokenizer.from_str(tokenizer.to_json())
    for tokenizer in TOKENIZERS.values()
}
for reference in REFERENCES.values():
    reference.encode_special_tokens = True  # as tokenizer_config.json tells transformers
# Arbitrary text, and text with many known tokens.
TEXTS = st.text() | st.text("The cat a'sn1. \n\t\réö日👍", max_size=60)


@KINDS
@given(text=TEXTS)
def test_nothing_is_lost(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@KINDS
@given(text=TEXTS)
def test_ids_are_those_of_hugging_face(tokenizer: Tokenizer, text: str) -> None:
    reference = REFERENCES[id(tokenizer)]
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text).ids
    assert reference.decode(ids) == text


@KINDS
def test_special_tokens_come_last_and_are_text_when_written_out(tokenizer: Tokenizer) -> None:
    assert (tokenizer.end_of_text, tokenizer.padding) == (
        tokenizer.vocab_size - 2,
        tokenizer.vocab_size - 1,
    )
    ids = tokenizer.encode(f"a{END_OF_TEXT}b{PADDING}")
    assert not {tokenizer.end_of_text, tokenizer.padding} & set(ids)
    assert tokenizer.decode(ids) == f"a{END_OF_TEXT}b{PADDING}"
    assert tokenizer.decode([tokenizer.end_of_text]) == ""


@KINDS
def test_saved_and_loaded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path, context=64)
    again = load_tokenizer(tmp_path)
    assert (again.kind, again.tokens) == (tokenizer.kind, tokenizer.tokens)
    assert again.fingerprint() == tokenizer.fingerprint()
    assert load_tokenizer(tmp_path / "tokenizer.json").encode(TEXT) == tokenizer.encode(TEXT)


@KINDS
def test_byte_lengths_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    text = TEXT + "日本"
    assert tokenizer.byte_lengths()[tokenizer.encode(text)].sum() == len(text.encode())


@KINDS
def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="lone surrogate at character 3"):
        tokenizer.encode("abc\ud800")


@KINDS
@pytest.mark.parametrize("char", [" ", "\n", "a", "1", ".", "日", "\u3000", "\0"])
def test_a_run_of_400_000_characters(tokenizer: Tokenizer, char: str) -> None:
    text = "a" + char * 400_000 + "b"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    if isinstance(tokenizer, Tiktoken) and tokenizer.kind == "bpe":
        assert ids == tokenizer.encoding.encode_ordinary(text)  # no fallback was needed
    if char == " ":
        assert ids == REFERENCES[id(tokenizer)].encode(text).ids


def test_more_blanks_than_tiktoken_takes_are_encoded_in_parts() -> None:
    tokenizer = TOKENIZERS["bpe"]
    text = "a" + " " * 3_000_000 + "b" + "\t" * (5 * LONG_STRETCH)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sizes() -> None:
    assert TOKENIZERS["bpe"].vocab_size == 300
    assert TOKENIZERS["byte"].vocab_size == 258
    assert TOKENIZERS["char"].vocab_size == 258 + len(set(TEXT))
    assert len(TOKENIZERS["words"].encode("The cats")) == 2


def test_extended_by_the_words_of_other_texts() -> None:
    extended = TOKENIZERS["extended"]
    assert isinstance(extended, ByteLevel) and isinstance(SMALL, ByteLevel)
    assert 300 < extended.vocab_size < 400
    assert extended.tokens[:298] == SMALL.tokens[:298]
    assert len(extended.encode(" catastrophe")) == 1 < len(SMALL.encode(" catastrophe"))
    for token, parts in zip(extended.tokens, extended.parts(SMALL), strict=True):
        assert token == b"".join(SMALL.tokens[id] for id in parts)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"model": {"type": "WordPiece"}},
        {"added_tokens": []},
        {"pre_tokenizer": None},
    ],
)
def test_what_nanolm_did_not_write_is_not_taken_for_its_own(change: dict[str, object]) -> None:
    parts = json.loads(TOKENIZERS["bpe"].to_json())
    assert own_tokenizer(TOKENIZERS["bpe"].to_json()) is not None
    assert own_tokenizer(json.dumps({**parts, **change})) is None
    for broken in ("{", "[]", '{"model": 3}', "\ufeff", "[" * 100_000):
        assert own_tokenizer(broken) is None


def test_the_fingerprint_sees_what_decides_the_ids() -> None:
    prints = [tokenizer.fingerprint() for tokenizer in TOKENIZERS.values()]
    assert len(set(prints)) == len(prints)
    assert train_tokenizer([TEXT], "bpe", 300).fingerprint() == TOKENIZERS["bpe"].fingerprint()


@given(text=st.text() | st.text("\u03a3\u03c3\u03c2\u0130IiThE aé.", max_size=60))
def test_lowercase_is_that_of_hugging_face(text: str) -> None:
    tokenizer = ByteLevel(MERGES, lowercase=True)
    reference = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    assert tokenizer.encode(text) == reference.encode(text).ids == tokenizer.encode(lowered(text))


def test_lowercase_is_saved_and_extended(tmp_path: Path) -> None:
    tokenizer = ByteLevel(MERGES, lowercase=True).extended(["the CATASTROPHE " * 3], 400)
    tokenizer.save(tmp_path, context=8)
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode(" Catastrophe") == loaded.encode(" catastrophe")
    assert len(loaded.encode(" CATASTROPHE")) == 1
    assert loaded.fingerprint() == tokenizer.fingerprint()
    assert loaded.fingerprint() != ByteLevel(tokenizer.merges).fingerprint()
    assert "lowercase" in tokenizer_values(loaded, loaded.vocab_size)[1][0]
