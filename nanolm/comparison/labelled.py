"""The classifiers of the lectures, one better than the last: how each is trained, and what it
teaches.

    >>> subject = Labelled(settings, notify, stop)
    >>> subject.learn("cnn", seed=1, seconds=20, folder=Path("runs/x/cnn"))
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
from nanolm.comparison.learning import Recipe, Row, Stopped, in_run, learn
from nanolm.comparison.networks import Averaging, Convolution, Network, Perceptron, Recurrence
from nanolm.planning.tuning import threads_for
from nanolm.pretraining.begin import reports
from nanolm.training.events import Notify
from nanolm.training.interrupt import StopRequest

STRENGTHS = (0.3, 1.0, 3.0, 10.0, 30.0)  # of a fit to the texts, against small weights
DIM = 128  # of all vectors, as of the Transformer that is compared
CONTEXT = 512  # tokens of a window, at most
TOGETHER = 128  # bags that are looked at at once
LONG = 1000  # words of a text that it is timed with
SHARED = 4096  # tokens of a batch, from which on more than one thread helps
SEEDS = 5  # where texts are few
EVALUATIONS = 3  # of a Transformer: on a CPU, each takes as long as twenty steps


@dataclass
class Lesson:
    """All that a row learns from."""

    settings: FinetuneSettings  # its data, seed and device
    split: LabelSplit
    folder: Path  # of the run, where it has one
    notify: Notify
    stop: StopRequest
    seconds: float = 60.0  # for the row that comes next

    @cached_property
    def tokens(self) -> "Tokens":
        return Tokens(self.settings, self.split, self.notify)


class Tokens:
    """The texts as tokens, the same for all that read them in order."""

    def __init__(self, settings: FinetuneSettings, split: LabelSplit, notify: Notify) -> None:
        self.tokenizer = choose_tokenizer(settings, None, split.train.texts, notify)
        longest = max(len(self.tokenizer.encode_prompt(text)) for text in split.train.texts)
        self.cut = Truncation(min(settings.context or CONTEXT, longest), settings.long or "windows")
        self.multiple = LENGTH_MULTIPLE[settings.device]
        self.train, self.val = self.encoded(split.train), self.encoded(split.val)

    def encoded(self, texts: Texts) -> Encoded:
        return encode(texts, self.tokenizer, self.cut, lambda *how_far: None, self.multiple)


@dataclass(frozen=True)
class Trained:
    """What came of a row."""

    logits: Callable[[list[str]], Logits]
    parameters: int
    seconds: float  # of training
    steps: int


def majority(lesson: Lesson) -> Trained:
    counts = np.bincount(lesson.split.train.truth, minlength=len(lesson.split.labels))
    always = np.log(np.maximum(counts, 0.5)).astype(np.float32)
    return Trained(lambda texts: np.tile(always, (len(texts), 1)), 0, 0.0, 0)


def linear(lesson: Lesson, longest: int) -> Trained:
    begin, split = time.monotonic(), lesson.split
    vocabulary = Vocabulary.of(split.train.texts, longest)
    bags, held_out = vocabulary.bags(split.train.texts), vocabulary.bags(split.val.texts)
    best: tuple[float, LogisticModel] | None = None
    for strength in STRENGTHS:
        shape = len(split.labels), len(vocabulary)
        found = LogisticModel.fit(bags, split.train.truth, *shape, strength)
        right = float((found.logits(held_out).argmax(axis=1) == split.val.truth).mean())
        if best is None or right > best[0]:
            best = right, found
        if lesson.stop.requested:
            raise Stopped
        if time.monotonic() - begin > lesson.seconds:
            break
    assert best
    model = best[1]
    return Trained(
        lambda texts: model.logits(vocabulary.bags(texts)),
        model.parameter_count(),
        time.monotonic() - begin,
        len(STRENGTHS),
    )


def perceptron(lesson: Lesson, recipe: Recipe) -> Trained:
    begin, split = time.monotonic(), lesson.split
    vocabulary = Vocabulary.of(split.train.texts)
    bags, held_out = vocabulary.bags(split.train.texts), vocabulary.bags(split.val.texts)
    device = torch.device(lesson.settings.device)
    torch.manual_seed(lesson.settings.seed)
    network = Perceptron(len(vocabulary), DIM, len(split.labels)).to(device)

    def rows(which: Ints) -> tuple[torch.Tensor, ...]:
        parts = (*bags.rows(which), split.train.truth[which])
        return tuple(torch.from_numpy(part) for part in parts)

    @torch.inference_mode()
    def logits(bags: Bags) -> Logits:
        network.eval()
        found = []
        for start in range(0, len(bags.lengths), TOGETHER):
            which = np.arange(start, min(start + TOGETHER, len(bags.lengths)))
            found.append(network(*(torch.from_numpy(part).to(device) for part in bags.rows(which))))
        return torch.cat(found).float().cpu().numpy()

    def look() -> tuple[float, float]:
        return goodness(logits(held_out), split)

    steps = trained(network, bags.lengths, rows, look, recipe, lesson, begin)
    seconds = time.monotonic() - begin
    return Trained(
        lambda texts: logits(vocabulary.bags(texts)), network.parameter_count(), seconds, steps
    )


def sequence(lesson: Lesson, make: Callable[..., Network], recipe: Recipe) -> Trained:
    """A network that reads tokens in their order, or could."""
    begin, split, tokens = time.monotonic(), lesson.split, lesson.tokens
    torch.manual_seed(lesson.settings.seed)
    network = make(tokens.tokenizer.vocab_size, DIM, len(split.labels))
    network.to(lesson.settings.device)

    def rows(which: Ints) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(part) for part in tokens.train.rows(which))

    def logits(data: Encoded) -> Logits:
        return predict(network, len(split.labels), data)

    def look() -> tuple[float, float]:
        return goodness(logits(tokens.val), split)

    steps = trained(network, tokens.train.lengths, rows, look, recipe, lesson, begin)
    seconds = time.monotonic() - begin

    def of_texts(texts: list[str]) -> Logits:
        return logits(tokens.encoded(Texts(texts, np.zeros(len(texts), dtype=np.int64))))

    return Trained(of_texts, network.parameter_count(), seconds, steps)


def trained(
    network: Network,
    lengths: Ints,
    rows: Callable[[Ints], tuple[torch.Tensor, ...]],
    look: Callable[[], tuple[float, float]],
    recipe: Recipe,
    lesson: Lesson,
    begin: float,
) -> int:
    left = max(0.5, lesson.seconds - (time.monotonic() - begin))
    # Threads that share so little work only wait for each other.
    little = recipe.batch * lengths.mean() < SHARED
    with threads_for(1 if little else lesson.settings.threads):
        return learn(network, lengths, rows, look, recipe, left, lesson.settings.seed, lesson.stop)


def goodness(logits: Logits, split: LabelSplit) -> tuple[float, float]:
    found = score(logits, split.val.truth, split.labels)
    return 1 - found.accuracy, found.loss


def transformer(lesson: Lesson, start_from: str | None) -> Trained:
    """A run as `nanolm finetune` has it."""
    scratch = start_from is None
    epochs = default_epochs(len(lesson.split.train), scratch, small=True)
    settings = replace(
        lesson.settings,
        start_from=start_from or SCRATCH,
        minutes=lesson.seconds / 60,
        epochs=epochs,
        evaluations=EVALUATIONS,
    )
    train = partial(finetune, notify=lesson.notify)
    result = in_run(settings, lesson.folder, train)
    found = classifier.load(lesson.folder, note=lambda text: None)
    found = found.on(settings.device, settings.dtype)
    return Trained(found.logits, found.model.parameter_count(), result["seconds"], result["steps"])


READING = Recipe(lr=6e-3)
ROWS: dict[str, Row] = {
    "majority": Row(
        "commonest label", "always the same answer: what knowing nothing gets", 0.01, majority
    ),
    "bag": Row(
        "bag of words, linear",
        "a weight for each word, added up: the order of words is lost",
        0.3,
        partial(linear, longest=1),
    ),
    "pairs": Row(
        "bag of pairs, linear",
        "neighbours count as a word: order, as far as the next word",
        0.5,
        partial(linear, longest=2),
    ),
    "mlp": Row(
        "bag of words, MLP",
        "a hidden layer lets words matter together; order is still lost",
        0.3,
        partial(perceptron, recipe=Recipe(lr=2e-3)),
    ),
    "averaging": Row(
        "averaged vectors",
        "learned word vectors, their mean, two layers: words that are alike share what they teach",
        0.4,
        partial(sequence, make=Averaging, recipe=Recipe(lr=1e-3)),
    ),
    "cnn": Row(
        "convolution",
        "filters over 3, 4 and 5 words: order within a phrase, wherever it stands",
        3.0,
        partial(sequence, make=Convolution, recipe=READING),
    ),
    "rnn": Row(
        "Elman RNN",
        "one state, rewritten at every word: order throughout, but what is old fades",
        1.3,
        partial(sequence, make=partial(Recurrence, cell="rnn"), recipe=Recipe(lr=3e-3)),
    ),
    "lstm": Row(
        "LSTM, last state",
        "gates choose what to keep and what to forget: it remembers for longer",
        2.0,
        partial(sequence, make=Recurrence, recipe=READING),
    ),
    "lstm-mean": Row(
        "LSTM, mean of states",
        "every word has its say at the end, however far back it stands",
        2.0,
        partial(sequence, make=partial(Recurrence, pool="mean"), recipe=READING),
    ),
    "lstm-max": Row(
        "LSTM, max of states",
        "the strongest sign counts, wherever it stands",
        2.0,
        partial(sequence, make=partial(Recurrence, pool="max"), recipe=READING),
    ),
    "lstm-both": Row(
        "LSTM, both ways",
        "read from both ends, each word knows what follows it too",
        2.0,
        partial(sequence, make=partial(Recurrence, pool="max", both_ways=True), recipe=READING),
    ),
    "lstm-two": Row(
        "LSTM, two layers",
        "a second layer reads what the first one made of the words",
        3.0,
        partial(sequence, make=partial(Recurrence, pool="max", layers=2), recipe=READING),
    ),
    "transformer": Row(
        "Transformer",
        "each word looks at all before it at once: any two of them meet in one step",
        18.0,
        partial(transformer, start_from=None),
    ),
    "pretrained": Row(
        "pre-trained Transformer",
        "it has read without labels first: words and their order are known before the first label",
        8.0,
        transformer,
    ),
}


class Labelled:
    """Labelled texts, and what can learn from them."""

    measure = "accuracy"

    def __init__(self, settings: FinetuneSettings, notify: Notify, stop: StopRequest) -> None:
        self.settings, self.notify, self.stop = choose_fraction(settings), notify, stop
        self.lessons: dict[int, Lesson] = {}
        self.rows = dict(ROWS)
        if settings.start_from is None:
            del self.rows["pretrained"]
        else:
            self.rows["pretrained"] = replace(
                ROWS["pretrained"], how=partial(transformer, start_from=settings.start_from)
            )

    def seeds(self) -> int:
        """How many are worth it: luck matters where texts are few."""
        return SEEDS if len(self.lesson(self.settings.seed).split.train) < FEW_TEXTS else 1

    def fingerprint(self) -> str:
        return fingerprint(self.lesson(self.settings.seed).split)

    def lesson(self, seed: int) -> Lesson:
        if seed not in self.lessons:
            settings = replace(self.settings, seed=seed)
            split = split_data(settings, reports(self.notify)[1])
            self.lessons = {seed: Lesson(settings, split, Path(), self.notify, self.stop)}
        return self.lessons[seed]

    def learn(self, name: str, seed: int, seconds: float, folder: Path) -> dict[str, Any]:
        lesson = self.lesson(seed)
        lesson.seconds, lesson.folder = seconds, folder
        split, trained = lesson.split, self.rows[name].how(lesson)
        found = score(trained.logits(split.val.texts), split.val.truth, split.labels)
        result: dict[str, Any] = {
            "accuracy": found.accuracy,
            "macro_f1": found.macro_f1,
            "parameters": trained.parameters,
            "seconds": trained.seconds,
            "steps": trained.steps,
            "long_seconds": timed(trained.logits, split),
        }
        if split.test:
            tested = score(trained.logits(split.test.texts), split.test.truth, split.labels)
            result |= {"test_accuracy": tested.accuracy, "test_macro_f1": tested.macro_f1}
        return result


def timed(logits: Callable[[list[str]], Logits], split: LabelSplit) -> float:
    """Seconds for one long text."""
    words: list[str] = []
    for text in split.val.texts:
        words += text.split()
        if len(words) >= LONG:
            break
    text, times = " ".join((words * (LONG // max(1, len(words)) + 1))[:LONG]), []
    for _ in range(5):
        begin = time.monotonic()
        logits([text])
        times.append(time.monotonic() - begin)
    return statistics.median(times)
