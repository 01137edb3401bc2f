"""Muon: the momentum of a matrix with all its singular values made equal, as its update.

    >>> orthogonal(torch.randn(24, 384, 384))  # 24 matrices at a time

What a gradient says about a matrix is mostly said along a few directions, and what it has to say
along the others drowns. An update that is as large along all of them learns more from each step.
It is found by a few products (Newton and Schulz's iteration), for all matrices of a shape together:
one by one, launching them would take longer than they do.

A parameter can hold several matrices one below the other (queries, keys and values; gate and up);
each is a matrix of its own here.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
STEPS = 5  # of the iteration; afterwards singular values lie between 0.7 and 1.2
A, B, C = 3.4445, -4.7750, 2.0315  # of its polynomial, steepest at zero (Keller Jordan)
TINY = 1e-7
LIKE_ADAM = 0.2  # the usual size of an entry of Adam's update, so that one rate serves both


class Pieces:
    """Where the matrices of some parameters lie, those of the same shape together."""

    def __init__(
        self, parameters: Mapping[nn.Parameter, Tensor], parts: Mapping[nn.Parameter, Sequence[int]]
    ) -> None:
        """`parameters`' own tensors, and the rows of each matrix in them."""
        self.order = list(parameters)
        self.shapes: dict[tuple[int, int], list[tuple[int, slice, bool]]] = {}
        for number, parameter in enumerate(self.order):
            first = 0
            for rows in parts[parameter]:
                tall = rows > parameter.shape[1]  # wide ones need less
                shape = (rows, parameter.shape[1])
                place = (number, slice(first, first + rows), tall)
                self.shapes.setdefault((min(shape), max(shape)), []).append(place)
                first += rows

    def update(
        self,
        parameters: Sequence[Tensor],
        directions: Sequence[Tensor],
        lr: float | Tensor,
        weight_decay: float,
    ) -> None:
        """Move the parameters against their directions, made orthogonal."""
        if weight_decay:
            torch._foreach_mul_(list(parameters), 1 - lr * weight_decay)
        for (_, longer), places in self.shapes.items():
            found = [directions[number][rows] for number, rows, _ in places]
            turned = [piece.mT if tall else piece for piece, (*_, tall) in zip(found, places)]
            updates = orthogonal(torch.stack(turned))
            step = (-LIKE_ADAM * math.sqrt(longer)) * lr
            updates = updates.to(parameters[0].dtype) * step
            targets = [parameters[number][rows] for number, rows, _ in places]
            back = [u.mT if tall else u for u, (*_, tall) in zip(updates.unbind(), places)]
            torch._foreach_add_(targets, back)


def orthogonal(matrices: Tensor) -> Tensor:
    """(count, rows, columns), wide rather than tall: their singular values brought to about 1."""
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + TINY).to(x.dtype)
    for _ in range(STEPS):
        gram = x @ x.mT  # (count, rows, rows)
        polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.baddbmm(x, polynomial, x, beta=A)
    return x
