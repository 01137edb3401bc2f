"""Decompression bombs, devices, deep JSON, and the messages that quote them."""

import bz2
import contextlib
import gzip
import json
import lzma
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Cli

from nanolm.errors import DataError, NanolmError, UsageError, did_you_mean
from nanolm.formats import abridged, listed
from nanolm.text import bounds
from nanolm.text.bounds import VARIABLE, ExpansionLimit
from nanolm.text.corpus import read_corpus
from nanolm.text.decoding import Reading
from nanolm.text.labeled import LabelReading, read_labeled
from nanolm.text.sources import find_sources

SMALL = 20_000  # bytes that are always allowed in these tests
LINE = b"all work and no play makes Jack a dull boy\n"
ROOM = 1_500_000_000  # bytes of address space that reading a bomb may take


def quiet(what: str, done: int, total: int) -> None:
    pass


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "ALWAYS_ALLOWED", SMALL)


def read(file: Path, **reading: str) -> int:
    sources = find_sources([str(file)], file.parent, quiet)
    with read_corpus(sources, Reading(**reading), file.parent) as corpus:
        return corpus.size


def zstd_compress(data: bytes) -> bytes:
    zstd = pytest.importorskip("backports.zstd")
    compressed: bytes = zstd.compress(data)
    return compressed


PACKED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd_compress,
}


@pytest.mark.parametrize(
    ("kind", "ending"),
    [
        *((".txt", ending) for ending in PACKED),
        *((kind, ".gz") for kind in (".jsonl", ".csv", ".tsv", ".parquet", "")),
    ],
)
def test_a_packed_text_may_not_unfold_without_end(
    kind: str, ending: str, tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"bomb{kind}{ending}"
    row = b'{"text": "all work and no play"}\n' if kind == ".jsonl" else LINE
    file.write_bytes(PACKED[ending](row * 10_000))
    with pytest.raises(DataError, match=r"bomb.* expands to more than .*MAX_UNPACKED=") as caught:
        read(file, text_column="1")
    if kind == ".txt":
        assert str(file.stat().st_size) in str(caught.value).replace(",", "")
        monkeypatch.setenv(VARIABLE, "1000000")
        assert read(file) == 10_000 * len(LINE)


@pytest.mark.parametrize("ending", [".gz", ".xz"])
def test_labeled_texts_may_not_either(ending: str, tmp_path: Path, small: None) -> None:
    for name, row in {"a.csv": b"good,1\nbad,0\n", "b.txt": b"__label__x fine\n"}.items():
        file = tmp_path / (name + ending)
        file.write_bytes(PACKED[ending](row * 10_000))
        with pytest.raises(DataError, match="expands to more than"):
            read_labeled([str(file)], LabelReading(), quiet)


def test_many_small_bombs_are_one_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "ALWAYS_ALLOWED", 200_000)
    folder = tmp_path / "bombs"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt.xz").write_bytes(lzma.compress(LINE * 4_000))
    with pytest.raises(DataError, match=r"0.txt.xz, .*\(20 in all\) .* expands to"):
        read(folder)


def test_what_people_have_is_read(tmp_path: Path, small: None) -> None:
    """A log that compresses to a fiftieth, and a few kilobytes that compress to almost nothing."""
    dice = random.Random(1)
    log = b"".join(
        b"Nov 17 host kernel: link %d is up\n" % dice.choice([1, 2]) for _ in range(30_000)
    )
    for name, data in {"log": log, "few": LINE * (SMALL // len(LINE))}.items():
        file = tmp_path / f"{name}.txt.xz"
        file.write_bytes(lzma.compress(data))
        assert read(file) == len(data)
    assert len(log) > 50 * (tmp_path / "log.txt.xz").stat().st_size


def test_the_variable_is_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "much")
    with pytest.raises(UsageError, match="much: must be a number of bytes"):
        ExpansionLimit("a", 1)


# Tables -------------------------------------------------------------------------------------------


def parquet_file(file: Path, values: list[str], rows: int, **how: object) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    indices = pa.array([n % len(values) for n in range(1000)], pa.int32())
    column = pa.DictionaryArray.from_arrays(indices, pa.array(values)).cast(pa.string())
    table = pa.table({"text": column, "label": pa.array(["x", "y"] * 500)})
    whole = pa.concat_tables([table] * (rows // 1000)).combine_chunks()
    parquet.write_table(whole, file, compression="zstd", **how)


def limited(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`nanolm` in a process with little memory."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (ROOM, ROOM))

    return subprocess.run(
        [sys.executable, "-m", "nanolm", *map(str, arguments)],
        preexec_fn=limit,
        cwd=cwd,
        text=True,
        capture_output=True,
        timeout=100,
    )


def test_parquet_that_unfolds_is_refused_in_little_memory(tmp_path: Path) -> None:
    file = tmp_path / "bomb.parquet"
    parquet_file(file, ["a"], 5_000_000)
    assert file.stat().st_size < 100_000
    for command in (["data", "check"], ["finetune"]):
        result = limited(*command, file, cwd=tmp_path)
        assert result.returncode == 3, result.stderr
        assert "expands to more than 256,000,000 bytes" in result.stderr


@pytest.mark.parametrize(
    "how", [{}, {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"}]
)
def test_long_values_that_parquet_keeps_once(
    how: dict[str, object], tmp_path: Path, small: None
) -> None:
    file = tmp_path / "long.parquet"
    parquet_file(file, ["a" * 1000], 5_000, **how)
    with pytest.raises(DataError, match="expands to more than"):
        read(file)
    with pytest.raises(DataError, match="expands to more than"):
        read_labeled([str(file)], LabelReading(), quiet)


def test_a_list_in_parquet_that_has_no_end(tmp_path: Path, small: None) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "list.parquet"
    values = pa.ListArray.from_arrays(pa.array([0, 1_000_000], pa.int32()), pa.nulls(1_000_000))
    parquet.write_table(pa.table({"text": values.cast(pa.list_(pa.int8()))}), file)
    with pytest.raises(DataError, match="expands to more than"):
        read(file)


@pytest.mark.parametrize("layout", ["new_stream", "new_file"])
def test_arrow_that_unfolds(layout: str, tmp_path: Path, small: None) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import ipc

    def written(name: str, table: object) -> Path:
        file = tmp_path / name
        options = ipc.IpcWriteOptions(compression="zstd")
        with getattr(ipc, layout)(file, table.schema, options=options) as writer:  # type: ignore[attr-defined]
            writer.write_table(table)
        return file

    good = written("good.arrow", pa.table({"text": ["a cat", "a dog"] * 10}))
    assert read(good) == 100
    wide = pa.array(["wide" * 100]).dictionary_encode()
    many = pa.DictionaryArray.from_arrays(pa.array([0] * 5000, pa.int8()), wide.dictionary)
    bombs = {
        "buffer.arrow": pa.table({"text": ["a" * 1000] * 2_000}),
        "nulls.arrow": pa.table({"text": pa.nulls(1 << 26)}),
        "dictionary.arrow": pa.table({"text": many}),
    }
    for name, table in bombs.items():
        file = written(name, table)
        with pytest.raises(DataError, match="expands to more than"):
            read(file)
    data = bytearray(good.read_bytes())
    for place in range(0, len(data), 7):  # damaged anywhere: a result or a DataError
        data[place] ^= 0xFF
        (tmp_path / "damaged.arrow").write_bytes(data)
        with contextlib.suppress(NanolmError):
            read(tmp_path / "damaged.arrow")
        data[place] ^= 0xFF


# Devices ------------------------------------------------------------------------------------------


def test_devices_are_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "link.txt").symlink_to("/dev/zero")
    commands = (
        ["train"],
        ["data", "check"],
        ["tokenizer", "train", "--out", "x.json"],
        ["finetune"],
    )
    names = ("/dev/zero", "/dev/urandom", "/dev/full", "link.txt")
    for command, name in zip(commands, names, strict=True):
        result = cli(*command, name)
        assert result.returncode == 3, result.stderr
        assert f"{name} is a device" in result.stderr
    result = cli("train", "/dev/null")
    assert result.returncode == 3
    assert "no text found" in result.stderr


def test_stdin_that_is_a_device(tmp_path: Path) -> None:
    with open("/dev/zero", "rb") as zeros:
        command = [sys.executable, "-m", "nanolm", "data", "check", "-"]
        result = subprocess.run(command, stdin=zeros, capture_output=True, timeout=60, cwd=tmp_path)
    assert result.returncode == 3
    assert b"stdin is a device" in result.stderr


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="for Linux")
def test_files_without_a_size(tmp_path: Path, small: None) -> None:
    sources = find_sources(["/proc/version"], tmp_path, quiet)
    assert sources.files[0].size() > 10
    with pytest.raises(DataError, match=r"pagemap .* expands to"):
        find_sources(["/proc/self/pagemap"], tmp_path, quiet)


# JSON, wide tables, messages ----------------------------------------------------------------------


@pytest.mark.parametrize("depth", [101, 900, 990, 100_000])
@pytest.mark.parametrize(("opening", "end"), [('{"a":', "}"), ("[", "]")])
def test_deep_json_is_refused_by_its_line(
    depth: int, opening: str, end: str, cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "deep.jsonl"
    nested = opening * depth + '"x"' + end * depth
    file.write_text(f'{{"text": "a", "label": "b"}}\n{{"text": {nested}}}\n')
    for command in (["data", "check"], ["finetune"]) if depth == 900 else (["data", "check"],):
        result = cli(*command, file)
        assert result.returncode == 3
        assert "deep.jsonl, line 2 is nested more than 100 levels deep" in result.stderr
        assert len(result.stderr) < 500


def test_deep_arrow(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    kind, value = pa.string(), "x"
    for _ in range(60):
        kind, value = pa.struct([("a", kind)]), {"a": value}  # type: ignore[assignment]
    table = pa.table({"deep": pa.array([value] * 20, kind), "label": ["x", "y"] * 10})
    parquet.write_table(table, tmp_path / "deep.parquet")
    read_labeled([str(tmp_path / "deep.parquet")], LabelReading(), quiet)


def hostile_tables(folder: Path) -> dict[str, list[str]]:
    """Files, each with its options."""
    texts = {
        "wide.csv": ",".join(f"column{n}" for n in range(300_000)) + "\n" + ",".join("x" * 300_000),
        "names.csv": ",".join(c * 1_000_000 for c in "abc") + "\n1,2,3\n4,5,6\n",
        "many.csv": ",".join(f"c{n}" for n in range(9_000)) + "\n" + ",".join("7" * 9_000),
        "label.csv": "text,label\n" + f"good,{'x' * 10_000_000}\nbad,y\n",
        "labels.tsv": "text\tlabel\n" + "".join(f"a text\t{n}\n" for n in range(100_000)),
        "keys.jsonl": "".join(
            json.dumps({f"k{n}_{i}": i for i in range(20)}) + "\n" for n in range(1000)
        ),
        "key.jsonl": json.dumps({"k" * 1_000_000: "a", "j" * 1_000_000: "b"}) + "\n",
        "one.csv": "text,label\n" + f"good,{'x' * 900}\n" * 20,
        "code.csv": "text,la\x1b[31mbel\n" + "a b,\x1b]0;x\x07\n" * 20,
        "number.jsonl": '{"text": ' + "9" * 100_000 + "}\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return {name: ["--label-column", "label"] if name == "labels.tsv" else [] for name in texts}


def test_no_message_is_long(cli: Cli, tmp_path: Path) -> None:
    for name, options in hostile_tables(tmp_path).items():
        checked = [["data", "check", name]] if name in ("wide.csv", "key.jsonl") else []
        for command in (*checked, ["finetune", name, *options]):
            result = cli(*command)
            assert result.returncode in (2, 3), command
            assert len(result.stderr) < 6_000, command
            assert len(result.stdout) < 6_000, command
            assert name in result.stderr, command
            assert "Traceback" not in result.stderr, command
            assert "\x1b" not in result.stderr, command


def test_odd_names_of_files(cli: Cli, tmp_path: Path) -> None:
    names = ["a\nb" * 80, "\x1b[2J" * 60, "x" * 251 + ".txt", "\udcff.txt"]
    for name in names:
        (tmp_path / name).write_bytes(b"\xff\xfe\xfa" * 100)
        result = cli("data", "check", os.fsencode(name).decode("utf-8", "surrogateescape"))
        assert result.returncode in (2, 3)
        assert len(result.stderr) < 1_500
        assert "\x1b" not in result.stderr


def test_abridged() -> None:
    assert abridged("short") == "short"
    assert abridged("x" * 50 + "y" * 50, 10) == "xxxxx ... (100 characters) ... yyyyy"
    assert listed(["a", "b"]) == "a, b"
    assert listed(["a"] * 12, 2) == "a, a, ... (12 in all)"
    message = str(DataError("begin " + "x" * 10_000_000 + " end"))
    assert message.startswith("begin")
    assert message.endswith("end")
    assert len(message) < 5_000


def test_what_was_meant_is_found_in_no_time() -> None:
    assert did_you_mean("labl", ["label"]) == "; did you mean label?"
    assert did_you_mean("x" * 1_000_000, ["y" * 1_000_000] * 100_000) == ""
