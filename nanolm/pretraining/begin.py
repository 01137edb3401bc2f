"""How every training run begins: its folder, its lock, and the checkpoint to resume from.

>>> start = RunStart(settings, out=None, notify=print)
>>> with start.locked():  # build what start.settings ask for
...     checkpoint = start.checkpoint(fingerprints)
...     start.record(resolved, choices, fingerprints, model)
"""

import itertools
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from nanolm import __version__, files
from nanolm.choice import Choice, Report
from nanolm.errors import DataError, ModelError, UsageError
from nanolm.model.base import Network
from nanolm.model.classifier import Classifier
from nanolm.model.config_json import model_type
from nanolm.model.device import choose_device, choose_dtype
from nanolm.planning.tuning import deterministic_algorithms
from nanolm.runs import checkpoint
from nanolm.runs.folder import TEACHERS, Run
from nanolm.text import NAMED, STDIN, TRAINABLE, mix
from nanolm.text.sources import ADDRESSES, SCHEME
from nanolm.training.events import Note, Notify, Planned, Preparing
from nanolm.training.metrics_log import also_to_log
from nanolm.training.settings import Settings, TrainSettings, option
from nanolm.training.state import read_state

ROOT = Path("runs")
S = TypeVar("S", bound=Settings)


class RunStart(Generic[S]):
    """A run before its first step: new, or resumed with its original settings."""

    def __init__(self, request: S, out: str | Path | None, notify: Notify) -> None:
        """Choose the run folder. The caller has validated `request`."""
        # Report an unavailable device or dtype before reading anything.
        choose_dtype(request.dtype, choose_device(request.device)[0])
        self.request, self.notify = with_absolute_paths(request), notify
        self.run = choose_run(self.request, Path(out) if out is not None else None, notify)
        self.load_settings()

    def load_settings(self) -> None:
        """Use the requested settings, or those of the run if it is resumed."""
        self.fresh = not self.run.exists() or self.run.too_short()
        self.settings = self.request if self.fresh else saved_settings(self.run, type(self.request))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run, and copy everything that is reported to its log."""
        with self.run.locked():
            self.run.recover(reports(self.notify)[0])
            if self.run.exists():  # another process may have started or finished it meanwhile
                refuse_finished(self.run)
                if self.run.too_short():
                    self.run.clear()
            self.load_settings()
            self.notify = also_to_log(self.run, self.notify)
            self.run.report, _ = reports(self.notify)
            with deterministic_algorithms(self.settings.deterministic):
                yield

    def checkpoint(self, fingerprints: dict[str, str]) -> Path | None:
        """The checkpoint to resume from, if any. Refuses inputs that have changed."""
        if self.fresh:
            return None
        run = self.run
        known = run.facts()["fingerprints"]
        for what, fingerprint in fingerprints.items():
            if known.get(what) != fingerprint:
                cure = "restore it, or start a new run with --out"
                raise DataError(f"the {what} has changed since {run.path} started; {cure}")
        note, _ = reports(self.notify)
        folder = checkpoint.newest_valid(run.checkpoints, note)
        if folder:
            files.sweep(run.checkpoints)
            checkpoint.retire_after(run.checkpoints, folder, note)
            needed = read_state(folder).needed_checkpoints()
            checkpoint.prune(run.checkpoints, needed, note)  # a kill may have prevented it
        elif checkpoint.list_checkpoints(run.checkpoints) or checkpoint.was_saved(run.path):
            look = f"Nothing was deleted: see `nanolm doctor {run.path}`"
            cure = "Restore its checkpoints from a backup, or start a new run with --out"
            raise ModelError(f"{run.path} has no intact checkpoint to resume from. {look}. {cure}")
        elif not (run.path / TEACHERS).is_dir():
            note(f"{run.path} has no checkpoint to resume from: starting at step 0")
        return folder

    def record(
        self,
        settings: S,
        choices: list[Choice],
        fingerprints: dict[str, str],
        model: Network | Classifier,
        **more: Any,
    ) -> None:
        """Report every choice and write config.toml and run.json, which create the run."""
        if not self.fresh:
            return
        family, reason = model_type(model.config)
        if family == "nanolm":
            reason = f"no equivalent in transformers: {reason}"
            choices = [*choices, Choice("format", "nanolm only", reason)]
        self.notify(Planned(tuple(choices)))
        facts = {
            "nanolm": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}",
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "request": self.request.to_dict(),
            "choices": [vars(choice) for choice in choices],
            "fingerprints": fingerprints,
            "parameters": model.parameter_count(),
            **more,
        }
        self.run.begin(settings.to_dict(), facts)


def saved_settings(run: Run, kind: type[S]) -> S:
    # Runs of 0.1.0 held out the end of the text, without a setting for it, and kept its capitals.
    saved, missing = run.settings(), {}
    if issubclass(kind, TrainSettings):
        missing = {"val_split": "end"} | ({} if "start_from" in saved else {"lowercase": False})
    try:
        settings = kind.from_dict({**missing, **saved})
        settings.check()
    except UsageError as error:
        raise DataError(f"{run.config_file} cannot be used: {error}") from None
    return settings


def reports(notify: Notify) -> tuple[Callable[[str], None], Report]:
    """`notify` as two callables: one for a line of text, one for progress."""
    return lambda text: notify(Note(text)), lambda *progress: notify(Preparing(*progress))


def check_context(settings: Settings, longest: int) -> None:
    """Refuse a context longer than that of the model to start from."""
    if settings.context is not None and settings.context > longest:
        limit = f"{settings.start_from} supports at most {longest:,} tokens"
        raise UsageError(f"--context {settings.context}: {limit}")


def with_absolute_paths(settings: S) -> S:
    """Make paths absolute, so that a run can be repeated from any folder."""

    def absolute(path: str) -> str:
        kept = mix.parse(path)[0] == STDIN or path.startswith((SCHEME, *ADDRESSES))
        return path if kept else str(Path(path).absolute())

    paths = {name: getattr(settings, name) for name in settings.files}
    if settings.start_from is not None and Path(settings.start_from).exists():
        paths["start_from"] = settings.start_from
    if settings.tokenizer not in (*TRAINABLE, *NAMED):
        paths["tokenizer"] = settings.tokenizer
    texts = tuple(map(absolute, getattr(settings, settings.texts)))
    changes: Any = {
        name: tuple(map(absolute, path)) if isinstance(path, tuple) else path and absolute(path)
        for name, path in paths.items()
    }
    return replace(settings, **(changes | {settings.texts: texts}))


def pipe_problems(settings: Settings, why: str) -> list[str]:
    """A problem for each file of the settings that is a pipe."""
    names = mix.sources(getattr(settings, settings.texts))
    for name in settings.files:
        files = getattr(settings, name) or ()
        names += [files] if isinstance(files, str) else files
    cure = f"a pipe can be read only once, but {why}; save it to a file first"
    pipes = [n for n in names if n == STDIN or (os.path.exists(n) and Path(n).is_fifo())]
    return [f"{name}: {cure}" for name in pipes]


def run_name(corpus: str) -> str:
    """`novel` for novel.txt.gz, `letters` for letters/, `stdin` for a pipe."""
    corpus = mix.parse(corpus)[0]
    if corpus == STDIN:
        return "stdin"
    name = Path(corpus.removeprefix(SCHEME).split("?")[0]).name
    return re.sub(r"[^\w.-]+", "-", name.partition(".")[0]).strip("-") or "run"


def numbered(stem: str) -> Iterator[Path]:
    """runs/novel, runs/novel-2, ..."""
    yield ROOT / stem
    yield from (ROOT / f"{stem}-{number}" for number in itertools.count(2))


def choose_folder(
    text: str, what: str, out: str | Path | None, fits: Callable[[Path], bool | None]
) -> Path:
    """The folder for a job of many runs on `text`. `fits` returns whether to resume the job in a
    folder, or None if the folder has no such job."""
    for folder in numbered(f"{run_name(text)}-{what}") if out is None else [Path(out)]:
        resumable = fits(folder)
        if resumable or (resumable is None and Run(folder).free()):
            return folder
    raise DataError(
        f"{out} has nothing that `nanolm {what}` can resume with these settings; "
        "choose another --out"
    )


def choose_run(settings: Settings, out: Path | None, notify: Notify) -> Run:
    """The run to train in: `out`, or one under runs/ to resume, or a new one."""
    report = reports(notify)[0]
    if out is not None:
        run = Run(out)
        run.settle(report)
        if run.exists():
            if not starts_over(run, settings, notify):
                refuse_finished(run)
                refuse_other_settings(run, settings)
        elif not run.free():
            why = "has no run.json" if run.checkpoints.is_dir() else "already exists"
            raise DataError(f"{out} {why} and is not a run; choose another --out")
        return run
    done = None  # the last finished run with these settings
    for path in numbered(run_name(getattr(settings, settings.texts)[0])):
        run = Run(path)
        run.settle(report)
        if run.free():
            break
        if run.exists() and starts_over(run, settings, notify):
            return run
        if run.exists() and same_settings(run, settings):
            if not run.finished():
                return run
            done = run
    if done is not None:
        longer = f"nanolm train --extend {done.path} --minutes 5"
        extendable = settings.texts == "corpus" and not done.settings().get("teachers")
        hint = f" (to train it longer: {longer})" if extendable else ""
        notify(Note(f"{done.path} is finished: training again from the start, as {run.path}{hint}"))
    return run


def starts_over(run: Run, settings: Settings, notify: Notify) -> bool:
    """Whether a run on this text had too little time and has to start over."""
    limits = dict.fromkeys(("minutes", "max_bytes"))
    if not run.too_short() or run.facts()["request"] | limits != settings.to_dict() | limits:
        return False
    notify(Note(f"{run.path} had too little time: starting over"))
    return True


def same_settings(run: Run, settings: Settings) -> bool:
    """Whether they equal the run's original request, or its resolved config.toml."""
    return settings.to_dict() in (run.facts()["request"], run.settings())


def refuse_finished(run: Run) -> None:
    if run.finished():
        raise DataError(f"{run.path} is finished; choose another --out, or omit it")


def refuse_other_settings(run: Run, settings: Settings) -> None:
    if same_settings(run, settings):
        return
    before, now = run.facts()["request"], settings.to_dict()
    text = f"{run.path} is unfinished and has different settings:"
    for name in before | now:
        if before.get(name) != now.get(name):
            then = before.get(name, "automatic")
            text += f"\n  {option(name)}: {then} in that run, {now.get(name, 'automatic')} now"
    raise DataError(f"{text}\nUse its settings, or choose another --out")
