"""What comes before the first step: which run, which text, and everything built or reloaded."""

import platform
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from nanolm import __version__
from nanolm.errors import DataError
from nanolm.model.gpt import GPT
from nanolm.model.huggingface import load_model
from nanolm.runs import checkpoint
from nanolm.runs.folder import Run
from nanolm.text.corpus import SCHEME, Corpus, read_corpus
from nanolm.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from nanolm.text.tokens import Store, encode_corpus
from nanolm.training.events import Note, Notify
from nanolm.training.planner import (
    TINY,
    choose_rest,
    choose_tokenizer,
    model_config,
)
from nanolm.training.settings import TrainSettings, option

ROOT = Path("runs")


@dataclass(frozen=True)
class Job:
    """All that the loop works with."""

    settings: TrainSettings  # resolved: nothing left to choose
    run: Run
    tokenizer: Tokenizer
    train_ids: Store
    val_ids: Store
    model: GPT
    checkpoint: Path | None  # to go on from
    prompt: str  # for the samples: how the held-out text begins


def read_texts(settings: TrainSettings) -> tuple[Corpus, Corpus]:
    """The training and the validation text."""
    corpus = read_corpus(settings.corpus, settings.document_separator)
    if settings.val is not None:
        return corpus, read_corpus([settings.val], settings.document_separator)
    training, validation = corpus.split(settings.val_fraction)
    if not training.documents or not validation.documents:
        raise DataError(
            f"{', '.join(settings.corpus)}: {corpus.size} bytes are too little to train on and "
            "hold some out; give at least a few sentences"
        )
    return training, validation


def choose_run(settings: TrainSettings, out: Path | None, resume: bool, notify: Notify) -> Run:
    """The folder to train in: `out`, or under runs/ one to go on with, or a new name."""
    if out is not None:
        run = Run(out)
        if run.exists():
            refuse_finished(run)
            refuse_other_settings(run, settings)
        elif not run.free():
            raise DataError(f"{out} is there already and is no run; choose another --out")
        elif resume:
            notify(Note(f"nothing to resume in {out}: starting a new run"))
        return run
    stem = Path(settings.corpus[0].removeprefix(SCHEME)).stem or "run"
    number = 1
    while not (run := Run(ROOT / (f"{stem}-{number}" if number > 1 else stem))).free():
        if run.exists() and not run.finished() and _same_settings(run, settings):
            return run
        number += 1
    if resume:
        notify(Note(f"no unfinished run of these settings to resume: starting {run.path}"))
    return run


def prepare(
    settings: TrainSettings, run: Run, training: Corpus, validation: Corpus, notify: Notify
) -> Job:
    """Tokenizer, tokens and model: new, or as the last checkpoint of the run has them."""
    request, folder, known = settings, None, None
    if run.exists():
        settings = TrainSettings.from_dict(run.settings())
        settings.check()
        known = run.facts()["fingerprints"]
        checkpoint.sweep(run.checkpoints)
        folder = checkpoint.newest_valid(run.checkpoints, lambda text: notify(Note(text)))
        checkpoint.discard_after(run.checkpoints, folder)
        if folder is None:
            notify(Note(f"{run.path} has no checkpoint to go on from: starting at step 0"))
    settings, choices = choose_tokenizer(settings, training.size)
    if folder:
        tokenizer = load_tokenizer(folder)
    else:
        if training.size >= TINY:
            notify(Note(f"preparing {training.size / 1e6:.1f} MB of text"))
        assert settings.tokenizer is not None
        tokenizer = train_tokenizer(training.documents, settings.tokenizer, settings.vocab_size)
    fingerprints = {
        "corpus": training.fingerprint(),
        "validation": validation.fingerprint(),
        "tokenizer": tokenizer.fingerprint(),
    }
    for what, fingerprint in fingerprints.items():
        if known is not None and known[what] != fingerprint:
            raise DataError(
                f"the {what} is not the one that {run.path} began with; "
                "bring it back, or start a new run with --out"
            )
    train_ids = encode_corpus(training, tokenizer)
    settings, more = choose_rest(settings, tokenizer.vocab_size, training.size, len(train_ids))
    config = model_config(settings, tokenizer.vocab_size)
    if folder:
        model = load_model(folder)
        if model.config != config:
            raise DataError(f"{run.config_file} was changed and no longer fits {folder}")
    else:
        torch.manual_seed(settings.seed)
        model = GPT(config)
    if known is None:
        for choice in choices + more:
            notify(choice)
        facts = {
            "nanolm": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}",
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "request": request.to_dict(),
            "choices": [vars(choice) for choice in choices + more],
            "fingerprints": fingerprints,
            "parameters": model.parameter_count(),
        }
        run.begin(settings.to_dict(), facts)
    return Job(
        settings=settings,
        run=run,
        tokenizer=tokenizer,
        train_ids=train_ids,
        val_ids=encode_corpus(validation, tokenizer),
        model=model,
        checkpoint=folder,
        prompt=" ".join(validation.documents[0][:40].split(" ")[:3]),
    )


def with_absolute_paths(settings: TrainSettings) -> TrainSettings:
    """A run can be repeated from any folder."""

    def absolute(path: str) -> str:
        return path if path.startswith(SCHEME) else str(Path(path).absolute())

    return replace(
        settings,
        corpus=tuple(absolute(path) for path in settings.corpus),
        val=settings.val and absolute(settings.val),
    )


def refuse_finished(run: Run) -> None:
    if run.finished():
        raise DataError(
            f"{run.path} is finished; choose another --out, or leave it away for a new name"
        )


def refuse_other_settings(run: Run, settings: TrainSettings) -> None:
    if _same_settings(run, settings):
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


def _same_settings(run: Run, settings: TrainSettings) -> bool:
    """As asked for the first time, or all spelled out, as in the run's config.toml."""
    now = settings.to_dict()
    return now == run.facts()["request"] or now == run.settings()
