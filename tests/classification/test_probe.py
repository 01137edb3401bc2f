"""The linear probe, compared with scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from nanolm.classification.probe import PROBE_FOLDS, fit, fit_probe, folds, rotated


def some_features(
    rows: int, dim: int, labels: int, seed: int = 0
) -> tuple[torch.Tensor, np.ndarray]:
    """Features like those of a language model: unequal scales, with a mean far from zero."""
    random = np.random.default_rng(seed)
    truth = random.integers(labels, size=rows)
    x = random.normal(size=(rows, dim)) + 1.2 * np.eye(labels, dim)[truth]
    return torch.from_numpy((x + 2) * np.linspace(0.1, 3, dim)), truth


@pytest.mark.parametrize(("rows", "dim"), [(40, 60), (120, 12)])
@pytest.mark.parametrize("labels", [2, 4])
@pytest.mark.parametrize("strength", [0.3, 30.0])
def test_a_fit_is_that_of_scikit_learn(rows: int, dim: int, labels: int, strength: float) -> None:
    x, truth = some_features(rows, dim, labels)
    z, basis = rotated(x)
    start = torch.zeros(1, labels, z.shape[1], dtype=torch.float64)
    every_row = torch.ones(rows, 1, dtype=torch.float64)
    weights = torch.ones(labels, dtype=torch.float64)
    ours = fit(z, torch.from_numpy(truth), weights, strength, every_row, start)[0] @ basis.T
    # For two labels, scikit-learn fits only the difference, with half the penalty.
    penalty = strength / 2 if labels == 2 else strength
    theirs = LogisticRegression(C=1 / penalty, fit_intercept=False, tol=1e-9, max_iter=10_000)
    theirs.fit(x.numpy(), truth)
    expected = theirs.decision_function(x.numpy())
    logits = (x @ ours.T).numpy()
    if labels == 2:
        logits = logits[:, 1] - logits[:, 0]
    else:
        logits = logits - logits.mean(axis=1, keepdims=True)
        expected = expected - expected.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(logits, expected, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("labels", [2, 3])
def test_it_does_as_well_as_a_probe_with_an_intercept(labels: int) -> None:
    x, truth = some_features(1200, 40, labels)
    train, test = slice(0, 200), slice(200, None)
    probe = fit_probe(x[train].float(), truth[train], labels)
    theirs = make_pipeline(StandardScaler(), LogisticRegression(C=0.1))
    expected = theirs.fit(x[train].numpy(), truth[train]).score(x[test].numpy(), truth[test])
    right = ((x[test].float() @ probe.weight.T).argmax(dim=1).numpy() == truth[test]).mean()
    assert expected > 1.2 / labels
    assert right > expected - 0.03
    assert probe.accuracy == pytest.approx(right, abs=0.12)


def test_folds_keep_groups_whole_and_labels_spread() -> None:
    random = np.random.default_rng(0)
    groups = np.repeat(np.arange(50), random.integers(1, 4, size=50))
    truth = (groups % 3 == 0).astype(np.int64)
    fold = folds(truth, groups, random)
    assert all(len(set(fold[groups == group])) == 1 for group in range(50))
    counts = [len(set(groups[(fold == number) & (truth == 1)])) for number in range(PROBE_FOLDS)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("rows", [2, 5, 12])
def test_a_handful_of_rows_is_enough_to_start_from(rows: int) -> None:
    x, _ = some_features(rows, 30, 2)
    truth = np.arange(rows) % 2
    probe = fit_probe(x.float(), truth, 2)
    assert probe.weight.isfinite().all()
    assert ((x.float() @ probe.weight.T).argmax(dim=1).numpy() == truth).mean() > 0.5


def test_features_that_are_all_the_same_say_nothing() -> None:
    probe = fit_probe(torch.ones(20, 4), np.arange(20) % 2, 2)
    assert probe.weight.isfinite().all()


def test_noise_gets_no_confident_head() -> None:
    x, truth = torch.randn(200, 300, generator=torch.Generator().manual_seed(1)), np.arange(200) % 2
    probe = fit_probe(x, truth, 2)
    assert probe.loss == pytest.approx(np.log(2), abs=0.05)
    assert (torch.randn(50, 300) @ probe.weight.T).abs().max() < 1.5
