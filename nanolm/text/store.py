"""Prepare texts as token ids on disk, once: later runs only memory-map them.

    >>> prepared = prepare_tokens(TextRequest(corpus=("embedded:tiny",)))

They are cached under a key made of everything they depend on: the contents of the files, how they
are read and split, and the tokenizer. A rename makes them visible once they are complete, so a kill
leaves nothing that a later run would trust. A lock keeps two runs from doing the same work.
"""

import contextlib
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from nanolm import files
from nanolm.choice import Choice, Report
from nanolm.errors import DataError, ModelError, NanolmError
from nanolm.formats import counted, listed
from nanolm.machine import available_threads, cache_folder
from nanolm.text import mix
from nanolm.text.corpus import Corpus, read_corpus
from nanolm.text.decoding import Reading
from nanolm.text.documents import TABLES, corpus_format, plain_json
from nanolm.text.encoding import dropped_characters, encode_part, token_type
from nanolm.text.partial import take_part, text_size
from nanolm.text.source import TextSource, blamed_on
from nanolm.text.sources import Sources, find_sources, raise_all, skipped_files
from nanolm.text.split import TO_CHOOSE_BY, HeldOut, at_the_end, concatenated, spread, take_out
from nanolm.text.tokenizer import ByteLevel, Tokenizer
from nanolm.text.tokenizer_files import load_tokenizer
from nanolm.text.tokens import Store
from nanolm.text.vocabulary import MEASURED_BYTES, make_tokenizer, unlikeness
from nanolm.text.words import MARK
from nanolm.text.workers import HAS_PREAD, WorkerPool, map_in_order

LEAST_TO_TRAIN_ON = 3  # bytes
FORMAT = 6  # increase this whenever the same request would give different tokens or reasons
ENCODED_ALONE = 16_000_000  # bytes; fewer are encoded before other processes would have started
KEY_LENGTH = 32
KEEP_DAYS = 30  # prepared texts are removed when unused for this long
PROBE_BYTES = 65_536  # sample to estimate how long preparing a text takes,
PROBE_VOCAB = 512  # with a small vocabulary
LEAST_LOWERCASE = 10_000  # characters that say whether a table is in lowercase
LEAST_PART = 1_000_000  # bytes: this takes about a second, and smaller texts are used whole
GRID = math.sqrt(2)  # between the sizes of such parts
MEASURED_CHOICES = (MEASURED_BYTES, 1_000_000, 250_000)  # bytes to measure vocabulary sizes on
MEASURING_COST = 2.5  # of measuring, relative to preparing the same bytes
MEASURED_SHARE = 0.35  # of the time, if there is not enough for everything

Note = Callable[[str], None]
# For training, one for each part of a mix, and, if given, for validation.
Texts = tuple[list[Sources], Sources | None]


@dataclass(frozen=True)
class TextRequest:
    corpus: tuple[str, ...]  # with weights, if it is a mix
    val: str | None = None
    val_fraction: float | None = None  # default: a tenth, or less of a large text; 0: nothing
    val_split: str = "spread"  # over the whole text, or its "end"
    reading: Reading = field(default_factory=Reading)
    tokenizer: str | Tokenizer | None = None  # a kind to train, an existing one, or None: chosen
    vocab_size: int | None = None
    most_doublings: int | None = None  # of the vocabulary, if the text is too long for the time
    measured: int = MEASURED_BYTES  # bytes to measure vocabulary sizes on; 0: no time for that
    seconds: float | None = None  # for training on a CPU, approximately; infinity on a GPU
    max_bytes: int | None = None  # of text; only part of a larger one is used
    lowercase: bool | None = False  # convert the text; None: chosen


@dataclass(frozen=True)
class Prepared:
    tokenizer: Tokenizer
    train: Store
    val: Store  # empty if nothing is held out
    size: int  # bytes of training text in an epoch
    tokens: int  # in an epoch; in a mix, some parts are passed over faster than others
    documents: int
    prompt: str  # the first words of the validation text
    shift: float  # how much harder validation text is than training text for an n-gram model
    choices: list[Choice]
    fingerprints: dict[str, str]  # of corpus, validation and tokenizer
    folder: Path
    max_bytes: int | None = None  # requested, or limited by time; None: all text is used
    total: int = 0  # bytes of text available, approximately
    dropped: str = ""  # a note about characters without a token
    parts: tuple[mix.Part, ...] = ()  # of a mix

    @property
    def validated_parts(self) -> list[mix.Part]:
        """The parts of a mix that have validation text of their own."""
        return [part for part in self.parts if len(self.val[part.val])]


def prepare_tokens(
    request: TextRequest,
    report: Report = lambda *_: None,
    note: Note = lambda text: None,
    cache: Path | None = None,
    until: float | None = None,
) -> Prepared:
    """The tokens of `request`, from the cache or newly prepared. Only part of the text is used if
    all of it could not be prepared by the `time.monotonic` time `until`."""
    cache = cache or cache_folder()
    parts, validation = find_texts(request, cache, report, note, until)
    sizes = [text_size(part) for part in parts]
    total = sum(sizes)
    by_time = request.max_bytes is None
    if until is not None:
        request = within(request, _all(parts), total, until - time.monotonic(), cache)
    if total <= (request.max_bytes or total):
        request = replace(request, max_bytes=None)
    limits = mix.share_out(request.max_bytes or total, sizes, mix.weights(request.corpus) or (1.0,))
    limited = zip(parts, limits, strict=True)
    parts = [take_part(part, request.reading, limit) for part, limit in limited]
    if validation is not None:
        validation = take_part(validation, request.reading, request.max_bytes)
    table = lowercase_table(request, _all(parts), cache) if request.lowercase is None else None
    if request.lowercase is None:
        request = replace(request, lowercase=table is not None)
    prepared = _prepared(request, (parts, validation), cache, report, note)
    if prepared.dropped:
        note(prepared.dropped)
    if table:
        reason = f"{table} has no capital letters; --no-lowercase keeps those of the other texts"
        prepared.choices.insert(0, Choice("lowercase", "on", reason))
    if request.max_bytes:
        prepared.choices.insert(0, part_used(_all(parts), total, by_time))
    return replace(prepared, max_bytes=request.max_bytes, total=total)


def _all(parts: list[Sources]) -> Sources:
    return Sources([source for part in parts for source in part.files])


def within(
    request: TextRequest, sources: Sources, size: int, seconds: float, cache: Path
) -> TextRequest:
    """Limit the request to as much of `size` bytes of text as can be prepared, with its vocabulary
    measured, in `seconds`. A sample shows how fast this machine is at the moment."""
    given = request.max_bytes
    measurable = request.vocab_size is None and request.tokenizer in (None, "bpe")
    each = _seconds_a_byte(request, sources, cache) if measurable or not given else None
    if each is None:
        return request
    if size > ENCODED_ALONE:  # several processes share the work
        each /= (1 + available_threads()) / 2
    most = float(given or max(LEAST_PART, seconds / each))
    size = min(size, given or size)
    # Spare time can all go into measuring the vocabulary.
    spare = max(MEASURED_SHARE * seconds, seconds - each * size) / (MEASURING_COST * each)
    measured = next((some for some in MEASURED_CHOICES if min(some, size, most) <= spare), 0)
    if size > most:
        most = max(LEAST_PART, most - MEASURING_COST * measured)
        # On a coarse grid, so that the same command finds what it prepared earlier.
        most = LEAST_PART * GRID ** int(math.log(most / LEAST_PART, GRID))
        request = replace(request, max_bytes=int(most))
    return replace(request, measured=measured)


def _seconds_a_byte(request: TextRequest, sources: Sources, cache: Path) -> float | None:
    tokenizer = request.tokenizer
    sample = take_part(sources, request.reading, PROBE_BYTES)
    start = time.monotonic()
    try:
        with read_corpus(sample, request.reading, cache) as corpus:
            if not isinstance(tokenizer, Tokenizer):
                vocab_size = PROBE_VOCAB if tokenizer in (None, "bpe") else None
                tokenizer, _ = make_tokenizer(corpus, tokenizer, vocab_size, lambda *_: None)
            for part in corpus.parts(whole=not tokenizer.cuttable):
                encode_part(tokenizer, corpus.read(*part))
            return (time.monotonic() - start) / corpus.length
    except (NanolmError, OSError):
        return None  # preparing all of it will report the problem


def lowercase_table(request: TextRequest, sources: Sources, cache: Path) -> str | None:
    """The name of the first file if it is a table of texts in lowercase, such as labeled phrases,
    while the other files have capital letters."""
    first, others = sources.files[:1], sources.files[1:]
    if not others or request.tokenizer not in (None, "bpe") or first[0].suffix not in TABLES:
        return None

    def sample(some: list[TextSource]) -> str:
        part = take_part(replace(sources, files=some), request.reading, PROBE_BYTES)
        with read_corpus(part, request.reading, cache) as corpus:
            return corpus.read(0, corpus.length).replace(MARK, b" ").decode()

    try:
        text = sample(first)
        found = len(text) >= LEAST_LOWERCASE and text.islower() and not sample(others).islower()
        return first[0].name if found else None
    except (NanolmError, OSError):
        return None  # preparing all of it will report the problem


def part_used(sources: Sources, total: int, by_time: bool) -> Choice:
    used = sum(source.limit or source.size() for source in sources.files)
    every = max((source.every for source in sources.files), default=1)
    how = f"one in {every} documents" if every > 1 else "passages spread over the text"
    why = "as much as there is time to prepare; raise --minutes or --max-bytes to use more"
    reason = f"{how}, {why if by_time else 'limited by --max-bytes'}"
    return Choice("text used", f"{used / 1e6:.3g} of {total / 1e6:,.3g} MB", reason)


def _prepared(
    request: TextRequest, texts: Texts, cache: Path, report: Report, note: Note
) -> Prepared:
    def stamps() -> list[tuple[int, int]]:
        every = [*texts[0], *filter(None, texts[1:])]
        return [source.stamp() for each in every for source in each.files]

    before = stamps()
    key, fingerprints, resolved = _key(request, texts, report)
    parent = cache / "tokens"
    alias = parent / f"{key}.alias"
    if alias.is_file() and (parent / (same := alias.read_text(encoding="utf-8"))).is_dir():
        key = same
    folder = parent / key
    with files.locked(parent / f"{key}.lock", lambda: note("another run is preparing this text")):
        files.sweep(parent, key)
        if _whole(folder, note):
            return open_tokens(folder, request.tokenizer, fingerprints, request.corpus)
        _discard_unused(parent)

        def write(temporary: Path) -> None:
            _prepare(request, texts, temporary, cache, report)
            if stamps() != before:  # the key belongs to the old text
                raise DataError("the text changed while it was being read; run the command again")
            # A resumed run asks for it by the size that was chosen. The alias is written first, so
            # that a kill leaves no prepared text without one.
            if resolved:
                size = load_tokenizer(temporary).vocab_size
                files.write_atomically(parent / f"{resolved(size)}.alias", key)

        files.commit(parent, key, write)
        return open_tokens(folder, request.tokenizer, fingerprints, request.corpus)


def _discard_unused(parent: Path) -> None:
    """Remove texts that have long been unused or that a kill left unfinished. Other processes may
    be doing the same; texts that they are using stay."""

    def unused(folder: Path) -> bool:
        days = 1 if folder.name.startswith(".") else KEEP_DAYS
        return folder.is_dir() and time.time() - folder.stat().st_mtime > days * 86_400

    for old in parent.iterdir():
        with contextlib.suppress(FileNotFoundError, files.InUse):
            if unused(old):
                key = old.name.removeprefix(files.TEMPORARY).removeprefix(files.TRASH)
                with files.locked(parent / f"{key[:KEY_LENGTH]}.lock"):
                    if unused(old):  # still
                        files.discard(old)


def find_texts(
    request: TextRequest, cache: Path, report: Report, note: Note, until: float | None = None
) -> Texts:
    """The files for training and validation. A pipe is read for a third of the time at most."""
    encoding = request.reading.encoding
    now = time.monotonic()
    enough = None if until is None else now + max(0.0, until - now) / 3
    names = mix.sources(request.corpus)
    parts: list[Sources] = []
    problems: list[NanolmError] = []
    for some in [[name] for name in names] if mix.weights(request.corpus) else [names]:
        try:
            parts.append(find_sources(some, cache, report, encoding, enough))
        except NanolmError as error:
            problems.append(error)
    raise_all(problems)
    validation = find_sources([request.val], cache, report, encoding) if request.val else None
    for each in filter(None, (*parts, validation)):
        for text in [*each.notes, *plain_json(each.files, request.reading)]:
            note(text)
        if each.skipped.total():
            note(f"{counted(len(each.files), 'file')} to read; {skipped_files(each.skipped)}")
    return parts, validation


def _key(
    request: TextRequest, texts: Texts, report: Report
) -> tuple[str, dict[str, str], Callable[[int], str] | None]:
    """The cache key, the fingerprints and, if the vocabulary is measured, a function from its size
    to the key of a request for that size."""

    def identity(sources: Sources) -> str:
        total, done = sources.size(), 0
        rows: list[Any] = [asdict(request.reading)]
        for source in sources.files:
            with blamed_on(source.name):
                rows.append((source.suffix, source.separator, source.digest()))
            if corpus_format(source, request.reading).name == "JSON":
                rows[-1] = ("JSON rows", *rows[-1])  # were read as plain text in 0.1.0
            done += source.size()
            report("hashing the text", done, total)
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    parts, validation = texts
    weights = mix.weights(request.corpus)
    identities = [identity(part) for part in parts]
    corpus = identities[0]
    if weights:
        corpus = hashlib.sha256(json.dumps(identities).encode()).hexdigest()
    corpus += " lowercase" if request.lowercase else ""
    held_out = identity(validation) if validation else f"{corpus} {request.val_fraction!r}"
    if validation is None and request.val_split != "end":  # the only split in 0.1.0
        held_out += f" {request.val_split}"
    kind = request.tokenizer
    kind = kind.fingerprint() if isinstance(kind, Tokenizer) else kind

    def named(*parts: Any) -> str:
        everything = json.dumps([FORMAT, corpus, held_out, *parts])
        return hashlib.sha256(everything.encode()).hexdigest()[:KEY_LENGTH]

    fingerprints = {"corpus": corpus, "validation": held_out}
    if kind in (None, "bpe") and request.vocab_size is None:
        sizes = (request.most_doublings, request.measured, request.seconds)
        key = named(kind, None, *sizes, *weights)
        return key, fingerprints, lambda size: named("bpe", size, *weights)
    trained = (
        weights if kind in (None, "bpe") else ()
    )  # other tokenizers do not depend on the weights
    return named(kind, request.vocab_size, *trained), fingerprints, None


def _prepare(request: TextRequest, texts: Texts, folder: Path, cache: Path, report: Report) -> None:
    training, validation = texts
    weights = mix.weights(request.corpus)
    with contextlib.ExitStack() as stack:
        how = (request.reading, cache, report, bool(request.lowercase))

        def opened(sources: Sources) -> Corpus:
            return stack.enter_context(read_corpus(sources, *how))

        parts = [opened(each) for each in training]
        choices: list[Choice] = []
        if validation is None:
            choose = at_the_end if request.val_split == "end" else spread
            held_out = [choose(part, request.val_fraction) for part in parts]
            choices.append(_held_out_choice(request, parts, held_out))
            vals = [
                stack.enter_context(take_out(part, out.ranges, cache))
                for part, out in zip(parts, held_out, strict=True)
            ]
        else:
            vals = [opened(validation)]
        start = next(each for each in (*vals, parts[0]) if each.length).read(0, 400)
        start = start.strip(MARK).strip()
        least = min(parts, key=lambda part: part.size)
        if not start or least.size < LEAST_TO_TRAIN_ON:
            few = f"{counted(least.size, 'byte')} of text is too little to train on"
            few += "; use at least a few sentences"
            names = [request.corpus[parts.index(least)]] if weights else request.corpus
            raise DataError(f"{listed(names, 5)}: {few}")
        tokenizer = request.tokenizer
        if not isinstance(tokenizer, Tokenizer):
            vocabulary = (request.most_doublings, request.measured, request.seconds)
            sizes = (request.vocab_size, report, *vocabulary)
            corpus = stack.enter_context(concatenated(parts, cache)) if weights else parts[0]
            weighted = [*zip(parts, weights, strict=True)] if weights else []
            tokenizer, chosen = make_tokenizer(corpus, tokenizer, *sizes, weighted, how[-1])
            choices += chosen
        (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        counts = []
        for file, some in (("train.bin", parts), ("val.bin", vals)):
            with (folder / file).open("wb") as stream:
                counts.append([encode_corpus(each, tokenizer, stream, report) for each in some])
        tokens = mapped(folder / "train.bin", tokenizer)
        unseen: list[int] = []
        if tokenizer is not request.tokenizer:
            seen = np.bincount(tokens[1:], minlength=tokenizer.vocab_size)
            unseen = np.flatnonzero(seen == 0).tolist()
        absent: list[int] = []
        if tokenizer is request.tokenizer and tokenizer.unseen:
            seen = np.bincount(tokens[1:], minlength=tokenizer.vocab_size)
            absent = np.flatnonzero(seen == 0).tolist()
        facts = {
            "size": sum(part.length for part in parts),
            "documents": sum(part.documents for part in parts),
            "prompt": " ".join(start.split(MARK)[0].decode(errors="ignore")[:40].split(" ")[:3]),
            "choices": [vars(choice) for choice in choices],
            "shift": unlikeness(tokens, mapped(folder / "val.bin", tokenizer), tokenizer),
            "unseen": unseen,
            "absent": absent,
            "dropped": next(filter(None, (dropped_from(part, tokenizer) for part in parts)), ""),
        }
        if weights:
            own = counts[1] if validation is None else [0] * len(parts)
            facts["parts"] = [
                {"size": part.length, "train": train, "val": val}
                for part, train, val in zip(parts, counts[0], own, strict=True)
            ]
        (folder / "text.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _held_out_choice(request: TextRequest, parts: list[Corpus], held_out: list[HeldOut]) -> Choice:
    size, total = sum(each.size for each in held_out), sum(part.size for part in parts)
    origins = "; ".join(dict.fromkeys(each.origin for each in held_out if each.ranges))
    reason = f"{origins}; --val-fraction 0 trains on everything"
    if not size:
        reason = "the final weights are kept"
        if request.val_fraction is None:
            few = f"{total:,} bytes with little repetition: too little to split"
            reason = f"{few}; {reason}"
        return Choice("validation set", "none", reason)
    if size < TO_CHOOSE_BY:
        reason += "; too small to choose a best checkpoint, so the final weights are kept"
    return Choice("validation set", f"{size:,} bytes ({size / max(1, total):.1%})", reason)


def encode_corpus(
    corpus: Corpus, tokenizer: Tokenizer, file: Path | IO[bytes], report: Report
) -> int:
    """Write the ids with a start-of-text token before each document; returns their number."""
    threads = available_threads()
    # Two processes encode a third faster than two threads, but take half a second to start.
    together = isinstance(tokenizer, ByteLevel) and corpus.length > ENCODED_ALONE and threads > 1
    encode = partial(encode_part, tokenizer)
    parts = corpus.parts(whole=not tokenizer.cuttable)
    written = 0
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(file.open("wb")) if isinstance(file, Path) else file
        # Validation text may begin in the middle of a document.
        if corpus.length and corpus.read(0, 1) != MARK:
            written += stream.write(encode(MARK))
        if together and HAS_PREAD:
            copy = stack.enter_context(tempfile.NamedTemporaryFile("w", encoding="utf-8"))
            copy.write(tokenizer.to_json())
            copy.flush()
            workers = WorkerPool("nanolm.text.encoding", corpus.file, threads, copy.name)
            answers = stack.enter_context(workers).map(parts)
        else:
            pool = stack.enter_context(ThreadPoolExecutor(threads))
            answers = map_in_order(pool, threads, lambda at: encode(corpus.read(*at)), parts)
        for (_, done), ids in answers:
            written += stream.write(ids)
            report("encoding", done, corpus.length)
        stream.flush()
    return written // np.dtype(token_type(tokenizer)).itemsize


def dropped_from(corpus: Corpus, tokenizer: Tokenizer) -> str:
    """A note about characters without a token at the beginning of a corpus; empty if all have."""
    start, stop = next(corpus.parts(PROBE_BYTES))
    text = corpus.read(start, stop).replace(MARK, b"").decode()
    return dropped_characters(tokenizer, text, more=stop < corpus.length)


def _whole(folder: Path, note: Note) -> bool:
    """Whether the text has been prepared before and is undamaged."""
    if folder.exists():
        try:
            files.verify(folder)
        except ModelError as error:
            note(f"{error}; preparing the text again")
            files.discard(folder)
    return folder.exists()


def open_tokens(
    folder: Path,
    tokenizer: str | Tokenizer | None = None,
    fingerprints: dict[str, str] | None = None,
    corpus: tuple[str, ...] = (),
) -> Prepared:
    """The prepared text in `folder`; `corpus` has the weights of a mix."""
    os.utime(folder)  # mark it as used
    facts = json.loads((folder / "text.json").read_text(encoding="utf-8"))
    if isinstance(tokenizer, Tokenizer):  # what its model never saw, unless this text has it
        tokenizer.unseen &= frozenset(facts.get("absent", ()))
    else:
        tokenizer = load_tokenizer(folder)
        tokenizer.unseen = frozenset(facts.get("unseen", ()))
    train, size = mapped(folder / "train.bin", tokenizer), facts["size"]
    parts, tokens = mix.make_parts(corpus, facts["parts"]) if "parts" in facts else (), len(train)
    if parts:
        tokens = round(mix.epoch_tokens(parts))
        size = round(tokens * sum(part.weight * part.size / part.tokens for part in parts))
    return Prepared(
        tokenizer=tokenizer,
        train=train,
        val=mapped(folder / "val.bin", tokenizer),
        size=size,
        tokens=tokens,
        documents=facts["documents"],
        prompt=facts["prompt"],
        shift=facts.get("shift", 1.0),
        dropped=facts.get("dropped", ""),
        choices=[Choice(**choice) for choice in facts["choices"]],
        fingerprints={**(fingerprints or {}), "tokenizer": tokenizer.fingerprint()},
        folder=folder,
        parts=parts,
    )


def mapped(file: Path | IO[bytes], tokenizer: Tokenizer) -> Store:
    if os.stat(file if isinstance(file, Path) else file.fileno()).st_size == 0:  # cannot be mapped
        return np.empty(0, np.uint16)
    return np.asarray(np.memmap(file, dtype=token_type(tokenizer), mode="r"))
