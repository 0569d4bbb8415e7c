"""Ticks of an axis: names, even steps, or powers of ten, as many as have room."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from steepen.studies.answer import Axis
from steepen.utils.formatting import pretty_exponents


def set_ticks(
    axis: Any, described: Axis, limits: tuple[float, float], inches: float, *, whole: bool, mathtext: bool
) -> None:
    """Named, linear or log ticks; a log axis over less than a factor of six has evenly spaced numbers."""
    from matplotlib.ticker import (
        FixedLocator,
        FuncFormatter,
        LogLocator,
        MaxNLocator,
        NullFormatter,
        NullLocator,
        ScalarFormatter,
    )

    low, high = limits
    if described.names:
        axis.set_major_locator(FixedLocator(range(len(described.names))))
        longest = max(map(len, described.names))
        crowded = axis.axis_name == "x" and longest * len(described.names) > 16 * inches
        turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
        axis.set_ticklabels(described.names, parse_math=False, **turned)
        axis.set_minor_locator(NullLocator())
        axis.set_tick_params(length=0, pad=2)
        return
    ratio = high / low if described.scale == "log" and low > 0 else math.inf
    if described.scale == "log" and ratio >= 6:
        powers = high >= 1e4 or low < 1e-4
        # Inches of a label: 10¹⁸, and 2×10¹⁸ or 0.02.
        short, long = (0.3, 0.3) if axis.axis_name == "y" else (0.33, 0.55) if powers else (0.3, 0.3)
        most = [max(2, int(0.8 * inches / room)) for room in (short, long)]
        axis.set_major_locator(FixedLocator(log_ticks(low, high, *most)))
        axis.set_minor_locator(LogLocator(subs=range(2, 10), numticks=12))

        def label(value: float, _: int) -> str:
            return log_tick(value, mathtext)

        axis.set_major_formatter(FuncFormatter(label))
    else:
        most = 6 if inches > 1.9 or axis.axis_name == "y" else 4
        axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10], integer=whole))
        axis.set_minor_locator(NullLocator())
        plain = ScalarFormatter(useOffset=False, useMathText=mathtext)
        plain.set_powerlimits((-3, 5))
        axis.set_major_formatter(plain)
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(pad=2)


def log_ticks(low: float, high: float, most_tens: int, most: int) -> list[float]:
    """Round values of a log axis: powers of ten, or 1-2-5 or 1-3, as many as have room."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))

    def inside(digits: Iterable[int], step: int = 1) -> list[float]:
        values = [digit * 10.0**power for power in range(first, last + 1, step) for digit in digits]
        return [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]

    tens = inside((1,))
    if len(tens) < 3:
        for digits in ((1, 2, 5), (1, 3), (2, 6), (1, 5), (1, 2)):
            values = inside(digits)
            if 2 <= len(values) <= most:
                return values
    step = 1
    while len(tens) > most_tens:
        step += 1
        tens = inside((1,), step)
    return tens if len(tens) > 1 else inside((1, 3))


def log_tick(value: float, mathtext: bool = True) -> str:
    """A tick of a log axis, 0.02, 500, 10¹⁸ or 2×10⁻⁵: the powers in mathtext or in Unicode."""
    digits, _, power = f"{value:e}".partition("e")
    if not mathtext or -5 < int(power) < 4:
        return pretty_exponents(f"{value:g}")
    factor = "" if float(digits) == 1 else rf"{float(digits):g}\times "
    return f"${factor}10^{{{int(power)}}}$"


def are_whole(values: Iterable[float]) -> bool:
    """Whether all values (there is one) are whole numbers: depths, passes, epochs."""
    found = list(values)
    return bool(found) and all(math.isfinite(value) and value == round(value) for value in found)
