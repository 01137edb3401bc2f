"""The run folder: its files, and how RUN on the command line is resolved.

runs/NAME/
  config.toml     every resolved setting: `nanolm train --config` reproduces the run
  run.json        automatic choices with reasons, versions, machine, fingerprints, result
  metrics.jsonl   one JSON object per line
  samples.md      samples generated during training
  log.txt
  checkpoints/step-00000120/, and the links best and last: see checkpoint.py
  teachers/       models to distill into this one, until the run ends
"""

import contextlib
import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nanolm import files
from nanolm.choice import Report
from nanolm.errors import DataError, ModelError, NanolmError, TooLittleTime, UsageError
from nanolm.formats import counted, joined
from nanolm.gguf.file import is_gguf
from nanolm.model.config import ClassifierConfig, Seq2SeqConfig
from nanolm.model.shapes import Config
from nanolm.model.stored import (
    ADAPTER,
    ADAPTER_CONFIG,
    SOURCE_TOKENIZER,
    load_any_config,
    load_seq2seq_config,
    read_json,
)
from nanolm.runs import checkpoint, journal
from nanolm.runs.checkpoint import EARLIER, list_checkpoints
from nanolm.runs.toml import dump_toml
from nanolm.text import HUB, NAMED, tokenizer_problem

# Tokenizers and downloads are imported lazily, so that listing runs is quick.
if TYPE_CHECKING:
    from nanolm.text.tokenizer import Tokenizer

T = TypeVar("T")
FINISHED, STOPPED_EARLY = "finished", "stopped early"
CHECKPOINTS, LINKS = "checkpoints", ("best", "last")
TEACHERS = "teachers"  # models to distill into that of the run, until it ends
OURS = re.compile(r"step-|final$|damaged-|\.(tmp-|trash-|lock$|extending$)|JOURNAL\.json$")
NO_SENTENCEPIECE = (
    "Its SentencePiece files are not enough. For a Pegasus model, transformers writes a "
    'tokenizer.json: AutoTokenizer.from_pretrained("NAME").save_pretrained("FOLDER"). Published '
    "Marian models (opus-mt) cannot be converted; train your own with `nanolm train-pairs`"
)
PAGES = ("report.html", "loss.svg", "loss.png", "epochs.svg", "epochs.png")  # of `nanolm report`


class Entry:
    """A file or folder of a run."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: "Run", kind: type) -> Path:
        return run.path / self.name


class Run:
    """The files of one run. Creating an instance does not touch the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.folder: int | None = None  # its descriptor while it is locked
        self.begun = False  # locked, and has a run.json
        self.report: Callable[[str], None] = lambda text: None

    @property
    def path(self) -> Path:
        """Where the folder is, even if it was moved while locked."""
        if self.folder is None:
            return self._path
        for _ in range(2):  # it may be moved between two checks
            path = self._path if same_folder(self._path, self.folder) else folder_path(self.folder)
            if path and (not self.begun or (path / "run.json").exists()):
                break
        else:
            cure = "if you moved it to another disk, resume it there with --out"
            raise DataError(f"{self._path} was removed while it was being trained; {cure}")
        if path != self._path:
            before, self._path = self._path, path
            resume = f"if it is interrupted, resume it with --out {path}"
            self.report(f"{before} was moved to {path}, and training continues there; {resume}")
        return path

    def retry_if_moved(self, work: Callable[[Path], T]) -> T:
        """Call `work` with the path of the folder, and again if the folder was moved meanwhile."""
        path = self.path
        try:
            return work(path)
        except (FileNotFoundError, DataError):
            if self.path == path:
                raise
            return work(self.path)

    checkpoints = Entry(CHECKPOINTS)
    metrics = Entry("metrics.jsonl")
    samples = Entry("samples.md")
    log = Entry("log.txt")
    config_file = Entry("config.toml")
    facts_file = Entry("run.json")
    extending = Entry(".extending")  # until an extension ends: the same command again continues it

    def exists(self) -> bool:
        return self.facts_file.is_file()

    def free(self) -> bool:
        """Whether there is nothing, or only leftovers of a start that failed before step 1."""
        if not self.path.is_dir():
            return not self.path.exists()
        left = (".lock", self.log, self.config_file, self.metrics, self.samples, self.checkpoints)
        entries = [*self.path.iterdir(), *self.checkpoints.glob("*")]
        names = {entry.name for entry in entries}.difference(Path(each).name for each in left)
        return all(name.startswith((files.TEMPORARY, files.TRASH)) for name in names)

    def is_rest(self) -> bool:
        """Whether these are the remains of a run: some of its files, and no others."""
        if not self.path.is_dir():
            return False
        own = {CHECKPOINTS, EARLIER, self.metrics.name, self.samples.name}
        known = own | {self.config_file.name, self.facts_file.name, self.log.name, *LINKS, *PAGES}
        known.add(TEACHERS)
        names = {entry.name for entry in self.path.iterdir() if not OURS.match(entry.name)}
        saved = [
            entry.name for name in (CHECKPOINTS, EARLIER) for entry in self.path.glob(f"{name}/*")
        ]
        return names <= known and not names.isdisjoint(own) and all(map(OURS.match, saved))

    def finished(self) -> bool:
        return "result" in self.facts() and not self.too_short()

    def too_short(self) -> bool:
        return bool(self.facts().get("result", {}).get("stopped") == TooLittleTime.stopped)

    def clear(self) -> None:
        """Remove everything that nanolm wrote except the log, to start over."""
        self.begun = False
        change = [retirement(each, self.report) for each in list_checkpoints(self.checkpoints)]
        written = (self.metrics, self.samples, self.config_file, self.facts_file)
        for name in (*PAGES, *LINKS, *(file.name for file in written)):
            entry = self.path / name
            if entry.is_dir() and not entry.is_symlink():
                change.append(("move", name, files.name_aside(entry).name))
            else:
                change.append(("discard", name))
        change.append(("discard", TEACHERS))
        journal.commit(self.path, "starting over", change)

    def settings(self) -> dict[str, Any]:
        return read_file(self.config_file, tomllib.loads)

    def facts(self) -> dict[str, Any]:
        def read(path: Path) -> dict[str, Any]:
            file = path / "run.json"
            return read_file(file, partial(parse_facts, file))

        return self.retry_if_moved(read)

    def begin(self, settings: dict[str, Any], facts: dict[str, Any]) -> None:
        """Write the files of a new run. run.json comes last: with it, the run exists."""
        for file in (self.metrics, self.samples):
            if file.exists():  # of a run that was removed during training
                files.set_aside(file)
        self.configure(settings)
        self.update(facts)
        self.begun = self.folder is not None

    def configure(self, settings: dict[str, Any]) -> None:
        files.write_atomically(self.config_file, dump_toml(settings))

    def update(self, facts: dict[str, Any]) -> None:
        written = dump_facts(facts)
        self.retry_if_moved(lambda path: files.write_atomically(path / "run.json", written))

    def finish(self, facts: dict[str, Any]) -> None:
        """Update run.json with the result, and remove what is no longer needed."""
        if not (self.path / TEACHERS).exists():
            self.update(facts)
            return
        change = [("write", self.facts_file.name, dump_facts(facts)), ("discard", TEACHERS)]
        self.retry_if_moved(lambda path: journal.commit(path, "removing the teachers", change))

    def lengths(self) -> dict[str, int]:
        """The sizes of the files that grow; part of a checkpoint's state."""

        def measure(path: Path) -> dict[str, int]:
            growing = [path / self.metrics.name, path / self.samples.name]
            sizes = {file.name: file.stat().st_size if file.exists() else 0 for file in growing}
            path.stat()  # fails if it was moved meanwhile
            return sizes

        return self.retry_if_moved(measure)

    def flush(self) -> None:
        """Wait until the growing files are on disk: a checkpoint relies on their sizes."""
        for file in (self.metrics, self.samples):
            if file.exists():
                with file.open("ab") as stream:
                    os.fsync(stream.fileno())

    def cut_back(self, lengths: dict[str, int]) -> None:
        """Truncate what was appended after a checkpoint, so that nothing appears twice."""
        for file in (self.metrics, self.samples):
            length = lengths.get(file.name, 0)
            if file.exists() and file.stat().st_size > length:
                os.truncate(file, length)

    def recover(self, report: Callable[[str], None]) -> None:
        """Finish what a killed process began and remove its temporary files. Needs the lock."""
        path, self.begun = self.path, False  # the change may be to start over
        if what := journal.recover(path):
            report(f"{path}: completed an interrupted operation ({what})")
        for folder in (path, path / CHECKPOINTS):
            files.sweep(folder)
        self.begun = self.folder is not None and self.exists()

    def settle(self, report: Callable[[str], None]) -> None:
        """Before reading: finish the change of a killed process, if possible."""
        if not (self.path / journal.JOURNAL).is_file():
            return
        try:
            # Links in a downloaded folder could point outside it.
            if not any((self.path / name).is_symlink() for name in (CHECKPOINTS, EARLIER)):
                with self.locked():
                    self.recover(report)
        except (DataError, OSError) as error:  # in use, from a newer version, or read-only
            report(f"{self.path}: an interrupted operation could not be completed: {error}")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run against other processes. The system unlocks it even after a kill."""
        made = not self.path.exists()
        try:
            with files.locked(self.path / ".lock"), self.held():
                try:
                    yield
                except BaseException:
                    with contextlib.suppress(DataError):
                        if made and self.free():  # nothing to resume
                            shutil.rmtree(self.path, ignore_errors=True)
                    raise
        except files.InUse as owner:
            text = f"{self.path} is being trained by another process ({owner})"
            raise DataError(f"{text}; wait for it, or start a new run with --out") from None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the folder open, so that it is found again if it is moved."""
        if os.name != "nt":  # Windows does not allow moving it
            self.begun = self.exists()
            self.folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield
        finally:
            folder, self.folder = self.folder, None
            if folder is not None:
                os.close(folder)


def same_folder(path: Path, folder: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(folder))
    except OSError:
        return False


def folder_path(folder: int) -> Path | None:
    """The current path of an open folder; None if it was removed or is unknown."""
    try:
        if sys.platform == "darwin":
            import fcntl

            name = fcntl.fcntl(folder, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")
            path = Path(os.fsdecode(name))
        else:
            path = Path(os.readlink(f"/proc/self/fd/{folder}"))
    except OSError:
        return None
    return path if same_folder(path, folder) else None


def read_file(file: Path, parse: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    if not file.is_file():
        raise DataError(f"{file} does not exist or is not a file")
    try:
        return parse(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{file} cannot be read: {error!r}") from None


def dump_facts(facts: dict[str, Any]) -> str:
    return json.dumps({"format": files.FORMAT, **facts}, indent=1) + "\n"


def retirement(folder: Path, report: Callable[[str], None]) -> journal.Operation:
    """The journal entry that removes a superseded checkpoint, or renames a damaged one."""
    name = f"{CHECKPOINTS}/{folder.name}"
    if not (why := files.why_keep(folder)):
        return "discard", name
    aside = files.name_aside(folder)
    report(f"{why}; the folder is kept as {aside}")
    return "move", name, f"{CHECKPOINTS}/{aside.name}"


def parse_facts(file: Path, text: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(text)
    files.check_format(file, facts)
    result = facts.get("result", {})
    objects = (facts["request"], facts["fingerprints"], result)
    if not all(isinstance(part, dict) for part in objects):
        raise ValueError("not written by nanolm")
    for name in ("steps", "best_step", "seconds"):
        if not isinstance(value := result.get(name, 0), int | float):
            raise ValueError(f"result.{name} is {value!r:.80}, not a number")
    return facts


def find_named(name: str | Path, note: Callable[[str], None], progress: Report) -> Path:
    """The model folder for RUN: local, or with hf:// from the Hugging Face Hub."""
    if str(name).startswith(HUB):
        return find_or_download(str(name), note, progress)
    return find_model(name, note)


def find_or_download(name: str, note: Callable[[str], None], progress: Report) -> Path:
    """The model folder for RUN: a local folder, or else a name on the Hub."""
    if not name.startswith(HUB) and Path(name).exists():
        return find_model(name, note)
    from nanolm.runs.hub import hub_model

    try:
        return hub_model(name, progress)
    except NanolmError as error:
        if name.startswith(HUB):
            raise
        raise type(error)(f"there is no folder {name} here, and {error}") from None


def find_adapter(path: str | None) -> Path | None:
    """The folder of a LoRA adapter in the format of peft, also for a run that was trained so."""
    if path is None:
        return None
    folder = Path(path)
    if (folder / ADAPTER_CONFIG).is_file():
        return folder.absolute()
    with contextlib.suppress(ModelError, UsageError):
        if (inside := resolve_model(folder, lambda text: None) / ADAPTER).is_dir():
            return inside.resolve()
    raise UsageError(f"--adapter {path}: no such folder, or it has no {ADAPTER_CONFIG}")


def find_model(path: str | Path, report: Callable[[str], None]) -> Path:
    """The model folder for RUN: a run's best checkpoint, or RUN itself if it is a model folder.
    Damaged checkpoints are reported, and the newest valid one is used instead."""
    Run(Path(path)).settle(report)
    return resolve_model(Path(path), report)


def resolve_model(path: Path, report: Callable[[str], None]) -> Path:
    """The same, without changing anything."""
    if is_gguf(path):
        return path
    if not path.is_dir():
        what = "is neither a folder nor a GGUF file" if path.exists() else "does not exist"
        cure = f"`nanolm runs` lists runs, and {HUB}NAME loads a model from the Hub"
        raise UsageError(f"{path} {what}; {cure}")
    if (path / "config.json").exists():
        if (path / files.MANIFEST).exists():
            files.verify(path)
        return path
    for link in (path / name for name in LINKS):
        best = checkpoint.follow(link)
        if best != (target := checkpoint.target_of(link)):
            report(f"the {link.name} checkpoint {target} is missing; using {best or 'another'}")
        if best:
            try:
                files.verify(best)
                return best
            except ModelError as error:
                report(f"{error}; looking for another checkpoint")
                break
    if newest := checkpoint.newest_valid(path / "checkpoints", report):
        return newest
    if (path / TEACHERS).is_dir():
        problem = f"{path} is still training its teachers and has no model yet"
        raise ModelError(f"{problem}; run its `nanolm train` command again to resume it")
    raise ModelError(f"{path} contains no model: no config.json and no valid checkpoint")


def model_tokenizer(folder: Path) -> "Tokenizer":
    """The tokenizer of a model folder. Its vocabulary must not exceed the model's."""
    from nanolm.text.tokenizer_files import load_tokenizer

    config = load_any_config(folder)
    base = config.base if isinstance(config, ClassifierConfig) else config
    return fitting(load_tokenizer(folder), base.vocab_size, folder)


def model_tokenizers(folder: Path) -> "tuple[Tokenizer, Tokenizer]":
    """The tokenizers of target and source of a sequence-to-sequence model, often the same. The
    decoder starts with the end-of-text token or, in most published models, with padding."""
    from nanolm.text.tokenizer_files import load_tokenizer

    config = load_seq2seq_config(folder)
    if not (folder / "tokenizer.json").exists():
        raise ModelError(f"{folder} has no tokenizer.json. {NO_SENTENCEPIECE}")
    target, config_file = model_tokenizer(folder), folder / "config.json"
    start = read_json(config_file).get("decoder_start_token_id")
    if type(start) is not int or start not in target.special:
        known = " or ".join(f"{id} ({name})" for id, name in target.special.items())
        wrong = f"decoder_start_token_id is {start!r:.80}: must be {known:.200}"
        raise ModelError(f"{config_file}: {wrong}")
    target.begin = () if start == target.end_of_text else (start,)
    file = folder / SOURCE_TOKENIZER
    source = load_tokenizer(file) if file.exists() else target
    return target, fitting(source, config.source_vocab_size or config.vocab_size, folder)


def fitting(tokenizer: "Tokenizer", known: int, folder: Path) -> "Tokenizer":
    if tokenizer.vocab_size > known:
        tokens = f"its tokenizer has {tokenizer.vocab_size:,} tokens, its model only {known:,}"
        raise ModelError(f"{folder}: {tokens}")
    return tokenizer


def find_tokenizer(name: str, report: Callable[[str], None]) -> "Tokenizer":
    """A tokenizer by name, from a file, or from the folder of a model or run."""
    from nanolm.text.tokenizer_files import load_tokenizer, named_tokenizer

    if name in NAMED:
        return named_tokenizer(name)
    if problem := tokenizer_problem(name):
        raise UsageError(problem)
    path = Path(name)
    if (path / "checkpoints").is_dir():
        path = find_model(path, report)
    return load_tokenizer(path)


def runs_by_age(root: Path) -> list[Path]:
    """The runs under `root` that have a checkpoint, the newest first."""
    ages = {
        folder: max(step.stat().st_mtime for step in saved)
        for folder in (root.iterdir() if root.is_dir() else [])
        if not folder.name.startswith(files.TRASH)
        and (saved := list_checkpoints(folder / "checkpoints"))
    }
    return sorted(ages, key=lambda folder: ages[folder], reverse=True)


def config_of(run: Path) -> Config | None:
    """The config of a run's model; None if it cannot be read."""
    try:
        return load_any_config(
            checkpoint.follow(run / "last") or find_model(run, lambda text: None)
        )
    except NanolmError:
        return None


def is_classifier(run: Path) -> bool:
    return isinstance(config_of(run), ClassifierConfig)


def is_seq2seq(run: Path) -> bool:
    return isinstance(config_of(run), Seq2SeqConfig)


def is_language_model(run: Path) -> bool:
    """Whether it is one, or may be."""
    return not isinstance(config_of(run), ClassifierConfig | Seq2SeqConfig)


def ending(result: dict[str, Any]) -> str:
    if result.get("stopped") == TooLittleTime.stopped:
        return f"stopped: {TooLittleTime.stopped}"
    if result.get("stopped") != "enough":
        return FINISHED if result else "not finished"
    what = "accuracy" if "val" in result else "loss"
    steps = f"after step {result['best_step']:,} ({result['steps']:,} steps done)"
    return f"{STOPPED_EARLY}: validation {what} stopped improving {steps}"


def distilled_from(facts: dict[str, Any]) -> str:
    """`distilled from 2 models with 1.950 and 1.947 bits per byte`; empty for other runs."""
    if not (teachers := facts.get("teachers")):
        return ""
    text, bits = f"distilled from {counted(len(teachers), 'model')}", "val_bits_per_byte"
    known = [f"{each[bits]:.3f}" for each in teachers if each[bits] is not None]
    return f"{text} with {joined(known)} bits per byte" if known else text


def append(run: Run, name: str, text: str) -> None:
    """Append to a file of a run, even if the run was moved."""
    stream = run.retry_if_moved(lambda path: (path / name).open("a", encoding="utf-8"))
    try:
        with stream:
            stream.write(text)
    except OSError as error:
        error.filename = stream.name  # write errors do not include it
        raise
