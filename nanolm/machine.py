"""Cores, memory and folders that this process may use."""

import contextlib
import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

from nanolm.errors import DataError

KEPT_BYTES = 1 << 30  # of freed memory that training on a CPU retains
PROBE_SECONDS = 0.02  # several time slices of the scheduler
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # from malloc.h


def available_threads() -> int:
    """OMP_NUM_THREADS if set, else this process's share of the available cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return max(1, available_cores() // local_processes())


def available_cores() -> int:
    affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1


def is_busy() -> bool:
    """Whether other processes compete for the cores, so that work exceeds its CPU time."""
    start, cpu = time.monotonic(), time.thread_time()
    while time.thread_time() < cpu + PROBE_SECONDS:
        pass
    return time.monotonic() - start > 1.4 * PROBE_SECONDS


def available_memory() -> int:
    """Bytes of main memory that can be used without swapping, approximately."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        known = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2]
        return 1024 * int(known.split(maxsplit=1)[0])
    with contextlib.suppress(OSError, ValueError, AttributeError):  # not on every system
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return 1 << 30


def module_command(module: str, *arguments: str) -> dict[str, Any]:
    """Arguments of `subprocess.Popen` that run a module of this copy of nanolm, with nothing
    imported from the current folder."""
    paths = filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return {"args": [sys.executable, "-P", "-m", module, *arguments], "env": environment}


def process() -> tuple[int | None, int]:
    """The rank and world size under a launcher such as torchrun, else None and 1."""
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if not (rank.isdigit() and size.isdigit() and "MASTER_ADDR" in os.environ):
        return None, 1
    return int(rank), int(size)


def local_processes() -> int:
    """The number of launched processes on this machine."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(count) if process()[0] is not None and count.isdigit() and int(count) else 1


def keep_memory() -> None:
    """Keep freed memory in this process: the next training step needs it again, and getting a page
    from the system costs more CPU time than computing with it."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # only the GNU library has this
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 1 << 25)  # the maximum
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_ARENA_MAX, 1)  # arenas of single threads are always trimmed


def give_back_memory() -> None:
    """Return freed memory to the system."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # only the GNU library has this
        ctypes.CDLL(None).malloc_trim(0)


def cache_folder() -> Path:
    """The folder of downloads and encoded texts: $NANOLM_CACHE, or nanolm in the user's cache."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("NANOLM_CACHE") or users / "nanolm")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot create the cache folder {folder} ({error.strerror})"
        raise DataError(f"{why}; set NANOLM_CACHE to another folder") from None
    return folder
