"""Axes with round ticks, for images and the terminal.

>>> [label for _, label in linear_axis([0.51, 0.93], ticks=5).ticks]
['0.5', '0.6', '0.7', '0.8', '0.9', '1.0']
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

MAX_VALUE = 1e100  # no metric is larger, and its square is still a finite float
FROM_ZERO = 0.5  # a y axis begins at zero if at most this share of it is empty
BREAK = 18  # pixels at the bottom of a broken axis, below its lowest value


@dataclass(frozen=True)
class Axis:
    low: float
    high: float
    ticks: Sequence[tuple[float, str]] = ()
    logarithmic: bool = False
    broken: bool = False  # drawn with a break, since it does not include zero

    def fraction(self, value: float) -> float:
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class PlotArea:
    left: float
    top: float
    width: float
    height: float
    x_axis: Axis
    y_axis: Axis

    def x(self, value: float) -> float:
        return self.left + self.width * self.x_axis.fraction(value)

    def y(self, value: float) -> float:
        height = self.height - BREAK * self.y_axis.broken
        return self.top + height * (1 - self.y_axis.fraction(value))


def value_axis(values: Sequence[float], ticks: int) -> Axis:
    """A y axis that begins at zero; if most of it would be empty, one with a break instead."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    axis = linear_axis([0.0, *values] if 0 < low <= FROM_ZERO * high else values, ticks)
    return replace(axis, broken=axis.low > 0 or axis.high < 0)


def linear_axis(values: Sequence[float], ticks: int, extend: bool = True) -> Axis:
    """An axis with about this many ticks; with `extend`, it begins and ends at a tick."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1 / MAX_VALUE):  # all equal
        margin = abs(low) / 10 if abs(low) > 1 / MAX_VALUE else 1.0
        low, high = low - margin, high + margin
    step = round_step((high - low) / ticks)
    if not extend and all(value == int(value) for value in values):
        step = max(1.0, step)  # no half steps
    if not extend and 0 < low <= min(step, (high - low) / 4):
        low = 0.0  # start at zero
    # 1 / 0.1 may be a little more than 10, and the axis should not extend to 1.1.
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    reach = step if extend else step / 4
    low = first * step if low - first * step <= reach else low
    high = last * step if last * step - high <= reach else high
    top = max(abs(low), abs(high))
    places = [number * step for number in range(first, last + 1) if low <= number * step <= high]
    return Axis(low, high, [(place, tick_label(place, step, top)) for place in places])


def log_axis(values: Sequence[float]) -> Axis:
    """From the lowest value to the highest, with ticks at 1, 2 and 5 times powers of ten. If there
    are none in this range, both ends have ticks."""
    low, high = min(values, default=1.0), max(values, default=10.0)
    low, high = (low / 2, high * 2) if low == high else (low, high)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [times * 10.0**power for power in powers for times in (1, 2, 5)]
    shown = [(tick, f"{tick:,g}") for tick in ticks if low <= tick <= high]
    return Axis(low, high, shown or [(end, f"{end:,.3g}") for end in (low, high)], True)


def round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, about as large as `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= rough * 0.8)


def tick_label(value: float, step: float, top: float) -> str:
    """A number as shown on an axis up to `top`."""
    if not value:
        return "0"
    if top >= 1e9 or step < 1e-4:
        power = math.floor(math.log10(top))
        return f"{value / 10.0**power:.12g}e{power}"
    if top >= 1e6 and step >= 1e4:
        return f"{value / 1e6:g}M"
    if 1e4 <= top < 1e6 and step >= 100:
        return f"{value / 1e3:g}k"
    return f"{value:,.{max(0, -math.floor(math.log10(step * 1.001)))}f}"


def epoch_ticks(steps: Axis, steps_per_epoch: float | None) -> list[tuple[float, str]]:
    """Round numbers of epochs, positioned on the axis of steps."""
    if not steps_per_epoch:
        return []
    low, high = steps.low / steps_per_epoch, steps.high / steps_per_epoch
    step = round_step((high - low) / 6)
    near = 0.02 * (high - low) / step  # the last epoch may end within the last step
    numbers = range(math.ceil(low / step - near), math.floor(high / step + near) + 1)
    places = [max(steps.low, min(steps.high, n * step * steps_per_epoch)) for n in numbers]
    return [(x, tick_label(n * step, step, high)) for x, n in zip(places, numbers, strict=True)]
