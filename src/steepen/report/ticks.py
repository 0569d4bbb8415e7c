"""Ticks of an axis: names, even steps, or powers of ten, as many as have room."""

from __future__ import annotations

import math
from typing import Any

from steepen.results.panel import Axis
from steepen.utils.formatting import pretty_exponents


def set_ticks(axis: Any, described: Axis, limits: tuple[float, float], inches: float, *, whole: bool) -> None:
    """Named, linear or log ticks; a log axis over less than a factor of six has evenly spaced numbers."""
    from matplotlib import ticker

    low, high = limits
    narrow = inches <= 1.9 and axis.axis_name == "x"
    axis.set_minor_formatter(ticker.NullFormatter())
    axis.set_tick_params(pad=2)
    if described.names:
        crowded = (
            axis.axis_name == "x" and max(map(len, described.names)) * len(described.names) > 16 * inches
        )
        turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
        axis.set_ticks(range(len(described.names)), described.names, parse_math=False, **turned)
        axis.set_tick_params(length=0)
    elif described.scale == "log" and high >= 6 * low:
        large = high >= 1e4 or low < 1e-4  # labels of powers are wide: 2×10¹⁸
        axis.set_major_locator(ticker.FixedLocator(_log_ticks(low, high, large, most=8 if narrow else 10)))
        axis.set_minor_locator(ticker.LogLocator(subs=range(2, 10), numticks=12))
        axis.set_major_formatter(ticker.FuncFormatter(_power_of_ten))
    else:
        large = high >= 1e5
        few = 3 if large else 4 if narrow else 6
        axis.set_major_locator(ticker.MaxNLocator(few, steps=[1, 2, 2.5, 5, 10], integer=whole))
        axis.set_minor_locator(ticker.NullLocator())
        axis.set_major_formatter(
            ticker.FuncFormatter(_power_of_ten) if large else ticker.ScalarFormatter(useOffset=False)
        )


def _log_ticks(low: float, high: float, large: bool, *, most: int) -> list[float]:
    """Powers of ten inside the range where there are three, else also 3, or 2 and 5, times them; < `most`."""
    powers = [10.0**k for k in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    found: list[float] = []
    for factors in ((1.0,), (1.0, 3.0) if large else (1.0, 2.0, 5.0), (1.0, 2.0, 5.0)):
        found = [factor * power for power in powers for factor in factors if low <= factor * power <= high]
        if len(found) >= (3 if factors == (1.0,) else 2):
            break
    return found[:: 1 + len(found) // most]


def _power_of_ten(value: float, _: int) -> str:
    """A tick of a log axis: 0.02, 500, 10¹⁸ or 2×10⁻⁵."""
    return pretty_exponents(f"{value:g}")
