"""Fine-tuning: a trained language model learns to tell labels.

>>> finetune(FinetuneSettings(data=("embedded:reviews",), start_from="none"), out="runs/reviews")
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nanolm import files
from nanolm.choice import Choice
from nanolm.classification.adapters import Adapters
from nanolm.classification.classifier import WIDTH, Logits, Mistake, predict, worst
from nanolm.classification.data import Batches, Cut, Encoded, Split, Texts, encode, split_data
from nanolm.classification.metrics import Scores, fit_temperature, majority, score
from nanolm.classification.recipe import choose_fraction, choose_settings, fresh_config
from nanolm.classification.settings import SCRATCH, FinetuneSettings
from nanolm.errors import DataError, UsageError
from nanolm.model.base import Model
from nanolm.model.build import build_model
from nanolm.model.classifier import Classifier
from nanolm.model.config import ClassifierConfig, ModelConfig
from nanolm.model.config_json import model_type
from nanolm.model.device import choose_device
from nanolm.model.huggingface import (
    checked,
    load_any_config,
    load_classifier,
    load_model,
    save_model,
    weight_files,
)
from nanolm.report.curves import Line, Panel, curves_svg, read_metrics
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
from nanolm.text.tokenizer import Tokenizer, train_tokenizer
from nanolm.text.vocabulary import TINY
from nanolm.training.events import Note, Notify, Started
from nanolm.training.interrupt import StopRequest
from nanolm.training.loop import State, Task, Trainer, also_to_log, thread_count
from nanolm.training.prepare import (
    ROOT,
    begin,
    choose_run,
    refuse_finished,
    reports,
    resume_from,
    with_absolute_paths,
)

ADAPTERS = "adapters.safetensors"
LANGUAGE_HEAD = "language_head.safetensors"
FINAL = "final"  # the folder of the finished classifier, beside the checkpoints
VOCABULARY = 4096  # of a tokenizer for texts of more than a few kB


@dataclass(frozen=True)
class Result:
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
    val: Scores | None = None
    test: Scores | None = None
    uncalibrated: Scores | None = None  # on the validation texts, before that division
    mistakes: tuple[Mistake, ...] = ()

    def to_json(self) -> dict[str, Any]:
        values = {name: value for name, value in asdict(self).items() if value is not None}
        for name in ("val", "test", "uncalibrated"):
            if found := getattr(self, name):
                values[name] = found.to_json()
        return values


def finetune(
    settings: FinetuneSettings,
    out: str | Path | None = None,
    resume: bool = False,
    notify: Notify = lambda event: None,
) -> Result:
    """Fine-tune on `settings.data`, or go on with an unfinished run of the same settings."""
    settings.check()
    choose_device(settings.device)  # one that is not there is better told at once
    settings = with_absolute_paths(with_start(settings, notify))
    run = choose_run(settings, Path(out) if out is not None else None, resume, notify)
    request = settings
    fresh = not run.exists()
    if not fresh:
        settings = FinetuneSettings.from_dict(run.settings())
        settings.check()
    note, progress = reports(notify)
    settings = choose_fraction(settings)
    split = split_data(settings, progress)
    base = None
    if settings.start_from != SCRATCH:
        base = find_or_download(str(settings.start_from), note, progress)
    with run.locked():
        if run.exists():
            refuse_finished(run)  # it may have ended between the choice and the lock
        notify = also_to_log(run, notify)
        job = prepare(settings, request, run, base, split, fresh, notify)
        with thread_count(job.settings.threads), StopRequest() as stop:
            trainer = Trainer(run, job.settings, job, job.checkpoint, notify)
            stopped = trainer.loop(stop)
            if stopped != "interrupted":
                trainer.take_best()
            return finish(job, run, trainer.state, stopped)


def with_start(settings: FinetuneSettings, notify: Notify) -> FinetuneSettings:
    """What to start from, where that was left open."""
    if settings.start_from is not None:
        return settings
    newest = next((run for run in runs_by_age(ROOT) if not is_classifier(run)), None)
    if newest is None:
        notify(
            Note(f"no run of a language model under {ROOT}/ to start from: training from scratch")
        )
        return replace(settings, start_from=SCRATCH)
    notify(Note(f"starting from {newest}, the newest run of a language model (--from for another)"))
    return replace(settings, start_from=str(newest))


def prepare(
    settings: FinetuneSettings,
    request: FinetuneSettings,
    run: Run,
    base: Path | None,
    split: Split,
    fresh: bool,
    notify: Notify,
) -> "Labels":
    """Settings, tokens and model: new, or as the last checkpoint of the run has them."""
    _, progress = reports(notify)
    tokenizer = choose_tokenizer(settings, base, split.train.texts, notify)
    fingerprints = {"data": fingerprint(split), "tokenizer": tokenizer.fingerprint()}
    config: ModelConfig | None = None
    parameters = 0
    if base:
        found = load_any_config(base)
        config = found.base if isinstance(found, ClassifierConfig) else found
        with checked(base, found) as (model, _):
            parameters = model.parameter_count()
        headless = isinstance(found, ClassifierConfig) and not config.tied
        if headless and settings.language_loss is None:
            settings = replace(settings, language_loss=0.0)
        fingerprints["model to start from"] = weights_fingerprint(base)
    folder = None if fresh else resume_from(run, fingerprints, notify)
    lengths = [len(tokenizer.encode_prompt(text)) for text in split.train.texts]
    settings, choices = choose_settings(settings, config, parameters, lengths)
    assert settings.context and settings.long and settings.dropout is not None
    if config is not None:
        base_config = replace(config, dropout=settings.dropout)
    else:
        base_config = fresh_config(settings, tokenizer.vocab_size)
    classifier_config = ClassifierConfig(
        base=base_config,
        labels=split.labels,
        pool=settings.pool,  # type: ignore[arg-type]
        window=settings.context,
        long=settings.long,  # type: ignore[arg-type]
    )
    torch.manual_seed(settings.seed)
    if folder and settings.train != "lora":
        classifier, head = load_classifier(folder, settings.dropout), None
    else:
        classifier, head = start_model(classifier_config, base)
    if classifier.config != classifier_config:
        raise DataError(f"{run.config_file} was changed and no longer fits {folder}")
    family, reason = model_type(classifier_config)
    if family == "nanolm":
        choices.append(Choice("format", "nanolm only", f"transformers has none like it: {reason}"))
    if fresh:
        for text in (split.how, *(f"  {label}: {text[:70]}" for label, text in split.examples)):
            notify(Note(text))
        for text in split.notes:
            notify(Note(text))
        count = classifier.parameter_count()
        begin(run, request, settings, choices, fingerprints, count, notify)
    return Labels(settings, split, tokenizer, classifier, head, folder, progress)


def start_model(config: ClassifierConfig, base: Path | None) -> tuple[Classifier, nn.Module | None]:
    """A classifier on the trained model, or a fresh one, and the layer that foretold tokens."""
    if base is None:
        model: Model = build_model(config.base)
    elif isinstance(load_any_config(base), ClassifierConfig):
        return Classifier(config, load_classifier(base, config.base.dropout).base), None
    else:
        model = load_model(base, config.base.dropout)
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
    vocabulary = settings.vocab_size or (None if size < TINY else VOCABULARY)
    return train_tokenizer(texts, settings.tokenizer or "bpe", vocabulary)


def fingerprint(split: Split) -> str:
    """Of every text and label, and of which part each is in."""
    digest = hashlib.sha256()
    for part in (split.train, split.val, split.test):
        rows = zip(part.texts, part.truth.tolist(), strict=True) if part else ()
        digest.update(json.dumps([split.labels, list(rows)]).encode())
    return digest.hexdigest()


def weights_fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in weight_files(folder):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


class Labels(Task):
    """A classifier on labelled texts."""

    def __init__(
        self,
        settings: FinetuneSettings,
        split: Split,
        tokenizer: Tokenizer,
        model: Classifier,
        head: nn.Module | None,
        saved: Path | None,
        progress: Any,
    ) -> None:
        assert settings.context and settings.long and settings.batch
        assert settings.weight_decay is not None and settings.evaluations and settings.train
        self.settings, self.split, self.tokenizer = settings, split, tokenizer
        self.checkpoint = saved
        device = settings.device
        cut = Cut(settings.context, settings.long)

        def encoded(texts: Texts) -> Encoded:
            return encode(texts, tokenizer, cut, progress, WIDTH[device])

        self.train, self.val = encoded(split.train), encoded(split.val)
        self.test = encoded(split.test) if split.test else None
        self.batches = Batches(self.train.lengths, settings.batch, settings.seed)
        self.classifier = self.model = model.to(device)
        self.weight_decay, self.evaluations = settings.weight_decay, settings.evaluations
        self.patience = settings.patience
        self.low = settings.dtype == "bfloat16"
        self.weights = None
        if settings.class_weights:
            counts = np.bincount(split.train.truth, minlength=len(split.labels))
            balanced = len(split.train) / (len(counts) * np.maximum(counts, 1))
            self.weights = torch.tensor(balanced, dtype=torch.float32, device=device)
        self.adapters = None
        if settings.train == "lora":
            self.adapters = Adapters(self.classifier.base)
            if saved:
                tensors = load_file(saved / ADAPTERS, device)
                self.classifier.score.load_state_dict({"weight": tensors.pop("score.weight")})
                self.adapters.load_state_dict(tensors)
        self.language_head = self.make_language_head(head, saved)
        self.trained = set(trained_names(self.classifier, settings.train))
        for name, parameter in self.classifier.named_parameters():
            parameter.requires_grad_(name in self.trained)

    def make_language_head(self, head: nn.Module | None, saved: Path | None) -> nn.Linear | None:
        """The output layer of the language model, where foretelling tokens is learned too."""
        if not self.settings.language_loss:
            return None
        config = self.classifier.config.base
        layer = nn.Linear(config.dim, config.vocab_size, bias=False, device="meta")
        if config.tied:
            layer.weight = self.classifier.base.token_embedding.weight
            return layer
        if saved:
            layer.load_state_dict(load_file(saved / LANGUAGE_HEAD), assign=True)
        elif isinstance(head, nn.Linear):
            layer = head
        else:
            raise DataError(
                "--language-loss needs a language model to start from, not a classifier"
            )
        return layer.to(self.settings.device)

    def started(self, run: Path, step: int) -> Started:
        counts = [f"{len(self.split.train):,} texts to learn from", f"{len(self.split.val):,} to"]
        labels = f"{len(self.split.labels)} labels"
        data = f"{', '.join(counts)} validate on, {labels}"
        trained = sum(parameter.numel() for parameter in self.parameters().values())
        whole = self.classifier.parameter_count()
        if trained < whole:
            data = f"{trained:,} of them trained, {data}"
        return Started(run, whole, data, step)

    def parameters(self) -> dict[str, nn.Parameter]:
        named = {
            name: parameter
            for name, parameter in self.classifier.named_parameters()
            if name in self.trained
        }
        if self.adapters:
            named |= dict(self.adapters.named_parameters(prefix="adapters"))
        if self.language_head and not self.classifier.config.base.tied:
            named |= dict(self.language_head.named_parameters(prefix="language_head"))
        return named

    def rate(self, name: str) -> float:
        """Layers nearer to the input learn more slowly."""
        decay, config = self.settings.layer_decay, self.classifier.config.base
        if not decay or decay == 1 or not name.startswith("base."):
            return 1.0
        parts = name.split(".")
        depth = int(parts[2]) + 1 if parts[1] in ("blocks", "layers") else 0
        if parts[1] == "norm":
            depth = config.layers
        return float(decay ** (config.layers + 1 - depth))

    def batch(self, index: int) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(part) for part in self.train.rows(self.batches[index]))

    def tokens(self, batch: tuple[Tensor, ...]) -> int:
        return int(batch[1].sum())

    def loss(self, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        ids, lengths, truth = batch  # (batch, time), (batch,), (batch,)
        x = self.classifier.base.body(ids)  # (batch, time, dim)
        logits = self.classifier.score(self.classifier.pooled(x, lengths)).float()
        loss = F.cross_entropy(logits, truth, self.weights)
        seen = {"accuracy": (logits.argmax(dim=1) == truth).float().mean()}
        if self.language_head is not None and self.settings.language_loss:
            foretold = self.language_head(x[:, :-1]).float().flatten(0, 1)
            nats = F.cross_entropy(foretold, ids[:, 1:].flatten(), reduction="none")
            real = torch.arange(1, ids.shape[1], device=ids.device) < lengths[:, None]
            language = (nats * real.flatten()).sum() / real.sum().clamp(min=1)
            loss = loss + self.settings.language_loss * language
            seen["language_loss"] = language
        return loss, seen

    def logits(self, data: Encoded) -> Logits:
        return predict(self.classifier, data, self.low)

    def evaluate(self, state: State, progress: float) -> tuple[list[float], dict[str, float]]:
        found = score(self.logits(self.val), self.split.val.truth, self.split.labels)
        metrics = {
            "val_loss": found.loss,
            "val_accuracy": found.accuracy,
            "val_macro_f1": found.macro_f1,
        }
        return [1 - found.accuracy, found.loss], metrics

    def save(self, folder: Path) -> None:
        if self.adapters:
            with self.adapters.merged():
                save_model(self.classifier, folder, self.tokenizer)
            tensors = dict(self.adapters.state_dict())
            tensors["score.weight"] = self.classifier.score.weight.detach()
            save_file({name: tensor.cpu() for name, tensor in tensors.items()}, folder / ADAPTERS)
        else:
            save_model(self.classifier, folder, self.tokenizer)
        if self.language_head and not self.classifier.config.base.tied:
            weight = self.language_head.weight.detach().cpu()
            save_file({"weight": weight}, folder / LANGUAGE_HEAD)

    def take_back(self, folder: Path) -> None:
        saved = load_classifier(folder)
        if self.adapters:  # they are in there already
            self.adapters.active = False
        self.classifier.load_state_dict(saved.state_dict())


def trained_names(model: Classifier, which: str) -> list[str]:
    """The parameters that are trained: with "last-2" the last two layers and what follows them."""
    names = [name for name, _ in model.named_parameters()]
    if which == "all":
        return names
    if which in ("head", "lora"):
        return ["score.weight"]
    first = model.config.base.layers - int(which.removeprefix("last-"))
    if first <= 0:
        raise UsageError(f"--train {which}: the model has {model.config.base.layers} layers")

    def late(name: str) -> bool:
        parts = name.split(".")
        if parts[0] == "score" or parts[1] == "norm":
            return True
        return parts[1] in ("blocks", "layers") and int(parts[2]) >= first

    return [name for name in names if late(name)]


def finish(task: Labels, run: Run, state: State, stopped: str) -> Result:
    """Measure the best model, calibrate it, and write all that is left behind."""
    split, labels = task.split, task.split.labels
    result = Result(
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
    if task.adapters and task.adapters.active:
        with task.adapters.merged():
            save_final(task, run)
    else:
        save_final(task, run)
    result = replace(
        result,
        temperature=round(temperature, 4),
        val=score(logits, truth, labels, temperature),
        uncalibrated=score(logits, truth, labels),
        test=score(task.logits(task.test), split.test.truth, labels)
        if task.test and split.test
        else None,
        mistakes=worst(split.val.texts, logits, truth, labels, temperature),
    )
    (run.path / "loss.svg").write_text(draw(run, state.best_step), encoding="utf-8")
    run.update({**run.facts(), "result": result.to_json()})
    return result


def save_final(task: Labels, run: Run) -> None:
    folder = files.commit(
        run.checkpoints,
        FINAL,
        lambda folder: save_model(task.classifier, folder, task.tokenizer),
    )
    checkpoint.point(run.path / "best", folder)


def draw(run: Run, best_step: int) -> str:
    """The curves of training and validation."""
    lines = read_metrics(run.metrics)

    def line(name: str, key: str) -> Line:
        return Line(name, [(each["step"], each[key]) for each in lines if key in each])

    mark = (float(best_step), "best")
    panels = [
        Panel("loss", [line("training", "loss"), line("validation", "val_loss")], mark),
        Panel("accuracy", [line("training", "accuracy"), line("validation", "val_accuracy")], mark),
    ]
    return curves_svg(panels, run.path.name)
