from itertools import pairwise

import pytest

from nanolm.training.schedule import DECAY, WARM_UP, rate


def test_the_shape() -> None:
    assert 0 < rate(0) < 0.1
    assert rate(WARM_UP / 2) == pytest.approx(0.5, abs=0.05)
    assert rate(WARM_UP) == rate(0.3) == rate(1 - DECAY) == 1
    assert rate(1 - DECAY / 2) == pytest.approx(0.5)
    assert rate(1) == rate(1.1) == 0


def test_it_rises_then_falls_without_jumps() -> None:
    rates = [rate(n / 10_000) for n in range(10_001)]
    assert max(abs(a - b) for a, b in pairwise(rates)) < 0.01
