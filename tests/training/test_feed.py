"""Batches on the device: the same tokens from every source."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanolm.text.tokens import Batches
from nanolm.training.feed import DeviceSource, PrefetchSource, Source, source


@pytest.mark.parametrize("kind", [np.uint16, np.uint32])
def test_every_way_brings_the_same_tokens(kind: Any, tmp_path: Path) -> None:
    high = np.iinfo(kind).max  # does not fit into torch's signed integer of that size
    np.arange(high - 999, high + 1, dtype=np.int64).astype(kind).tofile(tmp_path / "tokens")
    tokens = np.asarray(np.memmap(tmp_path / "tokens", dtype=kind, mode="r"))
    batches = Batches(tokens, context=8, batch=3, seed=1)
    ways = [Source(batches), DeviceSource(batches, "cpu")]
    if torch.cuda.is_available():
        ways.append(PrefetchSource(batches))
    for index in (0, 1, 2, 7, 3):  # a run may roll back
        wanted = torch.from_numpy(batches[index].astype(np.int64))
        for way in ways:
            assert torch.equal(way.ids(way.batch(index)), wanted), way


def test_reading_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    batches = Batches(np.arange(1000, dtype=np.uint16), context=8, batch=3, seed=1)

    def read(self: PrefetchSource, index: int) -> torch.Tensor:
        asked.append(index)
        return Source.batch(self, index)  # without a GPU nothing can be pinned

    monkeypatch.setattr(PrefetchSource, "pinned", read)
    feed = PrefetchSource(batches)
    for index in range(5):
        assert torch.equal(feed.batch(index), Source(batches).batch(index))
    feed.readers.shutdown()
    assert sorted(asked) == list(range(len(asked)))  # no duplicates
    assert len(asked) >= 20


def test_a_cpu_reads_as_it_goes() -> None:
    batches = Batches(np.arange(1000, dtype=np.uint16), context=8, batch=3, seed=1)
    assert isinstance(source(batches, "cpu"), Source)
