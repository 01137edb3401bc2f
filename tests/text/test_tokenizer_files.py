"""Other tokenizers: the ids must be the same as from tiktoken and `tokenizers`.

Set NANOLM_TEST_DATA to a folder with OpenAI's own files and some texts to test those as well.
"""

import base64
import hashlib
import json
import os
import random
import sys
import threading
import time
import unicodedata
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import requests
import tiktoken
import tiktoken_ext.openai_public as openai  # type: ignore[import-untyped]
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from nanolm.errors import DataError, ModelError, NanolmError, UsageError
from nanolm.text import NAMED
from nanolm.text.corpus import SAFE_CUT
from nanolm.text.saving import spell
from nanolm.text.tokenizer import END_OF_TEXT, Tokenizer, train_tokenizer
from nanolm.text.tokenizer_files import hugging_face, load_tokenizer, named_tokenizer, read_json
from nanolm.text.tokenizer_files import ranks as ranks_module
from nanolm.text.tokenizer_files.byte_level import ByteLevelFile
from nanolm.text.tokenizer_files.hugging_face import HuggingFace
from nanolm.text.tokenizer_files.published import PUBLISHED, Ranks
from nanolm.text.tokenizer_files.ranks import LLAMA_3, QWEN_1, ModelRanks
from nanolm.text.words import SPLIT

TEXT = (
    "The cat isn't here. The cats are 1234 miles away!\nSchön, aaaa.\n\n\tThe end  of it. "
    "WE'LL SEE; they've 12 of 345,678 and x²+½. 日本語の文章です。 Привет, мир!\r\n"
) * 3
# Arbitrary text; many known tokens; and white space of every kind, also at the end.
TEXTS = (
    st.text()
    | st.text("The cat a'snSLl12½. \n\t\réöé\u0301日👍<|>\u017f\u212a", max_size=60)
    | st.text(" \n\r\t\u00a0\u2003\u0085a1.", max_size=20)
)
WHITE = [
    "",
    " ",
    "\n",
    "a \n  ",
    "  \n\n ",
    "a   ",
    "a\r\n\r\n  b",
    " \n a",
    "   1",
    "a  \n",
    "\n\n\na",
]
# The patterns of published models.
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MISTRAL = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

few = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def isolated(pattern: str) -> Any:
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, byte_level])


BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
SHAPES = {
    "byte level": BYTE_LEVEL,
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), BYTE_LEVEL]),
    "llama": isolated(SPLIT),
    "qwen": isolated(QWEN),
    "qwen 3.5": isolated(QWEN_3_5),
    "mistral": isolated(MISTRAL),
    "gpt-4": isolated(PUBLISHED["cl100k"].portable),
    "gpt-4o": isolated(PUBLISHED["o200k"].portable),
}


def trained(shape: str, normalizer: Any = None, size: int = 420) -> dict[str, Any]:
    """The tokenizer.json of a byte-level BPE trained by `tokenizers`."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = SHAPES[shape]
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    parts: dict[str, Any] = json.loads(tokenizer.to_str())
    return parts


def added(content: str, id: int, special: bool = False, **flags: bool) -> dict[str, Any]:
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": content, **off, "special": special, **flags}


def loaded(folder: Path, parts: dict[str, Any]) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(parts, ensure_ascii=False))
    return load_tokenizer(folder)


def reference(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """The ids that `tokenizers` gives for a text with the JSON of `tokenizer`."""
    library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    library.encode_special_tokens = True
    return lambda text: list(library.encode(text, add_special_tokens=False).ids)


@cache
def tiktoken_pattern(kind: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
            patch.setattr(openai, name, lambda *_, **__: {})
        made = openai.ENCODING_CONSTRUCTORS[PUBLISHED[kind].registered]()
    return str(made["pat_str"])


# Encodings of OpenAI's -------------------------------------------------------------------------


@cache
def ranks(count: int) -> list[bytes]:
    """`count` tokens: learned ones, then arbitrary pairs of bytes, then triples."""
    tokens = dict.fromkeys(train_tokenizer([TEXT], "bpe").tokens[:-2])
    pick = random.Random(1)
    for length in (2, 3):
        more = [bytes(parts) for parts in product(range(256 if length == 2 else 64), repeat=length)]
        pick.shuffle(more)
        tokens |= dict.fromkeys(more)
    return list(tokens)[:count]


def write_ranks(file: Path, tokens: list[bytes]) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {id}\n" for id, token in enumerate(tokens)]
    file.write_text("".join(lines))
    return file


@pytest.fixture(scope="module", params=NAMED)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    tokens = ranks(PUBLISHED[request.param].ranks)
    tokenizer = load_tokenizer(write_ranks(tmp_path_factory.mktemp("ranks") / "x.tiktoken", tokens))
    assert isinstance(tokenizer, Ranks)
    assert tokenizer.kind == request.param
    return tokenizer


def by_tiktoken(tokenizer: Ranks) -> tiktoken.Encoding:
    known = {token: id for id, token in enumerate(tokenizer.tokens) if token}
    pattern = tiktoken_pattern(tokenizer.kind)
    return tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=known, special_tokens={})


def test_published_encodings_are_those_of_tiktoken_and_tokenizers(
    published: Ranks, tmp_path: Path
) -> None:
    assert published.pattern == tiktoken_pattern(published.kind)
    encode, theirs = by_tiktoken(published).encode_ordinary, reference(published)

    def same(text: str) -> None:
        assert published.encode(text) == encode(text) == theirs(text)
        assert published.decode(published.encode(text)) == text

    given(TEXTS)(few(same))()
    for text in (*WHITE, TEXT, END_OF_TEXT):
        same(text)

    size = {"gpt2": 50_257, "cl100k": 100_277, "o200k": 200_019}[published.kind]
    end = {"gpt2": 50_256, "cl100k": 100_257, "o200k": 199_999}[published.kind]
    assert (published.vocab_size, published.end_of_text, published.padding) == (size, end, end)
    library = tokenizers.Tokenizer.from_str(published.to_json())
    assert library.token_to_id(END_OF_TEXT) == end
    assert library.get_vocab_size() == size

    published.save(tmp_path, context=8)
    again = load_tokenizer(tmp_path)
    assert (again.kind, again.tokens, again.special) == (
        published.kind,
        published.tokens,
        published.special,
    )
    assert again.fingerprint() == published.fingerprint()
    assert again.to_json() == published.to_json()
    assert again.encode(TEXT) == published.encode(TEXT)


def test_a_file_of_ranks_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "x.tiktoken"
    good = ranks(50_256)
    for tokens, message in [
        (good[:-1], "has 50,255 ranks"),
        ([*good[:300], good[7], *good[301:]], "line 301"),
        ([*good[1:], b"\x00abc"], "every byte must be a token"),
    ]:
        with pytest.raises(ModelError, match=message):
            load_tokenizer(write_ranks(file, tokens))
    lines = write_ranks(file, good).read_text().splitlines()
    for line, message in [
        ("YWI=", "line 301"),
        ("Y$I= 300", "line 301"),
        ("YWI= 300 1", "line 301"),
        ("YWI= x", "line 301"),
        ("é 300", "line 301"),
        (" 300", "line 301"),
        ("YWJjZGVm -1", "from 0"),
        ("YWJjZGVm 301", "from 0"),
        (f"YWJjZGVm {'9' * 5000}", "line 301"),
    ]:
        file.write_text("\r\n".join([*lines[:300], line, *lines[301:]]))
        with pytest.raises(ModelError, match=message):
            load_tokenizer(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"x\.tiktoken"):
        load_tokenizer(file)


def test_ranks_that_no_merges_make_are_whole_words() -> None:
    encoding = PUBLISHED["gpt2"]._replace(end_of_text=258, vocab_size=259)
    tokenizer = Ranks(encoding, [bytes([byte]) for byte in range(256)] + [b"abcd", b"ab"])
    encode, theirs = by_tiktoken(tokenizer).encode_ordinary, reference(tokenizer)
    for text in ("abcd", "abcde abcd", "xabcd", "ab abab"):
        assert tokenizer.encode(text) == encode(text) == theirs(text)


@pytest.mark.parametrize("count", [600, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("model", "name", "pattern"),
    [(LLAMA_3, "tokenizer.model", LLAMA), (QWEN_1, "qwen.tiktoken", QWEN)],
)
def test_ranks_of_models(
    count: int | None,
    model: ModelRanks,
    name: str,
    pattern: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The special tokens and patterns of Llama 3 and Qwen, with fewer or other ranks."""
    start, qwen = count or model.ranks, model is QWEN_1
    monkeypatch.setattr(ranks_module, "MODELS", [model._replace(ranks=start)])
    tokens = ranks(max(start, 50_256))[:start]
    write_ranks(tmp_path / name, tokens)
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, ByteLevelFile)
    known = {token: id for id, token in enumerate(tokens)}
    theirs = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=known, special_tokens={})
    for text in (*WHITE, TEXT, "12345 IT'S e\u0301", "<|eot_id|><|im_end|>"):
        normal = unicodedata.normalize("NFC", text) if qwen else text
        assert tokenizer.encode(text) == theirs.encode_ordinary(normal)
    assert model.ranks + len(model.special) == (151_851 if qwen else 128_256)
    assert tokenizer.vocab_size == start + len(model.special)
    if qwen:
        assert (tokenizer.begin, tokenizer.end_of_text) == ((), start)
        assert tokenizer.encode_special("a<|im_end|>")[-1] == start + 2
        assert tokenizer.spelled["<|extra_204|>"] == start + 207
    else:
        assert (tokenizer.begin, tokenizer.end_of_text) == ((start,), start + 1)
        assert tokenizer.encode_prompt("")[0] == start
        assert tokenizer.spelled["<|eot_id|>"] == start + 9
        assert tokenizer.spelled["<|reserved_special_token_250|>"] == start + 255
        with pytest.raises(ModelError, match=r"ranks.*Llama 3 \(\*\.model\) has"):
            load_tokenizer(write_ranks(tmp_path / "x.tiktoken", tokens))
    config = {"added_tokens_decoder": {str(start + 3): {"content": "<|other|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).spelled["<|other|>"] == start + 3
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": 1}}')
    with pytest.raises(ModelError, match="special tokens of its folder"):
        load_tokenizer(tmp_path)


def real(name: str) -> Path:
    """A file or folder of real data, if available."""
    folder = os.environ.get("NANOLM_TEST_DATA")
    if folder is None or not (Path(folder) / name).exists():
        pytest.skip("NANOLM_TEST_DATA has no such file")
    return Path(folder) / name


@pytest.mark.parametrize("kind", ["gpt2", "cl100k"])
def test_with_the_real_ranks(kind: str) -> None:
    tokenizer = load_tokenizer(real(f"gpt2/{PUBLISHED[kind].file}"))
    assert isinstance(tokenizer, Ranks)
    texts = [TEXT, *WHITE]
    for file in sorted(real("multilingual").glob("*.txt")):
        texts.append(file.read_bytes()[:60_000].decode(errors="replace"))
    encode, theirs = by_tiktoken(tokenizer).encode_ordinary, reference(tokenizer)
    for text in texts:
        assert tokenizer.encode(text) == encode(text) == theirs(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert {"gpt2": [15496, 995], "cl100k": [9906, 1917]}[kind] == tokenizer.encode("Hello world")


def test_openais_first_files_are_the_same_tokenizer() -> None:
    tokenizer = load_tokenizer(real("gpt2/encoder.json").parent)
    ranked = load_tokenizer(real("gpt2/r50k_base.tiktoken"))
    assert isinstance(tokenizer, ByteLevelFile)
    assert (tokenizer.tokens, tokenizer.special) == (ranked.tokens, ranked.special)
    text = real("multilingual/UTF-8-demo.txt").read_text(encoding="utf-8")
    assert tokenizer.encode(text) == ranked.encode(text) == reference(tokenizer)(text)


def test_by_name_from_the_cache_of_tiktoken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    url = "https://openaipublic.blob.core.windows.net/encodings/cl100k_base.tiktoken"
    ranks_file = real("gpt2/cl100k_base.tiktoken")
    (tmp_path / hashlib.sha1(url.encode()).hexdigest()).write_bytes(ranks_file.read_bytes())
    tokenizer = named_tokenizer("cl100k")
    assert tokenizer.fingerprint() == load_tokenizer(ranks_file).fingerprint()


@pytest.mark.parametrize("name", NAMED)
def test_by_name_without_a_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise requests.exceptions.ConnectionError("Max retries exceeded")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    monkeypatch.setattr("tiktoken.load.read_file", fail)
    path = rf"--tokenizer PATH/{PUBLISHED[name].file}"
    with pytest.raises(UsageError, match=rf"tokenizer {name}.*{path}.*TIKTOKEN_CACHE_DIR"):
        named_tokenizer(name)


def test_by_name_from_a_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for_ever = threading.Event()
    monkeypatch.setattr("nanolm.text.tokenizer_files.published.DOWNLOAD_TIMEOUT", 0.05)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda _: for_ever.wait())
    with pytest.raises(UsageError, match="TimeoutError"):
        named_tokenizer("gpt2")
    for_ever.set()


def test_by_a_name_that_is_none() -> None:
    with pytest.raises(UsageError, match="did you mean gpt2"):
        named_tokenizer("gpt-2")


# Byte-level BPE of others ----------------------------------------------------------------------


@cache
def native(shape: str, normalizer: bool = False) -> tuple[Tokenizer, Callable[[str], list[int]]]:
    parts = trained(shape, normalizers.NFC() if normalizer else None)
    tokenizer = read_json(json.dumps(parts), Path("tokenizer.json"))
    return tokenizer, reference(tokenizer)


@pytest.mark.parametrize("shape", SHAPES)
@few
@given(text=TEXTS)
def test_ids_are_those_of_tokenizers(shape: str, text: str) -> None:
    tokenizer, theirs = native(shape)
    assert isinstance(tokenizer, ByteLevelFile)
    assert tokenizer.encode(text) == theirs(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("shape", SHAPES)
def test_all_short_texts_are_cut_as_by_tokenizers(shape: str) -> None:
    tokenizer, theirs = native(shape)
    for length in range(5):
        for characters in product("aS1 \n.'\u0301", repeat=length):
            text = "".join(characters)
            assert tokenizer.encode(text) == theirs(text)


@pytest.mark.parametrize("shape", SHAPES)
@few
@given(text=TEXTS)
def test_a_text_can_be_cut_at_safe_places(shape: str, text: str) -> None:
    tokenizer, _ = native(shape)
    assert tokenizer.cuttable
    for place in [match.start() for match in SAFE_CUT.finditer(text)]:
        parts = (text[:place], text[place:])
        assert [id for part in parts for id in tokenizer.encode(part)] == tokenizer.encode(text)


@few
@given(text=st.text("The cat e\u0301o\u0308ö\u0323 \u212b\n가각각", max_size=60))
def test_text_is_normalised_first(text: str) -> None:
    tokenizer, theirs = native("qwen", normalizer=True)
    assert isinstance(tokenizer, ByteLevelFile)
    assert tokenizer.encode(text) == theirs(text)
    assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}])
def test_added_tokens_are_matched_and_special_ones_are_text(
    normalizer: dict[str, str] | None, tmp_path: Path
) -> None:
    parts = trained("qwen")
    parts["normalizer"] = normalizer
    size = len(parts["model"]["vocab"])
    names = ["<a>", "<a><b>", "<|x<a>x|>", "é!"]
    specials = {"<|x<a>x|>"}
    parts["added_tokens"] += [
        added(name, size + n, special=name in specials) for n, name in enumerate(names)
    ]
    tokenizer = loaded(tmp_path, parts)
    assert isinstance(tokenizer, ByteLevelFile)
    assert tokenizer.vocab_size == size + len(names)
    assert tokenizer.tokens[size : size + 3] == [b"<a>", b"<a><b>", b""]
    assert tokenizer.encode("x<a>") == [*tokenizer.encode("x"), size]
    assert tokenizer.encode("<a><b>") == [size + 1]
    theirs = reference(tokenizer)

    @few
    @given(
        st.lists(st.sampled_from([*names, END_OF_TEXT, " ", "a", "e", "\u0338", "\u0301!", "\n"]))
    )
    def same(pieces: list[str]) -> None:
        text = "".join(pieces)
        assert tokenizer.encode(text) == theirs(text)
        if normalizer is None:
            assert tokenizer.decode(tokenizer.encode(text)) == text

    same()
    assert tokenizer.end_of_text not in tokenizer.encode(f"a{END_OF_TEXT}b")
    again = loaded(
        tmp_path, {**parts, "normalizer": {"type": "NFC"} if normalizer is None else None}
    )
    assert again.fingerprint() != tokenizer.fingerprint()


def test_the_file_is_kept_as_it_was(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, trained("digits"))
    text = (tmp_path / "tokenizer.json").read_text()
    assert tokenizer.to_json() == text
    assert tokenizer.kind == "foreign"
    again = tmp_path / "again"
    again.mkdir()
    tokenizer.save(again, context=64)
    assert (again / "tokenizer.json").read_text() == text
    assert load_tokenizer(again / "tokenizer.json").fingerprint() == tokenizer.fingerprint()
    with pytest.raises(DataError, match="lone surrogate"):
        tokenizer.encode("abc\ud800")


def test_older_files_have_merges_as_strings_and_no_type(tmp_path: Path) -> None:
    parts = trained("byte level")
    model = parts["model"]
    ids = loaded(tmp_path, parts).encode(TEXT)
    del model["type"]
    model["merges"] = [" ".join(pair) for pair in model["merges"]]
    tokenizer = loaded(tmp_path, parts)
    assert isinstance(tokenizer, ByteLevelFile)
    assert tokenizer.encode(TEXT) == ids == reference(tokenizer)(TEXT)


def test_tokens_that_only_a_whole_word_can_be(tmp_path: Path) -> None:
    """As in Llama 3: every way to form a token is listed, and no merge reaches some tokens."""
    tokens = [*train_tokenizer([TEXT], "bpe", 320).tokens[:-2], b"wxyz", b"wx", b"yz", b"wxyzw"]
    known = {token: id for id, token in enumerate(tokens)}
    splits = [
        (token[:at], token[at:])
        for token in tokens
        for at in range(1, len(token))
        if token[:at] in known and token[at:] in known
    ]
    parts = json.loads(train_tokenizer([""], "byte").to_json())
    parts["pre_tokenizer"] = json.loads(SHAPES["llama"].__getstate__())
    spelled = {id: spell(token) for token, id in known.items()}
    parts["model"]["vocab"] = {text: id for id, text in spelled.items()}
    parts["model"]["merges"] = [[spell(left), spell(right)] for left, right in splits]
    parts["added_tokens"] = [added(END_OF_TEXT, len(tokens), special=True)]
    for ignore_merges, kind in ((True, ByteLevelFile), (False, HuggingFace)):
        parts["model"]["ignore_merges"] = ignore_merges
        tokenizer = loaded(tmp_path, parts)
        assert isinstance(tokenizer, kind)
        theirs = reference(tokenizer)
        for text in (TEXT, "wxyz wxyzw wx-yz wxy zwxyz xyzwxyz"):
            assert tokenizer.encode(text) == theirs(text)
    assert tokenizer.cuttable is False


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(parts: Any) -> None:
        *above, last = [int(key) if key.isdecimal() else key for key in path.split(".")]
        for key in above:
            parts = parts[key]
        parts[last] = value

    return apply


def swap_merges(parts: dict[str, Any]) -> None:
    merges = parts["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]


def another_way(parts: dict[str, Any]) -> None:
    """A token made of parts that lower merges always consume."""
    size = len(parts["model"]["vocab"])
    for n, (left, right) in enumerate([("Q", "Z"), ("Z", "J"), ("Q", "ZJ")]):
        parts["model"]["vocab"][left + right] = size + n
        parts["model"]["merges"].append([left, right])


def another_token(flag: str) -> Callable[[dict[str, Any]], None]:
    def apply(parts: dict[str, Any]) -> None:
        new = added("<new>", len(parts["model"]["vocab"]), **{flag: True})
        parts["added_tokens"].append(new)

    return apply


PATTERN = "pre_tokenizer.pretokenizers.0.pattern"
LAST = "pre_tokenizer.pretokenizers.1"
FOR_THE_LIBRARY: dict[str, Callable[[dict[str, Any]], None]] = {
    **{
        f"pattern {pattern}": change(PATTERN, {"Regex": pattern})
        for pattern in [
            *(r"\p{N}{1,3}+|\D+", r"\S+$|\s+", r"\S+\z|\s", r"\h+|\H+", r"a*", r"b+a*b+|\S|\s"),
            PUBLISHED["o200k"].portable + "|x",
        ]
    },
    "string": change(PATTERN, {"String": " "}),
    "a token with a blank": lambda parts: parts["added_tokens"].append(
        added("two words", len(parts["model"]["vocab"]))
    ),
    "behavior": change("pre_tokenizer.pretokenizers.0.behavior", "MergedWithNext"),
    "invert": change("pre_tokenizer.pretokenizers.0.invert", True),
    "prefix space": change(f"{LAST}.add_prefix_space", True),
    "two patterns": change(f"{LAST}.use_regex", True),
    "groups of digits": change(
        "pre_tokenizer.pretokenizers.0", {"type": "Digits", "individual_digits": False}
    ),
    "no pre-tokenizer": change("pre_tokenizer", None),
    "lower case": change("normalizer", {"type": "Lowercase"}),
    "unknown token": change("model.unk_token", END_OF_TEXT),
    "byte fallback": change("model.byte_fallback", True),
    "suffix": change("model.end_of_word_suffix", "</w>"),
    "order of merges": swap_merges,
    "another way": another_way,
    **{flag: another_token(flag) for flag in ("lstrip", "rstrip", "single_word", "normalized")},
    "a word besides": change("model.vocab.besides", 5000),
    "renumbered": lambda parts: parts["added_tokens"].append(added("<new>", 9999)),
    "byte by another name": lambda parts: parts["added_tokens"].append(
        added("a", parts["model"]["vocab"]["a"])
    ),
}


@pytest.mark.parametrize("name", FOR_THE_LIBRARY)
def test_what_might_differ_is_left_to_the_library(name: str, tmp_path: Path) -> None:
    parts = trained("qwen", size=300)
    FOR_THE_LIBRARY[name](parts)
    tokenizer = loaded(tmp_path, parts)
    assert isinstance(tokenizer, HuggingFace)
    theirs = reference(tokenizer)
    for text in (TEXT, "QZJ ZJQZJ", "a <new> b"):
        assert tokenizer.encode(text) == theirs(text)


@few
@given(data=st.data())
def test_merges_that_nobody_learned(data: st.DataObject) -> None:
    """Either tiktoken gives the same ids, or the difference is detected."""
    tokens = ["a", "b", "c"]
    parts = trained("llama", size=257)
    vocab, merges = parts["model"]["vocab"], parts["model"]["merges"]
    for _ in range(data.draw(st.integers(1, 8))):
        left, right = data.draw(st.sampled_from(tokens)), data.draw(st.sampled_from(tokens))
        if left + right not in vocab:
            tokens.append(left + right)
            vocab[left + right] = len(vocab)
            merges.append([left, right])
    if data.draw(st.booleans()):  # all possible ones, as in Llama 3
        made = [(token[:at], token[at:]) for token in tokens for at in range(1, len(token))]
        parts["model"]["merges"] = [pair for pair in made if pair[0] in vocab and pair[1] in vocab]
    parts["model"]["ignore_merges"] = data.draw(st.booleans())
    tokenizer = read_json(json.dumps(parts), Path("tokenizer.json"))
    text = data.draw(st.text("abc ", max_size=30))
    assert tokenizer.encode(text) == reference(tokenizer)(text)


# Other kinds, by the library -------------------------------------------------------------------


def pieces() -> dict[str, Any]:
    """A SentencePiece byte-pair encoding with byte fallback."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab += ["\u2581", "t", "h", "e", "a", "\u2581t", "he", "\u2581the"]
    merges = [["\u2581", "t"], ["h", "e"], ["\u2581t", "he"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            {token: id for id, token in enumerate(vocab)},
            [(left, right) for left, right in merges],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.enable_truncation(3)
    parts: dict[str, Any] = json.loads(tokenizer.to_str())
    return parts


def test_sentencepiece(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, pieces())
    assert isinstance(tokenizer, HuggingFace)
    assert (tokenizer.kind, tokenizer.cuttable) == ("foreign", False)
    assert tokenizer.special == {2: "</s>"}
    assert tokenizer.tokens[:3] == [b"", b"", b""]
    assert tokenizer.tokens[3 + 10] == b"\n"
    assert tokenizer.tokens[-1] == b" the"
    text = "the hé\n</s> athe"
    ids = tokenizer.encode(text)
    assert not {0, 1, 2} & set(ids)  # literal special tokens are text, and nothing is cut off
    assert tokenizer.decode([1, *ids, 2]) == text
    assert tokenizer.byte_lengths()[ids].sum() == len(text.encode()) + 1  # the space before it
    with pytest.raises(DataError, match="lone surrogate"):
        tokenizer.encode("\ud800")


def test_word_pieces_and_unigrams(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(
        models.WordPiece({"[UNK]": 0, "</s>": 1, "the": 2, "##re": 3}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.decoder = decoders.WordPiece()
    tokenizer = loaded(tmp_path, json.loads(words.to_str()))
    assert tokenizer.encode("there the") == [2, 3, 2]
    assert tokenizer.decode([2, 3, 2, 1]).startswith("there the")
    assert tokenizer.tokens[1:3] == [b"", b"the"]

    unigrams = tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("\u2581the", -1.0), ("re", -2.0)], 0)
    )
    unigrams.pre_tokenizer = pre_tokenizers.Metaspace()
    unigrams.decoder = decoders.Metaspace()
    tokenizer = loaded(tmp_path, json.loads(unigrams.to_str()))
    assert tokenizer.encode("there the") == [2, 3, 2]
    assert tokenizer.tokens == [b"<unk>", b"", b" the", b"re"]
    assert tokenizer.decode([2, 3, 2]) == "there the"


def test_what_the_library_cannot_do_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = tokenizers.Tokenizer(models.WordPiece({"</s>": 0}, unk_token="[UNK]"))
    tokenizer = loaded(tmp_path, json.loads(words.to_str()))
    with pytest.raises(ModelError, match="UNK"):
        tokenizer.encode("the")
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "New", "vocab": {"a": 0}}}')
    with pytest.raises(ModelError, match="not a Hugging Face tokenizer"):
        load_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"pip install 'nanolm\[hf\]'"):
        load_tokenizer(tmp_path)


def test_a_real_sentencepiece_model() -> None:
    tokenizer = load_tokenizer(real("weights/stories260K"))
    assert isinstance(tokenizer, HuggingFace)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (512, 2)
    text = "Once upon a time, Zoë said </s>\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


# Files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_vocabulary_and_merges(names: tuple[str, str], tmp_path: Path) -> None:
    parts = trained("byte level")
    vocab, merges = parts["model"]["vocab"], parts["model"]["merges"]
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges), ""]
    (tmp_path / names[0]).write_text(json.dumps(vocab))
    (tmp_path / names[1]).write_text("\n".join(lines), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, ByteLevelFile)
    assert tokenizer.special == {0: END_OF_TEXT}
    theirs, expected = reference(tokenizer), native("byte level")[0]
    for text in (TEXT, *WHITE):
        assert tokenizer.encode(text) == theirs(text) == expected.encode(text)

    # If the ids are not in order, as in RoBERTa, the library is used.
    numbers = [*vocab.values()]
    random.Random(0).shuffle(numbers)
    vocab = dict(zip(vocab, numbers, strict=True))
    (tmp_path / names[0]).write_text(json.dumps(vocab))
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, HuggingFace)
    assert tokenizer.end_of_text == vocab[END_OF_TEXT]
    assert tokenizer.encode("The") == [vocab[token] for token in ["The"]]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT

    (tmp_path / names[1]).write_text("#version: 0.2\na b c\n")
    with pytest.raises(ModelError, match=f"{names[1]}, line 2"):
        load_tokenizer(tmp_path)
    (tmp_path / names[1]).write_text("Q Q\n")
    with pytest.raises(ModelError, match=names[0]):
        load_tokenizer(tmp_path)
    (tmp_path / names[1]).unlink()
    with pytest.raises(ModelError, match=names[1]):
        load_tokenizer(tmp_path)


ENDS = [
    ({}, "</s>", "</s>"),
    ({"tokenizer_config": {"eos_token": "<one>"}}, "<one>", "<one>"),
    ({"tokenizer_config": {"eos_token": {"content": "<one>"}}}, "<one>", "<one>"),
    ({"tokenizer_config": {"pad_token": "<two>"}}, "</s>", "<two>"),
    ({"tokenizer_config": {"eos_token": "<none>", "pad_token": 3}}, "</s>", "</s>"),
    ({"generation_config": {"eos_token_id": [301, 300]}}, "<two>", "<two>"),
    ({"config": {"eos_token_id": 300}}, "<one>", "<one>"),
    (
        {"config": {"eos_token_id": 300}, "generation_config": {"eos_token_id": 301}},
        "<two>",
        "<two>",
    ),
    ({"config": {"eos_token_id": [], "bos_token_id": True}}, "</s>", "</s>"),
    ({"config": {"eos_token_id": -1}}, "</s>", "</s>"),
]


@pytest.mark.parametrize(("files", "end", "padding"), ENDS)
def test_the_end_of_text_is_found(
    files: dict[str, dict[str, Any]], end: str, padding: str, tmp_path: Path
) -> None:
    parts = trained("byte level", size=300)
    del parts["model"]["vocab"][END_OF_TEXT]
    ids = {"<one>": 300, "<two>": 301, "</s>": 302}
    parts["model"]["vocab"] |= ids
    parts["added_tokens"] = [added(name, id, special=True) for name, id in ids.items()]
    for name, values in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    tokenizer = loaded(tmp_path, parts)
    assert (tokenizer.end_of_text, tokenizer.padding) == (ids[end], ids[padding])
    assert tokenizer.special == {ids[end]: end, ids[padding]: padding}
    assert tokenizer.decode([ids[end]]) == ""


def test_without_an_end_of_text_the_beginning_serves(tmp_path: Path) -> None:
    parts = trained("byte level", size=300)
    del parts["model"]["vocab"][END_OF_TEXT]
    parts["model"]["vocab"]["<s>"] = 0
    parts["added_tokens"] = [added("<s>", 0, special=True)]
    with pytest.raises(ModelError, match=r"tokenizer\.json: .*end-of-text token; set eos_token"):
        loaded(tmp_path, parts)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    assert load_tokenizer(tmp_path).special == {0: "<s>"}
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["bpe", "char", "byte"])
def test_ours_are_known_again(kind: str, tmp_path: Path) -> None:
    tokenizer = train_tokenizer([TEXT], kind)
    tokenizer.save(tmp_path, context=8)
    again = load_tokenizer(tmp_path)
    assert (type(again), again.kind, again.tokens) == (type(tokenizer), kind, tokenizer.tokens)


def test_a_file_that_is_not_there_or_too_large_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json", tmp_path / "none.tiktoken"):
        with pytest.raises(ModelError, match="does not exist"):
            load_tokenizer(path)
    with (tmp_path / "tokenizer.json").open("wb") as stream:
        stream.truncate(65_000_000)
    with pytest.raises(ModelError, match=r"tokenizer\.json has over 64,000,000 bytes"):
        load_tokenizer(tmp_path)


VOCABULARY = '{"model": {"vocab": ?}}'
ID = '{"model": {"vocab": {"a": 0, "b": ?}, "merges": []}}'
MERGES = '{"model": {"vocab": {"a": 0, "b": 1}, "merges": ?}}'
ADDED = '{"added_tokens": ?, "model": {"vocab": {"a": 0}, "merges": []}}'
VALUES = {
    "?": ["", "{", "[]", "3", '"a"', "\ufeff{}", "{}", "[" * 100_000, '{"a":' * 100_000],
    '{"model": ?}': ["3", "{}", "[]", "null"],
    VOCABULARY: ["3", "{}", "[]", "[3]", '[["a"]]', "[[[], 1]]", '{"\\ud800": 0}', "null"],
    ID: ["-1", "0", "1.5", "true", "null", '"1"', "[]", "10000000", "1e999", "9" * 5000],
    MERGES: ["3", "[3]", '["a"]', '["a b c"]', '[["a"]]', '[["a", 1]]', '[["a", "b"]]', "null"],
    ADDED: [
        *("3", "[3]", "[{}]", '[{"id": 1}]', '[{"id": 1, "content": 3}]', '{"id": 0}'),
        *(f'[{{"id": {id}, "content": "x"}}]' for id in ("[]", "0", "-1", "10000000", "1.0")),
        '[{"id": 1, "content": "\\ud800"}]',
    ],
}
HOSTILE = [form.replace("?", value) for form, values in VALUES.items() for value in values]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:60])
def test_hostile_files_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(text.encode())
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(file)
    (tmp_path / "vocab.json").write_text(text, encoding="utf-8")
    (tmp_path / "merges.txt").write_text("a b\n")
    file.unlink()
    with pytest.raises(ModelError, match=r"vocab\.json"):
        load_tokenizer(tmp_path)


def test_ours_with_tokens_that_double_and_double_are_refused(tmp_path: Path) -> None:
    parts = json.loads(train_tokenizer([TEXT], "bpe", 300).to_json())
    parts["model"]["merges"] = [["a", "a"], *([["aa", "aa"]] * 90)]
    with pytest.raises(ModelError, match="the result of a merge is not a token"):
        loaded(tmp_path, parts)


def inside(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON = st.recursive(SCALARS, inside, max_leaves=4)
SMALL = json.dumps(trained("qwen", size=262))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(data: st.DataObject) -> None:
    parts: Any = json.loads(SMALL)
    for _ in range(data.draw(st.integers(1, 2))):
        place, value = parts, data.draw(JSON)
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = data.draw(st.sampled_from(keys))
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
                break
            place = inner
        if data.draw(st.booleans()):
            place[key] = value
        else:
            del place[key]
    refusal = "tokenizer.json"
    try:
        tokenizer = read_json(json.dumps(parts), Path("tokenizer.json"))
        tokenizer.decode(tokenizer.encode("The cat"))
    except NanolmError as error:
        refusal = str(error)
    assert "tokenizer.json" in refusal


def test_the_tokens_around_what_one_says(tmp_path: Path) -> None:
    """If the model has learned to end its turn with it."""
    parts = trained("qwen")
    size = len(parts["model"]["vocab"])
    names = ("<|im_start|>", "<|im_end|>")
    parts["added_tokens"] += [added(name, size + n, special=True) for n, name in enumerate(names)]
    assert loaded(tmp_path, parts).turn is None
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert loaded(tmp_path, parts).turn == (size, size + 1)


def with_parts(folder: Path, parts: dict[str, Any], added: int = 0) -> Path:
    """A small tokenizer.json with these parts, which needs the library."""
    names = [*"abcdefghijklmnopqrstuvwxyz ", "</s>"]
    new = [{"id": 28 + n, "content": f"<{n}>", "normalized": True} for n in range(added)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "special": False}
    whole = {
        "version": "1.0",
        "added_tokens": [flags | each for each in new],
        "model": {
            "type": "BPE",
            "vocab": {name: id for id, name in enumerate(names)},
            "merges": [],
        },
        **parts,
    }
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(whole))
    return file


def sequence(key: str, times: int, **step: Any) -> dict[str, Any]:
    return {"type": "Sequence", key: [step] * times}


SPLIT_STEP = {"type": "Split", "pattern": {"Regex": "a|b"}, "behavior": "Isolated", "invert": False}
REPLACE_STEP = {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}
NESTED: dict[str, Any] = sequence("normalizers", 30, type="NFC")
LONG_PARTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "splits": ("pre_tokenizer", sequence("pretokenizers", 2_000, **SPLIT_STEP), "2,001"),
    "normalizers": ("normalizer", sequence("normalizers", 5_000, type="NFC"), "5,001"),
    "replacements": ("normalizer", sequence("normalizers", 101, **REPLACE_STEP), "102"),
    "decoders": ("decoder", sequence("decoders", 5_000, **REPLACE_STEP), "5,001"),
    "processors": ("post_processor", sequence("processors", 5_000, type="ByteLevel"), "5,001"),
    "nested": ("normalizer", sequence("normalizers", 4, **NESTED), "125"),
}


@pytest.mark.parametrize("name", LONG_PARTS)
def test_a_pipeline_of_many_steps_is_refused(name: str, tmp_path: Path) -> None:
    key, part, steps = LONG_PARTS[name]
    file = with_parts(tmp_path, {key: part})
    with pytest.raises(ModelError, match=rf"{file}: its {key} has {steps} steps; the limit is 100"):
        load_tokenizer(file)


def test_a_pipeline_of_some_steps_is_read(tmp_path: Path) -> None:
    normalizer = sequence("normalizers", 90, **REPLACE_STEP)
    tokenizer = load_tokenizer(with_parts(tmp_path, {"normalizer": normalizer}, 2_000))
    assert tokenizer.encode("cab") == [2, 1, 1]
    assert tokenizer.decode([2, 1, 1]).replace(" ", "") == "cbb"


@pytest.mark.parametrize("pattern", ["[a-z ]+[a-z ]+[A-Z]", "(a+)+$"])
def test_patterns_that_take_for_ever(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hugging_face, "SECONDS", 0.5)
    split = {**SPLIT_STEP, "pattern": {"Regex": pattern}}
    tokenizer = load_tokenizer(with_parts(tmp_path, {"pre_tokenizer": split}))
    assert tokenizer.encode("cab") == [2, 0, 1]
    start = time.monotonic()
    with pytest.raises(ModelError, match=r"cannot encode this text: (it takes|.*over)"):
        tokenizer.encode("a" * 1500 + "b")
    assert time.monotonic() - start < 5


def test_long_tokens_are_left_to_the_library(tmp_path: Path) -> None:
    """Checking them here would take minutes."""
    spelled = {spell(bytes([n])): n for n in range(256)}
    merges = []
    for start in "abcdefghij":
        token = start
        for _ in range(400):
            merges.append((token, "x"))
            token += "x"
            spelled[token] = len(spelled)
    spelled[END_OF_TEXT] = len(spelled)
    model = {"type": "BPE", "vocab": spelled, "merges": merges}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    whole = {"version": "1.0", "model": model, "pre_tokenizer": byte_level, "decoder": byte_level}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(whole))
    tokenizer = load_tokenizer(file)
    assert isinstance(tokenizer, HuggingFace)
    assert len(tokenizer.encode("a" + "x" * 400)) == 1
