"""Where the time of one update goes, and the least it could take.

    >>> costs(trial, "cpu", products=1e12, copies=1e11).costs[0]
    Cost(operator='mm', calls=39, milliseconds=5.2, share=0.22, limit=4.3, times_limit=1.2)

One update counts what each operator computes and moves, another is timed by the profiler. An
operator can be no faster than its products at the rate of a large product, nor than its inputs and
outputs, each read or written once, at the rate of a large copy.
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
# Arguments of operators whose numbers are not read, or not all of them.
OVERWRITTEN = ("copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_")
UNREAD = {*LOOKUPS.items()}
UNREAD |= {(name, "self") for name in ("nll_loss_forward", "nll_loss_backward", *OVERWRITTEN)}
MATRIX_PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")}


@dataclass(frozen=True)
class Cost:
    """All calls of an operator in one update."""

    operator: str
    calls: int
    milliseconds: float
    share: float  # of the update
    limit: float | None  # milliseconds; None where nothing is known to be computed or moved
    times_limit: float | None


@dataclass(frozen=True)
class Profile:
    milliseconds: float  # somewhat more than without the profiler
    products: float  # operations a second
    copies: float  # bytes a second
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
    """In place or not: autograd accumulates gradients in place only where nobody counts."""
    return name.removesuffix("_")


def operations(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Of matrix products; those of other operators are few beside the bytes they move."""
    name = func._schema.name
    if name.startswith("aten::_scaled_dot_product"):
        # Two products forward, five backward; half of each, since attention is causal.
        batch, heads, length, width = args[0].shape
        return (5 if "backward" in name else 2) * int(batch * heads * length * length * width)
    if plain(name) not in MATRIX_PRODUCTS:
        return 0
    # By name, not by torch's own formulas: those break on overloads with further arguments.
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    left = next(given[name] for name in ("mat1", "batch1", "self") if name in given)
    return 2 * int(out.numel()) * int(left.shape[-1])


def traffic(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Bytes that have to be read and written, each once."""
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    aliases = [returned.alias_info for returned in schema.returns if returned.alias_info]
    if any(not alias.is_write for alias in aliases) or name.startswith(("empty", "new_empty")):
        return 0  # a view, or memory that is not touched yet
    total = 0 if aliases else size(out) * (2 if name in LOOKUPS else 1)
    for index, argument in enumerate(schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        written = bool(argument.alias_info and argument.alias_info.is_write)
        total += size(value) * (((name, argument.name) not in UNREAD) + written)
    return total


def size(value: Any) -> int:
    """Bytes of all tensors in `value`, repetitions (a stride of 0) not counted."""
    return sum(
        leaf.itemsize
        * math.prod(n for n, step in zip(leaf.shape, leaf.stride(), strict=True) if step)
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor)
    )


def costs(runner: Runner, device: str, products: float, copies: float) -> Profile:
    """Of one step of a fresh `runner`, at the given rates of a large product and a large copy."""
    with Counter() as counter:  # the first, which also sets everything up
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
    """Of an operator that is not part of another, with all that it calls; on a GPU also of what
    launches kernels by itself, though nobody knows how much those move."""
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
