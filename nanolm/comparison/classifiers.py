"""The classifiers of the lectures: how each is trained, and what it shows.

>>> task = ClassifierComparison(settings, notify, stop)
>>> task.train("cnn", seed=1, seconds=20, folder=Path("runs/x/cnn"))
{'accuracy': 0.98, ...}
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanolm.classification.bag_of_words import Bags, LogisticModel, Vocabulary
from nanolm.classification.classifier import LENGTH_MULTIPLE, Logits, load, predict
from nanolm.classification.data import Encoded, LabelSplit, Texts, Truncation, encode, split_data
from nanolm.classification.finetune import choose_tokenizer, finetune, fingerprint
from nanolm.classification.metrics import score
from nanolm.classification.recipe import FEW_TEXTS, choose_fraction, default_epochs
from nanolm.classification.settings import SCRATCH, FinetuneSettings
from nanolm.comparison.networks import Averaging, Convolution, Perceptron, Recurrence, TextNetwork
from nanolm.comparison.training import BATCH, ModelKind, StopTraining, train_in_run, train_network
from nanolm.planning.tuning import threads_for
from nanolm.pretraining.begin import reports
from nanolm.training.events import Notify
from nanolm.training.interrupt import StopRequest

INVERSE_PENALTIES = (0.3, 1.0, 3.0, 10.0, 30.0)  # of linear models, chosen on the validation set
DIM = 128  # of all vectors, as in the Transformer of the comparison
MAX_CONTEXT = 512  # tokens in a window
BAGS_PER_BATCH = 128  # in evaluation
TIMED_WORDS = 1000  # in the text used to time inference
MULTITHREADED_TOKENS = 4096  # per batch; with fewer, more than one thread does not help
SEEDS_OF_FEW = 5  # if there are few texts
TRANSFORMER_EVALUATIONS = 3  # on a CPU, each takes as long as twenty steps


@dataclass
class Lesson:
    settings: FinetuneSettings  # data, seed and device
    split: LabelSplit
    notify: Notify
    stop: StopRequest
    folder: Path = Path()  # of the run, if it has one
    seconds: float = 60.0

    @cached_property
    def tokens(self) -> "TokenFeatures":
        return TokenFeatures(self)


class TokenFeatures:
    """Texts as tokens, shared by all networks that read them in order."""

    def __init__(self, lesson: Lesson) -> None:
        settings, split, texts = lesson.settings, lesson.split, lesson.split.train.texts
        tokenizer = choose_tokenizer(settings, None, texts, lesson.notify)
        self.labels, self.size = len(split.labels), tokenizer.vocab_size
        longest = max(len(tokenizer.encode_prompt(text)) for text in texts)
        cut = Truncation(min(settings.context or MAX_CONTEXT, longest), settings.long or "windows")
        how = (tokenizer, cut, lambda *how_far: None, LENGTH_MULTIPLE[settings.device])
        self.encode: Callable[[Texts], Encoded] = lambda texts: encode(texts, *how)
        self.train, self.val = self.encode(split.train), self.encode(split.val)
        self.rows = self.train.rows

    def logits(self, network: TextNetwork, data: Encoded) -> Logits:
        return predict(network, self.labels, data)


class BagFeatures:
    """Texts as bags of words with tf-idf weights."""

    def __init__(self, lesson: Lesson) -> None:
        train, self.device = lesson.split.train, lesson.settings.device
        vocabulary = Vocabulary.of(train.texts)
        self.size = len(vocabulary)
        self.encode: Callable[[Texts], Bags] = lambda texts: vocabulary.bags(texts.texts)
        self.train, self.val = self.encode(train), self.encode(lesson.split.val)
        self.rows = lambda which: (*self.train.rows(which), train.truth[which])

    @torch.inference_mode()
    def logits(self, network: TextNetwork, data: Bags) -> Logits:
        network.eval()
        count = len(data.lengths)
        batches = np.split(np.arange(count), range(BAGS_PER_BATCH, count, BAGS_PER_BATCH))
        inputs = (tensors(data.rows(which), self.device) for which in batches)
        return torch.cat([network(*each) for each in inputs]).float().cpu().numpy()


def tensors(arrays: tuple[np.ndarray, ...], device: str = "cpu") -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(array).to(device) for array in arrays)


@dataclass(frozen=True)
class TrainedClassifier:
    logits: Callable[[list[str]], Logits]
    parameters: int
    seconds: float  # of training
    steps: int


def majority(lesson: Lesson) -> TrainedClassifier:
    counts = np.bincount(lesson.split.train.truth, minlength=len(lesson.split.labels))
    always = np.log(np.maximum(counts, 0.5)).astype(np.float32)
    return TrainedClassifier(lambda texts: np.tile(always, (len(texts), 1)), 0, 0.0, 0)


def train_linear(lesson: Lesson, longest: int = 1) -> TrainedClassifier:
    begin, split = time.monotonic(), lesson.split
    vocabulary = Vocabulary.of(split.train.texts, longest)
    bags, held_out = vocabulary.bags(split.train.texts), vocabulary.bags(split.val.texts)
    shape, best = (len(split.labels), len(vocabulary)), -1.0
    for strength in INVERSE_PENALTIES:
        tried = LogisticModel.fit(bags, split.train.truth, *shape, strength)
        accuracy = float((tried.logits(held_out).argmax(axis=1) == split.val.truth).mean())
        if accuracy > best:
            best, model = accuracy, tried
        if lesson.stop.requested:
            raise StopTraining
        if time.monotonic() - begin > lesson.seconds:
            break
    how = (model.weight.size + model.bias.size, time.monotonic() - begin, len(INVERSE_PENALTIES))
    return TrainedClassifier(lambda texts: model.logits(vocabulary.bags(texts)), *how)


def train_neural(
    lesson: Lesson, make: Callable[..., TextNetwork], lr: float, **options: Any
) -> TrainedClassifier:
    """Train a network on token sequences or, if it is a perceptron, on bags of words."""
    begin, split, settings = time.monotonic(), lesson.split, lesson.settings
    features: Any = BagFeatures(lesson) if make is Perceptron else lesson.tokens
    torch.manual_seed(settings.seed)
    network = make(features.size, DIM, len(split.labels), **options).to(settings.device)

    def evaluate() -> tuple[float, float]:
        scores = score(features.logits(network, features.val), split.val.truth, split.labels)
        return 1 - scores.accuracy, scores.loss

    def logits(texts: list[str]) -> Any:
        unlabeled = Texts(texts, np.zeros(len(texts), np.int64))
        return features.logits(network, features.encode(unlabeled))

    # With so little work, threads would only wait for each other.
    lengths = features.train.lengths
    with threads_for(1 if BATCH * lengths.mean() < MULTITHREADED_TOKENS else settings.threads):
        left = max(0.5, lesson.seconds - (time.monotonic() - begin))
        how = (evaluate, lr, left, settings.seed, lesson.stop)
        steps = train_network(network, lengths, lambda rows: tensors(features.rows(rows)), *how)
    size = sum(parameter.numel() for parameter in network.parameters())
    return TrainedClassifier(logits, size, time.monotonic() - begin, steps)


def train_transformer(lesson: Lesson, pretrained: bool = False) -> TrainedClassifier:
    """Train in a run like `nanolm finetune`."""
    settings = replace(
        lesson.settings,
        start_from=lesson.settings.start_from if pretrained else SCRATCH,
        minutes=lesson.seconds / 60,
        epochs=default_epochs(len(lesson.split.train), not pretrained, small=True),
        ngrams=False,  # only the Transformer
        evaluations=TRANSFORMER_EVALUATIONS,
    )
    result = train_in_run(settings, lesson.folder, partial(finetune, notify=lesson.notify))
    classifier = load(lesson.folder, lambda text: None).on(settings.device, settings.dtype)
    how = (classifier.model.parameter_count(), result["seconds"], result["steps"])
    return TrainedClassifier(classifier.logits, *how)


def neural(
    title: str, teaches: str, share: float, make: type[TextNetwork], lr: float = 6e-3, **more: Any
) -> ModelKind:
    return ModelKind(title, teaches, share, partial(train_neural, make=make, lr=lr, **more))


CLASSIFIERS: dict[str, ModelKind] = {
    "majority": ModelKind(
        "majority class", "the baseline; always predicts the most frequent label", 0.01, majority
    ),
    "bag": ModelKind(
        "bag of words, linear", "a sum of word weights; order is lost", 0.3, train_linear
    ),
    "pairs": ModelKind(
        "bag of bigrams, linear",
        "order counts only within pairs",
        0.5,
        partial(train_linear, longest=2),
    ),
    "mlp": neural(
        "bag of words, MLP", "words interact; order is still lost", 0.3, Perceptron, 2e-3
    ),
    "averaging": neural(
        "averaged embeddings", "similar words share what is learned", 0.4, Averaging, 1e-3
    ),
    "cnn": neural(
        "convolution", "filters over 3 to 5 words; order within a phrase counts", 3.0, Convolution
    ),
    "rnn": neural(
        "Elman RNN", "full order, but early words fade", 1.3, Recurrence, 3e-3, cell="rnn"
    ),
    "lstm": neural(
        "LSTM, last state", "gates choose what to keep, for a longer memory", 2.0, Recurrence
    ),
    "lstm-mean": neural(
        "LSTM, mean of states", "every word contributes equally", 2.0, Recurrence, pool="mean"
    ),
    "lstm-max": neural(
        "LSTM, max of states", "the strongest signal wins", 2.0, Recurrence, pool="max"
    ),
    "lstm-both": neural(
        "LSTM, bidirectional", "reads both ways", 2.0, Recurrence, pool="max", bidirectional=True
    ),
    "lstm-two": neural(
        "LSTM, two layers", "a second layer reads the first", 3.0, Recurrence, pool="max", layers=2
    ),
    "transformer": ModelKind(
        "Transformer", "any two words interact in one step", 18.0, train_transformer
    ),
    "pretrained": ModelKind(
        "pretrained Transformer",
        "learns words and word order before it sees any label",
        8.0,
        partial(train_transformer, pretrained=True),
    ),
}


class ClassifierComparison:
    """Labeled texts, and the classifiers trained on them."""

    measure = "accuracy"

    def __init__(self, settings: FinetuneSettings, notify: Notify, stop: StopRequest) -> None:
        self.settings, self.notify, self.stop = choose_fraction(settings), notify, stop
        self.kinds = classifier_kinds(settings)
        self.lessons: dict[int, Lesson] = {}

    @property
    def seeds(self) -> int:
        """The useful number of seeds: chance matters if there are few texts."""
        return SEEDS_OF_FEW if len(self.lesson(self.settings.seed).split.train) < FEW_TEXTS else 1

    def fingerprint(self) -> str:
        return fingerprint(self.lesson(self.settings.seed).split)

    def lesson(self, seed: int) -> Lesson:
        if seed not in self.lessons:
            settings = replace(self.settings, seed=seed)
            split = split_data(settings, reports(self.notify)[1])
            self.lessons = {seed: Lesson(settings, split, self.notify, self.stop)}
        return self.lessons[seed]

    def train(self, name: str, seed: int, seconds: float, folder: Path) -> dict[str, Any]:
        lesson = self.lesson(seed)
        lesson.seconds, lesson.folder = seconds, folder
        split, trained = lesson.split, self.kinds[name].train(lesson)
        result: dict[str, Any] = {}
        for prefix, part in (("", split.val), ("test_", split.test)):
            if part:
                scores = score(trained.logits(part.texts), part.truth, split.labels)
                result[f"{prefix}accuracy"] = scores.accuracy
                result[f"{prefix}macro_f1"] = scores.macro_f1
        result |= {key: getattr(trained, key) for key in ("parameters", "seconds", "steps")}
        return result | {"long_seconds": inference_seconds(trained.logits, split.val.texts)}


def classifier_kinds(settings: FinetuneSettings) -> dict[str, ModelKind]:
    """The kinds that can be trained with these settings."""
    some = settings.start_from is not None
    return {name: kind for name, kind in CLASSIFIERS.items() if some or name != "pretrained"}


def inference_seconds(logits: Callable[[list[str]], Logits], texts: list[str]) -> float:
    """The median time for one long text, made by repeating these; each has at least one word."""
    words = (word for text in cycle(texts) for word in text.split())
    text, times = " ".join(islice(words, TIMED_WORDS)), []
    for _ in range(5):
        begin = time.monotonic()
        logits([text])
        times.append(time.monotonic() - begin)
    return statistics.median(times)
