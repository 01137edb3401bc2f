"""What turns gradients into better weights, and its state as plain tensors.

    >>> optimizer = Optimizer(dict(model.named_parameters()), 0.1, matrices=model.muon_parameters())
    >>> optimizer.step(lr=1e-3)

AdamW is for everything; the matrices inside a Transformer, if they are named, are for Muon. Weight
decay is for matrices alone: pulling norms, biases and single vectors towards zero helps nothing.
The parameters can be had in several shares, so that as many threads can work on them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.adamw import adamw

from nanolm.errors import ModelError
from nanolm.training.distributed import ALONE, World, copy_full_tensor, local_tensor
from nanolm.training.muon import MOMENTUM, Pieces, SharedPieces

BETA1, BETA2 = 0.9, 0.95  # the second shorter than Adam's 0.999: runs here are short
EPSILON = 1e-10


class Group(ABC):
    """Parameters that are treated alike."""

    moments: tuple[str, ...]  # names of what is remembered of each parameter

    def __init__(
        self,
        parameters: list[nn.Parameter],
        weight_decay: float,
        scale: float,  # what to multiply the learning rate by
        lr: Tensor | None,  # on a GPU it lives there, where a captured step can find it
    ) -> None:
        self.parameters, self.weight_decay = parameters, weight_decay
        self.scale, self.lr = scale, lr
        self.remembered: dict[nn.Parameter, list[Tensor]] = {}

    def prepare(self) -> None:
        """Make room for all that is remembered."""
        if not self.remembered:
            for parameter in self.parameters:
                self.remembered[parameter] = [torch.zeros_like(parameter) for _ in self.moments]

    @abstractmethod
    def step(self, lr: float, divisor: Tensor | None, overflow: Tensor | None) -> None:
        """Gradients are divided by the one; where the other is 1, nothing changes."""


class AdamW(Group):
    """Torch's own kernel: one for all parameters of a group."""

    moments = ("exp_avg", "exp_avg_sq")

    def prepare(self) -> None:
        super().prepare()
        if not hasattr(self, "steps"):
            device = self.parameters[0].device
            self.steps = {p: torch.zeros((), device=device) for p in self.parameters}

    def step(self, lr: float, divisor: Tensor | None, overflow: Tensor | None) -> None:
        learning = [p for p in self.parameters if p.grad is not None]
        if not learning:
            return
        adamw(
            [local_tensor(p) for p in learning],
            [local_tensor(p.grad) for p in learning if p.grad is not None],
            [local_tensor(self.remembered[p][0]) for p in learning],
            [local_tensor(self.remembered[p][1]) for p in learning],
            [],
            [self.steps[p] for p in learning],
            fused=True,
            capturable=self.lr is not None,
            grad_scale=divisor,
            found_inf=overflow,
            amsgrad=False,
            beta1=BETA1,
            beta2=BETA2,
            lr=lr * self.scale if self.lr is None else self.lr,
            weight_decay=self.weight_decay,
            eps=EPSILON,
            maximize=False,
        )


class Muon(Group):
    """Momentum, made orthogonal (see `nanolm.training.muon`): all of a shape at a time.

    It works in the gradients, which nobody needs any more.
    """

    moments = ("momentum",)

    def __init__(
        self, parts: Mapping[nn.Parameter, Sequence[int]], world: World, *rest: object
    ) -> None:
        """`parts` is how many rows each matrix has that belongs together within a parameter."""
        super().__init__(list(parts), *rest)  # type: ignore[arg-type]
        self.parts, self.world = parts, world

    def prepare(self) -> None:
        if not self.remembered:
            super().prepare()
            self.pieces = (
                SharedPieces(self.parts, self.world) if self.world.size > 1 else Pieces(self.parts)
            )

    def step(self, lr: float, divisor: Tensor | None, overflow: Tensor | None) -> None:
        momenta = [local_tensor(self.remembered[p][0]) for p in self.parameters]
        gradients = [local_tensor(p.grad) for p in self.parameters if p.grad is not None]
        if not gradients:
            return
        rate: float | Tensor = lr * self.scale if self.lr is None else self.lr
        if divisor is not None:
            torch._foreach_div_(gradients, divisor)
        if overflow is not None:  # as if the gradient were the momentum, and the rate zero
            if self.lr is None:
                if overflow.item():
                    return
            else:
                for momentum, gradient in zip(momenta, gradients, strict=True):
                    gradient.copy_(torch.where(overflow > 0, momentum, gradient))
                rate = rate * (1 - overflow)
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        torch._foreach_lerp_(gradients, momenta, MOMENTUM)  # one step ahead, after Nesterov
        parameters = [local_tensor(p) for p in self.parameters]
        self.pieces.update(parameters, gradients, rate, self.weight_decay)


class Optimizer:
    """All parameters of a model, in shares of groups."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        weight_decay: float,
        scale: Callable[[str], float] = lambda name: 1.0,
        shares: int = 1,
        matrices: Mapping[str, Sequence[int]] | None = None,
        world: World = ALONE,
    ) -> None:
        """`scale` is what to multiply the learning rate of each parameter by; `matrices` are those
        for Muon, each with the rows of the matrices that lie in it one below the other."""
        self.names = parameters
        self.shares: list[list[Group]] = []
        self.rates: dict[float, Tensor] = {}  # by scale
        matrices = matrices or {}
        on_gpu = next(iter(parameters.values())).is_cuda
        for share in shared(parameters, shares):
            groups: dict[tuple[bool, bool, float], dict[nn.Parameter, Sequence[int]]] = {}
            for name, parameter in share.items():
                kind = (name in matrices, parameter.dim() >= 2, scale(name))
                groups.setdefault(kind, {})[parameter] = matrices.get(name, ())
            self.shares.append([])
            for (by_muon, matrix, times), members in groups.items():
                rest = (
                    weight_decay if matrix else 0.0,
                    times,
                    self.rate(times) if on_gpu else None,
                )
                group = Muon(members, world, *rest) if by_muon else AdamW(list(members), *rest)
                self.shares[-1].append(group)

    def rate(self, scale: float) -> Tensor:
        """Where those of a scale find what it makes of the learning rate."""
        return self.rates.setdefault(scale, torch.zeros((), device="cuda"))

    def groups(self) -> list[Group]:
        return [group for share in self.shares for group in share]

    def prepare(self) -> None:
        """Make room for all that is remembered: with AdamW, twice what the parameters take."""
        for group in self.groups():
            group.prepare()

    def set_rate(self, lr: float) -> None:
        """For what is captured: the rest is told with every step."""
        for scale, rate in self.rates.items():
            rate.fill_(lr * scale)

    @torch.no_grad()
    def step(
        self,
        lr: float,
        divisor: Tensor | None = None,
        overflow: Tensor | None = None,
        share: int = 0,
    ) -> None:
        """Of one share. Gradients are divided by the one; where the other is 1, nothing changes."""
        self.prepare()
        for group in self.shares[share]:
            group.step(lr, divisor, overflow)

    def zero_grad(self) -> None:
        for parameter in self.names.values():
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """All that changes with each step, by name."""
        self.prepare()
        names = {parameter: name for name, parameter in self.names.items()}
        tensors = {}
        for group in self.groups():
            for parameter, values in group.remembered.items():
                for moment, value in zip(group.moments, values, strict=True):
                    tensors[f"{names[parameter]}.{moment}"] = value
        steps = [step for group in self.adamw() for step in group.steps.values()]
        return {**tensors, **({"step": steps[0]} if steps else {})}

    def adamw(self) -> list[AdamW]:
        return [group for group in self.groups() if isinstance(group, AdamW)]

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what `tensors` gave."""
        for name, value in self.tensors().items():
            copy_full_tensor(value, tensors[name])
        for group in self.adamw():
            for step in group.steps.values():
                step.copy_(tensors["step"])


def shared(parameters: dict[str, nn.Parameter], shares: int) -> list[dict[str, nn.Parameter]]:
    """`parameters` in so many shares of about the same size."""
    found: list[dict[str, nn.Parameter]] = [{} for _ in range(shares)]
    sizes = [0] * shares
    for name, parameter in sorted(parameters.items(), key=lambda item: -item[1].numel()):
        least = sizes.index(min(sizes))
        found[least][name] = parameter
        sizes[least] += parameter.numel()
    return found


def load_tensors(file: Path, take: Callable[[dict[str, Tensor]], None]) -> None:
    """Let `take` have what is in `file`, or say what is missing there."""
    try:
        take(load_file(file))
    except KeyError as error:
        raise ModelError(f"{file}: {error} is missing") from None
