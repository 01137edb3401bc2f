"""Feeds batches of tokens to the device without making it wait.

    >>> feed = source(batches, "cuda")
    >>> feed.ids(feed.batch(0).to("cuda"))  # (batch, context + 1), on the device

If the whole text fits on the GPU beside the model, it is kept there, and a batch is just the start
offsets of its windows. Otherwise, threads prefetch batches from disk.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from nanolm.text.tokens import Batches

MAX_MEMORY_SHARE = 0.25  # of the free GPU memory that a text may use
PREFETCH_BATCHES = 16
READER_THREADS = 8  # a disk serves several reads at once
COPY_TOKENS = 1 << 24  # at a time


class Source:
    """Batches from disk or main memory."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.signed = np.dtype(f"i{batches.tokens.dtype.itemsize}")  # better supported by torch
        self.mask = np.iinfo(batches.tokens.dtype).max

    def batch(self, index: int) -> Tensor:
        """The data to copy to the device."""
        return torch.from_numpy(self.batches[index].view(self.signed))

    def ids(self, batch: Tensor) -> Tensor:
        """The windows, each with its next token: (batch, context + 1)."""
        return batch.long() & int(self.mask)


class PrefetchSource(Source):
    """The same, prefetching a few batches."""

    def __init__(self, batches: Batches) -> None:
        super().__init__(batches)
        self.readers = ThreadPoolExecutor(READER_THREADS)
        self.prefetched: dict[int, Future[Tensor]] = {}

    def batch(self, index: int) -> Tensor:
        self.prefetched = {
            number: self.prefetched.get(number) or self.readers.submit(self.pinned, number)
            for number in range(index, index + PREFETCH_BATCHES)
        }
        return self.prefetched[index].result()

    def pinned(self, index: int) -> Tensor:
        return super().batch(index).pin_memory()


class DeviceSource(Source):
    """The whole text in GPU memory."""

    def __init__(self, batches: Batches, device: str) -> None:
        super().__init__(batches)
        tokens = batches.tokens.view(self.signed)
        dtype = torch.from_numpy(np.empty(0, self.signed)).dtype
        self.tokens = torch.empty(len(tokens), dtype=dtype, device=device)
        for first in range(0, len(tokens), COPY_TOKENS):
            part = np.array(tokens[first : first + COPY_TOKENS])
            self.tokens[first : first + len(part)].copy_(torch.from_numpy(part))
        self.window = torch.arange(batches.context + 1, device=device)

    def batch(self, index: int) -> Tensor:
        return torch.from_numpy(self.batches.starts(index).astype(np.int64))  # (batch,)

    def ids(self, batch: Tensor) -> Tensor:
        return super().ids(self.tokens[batch[:, None] + self.window])


def source(batches: Batches, device: str) -> Source:
    if device != "cuda":
        return Source(batches)
    fits = batches.tokens.nbytes < MAX_MEMORY_SHARE * torch.cuda.mem_get_info()[0]
    return DeviceSource(batches, device) if fits else PrefetchSource(batches)
