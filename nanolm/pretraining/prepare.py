"""What comes before the first step: which run, which text, and everything built or reloaded."""

import itertools
import math
import platform
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from nanolm import __version__, files
from nanolm.choice import Choice, Report
from nanolm.errors import DataError, UsageError
from nanolm.model.base import Model
from nanolm.model.build import build_model
from nanolm.model.config import ModelConfig
from nanolm.model.config_json import model_type
from nanolm.model.device import choose_device
from nanolm.model.huggingface import load_config, load_model
from nanolm.planning.planner import BEFORE, MINUTES, Plan, make_plan, model_config
from nanolm.planning.scaling_law import Forecast, how_hard
from nanolm.planning.sizes import Text
from nanolm.planning.tuning import fit_to_machine
from nanolm.runs import checkpoint
from nanolm.runs.folder import Run, find_or_download, find_tokenizer, model_tokenizer
from nanolm.text import NAMED, TRAINABLE
from nanolm.text.sources import ADDRESSES, SCHEME, STDIN
from nanolm.text.store import Prepared, Request, open_tokens, prepare_tokens
from nanolm.text.tokenizer import Tokenizer
from nanolm.text.vocabulary import doublings
from nanolm.training.events import Note, Notify, Planned, Preparing
from nanolm.training.settings import DEFAULT_SPLIT, Settings, TrainSettings, option

ROOT = Path("runs")
READ = 50_000  # bytes of text a second, about, on a CPU
PLANNING = 0.07  # of the time, and
PLANNING_SECONDS = 0.5  # this much, are for the plan; of what is left before the first step,
LEAST_FOR_TEXT = 0.06  # of the time at least is for the text
COUNTING = 1.5  # seconds that telling how hard a text is takes, about
S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class Job:
    """All that the loop works with."""

    settings: TrainSettings  # resolved: nothing left to choose
    run: Run
    text: Prepared
    model: Model
    checkpoint: Path | None  # to go on from
    forecast: Forecast | None
    counted: bool  # somebody asked for a number of steps
    base: Path | None = None  # the model that it began with

    def facts(self) -> dict[str, Any]:
        """All that another process needs to do its part, if it sees the same files."""

        def place(path: Path | None) -> str | None:
            return str(path.absolute()) if path else None

        return {
            "settings": self.settings.to_dict(),
            "run": place(self.run.path),
            "text": place(self.text.folder),
            "checkpoint": place(self.checkpoint),
            "base": place(self.base),
            "counted": self.counted,
        }


def taken_up(facts: dict[str, Any]) -> Job:
    """The job that another process has told of."""
    settings = TrainSettings.from_dict(facts["settings"])
    folder, base = (Path(facts[name]) if facts[name] else None for name in ("checkpoint", "base"))
    text = open_tokens(Path(facts["text"]))
    config = wanted_config(settings, base, text)
    model = starting_model(settings, config, base, folder)
    run = Run(Path(facts["run"]))
    return Job(settings, run, text, model, folder, None, facts["counted"], base)


def numbered(stem: str) -> Iterator[Path]:
    """runs/novel, runs/novel-2, ..."""
    yield ROOT / stem
    yield from (ROOT / f"{stem}-{number}" for number in itertools.count(2))


def choose_folder(
    text: str, what: str, out: str | Path | None, fits: Callable[[Path], bool | None]
) -> Path:
    """Where many runs on `text` go: `out`, or under runs/ what is to be gone on with, or a new
    name. `fits` says whether that is in a folder; None: nothing of the kind is."""
    places = numbered(f"{run_name(text)}-{what}") if out is None else [Path(out)]
    for folder in places:
        found = fits(folder)
        if found or (found is None and Run(folder).free()):
            return folder
    raise DataError(
        f"{out} is there, and no unfinished {what} of these settings; try another --out"
    )


def find_base(settings: TrainSettings, notify: Notify) -> Path | None:
    """The folder of the model to start from, if it is not to start from nothing."""
    if settings.start_from is None:
        return None
    note, progress = reports(notify)
    base = find_or_download(settings.start_from, note, progress)
    most = load_config(base).context
    if settings.context is not None and settings.context > most:
        raise UsageError(
            f"--context {settings.context}: {settings.start_from} looks back on {most:,} tokens "
            "at most"
        )
    return base


def time_budget(settings: TrainSettings) -> float | None:
    """Seconds for all of it, also where the default is taken; None where the clock ends nothing."""
    if settings.minutes is None and not (settings.steps or settings.epochs or settings.tokens):
        return 60 * MINUTES
    return settings.minutes and 60 * settings.minutes


def text_deadline(settings: TrainSettings, elapsed: Callable[[], float]) -> float | None:
    """Until when the text has to be prepared, by `time.monotonic`, `elapsed` seconds of the time
    for all being gone; None where nobody waits for it."""
    budget = time_budget(settings)
    if budget is None:
        return None
    left = budget * (BEFORE - PLANNING) - PLANNING_SECONDS - elapsed()
    return time.monotonic() + max(left, budget * LEAST_FOR_TEXT)


def prepare_text(
    settings: TrainSettings, base: Path | None, notify: Notify, until: float | None = None
) -> Prepared:
    """The text as tokens: training and validation; as much of it as can be prepared `until`
    then."""
    note, progress = reports(notify)
    tokenizer: str | Tokenizer | None = settings.tokenizer
    if base is not None:
        tokenizer = model_tokenizer(base)
    elif settings.tokenizer not in (None, *TRAINABLE):
        tokenizer = find_tokenizer(settings.tokenizer, note)
    most_doublings, budget = None, time_budget(settings)
    if budget and choose_device(settings.device)[0] == "cpu":
        most_doublings = doublings(budget * READ)
    request = Request(
        corpus=settings.corpus,
        val=settings.val,
        val_fraction=settings.val_fraction,
        val_split=settings.val_split or DEFAULT_SPLIT,
        reading=settings.reading(),
        tokenizer=tokenizer,
        vocab_size=settings.vocab_size,
        most_doublings=most_doublings,
        max_bytes=settings.max_bytes,
    )
    return prepare_tokens(request, progress, note, until=until)


def reports(notify: Notify) -> tuple[Callable[[str], None], Report]:
    """How others tell something worth knowing, and how far they are."""
    return lambda text: notify(Note(text)), lambda *how_far: notify(Preparing(*how_far))


def choose_run(settings: Settings, out: Path | None, resume: bool, notify: Notify) -> Run:
    """The folder to train in: `out`, or under runs/ one to go on with, or a new name."""
    if out is not None:
        run = Run(out)
        if run.exists():
            if not started_over(run, settings, notify):
                refuse_finished(run)
                refuse_other_settings(run, settings)
        elif not run.free():
            raise DataError(f"{out} is there already and is no run; choose another --out")
        elif resume:
            notify(Note(f"nothing to resume in {out}: starting a new run"))
        return run
    stem = run_name(settings.to_dict()[settings.texts][0])
    done = None  # the last of those that did just this
    for path in numbered(stem):
        run = Run(path)
        if run.free():
            break
        if run.exists() and started_over(run, settings, notify):
            return run
        if run.exists() and same_settings(run, settings):
            if not run.finished():
                return run
            done = run
    if done is not None:
        longer = f"nanolm train --extend {done.path} --minutes 5"
        hint = f" (to train that one further: {longer})" if settings.texts == "corpus" else ""
        notify(Note(f"{done.path} is finished: training again from the start, as {run.path}{hint}"))
    elif resume:
        notify(Note(f"no unfinished run of these settings to resume: starting {run.path}"))
    return run


def started_over(run: Run, settings: Settings, notify: Notify) -> bool:
    """Whether a run of this text had too little time, and so is to be done anew."""
    limits = ("minutes", "max_bytes")
    before, now = (
        {name: value for name, value in asked.items() if name not in limits}
        for asked in (run.facts()["request"], settings.to_dict())
    )
    if not run.too_short() or before != now:
        return False
    notify(Note(f"{run.path} had too little time before: starting over"))
    return True


def run_name(corpus: str) -> str:
    """`novel` for novel.txt.gz, `letters` for letters/, `stdin` for a pipe."""
    if corpus == STDIN:
        return "stdin"
    name = Path(corpus.removeprefix(SCHEME).split("?")[0]).name
    return re.sub(r"[^\w.-]+", "-", name.partition(".")[0]).strip("-") or "run"


def plan_for(
    settings: TrainSettings,
    base: Path | None,
    text: Prepared,
    elapsed: Callable[[], float],
    notify: Notify,
    processes: int = 1,
) -> Plan:
    """What to do with a text, `elapsed` seconds of the time for it being gone."""
    tokenizer = text.tokenizer
    budget = time_budget(settings)

    @cache
    def hard() -> float | None:
        if budget and BEFORE * budget - elapsed() < COUNTING:
            return None
        return how_hard(text.train, text.val, tokenizer)

    facts = Text(tokenizer.vocab_size, text.size, len(text.train), hard)
    given = load_config(base) if base else None
    plan = make_plan(settings, facts, given, elapsed, reports(notify)[1], processes)
    if given is None:
        plan.fill(tokenizer=tokenizer.kind)
    plan.fill(val_split=DEFAULT_SPLIT)
    if plan.settings.tokenizer == "bpe":
        plan.settings = replace(plan.settings, vocab_size=tokenizer.vocab_size)
    plan.settings = replace(plan.settings, max_bytes=text.max_bytes)
    plan.choices[:0] = text.choices
    return plan


def prepare(
    settings: TrainSettings,
    run: Run,
    base: Path | None,
    text: Prepared,
    elapsed: Callable[[], float],
    notify: Notify,
    processes: int = 1,
) -> Job:
    """Settings and model: new, from another one, or as the last checkpoint of the run has them."""
    request, folder = settings, None
    fresh = not run.exists()
    if not fresh:
        settings = saved_settings(run)
        folder = resume_from(run, text.fingerprints, notify)
    plan = plan_for(settings, base, text, elapsed, notify, processes)
    settings, choices, forecast = plan.settings, plan.choices, plan.forecast
    config = wanted_config(settings, base, text)
    model = starting_model(settings, config, base, folder)
    if folder and model.config != config:
        raise DataError(f"{run.config_file} was changed and no longer fits {folder}")
    spare = math.inf
    if settings.minutes:
        spare = max(0.0, 60 * settings.minutes * BEFORE - elapsed())
    settings, measured = fit_to_machine(settings, model, spare)
    choices += measured
    family, reason = model_type(config)
    if family == "nanolm":
        choices.append(Choice("format", "nanolm only", f"transformers has none like it: {reason}"))
    if fresh:
        parameters = model.parameter_count()
        more = {"forecast": asdict(forecast)} if forecast else {}
        begin(run, request, settings, choices, text.fingerprints, parameters, notify, more)
    facts = run.facts()
    if not fresh and isinstance(facts.get("forecast"), dict):
        forecast = Forecast(**facts["forecast"])
    counted = any(facts["request"].get(name) for name in ("steps", "epochs", "tokens"))
    return Job(settings, run, text, model, folder, forecast, counted, base)


def saved_settings(run: Run) -> TrainSettings:
    """The resolved settings of a run that exists."""
    # A run of 0.1.0 held out the end of its text, and did not say so.
    settings = TrainSettings.from_dict({"val_split": "end", **run.settings()})
    settings.check()
    return settings


def wanted_config(settings: TrainSettings, base: Path | None, text: Prepared) -> ModelConfig:
    if base is None:
        return model_config(settings, text.tokenizer.vocab_size)
    assert settings.dropout is not None
    return replace(load_config(base), dropout=settings.dropout)


def starting_model(
    settings: TrainSettings, config: ModelConfig, base: Path | None, folder: Path | None
) -> Model:
    """As it was saved in `folder`, or as `base` is, or new."""
    if folder:
        return load_model(folder)
    if base:
        return load_model(base, config.dropout)
    torch.manual_seed(settings.seed)
    return build_model(config)


def resume_from(run: Run, fingerprints: dict[str, str], notify: Notify) -> Path | None:
    """The checkpoint to go on from, if there is one, and if all is what the run began with."""
    known = run.facts()["fingerprints"]
    files.sweep(run.checkpoints)
    folder = checkpoint.newest_valid(run.checkpoints, lambda text: notify(Note(text)))
    checkpoint.discard_after(run.checkpoints, folder)
    if folder is None:
        notify(Note(f"{run.path} has no checkpoint to go on from: starting at step 0"))
    for what, fingerprint in fingerprints.items():
        if known.get(what) != fingerprint:
            raise DataError(
                f"the {what} is not the one that {run.path} began with; "
                "bring it back, or start a new run with --out"
            )
    return folder


def begin(
    run: Run,
    request: Settings,
    settings: Settings,
    choices: list[Choice],
    fingerprints: dict[str, str],
    parameters: int,
    notify: Notify,
    more: dict[str, Any] | None = None,
) -> None:
    """Tell every choice, and write down what is known before the first step."""
    notify(Planned(tuple(choices)))
    facts = {
        "nanolm": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "request": request.to_dict(),
        "choices": [vars(choice) for choice in choices],
        "fingerprints": fingerprints,
        "parameters": parameters,
        **(more or {}),
    }
    run.begin(settings.to_dict(), facts)


def with_absolute_paths(settings: S) -> S:
    """A run can be repeated from any folder."""

    def absolute(path: str) -> str:
        kept = path == STDIN or path.startswith((SCHEME, *ADDRESSES))
        return path if kept else str(Path(path).absolute())

    tokenizer, start = settings.tokenizer, settings.start_from
    changes: dict[str, Any] = {
        settings.texts: tuple(absolute(path) for path in getattr(settings, settings.texts)),
        "start_from": start if start is None or not Path(start).exists() else absolute(start),
        "tokenizer": tokenizer if tokenizer in (None, *TRAINABLE, *NAMED) else absolute(tokenizer),
    }
    for name in settings.files:
        path = getattr(settings, name)
        changes[name] = path and absolute(path)
    return replace(settings, **changes)


def refuse_finished(run: Run) -> None:
    if run.finished():
        raise DataError(
            f"{run.path} is finished; choose another --out, or leave it away for a new name"
        )


def refuse_other_settings(run: Run, settings: Settings) -> None:
    if same_settings(run, settings):
        return
    before, now = run.facts()["request"], settings.to_dict()
    differences = [
        f"  {option(name)}: {before.get(name, 'automatic')} there, {now.get(name, 'automatic')} now"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    raise DataError(
        f"{run.path} is unfinished and has other settings; give the same to go on with it, "
        "or choose another --out:\n" + "\n".join(differences)
    )


def same_settings(run: Run, settings: Settings) -> bool:
    """As asked for the first time, or all spelled out, as in the run's config.toml."""
    now = settings.to_dict()
    return now == run.facts()["request"] or now == run.settings()
