"""The exponential moving average (EMA) of the weights, which is less noisy than a single step.

    >>> ema = EMA(dict(model.named_parameters()), 0.98)  # over about 50 steps
    >>> ema.update(step=1)

Training continues with the current weights; their EMA is evaluated, and saved as the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nanolm.training.distributed import copy_full_tensor, local_tensor


class EMA:
    """The EMA of some parameters; each older step counts `decay` times as much as the next."""

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float) -> None:
        self.parameters, self.decay = parameters, decay
        self.means = [parameter.detach().clone() for parameter in parameters.values()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after `step` steps; over the first steps, the EMA is a plain mean."""
        weight = max(1 - self.decay, 1 / step)
        now = [local_tensor(parameter) for parameter in self.parameters.values()]
        torch._foreach_lerp_([local_tensor(mean) for mean in self.means], now, weight)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and their EMA."""
        for mean, parameter in zip(self.means, self.parameters.values(), strict=True):
            weights = parameter.clone()
            parameter.copy_(mean)
            mean.copy_(weights)

    def state_tensors(self) -> dict[str, Tensor]:
        """The current weights, to save beside the EMA."""
        return {f"{name}.now": parameter.detach() for name, parameter in self.parameters.items()}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Resume from a model that holds the EMA, and the current weights in `tensors`."""
        self.swap()
        for name, parameter in self.state_tensors().items():
            copy_full_tensor(parameter, tensors[name])


@contextmanager
def averaged(ema: EMA | None) -> Iterator[None]:
    """The model as it is evaluated and saved: with its EMA, if any, as its weights."""
    if ema:
        ema.swap()
    try:
        yield
    finally:
        if ema:
            ema.swap()
