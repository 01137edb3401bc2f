"""What this machine lets a process use."""

import os
from pathlib import Path

from nanolm.errors import DataError


def available_threads() -> int:
    """OMP_NUM_THREADS if it is set, else the cores this process may run on."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cache_folder() -> Path:
    """Where downloads and encoded texts are kept: $NANOLM_CACHE, or nanolm in the user's cache."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("NANOLM_CACHE") or users / "nanolm")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"no place for prepared text: {folder} cannot be made ({error.strerror}); "
            "name a folder in the environment variable NANOLM_CACHE"
        ) from None
    return folder
