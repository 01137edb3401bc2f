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
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MOMENTUM = 0.9
STEPS = 4  # of the iteration: a fifth one was no better
A, B, C = 3.4445, -4.7750, 2.0315  # of its polynomial, steepest at zero (Keller Jordan)
TINY = 1e-7
LIKE_ADAM = 0.2  # the usual size of an entry of Adam's update, so that one rate serves both


@dataclass(frozen=True)
class Place:
    """Where a matrix lies: in which parameter, and which of its rows."""

    parameter: int
    rows: slice
    tall: bool  # more rows than columns; its transpose needs less

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.turned(tensors[self.parameter][self.rows])

    def turned(self, matrix: Tensor) -> Tensor:
        return matrix.mT if self.tall else matrix


class Pieces:
    """The matrices of some parameters, those of the same shape together."""

    def __init__(self, parts: Mapping[nn.Parameter, Sequence[int]]) -> None:
        """`parts` are the rows of the matrices in each parameter, from top to bottom."""
        self.shapes: dict[tuple[int, int], list[Place]] = {}
        for number, (parameter, counts) in enumerate(parts.items()):
            first, columns = 0, parameter.shape[1]
            for rows in counts:
                shape = (min(rows, columns), max(rows, columns))
                place = Place(number, slice(first, first + rows), rows > columns)
                self.shapes.setdefault(shape, []).append(place)
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
            updates = orthogonal(torch.stack([place.of(directions) for place in places]))
            updates = updates.to(parameters[0].dtype) * (-LIKE_ADAM * math.sqrt(longer) * lr)
            targets = [place.of(parameters) for place in places]
            torch._foreach_add_(targets, updates.unbind())


def orthogonal(matrices: Tensor, steps: int = STEPS) -> Tensor:
    """(count, rows, columns), wide rather than tall: their singular values brought to about 1."""
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices
    sizes = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    x = x / (sizes + TINY).to(x.dtype)
    for _ in range(steps):
        gram = x @ x.mT  # (count, rows, rows)
        polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.baddbmm(x, polynomial, x, beta=A)
    return x
