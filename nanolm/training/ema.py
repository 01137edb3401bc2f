"""The mean of the weights over the last steps, which is better than any of them where steps jump.

    >>> ema = EMA(dict(model.named_parameters()), 0.98)  # over about 50 steps
    >>> ema.update(step=1)

Training goes on with the weights as they are; what is judged and saved as the model is their mean.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nanolm.training.distributed import copy_full_tensor, local_tensor


class EMA:
    """Of some parameters, a step back counting `decay` times as much as the one after it."""

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float) -> None:
        self.parameters, self.decay = parameters, decay
        self.means = [parameter.detach().clone() for parameter in parameters.values()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after `step` steps; over the first ones it is their plain mean."""
        weight = max(1 - self.decay, 1 / step)
        now = [local_tensor(parameter) for parameter in self.parameters.values()]
        torch._foreach_lerp_([local_tensor(mean) for mean in self.means], now, weight)

    @torch.no_grad()
    def swap(self) -> None:
        """The mean for the weights, and the other way round."""
        for mean, parameter in zip(self.means, self.parameters.values(), strict=True):
            weights = parameter.clone()
            parameter.copy_(mean)
            mean.copy_(weights)

    def state_tensors(self) -> dict[str, Tensor]:
        """What to save besides the mean: the weights as they are."""
        return {f"{name}.now": parameter.detach() for name, parameter in self.parameters.items()}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Go on from a model that is the mean, and what `tensors` gave."""
        self.swap()
        for name, parameter in self.state_tensors().items():
            copy_full_tensor(parameter, tensors[name])


@contextmanager
def averaged(ema: EMA | None) -> Iterator[None]:
    """The model as it is evaluated and saved: with its EMA, if there is one, as its weights."""
    if ema:
        ema.swap()
    try:
        yield
    finally:
        if ema:
            ema.swap()
