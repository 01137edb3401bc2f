"""Files to documents, and documents to a training and a validation part.

    >>> corpus = read_corpus(["embedded:tiny"])
    >>> training, validation = corpus.split(0.1)

A file is one document, or many where a separator line is named. Text is UTF-8, with or without
a byte-order mark; line ends become LF. What cannot be read is reported with file, offset and
what to do, all files at once.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from nanolm.errors import DataError, NanolmError, UsageError

EMBEDDED = {  # name: (file, document separator, what it is)
    "tiny": ("tiny.txt", None, "5 kB of simple sentences over a dozen words"),
    "stories": ("stories.txt", "***", "1 MB of short stories"),
}
SCHEME = "embedded:"


@dataclass(frozen=True)
class Corpus:
    """Documents in the order of the files they came from."""

    documents: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of text as UTF-8."""
        return sum(len(document.encode()) for document in self.documents)

    def fingerprint(self) -> str:
        """Equal for equal documents: what a run is tied to."""
        digest = hashlib.sha256()
        for document in self.documents:
            data = document.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()

    def split(self, fraction: float) -> "tuple[Corpus, Corpus]":
        """Everything before the last `fraction` of the text, and that last stretch, whole.

        The cut falls between documents if there is a gap near it, else between lines, else
        between words, else between characters.
        """
        sizes = [len(document) for document in self.documents]
        target = round(sum(sizes) * (1 - fraction))
        near = sum(sizes) * fraction / 2
        ends = list(accumulate(sizes))[:-1]
        nearest = min(ends, key=lambda end: abs(end - target), default=None)
        if nearest is not None and abs(nearest - target) <= near:
            count = ends.index(nearest) + 1
            return Corpus(self.documents[:count]), Corpus(self.documents[count:])
        count = sum(end <= target for end in ends)  # the documents wholly before the cut
        document = self.documents[count]
        cut = target - sum(sizes[:count])
        for gap in ("\n", " "):
            found = document.rfind(gap, max(0, round(cut - near)), cut)
            if found >= 0:
                cut = found + 1
                break
        before, after = document[:cut], document[cut:]
        return (
            Corpus(tuple(part for part in (*self.documents[:count], before) if part)),
            Corpus(tuple(part for part in (after, *self.documents[count + 1 :]) if part)),
        )


def read_corpus(paths: Sequence[str], separator: str | None = None) -> Corpus:
    """Read every path; a line that is just `separator` parts documents."""
    documents: list[str] = []
    problems: list[NanolmError] = []
    for path in paths:
        try:
            file, own_separator = locate(path)
            documents += _documents(_read(file), separator or own_separator)
        except NanolmError as error:
            problems.append(error)
    if problems:
        worst = min(problems, key=lambda problem: problem.exit_code)
        raise type(worst)("\n".join(str(problem) for problem in problems))
    if not documents:
        names = ", ".join(paths)
        raise DataError(f"{names}: no text in there; give a file with at least a few sentences")
    return Corpus(tuple(documents))


def locate(path: str) -> tuple[Path, str | None]:
    """The file that `path` names, and the document separator it is known to have."""
    if not path.startswith(SCHEME):
        if not path.isprintable():
            raise UsageError(f"{path!r}: rename the file; its name is not plain text")
        return Path(path), None
    name = path.removeprefix(SCHEME)
    if name not in EMBEDDED:
        known = ", ".join(SCHEME + name for name in EMBEDDED)
        raise UsageError(f"{path}: no such embedded corpus; there are {known}")
    file, separator, _ = EMBEDDED[name]
    return embedded_file(file), separator


def embedded_file(name: str) -> Path:
    """A file of the data folder: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "data" / name
    return installed if installed.exists() else package.parent / "data" / name


def _read(file: Path) -> str:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        hint = f"; did you mean {SCHEME}{file.name}?" if file.name in EMBEDDED else ""
        raise UsageError(f"{file} does not exist{hint}") from None
    except IsADirectoryError:
        raise UsageError(f"{file} is a folder; name the files in it: {file}/*.txt") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "LATIN1"
        offset = error.start + (3 if data.startswith(b"\xef\xbb\xbf") else 0)
        line = data.count(b"\n", 0, offset) + 1
        raise DataError(
            f"{file} is not UTF-8: byte 0x{data[offset]:02x} at offset {offset:,} (line {line:,}); "
            f"convert it first, for example: iconv -f {encoding} -t UTF-8 {file} > utf8.txt"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _documents(text: str, separator: str | None) -> list[str]:
    if separator is None:
        parts = [text]
    else:
        parts = re.split(rf"(?m)^[ \t]*{re.escape(separator)}[ \t]*(?:\n|\Z)", text)
    return [part for part in parts if part.strip()]
