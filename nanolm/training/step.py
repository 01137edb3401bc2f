"""One update: forward, backward, clip, AdamW; on a GPU, replayed in one go.

    >>> values, norm = Step(task.loss, parameters, optimizer, "float32")(batch, lr=1e-3)

A small batch takes a GPU less time than launching its kernels one by one does. So the whole
update is captured, once for each shape of batch that comes up again, and from then on replayed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MAX_GRADIENT_NORM = 1.0
CAPTURED = 16_384  # tokens in a batch; with more of them, launching is not what takes the time
WARM_UP = 2  # updates with a shape before it is captured: kernels are chosen in the first ones

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


@dataclass
class Captured:
    """An update on the device, with where its batch goes and its results come out."""

    graph: torch.cuda.CUDAGraph
    batch: tuple[Tensor, ...]
    values: dict[str, Tensor]
    norm: Tensor


class Step:
    """Updates `parameters`; without a finite gradient they and the optimizer stay as they are."""

    def __init__(
        self,
        loss: Loss,
        parameters: dict[str, nn.Parameter],
        optimizer: torch.optim.AdamW,
        dtype: str,
    ) -> None:
        self.loss, self.optimizer = loss, optimizer
        self.parameters = list(parameters.values())
        self.device = self.parameters[0].device
        self.low = dtype == "bfloat16"
        self.seen: dict[tuple[torch.Size, ...], int] = {}
        self.captured: dict[tuple[torch.Size, ...], Captured] = {}
        self.pool: Any = None  # of memory, for all that is captured: they never run together

    def __call__(self, batch: tuple[Tensor, ...], lr: float) -> tuple[dict[str, float], float]:
        """The loss and what else is recorded, and the norm of the gradient."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr * group["scale"])
            else:
                group["lr"] = lr * group["scale"]
        values, norm = self.run(batch) if self.device.type == "cuda" else self.update(batch)
        numbers = torch.stack([norm, *values.values()]).tolist()  # one wait for all of them
        return dict(zip(values, numbers[1:], strict=True)), numbers[0]

    def update(self, batch: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], Tensor]:
        """Forward, backward, update; nothing of it waits for the device."""
        batch = tuple(part.to(self.device, non_blocking=True) for part in batch)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.low):
            loss, others = self.loss(*batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, MAX_GRADIENT_NORM)
        if self.optimizer.param_groups[0]["fused"]:
            # Where it is 1, the kernel leaves everything as it is.
            self.optimizer.found_inf = 1 - norm.isfinite().float()  # type: ignore[attr-defined]
            self.optimizer.step()
        elif math.isfinite(norm.item()):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        values = {"loss": loss, **others}
        return {name: value.detach().float() for name, value in values.items()}, norm.float()

    def run(self, batch: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], Tensor]:
        """`update`, replayed where it pays."""
        shape = tuple(part.shape for part in batch)
        if batch[0].numel() > CAPTURED:
            return self.update(batch)
        self.seen[shape] = self.seen.get(shape, 0) + 1
        if self.seen[shape] <= WARM_UP:
            return self.update(batch)
        if shape not in self.captured:
            self.captured[shape] = self.capture(batch)
        found = self.captured[shape]
        for place, part in zip(found.batch, batch, strict=True):
            place.copy_(part, non_blocking=True)
        found.graph.replay()
        return found.values, found.norm

    def capture(self, batch: tuple[Tensor, ...]) -> Captured:
        """Record an update without doing it."""
        inputs = tuple(part.to(self.device) for part in batch)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self.pool):
            values, norm = self.update(inputs)
        self.pool = self.pool or graph.pool()
        return Captured(graph, inputs, values, norm)
