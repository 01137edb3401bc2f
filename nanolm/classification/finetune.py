"""Fine-tuning: train a language model to classify texts.

>>> finetune(FinetuneSettings(data=("embedded:reviews",), start_from="none"), out="runs/reviews")
"""

import hashlib
import json
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanolm import files
from nanolm.choice import Choice
from nanolm.classification import metrics, recipe
from nanolm.classification.classifier import MISTAKES, Logits, mistakes_csv
from nanolm.classification.data import LabelSplit, Texts, split_data
from nanolm.classification.distill import Teacher
from nanolm.classification.metrics import ClassifierScores, Mistake, score, worst_mistakes
from nanolm.classification.ngrams import NgramModel
from nanolm.classification.probe import PROBE_FOLDS
from nanolm.classification.settings import FROM_SCRATCH, SCRATCH, FinetuneSettings
from nanolm.classification.task import ClassifierTask
from nanolm.errors import DataError, UsageError
from nanolm.model import huggingface
from nanolm.model.build import build_model, with_vocabulary
from nanolm.model.classifier import Classifier
from nanolm.model.config import ClassifierConfig, ModelConfig, Seq2SeqConfig
from nanolm.model.shapes import parameters_by_part
from nanolm.model.stored import checked_tensors, load_any_config, load_classifier_config, wrong_kind
from nanolm.planning.tuning import threads_for, warn_about_threads
from nanolm.pretraining.begin import ROOT, RunStart, check_context, reports
from nanolm.runs import folder as runs
from nanolm.runs.folder import Run, find_adapter
from nanolm.text import TRAINABLE
from nanolm.text.tokenizer import ByteLevel, Tokenizer, train_tokenizer
from nanolm.text.vocabulary import TINY_CORPUS
from nanolm.training.checkpointer import save_final
from nanolm.training.events import Note, Notify
from nanolm.training.interrupt import EvaluationStopped, StopRequest
from nanolm.training.metrics_log import write_result
from nanolm.training.settings import option
from nanolm.training.state import State, read_state
from nanolm.training.trainer import Trainer

MISTAKES_FILE, TEST_MISTAKES_FILE = "mistakes.csv", "test_mistakes.csv"  # in the run folder
VOCABULARY = 4096  # vocabulary size for more than a few kB of text
MOST_WORDS = 12_288  # vocabulary size of a small model with many labeled texts


@dataclass(frozen=True)
class FinetuneResult:
    """The result of a run: the last line that `nanolm finetune --json` prints."""

    run: str
    labels: tuple[str, ...]
    steps: int
    tokens: int
    seconds: float
    train_loss: float | None
    best_step: int
    stopped: str  # "steps", "minutes", "enough" or "interrupted"
    majority: float  # accuracy of the majority-class baseline on the validation set
    temperature: float | None = None  # by which the logits were divided
    val: ClassifierScores | None = None
    test: ClassifierScores | None = None
    uncalibrated: ClassifierScores | None = None  # on the validation set, before calibration
    ngram_weight: float | None = None  # of an n-gram model's logits; None if none was fitted
    accuracy_without_ngrams: float | None = None  # on the validation set
    mistakes: tuple[Mistake, ...] = ()  # on the validation set, most confident first
    test_mistakes: tuple[Mistake, ...] = ()

    def to_json(self) -> dict[str, Any]:
        values = metrics.json_value(asdict(self))
        return {name: value for name, value in values.items() if value is not None}


def finetune(
    settings: FinetuneSettings, out: str | Path | None = None, notify: Notify = lambda event: None
) -> FinetuneResult:
    """Fine-tune on `settings.data`, or resume an unfinished run with the same settings."""
    settings.check()
    start = RunStart(with_start(settings, notify), out, notify)
    base = None
    if start.settings.start_from != SCRATCH:
        base = runs.find_or_download(str(start.settings.start_from), *reports(notify))
    begin = time.monotonic()
    split = split_data(recipe.choose_fraction(start.settings), reports(notify)[1])
    with start.locked():
        task = prepare(start, base, split)
        with threads_for(task.settings.threads), StopRequest() as stop:
            warn_about_threads(task.settings, start.notify)
            task.stop = stop
            state = read_state(task.checkpoint) if task.checkpoint else State()
            try:
                if probe := task.start():
                    tried = f"{probe.accuracy:.1%} accuracy in {PROBE_FOLDS}-fold"
                    tried = f" ({tried} cross-validation)" if probe.accuracy else ""
                    what = "the classification head starts from a linear probe of the model"
                    start.notify(Note(what + tried))
                how = (task.checkpoint, start.notify, time.monotonic() - begin)
                trainer = Trainer(start.run, task.settings, task, *how)
                state = trainer.state
                with trainer.checkpointer.writer:  # nothing is written once the run is unlocked
                    try:
                        stopped = trainer.train(stop)
                    except EvaluationStopped:
                        trainer.checkpointer.finish()  # it was saved before the evaluation
                        raise
                if stopped != "interrupted":
                    trainer.checkpointer.load_best()
                return finish(task, start.run, state, stopped, start.notify)
            except EvaluationStopped:
                return finish(task, start.run, state, "interrupted", start.notify)


def with_start(settings: FinetuneSettings, notify: Notify) -> FinetuneSettings:
    """Choose the model to start from, if it was not given."""
    if settings.start_from is not None:
        return settings
    given = [option(name) for name in FROM_SCRATCH if getattr(settings, name) is not None]
    newest = next(filter(runs.is_language_model, runs.runs_by_age(ROOT)), None)
    if given:
        why = f"training from scratch, because {given[0]} was given (--from selects a model)"
    elif newest is None:
        why = f"training from scratch, because there is no language model in {ROOT}/"
    else:
        why = f"starting from {newest}, the newest language model (--from selects another)"
    notify(Note(why))
    return replace(settings, start_from=SCRATCH if given or newest is None else str(newest))


def prepare(
    start: RunStart[FinetuneSettings], base: Path | None, split: LabelSplit
) -> ClassifierTask:
    """Choose the open settings and build the task with its model, or resume both."""
    settings, texts = recipe.choose_fraction(start.settings), split.train.texts
    _, progress = reports(start.notify)
    tokenizer = choose_tokenizer(settings, base, texts, start.notify)
    fingerprints, reference, parameters = {"data": fingerprint(split)}, None, 0
    config: ModelConfig | None = None
    adapter = find_adapter(settings.adapter)
    language_model = False
    if base:
        loaded = load_any_config(base)
        if isinstance(loaded, Seq2SeqConfig):
            raise wrong_kind(base, loaded, "but this needs a language model")
        language_model = not isinstance(loaded, ClassifierConfig)
        config = loaded.base if isinstance(loaded, ClassifierConfig) else loaded
        with checked_tensors(base, loaded):
            parameters = sum(parameters_by_part(loaded).values())
        check_context(settings, config.context)
        if not language_model and not config.tied and settings.language_loss is None:
            settings = replace(settings, language_loss=0.0)
        weights = huggingface.weights_fingerprint(base, adapter)
        fingerprints["model to start from"] = weights
        reference = huggingface.BaseModel(base.resolve(), weights, adapter)
    lengths = [len(tokenizer.encode_prompt(text)) for text in texts]
    teacher, parts, choices = None, None, []
    if not start.fresh and settings.distill is None:  # begun by version 0.1
        settings = replace(settings, distill=0.0)
    if not start.fresh and settings.ngrams is None:
        settings = replace(settings, ngrams=False)
    if recipe.wants_teacher(settings, parameters, lengths):
        progress("fitting a linear n-gram model", 0, 0)
        teacher = Teacher.fit(split.train, len(split.labels), settings.seed)
    ngrams, asked = None, settings.ngrams
    if recipe.wants_ngrams(settings, lengths, len(split.labels)):
        progress("fitting a linear n-gram model", 0, 0)
        ngrams = NgramModel.fit(split.train, len(split.labels))
    settings = replace(settings, ngrams=ngrams is not None)
    if ngrams and asked is None:
        reason = "a linear model may add what a Transformer misses; --no-ngrams turns it off"
        choices.append(Choice("ngrams", len(ngrams.vocabulary), reason))
    size = None
    if language_model and (start.fresh or settings.vocab_size):
        small = recipe.is_small(settings, parameters)
        size = extended_size(settings, tokenizer, teacher, len(texts) if small else 0)
    if size:
        assert isinstance(tokenizer, ByteLevel) and config
        known = tokenizer
        tokenizer = known.extended(texts, size)
        parts = tokenizer.parts(known)  # the model's tokens that each token consists of
        added = tokenizer.vocab_size - known.vocab_size
        lengths = [len(tokenizer.encode_prompt(text)) for text in texts]
        config = replace(config, vocab_size=len(parts))
        settings = replace(settings, vocab_size=tokenizer.vocab_size)
        reason = f"{known.vocab_size:,} from the model and {added:,} learned from the labeled texts"
        choices.append(Choice("vocabulary", tokenizer.vocab_size, reason))
    fingerprints["tokenizer"] = tokenizer.fingerprint()
    folder = start.checkpoint(fingerprints)
    settings, more = recipe.choose_settings(
        settings, config, parameters, lengths, teacher, limit_epochs=start.fresh
    )
    assert settings.context and settings.long and settings.dropout is not None
    config = config or recipe.fresh_config(settings, tokenizer.vocab_size)
    classifier_config = ClassifierConfig(
        base=replace(config, dropout=settings.dropout),
        labels=split.labels,
        pool=settings.pool,  # type: ignore[arg-type]
        window=settings.context,
        long=settings.long,  # type: ignore[arg-type]
    )
    torch.manual_seed(settings.seed)
    head: nn.Module | None = None
    if base and not language_model:
        model = huggingface.load_classifier(base, settings.dropout, adapter).base
    else:
        fresh = classifier_config.base
        load = partial(huggingface.load_model, dropout=settings.dropout, adapter=adapter)
        model = load(base) if base else build_model(fresh)
        model = with_vocabulary(model, parts) if parts else model
        head = model.head
    classifier = Classifier(classifier_config, model)
    if folder:
        saved = load_classifier_config(folder)
        if replace(saved, base=replace(saved.base, dropout=settings.dropout)) != classifier_config:
            raise DataError(f"{start.run.config_file} was changed and no longer matches {folder}")
    how = (classifier, head, folder, progress, reference, teacher)
    task = ClassifierTask(settings, split, tokenizer, *how)
    if ngrams:
        task.add_ngrams(ngrams)
    for text in (split.how, *split.examples, *split.notes) if start.fresh else ():
        start.notify(Note(text))  # only once the settings are known to be valid
    start.record(task.settings, choices + more + task.choices, fingerprints, classifier)
    return task


def extended_size(
    settings: FinetuneSettings, tokenizer: Tokenizer, teacher: Teacher | None, count: int
) -> int | None:
    """The size to which the model's vocabulary is extended with words from the labeled texts, on
    request or by default; None if it is not. A small model learns little more than which words it
    sees, and that is hard to learn from short tokens. So words are added when it distills an n-gram
    model, or when it has many texts (`count`, 0 for a large model)."""
    size, known = settings.vocab_size, tokenizer.vocab_size
    if size is not None:
        if not isinstance(tokenizer, ByteLevel) or size < known:
            has = f"{settings.start_from} has a vocabulary of {known:,} tokens"
            which = "only nanolm's own BPE tokenizers can be extended, and only to a larger size"
            raise UsageError(f"--vocab-size {size}: {has}; {which}")
        return size if size > known else None
    distilled = teacher is not None and (settings.distill or teacher.weight()) > 0
    size = MOST_WORDS if count >= recipe.FEW_TEXTS else VOCABULARY if distilled else 0
    return size if isinstance(tokenizer, ByteLevel) and known < size else None


def choose_tokenizer(
    settings: FinetuneSettings, base: Path | None, texts: list[str], notify: Notify
) -> Tokenizer:
    if base is not None:
        return runs.model_tokenizer(base)
    if settings.tokenizer not in (None, *TRAINABLE):
        return runs.find_tokenizer(settings.tokenizer, lambda text: notify(Note(text)))
    vocabulary = settings.vocab_size or (None if sum(map(len, texts)) < TINY_CORPUS else VOCABULARY)
    return train_tokenizer(texts, settings.tokenizer or "bpe", vocabulary)


def fingerprint(split: LabelSplit) -> str:
    """A hash of all texts, their labels and their split."""
    digest = hashlib.sha256()
    for part in (split.train, split.val, split.test):
        rows = zip(part.texts, part.truth.tolist(), strict=True) if part else ()
        digest.update(json.dumps([split.labels, list(rows)]).encode())
    return digest.hexdigest()


def finish(
    task: ClassifierTask, run: Run, state: State, stopped: str, notify: Notify
) -> FinetuneResult:
    """Evaluate the best checkpoint, calibrate it, and write all results."""
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
        majority=metrics.majority(split.val.truth, len(labels)),
    )
    if stopped == "interrupted":
        return result
    logits, truth = task.logits(task.val), split.val.truth
    (mixed, ratio), ngrams = task.mixed(logits), task.ngrams
    temperature = metrics.fit_temperature(mixed, truth)
    # Dividing the weights of the last layer gives calibrated probabilities to everyone who loads
    # the folder (with the n-grams, if there are any).
    with torch.no_grad():
        task.classifier.score.weight /= temperature
    task.ngrams = ngrams.scaled(ratio / temperature) if ngrams and ratio else None
    task.classifier.config = replace(task.classifier.config, ngrams=task.ngrams is not None)
    test_logits = None
    if task.test and split.test:  # before anything is written
        test_logits = task.logits(task.test)
        test_logits += task.ngrams.logits(split.test.texts) if task.ngrams else 0
    save_final(run, state, task.write_final)
    if task.base and task.refers_to_base():
        whole = f"`nanolm export {run.path} --to FOLDER` writes a whole model"
        notify(Note(f"{run.path}/best needs {task.base.folder} for the frozen weights; {whole}"))

    def measure(part: Texts, logits: Logits, temperature: float, file: str) -> tuple[Any, ...]:
        scores = score(logits, part.truth, labels, temperature)
        mistakes = worst_mistakes(part.texts, logits, part.truth, labels, temperature)
        files.write_atomically(run.path / file, mistakes_csv(mistakes))
        return scores, mistakes[:MISTAKES]

    val, mistakes = measure(split.val, mixed, temperature, MISTAKES_FILE)
    result = replace(result, temperature=round(temperature, 4), val=val, mistakes=mistakes)
    if ngrams:
        alone = score(logits, truth, labels).accuracy
        result = replace(result, ngram_weight=ratio, accuracy_without_ngrams=alone)
    if test_logits is not None and split.test:
        test, mistakes = measure(split.test, test_logits, 1.0, TEST_MISTAKES_FILE)
        result = replace(result, test=test, test_mistakes=mistakes)
    result = replace(result, uncalibrated=score(mixed, truth, labels))
    write_result(run, result.to_json(), notify)
    return result
