"""The training task of a classifier: predict the label of a text.

>>> task = ClassifierTask(settings, split, tokenizer, classifier, head, saved=None, progress=report)
>>> Trainer(run, settings, task, task.checkpoint, notify).train(stop)
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from nanolm.choice import Choice, Report
from nanolm.classification.classifier import Logits, encode_for, in_batches, predict
from nanolm.classification.data import CachedStates, Encoded, LabelSplit, LengthBatches
from nanolm.classification.distill import Distillation, Teacher
from nanolm.classification.metrics import fit_temperature, score
from nanolm.classification.ngrams import NgramModel, best_ratio
from nanolm.classification.probe import LinearProbe, fit_probe
from nanolm.classification.settings import FinetuneSettings
from nanolm.errors import DataError, UsageError
from nanolm.formats import counted
from nanolm.model.adapters import Adapters
from nanolm.model.classifier import Classifier, filling, prefix_pooled
from nanolm.model.huggingface import (
    BaseModel,
    load_classifier,
    load_tensors,
    save_model,
    save_partial,
    snapshot,
)
from nanolm.model.peft import load_trained, save_adapter
from nanolm.model.stored import ADAPTER, ADAPTERS, TRAINED, has_adapter
from nanolm.planning.tuning import SpeedProbe, best_dtype, use_attention, with_kernels
from nanolm.text.tokenizer import Tokenizer
from nanolm.training.events import Started
from nanolm.training.optimizers import OPTIMIZERS
from nanolm.training.state import State
from nanolm.training.task import Task

LANGUAGE_HEAD = "language_head.safetensors"
# Matrices that a matrix optimizer leaves to AdamW, and the factor for their learning rate.
ADAMW_MATRICES = ("base.token_embedding.weight", "score.weight", "language_head.weight")
ADAMW_RATE = 1.5
MOST_CACHED_BYTES = 1 << 30  # of hidden states kept in memory
# The final checkpoint refers to the base model if a copy would exceed this size in bytes and less
# than this share of the weights was trained.
LARGE_COPY, TRAINED_SHARE = 100_000_000, 0.1
# A head that starts from the probe learns so slowly that a step changes its logits by at most this
# much times the learning rate. Features of a language model are large and correlated: at the
# learning rate of the other weights, a single step would undo the fit of the probe.
HEAD_STEP = 20.0
LOSS_DEVIATION = 0.25  # typical standard deviation of the difference of two losses of a text


class ClassifierTask(Task):
    def __init__(
        self,
        settings: FinetuneSettings,
        split: LabelSplit,
        tokenizer: Tokenizer,
        model: Classifier,
        head: nn.Module | None,
        saved: Path | None,
        progress: Report,
        base: BaseModel | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        """`base` is the model folder to start from; None means from scratch."""
        assert settings.batch and settings.weight_decay is not None
        assert settings.evaluations and settings.train
        self.settings, self.split, self.tokenizer, self.base = settings, split, tokenizer, base
        self.checkpoint, device = saved, settings.device
        self.classifier = self.model = model.to(device)
        self.train = encode_for(model, split.train, tokenizer, progress)
        self.val = encode_for(model, split.val, tokenizer, progress)
        self.test = encode_for(model, split.test, tokenizer, progress) if split.test else None
        self.batches = LengthBatches(self.train.lengths, settings.batch, settings.seed)
        self.distillation = None
        if teacher and settings.distill:
            data = (split.train, self.train, self.batches, tokenizer)
            self.distillation = Distillation(teacher, settings.distill, *data)
        self.weight_decay, self.evaluations = settings.weight_decay, settings.evaluations
        self.patience, self.weights = settings.patience, None
        if settings.class_weights:
            counts = np.bincount(split.train.truth, minlength=len(split.labels))
            balanced = len(split.train) / (len(counts) * np.maximum(counts, 1))
            self.weights = torch.tensor(balanced, dtype=torch.float32, device=device)
        self.ngrams: NgramModel | None = None  # whose logits are added
        self.ngram_logits: Logits | None = None  # of the validation texts
        self.adapters = Adapters(self.classifier.base) if settings.train == "lora" else None
        self.untied_head: nn.Linear | None = None
        if settings.language_loss and not model.config.base.tied:
            if not isinstance(head, nn.Linear):
                raise DataError("--language-loss needs a language model to start from")
            self.untied_head = head.to(device)
        names = trained_names(model, settings.train)
        self.trained = {name: value for name, value in model.named_parameters() if name in names}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names)
        frozen = model.frozen = frozen_layers(model, settings.train)
        for name, module in model.base.named_modules():
            if frozen and isinstance(module, nn.Dropout) and depth(name, 0) <= frozen:
                module.p = 0.0
        self.evaluate_first, self.head_rate = base is not None, 1.0
        if base is not None:  # measured on the model before training
            self.head_rate = min(1.0, HEAD_STEP / feature_size(model))
        if saved:
            self.load_checkpoint(saved)
        self.choices: list[Choice] = []
        if device == "cpu" and not self.adapters:  # which the kernels would skip
            with_kernels(model.base, settings)
        if settings.dtype == "auto":
            dtype = "float32"
            if settings.train != "head":
                probe = SpeedProbe(model.base, self.parameters(), self.loss, self.batch(0))
                dtype, reason = best_dtype(settings, probe)
                self.choices.append(Choice("dtype", dtype, reason))
            self.settings = replace(settings, dtype=dtype)
        use_attention(model.base, self.settings)
        # On a CPU, bfloat16 is only for the matrix products of a training step.
        self.low = self.settings.dtype == "bfloat16" and device != "cpu"

        def report(*how_far: Any) -> None:
            self.check_stop()
            progress(*how_far)

        self.batching = (model.device, self.low, report, "computing features")

    def start(self) -> LinearProbe | None:
        """Run the frozen layers once for each text, and start the head from a linear probe."""
        if self.base is None:
            return None
        with self.classifier.base.eval_mode():
            self.train, self.val = self.keep(self.train), self.keep(self.val)
            if self.checkpoint:
                return None
            features = self.features(self.train)
        how = (len(self.split.labels), self.train.text, self.weights, self.settings.seed)
        probe = fit_probe(features, self.train.truth, *how)
        with torch.no_grad():
            self.classifier.score.weight.copy_(probe.weight)
        return probe

    def keep(self, data: Encoded) -> Encoded:
        """The texts with the outputs of the frozen layers, if these fit in memory."""
        model, dim = self.classifier, self.classifier.config.base.dim
        if model.frozen == model.config.base.layers:
            return CachedStates(**vars(data), states=self.features(data).numpy(), pooled=True)
        fits = 4 * dim * len(data.ids) <= MOST_CACHED_BYTES and not self.settings.language_loss
        if not model.frozen or not fits or not model.base.allows_padding:
            return data
        states = np.empty((len(data.ids), dim), dtype=np.float32)

        def compute(ids: Tensor, lengths: Tensor) -> Tensor:
            return cast(Tensor, model.base.frozen_states(ids, model.frozen))

        for rows, batch in in_batches(compute, data, *self.batching):
            for row, x in zip(rows, batch.cpu().numpy(), strict=True):
                start, length = data.starts[row], data.lengths[row]
                states[start : start + length] = x[:length]
        return CachedStates(**vars(data), states=states, pooled=False)

    def features(self, data: Encoded) -> Tensor:
        """The input of the head for each window, (windows, dim), from the current model."""
        features = torch.empty(len(data.lengths), self.classifier.config.base.dim)
        for rows, x in in_batches(self.classifier.features, data, *self.batching):
            features[rows] = x.cpu()
        return features

    def start_event(self, run: Path, step: int) -> Started:
        train, val, labels = len(self.split.train), len(self.split.val), len(self.split.labels)
        data = f"{train:,} training texts, {val:,} validation texts, {counted(labels, 'label')}"
        trained = sum(parameter.numel() for parameter in self.parameters().values())
        whole = self.classifier.parameter_count()
        some = f"{trained:,} of them trainable, " if trained < whole else ""
        return Started(run, whole, some + data, step)

    def parameters(self) -> dict[str, nn.Parameter]:
        named = dict(self.trained)
        if self.adapters:
            named |= self.adapters.named_parameters(prefix="adapters")
        if self.untied_head:
            named |= self.untied_head.named_parameters(prefix="language_head")
        return named

    def lr_scale(self, name: str) -> float:
        """Layers closer to the input get a lower learning rate."""
        decay, config = self.settings.layer_decay, self.classifier.config.base
        takes = OPTIMIZERS[self.settings.optimizer or "adamw"].takes
        if takes == "matrices" and name in ADAMW_MATRICES:
            return ADAMW_RATE
        if name == "score.weight":
            return self.head_rate
        if not decay or decay == 1 or not name.startswith("base."):
            return 1.0
        return float(decay ** (config.layers + 1 - depth(name, config.layers)))

    def muon_parameters(self) -> dict[str, list[int]]:
        base = self.classifier.base.muon_parameters().items()
        return {f"base.{name}": rows for name, rows in base if f"base.{name}" in self.trained}

    def batch(self, index: int) -> tuple[Tensor, ...]:
        if self.distillation:
            return tuple(map(torch.from_numpy, self.distillation.batch(index)))
        return tuple(map(torch.from_numpy, self.train.rows(self.batches[index])))

    def tokens(self, batch: tuple[Tensor, ...]) -> int:
        return int(batch[1].sum())

    def epoch(self, batches: int) -> float:
        return batches * self.batches.batch / len(self.train.lengths)

    def loss(self, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        # (batch, time) or states instead of ids, (batch,), (batch,), (batch, time, labels)
        ids, lengths, truth, *target = batch
        model = self.classifier
        pooled = ids.dim() == 2 and ids.is_floating_point()
        x = ids if pooled else model.hidden(ids)  # (batch, time, dim)
        logits = model.score(x if pooled else model.pooled(x, lengths)).float()
        loss = F.cross_entropy(logits, truth, self.weights)
        # Only the label loss is logged, to be comparable with the validation loss.
        labeled = truth >= 0  # synthetic texts are not
        right = (logits.argmax(dim=1) == truth).sum() / labeled.sum().clamp(min=1)
        seen = {"loss": loss, "accuracy": right}
        if target:
            every = model.score(prefix_pooled(x, model.config.pool)).float()
            loss = -(target[0] * every.log_softmax(dim=2)).sum() / len(ids)
        if self.settings.language_loss:
            head = self.untied_head or model.base.token_embedding
            scores = F.linear(x[:, :-1], head.weight).float().flatten(0, 1)
            nats = F.cross_entropy(scores, ids[:, 1:].flatten(), reduction="none")
            real = ~filling(ids, lengths)[:, 1:] & labeled[:, None]
            language = (nats * real.flatten()).sum() / real.sum().clamp(min=1)
            loss = loss + self.settings.language_loss * language
            seen["language_loss"] = language
        return loss, seen

    def logits(self, data: Encoded) -> Logits:
        return predict(self.classifier, len(self.split.labels), data, self.low, self.check_stop)

    def add_ngrams(self, ngrams: NgramModel) -> None:
        self.ngrams, self.ngram_logits = ngrams, ngrams.logits(self.split.val.texts)

    def mixed(self, logits: Logits) -> tuple[Logits, float]:
        """The validation logits with those of the n-gram model, and their best weight."""
        if self.ngram_logits is None:
            return logits, 0.0
        ratio = best_ratio(logits, self.ngram_logits, self.split.val.truth, self.split.labels)
        return logits + ratio * self.ngram_logits, ratio

    def evaluate(self, state: State, progress: float) -> tuple[list[float], dict[str, float]]:
        (logits, _), truth = self.mixed(self.logits(self.val)), self.split.val.truth
        # A sum of logits is too confident, so its loss says little before it is calibrated.
        temperature = fit_temperature(logits, truth) if self.ngrams else 1.0
        scores = score(logits, truth, self.split.labels, temperature)
        metrics = {f"val_{key}": getattr(scores, key) for key in ("loss", "accuracy", "macro_f1")}
        by_accuracy = state.best is not None and len(state.best) == 2  # a run of version 0.1
        if by_accuracy or not (self.evaluate_first or self.distillation):
            return [1 - scores.accuracy, scores.loss], metrics
        # Compared with a probe, a few correct texts more or less are chance. The loss says more,
        # and it is taken after calibration, because the finished model is calibrated too.
        calibrated = score(logits, truth, self.split.labels, fit_temperature(logits, truth))
        # A checkpoint has to beat the probe by more than chance. With distillation the student
        # keeps improving, so an earlier checkpoint has to beat the last one by the same margin.
        margin = LOSS_DEVIATION / len(truth) ** 0.5 if state.step else 0.0
        if self.distillation:
            margin *= 2 - min(1.0, progress)
        return [calibrated.loss + margin], metrics

    def is_partial(self) -> bool:
        """Whether checkpoints omit the weights of the base model."""
        return self.base is not None and self.settings.train != "all"

    def refers_to_base(self) -> bool:
        """Whether the finished classifier omits these weights as well, because a copy of a large
        model would be many times as large as what was trained."""
        whole = super().saved_bytes()
        small_part = self.saved_bytes() < TRAINED_SHARE * whole
        return self.is_partial() and whole > LARGE_COPY and small_part

    def saved_bytes(self) -> int:
        if not self.is_partial():
            return super().saved_bytes()
        return sum(parameter.nbytes for parameter in self.parameters().values())

    def snapshot(self) -> Callable[[Path], None]:
        def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: value.detach().clone() for name, value in tensors.items()}

        is_partial = self.is_partial()
        classifier = self.classifier if is_partial else self.whole()
        trained = copied(self.trained) if is_partial else {}
        low_rank = self.adapters.low_rank("base.") if self.adapters else {}
        head = copied({"weight": self.untied_head.weight}) if self.untied_head else {}

        def write(folder: Path) -> None:
            if is_partial:
                assert self.base
                save_partial(classifier, self.base, trained, low_rank, folder, self.tokenizer)
            else:
                save_model(classifier, folder, self.tokenizer)
            if head:
                save_file(head, folder / LANGUAGE_HEAD)

        return write

    def write_final(self, folder: Path) -> None:
        """Write the whole classifier, and with LoRA its adapter; or refer to a large base model."""
        if self.ngrams:
            self.ngrams.save(folder)
        if self.refers_to_base():
            self.snapshot()(folder)
            return
        save_model(self.whole(), folder, self.tokenizer)
        if self.adapters and self.base and self.adapters.active:
            what = (self.adapters.low_rank("base."), self.trained)
            save_adapter(self.classifier.config, *what, folder / ADAPTER, str(self.base))

    def whole(self) -> Classifier:
        """A copy of the classifier, with the adapters merged into it."""
        active = self.adapters is not None and self.adapters.active
        with self.adapters.merged() if self.adapters and active else nullcontext():
            return snapshot(self.classifier)

    def load_weights(self, folder: Path) -> None:
        if self.adapters and has_adapter(folder):
            load_trained(self.classifier, self.adapters, folder)
            return
        if (folder / TRAINED).exists():
            self.classifier.load_state_dict(load_tensors(folder / TRAINED), strict=False)
            if self.adapters:
                self.adapters.load_state_dict(load_tensors(folder / ADAPTERS))
            return
        if self.adapters:  # already merged into the weights
            self.adapters.active = False
        self.classifier.load_state_dict(load_classifier(folder).state_dict())

    def load_checkpoint(self, folder: Path) -> None:
        if self.adapters and (folder / ADAPTERS).exists() and not (folder / TRAINED).exists():
            # Saved by version 0.1.
            tensors = load_tensors(folder / ADAPTERS)
            self.classifier.score.load_state_dict({"weight": tensors.pop("score.weight")})
            self.adapters.load_state_dict(tensors)
        else:
            self.load_weights(folder)
        if self.untied_head:
            self.untied_head.load_state_dict(load_tensors(folder / LANGUAGE_HEAD))


def feature_size(model: Classifier) -> float:
    """The approximate L1 norm of a feature vector, from the weights of the last norm layer."""
    norms = [each for each in model.base.modules() if isinstance(each, nn.RMSNorm | nn.LayerNorm)]
    size = float(norms[-1].weight.detach().abs().sum()) if norms else 0.0
    return size or float(model.config.base.dim)


def depth(name: str, layers: int) -> int:
    """The layer of a module or parameter, counted from 1; 0 for embeddings."""
    part, *rest = name.removeprefix("base.").split(".")
    if part in ("blocks", "layers"):
        return int(rest[0]) + 1
    return {"norm": layers, "score": layers + 1}.get(part, 0)


def frozen_layers(model: Classifier, which: str) -> int:
    """The number of frozen layers, counted from the input: with "last-2", all but the last two."""
    layers = model.config.base.layers
    if which in ("all", "lora"):
        return 0
    frozen = layers if which == "head" else layers - int(which.removeprefix("last-"))
    if frozen <= 0:
        has = counted(layers, "layer")
        raise UsageError(f"--train {which}: the model has {has}; try --train all")
    return frozen


def trained_names(model: Classifier, which: str) -> list[str]:
    if which in ("head", "lora"):
        return ["score.weight"]
    frozen, layers = frozen_layers(model, which), model.config.base.layers
    names = (name for name, _ in model.named_parameters())
    return [name for name in names if not frozen or depth(name, layers) > frozen]
