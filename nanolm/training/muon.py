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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanolm.training.distributed import World

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
        for places, updates in self.updates(directions, lr):
            torch._foreach_add_([place.of(parameters) for place in places], updates.unbind())

    def updates(
        self, directions: Sequence[Tensor], lr: float | Tensor
    ) -> Iterator[tuple[list[Place], Tensor]]:
        """What to add, all of a shape at a time."""
        for (_, longer), places in self.shapes.items():
            found = orthogonal(torch.stack([place.of(directions) for place in places]))
            yield places, found.to(directions[0].dtype) * (-LIKE_ADAM * math.sqrt(longer) * lr)


class SharedPieces:
    """The same where many processes train: each makes the updates of some parameters, for all.

    What is whole in every process goes from who made it to all; of what is sharded, each process
    has some rows, which first have to come together where the update is made.
    """

    def __init__(self, parts: Mapping[nn.Parameter, Sequence[int]], world: World) -> None:
        self.world, self.shapes = world, [tuple(parameter.shape) for parameter in parts]
        self.sharded = any(hasattr(parameter, "to_local") for parameter in parts)
        self.owned: list[list[int]] = [[] for _ in range(world.size)]  # parameters, by who has them
        work = [0.0] * world.size
        costs = [rows * min(rows, columns) * columns for rows, columns in self.shapes]
        for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
            least = work.index(min(work))
            self.owned[least].append(number)
            work[least] += costs[number]
        parameters = list(parts)
        mine = [parameters[number] for number in self.owned[world.rank]]
        self.pieces = Pieces({parameter: parts[parameter] for parameter in mine})

    def rows(self, number: int, rank: int) -> int:
        """How many of a parameter's rows are there."""
        rows = self.shapes[number][0]
        each = -(-rows // self.world.size)
        return max(0, min(each, rows - rank * each)) if self.sharded else rows

    def update(
        self,
        parameters: Sequence[Tensor],
        directions: Sequence[Tensor],
        lr: float | Tensor,
        weight_decay: float,
    ) -> None:
        if weight_decay:
            torch._foreach_mul_(list(parameters), 1 - lr * weight_decay)
        mine = self.owned[self.world.rank]
        wholes = [directions[number] for number in mine]
        if self.sharded:
            wholes = self.gathered(directions)
        updates = [torch.empty_like(whole) for whole in wholes]
        for places, found in self.pieces.updates(wholes, lr):
            for place, update in zip(places, found, strict=True):
                place.of(updates).copy_(update)
        spread = self.scattered if self.sharded else self.shown
        for number, update in spread(updates, directions[0]):
            parameters[number].add_(update)

    def gathered(self, directions: Sequence[Tensor]) -> list[Tensor]:
        """All rows of the parameters that are this one's."""
        me, ranks = self.world.rank, range(self.world.size)
        mine = self.owned[me]
        like = directions[0]
        sent = [flat([directions[number] for number in owned], like) for owned in self.owned]
        columns = [self.shapes[number][1] for number in mine]
        counts = [[self.rows(number, rank) for number in mine] for rank in ranks]
        sizes = [[r * c for r, c in zip(count, columns, strict=True)] for count in counts]
        got = exchanged(sent, [sum(size) for size in sizes])
        parts = [part.split(size) for part, size in zip(got, sizes, strict=True)]
        return [
            torch.cat([part[place] for part in parts]).view(-1, columns[place])
            for place in range(len(mine))
        ]

    def scattered(self, updates: list[Tensor], like: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The rows that are here of every parameter's update."""
        me, ranks = self.world.rank, range(self.world.size)
        mine = self.owned[me]
        shares = [
            update.split([self.rows(number, rank) for rank in ranks])
            for number, update in zip(mine, updates, strict=True)
        ]
        sent = [flat([share[rank] for share in shares], like) for rank in ranks]
        shapes = [[(self.rows(n, me), self.shapes[n][1]) for n in owned] for owned in self.owned]
        got = exchanged(sent, [sum(r * c for r, c in shape) for shape in shapes])
        for owned, shape, part in zip(self.owned, shapes, got, strict=True):
            pieces = part.split([r * c for r, c in shape])
            for number, size, piece in zip(owned, shape, pieces, strict=True):
                yield number, piece.view(size)

    def shown(self, updates: list[Tensor], like: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every update, from who made it."""
        sizes = [[math.prod(self.shapes[n]) for n in owned] for owned in self.owned]
        most = max(sum(size) for size in sizes)
        mine = like.new_zeros(most)
        made = flat(updates, like)
        mine[: len(made)] = made
        all_ = like.new_empty(self.world.size * most)
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(all_, mine)
        for owned, size, part in zip(self.owned, sizes, all_.view(-1, most), strict=True):
            for number, piece in zip(owned, part[: sum(size)].split(size), strict=True):
                yield number, piece.view(self.shapes[number])


def flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([like.new_empty(0), *(tensor.flatten() for tensor in tensors)])


def exchanged(sent: list[Tensor], sizes: list[int]) -> tuple[Tensor, ...]:
    """What each process has sent to this one: so many numbers."""
    got = sent[0].new_empty(sum(sizes))
    dist.all_to_all_single(got, torch.cat(sent), sizes, [len(part) for part in sent])
    parts: tuple[Tensor, ...] = got.split(sizes)
    return parts


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
