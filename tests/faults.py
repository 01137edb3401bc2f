"""Faults, made on purpose, each at a moment of one's choosing.

>>> disk_fails(patch, 3, Killed)            # the third time that something is to last
>>> killed_at(3, lambda: extend(run, more)) # the third change of the disk, by a real SIGKILL
>>> spoil(patch, range(20, 30))             # no finite loss in these steps
>>> short_of_memory(patch, most=2)          # for more than two sequences at a time
"""

import contextlib
import errno
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanolm import files
from nanolm.training.step import Step
from nanolm.training.task import Task
from nanolm.training.trainer import Trainer

FULL = OSError(errno.ENOSPC, "No space left on device")


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, nothing is cleaned up."""


# The disk -----------------------------------------------------------------------------------------


def disk_fails(
    patch: pytest.MonkeyPatch, count: int, error: Callable[[], BaseException], lasting: bool = True
) -> None:
    """Let the `count`-th call that touches the disk for good fail; and all after it, if that is
    to be `lasting`."""
    calls = itertools.count(1)

    def wrap(function: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object, **rest: object) -> object:
            number = next(calls)
            if number == count or (lasting and number > count):
                raise error()
            return function(*arguments, **rest)

        return wrapped

    for name in ("fsync", "rename", "replace", "open"):
        patch.setattr(os, name, wrap(getattr(os, name)))


# What changes names, and opening to write; `fsync` changes nothing that another process sees.
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.truncate")
WRITING = os.O_WRONLY | os.O_RDWR


def killed_at(count: int, action: Callable[[], object]) -> bool:
    """Whether `action`, in a process of its own, was killed before its `count`-th change of the
    disk; it makes no more of them, if not."""
    pid = os.fork()
    if pid == 0:
        calls = itertools.count(1)

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            change = event in CHANGES or (
                event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING
            )
            if change and next(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        try:
            action()
            os._exit(0)
        except BaseException as error:
            sys.__stderr__.write(f"{error!r}\n")  # type: ignore[union-attr]
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def disk_holds(patch: pytest.MonkeyPatch, room: int, commits: int) -> None:
    """Let the disk be full after `room` bytes of the commit that comes after so many."""
    commit, done = files.commit, itertools.count()

    def full(parent: Path, name: str, write: Callable[[Path], None], size: int = 0) -> Path:
        def cut(folder: Path) -> None:
            write(folder)
            left = room
            for file in sorted(folder.iterdir()):
                os.truncate(file, min(left, file.stat().st_size))
                left -= file.stat().st_size
            raise FULL

        return commit(parent, name, write if next(done) < commits else cut, size)

    patch.setattr(files, "commit", full)


def flip(file: Path, dice: random.Random) -> None:
    """One bit is not what it was."""
    contents = bytearray(file.read_bytes())
    contents[dice.randrange(len(contents))] ^= 1 << dice.randrange(8)
    file.write_bytes(contents)


def truncate(file: Path, dice: random.Random) -> None:
    os.truncate(file, dice.randrange(file.stat().st_size))


@contextlib.contextmanager
def damaged(file: Path, damage: Callable[[Path, random.Random], None], dice: random.Random) -> Any:
    """Meanwhile; then it is whole again."""
    whole = file.read_bytes()
    damage(file, dice)
    yield
    file.write_bytes(whole)


# The numbers and the memory -----------------------------------------------------------------------


def spoil(
    patch: pytest.MonkeyPatch, steps: Container[int], factor: float = torch.nan
) -> list[tuple[int, bool]]:
    """Let the loss of these steps (the batches of that number) not be finite. In the list comes
    which it were, and whether all weights and moments stayed what they were."""
    train_step, spoiled = Trainer.train_step, []

    def everything(trainer: Trainer) -> list[Tensor]:
        tensors = [
            *trainer.task.model.parameters(),
            *trainer.step.optimizers.state_tensors().values(),
        ]
        return [tensor.detach().clone() for tensor in tensors]

    def train(trainer: Trainer, lr: float) -> Tensor:
        index = trainer.state.step + trainer.state.data_offset
        if index not in steps:
            return train_step(trainer, lr)
        before, loss = everything(trainer), trainer.step.loss

        def bad(*batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            found, others = loss(*batch)
            return found * torch.tensor(factor, device=found.device), others

        trainer.step.loss = bad
        numbers = train_step(trainer, lr)
        trainer.step.loss = loss
        same = all(map(torch.equal, before, everything(trainer)))
        spoiled.append((index, same))
        return numbers

    patch.setattr(Trainer, "train_step", train)
    return spoiled


def short_of_memory(patch: pytest.MonkeyPatch, most: int) -> None:
    """Let more than `most` sequences at a time be too many."""
    forward = Step.forward

    def short(step: Step, part: tuple[Tensor, ...], share: float) -> tuple[Tensor, Tensor]:
        if len(part[0]) > most:
            raise torch.OutOfMemoryError("out of memory")
        return forward(step, part, share)

    patch.setattr(Step, "forward", short)


# The process --------------------------------------------------------------------------------------


def before_step(patch: pytest.MonkeyPatch, step: int, action: Callable[[], object]) -> None:
    """Do something when `step` steps are done, and the next would come."""
    train_step = Trainer.train_step

    def train(trainer: Trainer, lr: float) -> Tensor:
        if trainer.state.step == step:
            action()
        return train_step(trainer, lr)

    patch.setattr(Trainer, "train_step", train)


def before_evaluation(
    patch: pytest.MonkeyPatch, task: type[Task], number: int, action: Callable[[], object]
) -> None:
    """Do something when the `number`-th look at held-out data would come."""
    evaluate, done = task.evaluate, itertools.count(1)

    def look(*arguments: Any) -> Any:
        if next(done) == number:
            action()
        return evaluate(*arguments)

    patch.setattr(task, "evaluate", look)


def kill() -> None:
    raise Killed


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def steps_of(run: Path) -> Iterator[int]:
    """The steps that metrics.jsonl has, as far as it is written."""
    metrics = run / "metrics.jsonl"
    for line in metrics.read_text().splitlines(keepends=True) if metrics.exists() else ():
        if line.endswith("\n"):
            yield json.loads(line)["step"]


def wait_for_step(run: Path, step: int) -> None:
    """Until a line of metrics says that `step` is done."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any(found >= step for found in steps_of(run)):
            return
        time.sleep(0.005)
    pytest.fail(f"no step {step} in {run}")


# A writer as others have it, for comparison -------------------------------------------------------

SAVED = 4_000_000  # bytes
WRITERS = {
    "naive": "import sys\nwhile True: open(sys.argv[1] + '/weights', 'wb').write(bytes(SAVED))",
    "ours": (
        "import sys; from pathlib import Path; from nanolm.files import commit\n"
        "write = lambda folder: (folder / 'weights').write_bytes(bytes(SAVED))\n"
        "for step in range(10**6): commit(Path(sys.argv[1]), f'step-{step:08}', write)"
    ),
}


def kill_writer(name: str, folder: Path, seconds: float) -> None:
    """Let one of them write again and again, and end it at some moment after its first time."""
    code = WRITERS[name].replace("SAVED", str(SAVED))
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)])
    while not any(entry.name[0] != "." for entry in folder.iterdir()):
        time.sleep(0.001)
    time.sleep(seconds)
    process.kill()
    process.wait()
