"""What this machine lets a process use."""

import contextlib
import ctypes
import os
import time
from pathlib import Path

from nanolm.errors import DataError

KEPT_BYTES = 1 << 30  # that training on a CPU does not give back
PROBE_SECONDS = 0.02  # seconds; several of the scheduler's turns
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # as malloc.h has them


def available_threads() -> int:
    """OMP_NUM_THREADS if it is set, else this process's share of the cores it may run on."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1
    return max(1, cores // local_processes())


def is_busy() -> bool:
    """Whether other processes compete for the cores: then work takes longer than its CPU time."""
    start, cpu = time.monotonic(), time.thread_time()
    while time.thread_time() < cpu + PROBE_SECONDS:
        pass
    return time.monotonic() - start > 1.4 * PROBE_SECONDS


def process() -> tuple[int | None, int]:
    """Which of how many processes this is, where something like torchrun started it; else None."""
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if not (rank.isdigit() and size.isdigit() and "MASTER_ADDR" in os.environ):
        return None, 1
    return int(rank), int(size)


def local_processes() -> int:
    """How many of them are on this machine."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(count) if process()[0] is not None and count.isdigit() and int(count) else 1


def keep_memory() -> None:
    """Let this process keep what it frees: it is asked for again in the next step of training, and
    every page that comes anew from the system costs a CPU more time than computing with it."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # only the GNU library has this
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 1 << 25)  # the most that it takes
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_ARENA_MAX, 1)  # those of single threads are always given back


def give_back_memory() -> None:
    """Let the system have what this process has freed."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # only the GNU library has this
        ctypes.CDLL(None).malloc_trim(0)


def cache_folder() -> Path:
    """Where downloads and encoded texts are kept: $NANOLM_CACHE, or nanolm in the user's cache."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("NANOLM_CACHE") or users / "nanolm")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{folder} cannot be made ({error.strerror}); name a folder in NANOLM_CACHE"
        raise DataError(f"no place for prepared text: {why}") from None
    return folder
