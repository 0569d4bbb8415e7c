"""Contrasts: functions of the laws of two arms, and their distribution over noise models."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

from steepen.laws.model.laws import Array, Laws


@dataclass(frozen=True, eq=False)
class Contrast:
    """A function of the laws of two arms (reference, arm): its value, and its gradient by their parameters.

    `e` is the derivative by a shared E.
    """

    arms: tuple[int, int]
    value: Array
    first: Array
    second: Array
    e: float = 0.0


def slope_contrast(laws: Laws, arms: tuple[int, int]) -> Contrast:
    """Δγ, arm less reference."""
    one = np.zeros((len(laws.gamma), 3 if laws.own_e else 2))
    one[:, 1] = 1.0
    return Contrast(arms, laws.gamma[:, arms[1]] - laws.gamma[:, arms[0]], -one, one)


def parameter_contrast(laws: Laws, arm: int, index: int) -> Contrast:
    """One parameter of an arm's law: log A (0), γ (1) or E (2)."""
    zero = np.zeros((len(laws.gamma), 3 if laws.own_e else 2))
    one = zero.copy()
    value = (laws.log_a, laws.gamma, laws.e)[index]
    shared_e = index == 2 and not laws.own_e
    if not shared_e:
        one[:, index] = 1.0
    return Contrast((arm, arm), value if shared_e else value[:, arm], zero, one, float(shared_e))


def multiplier_contrast(laws: Laws, arms: tuple[int, int], at: Array, weights: Array) -> Contrast:
    """A weighted sum of log multipliers at the reference's log computes `at`."""
    r, a = arms
    x = at[None, :]
    gamma = np.where(np.abs(laws.gamma[:, a]) < 1e-6, 1e-6, laws.gamma[:, a])[:, None]
    reducible = np.exp(np.clip(laws.log_a[:, r : r + 1] - laws.gamma[:, r : r + 1] * x, -60, 60))
    gap = laws.e[:, r : r + 1] - laws.e[:, a : a + 1] if laws.own_e else 0.0
    above = np.maximum(reducible + gap, 1e-3 * reducible)  # the arm's reducible loss at the reference's loss
    needed = (laws.log_a[:, a : a + 1] - np.log(above)) / gamma
    share = reducible / above / gamma
    first, second = [share, -x * share], [-1 / gamma + 0 * x, needed / gamma]
    if laws.own_e:
        first, second = [*first, 1 / above / gamma], [*second, -1 / above / gamma]
    by_first, by_second = (np.stack([part @ weights for part in parts], axis=1) for parts in (first, second))
    return Contrast(arms, (x - needed) @ weights, by_first, by_second)


@dataclass(frozen=True, eq=False)
class Mixture:
    """The distribution of a contrast: Student's t under each noise model (models, sets), with weights."""

    weight: Array
    value: Array
    error: Array
    freedom: Array

    def below(self, limit: Array | float) -> Array:
        """The probability that the contrast is below a limit, for each table."""
        z = (limit - self.value) / np.maximum(self.error, 1e-300)
        finite = np.minimum(self.freedom, 1e6)
        each = np.where(self.freedom > 1e6, special.ndtr(z), special.stdtr(finite, z))
        return np.asarray((self.weight * each).sum(axis=0), float)

    def p_value(self) -> Array:
        """Two-sided p-value of zero."""
        below = self.below(0.0)
        return np.minimum(1.0, 2 * np.minimum(below, 1 - below))

    def p_outside(self, margin: Array | float) -> Array:
        """p-value of the two one-sided tests that show the contrast within ± `margin`."""
        return np.maximum(self.below(-margin), 1 - self.below(margin))

    @property
    def mean(self) -> Array:
        """The estimate."""
        return (self.weight * self.value).sum(axis=0)

    @property
    def sd(self) -> Array:
        """The standard error."""
        return np.sqrt((self.weight * (self.error**2 + (self.value - self.mean) ** 2)).sum(axis=0))

    def interval(self, confidence: float) -> tuple[Array, Array]:
        """The interval between equal tails."""
        tail = (1 - confidence) / 2
        return self._quantile(tail), self._quantile(1 - tail)

    def _quantile(self, probability: float) -> Array:
        reach = 100 * self.error.max(axis=0) + np.abs(self.value - self.mean).max(axis=0)
        low, high = self.mean - reach, self.mean + reach
        for _ in range(60):
            middle = 0.5 * (low + high)
            under = self.below(middle) < probability
            low, high = np.where(under, middle, low), np.where(under, high, middle)
        return 0.5 * (low + high)
