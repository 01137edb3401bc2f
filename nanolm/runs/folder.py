"""The run folder: what a training run writes, and how RUN on the command line is resolved.

runs/NAME/
  config.toml     every resolved setting: `nanolm train --config` repeats the run
  run.json        why each automatic choice was made, versions, machine, fingerprints, result
  metrics.jsonl   one object a line
  samples.md      what the model wrote as it learned
  log.txt
  checkpoints/step-00000120/, and the links best and last: see checkpoint.py
"""

import contextlib
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanolm import files
from nanolm.choice import Report
from nanolm.errors import DataError, ModelError, NanolmError, TooLittleTime, UsageError
from nanolm.model.config import ClassifierConfig
from nanolm.model.stored import load_any_config
from nanolm.runs import checkpoint
from nanolm.runs.checkpoint import list_checkpoints
from nanolm.runs.toml import dump_toml
from nanolm.text import HUB, NAMED, tokenizer_problem

# Tokenizers and downloads are imported where they are needed: listing runs should be quick.
if TYPE_CHECKING:
    from nanolm.text.tokenizer import Tokenizer

PAGES = ("report.html", "loss.svg", "epochs.svg")
FINISHED, STOPPED_EARLY = "finished", "stopped early"


class Entry:
    """A file or folder of a run."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: "Run", kind: type) -> Path:
        return run.path / self.name


class Run:
    """The files of one run. Making one touches nothing on the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.folder: int | None = None  # its descriptor, while it is held
        self.begun = False  # and has a run.json
        self.report: Callable[[str], None] = lambda text: None

    @property
    def path(self) -> Path:
        """Where the folder is; while it is held, also after somebody has moved it."""
        if self.folder is None:
            return self._path
        path = self._path if same_folder(self._path, self.folder) else folder_path(self.folder)
        if path is None or (self.begun and not (path / "run.json").exists()):
            cure = "if you moved it to another disk, resume it there with --out"
            raise DataError(f"{self._path} was removed while it was being trained; {cure}")
        if path != self._path:
            before, self._path = self._path, path
            resume = f"if it is interrupted, resume it with --out {path}"
            self.report(f"{before} was moved to {path}: training goes on there; {resume}")
        return path

    checkpoints = Entry("checkpoints")
    metrics = Entry("metrics.jsonl")
    samples = Entry("samples.md")
    log = Entry("log.txt")
    config_file = Entry("config.toml")
    facts_file = Entry("run.json")

    def exists(self) -> bool:
        return self.facts_file.is_file()

    def free(self) -> bool:
        """Whether nothing is there, or only what a start that failed before the first step left."""
        if not self.path.is_dir():
            return not self.path.exists()
        left = (".lock", self.log, self.config_file, self.metrics, self.samples, self.checkpoints)
        entries = [*self.path.iterdir(), *self.checkpoints.glob("*")]
        names = {entry.name for entry in entries}.difference(Path(each).name for each in left)
        return all(name.startswith(files.TEMPORARY) for name in names)

    def finished(self) -> bool:
        return "result" in self.facts() and not self.too_short()

    def too_short(self) -> bool:
        return bool(self.facts().get("result", {}).get("stopped") == TooLittleTime.stopped)

    def clear(self) -> None:
        """Remove what nanolm wrote, but the log, as if the run had not begun."""
        self.begun = False
        self.facts_file.unlink()  # first: it is what makes the run exist
        for folder in list_checkpoints(self.checkpoints):
            files.retire(folder)
        for name in (*PAGES, "best", "last", self.metrics.name, self.samples.name):
            entry = self.path / name
            if entry.is_dir() and not entry.is_symlink():
                files.set_aside(entry)
            else:
                entry.unlink(missing_ok=True)

    def settings(self) -> dict[str, Any]:
        return read_file(self.config_file, tomllib.loads)

    def facts(self) -> dict[str, Any]:
        return read_file(self.facts_file, partial(parse_facts, self.facts_file))

    def begin(self, settings: dict[str, Any], facts: dict[str, Any]) -> None:
        """Write what is known before the first step; run.json last, it makes the run exist."""
        for file in (self.metrics, self.samples):
            if file.exists():  # of a run that was removed while it was being trained
                files.set_aside(file)
        self.configure(settings)
        self.update(facts)
        self.begun = self.folder is not None

    def configure(self, settings: dict[str, Any]) -> None:
        files.write_atomically(self.config_file, dump_toml(settings))

    def update(self, facts: dict[str, Any]) -> None:
        facts = {"format": files.FORMAT, **facts}
        files.write_atomically(self.facts_file, json.dumps(facts, indent=1) + "\n")

    def lengths(self) -> dict[str, int]:
        """How long the growing files are now; part of a checkpoint's state."""
        growing = (self.metrics, self.samples)
        return {file.name: file.stat().st_size if file.exists() else 0 for file in growing}

    def cut_back(self, lengths: dict[str, int]) -> None:
        """Undo what was appended after a checkpoint, so that nothing appears twice."""
        for file in (self.metrics, self.samples):
            length = lengths.get(file.name, 0)
            if file.exists() and file.stat().st_size > length:
                os.truncate(file, length)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run; a second process is refused. The system lets go even after a kill."""
        made = not self.path.exists()
        try:
            with files.locked(self.path / ".lock"), self.held():
                try:
                    yield
                except BaseException:
                    with contextlib.suppress(DataError):
                        if made and self.free():  # nothing that anybody could go on with
                            shutil.rmtree(self.path, ignore_errors=True)
                    raise
        except files.InUse as owner:
            text = f"{self.path} is being trained by another process ({owner})"
            raise DataError(f"{text}; wait for it, or start another run with --out") from None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Know the folder by more than its name, which may change."""
        if os.name != "nt":  # which does not let anybody move it
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
    """The path of an open folder by now; None if it has none, or the system does not say."""
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
        raise DataError(f"{file} does not exist, or is no file")
    try:
        return parse(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{file} cannot be read: {error!r}") from None


def parse_facts(file: Path, text: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(text)
    files.check_format(file, facts)
    result = facts.get("result", {})
    objects = (facts["request"], facts["fingerprints"], result)
    if not all(isinstance(part, dict) for part in objects):
        raise ValueError("not what nanolm writes")
    for name in ("steps", "best_step", "seconds"):
        if not isinstance(value := result.get(name, 0), int | float):
            raise ValueError(f"its result has {name} {value!r:.80}")
    return facts


def find_named(name: str | Path, note: Callable[[str], None], progress: Report) -> Path:
    """The model folder that RUN means: on this machine, or with hf:// on the Hub."""
    if str(name).startswith(HUB):
        return find_or_download(str(name), note, progress)
    return find_model(name, note)


def find_or_download(name: str, note: Callable[[str], None], progress: Report) -> Path:
    """The model folder that RUN means; what is no folder here is a name on the Hub."""
    if not name.startswith(HUB) and Path(name).exists():
        return find_model(name, note)
    from nanolm.runs.hub import hub_model

    try:
        return hub_model(name, progress)
    except NanolmError as error:
        if name.startswith(HUB):
            raise
        raise type(error)(f"{name} is no folder here, and {error}") from None


def find_model(path: str | Path, report: Callable[[str], None]) -> Path:
    """The model folder that RUN means: a run's best checkpoint, or a model folder itself.
    Damaged checkpoints are reported, and the newest whole one is used instead."""
    path = Path(path)
    if not path.is_dir():
        what = "is no folder" if path.exists() else "does not exist"
        raise UsageError(f"{path} {what}; `nanolm runs` lists runs, {HUB}NAME is on Hugging Face")
    if (path / "config.json").exists():
        if (path / files.MANIFEST).exists():
            files.verify(path)
        return path
    if best := checkpoint.follow(path / "best") or checkpoint.follow(path / "last"):
        try:
            files.verify(best)
            return best
        except ModelError as error:
            report(f"{error}; looking for another checkpoint")
    if newest := checkpoint.newest_valid(path / "checkpoints", report):
        return newest
    raise ModelError(f"{path} holds no model: no config.json and no whole checkpoint")


def model_tokenizer(folder: Path) -> "Tokenizer":
    """The tokenizer of a model folder, which must not have tokens that the model does not know."""
    from nanolm.text.tokenizer_files import load_tokenizer

    tokenizer, config = load_tokenizer(folder), load_any_config(folder)
    base = config.base if isinstance(config, ClassifierConfig) else config
    if tokenizer.vocab_size > (known := base.vocab_size):
        tokens = f"its tokenizer has {tokenizer.vocab_size:,} tokens, its model {known:,}"
        raise ModelError(f"{folder}: {tokens}")
    return tokenizer


def find_tokenizer(name: str, report: Callable[[str], None]) -> "Tokenizer":
    """A tokenizer by its name, its file, or the folder of a model or run that has one."""
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
    """The runs under `root` that have a checkpoint, the youngest first."""
    ages = {
        folder: max(step.stat().st_mtime for step in saved)
        for folder in (root.iterdir() if root.is_dir() else [])
        if (saved := list_checkpoints(folder / "checkpoints"))
    }
    return sorted(ages, key=lambda folder: ages[folder], reverse=True)


def is_classifier(run: Path) -> bool:
    try:
        folder = checkpoint.follow(run / "last") or find_model(run, lambda text: None)
        return isinstance(load_any_config(folder), ClassifierConfig)
    except NanolmError:
        return False


def ending(result: dict[str, Any]) -> str:
    if result.get("stopped") == TooLittleTime.stopped:
        return f"stopped: {TooLittleTime.stopped}"
    if result.get("stopped") != "enough":
        return FINISHED if result else "not finished"
    what = "accuracy" if "val" in result else "loss"
    steps = f"at step {result['best_step']:,} (of {result['steps']:,} done)"
    return f"{STOPPED_EARLY}: validation {what} stopped improving {steps}"


def append(file: Path, text: str) -> None:
    with file.open("a", encoding="utf-8") as stream:
        stream.write(text)
