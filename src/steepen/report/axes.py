"""Axis ranges and ticks, shared by the printed figures and the page."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from steepen.studies.answer import Axis
from steepen.utils.formatting import typographic_minus

MAX_TICKS = 6  # labelled ticks at most, where there is a choice


@dataclass(frozen=True)
class Tick:
    """A tick; `power` is a raised exponent after the text, for 10⁻³ and 2×10¹⁸."""

    value: float
    text: str
    power: int | None = None


@dataclass(frozen=True)
class AxisRange:
    """An axis with its limits."""

    axis: Axis
    low: float
    high: float

    @property
    def log(self) -> bool:
        """Whether the axis is logarithmic."""
        return self.axis.scale == "log"

    def position(self, value: float) -> float:
        """Where a value lies: 0 at the axis's beginning, 1 at its end."""
        transform = math.log if self.log else float
        fraction = (transform(value) - transform(self.low)) / (transform(self.high) - transform(self.low))
        return 1 - fraction if self.axis.reverse else fraction

    def can_show(self, value: float) -> bool:
        """Whether a value can be drawn on this scale, inside the limits or not."""
        return _drawable(value, self.log)


def _drawable(value: float, log: bool) -> bool:
    """Finite, positive where it must be, and not so extreme that a margin would overflow."""
    return abs(value) < 1e250 and (value > 1e-250 or not log)


def axis_range(
    axis: Axis, values: Iterable[float], soft: Iterable[float] = (), pad: float = 0.05
) -> AxisRange:
    """Limits that include all `values`, and `soft` ones (band edges) up to half the range beyond."""
    good = [v for v in values if _drawable(v, axis.scale == "log")]
    extra = [v for v in soft if _drawable(v, axis.scale == "log")]
    if not good:
        good = extra or [1.0]
    transform, back = (math.log, math.exp) if axis.scale == "log" else (float, float)
    low, high = transform(min(good)), transform(max(good))
    margin = 0.5 * (high - low)
    if extra:
        low = (
            max(min(low, transform(min(extra))), low - margin) if margin else min(low, transform(min(extra)))
        )
        high = (
            min(max(high, transform(max(extra))), high + margin)
            if margin
            else max(high, transform(max(extra)))
        )
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):
        around = math.log(2) if axis.scale == "log" else (0.5 * abs(low) or 1.0)
        low, high = low - around, high + around
    edge = pad * (high - low)
    return AxisRange(axis, back(low - edge), back(high + edge))


def ticks(limits: AxisRange, wanted: int = MAX_TICKS) -> tuple[list[Tick], list[float]]:
    """Labelled ticks, and the places of the unlabelled small ones."""
    if limits.axis.names:
        named = [Tick(float(i), name) for i, name in enumerate(limits.axis.names)]
        return [tick for tick in named if limits.low <= tick.value <= limits.high], []
    if not limits.log:
        return _even(limits, wanted), []
    decades = math.log10(limits.high / limits.low)
    first, last = math.ceil(math.log10(limits.low) - 1e-9), math.floor(math.log10(limits.high) + 1e-9)
    if last - first >= 1 and decades >= 1.3:
        step = math.ceil((last - first + 1) / wanted)
        big = [power for power in range(first, last + 1) if power % step == 0]
        small = _between(limits) if decades <= 7 else [10.0**p for p in range(first, last + 1)]
        labelled = [_power_tick(1, power) for power in big]
        shown = {tick.value for tick in labelled}
        return labelled, [v for v in small if v not in shown]
    for digits in ((1, 2, 5), (1, 2, 3, 4, 6, 8), (1, 1.5, 2, 3, 4, 5, 6, 7, 8)):
        found = [
            (digit, power)
            for power in range(first - 1, last + 1)
            for digit in digits
            if limits.low <= digit * 10.0**power <= limits.high
        ]
        if 3 <= len(found) <= wanted + 1:
            return [_power_tick(digit, power) for digit, power in found], _between(limits)
    return _even(limits, wanted), []


def _between(limits: AxisRange) -> list[float]:
    powers = range(math.floor(math.log10(limits.low)), math.ceil(math.log10(limits.high)) + 1)
    return [d * 10.0**p for p in powers for d in range(1, 10) if limits.low <= d * 10.0**p <= limits.high]


def _power_tick(digit: float, power: int) -> Tick:
    value = float(f"{digit}e{power}")
    if -3 <= power <= 4:
        return Tick(value, _plain(value, max(0, (digit % 1 > 0) - power)))
    return Tick(value, "10" if digit == 1 else f"{digit:g}×10", power)


def _even(limits: AxisRange, wanted: int) -> list[Tick]:
    """Round values at equal distances."""
    raw = (limits.high - limits.low) / wanted
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(s * size for s in (1, 2, 2.5, 5, 10) if s * size >= raw * (1 - 1e-9))
    first, last = math.ceil(limits.low / step - 1e-9), math.floor(limits.high / step + 1e-9)
    values = [k * step for k in range(first, last + 1)]
    largest = max((abs(v) for v in values), default=1.0)
    if largest >= 1e5 or (largest and largest < 1e-3):
        power = math.floor(math.log10(largest) + 1e-9)
        decimals = _decimals(step / 10.0**power)
        return [
            Tick(v, f"{_plain(v / 10.0**power, decimals)}×10", power) if v else Tick(0.0, "0") for v in values
        ]
    decimals = _decimals(step)
    return [Tick(v, _plain(v, decimals)) for v in values]


def _decimals(step: float) -> int:
    """Decimals needed to distinguish ticks `step` apart."""
    exact = (d for d in range(12) if step * 10**d > 0.9 and abs(step * 10**d - round(step * 10**d)) < 1e-6)
    return next(exact, 12)


def _plain(value: float, decimals: int) -> str:
    text = f"{value:,.{decimals}f}"
    return typographic_minus(text if float(text.replace(",", "")) else text.replace("-", ""))
