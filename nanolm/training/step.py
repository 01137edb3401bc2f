"""One update: forward, backward, clip, and what the optimizer makes of it.

    >>> norm, loss = Step(task.loss, Optimizer(parameters, 0.1), "float32")(batch, lr=1e-3)

A batch that does not fit into memory goes through in parts; their gradients add up to the same.
On a CPU, parts can go through side by side, each on a thread of its own: threads that share every
product have to wait for each other hundreds of times a step, these once. On a GPU, a small batch
takes less time than launching its kernels one by one does, so the whole update is captured, once
for each shape of batch that comes up again, and from then on replayed.

Where several processes share a batch, the gradients, and what is recorded, are the means over all.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nanolm.model.device import graph_capture
from nanolm.training.distributed import ALONE, World, full_tensor
from nanolm.training.optim import Optimizer

MAX_GRADIENT_NORM = 1.0
CAPTURED = 16_384  # tokens in a batch; with more of them, launching is not what takes the time
WARM_UP = 2  # updates with a shape before it is captured: kernels are chosen in the first ones
AUTOCAST_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8": torch.bfloat16}
DOUBLED_AFTER = 2_000  # updates without an overflow

T = TypeVar("T")
Batch = tuple[Tensor, ...]
Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


@dataclass
class Captured:
    """An update on the device, with where its batch goes and its results come out."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    numbers: Tensor


class Step:
    """Updates what the optimizer has; without a finite gradient all stays as it is.

    As many shares as the optimizer has, so many parts of a batch are computed side by side.
    """

    def __init__(
        self,
        loss: Loss,
        optimizer: Optimizer,
        dtype: str,
        tokens: Callable[[Batch], int] = lambda batch: batch[0].numel(),
        save_memory: Callable[[], bool] = lambda: False,
        world: World = ALONE,
        weight: float = 1.0,
    ) -> None:
        """`tokens` counts a batch; `save_memory` is what is left to try when no row fits; `weight`
        is that of this process's rows beside those of the others."""
        self.loss, self.optimizer = loss, optimizer
        self.world, self.weight = world, weight
        self.tokens, self.save_memory = tokens, save_memory
        self.parameters = list(optimizer.names.values())
        self.device = self.parameters[0].device
        # On a CPU only the products are in bfloat16, within them: all else would be slower with it.
        self.products = "bf16" if dtype == "bfloat16" and self.device.type == "cpu" else "ieee"
        self.low = None if self.products == "bf16" else AUTOCAST_DTYPES.get(dtype)
        self.scale = Scale(self.device) if dtype == "float16" else None
        self.names: list[str] = []  # of the numbers behind the norm
        self.parts = 1  # that a batch goes through in, one after the other
        self.workers = workers = len(optimizer.shares)
        threads = torch.get_num_threads()
        self.pool = ThreadPoolExecutor(workers, initializer=lambda: torch.set_num_threads(threads))
        self.forget_captured()

    def __call__(self, batch: Batch, lr: float) -> Tensor:
        """The norm of the gradient, the loss and what else is recorded, still on the device."""
        self.lr = lr
        self.optimizer.set_rate(lr)
        if self.world.joined:
            return self.update(batch)
        work = self.run if self.device.type == "cuda" else self.update
        return self.until_it_fits(work, batch)

    def until_it_fits(self, work: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        while True:
            try:
                return work(batch)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                failure = str(error)
            # Outside of the handler: what it holds on to is memory too.
            self.make_room(len(batch[0]), failure)

    def fit(self, batch: Batch) -> None:
        """Find parts that fit before the first step: in a step, the others would wait for this
        process while it tries again."""
        if isinstance(self.loss, DistributedDataParallel) and self.device.type == "cuda":
            with self.loss.no_sync():
                self.until_it_fits(self.gradients, batch)
            self.optimizer.zero_grad()
        self.parts = self.world.all_reduce_max(self.parts)

    def make_room(self, rows: int, failure: str) -> None:
        """Smaller parts from now on, or something else that saves memory; else it is raised."""
        self.optimizer.zero_grad()
        self.forget_captured()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.parts < rows:
            self.parts = min(2 * self.parts, rows)
        elif not self.save_memory():
            raise torch.OutOfMemoryError(failure)

    def forget_captured(self) -> None:
        """What was captured does what was right then."""
        self.seen: dict[tuple[torch.Size, ...], int] = {}
        self.captured: dict[tuple[torch.Size, ...], Captured] = {}
        self.memory: Any = None  # a pool for all that is captured: they never run together

    def update(self, batch: Batch) -> Tensor:
        """Forward, backward, update; on a GPU nothing of it waits for the device."""
        numbers = self.world.all_reduce_mean(self.gradients(batch))
        self.optimizer.prepare()  # by one thread, for all
        norms = self.each(self.norm)
        norm = (norms[0] if len(norms) == 1 else torch.stack(norms).norm()).float()
        if self.scale:
            norm = norm / self.scale.factor
        divisor = (norm / MAX_GRADIENT_NORM).clamp(min=1)
        if self.scale:
            divisor = divisor * self.scale.factor
        numbers = torch.cat([norm[None], numbers])
        overflow = (0 * numbers).sum().nan_to_num(nan=1)  # 0 times what is not finite is no number
        with products_in(self.products):
            self.each(lambda share: self.optimizer.step(self.lr, divisor, overflow, share))
        if self.scale:
            self.scale.adapt(overflow)
        self.optimizer.zero_grad()
        return numbers

    def each(self, work: Callable[[int], T]) -> list[T]:
        """Let each worker do its share of the parameters."""
        shares = range(len(self.optimizer.shares))
        return [work(0)] if len(shares) == 1 else list(self.pool.map(work, shares))

    def norm(self, share: int) -> Tensor:
        """Of all gradients of a share together."""
        groups = self.optimizer.shares[share]
        gradients = [p.grad for group in groups for p in group.parameters if p.grad is not None]
        return full_tensor(torch.nn.utils.get_total_norm(gradients))

    def gradients(self, batch: Batch) -> Tensor:
        """Leave the gradients with the parameters; the loss and what else is recorded."""
        with products_in(self.products):
            return self.gradients_of(batch)

    def gradients_of(self, batch: Batch) -> Tensor:
        rows = len(batch[0])
        size = -(-rows // max(self.parts, self.workers))
        parts = [
            (
                tuple(part[first : first + size] for part in batch),
                min(size, rows - first) / rows * self.weight,
            )
            for first in range(0, rows, size)
        ]
        if len(parts) == 1:
            return self.learn(*parts[0])
        if self.workers == 1:
            *before, last = parts
            with self.by_itself():  # the others are asked once, with the last part
                numbers = [self.learn(*part) for part in before]
            return torch.stack([*numbers, self.learn(*last)]).sum(dim=0)
        found = list(self.pool.map(lambda part: self.learned(*part), parts))
        self.each(lambda share: self.add_up(share, [gradients for _, gradients in found]))
        return torch.stack([numbers for numbers, _ in found]).sum(dim=0)

    def by_itself(self) -> AbstractContextManager[None]:
        """Let gradients stay what they are in this process meanwhile."""
        alone: Any = getattr(self.loss, "no_sync", nullcontext)
        context: AbstractContextManager[None] = alone()
        return context

    def add_up(self, share: int, found: list[dict[nn.Parameter, Tensor | None]]) -> None:
        """Always in the same order, so that the same bits come out."""
        for group in self.optimizer.shares[share]:
            for parameter in group.parameters:
                pieces = [part for all_ in found if (part := all_[parameter]) is not None]
                for piece in pieces[1:]:
                    pieces[0].add_(piece)
                parameter.grad = pieces[0] if pieces else None

    def learn(self, part: Batch, share: float) -> Tensor:
        """Add what a part has to say to the gradients."""
        loss, numbers = self.forward(part, share)
        loss.backward()
        return numbers

    def learned(
        self, part: Batch, share: float
    ) -> tuple[Tensor, dict[nn.Parameter, Tensor | None]]:
        """The same, handed over instead of added."""
        loss, numbers = self.forward(part, share)
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        return numbers, dict(zip(self.parameters, gradients, strict=True))

    def forward(self, part: Batch, share: float) -> tuple[Tensor, Tensor]:
        """What to go back from, and what is recorded: both as this share of the whole batch."""
        part = tuple(tensor.to(self.device, non_blocking=True) for tensor in part)
        with torch.autocast(self.device.type, self.low, enabled=self.low is not None):
            loss, others = self.loss(*part)
        values = {"loss": loss, **others}
        self.names = list(values)
        numbers = torch.stack([value.detach().float() for value in values.values()])
        if share != 1:
            loss, numbers = loss * share, numbers * share
        if self.scale:
            loss = loss * self.scale.factor
        return loss, numbers

    def run(self, batch: Batch) -> Tensor:
        """`update`, replayed where it pays."""
        if not batch[0].is_pinned():
            batch = tuple(part.pin_memory() for part in batch)
        shape = tuple(part.shape for part in batch)
        if self.tokens(batch) > CAPTURED:
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
        return found.numbers

    def capture(self, batch: Batch) -> Captured:
        """Record an update without doing it."""
        inputs = tuple(part.to(self.device) for part in batch)
        graph = torch.cuda.CUDAGraph()
        with graph_capture(graph, self.memory):
            numbers = self.update(inputs)
        self.memory = self.memory or graph.pool()
        return Captured(graph, inputs, numbers)


class Scale:
    """What losses are multiplied by, so that small gradients are not lost in float16.

    Halved when something overflows, doubled when nothing has for long; all of it on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.factor = torch.tensor(65_536.0, device=device)
        self.well = torch.tensor(0.0, device=device)  # updates since the last change

    def tensors(self) -> dict[str, Tensor]:
        return {"scale.factor": self.factor, "scale.well": self.well}

    def load(self, tensors: dict[str, Tensor]) -> None:
        for name, value in self.tensors().items():
            value.copy_(tensors[name])

    def adapt(self, overflow: Tensor) -> None:
        self.well.add_(1).mul_(1 - overflow)
        due = (self.well >= DOUBLED_AFTER).float()
        self.factor.mul_((1 + due) * (1 - overflow / 2))
        self.well.mul_(1 - due)


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Let float32 products on a CPU round what they multiply, where it has units for that."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


def out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
