"""Files that are not text are refused, whatever encoding is given."""

import io
import random
import tarfile
import zipfile
from pathlib import Path

import pytest

from nanolm.errors import DataError
from nanolm.text.decoding import Reading
from nanolm.text.documents import documents
from nanolm.text.labeled import LabelReading, read_labeled
from nanolm.text.source import TextSource
from nanolm.text.sources import find_sources


def zipped(*names: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in names:
            archive.writestr(name, "application/epub+zip" if name == "mimetype" else "x" * 100)
    return stream.getvalue()


def packed() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return stream.getvalue()


NOISE = random.Random(1).randbytes(20_000)
FILES = {
    "thesis.pdf": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n" + NOISE, "pdftotext .*thesis.pdf"),
    "essay.docx": (zipped("[Content_Types].xml", "word/document.xml"), "Word document.*plain text"),
    "book.epub": (zipped("mimetype", "OEBPS/1.xhtml"), r"EPUB book.*pandoc .*book\.epub"),
    "texts.zip": (zipped("a.txt", "b.txt"), "ZIP archive.*extract it and pass the folder"),
    "texts.tar.gz": (packed(), "tar archive.*extract it and pass the folder"),
    "old.doc": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(512), "Office document.*plain text"),
    "photo.png": (b"\x89PNG\r\n\x1a\n" + NOISE, "PNG image"),
    "program.exe": (b"MZ\x90\0\x03\0\0\0" + NOISE, "Windows executable"),
    "unknown.bin": (NOISE, "full of control characters"),
    "zeros.txt": (b"text" * 10 + bytes(1000), "full of control characters|UTF-16"),
    "bare-utf-16.txt": (("Plain words.\n" * 100).encode("utf-16-le"), "--encoding utf-16-le"),
}


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
@pytest.mark.parametrize("name", FILES)
def test_it_is_refused(name: str, encoding: str, tmp_path: Path) -> None:
    data, message = FILES[name]
    file = tmp_path / name
    file.write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        list(documents(TextSource(str(file), file), Reading(encoding=encoding)))
    assert "latin-1" not in str(caught.value)
    with pytest.raises(DataError, match=message):
        read_labeled([str(file)], LabelReading(encoding=encoding), lambda *how_far: None)


def test_in_a_folder_it_is_skipped(tmp_path: Path) -> None:
    for name, (data, _) in FILES.items():
        if not name.endswith((".txt", ".gz")):
            (tmp_path / name).write_bytes(data)
    (tmp_path / "café").write_bytes("Un café crème".encode("latin-1"))
    found = find_sources([str(tmp_path)], tmp_path, lambda *how_far: None, "latin-1")
    assert [source.path.name for source in found.files] == ["café"]


@pytest.mark.parametrize(
    "text",
    [
        "\x1b[31mred\x1b[0m and \x0c a new page\n" * 50,
        "a NUL \0 here and there in a long line of text\n" * 50,
        "PK is a short word, and MZ too",
        "\0\x01\x02",
    ],
)
def test_odd_text_is_still_text(text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(text)
    assert "".join(part for _, part in documents(TextSource("a.txt", file), Reading())) == text
