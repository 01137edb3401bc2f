"""Training in several processes, each with a share of every batch. Start them with torchrun:

    torchrun --nproc-per-node 8 -m nanolm train corpus.txt

They communicate through PyTorch's DDP, or FSDP2 if the model is sharded. The first process reads
the text, plans, reports and writes; the others receive its decisions as JSON through the rendezvous
store. Models and run folders do not depend on the number of processes.
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

from nanolm.errors import DataError, NanolmError, PeerLost, ReportedElsewhere, UsageError
from nanolm.formats import counted
from nanolm.machine import local_processes, process
from nanolm.model.base import Model
from nanolm.model.gpt import GPT

STARTUP_TIMEOUT = timedelta(days=7)  # for all to connect, and for the first one to read the text
COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # of a collective operation
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
DECISION_KEY = "decided"  # of the first process's decisions, in the store
PEER_LOST_SIGNS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "peer")


@dataclass
class World:
    """All processes of a training run, as seen from one of them."""

    rank: int = 0
    size: int = 1
    store: Any = None  # the rendezvous store; None if this process is alone

    @property
    def joined(self) -> bool:
        """Whether a launcher started this process as one of a group, even a group of one."""
        return self.store is not None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def rows(self, batch: int) -> slice:
        """This process's rows of a batch."""
        return slice(self.rank * batch // self.size, (self.rank + 1) * batch // self.size)

    def weight(self, batch: int) -> float:
        """The weight of the mean over this process's rows, relative to the others."""
        return len(range(batch)[self.rows(batch)]) * self.size / batch

    def broadcast(self, facts: dict[str, Any]) -> None:
        """Send the decisions to the other processes, once."""
        if self.size > 1 and not self.store.check([DECISION_KEY]):
            self.store.set(DECISION_KEY, json.dumps(facts))

    def receive(self) -> dict[str, Any]:
        """Receive the decisions of the first process."""
        self.store.wait([DECISION_KEY], STARTUP_TIMEOUT)
        facts: dict[str, Any] = json.loads(self.store.get(DECISION_KEY))
        if "failed" in facts:
            raise ReportedElsewhere(facts["failed"])
        return facts

    @contextmanager
    def leading(self) -> Iterator[None]:
        """While the first process decides: if it fails, the others do not wait for it."""
        failed = 1
        try:
            yield
        except NanolmError as error:
            failed = error.exit_code
            raise
        finally:
            self.broadcast({"failed": failed})  # ignored if decisions were already sent

    def connect(self, device: str) -> None:
        """Start collective operations."""
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
        """The progress of the first process, and each flag that any process has set."""
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
        """Replace each tensor by its sum over all processes."""
        for each in numbers if self.joined else ():
            dist.all_reduce(each)

    def all_reduce_mean(self, numbers: Tensor) -> Tensor:
        self.all_reduce_sum(numbers)
        return numbers / self.size if self.joined else numbers


ALONE = World()


@contextmanager
def join_world() -> Iterator[World]:
    """The group that this process was started in. Raises PeerLost if another process dies."""
    rank, size = process()
    if rank is None:
        yield ALONE
        return
    try:
        store, rank, size = next(rendezvous("env://", timeout=STARTUP_TIMEOUT))
    except (RuntimeError, ValueError) as error:
        problem = f"RANK and WORLD_SIZE are set, but no other process answers ({error})"
        raise UsageError(
            f"{problem}; start all processes with torchrun, or unset both variables"
        ) from None
    # A launcher may reuse the store when it restarts the processes; ignore its old contents.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        yield World(rank, size, PrefixStore(f"nanolm {attempt}", store))
    except RuntimeError as error:
        text = str(error).lower()
        lost = isinstance(error, dist.DistError) or any(sign in text for sign in PEER_LOST_SIGNS)
        if size == 1 or not lost:
            raise
        first = str(error).strip().partition("\n")[0].partition(". ")[0][:200]
        problem = f"one of the {size} processes exited ({first})"
        cure = "run the same command again to resume from the last checkpoint"
        raise PeerLost(f"{problem}; {cure}") from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def local_rank() -> int:
    """The index of this process's GPU on this machine."""
    count, there = local_processes(), torch.cuda.device_count()
    if count > there:
        hint = f"torchrun --nproc-per-node {there}, or --device cpu"
        raise DataError(f"{count} processes on a machine with {counted(there, 'GPU')}; try {hint}")
    return int(os.environ.get("LOCAL_RANK", "0"))


class LossModule(nn.Module):
    """The loss as a module, so that DDP and FSDP find its parameters."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *batch: Tensor) -> Any:
        return self.loss(*batch)


def wrap_ddp(model: nn.Module, loss: Any) -> DistributedDataParallel:
    """`loss`, with gradients averaged over all processes, and the first one's weights."""
    return DistributedDataParallel(LossModule(model, loss))


def wrap_fsdp(model: Model, loss: Any) -> nn.Module:
    """The same, with every weight sharded over the processes and gathered only when needed."""
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
    """This process's part of a tensor, sharing its memory."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def full_tensor(tensor: Tensor) -> Tensor:
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def gathered_copy(tensor: Tensor) -> Tensor:
    """A copy of the full tensor; if sharded, only in the first process, and on the CPU."""
    if not hasattr(tensor, "full_tensor"):
        return tensor.detach().clone()
    full = full_tensor(tensor.detach())
    return full.cpu() if dist.get_rank() == 0 else full.to("meta")  # memory for one copy only


@torch.no_grad()
def copy_full_tensor(tensor: Tensor, full: Tensor) -> None:
    """Copy `full`, which every process has, into a tensor that may be sharded."""
    if hasattr(tensor, "placements"):
        from torch.distributed.tensor import distribute_tensor

        mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
        full = full.to(tensor.device)
        full = distribute_tensor(full, mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(full)
