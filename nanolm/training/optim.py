"""AdamW, and its state as plain tensors.

    >>> optimizer = AdamW(dict(model.named_parameters()), weight_decay=0.1)
    >>> optimizer.step(lr=1e-3)

Weight decay is for the matrices alone: pulling norms, biases and single vectors towards zero helps
nothing. The parameters can be had in several shares, so that as many threads can work on them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.adamw import adamw

from nanolm.errors import ModelError

MOMENTS = ("exp_avg", "exp_avg_sq")
BETA1, BETA2 = 0.9, 0.95  # the second shorter than Adam's 0.999: runs here are short
EPSILON = 1e-10


@dataclass(frozen=True)
class Group:
    """Parameters that are treated alike."""

    parameters: list[nn.Parameter]
    weight_decay: float
    scale: float  # what to multiply the learning rate by
    lr: Tensor | None  # on a GPU it lives there, where a captured step can find it


class AdamW:
    """Torch's own kernel: one for all parameters that are treated alike."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        weight_decay: float,
        scale: Callable[[str], float] = lambda name: 1.0,
        shares: int = 1,
    ) -> None:
        """`scale` is what to multiply the learning rate of each parameter by."""
        self.names = parameters
        self.moments: dict[nn.Parameter, list[Tensor]] = {}
        self.steps: dict[nn.Parameter, Tensor] = {}
        self.shares: list[list[Group]] = []
        self.rates: dict[float, Tensor] = {}  # by scale
        on_gpu = next(iter(parameters.values())).is_cuda
        for share in shared(parameters, shares):
            groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
            for name, parameter in share.items():
                groups.setdefault((parameter.dim() >= 2, scale(name)), []).append(parameter)
            self.shares.append(
                [
                    Group(
                        members,
                        weight_decay if matrix else 0.0,
                        times,
                        self.rate(times) if on_gpu else None,
                    )
                    for (matrix, times), members in groups.items()
                ]
            )

    def rate(self, scale: float) -> Tensor:
        """Where those of a scale find what it makes of the learning rate."""
        return self.rates.setdefault(scale, torch.zeros((), device="cuda"))

    def prepare(self) -> None:
        """Make room for all that is remembered, twice as much as the parameters take."""
        for parameter in self.names.values():
            if parameter not in self.moments:
                self.steps[parameter] = torch.zeros((), device=parameter.device)
                self.moments[parameter] = [torch.zeros_like(parameter) for _ in MOMENTS]

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
            learning = [p for p in group.parameters if p.grad is not None]
            if not learning:
                continue
            adamw(
                learning,  # type: ignore[arg-type]
                [p.grad for p in learning if p.grad is not None],
                [self.moments[p][0] for p in learning],
                [self.moments[p][1] for p in learning],
                [],
                [self.steps[p] for p in learning],
                fused=True,
                capturable=group.lr is not None,
                grad_scale=divisor,
                found_inf=overflow,
                amsgrad=False,
                beta1=BETA1,
                beta2=BETA2,
                lr=lr * group.scale if group.lr is None else group.lr,
                weight_decay=group.weight_decay,
                eps=EPSILON,
                maximize=False,
            )

    def zero_grad(self) -> None:
        for parameter in self.names.values():
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """All that changes with each step, by name."""
        self.prepare()
        tensors = {
            f"{name}.{moment}": value
            for name, parameter in self.names.items()
            for moment, value in zip(MOMENTS, self.moments[parameter], strict=True)
        }
        return {**tensors, "step": next(iter(self.steps.values()))}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what `tensors` gave."""
        self.prepare()
        for name, parameter in self.names.items():
            self.steps[parameter].copy_(tensors["step"])
            for moment, value in zip(MOMENTS, self.moments[parameter], strict=True):
                value.copy_(tensors[f"{name}.{moment}"])


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
