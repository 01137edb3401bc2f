import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanolm.text.tokens import Batches, permuted


@given(st.integers(1, 500), st.integers(0, 2**64 - 1))
def test_a_permutation_hits_everything_once(size: int, key: int) -> None:
    positions = np.arange(size, dtype=np.uint64)
    order = permuted(positions, size, np.full_like(positions, key))
    assert sorted(order.tolist()) == list(range(size))


@settings(deadline=None)
@given(st.integers(2, 400), st.integers(1, 40), st.integers(0, 9))
def test_an_epoch_visits_every_window_once(length: int, context: int, seed: int) -> None:
    context = min(context, length - 1)
    batches = Batches(np.arange(length, dtype=np.uint16), context, batch=1, seed=seed)
    starts = sorted(int(batches[n][0, 0]) for n in range(batches.windows))
    gaps = set(np.diff(starts).tolist())
    assert gaps <= {context}
    assert starts[0] < context
    assert starts[-1] + context < length


def test_a_batch_depends_on_seed_and_index_alone() -> None:
    tokens = np.arange(5000, dtype=np.uint16)
    first = Batches(tokens, context=8, batch=4, seed=1)
    ids = first[7]
    assert ids.shape == (4, 9)
    assert (np.diff(ids.astype(int)) == 1).all()
    assert (first.starts(7) == ids[:, 0]).all()
    assert (Batches(tokens, 8, 4, seed=1)[7] == ids).all()
    assert (Batches(tokens, 8, 4, seed=2)[7] != ids).any()
    assert (first[8] != ids).any()


def test_epochs_differ_in_order_and_offset() -> None:
    batches = Batches(np.arange(1000, dtype=np.uint16), context=10, batch=1, seed=0)
    epochs = [
        [int(batches[epoch * batches.windows + n][0, 0]) for n in range(batches.windows)]
        for epoch in range(6)
    ]
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert len({epoch[0] % 10 for epoch in epochs}) > 1


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_the_same_windows_in_the_same_order_whatever_the_batch(batch: int) -> None:
    batches = Batches(np.arange(1000, dtype=np.uint16), context=7, batch=batch, seed=5)
    rows = [row[0] for n in range(6 // batch) for row in batches[n]]
    singles = Batches(np.arange(1000, dtype=np.uint16), context=7, batch=1, seed=5)
    assert rows == [singles[n][0, 0] for n in range(6)]
