"""One training step: forward, backward, gradient clipping, optimizer update.

    >>> norm, loss = Step(task.loss, Optimizers(parameters), "float32")(batch, lr=1e-3)

A batch that does not fit into memory is split into micro-batches, whose gradients accumulate. On a
CPU, worker threads can compute one each: threads that share every product wait for each other
hundreds of times per step, workers once. On a GPU, launching the kernels of a small batch takes
longer than running them, so steps are captured into CUDA graphs, one per shape, and replayed.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nanolm.model.device import graph_capture
from nanolm.training.distributed import ALONE, World, full_tensor
from nanolm.training.optim import Optimizers

MAX_GRADIENT_NORM = 1.0
MAX_GRAPH_TOKENS = 16_384  # per batch; with more, launch overhead does not matter
GRAPH_WARMUP = 2  # steps per shape before capture; the first one selects kernels
AUTOCAST_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8": torch.bfloat16}
SCALE_GROWTH_INTERVAL = 2_000  # steps without an overflow

T = TypeVar("T")
Batch = tuple[Tensor, ...]
Gradients = dict[nn.Parameter, Tensor | None]
Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


class Step:
    """Forward, backward, clip, optimizer step; a non-finite gradient changes nothing."""

    def __init__(
        self,
        loss: Loss,
        optimizers: Optimizers,
        dtype: str,
        tokens: Callable[[Batch], int] = lambda batch: batch[0].numel(),
        save_memory: Callable[[], bool] = lambda: False,
        world: World = ALONE,
        weight: float = 1.0,
    ) -> None:
        """`save_memory` is the last resort if no row fits; `weight` is that of this process."""
        self.loss, self.optimizers = loss, optimizers
        self.tokens, self.save_memory, self.world, self.weight = tokens, save_memory, world, weight
        self.parameters = list(optimizers.parameters.values())
        self.device = self.parameters[0].device
        # On a CPU, bfloat16 is used only inside matrix products; elsewhere it would be slower.
        on_cpu = dtype == "bfloat16" and self.device.type == "cpu"
        matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        rounding = "bf16" if on_cpu else "ieee"
        self.matmul_precision = partial(temporarily, matmul, "fp32_precision", rounding)
        self.autocast_dtype = None if on_cpu else AUTOCAST_DTYPES.get(dtype)
        self.scale = LossScale(self.device) if dtype == "float16" else None
        self.names: list[str] = []  # of the metrics after the gradient norm
        self.grad_accum_steps = 1  # micro-batches, one after the other
        self.workers = workers = len(optimizers.by_worker)
        threads = torch.get_num_threads()
        self.pool = ThreadPoolExecutor(workers, initializer=lambda: torch.set_num_threads(threads))
        self.discard_graphs()

    def __call__(self, batch: Batch, lr: float) -> Tensor:
        """Returns the gradient norm, the loss and other metrics, still on the device."""
        self.optimizers.set_lr(lr)
        if self.world.joined:
            return self.update(batch)
        work = self.update_by_graph if self.device.type == "cuda" else self.update
        return self.retry_until_it_fits(work, batch)

    def retry_until_it_fits(self, work: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        while True:
            try:
                return work(batch)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                failure = str(error)
            # Outside the handler, which holds on to memory.
            self.use_less_memory(len(batch[0]), failure)

    def fit_to_memory(self, batch: Batch) -> None:
        """Split the batch to fit before the first step; later, other processes would wait."""
        if isinstance(self.loss, DistributedDataParallel) and self.device.type == "cuda":
            with self.loss.no_sync():
                self.retry_until_it_fits(self.accumulate_gradients, batch)
            self.optimizers.zero_grad()
        self.grad_accum_steps = self.world.all_reduce_max(self.grad_accum_steps)

    def use_less_memory(self, rows: int, failure: str) -> None:
        """Use smaller micro-batches from now on, or save memory otherwise, or raise."""
        self.optimizers.zero_grad()
        self.discard_graphs()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.grad_accum_steps < rows:
            self.grad_accum_steps = min(2 * self.grad_accum_steps, rows)
        elif not self.save_memory():
            raise torch.OutOfMemoryError(failure)

    def discard_graphs(self) -> None:
        """Forget captured steps, which no longer match."""
        self.seen: Counter[tuple[torch.Size, ...]] = Counter()
        # By shape: the graph, its inputs, and its outputs.
        self.captured: dict[Any, tuple[torch.cuda.CUDAGraph, Batch, Tensor]] = {}
        self.graph_memory: Any = None  # one pool for all graphs: they never run together

    def update(self, batch: Batch) -> Tensor:
        """The whole step, without waiting for a GPU."""
        metrics = self.world.all_reduce_mean(self.accumulate_gradients(batch))
        self.optimizers.init_state()  # in one thread
        norms = self.by_each_worker(self.gradient_norm)
        norm = (norms[0] if len(norms) == 1 else torch.stack(norms).norm()).float()
        if self.scale:
            norm = norm / self.scale.factor
        grad_scale = (norm / MAX_GRADIENT_NORM).clamp(min=1)  # clips the gradient
        if self.scale:
            grad_scale = grad_scale * self.scale.factor
        metrics = torch.cat([norm[None], metrics])
        found_inf = (0 * metrics).sum().nan_to_num(nan=1)  # 0 * inf is NaN
        with self.matmul_precision():
            self.by_each_worker(lambda worker: self.optimizers.step(grad_scale, found_inf, worker))
        if self.scale:
            self.scale.adapt(found_inf)
        self.optimizers.zero_grad()
        return metrics

    def by_each_worker(self, work: Callable[[int], T]) -> list[T]:
        return [work(0)] if self.workers == 1 else list(self.pool.map(work, range(self.workers)))

    def gradient_norm(self, worker: int) -> Tensor:
        grads = [p.grad for p in self.optimizers.worker_parameters[worker] if p.grad is not None]
        return full_tensor(torch.nn.utils.get_total_norm(grads))

    def accumulate_gradients(self, batch: Batch) -> Tensor:
        """Accumulate gradients in the parameters. Returns the loss and other metrics."""
        rows = len(batch[0])
        size = -(-rows // max(self.grad_accum_steps, self.workers))
        parts = zip(*(part.split(size) for part in batch), strict=True)
        micro_batches = [(part, len(part[0]) / rows * self.weight) for part in parts]
        with self.matmul_precision():
            if len(micro_batches) == 1:
                return self.backward(*micro_batches[0])
            if self.workers == 1:
                *before, last = micro_batches
                no_sync: Any = getattr(self.loss, "no_sync", nullcontext)
                with no_sync():  # gradients are synchronized once, with the last micro-batch
                    metrics = [self.backward(*each) for each in before]
                return torch.stack([*metrics, self.backward(*last)]).sum(dim=0)
            results = list(self.pool.map(lambda each: self.compute_gradients(*each), micro_batches))
            gradients = [gradient for _, gradient in results]
            self.by_each_worker(lambda worker: self.add_gradients(worker, gradients))
            return torch.stack([metrics for metrics, _ in results]).sum(dim=0)

    def add_gradients(self, worker: int, results: list[Gradients]) -> None:
        """Always in the same order, so that results are bit-identical."""
        for parameter in self.optimizers.worker_parameters[worker]:
            gradients = [each for all_ in results if (each := all_[parameter]) is not None]
            for gradient in gradients[1:]:
                gradients[0].add_(gradient)
            parameter.grad = gradients[0] if gradients else None

    def backward(self, micro_batch: Batch, share: float) -> Tensor:
        """Add the gradients of a micro-batch to those of the parameters."""
        loss, metrics = self.forward(micro_batch, share)
        loss.backward()
        return metrics

    def compute_gradients(self, micro_batch: Batch, share: float) -> tuple[Tensor, Gradients]:
        """The same, returning the gradients instead of adding them."""
        loss, metrics = self.forward(micro_batch, share)
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        return metrics, dict(zip(self.parameters, gradients, strict=True))

    def forward(self, micro_batch: Batch, share: float) -> tuple[Tensor, Tensor]:
        """The loss to call backward on, and the metrics, both scaled by the share of the batch."""
        micro_batch = tuple(part.to(self.device, non_blocking=True) for part in micro_batch)
        dtype = self.autocast_dtype
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            loss, others = self.loss(*micro_batch)
        values = {"loss": loss, **others}
        self.names = list(values)
        metrics = torch.stack([value.detach().float() for value in values.values()])
        if share != 1:
            loss, metrics = loss * share, metrics * share
        if self.scale:
            loss = loss * self.scale.factor
        return loss, metrics

    def update_by_graph(self, batch: Batch) -> Tensor:
        """`update`, replayed from a CUDA graph if that pays off."""
        if not batch[0].is_pinned():
            batch = tuple(part.pin_memory() for part in batch)
        shape = tuple(part.shape for part in batch)
        if self.tokens(batch) > MAX_GRAPH_TOKENS:
            return self.update(batch)
        self.seen[shape] += 1
        if self.seen[shape] <= GRAPH_WARMUP:
            return self.update(batch)
        if shape not in self.captured:  # record it without running it
            inputs, graph = tuple(part.to(self.device) for part in batch), torch.cuda.CUDAGraph()
            with graph_capture(graph, self.graph_memory):
                metrics = self.update(inputs)
            self.graph_memory = self.graph_memory or graph.pool()
            self.captured[shape] = graph, inputs, metrics
        graph, inputs, metrics = self.captured[shape]
        for place, part in zip(inputs, batch, strict=True):
            place.copy_(part, non_blocking=True)
        graph.replay()
        return metrics


class LossScale:
    """The loss scale, which keeps small gradients from underflowing in float16. It is halved after
    an overflow and doubled after many steps without one, all on the device."""

    def __init__(self, device: torch.device) -> None:
        self.factor = torch.tensor(65_536.0, device=device)
        self.good_steps = torch.tensor(0.0, device=device)  # since the last change

    def state_tensors(self) -> dict[str, Tensor]:
        return {"scale.factor": self.factor, "scale.well": self.good_steps}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        for name, value in self.state_tensors().items():
            value.copy_(tensors[name])

    def adapt(self, found_inf: Tensor) -> None:
        self.good_steps.add_(1).mul_(1 - found_inf)
        due = (self.good_steps >= SCALE_GROWTH_INTERVAL).float()
        self.factor.mul_((1 + due) * (1 - found_inf / 2))
        self.good_steps.mul_(1 - due)


@contextmanager
def temporarily(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute for the duration of a `with` block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
