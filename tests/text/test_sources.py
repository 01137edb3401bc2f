import contextlib
import functools
import gzip
import json
import os
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow
import pytest

from nanolm.errors import DataError, NanolmError, UsageError
from nanolm.text.corpus import read_corpus
from nanolm.text.decoding import Reading
from nanolm.text.labeled import LabelReading, read_labeled
from nanolm.text.sources import (
    EMBEDDED,
    EMBEDDED_PAIRS,
    Sources,
    find_sources,
    raise_all,
    skipped_files,
)


def find(*names: object, encoding: str = "utf-8") -> Sources:
    cache = Path(os.environ["NANOLM_CACHE"])
    return find_sources([str(name) for name in names], cache, lambda *_: None, encoding)


def names(found: Sources, folder: Path) -> list[str]:
    return [str(Path(source.name).relative_to(folder)) for source in found.files]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A typical messy folder."""
    files = {
        "b.txt": b"text",
        "a.md": b"# Title",
        "sub/c.jsonl": b'{"text": "row"}',
        "sub/deep/d.py": b"print('code is text')\n",
        "sub/notes": "kein Suffix: ä".encode(),
        "big": "日".encode() * 5000,  # the sniffed bytes end inside a character
        "latin.txt": b"caf\xe9",
        ".hidden.txt": b"hidden",
        ".git/config": b"hidden too",
        "photo.jpg": b"\xff\xd8\xff\xe0" + bytes(100),
        "old.dat": b"caf\xe9",
        "nul": b"a\0b",
        "nothing.txt": b"",
    }
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "dangling.txt").symlink_to("gone")
    os.mkfifo(tmp_path / "pipe.txt")
    return tmp_path


def test_a_folder_gives_its_texts_in_order_and_counts_the_rest(folder: Path) -> None:
    found = find(folder)
    texts = ["a.md", "b.txt", "big", "latin.txt", "sub/c.jsonl", "sub/notes", "sub/deep/d.py"]
    assert names(found, folder) == texts
    assert found.skipped == {"hidden": 2, "binary": 3, "no regular file": 2, "empty": 1}
    assert skipped_files(found.skipped) == ("skipped files: 3 binary, 1 empty, 2 hidden, 2 special")
    assert "old.dat" in names(find(folder, encoding="latin-1"), folder)


def test_patterns(folder: Path) -> None:
    assert names(find(folder / "*.md", folder / "sub" / "*.jsonl"), folder) == [
        "a.md",
        "sub/c.jsonl",
    ]
    assert len(find(folder / "**" / "*.py").files) == 1
    with pytest.raises(UsageError, match="does not match any file"):
        find(folder / "*.none")
    (folder / "odd[1].txt").write_text("a name is no pattern if the file is there")
    assert names(find(folder / "odd[1].txt"), folder) == ["odd[1].txt"]


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\0")
    with pytest.raises(DataError, match="contains no text; skipped files: 1 binary"):
        find(tmp_path)


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        find(tmp_path / "none.txt", "embedded:stori", "stories", "odd\x1bname")
    none, embedded, forgotten, odd = str(caught.value).split("\n")
    assert "none.txt does not exist" in none
    assert "embedded:tiny, embedded:stories" in embedded
    assert "did you mean embedded:stories?" in forgotten
    assert "rename the file" in odd


def test_the_mildest_exit_code_wins() -> None:
    problems: list[NanolmError] = [DataError("data"), UsageError("usage")]
    with pytest.raises(UsageError, match="data\nusage"):
        raise_all(problems)
    raise_all([])


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(DataError, match="cannot be read"):
        find(tmp_path / "a")


def test_ten_thousand_small_files(tmp_path: Path) -> None:
    for number in range(10_000):
        (tmp_path / f"{number:05}.txt").write_text(f"document {number}")
    found = find(tmp_path)
    assert len(found.files) == 10_000
    with read_corpus(found, Reading(), tmp_path) as corpus:
        assert corpus.documents == 10_000
        assert corpus.read(0, 22) == b"\xffdocument 0\xffdocument 1"


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="needs /dev/fd")
def test_a_pipe_is_read_once_and_kept(tmp_path: Path) -> None:
    """As in `nanolm train <(zcat *.gz)`."""
    reader, writer = os.pipe()
    text = b"through a pipe\n" * 50_000

    def write() -> None:
        with open(writer, "wb") as stream:
            stream.write(text)

    thread = threading.Thread(target=write)
    thread.start()
    found = find(f"/dev/fd/{reader}")
    thread.join()
    os.close(reader)
    assert found.files[0].digest() == found.files[0].digest()
    with read_corpus(found, Reading(), tmp_path) as corpus:
        assert corpus.size == len(text)


def test_a_pipe_that_nobody_writes_to_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="no text found"):
        read_corpus(find(tmp_path / "pipe"), Reading(), tmp_path)


def test_stdin() -> None:
    code = (
        "import os; from pathlib import Path; from nanolm.text.sources import find_sources\n"
        "found = find_sources(['-'], Path(os.environ['NANOLM_CACHE']), print)\n"
        "print(found.files[0].size(), found.files[0].name)"
    )
    shown = subprocess.run([sys.executable, "-c", code], input=b"x" * 100_000, capture_output=True)
    assert shown.stdout == b"100000 stdin\n", shown.stderr


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


def test_an_address_is_read_and_its_checksum_told(tmp_path: Path) -> None:
    (tmp_path / "book.txt.gz").write_bytes(gzip.compress(b"a book from afar"))
    handler = functools.partial(Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/book.txt.gz"
        found = find(address)
        server.shutdown()
    assert found.files[0].name == address
    assert found.files[0].digest() in found.notes[0]
    with read_corpus(find(address), Reading(), tmp_path) as corpus:  # without a server
        assert corpus.read(0, 99) == b"\xffa book from afar"


@pytest.mark.parametrize("name", sorted({*EMBEDDED} - {*EMBEDDED_PAIRS}))
def test_embedded(name: str, tmp_path: Path) -> None:
    with read_corpus(find(f"embedded:{name}"), Reading(), tmp_path) as corpus:
        assert corpus.size > 4_000


def save_dataset(folder: Path, *shards: list[str]) -> None:
    """As `save_to_disk` of the `datasets` library does."""
    folder.mkdir(parents=True)
    names = [f"data-{n:05}-of-{len(shards):05}.arrow" for n in range(len(shards))]
    for name, texts in zip([*names, "cache-1.arrow"], [*shards, ["cached"]], strict=True):
        table = pyarrow.table({"text": texts, "label": [n % 2 for n in range(len(texts))]})
        with pyarrow.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table)
    (folder / "dataset_info.json").write_text('{"features": {"text": {"dtype": "string"}}}')
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": None}))


def documents_of(folder: Path) -> list[str]:
    with read_corpus(find(folder), Reading(), folder.parent) as corpus:
        return corpus.read(0, corpus.length).decode(errors="replace").split("\ufffd")[1:]


def test_a_saved_dataset(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    save_dataset(one, ["a", "b"], ["c"], ["d"])
    assert documents_of(one) == ["a", "b", "c", "d"]
    save_dataset(two / "train", ["a text", "b text", "c text", "d text"])
    save_dataset(two / "test", ["e text"])
    (two / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert documents_of(two) == ["a text", "b text", "c text", "d text"]
    assert documents_of(two / "test") == ["e text"]
    (note,) = find(two).notes
    assert note == f"{two}: reading the split train, not test; pass {two}/test to read another"
    labeled = read_labeled([str(two)], LabelReading(), lambda *_: None)
    assert labeled.texts == documents_of(two)
    assert labeled.labels == ["0", "1", "0", "1"]
    assert note in labeled.notes


def test_a_saved_dataset_that_is_damaged(tmp_path: Path) -> None:
    save_dataset(tmp_path / "one", ["a"], ["b"])
    (tmp_path / "one/data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"one is incomplete: .* 'data-00001-of-00002\.arrow'"):
        find(tmp_path / "one")
    (tmp_path / "secret").write_text("secret")
    for state in ('{"_data_files": [{"filename": "../secret"}]}', "[" * 100_000, "{}", "\xff"):
        (tmp_path / "one/state.json").write_text(state)
        with contextlib.suppress(DataError):
            found = find(tmp_path / "one").files
            assert all(source.path.parent == tmp_path / "one" for source in found)


def test_a_dataset_saved_by_the_library(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"text": [f"text {n}" for n in range(50)]})
    whole.save_to_disk(tmp_path / "one", num_shards=3)
    saved = datasets.load_from_disk(tmp_path / "one")
    saved.map(lambda row: {"text": row["text"].upper()})  # leaves a cache beside the data
    assert documents_of(tmp_path / "one") == list(saved["text"])
    parts = whole.train_test_split(10, seed=1)
    parts.save_to_disk(tmp_path / "two")
    assert documents_of(tmp_path / "two") == list(parts["train"]["text"])
