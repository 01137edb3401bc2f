"""Muon: updates each matrix by its momentum, with all singular values made equal.

    >>> orthogonalize(torch.randn(24, 384, 384))  # 24 matrices at a time

A gradient is large along a few directions that drown out the others; an update that is equally
large along all of them learns more. The Newton-Schulz iteration computes it for all matrices of a
shape at once, because launch overhead would otherwise dominate. A parameter can hold several
stacked matrices (queries, keys and values; gate and up), and each gets its own update.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nanolm.training.optim import BaseOptimizer, split_evenly

MOMENTUM = 0.9
ITERATIONS = 4  # of Newton-Schulz; a fifth was no better
A, B, C = 3.4445, -4.7750, 2.0315  # polynomial coefficients, steepest at zero (Keller Jordan)
EPSILON = 1e-7
ADAM_RMS = 0.2  # the typical RMS of Adam's updates, so that both can share one learning rate
Tensors = Sequence[Tensor]


class Muon(BaseOptimizer):
    """Orthogonalized momentum. The "rows" of a group are those of the matrices in each parameter.
    Overwrites the gradients, which are no longer needed."""

    moments = ("momentum",)

    def init_state(self) -> None:
        super().init_state()
        several = dist.is_initialized() and dist.get_world_size() > 1
        kind = DistributedMatrixBatch if several else MatrixBatch
        self.batches = [kind(group["params"], group["rows"]) for group in self.param_groups]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group, batch in zip(self.param_groups, self.batches, strict=True):
            parameters, gradients, momenta, lr = self.momentum_inputs(group)
            if not gradients:
                continue
            torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
            torch._foreach_lerp_(gradients, momenta, MOMENTUM)  # Nesterov momentum
            if group["weight_decay"]:
                torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
            batch.add_updates(parameters, gradients, lr)


@dataclass(frozen=True)
class MatrixView:
    parameter: int
    rows: slice
    tall: bool  # more rows than columns; the transpose is cheaper

    def of(self, tensors: Tensors) -> Tensor:
        matrix = tensors[self.parameter][self.rows]
        return matrix.mT if self.tall else matrix


class MatrixBatch:
    """The matrices of some parameters, grouped by shape."""

    def __init__(self, parameters: Tensors, rows: Sequence[Sequence[int]]) -> None:
        self.shapes: dict[tuple[int, int], list[MatrixView]] = {}  # tall ones first
        for number, (parameter, counts) in enumerate(zip(parameters, rows, strict=True)):
            first, columns = 0, parameter.shape[1]
            for count in counts:
                shape = (min(count, columns), max(count, columns))
                view = MatrixView(number, slice(first, first + count), count > columns)
                self.shapes.setdefault(shape, []).append(view)
                first += count
        for views in self.shapes.values():
            views.sort(key=lambda view: not view.tall)

    def add_updates(self, parameters: Tensors, directions: Tensors, lr: float | Tensor) -> None:
        """Move the parameters against the orthogonalized directions."""
        for views, updates in self.updates(directions, lr):
            torch._foreach_add_([view.of(parameters) for view in views], updates.unbind())

    def updates(self, directions: Tensors, lr: Any) -> Iterator[tuple[list[MatrixView], Tensor]]:
        """The updates to add, one shape at a time."""
        for (_, longer), views in self.shapes.items():
            update = orthogonalize(torch.stack([view.of(directions) for view in views]))
            if tall := sum(view.tall for view in views):
                equalize_(update[:tall])
            yield views, update.to(directions[0].dtype) * (-ADAM_RMS * math.sqrt(longer) * lr)


class DistributedMatrixBatch:
    """The same for several processes: each one computes the updates of some parameters for all. The
    rows of sharded parameters are first gathered by the process that computes their update."""

    def __init__(self, parameters: Tensors, rows: Sequence[Sequence[int]]) -> None:
        self.rank, self.ranks = dist.get_rank(), range(dist.get_world_size())
        self.shapes = [tuple(parameter.shape) for parameter in parameters]
        self.sharded = any(hasattr(parameter, "to_local") for parameter in parameters)
        costs = [height * min(height, width) * width for height, width in self.shapes]
        self.owned = split_evenly(dict(enumerate(costs)), len(self.ranks))  # by rank
        self.mine = self.owned[self.rank]
        self.batch = MatrixBatch([parameters[n] for n in self.mine], [rows[n] for n in self.mine])

    def rows(self, number: int, rank: int) -> int:
        """The number of a parameter's rows that a process holds."""
        rows = self.shapes[number][0]
        each = -(-rows // len(self.ranks))
        return max(0, min(each, rows - rank * each)) if self.sharded else rows

    def add_updates(self, parameters: Tensors, directions: Tensors, lr: float | Tensor) -> None:
        full = self.gather_rows(directions) if self.sharded else [directions[n] for n in self.mine]
        updates = [torch.empty_like(each) for each in full]
        for views, some in self.batch.updates(full, lr):
            for view, update in zip(views, some, strict=True):
                view.of(updates).copy_(update)
        for number, update in self.spread(updates, directions[0]):
            parameters[number].add_(update)

    def gather_rows(self, directions: Tensors) -> list[Tensor]:
        """All rows of the parameters that this process updates."""
        like = directions[0]
        sent = [flatten([directions[number] for number in owned], like) for owned in self.owned]
        columns = [self.shapes[number][1] for number in self.mine]
        counts = [[self.rows(number, rank) for number in self.mine] for rank in self.ranks]
        sizes = [[r * c for r, c in zip(count, columns, strict=True)] for count in counts]
        got = all_to_all(sent, [sum(size) for size in sizes])
        parts = [part.split(size) for part, size in zip(got, sizes, strict=True)]
        full = [torch.cat(of_one) for of_one in zip(*parts, strict=True)]
        return [each.view(-1, width) for each, width in zip(full, columns, strict=True)]

    def spread(self, updates: list[Tensor], like: Tensor) -> Iterator[tuple[int, Tensor]]:
        """This process's rows of every update, from the process that computed it."""
        here = [(self.rows(n, self.rank), shape[1]) for n, shape in enumerate(self.shapes)]
        shapes = [[here[number] for number in owned] for owned in self.owned]
        sizes = [[math.prod(shape) for shape in some] for some in shapes]
        parts: Any
        if self.sharded:
            shares = [
                update.split([self.rows(number, rank) for rank in self.ranks])
                for number, update in zip(self.mine, updates, strict=True)
            ]
            sent = [flatten([share[rank] for share in shares], like) for rank in self.ranks]
            parts = all_to_all(sent, [sum(size) for size in sizes])
        else:
            most, made = max(map(sum, sizes)), flatten(updates, like)
            parts = like.new_empty(len(self.ranks), most)
            gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(parts.view(-1), F.pad(made, (0, most - len(made))))
        for owned, some, size, part in zip(self.owned, shapes, sizes, parts, strict=True):
            pieces = part[: sum(size)].split(size)
            for number, shape, piece in zip(owned, some, pieces, strict=True):
                yield number, piece.view(shape)


def flatten(tensors: Tensors, like: Tensor) -> Tensor:
    return torch.cat([like.new_empty(0), *(tensor.flatten() for tensor in tensors)])


def all_to_all(sent: list[Tensor], sizes: list[int]) -> tuple[Tensor, ...]:
    """The tensors that each process has sent to this one, of the given sizes."""
    got = sent[0].new_empty(sum(sizes))
    dist.all_to_all_single(got, torch.cat(sent), sizes, [len(part) for part in sent])
    return tuple(got.split(sizes))


def orthogonalize(matrices: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """Bring all singular values of (count, rows, columns) to about 1; with rows <= columns."""
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices
    sizes = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    x = x / (sizes + EPSILON).to(x.dtype)
    for _ in range(iterations):
        gram = x @ x.mT  # (count, rows, rows)
        polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.baddbmm(x, polynomial, x, beta=A)
    return x


def equalize_(matrices: Tensor) -> None:
    """Give all columns of (count, rows, columns) the same norm, keeping that of each matrix. The
    columns of a transposed tall matrix are its rows: the weights of one hidden unit each."""
    norms = torch.linalg.vector_norm(matrices, dim=1, keepdim=True)  # (count, 1, columns)
    mean = norms.square().mean(dim=2, keepdim=True).sqrt()
    matrices.mul_(mean / (norms + EPSILON))
