"""Fine-tuning: a trained language model learns to classify texts.

>>> finetune(FinetuneSettings(data=("embedded:reviews",), start_from="none"), out="runs/reviews")
"""

import hashlib
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanolm import files
from nanolm.choice import Choice
from nanolm.classification.classifier import MISTAKES, mistakes_csv
from nanolm.classification.data import LabelSplit, split_data
from nanolm.classification.distill import Teacher
from nanolm.classification.metrics import (
    ClassifierScores,
    Mistake,
    fit_temperature,
    json_value,
    majority,
    score,
    worst_mistakes,
)
from nanolm.classification.probe import PROBE_FOLDS, LinearProbe
from nanolm.classification.recipe import (
    choose_fraction,
    choose_settings,
    fresh_config,
    wants_teacher,
)
from nanolm.classification.settings import FROM_SCRATCH, SCRATCH, FinetuneSettings
from nanolm.classification.task import ClassifierTask
from nanolm.errors import DataError, UsageError
from nanolm.model.base import Model
from nanolm.model.build import build_model, with_vocabulary
from nanolm.model.classifier import Classifier
from nanolm.model.config import ClassifierConfig, ModelConfig
from nanolm.model.huggingface import (
    BaseModel,
    load_classifier,
    load_model,
    save_model,
    weights_fingerprint,
)
from nanolm.model.stored import (
    checked_tensors,
    load_any_config,
    load_classifier_config,
    parameters_by_part,
)
from nanolm.planning.tuning import threads_for, warn_about_threads
from nanolm.pretraining.begin import ROOT, RunStart, check_context, reports
from nanolm.runs import checkpoint
from nanolm.runs.folder import (
    Run,
    find_or_download,
    find_tokenizer,
    is_classifier,
    model_tokenizer,
    runs_by_age,
)
from nanolm.text import TRAINABLE
from nanolm.text.tokenizer import ByteLevel, Tokenizer, train_tokenizer
from nanolm.text.vocabulary import TINY_CORPUS
from nanolm.training.events import Note, Notify
from nanolm.training.interrupt import StopRequest
from nanolm.training.metrics_log import write_result
from nanolm.training.settings import option
from nanolm.training.state import State
from nanolm.training.trainer import Trainer

MISTAKES_FILE, TEST_MISTAKES_FILE = "mistakes.csv", "test_mistakes.csv"  # in the run folder
FINAL = "final"  # the folder of the finished classifier, beside the checkpoints
VOCABULARY = 4096  # of a tokenizer for texts of more than a few kB


@dataclass(frozen=True)
class FinetuneResult:
    """What a run came to: the last line that `nanolm finetune --json` prints."""

    run: str
    labels: tuple[str, ...]
    steps: int
    tokens: int
    seconds: float
    train_loss: float | None
    best_step: int
    stopped: str  # "steps", "minutes", "enough" or "interrupted"
    majority: float  # what always the commonest label would get on the validation texts
    temperature: float | None = None  # what the scores were divided by
    val: ClassifierScores | None = None
    test: ClassifierScores | None = None
    uncalibrated: ClassifierScores | None = None  # on the validation texts, before that division
    mistakes: tuple[Mistake, ...] = ()  # on the validation texts, the most confident first
    test_mistakes: tuple[Mistake, ...] = ()

    def to_json(self) -> dict[str, Any]:
        values = json_value(asdict(self))
        return {name: value for name, value in values.items() if value is not None}


def finetune(
    settings: FinetuneSettings,
    out: str | Path | None = None,
    resume: bool = False,
    notify: Notify = lambda event: None,
) -> FinetuneResult:
    """Fine-tune on `settings.data`, or go on with an unfinished run of the same settings."""
    settings.check()
    start = RunStart(with_start(settings, notify), out, resume, notify)
    split = split_data(choose_fraction(start.settings), reports(notify)[1])
    base = None
    if start.settings.start_from != SCRATCH:
        base = find_or_download(str(start.settings.start_from), *reports(notify))
    with start.locked():
        task = prepare(start, base, split)
        with threads_for(task.settings.threads), StopRequest() as stop:
            warn_about_threads(task.settings, start.notify)
            begin = time.monotonic()
            if probe := task.start():
                start.notify(Note(in_words(probe)))
            spent = time.monotonic() - begin
            trainer = Trainer(start.run, task.settings, task, task.checkpoint, start.notify, spent)
            stopped = trainer.train(stop)
            if stopped != "interrupted":
                trainer.checkpointer.load_best()
            return finish(task, start.run, trainer.state, stopped, start.notify)


def with_start(settings: FinetuneSettings, notify: Notify) -> FinetuneSettings:
    """What to start from, where that was left open."""
    if settings.start_from is not None:
        return settings
    given = [option(name) for name in FROM_SCRATCH if getattr(settings, name) is not None]
    newest = next((run for run in runs_by_age(ROOT) if not is_classifier(run)), None)
    start = SCRATCH
    if given:
        why = f"training from scratch, since {given[0]} is given (--from for another start)"
    elif newest is None:
        why = f"no run of a language model under {ROOT}/ to start from: training from scratch"
    else:
        start = str(newest)
        why = f"starting from {newest}, the newest run of a language model (--from for another)"
    notify(Note(why))
    return replace(settings, start_from=start)


def prepare(
    start: RunStart[FinetuneSettings], base: Path | None, split: LabelSplit
) -> ClassifierTask:
    """Plan what was left open and build the task with its model, or resume both."""
    settings, texts = choose_fraction(start.settings), split.train.texts
    _, progress = reports(start.notify)
    tokenizer = choose_tokenizer(settings, base, texts, start.notify)
    fingerprints, reference = {"data": fingerprint(split)}, None
    config: ModelConfig | None = None
    parameters = 0
    if base:
        loaded = load_any_config(base)
        config = loaded.base if isinstance(loaded, ClassifierConfig) else loaded
        with checked_tensors(base, loaded):
            parameters = sum(parameters_by_part(loaded).values())
        check_context(settings, config.context)
        headless = isinstance(loaded, ClassifierConfig) and not config.tied
        if headless and settings.language_loss is None:
            settings = replace(settings, language_loss=0.0)
        fingerprints["model to start from"] = weights_fingerprint(base)
        reference = BaseModel(base.resolve(), fingerprints["model to start from"])
    lengths = [len(tokenizer.encode_prompt(text)) for text in texts]
    teacher, parts, choices = None, None, []
    if not start.fresh and settings.distill is None:  # begun by version 0.1
        settings = replace(settings, distill=0.0)
    if wants_teacher(settings, parameters, lengths):
        progress("fitting a linear model of n-grams", 0, 0)
        teacher = Teacher.fit(split.train, len(split.labels), settings.seed)
    if wants_words(settings, base, tokenizer, teacher, start.fresh):
        assert isinstance(tokenizer, ByteLevel) and config
        known = tokenizer
        tokenizer = known.extended(texts, settings.vocab_size or VOCABULARY)
        parts, added = tokenizer.parts(known), tokenizer.vocab_size - known.vocab_size
        lengths = [len(tokenizer.encode_prompt(text)) for text in texts]
        config = replace(config, vocab_size=len(parts))
        settings = replace(settings, vocab_size=tokenizer.vocab_size)
        reason = f"the model's {known.vocab_size:,}, and {added:,} learned from the labelled texts"
        choices = [Choice("vocabulary", tokenizer.vocab_size, reason)]
    fingerprints["tokenizer"] = tokenizer.fingerprint()
    folder = start.checkpoint(fingerprints)
    settings, more = choose_settings(settings, config, parameters, lengths, teacher)
    assert settings.context and settings.long and settings.dropout is not None
    config = config or fresh_config(settings, tokenizer.vocab_size)
    classifier_config = ClassifierConfig(
        base=replace(config, dropout=settings.dropout),
        labels=split.labels,
        pool=settings.pool,  # type: ignore[arg-type]
        window=settings.context,
        long=settings.long,  # type: ignore[arg-type]
    )
    torch.manual_seed(settings.seed)
    classifier, head = start_model(classifier_config, base, parts)
    if folder:
        saved = load_classifier_config(folder)
        saved = replace(saved, base=replace(saved.base, dropout=settings.dropout))
        if saved != classifier_config:
            raise DataError(f"{start.run.config_file} was changed and no longer fits {folder}")
    task = ClassifierTask(
        settings, split, tokenizer, classifier, head, folder, progress, reference, teacher
    )
    for text in (split.how, *split.examples, *split.notes) if start.fresh else ():
        start.notify(Note(text))  # now that nothing is wrong with the settings
    start.record(task.settings, choices + more + task.choices, fingerprints, classifier)
    return task


def in_words(probe: LinearProbe) -> str:
    what = "the head starts from a linear probe of the model as it is"
    if not probe.accuracy:
        return what
    return f"{what} ({100 * probe.accuracy:.1f} % accuracy in {PROBE_FOLDS}-fold cross-validation)"


def wants_words(
    settings: FinetuneSettings,
    base: Path | None,
    tokenizer: Tokenizer,
    teacher: Teacher | None,
    fresh: bool,
) -> bool:
    """Whether to extend the model's vocabulary with words of the labelled texts: on request, or
    when distilling an n-gram model, which is hard to learn from small pieces of words."""
    if base is None or isinstance(load_any_config(base), ClassifierConfig):
        return False
    if settings.vocab_size is not None:
        if not isinstance(tokenizer, ByteLevel) or settings.vocab_size < tokenizer.vocab_size:
            raise UsageError(
                f"--vocab-size {settings.vocab_size}: {settings.start_from} has a vocabulary of "
                f"{tokenizer.vocab_size:,} ({tokenizer.kind}); only one of nanolm's own BPE "
                "tokenizers can be extended, to more tokens than it has"
            )
        return settings.vocab_size > tokenizer.vocab_size
    distilled = teacher is not None and (settings.distill or teacher.weight()) > 0
    small = isinstance(tokenizer, ByteLevel) and tokenizer.vocab_size < VOCABULARY
    return fresh and distilled and small


def start_model(
    config: ClassifierConfig, base: Path | None, parts: list[list[int]] | None
) -> tuple[Classifier, nn.Module | None]:
    """A classifier on the pretrained model, or a new one, and the language-modeling head.
    `parts` lists, for each token of an extended vocabulary, the model's tokens it consists of."""
    if base is None:
        model: Model = build_model(config.base)
    elif isinstance(load_any_config(base), ClassifierConfig):
        return Classifier(config, load_classifier(base, config.base.dropout).base), None
    else:
        model = load_model(base, config.base.dropout)
    if parts:
        model = with_vocabulary(model, parts)
    head = model.head
    return Classifier(config, model), head


def choose_tokenizer(
    settings: FinetuneSettings, base: Path | None, texts: list[str], notify: Notify
) -> Tokenizer:
    if base is not None:
        return model_tokenizer(base)
    if settings.tokenizer not in (None, *TRAINABLE):
        return find_tokenizer(settings.tokenizer, lambda text: notify(Note(text)))
    size = sum(map(len, texts))
    vocabulary = settings.vocab_size or (None if size < TINY_CORPUS else VOCABULARY)
    return train_tokenizer(texts, settings.tokenizer or "bpe", vocabulary)


def fingerprint(split: LabelSplit) -> str:
    """Of every text and label, and of which part each is in."""
    digest = hashlib.sha256()
    for part in (split.train, split.val, split.test):
        rows = zip(part.texts, part.truth.tolist(), strict=True) if part else ()
        digest.update(json.dumps([split.labels, list(rows)]).encode())
    return digest.hexdigest()


def finish(
    task: ClassifierTask, run: Run, state: State, stopped: str, notify: Notify
) -> FinetuneResult:
    """Measure the best model, calibrate it, and write all that is left behind."""
    split, labels = task.split, task.split.labels
    result = FinetuneResult(
        run=str(run.path),
        labels=labels,
        steps=state.step,
        tokens=state.tokens,
        seconds=round(state.seconds, 3),
        train_loss=state.train_loss,
        best_step=state.best_step,
        stopped=stopped,
        majority=majority(split.val.truth, len(labels)),
    )
    if stopped == "interrupted":
        return result
    logits, truth = task.logits(task.val), split.val.truth
    temperature = fit_temperature(logits, truth)
    # What is divided by it are the weights of the last layer, so everybody who loads the folder
    # has calibrated probabilities.
    with torch.no_grad():
        task.classifier.score.weight /= temperature
    save_final(task, run, state)
    mistakes = worst_mistakes(split.val.texts, logits, truth, labels, temperature)
    files.write_atomically(run.path / MISTAKES_FILE, mistakes_csv(mistakes))
    if task.test and split.test:
        test_logits = task.logits(task.test)  # by the calibrated model
        test_mistakes = worst_mistakes(split.test.texts, test_logits, split.test.truth, labels)
        files.write_atomically(run.path / TEST_MISTAKES_FILE, mistakes_csv(test_mistakes))
        result = replace(
            result,
            test=score(test_logits, split.test.truth, labels),
            test_mistakes=test_mistakes[:MISTAKES],
        )
    result = replace(
        result,
        temperature=round(temperature, 4),
        val=score(logits, truth, labels, temperature),
        uncalibrated=score(logits, truth, labels),
        mistakes=mistakes[:MISTAKES],
    )
    write_result(run, result.to_json(), notify)
    return result


def save_final(task: ClassifierTask, run: Run, state: State) -> None:
    def write(folder: Path) -> None:
        save_model(task.whole(), folder, task.tokenizer)
        best = {"step": state.best_step, "seconds": state.seconds}
        (folder / "state.json").write_text(json.dumps(best) + "\n", encoding="utf-8")

    folder = files.commit(run.checkpoints, FINAL, write)
    checkpoint.point(run.path / "best", folder)
