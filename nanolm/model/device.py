"""Which device to run on."""

import torch

from nanolm.errors import UsageError


def choose_device(asked: str) -> tuple[str, str]:
    """The device to use and why; one that is asked for and not there is a UsageError."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if asked == "auto":
        if there["cuda"]:
            return "cuda", torch.cuda.get_device_name()
        return ("mps", "an Apple GPU") if there["mps"] else ("cpu", "no GPU found")
    if asked not in ("cpu", *there):
        raise UsageError(f"--device {asked}: there is auto, cpu, cuda, mps")
    if not there.get(asked, True):
        raise UsageError(f"--device {asked}: no such GPU can be used here; try --device cpu")
    return asked, "as asked"
