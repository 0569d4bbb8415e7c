"""The three questions about an arm, and the rule that turns p-values into words.

    better   is it better than the reference where both were measured?
    growth   does the gain grow with compute?
    by what  by a larger exponent, or by a lower irreducible loss?

Each has a family of its own: `holm_levels` shares the level among the arms of a table. What error of a recipe
would change an answer, or explain the growth by itself, is `mistuning_tolerance`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from steepen.errors import UsageError
from steepen.laws.model.laws import Array
from steepen.laws.model.table_fit import Contrast, Mixture, TableFit, multiplier_contrast, slope_contrast

Better = Literal["better", "worse", "no difference", "not resolved"]
Growth = Literal["grows", "constant", "shrinks", "undecided"]
ByWhat = Literal["exponent", "irreducible loss", "both", "either"]
BETTER: tuple[Better, ...] = get_args(Better)
GROWTH: tuple[Growth, ...] = get_args(Growth)
BY_WHAT: tuple[ByWhat, ...] = get_args(ByWhat)
POINTS_IN_RANGE = 9  # at which multipliers are averaged
DriftShape = Literal["top rung", "linear", "quadratic"]
DRIFT_SHAPES: tuple[DriftShape, ...] = get_args(DriftShape)
MAX_LOSS_PENALTY = 0.03
PENALTIES = 200  # sizes tried, up to the largest


@dataclass(frozen=True)
class DecisionRule:
    """Level and margins of the tests.

    `equivalence` is the largest |multiplier − 1| of *no difference*; `margin` the largest |Δγ|/γ of a
    constant gain. Its default is about the smallest exponent gain claimed in the paper this package follows
    (Operator-1: .0027 of .1113), so such a gain does not pass as constant.
    """

    level: float = 0.05
    margin: float = 0.025
    equivalence: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.level < 0.5:
            raise UsageError(f"level is {self.level}; give a fraction between 0 and 0.5, such as 0.05.")
        if self.margin <= 0:
            raise UsageError(
                f"margin is {self.margin}; give a fraction of γ greater than zero, such as 0.025."
            )
        if not 0 < self.equivalence < 10:
            raise UsageError(f"equivalence is {self.equivalence}; give a fraction of compute, such as 0.05.")


@dataclass(frozen=True, eq=False)
class Contrasts:
    """What the questions ask of one arm, for each table.

    `gain` is the log multiplier averaged over the common range, as one place would decide on the noise of its
    rungs; `top` the one at its top; `slope` is Δγ, or with an E for each arm the mean slope of the log
    multiplier. `gain_of` and `slope_of` are contrasts.
    """

    gain: Mixture
    top: Mixture
    slope: Mixture
    gain_of: Contrast
    slope_of: Contrast
    gamma: Array  # the reference's, to which the margin is relative


def contrasts(fit: TableFit, arms: tuple[int, int], low: float, high: float) -> Contrasts:
    """The contrasts of an arm against another, in the range of log compute that both cover."""
    laws = fit.laws
    points = np.linspace(low, high, POINTS_IN_RANGE)
    gain = multiplier_contrast(laws, arms, points, np.full(POINTS_IN_RANGE, 1 / POINTS_IN_RANGE))
    top = multiplier_contrast(laws, arms, np.array([high]), np.ones(1))
    slope, gamma = slope_contrast(laws, arms), laws.gamma[:, arms[0]]
    if laws.own_e:  # Δγ alone does not say what happens in the range, so the margin is one of the slope
        wide = max(high - low, 1e-9)
        slope = multiplier_contrast(laws, arms, np.array([low, high]), np.array([-1.0, 1.0]) / wide)
        gamma = np.ones_like(gamma)
    found = [fit.mixture(one) for one in (gain, top, slope)]
    return Contrasts(found[0], found[1], found[2], gain, slope, gamma)


@dataclass(frozen=True, eq=False)
class PValues:
    """p-values of the first two questions, one per table: of no difference, and of one beyond the margin."""

    gain: Array
    equivalent: Array
    slope: Array
    constant: Array
    gain_sign: Array
    slope_sign: Array

    def words(self, levels: Sequence[float], place: int = 0) -> tuple[Better, Growth]:
        """The answers for one table, at the levels of the two questions."""
        better, growth = self.better(levels[0])[place], self.growth(levels[1])[place]
        return cast(Better, str(better)), cast(Growth, str(growth))

    def better(self, level: float | Array) -> NDArray[np.str_]:
        """The answers to the first question."""
        found = np.where(self.equivalent < level, "no difference", "not resolved")
        return np.where(self.gain < level, np.where(self.gain_sign > 0, "better", "worse"), found)

    def growth(self, level: float | Array) -> NDArray[np.str_]:
        """The answers to the second question."""
        found = np.where(self.constant < level, "constant", "undecided")
        return np.where(self.slope < level, np.where(self.slope_sign > 0, "grows", "shrinks"), found)


def p_values(
    found: Contrasts, rule: DecisionRule, gain: Mixture | None = None, slope: Mixture | None = None
) -> PValues:
    """The p-values of the contrasts, or of what became of them in changed tables (`gain` and `slope`)."""
    gain, slope = gain or found.gain, slope or found.slope
    within, margin = np.log1p(rule.equivalence), rule.margin * np.abs(found.gamma)
    return PValues(
        gain.p_value(), gain.p_outside(within), slope.p_value(), slope.p_outside(margin), gain.mean,
        slope.mean,
    )  # fmt: skip


def by_what(
    p_exponent: float, p_irreducible: float, delta_gamma: float, delta_e: float, level: float
) -> ByWhat:
    """The answer to the third question, of an arm whose gain grows.

    `p_exponent` is that of an equal E, so a small one rejects that the exponent alone differs;
    `p_irreducible` of an equal exponent. `delta_gamma` and `delta_e` are fitted together. A cause is named
    where the data reject the other alone, and only if its own sign can make a gain grow.
    """
    if p_exponent >= level:
        return "exponent" if p_irreducible < level and delta_gamma > 0 else "either"
    if p_irreducible >= level:
        return "irreducible loss" if delta_e < 0 else "either"
    if delta_gamma > 0 and delta_e < 0:
        return "both"
    return "exponent" if delta_gamma > 0 else "irreducible loss"


def holm_levels(p: Sequence[float], level: float) -> list[float]:
    """The level at which each arm is judged for a family-wise error rate of `level` (Holm).

    `p` is the smallest p-value of an arm's question. The two null hypotheses of a question (no difference,
    and one beyond the margin) exclude each other, so both may be tested at the arm's level.
    """
    order = np.argsort(p, kind="stable")
    levels = [0.0] * len(p)
    share, failed = level, False
    for rank, i in enumerate(order):
        if not failed:
            share = level / (len(p) - rank)
            failed = p[i] >= share
        levels[int(i)] = share
    return levels


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """p-values adjusted for their number by Holm's procedure."""
    adjusted, largest = dict[str, float](), 0.0
    for i, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, (len(p_values) - i) * p_values[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}


@dataclass(frozen=True)
class MistuningTolerance:
    """The smallest loss penalty of a ladder's recipe that would change an answer; None above 3%.

    `shape` is how the penalty is distributed: at the top rung alone, or growing from zero at the lowest rung
    linearly or quadratically in log compute, as that of a rule that scales a hyperparameter wrongly does.
    Penalties are those at the top rung. A mistuned learning rate can only raise a loss, so the penalty is
    subtracted from the measured losses. `penalty_explaining_growth` is the penalty without which there would
    be no growth at all. `lr_factor` is the error of the learning rate that costs as much as the first of the
    two, where the loss penalty of a factor of 2 is known (`lr_regret`).
    """

    ladder: str
    flops: float
    shape: DriftShape
    penalty_changing_answer: float | None
    changed_better: str
    changed_growth: str
    penalty_explaining_growth: float | None
    lr_factor: float | None = None


def drift_profile(x: Array, shape: DriftShape) -> Array:
    """The penalty at each rung of a ladder (log compute `x`) relative to the one at its top rung."""
    if shape == "top rung":
        return (np.arange(len(x)) == np.argmax(x)).astype(float)
    place = (x - x.min()) / max(float(np.ptp(x)), 1e-12)
    return place if shape == "linear" else place**2


def mistuning_tolerance(
    fit: TableFit,
    found: Contrasts,
    rule: DecisionRule,
    levels: Sequence[float],
    ladders: dict[int, str],
    c0: float,
    lr_regret: float | None,
) -> tuple[MistuningTolerance, ...]:
    """For each of the two ladders (place in the table: name) and shape, the penalties that matter.

    The linearised model is refitted to losses without the penalty, its noise included.
    """
    tolerances: list[MistuningTolerance] = []
    for place, name in ladders.items():
        own = np.flatnonzero(fit.kept[0, place])
        x = fit.cells.x[place, own]
        top = int(own[np.argmax(x)])
        largest = MAX_LOSS_PENALTY * float(fit.loss[0, place, top])
        sizes = np.concatenate([[0.0], np.geomspace(3e-4, 1.0, PENALTIES)]) * largest
        for shape in DRIFT_SHAPES:
            direction = np.zeros(fit.cells.x.shape)
            direction[place, own] = drift_profile(x, shape)
            gain, slope = (fit.shifted(one, direction, sizes) for one in (found.gain_of, found.slope_of))
            p = p_values(found, rule, gain, slope)
            better, growth = p.better(levels[0]), p.growth(levels[1])
            changed = (better != better[0]) | (growth != growth[0])
            first = int(np.argmax(changed)) if changed.any() else None
            crossed = slope.mean * slope.mean[0] <= 0
            explains = growth[0] in ("grows", "shrinks") and bool(crossed.any())
            penalty = None if first is None else float(sizes[first])
            factor = None
            if penalty is not None and lr_regret is not None:  # the loss is a parabola in the log rate
                factor = 2 ** math.sqrt(penalty / lr_regret)
            tolerances.append(
                MistuningTolerance(
                    name, c0 * math.exp(float(x.max())), shape, penalty,
                    str(better[first or 0]), str(growth[first or 0]),
                    float(sizes[int(np.argmax(crossed))]) if explains else None, factor,
                )
            )  # fmt: skip
    return tuple(tolerances)
