"""Does training wait for data? Steps from a large token file, compared with tokens in memory.

    python benchmarks/feeding.py             # 10 GB
    python benchmarks/feeding.py --gigabytes 1

The small model has the shortest steps, so it is the hardest to keep fed. Its tokens come from
a file that is not cached at the start. They are prefetched by threads or, on a GPU, copied there
before the first step. These runs alternate with one whose tokens are already in memory.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import save
from torch import Tensor
from training import ROWS, SHAPES

from nanolm.bench.turns import medians
from nanolm.model.config import configure
from nanolm.planning.trial import LR, SpeedTrial
from nanolm.text.tokens import Batches, Store
from nanolm.training.feed import DeviceSource, PrefetchSource, Source
from nanolm.training.loss import next_token_loss

BLOCK = 1 << 25  # tokens written at a time


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--gigabytes", type=float, default=10.0)
    arguments.add_argument("--seconds", type=float, default=8.0, help="time for each variant")
    arguments.add_argument("--folder", help="folder on the disk to test")
    asked = arguments.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = "small" if device == "cuda" else "cpu"
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        file = Path(folder) / "tokens"
        write(file, int(asked.gigabytes * 5e8), SHAPES[name]["vocab_size"])
        on_disk = np.asarray(np.memmap(file, dtype=np.uint16, mode="r"))
        few = np.array(on_disk[: 1 << 20])
        rows: list[dict[str, Any]] = []
        runners = {"a few in memory": Feeding(name, device, few, DeviceSource)}
        if device == "cpu":
            runners = {"a few in memory": Feeding(name, device, few, Source)}
            runners["from disk"] = Feeding(name, device, on_disk, Source)
        else:
            runners["prefetched from disk"] = Feeding(name, device, on_disk, PrefetchSource)
            start = time.perf_counter()
            runners["all on the GPU"] = Feeding(name, device, on_disk, DeviceSource)
            rows.append({"what": "copying to the GPU", "seconds": time.perf_counter() - start})
        forget(file)
        taken = medians(runners, asked.seconds)
        for what, each in taken.items():
            slower = each / taken["a few in memory"] - 1
            rows.append(
                {
                    "what": what,
                    "shape": name,
                    "gigabytes": runners[what].size / 1e9,
                    "milliseconds": round(1000 * each, 3),
                    "slower": round(slower, 4),
                }
            )
        save("feeding", rows)


def write(file: Path, tokens: int, vocabulary: int) -> None:
    block = np.random.default_rng(1).integers(vocabulary, size=BLOCK, dtype=np.uint16)
    with file.open("wb") as stream:
        for first in range(0, tokens, BLOCK):
            stream.write(np.roll(block, first // BLOCK)[: tokens - first].tobytes())
        stream.flush()
        os.fsync(stream.fileno())
    forget(file)


def forget(file: Path) -> None:
    """Drop the file from the page cache."""
    with file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Feeding(SpeedTrial):
    """Training steps on batches from a token store."""

    def __init__(self, name: str, device: str, tokens: Store, kind: type[Source]) -> None:
        super().__init__(configure("modern", **SHAPES[name]), ROWS[name], device)
        batches = Batches(tokens, SHAPES[name]["context"], ROWS[name], seed=1)
        rest = (device,) if kind is DeviceSource else ()
        self.source = kind(batches, *rest)
        self.size = tokens.nbytes
        self.update.discard_graphs()

    def loss(self, found: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        ids = self.source.ids(found)
        x = self.model.hidden_states(ids[:, :-1])
        return next_token_loss(self.model.head, x, ids[:, 1:]), {}

    def step(self) -> None:
        self.update((self.source.batch(self.count),), LR)
        self.count += 1


if __name__ == "__main__":
    main()
