"""Tests that are looked at while runs are made: alpha spending by information, and p-values that count it.

A look may reject when its p-value is below its nominal level. Nominal levels spend the level as O'Brien and
Fleming do (Lan and DeMets 1983): almost none of it early, so that the last look tests at nearly the whole
level. The level of a look follows from the information of the looks so far, not from a schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from scipy import special

from steepen.utils.arrays import Array

GRID = 301  # points of the density of a test that goes on
WIDEST = 8.0  # critical values above this are no boundary
MIN_STEP = 1e-3  # relative growth of the information below which a look spends nothing


def spent_level(fraction: float, level: float) -> float:
    """The part of a two-sided level that is spent at a fraction of the information."""
    if fraction >= 1:
        return level
    return 2 * _above(_quantile(1 - level / 2) / math.sqrt(max(fraction, 1e-9)))


def needed_information(effect: float, level: float, power: float, inflation: float = 1.0) -> float:
    """The information with which a two-sided test finds an effect with a power."""
    return inflation * ((_quantile(1 - level / 2) + _quantile(power)) / effect) ** 2


@dataclass
class Looks:
    """The looks at one test so far: information, critical values, and the level spent.

    `maximum` is the information of the last planned look.
    """

    maximum: float
    information: list[float] = field(default_factory=list[float])
    critical: list[float] = field(default_factory=list[float])
    spent: float = 0.0
    _grid: Array = field(default_factory=lambda: np.zeros(1))  # where the sum may be if the test goes on
    _mass: Array = field(default_factory=lambda: np.ones(1))
    _before: float = 0.0  # spent before the last look
    _from: tuple[Array, Array, float] = field(
        default_factory=lambda: (np.zeros(1), np.ones(1), 0.0)
    )  # the last look's

    def look(self, information: float, level: float, *, last: bool = False) -> float:
        """The nominal level of the next look, for a test at `level` in all. The `last` one spends the rest.

        Information that falls, because noise proves larger than it seemed, counts as none.
        """
        known = self.information[-1] if self.information else 0.0
        now = max(information, known)
        fraction = 1.0 if last else min(now / self.maximum, 1.0)
        rest = max(spent_level(fraction, level) - self.spent, 0.0)
        self._from, self._before = (self._grid, self._mass, known), self.spent
        grows = now > known * (1 + MIN_STEP)
        if not grows and not (last and rest > 0):
            self.information.append(now)
            self.critical.append(math.inf)
            return 0.0
        now = max(now, known * (1 + MIN_STEP))
        low, high = 0.0, WIDEST
        for _ in range(50):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if self._leaves(middle, now) <= rest else (middle, high)
        self.information.append(now)
        self.critical.append(math.inf if high >= WIDEST else high)
        self.spent += self._leaves(high, now)
        edge = high * math.sqrt(now)
        grid = np.linspace(-edge, edge, GRID)
        step = math.sqrt(now - known)
        density = np.exp(-0.5 * ((grid[:, None] - self._grid) / step) ** 2) / (step * math.sqrt(2 * math.pi))
        width = np.full(GRID, grid[1] - grid[0])
        width[[0, -1]] /= 2
        self._grid, self._mass = grid, width * (density @ self._mass)
        return 0.0 if high >= WIDEST else 2 * _above(high)

    def _leaves(self, critical: float, information: float) -> float:
        """The probability, without an effect, of going on so far and then exceeding a critical value."""
        grid, mass, known = self._from
        edge, step = (
            critical * math.sqrt(information),
            math.sqrt(max(information - known, 1e-9 * information)),
        )
        return float(mass @ (special.ndtr((grid - edge) / step) + special.ndtr((-edge - grid) / step)))

    def p_value(self, p: float) -> float:
        """The p-value of a test that stopped at the last look with the fixed-sample p-value `p`.

        Stage-wise ordering: stopping earlier is more extreme, then a smaller p-value.
        """
        if not self.information:
            return p
        z = min(_quantile(1 - max(p, 1e-15) / 2), WIDEST)
        return min(1.0, self._before + self._leaves(z, self.information[-1]))


def conditional_power(p: float, sign: float, now: float, end: float, level: float) -> float:
    """The chance that a test at `level` with the information `end` rejects, if the effect is 1 or −1.

    `p` and the `sign` of the estimate are those with the information `now`.
    """
    if now >= end:
        return 0.0
    z = math.copysign(min(_quantile(1 - max(p, 1e-15) / 2), WIDEST), sign)
    edge, step = _quantile(1 - level / 2) * math.sqrt(end), math.sqrt(end - now)
    found = 0.0
    for drift in (1.0, -1.0):
        mean = z * math.sqrt(now) + drift * (end - now)
        found = max(found, _above((edge - mean) / step) + _above((edge + mean) / step))
    return found


def _above(z: float) -> float:
    return float(special.ndtr(-z))


def _quantile(probability: float) -> float:
    return float(special.ndtri(probability))
