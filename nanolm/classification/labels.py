"""Learning labels: what the training loop does with a classifier.

>>> task = Labels(settings, split, tokenizer, classifier, head, saved=None, progress=report)
>>> Trainer(run, settings, task, task.checkpoint, notify).loop(stop)
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nanolm.choice import Choice, Report
from nanolm.classification.adapters import Adapters
from nanolm.classification.classifier import WIDTH, Logits, predict
from nanolm.classification.data import Batches, Cut, Encoded, Split, Texts, encode
from nanolm.classification.metrics import score
from nanolm.classification.settings import FinetuneSettings
from nanolm.errors import DataError, UsageError
from nanolm.model.classifier import Classifier
from nanolm.model.huggingface import copied, load_classifier, save_model
from nanolm.text.tokenizer import Tokenizer
from nanolm.training.events import Started
from nanolm.training.task import State, Task
from nanolm.training.tuning import Probe, best_products, use_attention

ADAPTERS = "adapters.safetensors"
LANGUAGE_HEAD = "language_head.safetensors"
BESIDE = ("base.token_embedding.weight", "score.weight", "language_head.weight")  # Muon's matrices:
BESIDE_RATE = 1.5  # times the learning rate


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
        progress: Report,
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
        self.weights = None
        if settings.class_weights:
            counts = np.bincount(split.train.truth, minlength=len(split.labels))
            balanced = len(split.train) / (len(counts) * np.maximum(counts, 1))
            self.weights = torch.tensor(balanced, dtype=torch.float32, device=device)
        self.adapters = Adapters(self.classifier.base) if settings.train == "lora" else None
        self.language_head = self.make_language_head(head)
        self.trained = set(trained_names(self.classifier, settings.train))
        for name, parameter in self.classifier.named_parameters():
            parameter.requires_grad_(name in self.trained)
        if saved:
            self.restore(saved)
        self.choices: list[Choice] = []
        if settings.dtype == "auto":
            probe = Probe(model.base, self.parameters(), self.loss, self.batch(0))
            numbers, reason = best_products(settings, probe)
            self.settings = settings = replace(settings, dtype=numbers)
            self.choices.append(Choice("dtype", numbers, reason))
        use_attention(model.base, settings)
        # On a CPU that is for the products of a step alone.
        self.low = settings.dtype == "bfloat16" and device != "cpu"

    def make_language_head(self, head: nn.Module | None) -> nn.Linear | None:
        """The output layer of the language model, where foretelling tokens is learned too."""
        if not self.settings.language_loss:
            return None
        config = self.classifier.config.base
        if config.tied:
            layer = nn.Linear(config.dim, config.vocab_size, bias=False, device="meta")
            layer.weight = self.classifier.base.token_embedding.weight
            return layer
        if not isinstance(head, nn.Linear):
            raise DataError(
                "--language-loss needs a language model to start from, not a classifier"
            )
        return head.to(self.settings.device)

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
        if self.settings.optimizer == "muon" and name in BESIDE:
            return BESIDE_RATE
        if not decay or decay == 1 or not name.startswith("base."):
            return 1.0
        parts = name.split(".")
        depth = int(parts[2]) + 1 if parts[1] in ("blocks", "layers") else 0
        if parts[1] == "norm":
            depth = config.layers
        return float(decay ** (config.layers + 1 - depth))

    def matrices(self) -> dict[str, list[int]]:
        if self.settings.optimizer != "muon":
            return {}
        named = {f"base.{name}": rows for name, rows in self.classifier.base.matrices().items()}
        return {name: rows for name, rows in named.items() if name in self.trained}

    def batch(self, index: int) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(part) for part in self.train.rows(self.batches[index]))

    def tokens(self, batch: tuple[Tensor, ...]) -> int:
        return int(batch[1].sum())

    def loss(self, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        ids, lengths, truth = batch  # (batch, time), (batch,), (batch,)
        x = self.classifier.base.body(ids)  # (batch, time, dim)
        logits = self.classifier.score(self.classifier.pooled(x, lengths)).float()
        loss = F.cross_entropy(logits, truth, self.weights)
        # Told is the loss of the labels alone, to be compared with that of the validation texts.
        seen = {"loss": loss, "accuracy": (logits.argmax(dim=1) == truth).float().mean()}
        if self.language_head is not None and self.settings.language_loss:
            foretold = self.language_head(x[:, :-1]).float().flatten(0, 1)
            nats = F.cross_entropy(foretold, ids[:, 1:].flatten(), reduction="none")
            real = torch.arange(1, ids.shape[1], device=ids.device) < lengths[:, None]
            language = (nats * real.flatten()).sum() / real.sum().clamp(min=1)
            loss = loss + self.settings.language_loss * language
            seen["language_loss"] = language
        return loss, seen

    def logits(self, data: Encoded) -> Logits:
        return predict(self.classifier, len(self.split.labels), data, self.low)

    def evaluate(self, state: State, progress: float) -> tuple[list[float], dict[str, float]]:
        found = score(self.logits(self.val), self.split.val.truth, self.split.labels)
        metrics = {
            "val_loss": found.loss,
            "val_accuracy": found.accuracy,
            "val_macro_f1": found.macro_f1,
        }
        return [1 - found.accuracy, found.loss], metrics

    def copied(self) -> Callable[[Path], None]:
        besides: dict[str, dict[str, Tensor]] = {}
        if self.adapters:
            besides[ADAPTERS] = dict(self.adapters.state_dict())
            besides[ADAPTERS]["score.weight"] = self.classifier.score.weight
        if self.language_head and not self.classifier.config.base.tied:
            besides[LANGUAGE_HEAD] = {"weight": self.language_head.weight}
        copies = {
            file: {name: tensor.detach().clone() for name, tensor in tensors.items()}
            for file, tensors in besides.items()
        }
        classifier = self.whole()

        def write(folder: Path) -> None:
            save_model(classifier, folder, self.tokenizer)
            for file, tensors in copies.items():
                save_file({name: tensor.cpu() for name, tensor in tensors.items()}, folder / file)

        return write

    def whole(self) -> Classifier:
        """A copy of the classifier, with what adapters add merged into it."""
        active = self.adapters is not None and self.adapters.active
        with self.adapters.merged() if self.adapters and active else nullcontext():
            return copied(self.classifier)

    def take_back(self, folder: Path) -> None:
        saved = load_classifier(folder)
        if self.adapters:  # they are in there already
            self.adapters.active = False
        self.classifier.load_state_dict(saved.state_dict())

    def restore(self, folder: Path) -> None:
        if self.adapters:
            tensors = load_file(folder / ADAPTERS)
            self.classifier.score.load_state_dict({"weight": tensors.pop("score.weight")})
            self.adapters.load_state_dict(tensors)
        else:
            self.take_back(folder)
        if self.language_head and not self.classifier.config.base.tied:
            self.language_head.load_state_dict(load_file(folder / LANGUAGE_HEAD))


def trained_names(model: Classifier, which: str) -> list[str]:
    """The parameters that are trained: with "last-2" the last two layers and what follows them."""
    names = [name for name, _ in model.named_parameters()]
    if which == "all":
        return names
    if which in ("head", "lora"):
        return ["score.weight"]
    first = model.config.base.layers - int(which.removeprefix("last-"))
    if first <= 0:
        raise UsageError(
            f"--train {which}: the model has {model.config.base.layers} layers; try --train all"
        )

    def late(name: str) -> bool:
        parts = name.split(".")
        if parts[0] == "score" or parts[1] == "norm":
            return True
        return parts[1] in ("blocks", "layers") and int(parts[2]) >= first

    return [name for name in names if late(name)]
