"""Resolve the names that the user gave to the files to read.

A name is a file, a folder (everything in it that looks like text), a glob pattern, `-` for stdin,
an `http(s)://` URL, a Hugging Face dataset (`hf://owner/name`) or a text that comes with nanolm.
"""

import glob
import json
import os
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nanolm.choice import Report
from nanolm.errors import DataError, NanolmError, UsageError
from nanolm.formats import listed
from nanolm.text import STDIN
from nanolm.text.binary import binary_format, looks_binary
from nanolm.text.bounds import ExpansionLimit
from nanolm.text.documents import KNOWN_SUFFIXES, TABLES
from nanolm.text.source import COMPRESSIONS, TextSource

EMBEDDED = {  # name: (file, document separator, what it is)
    "tiny": ("tiny.txt", None, "5 kB of simple sentences built from a dozen words"),
    "stories": ("stories.txt", "***", "1 MB of short stories"),
    "reviews": ("reviews.tsv", None, "9,600 short reviews, each labeled positive or negative"),
    "dates": (
        "dates.tsv",
        None,
        "10,000 dates as people write them, paired with the form 1998-05-03",
    ),
    "veltish": (
        "veltish.tsv",
        None,
        "12,000 sentences, paired with translations into a made-up language",
    ),
}
EMBEDDED_PAIRS = ("dates", "veltish")  # of texts, rather than texts
SCHEME = "embedded:"
ADDRESSES = ("http://", "https://", "hf://")
# Of a dataset saved by `save_to_disk` of the `datasets` library.
DATASET_DICT, DATASET_INFO, STATE = "dataset_dict.json", "dataset_info.json", "state.json"
LARGEST_STATE = 10_000_000  # bytes; it lists the data files
SNIFFED = 8192  # bytes of a file that decide whether it is text


@dataclass
class Sources:
    files: list[TextSource] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)  # reason: files
    notes: list[str] = field(default_factory=list)
    until: float | None = None  # when to stop reading a pipe

    def size(self) -> int:
        """Bytes of all the files that still exist."""
        return sum(source.size() for source in self.files if source.copy or source.path.exists())


def find_sources(
    names: Sequence[str],
    cache: Path,
    report: Report,
    encoding: str = "utf-8",
    until: float | None = None,
) -> Sources:
    """Every file that `names` refers to; all problems are raised as one error. A pipe is read to
    its end, or until the `time.monotonic` time `until`."""
    sources = Sources(until=until)
    problems: list[NanolmError] = []
    for name in names:
        try:
            sources.files += _expand(name, sources, cache, report, encoding)
        except NanolmError as error:
            problems.append(error)
        except OSError as error:
            problems.append(DataError(f"{name} cannot be read: {error.strerror or error}"))
    raise_all(problems)
    return sources


def raise_all(problems: list[NanolmError]) -> None:
    """Raise all problems, if there are any, as one error."""
    if problems:
        worst = min(problems, key=lambda problem: problem.exit_code)
        lines = [*map(str, problems[:20])]
        if problems[20:]:
            lines.append(f"... and {len(problems[20:]):,} more problems like these")
        raise type(worst)("\n".join(lines))


def _expand(
    name: str, sources: Sources, cache: Path, report: Report, encoding: str
) -> Iterator[TextSource]:
    if name == STDIN:
        yield _copied("stdin", 0, cache, sources)
    elif name.startswith(SCHEME):
        name = name.removeprefix(SCHEME)
        if name not in EMBEDDED:
            known = ", ".join(SCHEME + name for name in EMBEDDED)
            raise UsageError(f"{SCHEME}{name}: no such embedded corpus; choose from {known}")
        yield TextSource(SCHEME + name, embedded_file(EMBEDDED[name][0]), EMBEDDED[name][1])
    elif name.startswith("hf://"):
        from nanolm.text.datasets import dataset_files  # slow to import

        for path in dataset_files(name, cache / "downloads", report):
            yield TextSource(f"{name} ({path.name})", path)
    elif name.startswith(ADDRESSES):
        from nanolm.download import checksum, fetch

        path = fetch(name, cache / "downloads", report)
        sources.notes.append(f"{name}: {path} (SHA-256 {checksum(path)})")
        yield TextSource(name, path)
    elif not name.isprintable():
        raise UsageError(f"{name!r} contains unprintable characters; rename the file")
    elif os.path.isdir(name):
        yield from _in_folder(Path(name), sources, encoding)
    elif os.path.lexists(name):
        yield _file(Path(name), cache, sources)
    elif glob.has_magic(name):
        matches = [match for match in glob.glob(name, recursive=True) if not os.path.isdir(match)]
        if not matches:
            raise UsageError(f"{name} does not match any file")
        # `**` follows links, even in circles: each file once, by its shortest name.
        files = {os.path.realpath(match): match for match in sorted(matches, key=len)[::-1]}
        yield from (_file(Path(match), cache, sources) for match in sorted(files.values()))
    else:
        hint = f"; did you mean {SCHEME}{name}?" if name in EMBEDDED else ""
        raise UsageError(f"{name} does not exist{hint}")


def _file(path: Path, cache: Path, sources: Sources) -> TextSource:
    status = path.stat()  # fails if it does not exist
    if stat.S_ISREG(status.st_mode) and status.st_size:
        return TextSource(str(path), path)
    # A pipe, as in `nanolm train <(zcat *.gz)`, can be read only once. It is opened without
    # blocking, since no one may ever write to it. Files in /proc have contents, but size 0.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb", buffering=0):
        return _copied(str(path), descriptor, cache, sources)


def _copied(name: str, descriptor: int, cache: Path, sources: Sources) -> TextSource:
    """Copy a stream into a temporary file that disappears with this process."""
    status = os.fstat(descriptor)
    device = stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)
    if device and not os.isatty(descriptor) and status.st_rdev != os.stat(os.devnull).st_rdev:
        raise DataError(f"{name} is a device, not text; pass a file, a folder or a pipe")
    no_size = stat.S_ISREG(status.st_mode) and not status.st_size
    limit = ExpansionLimit(name, 0) if no_size else None
    cache.mkdir(parents=True, exist_ok=True)
    copy = tempfile.TemporaryFile(dir=cache)  # noqa: SIM115
    while True:
        try:
            part = os.read(descriptor, 1 << 20)
        except BlockingIOError:  # there is a writer, but no data yet
            os.set_blocking(descriptor, True)
            continue
        if not part:
            break
        if limit:
            limit.add(len(part))
        if sources.until is not None and time.monotonic() > sources.until:
            copy.write(part[: part.rfind(b"\n") + 1 or part.rfind(b" ") + 1 or len(part)])
            size = f"{copy.tell() / 1e6:,.1f} MB"
            sources.notes.append(f"{name}: reading stopped after {size} for lack of time")
            break
        copy.write(part)
    copy.flush()
    return TextSource(name, Path(name), copy=copy)


def embedded_file(name: str) -> Path:
    """A file in the data folder: inside an installed package, or next to it in a checkout."""
    installed, checkout = (Path(__file__).parents[n] / "data" / name for n in (1, 2))
    return installed if installed.exists() else checkout


def _in_folder(folder: Path, sources: Sources, encoding: str) -> Iterator[TextSource]:
    """Everything below `folder` that looks like text, sorted; links to folders are not followed."""

    def fail(error: OSError) -> None:
        raise error

    kept = 0
    for parent, folders, files in os.walk(folder, onerror=fail):
        hidden = {name for name in (*folders, *files) if name.startswith(".")}
        sources.skipped["hidden"] += len(hidden)
        folders[:] = sorted(set(folders) - hidden)
        files = sorted(set(files) - hidden)
        if DATASET_DICT in files:
            files, folders[:] = [], _splits(Path(parent), folders, sources)
        elif {STATE, DATASET_INFO} <= set(files):
            files = _data_files(Path(parent), files)
        for name in files:
            source = TextSource(os.path.join(parent, name), Path(parent, name))
            if reason := _not_text(source, encoding):
                sources.skipped[reason] += 1
            else:
                kept += 1
                yield source
    if not kept:
        raise DataError(f"{folder} contains no text; {skipped_files(sources.skipped)}")


def _splits(folder: Path, splits: list[str], sources: Sources) -> list[str]:
    """Of a `DatasetDict` saved by the `datasets` library, the training split if there is one."""
    chosen = [name for name in splits if name == "train"] or splits
    if others := sorted(set(splits) - set(chosen)):
        also = f"pass {folder / others[0]} to read another"
        sources.notes.append(f"{folder}: reading the split train, not {listed(others)}; {also}")
    return chosen


def _data_files(folder: Path, files: list[str]) -> list[str]:
    """The files with the rows of such a `Dataset`; others beside them are descriptions or caches of
    `map`. All of them if this is something else."""
    try:
        if (folder / STATE).stat().st_size > LARGEST_STATE:
            return files
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        names = [str(each["filename"]) for each in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return files
    if missing := sorted(set(names) - set(files)):
        raise DataError(f"{folder} is incomplete: {STATE} lists {missing[0]!r}, which is not there")
    return names


def _not_text(source: TextSource, encoding: str) -> str | None:
    if not source.name.isprintable():
        return "oddly named"
    if not source.path.is_file():
        return "no regular file"
    if not source.size():
        return "empty"
    if source.suffix in TABLES or source.path.suffix in COMPRESSIONS:
        return None
    with source.open() as stream:
        start = stream.read(SNIFFED)
    if source.suffix in KNOWN_SUFFIXES:  # if it cannot be read, that is an error
        return None
    if binary_format(start, source.name):
        return "binary"
    try:
        text = start[: -4 if len(start) == SNIFFED else None].decode(encoding)
    except ValueError as error:
        cut_off = isinstance(error, UnicodeDecodeError) and error.start >= len(start) - 8
        return None if cut_off and len(start) == SNIFFED else "binary"
    return "binary" if looks_binary(text) or (b"\0" in start and encoding == "utf-8") else None


def skipped_files(skipped: Counter[str]) -> str:
    """ "skipped files: 3 binary, 1 hidden"."""
    shown = {"oddly named": "with unprintable names", "no regular file": "special"}
    counts = sorted((shown.get(reason, reason), count) for reason, count in skipped.items())
    parts = [f"{count:,} {reason}" for reason, count in counts if count]
    return f"skipped files: {', '.join(parts)}" if parts else "no files were skipped"
