"""Ten thousand strings of every kind: the same ids as tiktoken and `transformers`.

Real text is included if NANOLM_TEST_DATA names a folder with `multilingual/*.txt` (or .xz) and
the rank files `gpt2/r50k_base.tiktoken` and `gpt2/cl100k_base.tiktoken`.
"""

import lzma
import os
import random
from pathlib import Path

import pytest
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from tiktoken_ext import openai_public

from nanolm.text.tokenizer import Tokenizer, train_tokenizer
from nanolm.text.tokenizer_files import load_tokenizer

COUNT = 10_000
DATA = Path(os.environ.get("NANOLM_TEST_DATA") or "no such folder")
ALPHABETS = [
    "abc ABC'sdtlv.,!? \n\t",
    "0123456789 .,-€$%",
    " \t\n\r\x0b\x0c\x85\xa0\u2003\u2028\u3000",
    "äöüßéèñçøåÆŒ ",
    "абвгдеёжз ",
    "日本語漢字かなカナ、。 ",
    "देवनागरी العربية עברית ไทย 한국어 ",
    "👍👩\u200d👩\u200d👧🏽🇩🇪 e\u0301\u0308 ",
    "<|endoftext|> <|padding|> <|im_start|>",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": None}\t# <b>&amp;</b>",
]


def strings() -> list[str]:
    """COUNT strings: lines of real files, random ones of many kinds, and very long runs."""
    dice = random.Random(2026)
    found = [char * 400_000 for char in "a 1.\n日"]
    for file in sorted(DATA.glob("multilingual/*")):
        data = file.read_bytes()
        data = lzma.decompress(data) if file.suffix == ".xz" else data
        lines = data.decode("shift_jis" if "shiftjis" in file.name else "utf-8").split("\n")
        found += [line for line in lines[:: max(1, len(lines) // 800)] if line]
    while len(found) < COUNT:
        kind = dice.randrange(4)
        length = dice.choice([1, 2, 3, 10, 50, 200])
        if kind == 0:
            text = "".join(dice.choices(dice.choice(ALPHABETS), k=length))
        elif kind == 1:
            mixed = [dice.choice(ALPHABETS) for _ in range(5)]
            text = "".join(dice.choice(dice.choice(mixed)) for _ in range(length))
        elif kind == 2:
            text = dice.randbytes(length).decode("latin-1")
        else:
            points = (dice.randrange(0x110000) for _ in range(length))
            text = "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
        found.append(text)
    return found[:COUNT]


def check(tokenizer: Tokenizer, texts: list[str], expected: list[list[int]]) -> None:
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text) == ids, text[:100]
        assert tokenizer.decode(ids) == text, text[:100]


@pytest.mark.parametrize("kind", ["bpe", "char", "byte"])
def test_ids_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    texts = strings()
    tokenizer = train_tokenizer(texts[6 : COUNT // 2], kind, 3000 if kind == "bpe" else None)
    tokenizer.save(tmp_path, context=1024)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    check(load_tokenizer(tmp_path), texts, [reference.encode(text) for text in texts])


@pytest.mark.parametrize("name", ["r50k_base", "cl100k_base"])
def test_ids_are_those_of_tiktoken(name: str) -> None:
    file = DATA / "gpt2" / f"{name}.tiktoken"
    if not file.exists():
        pytest.skip("needs the rank file in NANOLM_TEST_DATA")
    pattern = {
        "r50k_base": openai_public.r50k_pat_str,
        # in tiktoken 0.14, cl100k's pattern is inside a function that downloads
        "cl100k_base": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    }[name]
    ranks = load_tiktoken_bpe(str(file))
    reference = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    texts = strings()
    check(load_tokenizer(file), texts, [reference.encode_ordinary(text) for text in texts])
