"""The loss of a language model, without storing the logits of all tokens in float32.

    >>> next_token_loss(model.head, model.hidden_states(x), y)

With a vocabulary of 50,000, the logits of a batch are larger than the rest of the model. So the
last layer works in chunks and keeps only the gradients, which follow directly from the logits.
`distillation_loss` learns a distribution of tokens at each position instead of a single token.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanolm.model.fast.training import training_kernels
from nanolm.model.size import SCORES

MIN_OWN_LOGITS = 1_024  # vocabulary size; below it, float8 products do not pay off
MAX_KEPT_LOGITS = 1 << 19  # up to here, plain cross-entropy is simpler and as fast
CPU_CHUNK_LOGITS = 1 << 21  # per chunk on a CPU, to fit into its cache
# Padding between rows of logits on a CPU, in elements. Rows that are a power of two apart map to
# the same cache sets, and their product with x takes 1.5 times as long.
APART = 16
FLOAT32_LOGITS = 1 << 24  # copied to float32 at a time
LEAST_REST = 1e-30  # probability of all tokens that are not among the most likely


def next_token_loss(
    head: nn.Linear, x: Tensor, targets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Mean cross-entropy over all positions, or its sum with `weights`: `x` is (batch, time, dim),
    `targets` and `weights` are (batch, time)."""
    x, targets = x.flatten(0, 1), targets.flatten()
    weights = None if weights is None else weights.flatten()
    autocast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
    kernels = training_kernels(x.device, dtype) if torch.is_grad_enabled() else None
    few = len(x) * head.out_features < MAX_KEPT_LOGITS
    if not torch.is_grad_enabled() or (few and not kernels):
        if weights is None:
            return F.cross_entropy(head(x), targets)
        return F.cross_entropy(head(x), targets, reduction="none") @ weights
    x = x.to(dtype)
    turn = kernels.cross_entropy_ if kernels else cross_entropy_
    scores: Any = partial(LogitProducts, turn=turn)
    if head.out_features >= MIN_OWN_LOGITS:
        scores = getattr(head, "scores", scores)
    return ChunkedCrossEntropy.apply(x, head.weight, targets, scores, weights)  # type: ignore[no-any-return, no-untyped-call]


class SoftTargets(NamedTuple):
    """Distributions to learn, one for each token of a text: all probabilities, or those of the most
    likely tokens, `ids`, and in the last column the sum of the others."""

    probabilities: Tensor  # (tokens, vocabulary), or (tokens, k + 1)
    ids: Tensor | None = None  # (tokens, k)


def distillation_loss(head: nn.Linear, x: Tensor, targets: SoftTargets, places: Tensor) -> Tensor:
    """Mean cross-entropy of `targets`: `x` is (batch, time, dim), and `places` (batch, time) has
    the rows of `targets` to predict from it."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    scores = partial(LogitProducts, turn=partial(soft_cross_entropy_, targets))
    what = (x.flatten(0, 1), head.weight, places.flatten(), scores, None)
    return ChunkedCrossEntropy.apply(*what)  # type: ignore[no-any-return, no-untyped-call]


def smoothing_loss(head: nn.Linear, x: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """What label smoothing adds to the loss, for all probability spread over the vocabulary: the
    logit of the target minus the mean of all logits."""
    mean = head.weight.mean(dim=0)  # (dim,)
    apart = F.embedding(targets, head.weight) - mean  # (batch, time, dim)
    return ((x * apart).sum(dim=2) * weights).sum()


class LogitProducts:
    """The matrix products of the last layer: logits = x @ weight.T, and back."""

    def __init__(self, x: Tensor, weight: Tensor, turn: Callable[..., Tensor]) -> None:
        self.x, self.weight, self.turn = x, weight.to(x.dtype), turn
        if x.is_cuda and len(weight) % 8:  # a GPU needs multiples of 8 to be fast
            self.weight = F.pad(self.weight, (0, 0, 0, -len(weight) % 8))

    def of(self, part: slice) -> Tensor:
        """The logits of some rows of x: (rows, vocabulary), possibly padded."""
        x, columns = self.x[part], len(self.weight)
        if x.device.type != "cpu":
            return x @ self.weight.T
        logits = x.new_empty(len(x), columns + APART)[:, :columns]
        return torch.mm(x, self.weight.T, out=logits)

    def back(self, scores: Tensor, out: Tensor) -> None:
        """The gradients of the rows, from those of the logits."""
        torch.mm(scores, self.weight, out=out)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of x @ weight.T: the gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, scores: Any, weights: Tensor | None
    ) -> Tensor:
        count, columns = len(x), len(weight)
        products = scores(x, weight)
        most = SCORES if x.is_cuda else CPU_CHUNK_LOGITS
        size = -(-count // -(-count * columns // most))
        losses = []
        to_x = torch.empty_like(x)
        to_weight: Tensor | None = None
        for first in range(0, count, size):
            part = slice(first, first + size)
            logits = products.of(part)  # (positions, vocabulary)
            each, inputs = products.turn(logits, targets[part], columns), x[part]
            products.back(logits, to_x[part])
            if weights is not None:
                each, inputs = each * weights[part], inputs * weights[part, None].to(x.dtype)
                to_x[part] *= weights[part, None]
            losses.append(each.sum())
            if ctx.needs_input_grad[1]:  # not if it is frozen
                to_weight = plus_product(to_weight, logits.T, inputs, weight.dtype)
            del logits  # before the next chunk is allocated
        ctx.save_for_backward(to_x, None if to_weight is None else to_weight[:columns])
        ctx.count = count = count if weights is None else 1
        return (losses[0] if len(losses) == 1 else torch.stack(losses).sum()) / count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        to_x, to_weight = ctx.saved_tensors
        share = gradient / ctx.count  # only now: earlier, it would underflow in float16
        kernels = training_kernels(to_x.device, to_x.dtype) if to_x.is_cuda else None
        to_x = kernels.multiply_(to_x, share) if kernels else to_x.mul_(share)
        return to_x, None if to_weight is None else to_weight.mul_(share), None, None, None


def cross_entropy_(logits: Tensor, targets: Tensor, columns: int) -> Tensor:
    """The loss of each row; overwrites `logits` with the gradient of the sum."""
    rows = max(1, FLOAT32_LOGITS // columns)
    losses = []
    for some, right in zip(logits.split(rows), targets[:, None].split(rows), strict=True):
        logs = some[:, :columns].float().log_softmax(dim=1)  # (rows, vocabulary)
        losses.append(-logs.gather(1, right)[:, 0])
        minus = torch.full_like(right, -1, dtype=logs.dtype)
        some[:, :columns] = logs.exp_().scatter_add_(1, right, minus)
    return torch.cat(losses)


def soft_cross_entropy_(
    targets: SoftTargets, logits: Tensor, places: Tensor, columns: int
) -> Tensor:
    """The same for the rows `places` of `targets`, which need not sum to 1 exactly."""
    rows = max(1, FLOAT32_LOGITS // columns)
    losses = []
    for some, where in zip(logits.split(rows), places.split(rows), strict=True):
        logs = some[:, :columns].float().log_softmax(dim=1)  # (rows, vocabulary)
        wanted = targets.probabilities[where].float()
        wanted /= wanted.sum(dim=1, keepdim=True)
        if targets.ids is None:
            losses.append(-(wanted * logs).sum(dim=1))
            some[:, :columns] = logs.exp_().sub_(wanted)
            continue
        ids = targets.ids[where].long()  # (rows, k)
        top = logs.gather(1, ids)
        others = logs.exp_().scatter_(1, ids, 0.0)  # (rows, vocabulary)
        rest = others.sum(dim=1, keepdim=True).clamp(min=LEAST_REST)
        losses.append(-(wanted * torch.cat([top, rest.log()], dim=1)).sum(dim=1))
        others *= 1 - wanted[:, -1:] / rest
        some[:, :columns] = others.scatter_(1, ids, top.exp_().sub_(wanted[:, :-1]))
    return torch.cat(losses)


def plus_product(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """total + left @ right, summed in `dtype`."""
    if left.is_cuda and left.dtype != dtype:
        if total is None:
            return torch.mm(left, right, out_dtype=dtype)
        return torch.addmm(total, left, right, out_dtype=dtype, out=total)
    product = (left @ right).to(dtype)
    return product if total is None else total.add_(product)
