"""A command, killed at its calls that change the disk, one trial at a time.

    >>> trials = Trials(loaded, folder, clock=False, naive=False)
    >>> points = trials.record("train", "text.txt")       # undisturbed; what it calls, and where
    >>> trials.restore()
    >>> trials.run("train", "text.txt", point=points[7])  # a real SIGKILL, at just that call

A point is a call by its place in the code, with what called that, and how many times it came
there before. It is killed before the call, or after it; what was being written is then cut in half.
In the command this module is what waits for the point: `arm` is called before its `main`.
"""

import atexit
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commands import Loaded

ORDERS = "KILL_POINTS"  # in the environment of a command
CALLERS = 3  # of a call; more would be more points, at the same lines
STEP_SECONDS = 0.05  # of a step, where the clock is ours
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# What Python announces before it does it; here is which argument names what changes.
AUDITED = {"open": 0, "os.rename": 1, "os.remove": 0, "os.rmdir": 0, "os.mkdir": 0, "os.link": 1}
AUDITED |= {"os.symlink": 1, "os.truncate": 0, "os.chmod": 0, "os.utime": 0, "fcntl.flock": 0}
WRITES = ("open", "safetensors")  # that a kill may leave half done


@dataclass(frozen=True)
class Point:
    site: str
    call: str
    number: int  # of those at this site
    after: bool = False


# In the command -----------------------------------------------------------------------------------


class Trap:
    """Writes down every point, or waits for one."""

    def __init__(self, root: str, record: str | None, point: dict[str, Any] | None) -> None:
        self.root = root
        self.record = os.open(record, os.O_WRONLY | os.O_APPEND) if record else None
        self.point = Point(**point) if point else None
        self.seen = Counter[tuple[str, str]]()
        self.lock = threading.RLock()
        self.reached: tuple[str, int] | None = None  # what was being written, its length before

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        which = AUDITED.get(event)
        if which is None or (event == "open" and not arguments[2] & WRITING):
            return
        relative = event in ("os.remove", "os.rmdir", "os.mkdir")  # to an open folder, by rmtree
        adds = event == "open" and bool(arguments[2] & os.O_APPEND)
        self.call(event, arguments[which], arguments[-1] if relative else -1, adds)

    def call(self, call: str, target: Any, folder: int = -1, adds: bool = False) -> None:
        if isinstance(target, int):
            target = os.readlink(f"/proc/self/fd/{target}")
        where = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else os.getcwd()
        path = os.path.join(where, os.fsdecode(target))
        if not path.startswith(self.root):
            return
        site = " < ".join(callers())
        with self.lock:
            self.seen[site, call] += 1
            number = self.seen[site, call]
            if self.record is not None:
                line = json.dumps(asdict(Point(site, call, number)))
                os.write(self.record, f"{line}\n".encode())
            self.tear()
            if self.point and replace(self.point, after=False) == Point(site, call, number):
                if not self.point.after:
                    os.kill(os.getpid(), signal.SIGKILL)
                length = os.path.getsize(path) if adds and os.path.isfile(path) else 0
                self.reached = (path if call in WRITES else "", length)

    def tear(self) -> None:
        """Is the point behind us? Of what was written there, let half be on the disk; and end."""
        if not self.reached:
            return
        (path, before), self.reached = self.reached, None
        if os.path.isfile(path):
            size = os.path.getsize(path)
            os.truncate(path, (size + min(before, size)) // 2)
        os.kill(os.getpid(), signal.SIGKILL)


def callers() -> Iterable[str]:
    """The line of nanolm that makes this call, and those outside of files.py that lead to it."""
    frame, package, count = sys._getframe(2), f"{os.sep}nanolm{os.sep}", 0
    while frame and count < CALLERS:
        name = frame.f_code.co_filename.rpartition(package)[2]
        if name != frame.f_code.co_filename and (name != "files.py" or not count):
            yield f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
            count += 1
        frame = frame.f_back  # type: ignore[assignment]


def arm(orders: str) -> None:
    """Let this process, a command that is about to begin, do as it is told."""
    from safetensors import torch as safetensors

    from nanolm import files
    from nanolm.comparison import step_times
    from nanolm.pairs import task
    from nanolm.planning import tuning
    from nanolm.pretraining import language
    from nanolm.text import store
    from nanolm.training.trainer import Trainer

    order = json.loads(orders)
    language.SAMPLE_TOKENS = 8
    task.MOST_TRANSLATED = 3
    step_times.SEQUENCE_LENGTHS = (8,)  # type: ignore[assignment]
    if order.pop("naive"):
        files.write_atomically = Path.write_text  # type: ignore[assignment]
    if order.pop("clock"):
        now, train_step = [1000.0], Trainer.train_step

        def step(*arguments: Any) -> Any:
            now[0] += STEP_SECONDS
            return train_step(*arguments)

        time.monotonic = lambda: now[0]
        store._seconds_a_byte = lambda *_: None  # no time is measured; one of 0 would not do
        step_times.median_step = lambda trial: STEP_SECONDS
        tuning.step_seconds = lambda ways, *_: [STEP_SECONDS] * len(ways)
        Trainer.train_step = step  # type: ignore[assignment, method-assign]
    if not order["record"] and not order["point"]:
        return
    trap = Trap(**order)
    sys.addaudithook(trap.audit)
    atexit.register(trap.tear)  # it may be its last call
    fsync, serialize = os.fsync, safetensors.serialize_file  # type: ignore[attr-defined]

    def flush(descriptor: Any) -> None:
        trap.call("fsync", descriptor)
        fsync(descriptor)

    def write(tensors: Any, file: Any, *more: Any, **rest: Any) -> None:
        trap.call("safetensors", file)
        serialize(tensors, file, *more, **rest)

    os.fsync, safetensors.serialize_file = flush, write  # type: ignore


# In the tests -------------------------------------------------------------------------------------


class Trials:
    """Commands in one folder, which is put back before each trial: runs know where they are. With
    `clock`, a step takes STEP_SECONDS and all else no time; `naive` ones write files in place."""

    def __init__(self, loaded: "Loaded", folder: Path, clock: bool, naive: bool) -> None:
        self.place, self.before = folder / "place", folder / "before"
        self.how = {"root": str(self.place), "clock": clock, "naive": naive}
        self.log = folder / "points"
        self.work = self.place / "work"
        self.work.mkdir(parents=True)
        from commands import Commands  # which imports this module

        self.commands = Commands(loaded, self.work)

    def run(
        self, *words: object, record: Path | None = None, point: Point | None = None
    ) -> tuple[int, str]:
        """Its exit code, and what it said."""
        order = {"record": record and str(record), "point": point and asdict(point)}
        environment = {ORDERS: json.dumps(self.how | order)}
        environment["NANOLM_CACHE"] = str(self.place / "cache")
        command = self.commands.start(*words, environment=environment)
        return command.wait(), command.said()

    def record(self, *words: object) -> list[Point]:
        """The points of a command, in order; the state before it is kept."""
        shutil.copytree(self.place, self.before, symlinks=True)
        self.log.touch()
        code, said = self.run(*words, record=self.log)
        assert code == 0, said
        return [Point(**json.loads(line)) for line in self.log.read_text().splitlines()]

    def restore(self) -> None:
        shutil.rmtree(self.place)
        shutil.copytree(self.before, self.place, symlinks=True)


def chosen(points: list[Point]) -> list[Point]:
    """The first, a middle and the last of each site; each before the call, and after it."""
    sites: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        sites.setdefault((point.site, point.call), []).append(point)
    some = [
        group[place]
        for group in sites.values()
        for place in sorted({0, len(group) // 2, len(group) - 1})
    ]
    return [replace(point, after=after) for point in some for after in (False, True)]
