"""Quantiles, p-values and noncentralities of Student's t and Fisher's F, for arrays of degrees of freedom.

`Prior` is what is known of the irreducible loss before a fit: a value, or a value with its error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np
from scipy import special

from steepen.errors import UsageError
from steepen.utils.arrays import Array

Interval = tuple[float, float]

# A residual scatter below this fraction of the loss is attributed to rounding of the table.
ROUNDING_ERROR = 1e-9


def exp(value: float) -> float:
    """The exponential, clipped where it would overflow."""
    return math.exp(min(max(value, -700.0), 700.0))


def exp_or_infinity(value: float) -> float:
    """The exponential, infinite where it would overflow: an end of an interval that is not known."""
    return math.exp(value) if value < 700 else math.inf


def exp_interval(interval: Interval) -> Interval:
    """The exponentials of an interval's ends."""
    return exp(interval[0]), exp(interval[1])


def standard_error(gradient: Array, covariance: Array) -> float:
    """Of a function of estimates, from its gradient and their covariance (the delta method)."""
    return math.sqrt(max(float(gradient @ covariance @ gradient), 0.0))


def t_quantile(probability: float, df: Array) -> Array:
    """Student's t quantile: the normal quantile where `df` is infinite, infinity where `df` is 0 or less."""
    df = np.asarray(df, float)
    with np.errstate(invalid="ignore"):
        value = cast(Array, special.stdtrit(np.maximum(df, 1e-9), probability))
    value = np.where(np.isinf(df), special.ndtri(probability), value)
    return np.where(df > 0, value, np.inf)


def t_reach(confidence: float, df: float) -> float:
    """Half the width of a t-interval, in standard errors."""
    return float(t_quantile((1 + confidence) / 2, np.array(float(df))))


def t_interval(value: float, error: float, df: float, confidence: float) -> Interval:
    """The interval of an estimate with a standard error."""
    reach = t_reach(confidence, df) * error
    return value - reach, value + reach


def t_p_value(value: float, error: float, df: float) -> float:
    """Two-sided p-value of zero, of an estimate with a standard error."""
    return float(2 * special.stdtr(df, -abs(value) / max(error, 1e-300)))


@dataclass(frozen=True)
class Difference:
    """A difference or factor with its interval and p-value (of zero, or of a factor of one)."""

    value: float
    interval: Interval
    p: float

    @classmethod
    def of(cls, value: float, error: float, df: float, confidence: float) -> Difference:
        """An estimate with a standard error."""
        return cls(value, t_interval(value, error, df, confidence), t_p_value(value, error, df))

    def factor(self) -> Difference:
        """What a difference of logarithms is as a factor."""
        return Difference(math.exp(self.value), exp_interval(self.interval), self.p)


def f_p_value(statistic: Array, df_numerator: float, df_denominator: Array) -> Array:
    """P(F > statistic): chi-square where `df_denominator` is infinite, 1 where it is not positive."""
    statistic = np.maximum(np.asarray(statistic, float), 0.0)
    df_denominator = np.broadcast_to(np.asarray(df_denominator, float), statistic.shape)
    finite = np.where(np.isinf(df_denominator), 1.0, df_denominator)
    p = np.where(
        np.isinf(df_denominator),
        special.chdtrc(df_numerator, df_numerator * statistic),
        special.fdtrc(df_numerator, np.maximum(finite, 1e-9), statistic),
    )
    return np.where(df_denominator > 0, p, 1.0)


@lru_cache(maxsize=4096)
def required_noncentrality(df: float, level: float, power: float = 0.90) -> float:
    """Noncentrality (squared effect over its variance) at which an F(1, df) test has the given power."""
    if not math.isfinite(df):
        return float((special.ndtri(1 - level / 2) + special.ndtri(power)) ** 2)
    if df < 1:
        return math.inf
    critical = float(special.fdtri(1.0, df, 1.0 - level))
    low, high = 0.0, 10.0
    while special.ncfdtr(1.0, df, high, critical) > 1 - power:
        high *= 2
        if high > 1e7:
            return math.inf
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if special.ncfdtr(1.0, df, middle, critical) > 1 - power else (low, middle)
    return high


@dataclass(frozen=True)
class Prior:
    """A normal prior; without `sd` the value is fixed."""

    mean: float
    sd: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.mean < math.inf:
            raise UsageError(f"the irreducible loss is {self.mean}; it must be zero or more.")
        if self.sd is not None and not 0 < self.sd < math.inf:
            raise UsageError(
                f"the standard deviation of the irreducible loss is {self.sd}; give one above 0."
            )

    @classmethod
    def from_text(cls, text: str) -> Prior:
        """Parse `1.69` or `1.69±0.05` (also `1.69+-0.05`)."""
        mean, sign, sd = text.replace("+/-", "±").replace("+-", "±").partition("±")
        try:
            return cls(float(mean), float(sd) if sign else None)
        except ValueError:
            raise UsageError(f"the irreducible loss is {text!r}; write 1.69 or 1.69±0.05.") from None

    def __str__(self) -> str:
        return f"{self.mean:g}" + ("" if self.sd is None else f"±{self.sd:g}")
