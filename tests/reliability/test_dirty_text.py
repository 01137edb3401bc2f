"""Texts as they come: each trains, or is refused with its name and what to do about it."""

import gzip
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Commands
from conftest import TINY_MODEL, Tally

GOOD = "the cat sat on the mat, and the dog on the rug.\n" * 40
Make = Callable[[Path], object]


def holds(contents: str | bytes) -> Make:
    data = contents.encode() if isinstance(contents, str) else contents
    return lambda file: file.write_bytes(data)


def many_bad(file: Path) -> None:
    file.mkdir()
    for number in range(50):
        (file / f"{number}.txt").write_bytes(b"caf\xe9")


# Each with words of the refusal; without words it has to work.
DIRTY: dict[str, tuple[Make, str]] = {
    "invalid UTF-8": (holds(b"caf\xe9 " * 500), "byte 0xe9 at offset 3"),
    "invalid in the midst": (holds(GOOD.encode() + b"\xff" + GOOD.encode()), "offset 1,920"),
    "a BOM": (holds(b"\xef\xbb\xbf" + GOOD.encode()), ""),
    "UTF-16": (holds(GOOD.encode("utf-16")), "try --encoding utf-16"),
    "CRLF": (holds(GOOD.replace("\n", "\r\n")), ""),
    "CR alone": (holds(GOOD.replace("\n", "\r")), ""),
    "NUL": (holds(GOOD.replace("cat", "c\0t")), ""),
    "control characters": (holds(bytes(range(1, 32)) * 100), "is not text"),
    "random bytes": (holds(random.Random(1).randbytes(5000)), "is not text"),
    "empty": (holds(b""), "no text found"),
    "white space": (holds(" \n\t\n" * 100), "no text found"),
    "one character": (holds("a"), "too little to train on"),
    "two characters": (holds("ab"), "too little to train on"),
    "shorter than the context": (holds("a cat sat"), ""),
    "one word again and again": (holds("word " * 2000), ""),
    "5 MB in one line": (holds("all in one line " * 310_000), ""),
    "a broken gz": (lambda file: file.write_bytes(gzip.compress(GOOD.encode())[:-9]), "damaged"),
    "gz that is none": (holds(GOOD), "gz"),
    "a FIFO that nobody writes to": (os.mkfifo, "FIFO"),
    "a loop of links": (lambda file: file.symlink_to(file.name), "loop"),
    "a link to nowhere": (lambda file: file.symlink_to("nowhere"), "No such file"),
    "a folder of broken files": (many_bad, "byte 0xe9 at offset 3"),
    "an empty folder": (Path.mkdir, "contains no text"),
    "marks of our own": (holds(GOOD + "\x1c\x1d\ufdd0\uffff" * 9), ""),
}
SHAPE = [word for name, value in TINY_MODEL.items() for word in (f"--{name}", str(value))]


def test_each_trains_or_is_refused_with_a_reason(
    commands: Commands, tmp_path: Path, tally: Tally
) -> None:
    survived, wrong = 0, list[str]()
    for name, (make, words) in DIRTY.items():
        suffix = ".txt.gz" if "gz" in name else ".txt"
        file = tmp_path / f"{name.replace(' ', '-')}{suffix}"
        make(file)
        code, said = commands.run("train", file, *SHAPE, "--steps", 2, "--threads", 1)
        if words:
            fine = code in (2, 3) and str(file) in said and words in said
        else:
            fine = code == 0
        if fine and "Traceback" not in said:
            survived += 1
        else:
            wrong.append(f"{name}: {code} {said}")
    assert not wrong, "\n".join(wrong)
    tally("dirty texts", len(DIRTY), survived)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_nobody_may_read(commands: Commands, tmp_path: Path) -> None:
    file = tmp_path / "secret.txt"
    file.write_text(GOOD)
    file.chmod(0)
    code, said = commands.run("train", file)
    assert code == 3
    assert "secret.txt" in said
