"""Five readings of the same two ladders, the tests between them, and the rule that turns tests into a
verdict.

    same      one law for both                        3 parameters
    constant  own constant                            4
    exponent  own constant and exponent, one floor    5
    floor     own constant and floor, one exponent    5   (the floor-shift twin of `exponent`)
    free      everything its own                      6

All are fitted by least squares to both ladders at once, so every comparison is an F-test between nested
models whose size is right for eight points as well as for eight hundred. Everything here is vectorised over
data sets: the verdict on the measurements, on every bootstrap draw, on every simulated ladder and with
every rung left out is the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from steepen.laws.distributions import ROUNDING_ERROR, f_p_value, t_quantile
from steepen.laws.fits.solver import (
    Array,
    Design,
    Mask,
    Solution,
    best_of,
    solve,
    solve_multistart,
    unscaled_covariance,
)

Hypothesis = Literal["same", "constant", "exponent", "irreducible", "free"]
ExtraParameter = Literal["exponent", "irreducible"]
VerdictWord = Literal["steeper", "lower (constant)", "floor", "undecided", "shallower", "worse"]

HYPOTHESES: tuple[Hypothesis, ...] = ("same", "constant", "exponent", "irreducible", "free")
VERDICTS: tuple[VerdictWord, ...] = get_args(VerdictWord)


@dataclass(frozen=True)
class DecisionRule:
    """How verdicts are reached. `margin` is the largest |Δγ|/γ that may still be called a constant gain.

    The default margin is the smallest exponent gain claimed in the paper this package follows (Operator-1:
    .0027 of .1113), so an effect of that size is not waved through as a constant. `noise` is a known
    standard deviation of the loss; without it the scatter about the free reading is used.
    """

    level: float = 0.05
    margin: float = 0.025
    noise: float | None = None
    log: bool = False


@dataclass(frozen=True, eq=False)
class LadderPair:
    """Where the points of a reference and an arm lie: x = log(C/C0), which are the arm's, and runs behind
    each.
    """

    x: Array
    arm: NDArray[np.bool_]
    weights: Array

    def designs(self) -> dict[Hypothesis, Design]:
        """The five readings; constants and exponents are (reference, arm − reference), floors one per
        ladder.
        """
        ones = np.ones((len(self.x), 1))
        arm = self.arm[:, None].astype(float)
        both, split = np.hstack([ones, arm]), np.hstack([1.0 - arm, arm])
        return {
            "same": Design(ones, ones, ones),
            "constant": Design(ones, both, ones),
            "exponent": Design(ones, both, both),
            "irreducible": Design(split, both, ones),
            "free": Design(split, both, both),
        }


@dataclass(frozen=True, eq=False)
class NestedFits:
    """Every reading fitted to every data set."""

    pair: LadderPair
    weights: Array
    designs: dict[Hypothesis, Design]
    solutions: dict[Hypothesis, Solution]
    scale: Array

    def rss(self, reading: Hypothesis) -> Array:
        """Weighted residual sum of squares of one reading, one value per data set."""
        return self.solutions[reading].objective

    def degrees_of_freedom(self, reading: Hypothesis) -> Array:
        """Points that count, less the reading's parameters."""
        return (self.weights > 0).sum(axis=1) - float(self.designs[reading].n_parameters)

    def variance(self, reading: Hypothesis, rule: DecisionRule) -> Array:
        """The noise variance a test against `reading` divides by."""
        if rule.noise is not None:
            return np.full(len(self.scale), (rule.noise / (self.scale if rule.log else 1.0)) ** 2)
        rounding = ROUNDING_ERROR * (1.0 if rule.log else self.scale)
        return np.maximum(self.rss(reading) / np.maximum(self.degrees_of_freedom(reading), 1e-9), rounding**2)


@dataclass(frozen=True, eq=False)
class FTests:
    """What the verdict rests on, one value per data set; every `p_` is the p-value of an F-test."""

    p_shift: Array
    p_slope: Array
    p_exponent_hypothesis: Array
    p_irreducible_hypothesis: Array
    delta_gamma: Array
    delta_gamma_error: Array
    gamma: Array
    delta_log_a: Array
    delta_e: Array
    delta_gamma_free: Array
    degrees_of_freedom: Array


def fit_hypotheses(
    pair: LadderPair,
    y: Array,
    rule: DecisionRule,
    *,
    weights: Array | None = None,
    warm_start: NestedFits | None = None,
) -> NestedFits:
    """Fit the five readings to each row of `y`; `warm` (a fit to similar data) saves looking for starts.

    Where there is none, or a search from it does not come to rest, several starts are tried: a short ladder
    leaves its floor nearly free, and a search that begins at the wrong end of that valley may stop in it.
    """
    y, w = np.broadcast_arrays(np.atleast_2d(y), np.atleast_2d(pair.weights if weights is None else weights))
    designs = pair.designs()

    def run(reading: Hypothesis, start: Array) -> Solution:
        return solve(designs[reading], pair.x, y, start, weights=w, log=rule.log, iterations=80)

    def anew(reading: Hypothesis, rows: Mask) -> Solution:
        return solve_multistart(designs[reading], pair.x, y[rows], weights=w[rows], log=rule.log)

    found: dict[Hypothesis, Solution] = {}
    for reading in HYPOTHESES:
        if warm_start is None:
            found[reading] = anew(reading, np.ones(len(y), bool))
            continue
        found[reading] = run(reading, warm_start.solutions[reading].theta)
        restless = ~found[reading].converged
        if restless.any():
            found[reading] = found[reading].improve_rows(restless, anew(reading, restless))
    _restart_from_nested(found, run)
    return NestedFits(pair, w, designs, found, np.abs(y).mean(axis=1))


def _embed(theta: Array, by: ExtraParameter) -> Array:
    """θ of a reading as θ of the larger one that gives the arm its own exponent, or its own floor."""
    return np.hstack([theta, np.zeros((len(theta), 1))] if by == "exponent" else [theta[:, :1], theta])


def _restart_from_nested(
    found: dict[Hypothesis, Solution], run: Callable[[Hypothesis, Array], Solution]
) -> None:
    """Where a larger reading came out worse than one it contains, start it from that one."""
    pairs: list[tuple[Hypothesis, Hypothesis, ExtraParameter]] = [
        ("constant", "exponent", "exponent"),
        ("constant", "irreducible", "irreducible"),
        ("exponent", "free", "irreducible"),
        ("irreducible", "free", "exponent"),
    ]
    for small, large, by in pairs:
        if (found[large].objective > found[small].objective * (1 + 1e-9)).any():
            found[large] = best_of(found[large], run(large, _embed(found[small].theta, by)))


def f_test_hypotheses(fits: NestedFits, rule: DecisionRule) -> FTests:
    """Compare nested readings. Each test has one degree of freedom above and the larger model's below."""
    free = fits.solutions["free"].theta
    exponent = fits.solutions["exponent"].theta
    covariance = unscaled_covariance(
        fits.designs["exponent"], fits.pair.x, exponent, weights=fits.weights, log=rule.log
    )
    variance = fits.variance("exponent", rule)
    return FTests(
        p_shift=_p_value(fits, "same", "constant", rule),
        p_slope=_p_value(fits, "constant", "exponent", rule),
        p_exponent_hypothesis=_p_value(fits, "exponent", "free", rule),
        p_irreducible_hypothesis=_p_value(fits, "irreducible", "free", rule),
        delta_gamma=exponent[:, 4],
        delta_gamma_error=np.sqrt(covariance[:, 4, 4] * variance),
        gamma=exponent[:, 3],
        delta_log_a=fits.solutions["constant"].theta[:, 2],
        delta_e=fits.solutions["irreducible"].theta[:, 1] - fits.solutions["irreducible"].theta[:, 0],
        delta_gamma_free=free[:, 5],
        degrees_of_freedom=fits.degrees_of_freedom("exponent"),
    )


def verdict_words(tests: FTests, rule: DecisionRule) -> NDArray[np.str_]:
    """The verdict on each data set.

    1. Slopes (given one floor) differ: if the reference gains on the arm with compute the arm is *shallower*,
    wherever it stands now, and whether by a smaller exponent or a higher floor, which foretell the same. If
    the arm gains, the exponent reading and its floor twin are each tested against the free reading: *steeper*
    if only the twin is refuted, *floor* if only the exponent reading is, the sign of the free Δγ if both are,
    and *undecided* if neither is. 2. Slopes do not differ: *lower (constant)* or *worse* if the constant
    does, if the interval of Δγ excludes a drift beyond the margin, and if one floor for both is not refuted:
    where it is, a floor and an exponent may make up for each other here and part further on. Otherwise
    *undecided*.
    """
    level = rule.level
    steep = tests.p_slope < level
    twin_out = tests.p_irreducible_hypothesis < level
    exponent_out = tests.p_exponent_hypothesis < level
    quantile = t_quantile(
        1.0 - level,
        tests.degrees_of_freedom if rule.noise is None else np.full_like(tests.degrees_of_freedom, np.inf),
    )
    reach = np.abs(tests.delta_gamma) + quantile * tests.delta_gamma_error
    flat = reach < rule.margin * np.abs(tests.gamma)
    constant = ~steep & flat & ~exponent_out & (tests.p_shift < level)

    verdict = np.full(len(steep), "undecided", dtype="<U16")
    verdict[constant & (tests.delta_log_a < 0)] = "lower (constant)"
    verdict[constant & (tests.delta_log_a > 0)] = "worse"
    up = steep & (tests.delta_gamma > 0)
    verdict[steep & (tests.delta_gamma < 0)] = "shallower"
    verdict[up & twin_out & ~exponent_out] = "steeper"
    verdict[up & exponent_out & ~twin_out] = "floor"
    verdict[up & exponent_out & twin_out] = "floor"
    verdict[up & exponent_out & twin_out & (tests.delta_gamma_free > 0)] = "steeper"
    return verdict


def _p_value(fits: NestedFits, small: Hypothesis, large: Hypothesis, rule: DecisionRule) -> Array:
    statistic = (fits.rss(small) - fits.rss(large)) / fits.variance(large, rule)
    below = fits.degrees_of_freedom(large) if rule.noise is None else np.full(len(statistic), np.inf)
    return f_p_value(statistic, 1.0, below)
