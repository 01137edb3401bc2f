"""Muon: updates each matrix by its momentum, with all singular values made about equal.

    >>> orthogonalize(torch.randn(24, 384, 384))  # 24 matrices at a time

A gradient is large along a few directions that drown out the others; an update that is equally
large along all of them learns more. Odd polynomials of a matrix, applied to all matrices of a shape
at once, bring its singular values near 1. A parameter can hold several stacked matrices (queries,
keys and values; gate and up), and each gets its own update.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nanolm.training.distributed import local_tensor
from nanolm.training.optim import BaseOptimizer, split_evenly

MOMENTUM = 0.9
# Coefficients of x, x^3 and x^5, best for singular values from 0.01 to 1: each polynomial brings
# the results of the one before as close to 1 as possible (Polar Express).
POLYNOMIALS = ((8.0934, -23.6205, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526))
LARGEST = 1.02  # times the bound on the eigenvalues, because bfloat16 rounds
TINY, SMALLEST = 1e-14, 1e-6  # so that rounding noise around zero is not enlarged
EPSILON = 1e-7
ADAM_RMS = 0.2  # the typical RMS of Adam's updates, so that both can share one learning rate
Tensors = Sequence[Tensor]


class Muon(BaseOptimizer):
    """Orthogonalized momentum. The "rows" of a group are those of the matrices in each parameter.
    May overwrite the gradients, which are no longer needed."""

    moments = ("momentum",)

    def init_state(self) -> None:
        super().init_state()
        several = dist.is_initialized() and dist.get_world_size() > 1
        kind = DistributedMatrixBatch if several else MatrixBatch
        self.batches = [kind(group["params"], group["rows"]) for group in self.param_groups]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group, batch in zip(self.param_groups, self.batches, strict=True):
            lr = group["lr"]
            if self.found_inf is not None and isinstance(lr, Tensor):
                lr = lr * (1 - self.found_inf)
            elif self.found_inf is not None and self.found_inf.item():
                continue
            if all(p.grad is None for p in group["params"]):
                continue
            parameters = [local_tensor(p) for p in group["params"]]
            directions = self.directions(group["params"])
            batch.add_updates(parameters, directions, lr, 1 - lr * group["weight_decay"])

    def directions(self, parameters: Tensors) -> Tensors:
        """Update the momenta, and return Nesterov momenta. On a GPU, if `found_inf`, the momenta
        stay as they are and the directions are finite, so that nothing waits for the GPU."""
        given = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        gradients = [local_tensor(gradient) for gradient in given]
        momenta = [local_tensor(self.state[p]["momentum"]) for p in parameters]
        if kernels := kernels_for(momenta[0]):
            factors = self.grad_scale, self.found_inf
            pairs = zip(gradients, momenta, strict=True)
            return [kernels.nesterov(*pair, *factors, MOMENTUM) for pair in pairs]
        if self.grad_scale is not None:
            torch._foreach_div_(gradients, self.grad_scale)
        if self.found_inf is not None and momenta[0].is_cuda:
            for momentum, gradient in zip(momenta, gradients, strict=True):
                gradient.copy_(torch.where(self.found_inf > 0, momentum, gradient))
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        torch._foreach_lerp_(gradients, momenta, MOMENTUM)
        return gradients


def kernels_for(like: Tensor) -> Any:
    """The module of kernels for a GPU, or None."""
    return gpu_kernels() if like.is_cuda else None


@cache
def gpu_kernels() -> Any:
    try:
        kernels = import_module("nanolm.training.muon_kernels")
    except ImportError:  # no Triton
        return None
    return kernels if kernels.available() else None


@dataclass(frozen=True)
class MatrixView:
    parameter: int
    rows: slice

    def of(self, tensors: Tensors) -> Tensor:
        return tensors[self.parameter][self.rows]


class MatrixBatch:
    """The matrices of some parameters, grouped by shape."""

    def __init__(self, parameters: Tensors, rows: Sequence[Sequence[int]]) -> None:
        self.shapes: dict[tuple[int, int], list[MatrixView]] = {}
        for number, (parameter, counts) in enumerate(zip(parameters, rows, strict=True)):
            first, columns = 0, parameter.shape[1]
            for count in counts:
                view = MatrixView(number, slice(first, first + count))
                self.shapes.setdefault((count, columns), []).append(view)
                first += count

    def add_updates(self, parameters: Tensors, directions: Tensors, lr: Any, kept: Any) -> None:
        """Multiply the parameters by `kept` and move them against the directions."""
        for views, updates, sizes in self.updates(directions):
            moved, rates = [view.of(parameters) for view in views], lr * sizes
            if kernels := kernels_for(updates):
                for matrix, update, rate in zip(moved, updates, rates, strict=True):
                    kernels.multiply_add_(matrix, kept, update, rate)
            else:
                if isinstance(kept, Tensor) or kept != 1:
                    torch._foreach_mul_(moved, kept)
                torch._foreach_add_(moved, (updates * rates).unbind())

    def updates(self, directions: Tensors) -> Iterator[tuple[list[MatrixView], Tensor, Tensor]]:
        """The updates, one shape at a time, and what to multiply them by besides lr: a number for
        each matrix or for each of its rows, (count, 1 or rows, 1)."""
        for (rows, columns), views in self.shapes.items():
            update = orthogonalize(torch.stack([view.of(directions) for view in views]))
            size = -ADAM_RMS * math.sqrt(max(rows, columns))
            sizes = update.new_full((len(views), 1, 1), size, dtype=at_least_float32(update))
            yield views, update, sizes * equal_rows(update) if rows > columns else sizes


class DistributedMatrixBatch:
    """The same for several processes: each one computes the updates of some parameters for all, and
    sends them in the precision of the directions. The rows of sharded parameters are first gathered
    by the process that computes their update."""

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

    def add_updates(self, parameters: Tensors, directions: Tensors, lr: Any, kept: Any) -> None:
        torch._foreach_mul_(list(parameters), kept)
        full = self.gather_rows(directions) if self.sharded else [directions[n] for n in self.mine]
        updates = [torch.empty_like(each) for each in full]
        for views, some, its_sizes in self.batch.updates(full):
            for view, update, rate in zip(views, some, lr * its_sizes, strict=True):
                view.of(updates).copy_(update * rate)
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


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring all singular values of (count, rows, columns) to about 1; zeros stay zero."""
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices
    tall = x.shape[1] > x.shape[2]
    for number, (a, b, c) in enumerate(POLYNOMIALS):
        short = x.mT if tall else x  # its Gram matrix is the smaller one
        gram = symmetric_product(short, short)
        if number == 0:
            x, even = scaled(x, gram, b, c)
        else:
            even = symmetric_product(gram, gram, c, gram, b)
        x = torch.baddbmm(x, *((x, even) if tall else (even, x)), beta=a)
    return x


def scaled(x: Tensor, gram: Tensor, b: float, c: float) -> tuple[Tensor, Tensor]:
    """The matrices divided by bounds of their largest singular values, and b G + c G^2 with their
    new Gram matrices G."""
    dtype = at_least_float32(x)
    factor = 1 / (gram.diagonal(dim1=1, dim2=2).to(dtype).sum(dim=1)[:, None, None] + TINY)
    gram = weighted_sum(gram, factor)
    square = symmetric_product(gram, gram)
    # The root of this norm bounds the eigenvalues of `gram`, and far more tightly than their sum.
    norm = torch.linalg.matrix_norm(square, keepdim=True, dtype=dtype)
    largest: Tensor = (LARGEST * norm.sqrt()).clamp(min=SMALLEST)
    x = x * (factor / largest).sqrt().to(x.dtype)
    return x, weighted_sum(gram, b / largest, square, c / largest**2)


def weighted_sum(
    x: Tensor, x_factor: Tensor, y: Tensor | None = None, y_factor: Tensor | None = None
) -> Tensor:
    """x_factor * x + y_factor * y, with factors for each matrix, (count, 1, 1)."""
    if kernels := kernels_for(x):
        total: Tensor = kernels.weighted_sum(x, x_factor, y, y_factor)
        return total
    result = x_factor * x
    return (result if y is None or y_factor is None else result + y_factor * y).to(x.dtype)


def symmetric_product(
    x: Tensor,
    y: Tensor,
    factor: float = 1.0,
    other: Tensor | None = None,
    other_factor: float = 0.0,
) -> Tensor:
    """factor * x @ y.mT + other_factor * other, which must be symmetric, so that a kernel can
    compute half of it."""
    if (kernels := kernels_for(x)) and kernels.fits(x, y):
        half: Tensor = kernels.symmetric_product(x, y, factor, other, other_factor)
        return half
    if other is None:
        return x @ y.mT if factor == 1 else factor * (x @ y.mT)
    return torch.baddbmm(other, x, y.mT, beta=other_factor, alpha=factor)


def equal_rows(matrices: Tensor) -> Tensor:
    """Numbers (count, rows, 1) that give all rows of (count, rows, columns) the same norm, keeping
    that of each matrix: in a tall matrix, a row has the weights of one hidden unit."""
    dtype = at_least_float32(matrices)
    norms: Tensor = torch.linalg.vector_norm(matrices, dim=2, keepdim=True, dtype=dtype)
    mean: Tensor = norms.square().mean(dim=1, keepdim=True).sqrt()
    return mean / (norms + EPSILON)


def at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
