import hashlib
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import corpus_of
from hypothesis import given, settings
from hypothesis import strategies as st

from nanolm import files
from nanolm.errors import DataError
from nanolm.text import corpus as corpus_module
from nanolm.text import store
from nanolm.text.decoding import Reading
from nanolm.text.split import take_out
from nanolm.text.store import TextRequest, encode_corpus, prepare_tokens
from nanolm.text.tokenizer import ByteLevel, Tokenizer, train_tokenizer

TEXT = "The cat sat on the mat. It's 12345 o'clock!\n\nSchön, 日本 is far.\n" * 20
TOKENIZERS = {
    kind: train_tokenizer([TEXT], kind, 400 if kind == "bpe" else None)
    for kind in ("bpe", "char", "byte")
}


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def quiet(what: str, done: int, total: int) -> None:
    pass


def encoded(tokenizer: Tokenizer, documents: list[str]) -> list[int]:
    """The reference: encode each document at once."""
    ids = [[tokenizer.end_of_text, *tokenizer.encode(document)] for document in documents]
    return [id for part in ids for id in part]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("size", [1 << 19, 100])
@pytest.mark.parametrize("alone", [0, 1 << 40], ids=["by processes", "by threads"])
def test_ids_are_those_of_whole_documents(
    kind: str, size: int, alone: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(store, "ENCODED_ALONE", alone)
    monkeypatch.setattr(corpus_module.Corpus.parts, "__defaults__", (size, False, 0))
    documents = [TEXT, "another one", TEXT[:300], "a"]
    with corpus_of(*documents) as corpus:
        count = encode_corpus(corpus, TOKENIZERS[kind], tmp_path / "ids", quiet)
    ids = np.fromfile(tmp_path / "ids", dtype=np.uint16).tolist()
    assert ids == encoded(TOKENIZERS[kind], documents)
    assert count == len(ids)


def test_held_out_text_that_begins_amid_a_document_gets_its_end_of_text(tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["byte"]
    with corpus_of("abcdef") as corpus, take_out(corpus, [(4, 7)], tmp_path) as held_out:
        encode_corpus(held_out, tokenizer, tmp_path / "ids", quiet)
    assert np.fromfile(tmp_path / "ids", dtype=np.uint16).tolist() == [256, *b"def"]


def test_what_is_prepared(text_file: Path, tmp_path: Path) -> None:
    request = TextRequest(corpus=(str(text_file),), val_split="end", tokenizer="byte")
    prepared = prepare_tokens(request, cache=tmp_path)
    train, val = (prepared.tokenizer.decode(ids.tolist()) for ids in (prepared.train, prepared.val))
    assert train + val == TEXT
    assert prepared.val[0] == prepared.train[0] == prepared.tokenizer.end_of_text
    assert prepared.prompt == " ".join(val[:40].split(" ")[:3])
    assert prepared.size == pytest.approx(0.9 * len(TEXT.encode()), rel=0.05)
    assert prepared.documents == 1


def test_a_file_to_validate_on(text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "val.txt").write_text("held out")
    request = TextRequest(corpus=(str(text_file),), val=str(tmp_path / "val.txt"), tokenizer="char")
    prepared = prepare_tokens(request, cache=tmp_path)
    assert prepared.tokenizer.decode(prepared.train.tolist()) == TEXT
    assert prepared.tokenizer.decode(prepared.val.tolist()) == "held out"


def test_the_second_time_nothing_is_read(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = TextRequest(corpus=(str(text_file),))
    first = prepare_tokens(request, cache=tmp_path)
    monkeypatch.setattr(store, "read_corpus", None)
    again = prepare_tokens(request, cache=tmp_path)
    assert (again.train == first.train).all()
    assert (again.val == first.val).all()
    assert (again.choices, again.fingerprints) == (first.choices, first.fingerprints)
    assert again.tokenizer.tokens == first.tokenizer.tokens


def test_whatever_matters_makes_another_store(text_file: Path, tmp_path: Path) -> None:
    asked = [
        TextRequest(corpus=(str(text_file),)),
        TextRequest(corpus=(str(text_file),), val_fraction=0.2),
        TextRequest(corpus=(str(text_file),), tokenizer="char"),
        TextRequest(corpus=(str(text_file),), tokenizer="byte"),
        TextRequest(corpus=(str(text_file),), tokenizer="bpe", vocab_size=300),
        TextRequest(corpus=(str(text_file),), tokenizer=TOKENIZERS["bpe"]),
        TextRequest(corpus=(str(text_file),), reading=Reading(separator="***")),
        TextRequest(corpus=(str(text_file),), reading=Reading(encoding="latin-1")),
    ]
    for request in asked:
        prepare_tokens(request, cache=tmp_path)
    stat = text_file.stat()
    text_file.write_text(TEXT.replace("cat", "dog"))  # same size and modification time
    os.utime(text_file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    prepare_tokens(asked[0], cache=tmp_path)
    stores = [entry for entry in (tmp_path / "tokens").iterdir() if entry.is_dir()]
    assert len(stores) == len(asked) + 1


def test_too_little_text_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match="1 byte of text is too little"):
        prepare_tokens(TextRequest(corpus=(str(tmp_path / "a.txt"),)), cache=tmp_path / "cache")
    left = [entry.name for entry in (tmp_path / "cache" / "tokens").iterdir()]
    assert all(name.endswith(".lock") for name in left)


def test_damage_is_noticed_and_mended(text_file: Path, tmp_path: Path) -> None:
    request = TextRequest(corpus=(str(text_file),), tokenizer="char")
    ids = prepare_tokens(request, cache=tmp_path).train.copy()
    (folder,) = [entry for entry in (tmp_path / "tokens").iterdir() if entry.is_dir()]
    dice = random.Random(5)
    for file in sorted(folder.iterdir()):
        data = bytearray(file.read_bytes())
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        file.write_bytes(data)
        notes: list[str] = []
        again = prepare_tokens(request, note=notes.append, cache=tmp_path)
        assert (again.train == ids).all()
        assert file.name in notes[0]
        assert "preparing the text again" in notes[0]


def test_what_nobody_used_for_a_month_is_removed(text_file: Path, tmp_path: Path) -> None:
    prepare_tokens(TextRequest(corpus=(str(text_file),), tokenizer="char"), cache=tmp_path)
    (old,) = [entry for entry in (tmp_path / "tokens").iterdir() if entry.is_dir()]
    os.utime(old, (time.time() - 31 * 86_400,) * 2)
    left = tmp_path / "tokens" / ".tmp-of-a-killed-process"
    left.mkdir()
    os.utime(left, (time.time() - 2 * 86_400,) * 2)
    prepare_tokens(TextRequest(corpus=(str(text_file),), tokenizer="byte"), cache=tmp_path)
    assert not old.exists()
    assert not left.exists()


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NANOLM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match="NANOLM_CACHE"):
        prepare_tokens(TextRequest(corpus=("embedded:tiny",)))


PREPARE = """
import sys
from pathlib import Path
from nanolm.text.store import TextRequest, prepare_tokens
print("ready", flush=True)
request = TextRequest(corpus=(sys.argv[1],), tokenizer="bpe", vocab_size=600)
prepare_tokens(request, note=lambda text: print(text, flush=True), cache=Path(sys.argv[2]))
"""


def preparing(text: Path, cache: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREPARE, str(text), str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8")


def contents(cache: Path) -> dict[str, str]:
    """Every committed file and its checksum; verifies each folder."""
    found = {}
    for folder in (cache / "tokens").iterdir() if (cache / "tokens").exists() else []:
        if folder.is_dir() and not folder.name.startswith("."):
            files.verify(folder)
            for file in folder.iterdir():
                found[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def kills(count: int, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Line {n}: {TEXT[n % 50 : n % 50 + 40]}\n" for n in range(60_000)))
    with preparing(text, tmp_path / "whole") as process:
        started = time.monotonic()
        process.wait()
    length = time.monotonic() - started
    whole = contents(tmp_path / "whole")
    assert len(whole) == 5
    dice = random.Random(11)
    reached = 0
    for number in range(count):
        cache = tmp_path / f"cache-{number}"
        with preparing(text, cache) as process:
            assert process.stdout
            process.stdout.readline()
            time.sleep(dice.uniform(0, length))
            process.kill()
        left = contents(cache)
        assert left in ({}, whole)
        reached += not left
        with preparing(text, cache) as process:
            assert process.wait() == 0
        assert contents(cache) == whole
        assert not list((cache / "tokens").glob(".*"))
    assert reached > count // 4  # most kills came before the end


@pytest.mark.slow
def test_a_kill_leaves_nothing_that_is_trusted_wrongly(tmp_path: Path) -> None:
    kills(4, tmp_path)


def clean(cache: Path, others: int) -> list[int]:
    """Run several processes that prepare different texts in one old cache."""
    for number in range(300):
        old = cache / "tokens" / f"old-{number}"
        old.mkdir(parents=True)
        (old / "train.bin").write_bytes(b"0")
        os.utime(old, (0, 0))
    processes = [
        subprocess.Popen([sys.executable, "-c", CLEAN, str(number), str(cache)], **PIPES)
        for number in range(others)
    ]
    for process in processes:
        assert process.stdout
        assert process.stdout.readline()  # all have started
    for process in processes:
        assert process.stdin
        process.stdin.write(b"go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
    return [process.returncode for process in processes]


PIPES: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
CLEAN = """
import sys
from pathlib import Path
from nanolm.text.store import TextRequest, prepare_tokens
number, cache = sys.argv[1], Path(sys.argv[2])
text = cache / f"{number}.txt"
text.write_text("a cat sat on mat " + number)
print("ready", flush=True)
sys.stdin.readline()
prepare_tokens(TextRequest(corpus=(str(text),), tokenizer="byte"), cache=cache)
"""


def test_several_clean_the_cache_at_once(tmp_path: Path) -> None:
    assert clean(tmp_path, 3) == [0, 0, 0]
    left = {entry.name for entry in (tmp_path / "tokens").iterdir() if entry.is_dir()}
    assert len(left) == 3
    assert not any("old" in name for name in left)


def test_a_text_that_another_process_is_opening_is_not_removed(
    text_file: Path, tmp_path: Path
) -> None:
    prepare_tokens(TextRequest(corpus=(str(text_file),), tokenizer="char"), cache=tmp_path)
    parent = tmp_path / "tokens"
    (old,) = [entry for entry in parent.iterdir() if entry.is_dir()]
    half_done = parent / f".tmp-{old.name}-1"
    half_done.mkdir()
    for folder in (old, half_done):
        os.utime(folder, (0, 0))
    with files.locked(parent / f"{old.name}.lock"):
        prepare_tokens(TextRequest(corpus=(str(text_file),), tokenizer="byte"), cache=tmp_path)
        assert old.exists()
        assert half_done.exists()


@pytest.mark.slow
def test_fifty_kills_leave_nothing_that_is_trusted_wrongly(tmp_path: Path) -> None:
    kills(50, tmp_path)


def test_two_at_once_do_the_work_once(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Line {n}: {TEXT[n % 50 : n % 50 + 40]}\n" for n in range(60_000)))
    with preparing(text, tmp_path / "cache") as first, preparing(text, tmp_path / "cache") as other:
        shown = [process.stdout.read() for process in (first, other) if process.stdout]
    assert (first.returncode, other.returncode) == (0, 0)
    assert len(contents(tmp_path / "cache")) == 5
    assert "".join(shown).count("another run is preparing this text") <= 1


def test_text_that_changes_between_a_look_and_the_reading_is_refused(
    text_file: Path, tmp_path: Path
) -> None:
    def change(what: str, done: int, total: int) -> None:
        if what == "hashing the text":
            text_file.write_text(TEXT + "more")

    with pytest.raises(DataError, match="changed while it was being read"):
        prepare_tokens(TextRequest(corpus=(str(text_file),)), report=change, cache=tmp_path)
    assert not contents(tmp_path)


def test_as_much_as_there_is_time_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"Line {n}: {TEXT[n % 50 : n % 50 + 40]}\n" for n in range(20_000)))
    request = TextRequest(corpus=(str(file),))
    monkeypatch.setattr(store, "_seconds_a_byte", lambda *_: 1e-5)  # 10 s per megabyte
    monkeypatch.setattr(store, "LEAST_PART", 250_000)
    whole = prepare_tokens(request, cache=tmp_path, until=time.monotonic() + 60)
    assert whole.max_bytes is None
    part = prepare_tokens(request, cache=tmp_path, until=time.monotonic() + 6)
    assert part.max_bytes == 500_000
    assert 400_000 < part.size < 500_000
    assert part.choices[0].what == "text used"
    assert part.choices[0].value == "0.5 of 1.12 MB"
    assert part.fingerprints["corpus"] != whole.fingerprints["corpus"]
    shown: list[str] = []
    asked = {"tokenizer": "bpe", "vocab_size": part.tokenizer.vocab_size, "max_bytes": 500_000}
    again = prepare_tokens(
        replace(request, **asked),  # type: ignore[arg-type]
        report=lambda what, *_: shown.append(what),
        cache=tmp_path,
    )
    assert (again.folder, again.fingerprints) == (part.folder, part.fingerprints)
    assert set(shown) == {"hashing the text"}
    least = prepare_tokens(request, cache=tmp_path, until=time.monotonic() - 1)
    assert least.max_bytes == store.LEAST_PART


PROSE = st.text("The cat'sn1. \n\t\u3000é日👍", max_size=200)


@settings(deadline=None)
@given(documents=st.lists(PROSE, min_size=1, max_size=3))
def test_random_documents_too(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str]
) -> None:
    file = tmp_path_factory.getbasetemp() / "ids"
    with corpus_of(*documents) as corpus:
        encode_corpus(corpus, TOKENIZERS["bpe"], file, quiet)
    ids = np.fromfile(file, dtype=np.uint16).tolist()
    assert ids == encoded(TOKENIZERS["bpe"], documents)


MEASURE = PREPARE + "\nimport resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    part = "".join(f"Line {n % 5000}: {TEXT[n % 50 : n % 50 + 40]}\n" for n in range(150_000))
    peaks = []
    for times in (1, 10):
        with (tmp_path / "text.txt").open("w") as stream:
            for _ in range(times):
                stream.write(part)
        command = [sys.executable, "-c", MEASURE, str(tmp_path / "text.txt"), str(tmp_path)]
        shown = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
        peaks.append(int(shown.stdout.split()[-1]) / 1000)  # kB to MB
    assert peaks[1] - peaks[0] < 50, peaks


@pytest.mark.parametrize(
    ("rows", "reviews", "asked", "expected"),
    [
        ("a fine film", "A FINE Film.", None, True),
        ("a fine film", "A FINE Film.", False, False),
        ("a fine film", "a dull film.", None, False),
        ("a Fine film", "A FINE Film.", None, False),
    ],
)
def test_texts_are_in_lowercase_if_a_table_at_the_start_is(
    rows: str, reviews: str, asked: bool | None, expected: bool, tmp_path: Path
) -> None:
    table, text = tmp_path / "phrases.tsv", tmp_path / "reviews.txt"
    table.write_text("text\tlabel\n" + f"{rows}\t1\n" * 1_000)
    text.write_text(f"{reviews}\n" * 1_000)
    request = TextRequest(corpus=(str(table), str(text)), val_fraction=0, lowercase=asked)
    prepared = prepare_tokens(request, cache=tmp_path)
    assert isinstance(prepared.tokenizer, ByteLevel)
    assert prepared.tokenizer.lowercase is expected
    assert prepared.tokenizer.decode(prepared.train.tolist()).islower() is (
        expected or (rows + reviews).islower()
    )
    assert ("lowercase" in [choice.what for choice in prepared.choices]) is expected
    other = replace(request, corpus=(str(text), str(table)))  # the reviews come first
    assert prepare_tokens(other, cache=tmp_path).choices[0].what != "lowercase"
