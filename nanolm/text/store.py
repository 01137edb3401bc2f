"""From the names of texts to token ids on the disk, once: afterwards they are only mapped.

    >>> prepared = prepare_tokens(Request(corpus=("embedded:tiny",)))
    >>> prepared.train[:8], prepared.tokenizer.decode(prepared.train[:8])

What was prepared is kept in the cache under a key made of everything it depends on: the contents
of the files, how they are read and split, and the tokenizer that was asked for. It becomes visible
by one rename, when it is whole and on the disk (`nanolm.files`), so a kill leaves nothing that a
later run would trust; and whoever prepares it holds a lock, so two runs do the work once.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nanolm import files
from nanolm.choice import Choice, Report
from nanolm.errors import DataError, ModelError
from nanolm.machine import available_threads, cache_folder
from nanolm.text.corpus import HELD_OUT, Corpus, read_corpus
from nanolm.text.crew import POSSIBLE, Crew, Range, in_order
from nanolm.text.documents import Reading
from nanolm.text.encoding import encode_part, token_type
from nanolm.text.loading import load_tokenizer
from nanolm.text.sources import Source, Sources, find_sources, skipped_files
from nanolm.text.tokenizer import ByteLevel, Tokenizer
from nanolm.text.tokens import Store
from nanolm.text.vocabulary import make_tokenizer
from nanolm.text.words import MARK

FORMAT = 3  # to be raised whenever the same request would give other tokens
ALONE = 16_000_000  # bytes; fewer are encoded before other processes would have started
KEEP_DAYS = 30  # after so long without use, prepared texts are removed

Note = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """Which text, and how it becomes tokens."""

    corpus: tuple[str, ...]
    val: str | None = None
    val_fraction: float | None = None  # a tenth, or less of a large text
    reading: Reading = field(default_factory=Reading)
    tokenizer: str | Tokenizer | None = None  # a kind to be made, one that is there, or chosen
    vocab_size: int | None = None
    most_doublings: int | None = None  # of it, where the text is too long for the time,
    measured: bool = True  # which is long enough to find out its size


@dataclass(frozen=True)
class Prepared:
    """Text that is ready to be learned from."""

    tokenizer: Tokenizer
    train: Store
    val: Store
    size: int  # bytes of training text
    documents: int
    prompt: str  # how the held-out text begins
    choices: list[Choice]
    fingerprints: dict[str, str]  # of corpus, validation and tokenizer
    folder: Path  # where it lies


def prepare_tokens(
    request: Request,
    report: Report = lambda *_: None,
    note: Note = lambda text: None,
    cache: Path | None = None,
) -> Prepared:
    """The tokens of `request`: from the cache, or made and put there."""
    cache = cache or cache_folder()
    sources, validation = find_texts(request, cache, report, note)
    stamps = _stamps(sources, validation)
    key, fingerprints = _key(request, sources, validation, report)
    parent = cache / "tokens"
    folder = parent / key
    with files.locked(parent / f"{key}.lock", lambda: note("another run prepares this text")):
        files.sweep(parent, key)
        if _whole(folder, note):
            return open_tokens(folder, request.tokenizer, fingerprints)
        _remove_old(parent)

        def write(temporary: Path) -> None:
            _prepare(request, sources, validation, temporary, cache, report)
            if _stamps(sources, validation) != stamps:  # then the key is not that of this text
                raise DataError("the text changed while it was being read; run the command again")

        return open_tokens(files.commit(parent, key, write), request.tokenizer, fingerprints)


def _stamps(sources: Sources, validation: Sources | None) -> list[tuple[int, int]]:
    files_ = sources.files + (validation.files if validation else [])
    return [source.stamp() for source in files_]


def find_texts(
    request: Request, cache: Path, report: Report, note: Note
) -> tuple[Sources, Sources | None]:
    """The files of a request, training and validation."""
    encoding = request.reading.encoding
    sources = find_sources(request.corpus, cache, report, encoding)
    validation = find_sources([request.val], cache, report, encoding) if request.val else None
    for found in filter(None, (sources, validation)):
        for text in found.notes:
            note(text)
        if found.skipped.total():
            note(f"{len(found.files):,} files to read; {skipped_files(found.skipped)}")
    return sources, validation


def _key(
    request: Request, sources: Sources, validation: Sources | None, report: Report
) -> tuple[str, dict[str, str]]:
    def identity(found: Sources) -> str:
        total, done = found.size(), 0
        rows: list[Any] = [asdict(request.reading)]
        for source in found.files:
            rows.append((source.suffix, source.separator, _digest(source)))
            done += source.size()
            report("looking at the text", done, total)
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    corpus = identity(sources)
    held_out = identity(validation) if validation else f"{corpus} {request.val_fraction!r}"
    tokenizer = request.tokenizer
    kind = tokenizer.fingerprint() if isinstance(tokenizer, Tokenizer) else tokenizer
    parts = [FORMAT, corpus, held_out, kind, request.vocab_size]
    if kind in (None, "bpe") and request.vocab_size is None:
        parts += [request.most_doublings, request.measured]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    return key, {"corpus": corpus, "validation": held_out}


def _digest(source: Source) -> str:
    try:
        return source.digest()
    except OSError as error:
        raise DataError(f"{source.name} cannot be read: {error.strerror}") from None


def _prepare(
    request: Request,
    sources: Sources,
    validation: Sources | None,
    folder: Path,
    cache: Path,
    report: Report,
) -> None:
    with contextlib.ExitStack() as stack:
        corpus = stack.enter_context(read_corpus(sources, request.reading, cache, report))
        if validation is None:
            held_out = corpus
            train, val = corpus.split(request.val_fraction)
        else:
            held_out = stack.enter_context(read_corpus(validation, request.reading, cache, report))
            train, val = (0, corpus.length), (0, held_out.length)
        start = held_out.read(val[0], min(val[1], val[0] + 400)).strip(MARK)
        if not start or not corpus.read(train[0], min(train[1], train[0] + 400)).strip(MARK):
            raise DataError(
                f"{', '.join(request.corpus)}: {corpus.size} bytes are too little to train on and "
                "hold some out; give at least a few sentences"
            )
        choices: list[Choice] = []
        if validation is None and request.val_fraction is None and corpus.length > 10 * HELD_OUT:
            shown = f"{(val[1] - val[0]) / 1e6:.1f} MB"
            choices.append(Choice("held out", shown, "the end of the text: enough to measure by"))
        if isinstance(request.tokenizer, Tokenizer):
            tokenizer = request.tokenizer
        else:
            tokenizer, chosen = make_tokenizer(
                corpus,
                train,
                request.tokenizer,
                request.vocab_size,
                report,
                request.most_doublings,
                request.measured,
            )
            choices += chosen
        (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        encode_corpus(corpus, train, tokenizer, folder / "train.bin", report)
        encode_corpus(held_out, val, tokenizer, folder / "val.bin", report)
        beginning = start.split(MARK)[0].decode(errors="ignore")[:40]
        facts = {
            "size": train[1] - train[0],
            "documents": corpus.documents,
            "prompt": " ".join(beginning.split(" ")[:3]),
            "choices": [vars(choice) for choice in choices],
        }
        (folder / "text.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def encode_corpus(
    corpus: Corpus,
    part: Range,
    tokenizer: Tokenizer,
    file: Path,
    report: Report = lambda *_: None,
    threads: int | None = None,
) -> int:
    """Write the ids of a part of the corpus, a start-of-text token before each document."""
    threads = threads or available_threads()
    start, stop = part
    # Two processes encode a third faster than two threads, but take half a second to start.
    together = isinstance(tokenizer, ByteLevel) and stop - start > ALONE and threads > 1
    encode = partial(encode_part, tokenizer)
    parts = corpus.parts(start, stop, whole=not tokenizer.cuttable)
    written = 0
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(file.open("wb"))
        if corpus.read(start, start + 1) != MARK:  # held-out text that begins amid a document
            written += stream.write(encode(MARK))
        if together and POSSIBLE:
            copy = stack.enter_context(tempfile.NamedTemporaryFile("w", encoding="utf-8"))
            copy.write(tokenizer.to_json())
            copy.flush()
            crew = Crew("nanolm.text.encoding", corpus.file, threads, copy.name)
            answers = stack.enter_context(crew).work(parts)
        else:
            pool = stack.enter_context(ThreadPoolExecutor(threads))
            answers = in_order(pool, threads, lambda range_: encode(corpus.read(*range_)), parts)
        for (_, done), ids in answers:
            written += stream.write(ids)
            report("encoding", done - start, stop - start)
    return written // np.dtype(token_type(tokenizer)).itemsize


def _whole(folder: Path, note: Note) -> bool:
    """Has it been prepared before, and is it still as it was?"""
    try:
        files.verify(folder)
    except ModelError as error:
        if folder.exists():
            note(f"{error}; preparing the text again")
            files.discard(folder)
        return False
    return True


def open_tokens(
    folder: Path,
    tokenizer: str | Tokenizer | None = None,
    fingerprints: dict[str, str] | None = None,
) -> Prepared:
    """What was prepared there."""
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = load_tokenizer(folder)
    os.utime(folder)  # it is in use
    facts = json.loads((folder / "text.json").read_text(encoding="utf-8"))
    return Prepared(
        tokenizer=tokenizer,
        train=mapped(folder / "train.bin", tokenizer),
        val=mapped(folder / "val.bin", tokenizer),
        size=facts["size"],
        documents=facts["documents"],
        prompt=facts["prompt"],
        choices=[Choice(**choice) for choice in facts["choices"]],
        fingerprints={**(fingerprints or {}), "tokenizer": tokenizer.fingerprint()},
        folder=folder,
    )


def mapped(file: Path, tokenizer: Tokenizer) -> Store:
    return np.asarray(np.memmap(file, dtype=token_type(tokenizer), mode="r"))


def _remove_old(parent: Path) -> None:
    """Remove what was not used for long, and what a kill left half done."""
    for folder in parent.iterdir():
        days = KEEP_DAYS if not folder.name.startswith(".") else 1
        if folder.is_dir() and time.time() - folder.stat().st_mtime > days * 86_400:
            files.discard(folder)
