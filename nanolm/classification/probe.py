"""A linear probe: logistic regression on the features of a frozen model.

    >>> probe = fit_probe(features, truth, labels=2)   # features: (texts, dim)
    >>> classifier.score.weight.copy_(probe.weight)    # (labels, dim)

There is no intercept, as in the `score` layer of `transformers`. Features are scaled but not
centered, and their mean, which is far from zero, takes its place. Cross-validation chooses the
strength of the L2 penalty and the scale of the logits.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from nanolm.classification.metrics import fit_temperature

PROBE_FOLDS = 5  # of cross-validation
REPEATS_OF_FEW = 4  # with other folds, if there are few rows: one repeat is too noisy
FEW_ROWS = 1000
MOST_ROWS = 5000  # for cross-validation; more rows take longer and change little
STRENGTHS = tuple(10.0 ** (exponent / 2) for exponent in range(8, -3, -1))  # strongest first
ITERATIONS, HISTORY, HALVINGS = 200, 10, 30  # of L-BFGS, at most
TOLERANCE = 1e-6  # of the gradient of the mean loss

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LinearProbe:
    """A fitted probe, and its accuracy and loss on held-out folds."""

    weight: Tensor  # (labels, dim), float32
    strength: float  # of the penalty: strength / 2 * |weight|^2, added to the summed loss
    accuracy: float
    loss: float


def fit_probe(
    features: Tensor,
    truth: Ints,
    labels: int,
    groups: Ints | None = None,
    class_weights: Tensor | None = None,
    seed: int = 0,
) -> LinearProbe:
    """Fit on all rows. Rows of one group (the windows of one text) are in the same fold. With a few
    hundred rows, cross-validation cannot separate neighboring penalties: the standard error of the
    accuracy is several percent. So the median of all penalties within one standard error of the
    best is used. Accuracy over ten random draws of SST-2, compared with using the best penalty:
    SmolLM2-135M, 240 rows, dev 72.8 % (best: 72.1), held-out rows 68.0 % (67.9); stories260K, 320
    rows, dev 52.8 % (51.4), held-out rows 52.7 % (53.7)."""
    x, y = features.detach().to("cpu", torch.float64), torch.from_numpy(truth)
    weights = torch.ones(labels) if class_weights is None else class_weights.detach()
    weights = weights.to("cpu", torch.float64)
    scale = x.std(dim=0, correction=0)
    scale = scale.clamp(min=1e-3 * float(scale.mean()) + 1e-12)
    x, basis = rotated(x / scale)
    groups = np.arange(len(truth)) if groups is None else groups
    rows, logits = cross_validate(x, y, weights, truth, groups, np.random.default_rng(seed))
    chosen, accuracy, loss, temperature = len(STRENGTHS) // 2, 0.0, float(np.log(labels)), 1.0
    if len(rows):
        right = (logits.argmax(axis=2) == truth[rows]).mean(axis=1)  # of each strength
        error = np.sqrt(right.max() * (1 - right.max()) / len(np.unique(groups[rows])))
        chosen = int(np.median(np.flatnonzero(right >= right.max() - error)))
        accuracy = float(right[chosen])
        # A weak penalty makes logits too large; the held-out rows show by how much.
        temperature = fit_temperature(logits[chosen].astype(np.float32), truth[rows])
        calibrated = torch.from_numpy(logits[chosen] / temperature)
        loss = float(F.cross_entropy(calibrated, torch.from_numpy(truth[rows])))
    start, learned = torch.zeros(1, labels, x.shape[1]).double(), torch.ones(len(x), 1).double()
    (weight,) = fit(x, y, weights, STRENGTHS[chosen], learned, start)
    weight = weight @ basis.T / scale / temperature
    return LinearProbe(weight.float(), STRENGTHS[chosen], accuracy, loss)


def rotated(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` along its principal axes, and these axes as columns. Rotations do not change the penalty,
    and if there are fewer rows than columns, only as many columns as rows remain."""
    wide = len(x) < x.shape[1]
    values, basis = torch.linalg.eigh(x @ x.T if wide else x.T @ x)
    if wide:
        kept = values > 1e-10 * values[-1]
        basis = x.T @ (basis[:, kept] / values[kept].sqrt())  # (dim, rank)
    return x @ basis, basis


def cross_validate(
    x: Tensor, y: Tensor, weights: Tensor, truth: Ints, groups: Ints, random: np.random.Generator
) -> tuple[Ints, Floats]:
    """Rows, and their logits from probes fitted without them: (strengths, rows, labels)."""
    rows = np.arange(len(truth))
    if len(rows) > MOST_ROWS:
        kept = random.permutation(np.unique(groups))
        rows = np.flatnonzero(np.isin(groups, kept[: MOST_ROWS * len(kept) // len(rows)]))
    repeats = REPEATS_OF_FEW if len(rows) < FEW_ROWS else 1
    fold = np.stack([folds(truth[rows], groups[rows], random) for _ in range(repeats)])
    if len(np.unique(groups[rows])) < 2 * PROBE_FOLDS:
        return rows[:0], np.zeros((len(STRENGTHS), 0, len(weights)))
    # All folds of all repeats are fitted together: each problem has a column of training rows.
    x, y, problems = x[rows], y[rows], repeats * PROBE_FOLDS
    left_out = torch.from_numpy(fold[:, None] == np.arange(PROBE_FOLDS)[:, None]).flatten(0, 1)
    learned = (~left_out).double().T  # (rows, problems)
    weight = torch.zeros(problems, len(weights), x.shape[1], dtype=torch.float64)
    held_out = np.empty((len(STRENGTHS), repeats * len(rows), len(weights)))
    where = torch.from_numpy(fold + PROBE_FOLDS * np.arange(repeats)[:, None])  # (repeats, rows)
    for place, strength in enumerate(STRENGTHS):
        weight = fit(x, y, weights, strength, learned, weight)
        logits = (x @ weight.flatten(0, 1).T).view(len(x), problems, -1)
        held_out[place] = logits[torch.arange(len(x)), where].flatten(0, 1).numpy()
    return np.tile(rows, repeats), held_out


def folds(truth: Ints, groups: Ints, random: np.random.Generator) -> Ints:
    """The fold of each row, stratified by label; groups are not split."""
    names, first, place = np.unique(groups, return_index=True, return_inverse=True)
    order = random.permutation(len(names))
    order = order[np.argsort(truth[first[order]], kind="stable")]  # label by label
    fold = np.empty(len(names), dtype=np.int64)
    fold[order] = np.arange(len(names)) % PROBE_FOLDS
    return fold[place]


def fit(
    x: Tensor, y: Tensor, weights: Tensor, strength: float, learned: Tensor, start: Tensor
) -> Tensor:
    """For each column of `learned`, (rows, problems), the weights that minimize the summed
    cross-entropy of its rows plus strength / 2 * |weight|^2: (problems, labels, columns of x)."""
    problems, labels = start.shape[:2]
    # Along principal axes, this makes the curvature similar in all directions.
    stretch = (x.square().sum(dim=0) / 4 + strength).sqrt()
    z, penalty = x / stretch, strength / stretch.square()
    shares = weights[y][:, None] * learned  # (rows, problems)
    truth = F.one_hot(y, labels).double()[:, None]  # (rows, 1, labels)

    def evaluate(weight: Tensor) -> tuple[Tensor, Tensor]:
        """The objective of each problem, (problems,), and its gradient, shaped like `weight`."""
        logits = (z @ weight.flatten(0, 1).T).view(len(z), problems, labels)
        log_p = logits.log_softmax(dim=2)
        pull, value = penalty * weight, -((log_p * truth).sum(dim=2) * shares).sum(dim=0)
        slope = (log_p.exp() - truth) * shares[..., None]  # (rows, problems, labels)
        gradient = (slope.flatten(1).T @ z).view_as(weight) + pull
        return value + (pull * weight).sum(dim=(1, 2)) / 2, gradient

    return lbfgs(evaluate, start * stretch, TOLERANCE * len(x)) / stretch


def lbfgs(
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor, tolerance: float
) -> Tensor:
    """Minimize convex functions of x, one for each x[i], until no gradient exceeds `tolerance`.
    torch.optim.LBFGS handles only one function at a time, and takes seconds to import."""
    value, gradient = evaluate(x)
    history: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=HISTORY)

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(dim=(1, 2), keepdim=True)  # one number for each function

    for _ in range(ITERATIONS):
        if float(gradient.abs().max()) <= tolerance:
            break
        direction, factors = -gradient, []
        for step, change, inverse in reversed(history):
            factors.append(inverse * dot(step, direction))
            direction = direction - factors[-1] * change
        if history:
            step, change, _ = history[-1]
            direction = direction * dot(step, change) / dot(change, change).clamp(min=1e-300)
        for step, change, inverse in history:
            direction = direction + (factors.pop() - inverse * dot(change, direction)) * step
        descent = dot(gradient, direction)
        size = torch.ones_like(descent)
        for _ in range(HALVINGS):
            new_value, new_gradient = evaluate(x + size * direction)
            enough = value + 1e-4 * (size * descent).flatten()
            worse = new_value > enough + 1e-12 * value.abs()
            if not worse.any():
                break
            size = torch.where(worse[:, None, None], size / 2, size)
        step, change = size * direction, new_gradient - gradient
        product = dot(step, change)
        inverse = torch.where(product > 1e-300, 1 / product.clamp(min=1e-300), 0.0)
        history.append((step, change, inverse))
        x, value, gradient = x + step, new_value, new_gradient
    return x
