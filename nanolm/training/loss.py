"""The loss of a language model, without ever holding the scores of all tokens in float32.

    >>> next_token_loss(model.head, model.body(x), y)

With a vocabulary of 50,000, the scores of a batch are larger than everything else in the model
together. So a large batch goes through the last layer in pieces, and of each piece only the
gradients stay: with cross-entropy they are known as soon as the scores are.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanolm.model.size import SCORES

Turn = Callable[[Tensor, Tensor, float, int], Tensor]

LARGE = 1 << 25  # scores; fewer of them are kept, which is simpler and as fast


def next_token_loss(head: nn.Linear, x: Tensor, targets: Tensor) -> Tensor:
    """The mean over all positions: `x` is (batch, time, dim), `targets` (batch, time)."""
    x, targets = x.flatten(0, 1), targets.flatten()
    kernel = cross_entropy_kernel(x)
    if not torch.is_grad_enabled() or (len(x) * head.out_features < LARGE and not kernel):
        return F.cross_entropy(head(x), targets)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    turn = kernel or turn_into_gradient
    loss: Tensor = InPieces.apply(x, head.weight, targets, turn)  # type: ignore[no-untyped-call]
    return loss


class InPieces(torch.autograd.Function):
    """Cross-entropy of x @ weight.T: the gradients are computed on the way forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, turn: Turn) -> Tensor:
        count, columns = len(x), len(weight)
        low = weight.to(x.dtype)
        if x.is_cuda and columns % 8:  # a GPU is slow with others
            low = F.pad(low, (0, 0, 0, -columns % 8))
        size = -(-count // -(-count * columns // SCORES))
        loss = torch.zeros((), device=x.device)
        to_x = torch.empty_like(x)
        to_weight: Tensor | None = None
        for first in range(0, count, size):
            part = slice(first, first + size)
            logits = x[part] @ low.T  # (positions, vocabulary)
            loss += turn(logits, targets[part], 1.0, columns).sum()
            torch.mm(logits, low, out=to_x[part])
            to_weight = plus_product(to_weight, logits.T, x[part], weight.dtype)
            del logits  # or there would be two of them
        assert to_weight is not None
        ctx.save_for_backward(to_x, to_weight[:columns])
        ctx.count = count
        return loss / count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        to_x, to_weight = ctx.saved_tensors
        share = gradient / ctx.count  # only now: in float16 it would have vanished before
        torch._foreach_mul_([to_x, to_weight], share)
        return to_x, to_weight, None, None


def cross_entropy_kernel(x: Tensor) -> Turn | None:
    """`turn_into_gradient` in one kernel, where there is one."""
    if x.is_cuda:
        with contextlib.suppress(ImportError):  # no Triton
            from nanolm.model import fused

            return fused.cross_entropy_ if fused.available() else None
    return None


def turn_into_gradient(logits: Tensor, targets: Tensor, scale: float, columns: int) -> Tensor:
    """The loss of each row; `logits` become the gradient of their sum, times `scale`."""
    rows = max(1, (1 << 24) // columns)
    losses = []
    for some, right in zip(logits.split(rows), targets[:, None].split(rows), strict=True):
        logs = some[:, :columns].float().log_softmax(dim=1)  # (rows, vocabulary)
        losses.append(-logs.gather(1, right)[:, 0])
        minus = torch.full_like(right, -1, dtype=logs.dtype)
        some[:, :columns] = logs.exp_().scatter_add_(1, right, minus).mul_(scale)
    return torch.cat(losses)


def plus_product(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """total + left @ right, summed in `dtype`."""
    if left.is_cuda and left.dtype != dtype:
        if total is None:
            return torch.mm(left, right, out_dtype=dtype)
        return torch.addmm(total, left, right, out_dtype=dtype, out=total)
    product = (left @ right).to(dtype)
    return product if total is None else total.add_(product)
