"""Every baseline, compared with an independent implementation."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from nanolm.classification.bag_of_words import LogisticModel, Vocabulary
from nanolm.comparison.language_models import NO_TARGET, WINDOW, windows
from nanolm.comparison.networks import (
    CAUSAL_FILTER,
    FILTER_SIZES,
    Averaging,
    CausalConvolution,
    Convolution,
    Perceptron,
    Recurrence,
    TextNetwork,
)
from nanolm.comparison.training import StopTraining, train_network
from nanolm.training.interrupt import StopRequest

TEXTS = [
    "The soup was good, not bad at all.",
    "The soup was bad, not good at all!",
    "I'd rather eat at home again than here; a pity.",
    "Überraschend gut 2 x 2",
    "good good good bad",
    "",
]
NEW = ["a good soup", "nothing of this kind", "Bad bad BAD, and home again"]
WORDS, WIDTH, LABELS = 50, 16, 3
LENGTHS = torch.tensor([7, 1, 4, 5])
IDS = torch.randint(WORDS, (4, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("longest", [1, 2])
def test_bags_are_those_of_scikit_learn(longest: int) -> None:
    vocabulary = Vocabulary.of(TEXTS, longest)
    theirs = TfidfVectorizer(ngram_range=(1, longest)).fit(TEXTS)
    assert vocabulary.ids == theirs.vocabulary_
    for texts in (TEXTS, NEW):
        words, weights = vocabulary.bags(texts).rows(np.arange(len(texts)))
        whole = np.zeros((len(texts), len(vocabulary)))
        np.add.at(whole, (np.arange(len(texts))[:, None], words), weights)
        np.testing.assert_allclose(whole, theirs.transform(texts).toarray(), atol=1e-6)


@pytest.mark.parametrize("labels", [2, 4])
@pytest.mark.parametrize("strength", [0.3, 10.0])
def test_logistic_regression_is_that_of_scikit_learn(labels: int, strength: float) -> None:
    rng = np.random.default_rng(labels)
    kinds = ["red", "blue", "green", "grey", "pale", "dark", "loud", "odd"]
    texts = [" ".join(rng.choice(kinds, 5)) for _ in range(300)]
    truth = np.array([(text.count("red") + 2 * text.count("odd")) % labels for text in texts])
    vocabulary = Vocabulary.of(texts)
    bags = vocabulary.bags(texts)
    ours = LogisticModel.fit(bags, truth, labels, len(vocabulary), strength, tolerance=1e-8)
    features = TfidfVectorizer().fit_transform(texts)
    theirs = LogisticRegression(C=strength, max_iter=5000, tol=1e-8).fit(features, truth)
    np.testing.assert_allclose(ours.weight.T, theirs.coef_, atol=2e-3)
    logits = ours.logits(bags)
    chances = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
    np.testing.assert_allclose(chances, theirs.predict_proba(features), atol=1e-4)


def test_a_perceptron_is_two_linear_layers() -> None:
    network = Perceptron(WORDS, WIDTH, LABELS).eval()
    weights = torch.rand(IDS.shape)
    counts = torch.zeros(len(IDS), WORDS).scatter_add_(1, IDS, weights)  # (texts, words)
    first = nn.Linear(WORDS, WIDTH)
    first.weight.data, first.bias.data = network.hidden.weight.data.T, network.bias.data
    same(network(IDS, weights), nn.Sequential(first, nn.ReLU(), network.score)(counts))


def test_averaging_is_an_embedding_bag_below_linear_layers() -> None:
    network = Averaging(WORDS, WIDTH, LABELS).eval()
    bag = nn.EmbeddingBag.from_pretrained(network.embedding.weight.data, mode="mean")
    layers = itertools.chain(*((layer, nn.ReLU()) for layer in network.layers))
    whole = nn.Sequential(*layers, network.score)
    for text, row in alone():
        same(network(IDS, LENGTHS)[row], whole(bag(text))[0])


def test_convolution_is_that_of_torch() -> None:
    network = Convolution(WORDS, WIDTH, LABELS).eval()
    for text, row in alone():
        x = network.embedding(text).transpose(1, 2)  # (1, width, time)
        found = []
        for size, mine in zip(FILTER_SIZES, network.filters, strict=True):
            theirs = nn.Conv1d(WIDTH, WIDTH, size, padding=size - 1)
            theirs.load_state_dict(mine.state_dict())
            found.append(nn.AdaptiveMaxPool1d(1)(torch.relu(theirs(x)))[..., 0])
        same(network(IDS, LENGTHS)[row], network.score(torch.cat(found, dim=1))[0])


@pytest.mark.parametrize("cell", ["rnn", "lstm"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("pool", ["last", "mean", "max"])
def test_recurrence_is_that_of_torch(
    cell: str, layers: int, bidirectional: bool, pool: str
) -> None:
    network = Recurrence(WORDS, WIDTH, LABELS, cell, layers, pool, bidirectional).eval()  # type: ignore[arg-type]
    kind = nn.LSTM if cell == "lstm" else nn.RNN
    hidden = WIDTH // 2 if bidirectional else WIDTH
    names = {"weight_ih": "input_weight", "weight_hh": "state_weight", "bias_ih": "bias"}
    x = network.embedding(IDS)
    for number in range(layers):
        theirs = kind(WIDTH, hidden, batch_first=True, bidirectional=bidirectional)
        for way, suffix in zip(range(len(network.directions)), ("", "_reverse"), strict=False):
            for name, mine in names.items():
                value = network.get_parameter(f"directions.{way}.{number}.{mine}")
                getattr(theirs, f"{name}_l0{suffix}").data = value.data
            nn.init.zeros_(getattr(theirs, f"bias_hh_l0{suffix}"))
        packed = nn.utils.rnn.pack_padded_sequence(
            x, LENGTHS, batch_first=True, enforce_sorted=False
        )
        y, _ = nn.utils.rnn.pad_packed_sequence(theirs(packed)[0], batch_first=True)
        x = x + y if number else y
    for row, length in enumerate(LENGTHS):
        own = x[row, :length]
        last = torch.cat([own[-1, :hidden], own[0, hidden:]])
        pooled = {"last": last, "mean": own.mean(dim=0), "max": own.amax(dim=0)}[pool]
        same(network(IDS, LENGTHS)[row], network.score(pooled))


def alone() -> list[tuple[Tensor, int]]:
    """Each text without its padding, (1, time), and its row."""
    return [(IDS[row : row + 1, :length], row) for row, length in enumerate(LENGTHS)]


def same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


NETWORKS: dict[str, Callable[[], TextNetwork]] = {
    "averaging": lambda: Averaging(WORDS, WIDTH, LABELS),
    "convolution": lambda: Convolution(WORDS, WIDTH, LABELS),
    "recurrence": lambda: Recurrence(
        WORDS, WIDTH, LABELS, layers=2, pool="max", bidirectional=True
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
@given(more=st.integers(1, 5), filling=st.integers(0, WORDS - 1))
def test_filling_changes_nothing(name: str, more: int, filling: int) -> None:
    torch.manual_seed(1)
    network = NETWORKS[name]().eval()
    wider = torch.cat([IDS, torch.full((len(IDS), more), filling)], dim=1)
    inside = torch.arange(wider.shape[1]) < LENGTHS[:, None]
    same(network(torch.where(inside, wider, filling), LENGTHS), network(IDS, LENGTHS))


def test_causal_convolution_is_that_of_torch() -> None:
    torch.manual_seed(2)
    network = CausalConvolution(WORDS, WIDTH, layers=2).eval()
    x = network.embedding(IDS).transpose(1, 2)  # (texts, width, time)
    for norm, layer in zip(network.norms, network.filters, strict=False):
        assert isinstance(layer, nn.Linear)
        theirs = nn.Conv1d(WIDTH, 2 * WIDTH, CAUSAL_FILTER)
        weight = layer.weight.view(2 * WIDTH, WIDTH, CAUSAL_FILTER)
        theirs.load_state_dict({"weight": weight, "bias": layer.bias})
        normal = norm(x.transpose(1, 2)).transpose(1, 2)
        x = x + nn.functional.glu(theirs(nn.functional.pad(normal, (CAUSAL_FILTER - 1, 0))), dim=1)
    logits = network.norms[-1](x.transpose(1, 2)) @ network.embedding.weight.T
    torch.testing.assert_close(network(IDS), logits.transpose(1, 2))


def test_a_causal_convolution_sees_a_few_tokens_and_none_later() -> None:
    network = CausalConvolution(WORDS, WIDTH, layers=2).eval()
    vectors = network.embedding(torch.arange(12)[None]).detach().requires_grad_()
    network.embedding = nn.Identity()  # type: ignore[assignment]
    network.embedding.weight = torch.randn(WORDS, WIDTH)
    network(vectors)[0, :, 8].sum().backward()
    assert vectors.grad is not None
    assert vectors.grad[0].abs().sum(dim=1).nonzero()[:, 0].tolist() == list(range(2, 9))


def test_windows_have_every_token_once() -> None:
    ids = np.arange(2 * WINDOW + 4, dtype=np.uint16)
    inputs, _, targets = windows(ids, np.arange(3))
    assert inputs.flatten()[: len(ids) - 1].tolist() == list(range(len(ids) - 1))
    assert targets[targets != NO_TARGET].tolist() == list(range(1, len(ids)))


def test_learning_keeps_the_best_and_stops_when_asked() -> None:
    truth = np.array([0, 1, 2] * 20)
    ids = truth[:, None] * 7 + np.arange(4)  # each label has its own words

    def rows(which: np.ndarray) -> tuple[Tensor, ...]:
        lengths = np.full(len(which), 4)
        return tuple(torch.from_numpy(part) for part in (ids[which], lengths, truth[which]))

    def right() -> float:
        with torch.inference_mode():
            words, lengths, labels = rows(np.arange(60))
            return float((network.eval()(words, lengths).argmax(dim=1) == labels).float().mean())

    torch.manual_seed(1)
    network, stop = Averaging(WORDS, WIDTH, LABELS), StopRequest()
    found: list[float] = []

    def evaluate() -> tuple[float, float]:
        found.append(right())
        return 1 - found[-1], 0.0

    steps = train_network(network, np.full(60, 4), rows, evaluate, 1e-2, 60, 1, stop, batch=10)
    assert steps <= 120
    assert right() == max(found) == 1.0
    stop.requested = True
    with pytest.raises(StopTraining):
        train_network(network, np.full(60, 4), rows, evaluate, 1e-2, 60, 1, stop, batch=10)
