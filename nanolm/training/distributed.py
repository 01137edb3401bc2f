"""Training in many processes, each with its share of every batch. What starts them is torchrun:

    torchrun --nproc-per-node 8 -m nanolm train corpus.txt

Everything between them is PyTorch's own: DDP, or FSDP2 where the model is sharded. The first one
reads the text, plans, reports and writes; the others receive what it decided as JSON, in the store
at which all of them met. So neither a model nor a run folder knows that there are others.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from nanolm.errors import DataError, NanolmError, PeerLost, ToldElsewhere, UsageError
from nanolm.machine import local_processes, process
from nanolm.model.base import Model
from nanolm.model.gpt import GPT

STARTUP_TIMEOUT = timedelta(days=7)  # for the first one to read a text, and for all to come
COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # for another process to do what all do together
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
DECISION_KEY = "decided"  # the key of what the first one tells
PEER_LOST_SIGNS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "peer")


@dataclass
class World:
    """All processes of a training, seen from one of them."""

    rank: int = 0
    size: int = 1
    store: Any = None  # where they met; None: this one is alone

    @property
    def joined(self) -> bool:
        """Somebody started this process as one of several, if only of one."""
        return self.store is not None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def rows(self, batch: int) -> slice:
        """Those of a batch that are this one's."""
        return slice(self.rank * batch // self.size, (self.rank + 1) * batch // self.size)

    def weight(self, batch: int) -> float:
        """Of the mean over this one's rows, beside those of the others."""
        return len(range(batch)[self.rows(batch)]) * self.size / batch

    def broadcast(self, facts: dict[str, Any]) -> None:
        """Let the others know, who wait for nothing else."""
        if self.size > 1 and not self.store.check([DECISION_KEY]):
            self.store.set(DECISION_KEY, json.dumps(facts))

    def receive(self) -> dict[str, Any]:
        """What the first one has decided."""
        self.store.wait([DECISION_KEY], STARTUP_TIMEOUT)
        facts: dict[str, Any] = json.loads(self.store.get(DECISION_KEY))
        if "failed" in facts:
            raise ToldElsewhere(facts["failed"])
        return facts

    @contextmanager
    def leading(self) -> Iterator[None]:
        """While this one decides; if it fails before, the others need not wait."""
        failed = 1
        try:
            yield
        except NanolmError as error:
            failed = error.exit_code
            raise
        finally:
            self.broadcast({"failed": failed})  # unless something else was told

    def connect(self, device: str) -> None:
        """From here on they can compute together."""
        if self.joined:
            if device == "cuda":
                torch.cuda.set_device(local_rank())
            dist.init_process_group(
                BACKENDS[device],
                store=PrefixStore("group", self.store),
                rank=self.rank,
                world_size=self.size,
                timeout=COLLECTIVE_TIMEOUT,
            )

    def agree(self, progress: float, *asked: bool) -> tuple[Any, ...]:
        """How far the first one is, and what any of them asks for."""
        if not self.joined:
            return (progress, *asked)
        mine = [progress if self.first else -math.inf, *map(float, asked)]
        agreed = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        progress, *any_ = agreed.tolist()
        return (progress, *(value > 0 for value in any_))

    def all_reduce_max(self, value: int) -> int:
        most = torch.tensor(value)
        if self.joined:
            dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def barrier(self) -> None:
        self.all_reduce_max(0)

    def all_reduce_sum(self, *numbers: Tensor) -> None:
        """Let each be the sum of what all of them have."""
        for each in numbers if self.joined else ():
            dist.all_reduce(each)

    def all_reduce_mean(self, numbers: Tensor) -> Tensor:
        self.all_reduce_sum(numbers)
        return numbers / self.size if self.joined else numbers


ALONE = World()


@contextmanager
def join_world() -> Iterator[World]:
    """The world that this process was started in; says so if another process of it is lost."""
    rank, size = process()
    if rank is None:
        yield ALONE
        return
    try:
        store, rank, size = next(rendezvous("env://", timeout=STARTUP_TIMEOUT))
    except (RuntimeError, ValueError) as error:
        problem = f"RANK and WORLD_SIZE are set, but there is nobody to meet ({error})"
        raise UsageError(f"{problem}; start all with torchrun, or unset them") from None
    # A launcher that starts them again may have the same store: what is in there is old.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        yield World(rank, size, PrefixStore(f"nanolm {attempt}", store))
    except RuntimeError as error:
        text = str(error).lower()
        lost = isinstance(error, dist.DistError) or any(sign in text for sign in PEER_LOST_SIGNS)
        if size == 1 or not lost:
            raise
        first = str(error).strip().partition("\n")[0].partition(". ")[0][:200]
        problem = f"another of the {size} processes ended ({first})"
        raise PeerLost(f"{problem}; the same command goes on from the last checkpoint") from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def local_rank() -> int:
    """Which GPU of this machine is this process's."""
    count, there = local_processes(), torch.cuda.device_count()
    if count > there:
        hint = f"torchrun --nproc-per-node {there}, or --device cpu"
        raise DataError(f"{count} processes on a machine with {there} GPUs; try {hint}")
    return int(os.environ.get("LOCAL_RANK", "0"))


class LossModule(nn.Module):
    """The loss as a module, so that DDP and FSDP find what it depends on."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *batch: Tensor) -> Any:
        return self.loss(*batch)


def wrap_ddp(model: nn.Module, loss: Any) -> DistributedDataParallel:
    """`loss`, with the mean of the gradients of all processes, and the first one's weights."""
    return DistributedDataParallel(LossModule(model, loss))


def wrap_fsdp(model: Model, loss: Any) -> nn.Module:
    """The same, each process keeping a share of every weight, gathered only while it is needed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    assert isinstance(model, GPT)
    mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    sharded = LossModule(model, loss)
    fully_shard(sharded, mesh=mesh)
    return sharded


def local_tensor(tensor: Tensor) -> Tensor:
    """What of it is in this process, in the same memory."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def full_tensor(tensor: Tensor) -> Tensor:
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def gathered_copy(tensor: Tensor) -> Tensor:
    """A copy of all of it; of what is sharded, only in the first process, and on the CPU."""
    if not hasattr(tensor, "full_tensor"):
        return tensor.detach().clone()
    full = full_tensor(tensor.detach())
    return full.cpu() if dist.get_rank() == 0 else full.to("meta")  # there is room for one


@torch.no_grad()
def copy_full_tensor(tensor: Tensor, full: Tensor) -> None:
    """Let it be what `full` is, of which each process has a copy."""
    if hasattr(tensor, "placements"):
        from torch.distributed.tensor import distribute_tensor

        mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
        full = full.to(tensor.device)
        full = distribute_tensor(full, mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(full)
