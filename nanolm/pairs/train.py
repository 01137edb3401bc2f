"""Trains a sequence-to-sequence model on pairs of texts, from reading them to the finished run.

>>> train_pairs(PairSettings(pairs=("words.tsv",), minutes=2), out="runs/words")
"""

import math
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanolm.choice import Choice, Chosen, Report
from nanolm.errors import DataError, TooLittleTime, refuse
from nanolm.formats import counted
from nanolm.model.build import build_seq2seq
from nanolm.model.config import Seq2SeqConfig
from nanolm.model.device import choose_device
from nanolm.model.huggingface import load_seq2seq, weights_fingerprint
from nanolm.model.seq2seq import Seq2Seq
from nanolm.model.stored import load_seq2seq_config
from nanolm.pairs import recipe
from nanolm.pairs.data import EncodedPairs, PairBatches, PairSplit, encode_pairs, split_pairs
from nanolm.pairs.metrics import LengthScores, PairScores, by_length, score_pairs
from nanolm.pairs.settings import TOKENIZERS, PairSettings
from nanolm.pairs.task import FINAL_SECONDS, LEAST_SCORED, SAMPLES, PairData, PairJob, PairTask
from nanolm.planning import tuning
from nanolm.pretraining.begin import RunStart, check_context, pipe_problems, reports
from nanolm.pretraining.session import all_steps, first_process, stopwatch
from nanolm.runs import folder as runs
from nanolm.runs.folder import Run
from nanolm.text.pairs import Pairs
from nanolm.text.tokenizer import Tokenizer, train_tokenizer
from nanolm.training.distributed import World, join_world
from nanolm.training.events import Note, Notify
from nanolm.training.interrupt import EvaluationStopped, StopRequest
from nanolm.training.metrics_log import write_result
from nanolm.training.trainer import Trainer

LENGTH_MULTIPLE = {"cpu": 1, "cuda": 8, "mps": 1}  # batches are padded to a multiple of this


@dataclass(frozen=True)
class PairResult:
    """The result of a run: the last line that `nanolm train-pairs --json` prints."""

    run: str
    steps: int
    tokens: int
    seconds: float
    train_loss: float | None
    val_loss: float | None
    best_step: int
    # "steps" or "minutes" (the budget is used up), "interrupted" or "too little time"
    stopped: str
    setup_seconds: float = 0.0  # before the first step
    val: PairScores | None = None
    test: PairScores | None = None
    by_length: list[LengthScores] | None = None  # of the validation pairs

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class PairText:
    """The pairs as texts, with what turns them into tokens."""

    split: PairSplit
    settings: PairSettings  # with the tokenizer chosen
    choices: list[Choice]
    tokenizer: Tokenizer
    source_tokenizer: Tokenizer | None

    def fingerprints(self) -> dict[str, str]:
        tokenizers = [self.tokenizer, *filter(None, [self.source_tokenizer])]
        ids = "".join(tokenizer.fingerprint() for tokenizer in tokenizers)
        return {"data": self.split.fingerprint(), "tokenizer": ids}

    def encode(self, pairs: Pairs, settings: PairSettings, progress: Report) -> EncodedPairs:
        multiple = LENGTH_MULTIPLE[choose_device(settings.device)[0]]
        assert settings.context
        tokenizers = (self.tokenizer, self.source_tokenizer or self.tokenizer)
        return encode_pairs(pairs, *tokenizers, settings.context, multiple, progress)


def train_pairs(
    settings: PairSettings,
    out: str | Path | None = None,
    notify: Notify = lambda event: None,
    started: float | None = None,
) -> PairResult:
    """Train on `settings.pairs`, or resume an unfinished run with the same settings. Minutes count
    from `started`, by `time.monotonic`, or from now. Other processes call `follow`."""
    elapsed = stopwatch(started)
    with first_process(settings) as world:
        if world.size > 1:
            refuse(pipe_problems(settings, "each process reads the pairs"))
        start = RunStart(settings, out, notify)
        base = None
        if start.settings.start_from is not None:
            base = runs.find_or_download(start.settings.start_from, *reports(notify))
        text = read_text(start.settings, base, notify)
        with start.locked():
            job = make_job(start, base, text)
            folders = {"base": base, "checkpoint": job.checkpoint, "run": job.run.path}
            paths = {name: path and str(path.absolute()) for name, path in folders.items()}
            world.broadcast({"settings": job.settings.to_dict(), **paths})
            result = learn(job, world, elapsed, start.notify)
            if result.stopped != "interrupted":
                write_result(start.run, result.to_json(), start.notify)
            return result


def follow() -> PairResult:
    """Take part in the training that the first process has planned, and report nothing."""
    with join_world() as world:
        values = world.receive()
        settings = PairSettings.from_dict(values["settings"])
        base, folder = (values[name] and Path(values[name]) for name in ("base", "checkpoint"))
        text = read_text(settings, base, lambda event: None)
        progress = reports(lambda event: None)[1]
        data, run = encoded(text, settings, progress), Run(Path(values["run"]))
        job = PairJob(settings, run, data, build(settings, base, folder, text), folder)
        with tuning.deterministic_algorithms(settings.deterministic), run.held():
            return learn(job, world, stopwatch(None), lambda event: None)


def read_text(settings: PairSettings, base: Path | None, notify: Notify) -> PairText:
    """Read and split the pairs, and train their tokenizers or load those of `base`."""
    note, progress = reports(notify)
    split = split_pairs(settings, progress)
    if base is not None:
        target, source = runs.model_tokenizers(base)
        return PairText(split, settings, [], target, None if source is target else source)
    settings, choices = recipe.choose_tokenizer(settings, split.train)
    kind, size = settings.tokenizer or "bpe", settings.vocab_size
    train, source_tokenizer = split.train, None
    if not recipe.learned(kind):
        tokenizer = runs.find_tokenizer(kind, note)
    elif settings.separate_vocabularies:
        tokenizer = train_tokenizer(train.targets, kind, size)
        source_tokenizer = train_tokenizer(train.sources, settings.source_tokenizer or kind, size)
    else:
        tokenizer = train_tokenizer([*train.sources, *train.targets], kind, size)
    return PairText(split, settings, choices, tokenizer, source_tokenizer)


def make_job(start: RunStart[PairSettings], base: Path | None, text: PairText) -> PairJob:
    """Choose the open settings and build the model, or resume both."""
    progress, fingerprints = reports(start.notify)[1], text.fingerprints()
    if base:
        fingerprints["model to start from"] = weights_fingerprint(base)
    folder = start.checkpoint(fingerprints)
    config = load_seq2seq_config(base) if base else None
    known = {name: getattr(text.settings, name) for name in TOKENIZERS}
    if config:
        check_context(start.settings, config.context)
    longest_allowed = config.context if config else recipe.MOST_CONTEXT
    context = start.settings.context or longest_allowed
    settings = replace(start.settings, **known, context=context)
    train = text.encode(text.split.train, settings, progress)
    if not config and start.settings.context is None:
        settings = replace(settings, context=None)  # chosen by their lengths
    settings, choices = recipe.choose_settings(settings, config, *train.size())
    if settings.epochs:
        batches = PairBatches(train, settings.batch or 1, settings.seed).in_epoch
        steps = max(1, round(settings.epochs * batches))
        choices.append(Choice("steps", steps, f"{settings.epochs:g} times {batches:,} batches"))
        settings = replace(settings, steps=steps, epochs=None)
    model = build(settings, base, folder, text)
    if folder and model.config != wanted_config(settings, base, text):
        raise DataError(f"{start.run.config_file} was changed and no longer matches {folder}")
    data = encoded(text, settings, progress, train)
    job = PairJob(settings, start.run, data, model, folder)
    settings, measured = fit_to_machine(job)
    split, truncated = text.split, train.truncated
    notes = [split.how, *split.examples, *split.notes]
    if truncated:
        few = f"{counted(truncated, 'training pair')} longer than {settings.context} tokens"
        notes.append(f"{few} truncated")
    for line in notes if start.fresh else ():
        start.notify(Note(line))  # only once the settings are known to be valid
    start.record(settings, text.choices + choices + measured, fingerprints, model)
    return replace(job, settings=settings)


def fit_to_machine(job: PairJob) -> tuple[PairSettings, list[Choice]]:
    """On a CPU, choose threads and dtype by timing a few steps."""
    chosen = Chosen(job.settings)
    if not any(map(chosen.open, ("threads", "workers", "dtype"))):
        return job.settings, []
    task = PairTask(job, lambda event: None)
    probe = tuning.SpeedProbe(job.model, task.parameters(), task.loss, task.batch(0))
    if chosen.open("threads") or chosen.open("workers"):
        (threads, workers), reason = tuning.best_threads(job.settings, probe)
        chosen.choose("threads", threads, reason)
        chosen.fill(workers=workers)
    if chosen.open("dtype"):
        chosen.choose("dtype", *tuning.best_dtype(chosen.settings, probe))
    return chosen.settings, chosen.choices


def encoded(
    text: PairText, settings: PairSettings, progress: Report, train: EncodedPairs | None = None
) -> PairData:
    """The pairs with their token ids; `train` if those are known."""
    train = train or text.encode(text.split.train, settings, progress)
    val = text.encode(text.split.val, settings, progress)
    return PairData(text.split, text.tokenizer, text.source_tokenizer, train, val)


def wanted_config(settings: PairSettings, base: Path | None, text: PairText) -> Seq2SeqConfig:
    if base is not None:
        return replace(load_seq2seq_config(base), dropout=settings.dropout or 0.0)
    source = text.source_tokenizer.vocab_size if text.source_tokenizer else None
    return recipe.fresh_config(settings, text.tokenizer.vocab_size, source)


def build(
    settings: PairSettings, base: Path | None, folder: Path | None, text: PairText
) -> Seq2Seq:
    """The model from the checkpoint `folder`, or from `base`, or a new one."""
    if known := folder or base:
        return load_seq2seq(known, settings.dropout)
    torch.manual_seed(settings.seed)
    return build_seq2seq(wanted_config(settings, None, text))


def learn(job: PairJob, world: World, elapsed: Callable[[], float], notify: Notify) -> PairResult:
    """Run all remaining steps of a job."""
    steps = all_steps(job, PairTask, world, elapsed, notify)
    with StopRequest() as stop, steps as (task, trainer, stopped):
        state = trainer.state
        loss, scores = state.scores.get("val_loss"), dict[str, Any]()
        if stopped != "interrupted":
            try:
                if not (task.evaluated_all and state.best_step == state.step):
                    loss = task.score()
                if world.first:
                    least = SAMPLES if stopped == TooLittleTime.stopped else LEAST_SCORED
                    scores = final_scores(task, trainer, least, stop)
            except EvaluationStopped:
                stopped = "interrupted"
            trainer.budget.tick()
        return PairResult(
            run=str(job.run.path),
            steps=state.step,
            tokens=state.tokens,
            seconds=round(state.seconds, 3),
            train_loss=state.train_loss,
            val_loss=loss if loss is None or math.isfinite(loss) else None,
            best_step=state.best_step,
            stopped=stopped,
            setup_seconds=round(state.setup, 3),
            **scores,
        )


def final_scores(task: PairTask, trainer: Trainer, least: int, stop: StopRequest) -> dict[str, Any]:
    """The scores of the validation and test pairs, or of as many as there is time to translate."""
    scores, settings, split = dict[str, Any](), task.settings, task.data.split
    parts = {name: part for name in ("val", "test") if (part := getattr(split, name))}
    waiting = sum(map(len, parts.values()))
    for name, part in parts.items():
        kind = f"{'validation' if name == 'val' else 'test'} pairs"
        trainer.budget.tick()
        left = trainer.budget.total - trainer.state.seconds - task.slowdown * FINAL_SECONDS
        share = len(part) / waiting
        texts = task.translate_within(share * left, part.sources, least, stop, kind)
        waiting -= len(part)
        if stop.requested:
            raise EvaluationStopped
        if len(texts) < len(part):
            command = ["nanolm", "eval", str(task.job.run.path), *getattr(settings, name)]
            command += ["--reverse"] * settings.reverse
            hint = f"; `{shlex.join(command)}` scores all" if getattr(settings, name) else ""
            task.notify(Note(f"scored on the first {len(texts):,} of {len(part):,} {kind}{hint}"))
        rows = (texts, part.targets[: len(texts)], part.sources[: len(texts)])
        scores[name] = score_pairs(*rows)
        if name == "val":
            scores["by_length"] = by_length(*rows)
    return scores
