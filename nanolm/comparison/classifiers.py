"""The classifiers of the lectures: how each is trained, and what it teaches.

>>> task = ClassifierComparison(settings, notify, stop)
>>> task.train("cnn", seed=1, seconds=20, folder=Path("runs/x/cnn"))
{'accuracy': 0.98, ...}
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanolm.classification import classifier
from nanolm.classification.bag_of_words import Bags, LogisticModel, Vocabulary
from nanolm.classification.classifier import LENGTH_MULTIPLE, Logits, predict
from nanolm.classification.data import (
    Encoded,
    Ints,
    LabelSplit,
    Texts,
    Truncation,
    encode,
    split_data,
)
from nanolm.classification.finetune import choose_tokenizer, finetune, fingerprint
from nanolm.classification.metrics import score
from nanolm.classification.recipe import FEW_TEXTS, choose_fraction, default_epochs
from nanolm.classification.settings import SCRATCH, FinetuneSettings
from nanolm.comparison.networks import Averaging, Convolution, Perceptron, Recurrence, TextNetwork
from nanolm.comparison.training import BATCH, Interrupted, ModelKind, train_in_run, train_network
from nanolm.planning.tuning import threads_for
from nanolm.pretraining.begin import reports
from nanolm.training.events import Notify
from nanolm.training.interrupt import StopRequest

INVERSE_PENALTIES = (0.3, 1.0, 3.0, 10.0, 30.0)  # of linear models, tried on validation texts
DIM = 128  # of all vectors, as of the Transformer in the comparison
MAX_CONTEXT = 512  # tokens of a window
BAGS_PER_BATCH = 128  # in evaluation
TIMED_WORDS = 1000  # of the text that inference is timed with
MULTITHREADED_TOKENS = 4096  # of a batch, from which on more than one thread helps
SEEDS_OF_FEW = 5  # where texts are few
TRANSFORMER_EVALUATIONS = 3  # on a CPU, each takes as long as twenty steps


@dataclass
class Lesson:
    """What a classifier is trained on, and for how long."""

    settings: FinetuneSettings  # its data, seed and device
    split: LabelSplit
    notify: Notify
    stop: StopRequest
    folder: Path = Path()  # of the run, if it has one
    seconds: float = 60.0

    @cached_property
    def tokens(self) -> "TokenFeatures":
        return TokenFeatures(self)


class TokenFeatures:
    """Texts as tokens, the same for all networks that read them in order."""

    def __init__(self, lesson: Lesson) -> None:
        settings, split = lesson.settings, lesson.split
        self.labels, self.multiple = len(split.labels), LENGTH_MULTIPLE[settings.device]
        self.tokenizer = choose_tokenizer(settings, None, split.train.texts, lesson.notify)
        self.size = self.tokenizer.vocab_size
        longest = max(len(self.tokenizer.encode_prompt(text)) for text in split.train.texts)
        self.cut = Truncation(
            min(settings.context or MAX_CONTEXT, longest), settings.long or "windows"
        )
        self.train, self.val = self.encode(split.train), self.encode(split.val)
        self.lengths = self.train.lengths

    def encode(self, texts: Texts) -> Encoded:
        return encode(texts, self.tokenizer, self.cut, lambda *progress: None, self.multiple)

    def rows(self, which: Ints) -> tuple[np.ndarray, ...]:
        return self.train.rows(which)

    def logits(self, network: TextNetwork, data: Encoded) -> Logits:
        return predict(network, self.labels, data)


class BagFeatures:
    """Texts as bags of words with tf-idf weights."""

    def __init__(self, lesson: Lesson) -> None:
        train = lesson.split.train
        self.truth, self.device = train.truth, lesson.settings.device
        self.vocabulary = Vocabulary.of(train.texts)
        self.size = len(self.vocabulary)
        self.train, self.val = self.encode(train), self.encode(lesson.split.val)
        self.lengths = self.train.lengths

    def encode(self, texts: Texts) -> Bags:
        return self.vocabulary.bags(texts.texts)

    def rows(self, which: Ints) -> tuple[np.ndarray, ...]:
        return *self.train.rows(which), self.truth[which]

    @torch.inference_mode()
    def logits(self, network: TextNetwork, data: Bags) -> Logits:
        network.eval()
        batches = np.split(
            np.arange(len(data.lengths)), range(BAGS_PER_BATCH, len(data.lengths), BAGS_PER_BATCH)
        )
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


def train_linear(lesson: Lesson, longest: int) -> TrainedClassifier:
    begin, split = time.monotonic(), lesson.split
    vocabulary = Vocabulary.of(split.train.texts, longest)
    bags, held_out = vocabulary.bags(split.train.texts), vocabulary.bags(split.val.texts)
    best: tuple[float, LogisticModel] | None = None
    for strength in INVERSE_PENALTIES:
        shape = len(split.labels), len(vocabulary)
        model = LogisticModel.fit(bags, split.train.truth, *shape, strength)
        accuracy = float((model.logits(held_out).argmax(axis=1) == split.val.truth).mean())
        if best is None or accuracy > best[0]:
            best = accuracy, model
        if lesson.stop.requested:
            raise Interrupted
        if time.monotonic() - begin > lesson.seconds:
            break
    assert best
    model, seconds = best[1], time.monotonic() - begin
    return TrainedClassifier(
        lambda texts: model.logits(vocabulary.bags(texts)),
        model.parameter_count(),
        seconds,
        len(INVERSE_PENALTIES),
    )


def train_neural(
    lesson: Lesson, make: Callable[..., TextNetwork], lr: float = 6e-3, bags: bool = False
) -> TrainedClassifier:
    """A network on tokens in their order, or on bags of words."""
    begin, split, settings = time.monotonic(), lesson.split, lesson.settings
    features: Any = BagFeatures(lesson) if bags else lesson.tokens
    torch.manual_seed(settings.seed)
    network = make(features.size, DIM, len(split.labels)).to(settings.device)

    def evaluate() -> tuple[float, float]:
        scores = score(features.logits(network, features.val), split.val.truth, split.labels)
        return 1 - scores.accuracy, scores.loss

    def logits(texts: list[str]) -> Logits:
        unlabelled = Texts(texts, np.zeros(len(texts), dtype=np.int64))
        result: Logits = features.logits(network, features.encode(unlabelled))
        return result

    # Threads that share so little work only wait for each other.
    small = BATCH * features.lengths.mean() < MULTITHREADED_TOKENS
    with threads_for(1 if small else settings.threads):
        steps = train_network(
            network,
            features.lengths,
            lambda which: tensors(features.rows(which)),
            evaluate,
            lr,
            max(0.5, lesson.seconds - (time.monotonic() - begin)),
            settings.seed,
            lesson.stop,
        )
    seconds = time.monotonic() - begin
    return TrainedClassifier(logits, network.parameter_count(), seconds, steps)


def train_transformer(lesson: Lesson, pretrained: bool = False) -> TrainedClassifier:
    """A run as of `nanolm finetune`."""
    epochs = default_epochs(len(lesson.split.train), not pretrained, small=True)
    settings = replace(
        lesson.settings,
        start_from=lesson.settings.start_from if pretrained else SCRATCH,
        minutes=lesson.seconds / 60,
        epochs=epochs,
        evaluations=TRANSFORMER_EVALUATIONS,
    )
    result = train_in_run(settings, lesson.folder, partial(finetune, notify=lesson.notify))
    model = classifier.load(lesson.folder, note=lambda text: None)
    model = model.on(settings.device, settings.dtype)
    parameters = model.model.parameter_count()
    return TrainedClassifier(model.logits, parameters, result["seconds"], result["steps"])


CLASSIFIERS: dict[str, ModelKind] = {
    "majority": ModelKind(
        "commonest label", "always the same answer: what knowing nothing gets", 0.01, majority
    ),
    "bag": ModelKind(
        "bag of words, linear",
        "a weight for each word, added up: the order of words is lost",
        0.3,
        partial(train_linear, longest=1),
    ),
    "pairs": ModelKind(
        "bag of pairs, linear",
        "neighbours count as a word: order, as far as the next word",
        0.5,
        partial(train_linear, longest=2),
    ),
    "mlp": ModelKind(
        "bag of words, MLP",
        "a hidden layer lets words matter together; order is still lost",
        0.3,
        partial(train_neural, make=Perceptron, lr=2e-3, bags=True),
    ),
    "averaging": ModelKind(
        "averaged vectors",
        "learned word vectors, their mean, two layers: words that are alike share what they teach",
        0.4,
        partial(train_neural, make=Averaging, lr=1e-3),
    ),
    "cnn": ModelKind(
        "convolution",
        "filters over 3, 4 and 5 words: order within a phrase, wherever it stands",
        3.0,
        partial(train_neural, make=Convolution),
    ),
    "rnn": ModelKind(
        "Elman RNN",
        "one state, rewritten at every word: order throughout, but what is old fades",
        1.3,
        partial(train_neural, make=partial(Recurrence, cell="rnn"), lr=3e-3),
    ),
    "lstm": ModelKind(
        "LSTM, last state",
        "gates choose what to keep and what to forget: it remembers for longer",
        2.0,
        partial(train_neural, make=Recurrence),
    ),
    "lstm-mean": ModelKind(
        "LSTM, mean of states",
        "every word has its say at the end, however far back it stands",
        2.0,
        partial(train_neural, make=partial(Recurrence, pool="mean")),
    ),
    "lstm-max": ModelKind(
        "LSTM, max of states",
        "the strongest sign counts, wherever it stands",
        2.0,
        partial(train_neural, make=partial(Recurrence, pool="max")),
    ),
    "lstm-both": ModelKind(
        "LSTM, both ways",
        "read from both ends, each word knows what follows it too",
        2.0,
        partial(train_neural, make=partial(Recurrence, pool="max", bidirectional=True)),
    ),
    "lstm-two": ModelKind(
        "LSTM, two layers",
        "a second layer reads what the first one made of the words",
        3.0,
        partial(train_neural, make=partial(Recurrence, pool="max", layers=2)),
    ),
    "transformer": ModelKind(
        "Transformer",
        "each word looks at all before it at once: any two of them meet in one step",
        18.0,
        train_transformer,
    ),
    "pretrained": ModelKind(
        "pre-trained Transformer",
        "it has read without labels first: words and their order are known before the first label",
        8.0,
        partial(train_transformer, pretrained=True),
    ),
}


class ClassifierComparison:
    """Labelled texts, and the classifiers that learn from them."""

    measure = "accuracy"

    def __init__(self, settings: FinetuneSettings, notify: Notify, stop: StopRequest) -> None:
        self.settings, self.notify, self.stop = choose_fraction(settings), notify, stop
        self.kinds = classifier_kinds(settings)
        self.lessons: dict[int, Lesson] = {}

    def seeds(self) -> int:
        """How many are worth it: chance matters where texts are few."""
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
        scores = score(trained.logits(split.val.texts), split.val.truth, split.labels)
        result: dict[str, Any] = {
            "accuracy": scores.accuracy,
            "macro_f1": scores.macro_f1,
            "parameters": trained.parameters,
            "seconds": trained.seconds,
            "steps": trained.steps,
            "long_seconds": inference_seconds(trained.logits, split.val.texts),
        }
        if split.test:
            scores = score(trained.logits(split.test.texts), split.test.truth, split.labels)
            result |= {"test_accuracy": scores.accuracy, "test_macro_f1": scores.macro_f1}
        return result


def classifier_kinds(settings: FinetuneSettings) -> dict[str, ModelKind]:
    """Those that can be trained with these settings."""
    missing = "pretrained" if settings.start_from is None else None
    return {name: kind for name, kind in CLASSIFIERS.items() if name != missing}


def inference_seconds(logits: Callable[[list[str]], Logits], texts: list[str]) -> float:
    """For one long text, made of these."""
    words: list[str] = []
    for text in texts:
        words += text.split()
        if len(words) >= TIMED_WORDS:
            break
    words = (words * (TIMED_WORDS // max(1, len(words)) + 1))[:TIMED_WORDS]
    times = []
    for _ in range(5):
        begin = time.monotonic()
        logits([" ".join(words)])
        times.append(time.monotonic() - begin)
    return statistics.median(times)
