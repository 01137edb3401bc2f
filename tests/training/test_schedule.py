from itertools import pairwise

import pytest

from nanolm.training.schedule import DECAY, WARM_UP, lr_factor


def test_the_shape() -> None:
    assert 0 < lr_factor(0) < 0.1
    assert lr_factor(WARM_UP / 2) == pytest.approx(0.5, abs=0.05)
    assert lr_factor(WARM_UP) == lr_factor(0.3) == lr_factor(1 - DECAY) == 1
    assert lr_factor(1 - DECAY / 2) == pytest.approx(0.5)
    assert lr_factor(1) == lr_factor(1.1) == 0


def test_it_rises_then_falls_without_jumps() -> None:
    rates = [lr_factor(n / 10_000) for n in range(10_001)]
    assert max(abs(a - b) for a, b in pairwise(rates)) < 0.01
