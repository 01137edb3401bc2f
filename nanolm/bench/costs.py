"""Profiles one training step: the time of each operator, and the least it could take.

    >>> costs(trial, "cpu", products=1e12, copies=1e11).costs[0]
    Cost(operator='mm', calls=39, milliseconds=5.2, share=0.22, limit=4.3, times_limit=1.2)

One step counts the arithmetic and memory traffic of each operator; another is timed by the
profiler. The lower bound of an operator is the time of its matrix products at the rate of a large
product, or of reading its inputs and writing its outputs once at the rate of a large copy.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanolm.bench.turns import Runner, seconds_for

LOOKUPS = {"embedding": "weight", "index": "self", "gather": "self", "index_select": "self"}
# Arguments of operators that are not read, or not completely.
OVERWRITTEN = ("copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_")
UNREAD = {*LOOKUPS.items()}
UNREAD |= {(name, "self") for name in ("nll_loss_forward", "nll_loss_backward", *OVERWRITTEN)}
MATRIX_PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")}


@dataclass(frozen=True)
class Cost:
    """All calls of an operator in one training step."""

    operator: str
    calls: int
    milliseconds: float
    share: float  # of the step
    limit: float | None  # lower bound in milliseconds; None if its work is unknown
    times_limit: float | None


@dataclass(frozen=True)
class Profile:
    milliseconds: float  # somewhat more than without the profiler
    products: float  # operations per second
    copies: float  # bytes per second
    costs: list[Cost]  # the largest first


@dataclass
class Work:
    operations: int = 0
    bytes: int = 0


class Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: dict[str, Work] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        work = self.work.setdefault(plain(func._schema.name), Work())
        work.operations += operations(func, args, kwargs, out)
        work.bytes += traffic(func, args, kwargs, out)
        return out


def plain(name: str) -> str:
    """The name without the in-place suffix: autograd works in place only when not counted."""
    return name.removesuffix("_")


def operations(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """The arithmetic of matrix products; for other operators, memory traffic dominates."""
    name = func._schema.name
    if name.startswith("aten::_scaled_dot_product"):
        # Two products forward, five backward; half of each, since attention is causal.
        batch, heads, length, width = args[0].shape
        return (5 if "backward" in name else 2) * int(batch * heads * length * length * width)
    if plain(name) not in MATRIX_PRODUCTS:
        return 0
    # By argument name, because torch's own formulas break on overloads with more arguments.
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    left = next(given[name] for name in ("mat1", "batch1", "self") if name in given)
    return 2 * int(out.numel()) * int(left.shape[-1])


def traffic(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Bytes to read and write, each once."""
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    aliases = [returned.alias_info for returned in schema.returns if returned.alias_info]
    if any(not alias.is_write for alias in aliases) or name.startswith(("empty", "new_empty")):
        return 0  # a view, or uninitialized memory
    total = 0 if aliases else size(out) * (2 if name in LOOKUPS else 1)
    for index, argument in enumerate(schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        written = bool(argument.alias_info and argument.alias_info.is_write)
        total += size(value) * (((name, argument.name) not in UNREAD) + written)
    return total


def size(value: Any) -> int:
    """Bytes of all tensors in `value`, counting expanded dimensions (stride 0) once."""
    return sum(
        leaf.itemsize
        * math.prod(n for n, step in zip(leaf.shape, leaf.stride(), strict=True) if step)
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor)
    )


def costs(runner: Runner, device: str, products: float, copies: float) -> Profile:
    """Profile one step of a new `runner`, given the rates of a large product and a large copy."""
    with Counter() as counter:  # the first step, which is also the warmup
        runner.step()
        runner.wait()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        total = 1000 * seconds_for(runner, steps=1)
    calls: dict[str, list[float]] = {}  # milliseconds of each
    for event in profiler.events() or []:
        if duration := milliseconds(event, counter.work.keys(), device):
            calls.setdefault(plain(event.name), []).append(duration)
    costs = []
    for name, times in calls.items():
        work = counter.work.get(name, Work())
        limit = 1000 * max(work.operations / products, work.bytes / copies)
        spent, short = sum(times), name.removeprefix("aten::")
        times_limit = spent / limit if limit else None
        costs.append(Cost(short, len(times), spent, spent / total, limit or None, times_limit))
    costs.sort(key=lambda cost: cost.milliseconds, reverse=True)
    return Profile(total, products, copies, costs)


def milliseconds(event: FunctionEvent, counted: Collection[str], device: str) -> float:
    """The time of a top-level operator, including what it calls. On a GPU, also of other events
    that launch kernels, whose memory traffic is unknown."""
    parent = event.cpu_parent
    while parent is not None:
        if plain(parent.name) in counted:
            return 0.0
        parent = parent.cpu_parent
    microseconds = 0.0
    if plain(event.name) in counted:
        microseconds = event.device_time_total if device == "cuda" else event.cpu_time_total
    elif device == "cuda" and event.device_type.name == "CPU":
        microseconds = event.self_device_time_total
    return microseconds / 1000
