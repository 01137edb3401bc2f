"""The learning rate schedule: warmup, constant, linear decay to zero.

The constant part can be any length, so a run can be extended from just before its decay.
"""

WARM_UP = 0.03  # of the run
DECAY = 0.4  # of the run


def lr_factor(progress: float) -> float:
    """The multiplier of the peak learning rate, `progress` (0 to 1) through the run."""
    if progress < WARM_UP:
        return (progress + 1e-3) / (WARM_UP + 1e-3)  # not zero, or the first step would be wasted
    return min(1.0, max(0.0, 1 - progress) / DECAY)
