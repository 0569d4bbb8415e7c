"""Fits reach the global optimum, also on ladders too short to determine E, and intervals invert the tests."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import optimize, stats

from steepen.laws.distributions import t_quantile
from steepen.laws.fits.profile_likelihood import LeastSquaresFit, profile_intervals
from steepen.laws.fits.solver import unscaled_covariance
from steepen.laws.hypotheses.nested_models import (
    DecisionRule,
    LadderPair,
    f_test_hypotheses,
    fit_hypotheses,
    verdict_words,
)

Array = NDArray[np.float64]
RULE = DecisionRule()


def pair_of(rungs: int, decades: float, low: float = 1e17) -> tuple[LadderPair, Array]:
    flops = np.geomspace(low, low * 10**decades, rungs)
    x = np.log(flops) - np.log(flops).mean()
    return LadderPair(np.tile(x, 2), np.repeat([False, True], rungs), np.ones(2 * rungs)), flops


def law(flops: Array, e: float, a: float, gamma: float) -> Array:
    return e + a * (flops / 1e18) ** -gamma


def drawn(kind: str, count: int, seed: int = 0) -> tuple[LadderPair, Array]:
    """Data sets of a reference and an arm: short ladders, arms that rise, an arm whose last rungs failed."""
    rng = np.random.default_rng(seed)
    pair, flops = pair_of(7 if kind == "bent" else 5, 2.0 if kind == "bent" else 1.25)
    reference = law(flops, 1.8, 1.5, 0.11)
    arms = {
        "short": law(flops, 1.8, 1.38, 0.125),
        "rising": 2.0 + 0.1 * np.log10(flops / flops[0]),
        "bent": law(flops, 1.8, 1.5, 0.11) + np.where(flops >= flops[-2], 0.15, 0.0),
        "noisy": law(flops, 1.7, 1.5, 0.11),
    }
    noise = {"noisy": 3e-2, "bent": 1e-2}.get(kind, 1e-3)
    y = np.concatenate([reference, arms[kind]])
    return pair, y + rng.normal(0, noise, (count, len(y)))


def best_sum(pair: LadderPair, y: Array, *, shift: float | None = None) -> float:
    """Least squares of the exponent hypothesis by an independent search: E and γ searched, A solved."""
    ladders = [(pair.x[pair.arm == flag], y[pair.arm == flag]) for flag in (False, True)]
    scale = float(((y - y.mean()) ** 2).sum())

    def left(e: Array, slope: Array, ladder: int) -> Array:
        """Sum of squares of one ladder for arrays of E and γ, which broadcast."""
        x, loss = ladders[ladder]
        basis, rest = np.exp(-slope[..., None] * x), loss - e[..., None]
        a = np.maximum((basis * rest).sum(axis=-1) / (basis**2).sum(axis=-1), 0.0)
        return ((rest - a[..., None] * basis) ** 2).sum(axis=-1)

    def objective(p: Array) -> float:
        gap = p[2] if shift is None else shift
        return float(left(p[0], p[1], 0) + left(p[0], p[1] + gap, 1)) / scale

    # Given E the ladders are independent, so a grid of E and γ finds the valleys; L-BFGS descends in each.
    e = np.append(np.linspace(0, 0.9, 40), np.linspace(0.9, 1.0, 40)) * float(y.max())
    slopes = 0.5 * np.sinh(np.linspace(-1.44, 2.99, 200))  # −1 to 5, dense near 0
    first = left(e[:, None], slopes, 0)
    second = left(e[:, None], slopes if shift is None else slopes + shift, 1)
    totals = first.min(axis=1) + second.min(axis=1) if shift is None else (first + second).min(axis=1)
    valleys = np.flatnonzero(
        (totals <= np.append(totals[1:], np.inf)) & (totals <= np.append(np.inf, totals)[:-1])
    )
    found = np.inf
    for k in valleys[totals[valleys].argsort()[:3]]:
        if shift is None:
            own, other = (slopes[part[k].argmin()] for part in (first, second))
            start = np.array([e[k], own, other - own])
        else:
            start = np.array([e[k], slopes[(first + second)[k].argmin()]])
        options: Any = {"maxiter": 500, "ftol": 1e-15, "gtol": 1e-12}
        bounds = [(0.0, float(y.max())), (-1.0, 5.0), (-6.0, 6.0)][: len(start)]
        r = optimize.minimize(objective, start, bounds=bounds, method="L-BFGS-B", options=options)
        found = min(found, r.fun * scale)
    return found


@pytest.mark.parametrize("kind", ["short", "rising", "bent", "noisy"])
def test_exponent_hypothesis_fit_matches_an_independent_search(kind: str) -> None:
    pair, y = drawn(kind, 4)
    fits = fit_hypotheses(pair, y, RULE)
    assert all(solution.converged.all() for name, solution in fits.solutions.items() if name != "free")
    for ours, row in zip(fits.rss("exponent"), y, strict=True):
        assert ours <= best_sum(pair, row) * 1.001


@pytest.mark.parametrize("kind", ["short", "rising", "bent", "noisy"])
def test_warm_start_gives_the_same_fit(kind: str) -> None:
    pair, y = drawn(kind, 40)
    cold = fit_hypotheses(pair, y, RULE)
    warm = fit_hypotheses(pair, y, RULE, warm_start=fit_hypotheses(pair, y[:1], RULE))
    words = [verdict_words(f_test_hypotheses(fits, RULE), RULE) for fits in (cold, warm)]
    assert (words[0] == words[1]).mean() >= 0.95


def test_short_ladders_do_not_mistake_an_exponent_for_a_lower_e() -> None:
    """Five rungs over 1.25 decades: mostly undecided, and wrong no more often than the test level."""
    pair, y = drawn("short", 400)
    words = Counter(verdict_words(f_test_hypotheses(fit_hypotheses(pair, y, RULE), RULE), RULE).tolist())
    assert set(words) <= {"undecided", "grows: either", "grows: exponent", "grows: irreducible loss"}
    assert words["grows: irreducible loss"] <= 400 * RULE.level + 3 * np.sqrt(400 * RULE.level)
    assert words["undecided"] + words["grows: either"] > 200


def test_gain_of_an_arm_that_rises_shrinks() -> None:
    pair, y = drawn("rising", 50)
    tests = f_test_hypotheses(fit_hypotheses(pair, y, RULE), RULE)
    assert (verdict_words(tests, RULE) == "shrinks").all() and (tests.delta_gamma > -0.5).all()


@pytest.mark.parametrize("kind", ["short", "bent", "noisy"])
def test_delta_gamma_interval_inverts_the_f_test(kind: str) -> None:
    """An independent search finds the critical F at both ends; zero is inside if it is not rejected."""
    pair, y = drawn(kind, 8, seed=3)
    for row in y:
        fits = fit_hypotheses(pair, row, RULE)
        theta, rss = fits.solutions["exponent"].theta[0], float(fits.rss("exponent")[0])
        freedom = float(fits.degrees_of_freedom("exponent")[0])
        fit = LeastSquaresFit(
            fits.designs["exponent"], pair.x, row, pair.weights, theta, rss, rss / freedom, log=False
        )
        covariance = unscaled_covariance(fit.design, pair.x, theta)[0]
        quantile = float(t_quantile(0.95, np.array(freedom)))
        ((low, high),) = profile_intervals(fit, [4], covariance, quantile)
        p = float(f_test_hypotheses(fits, RULE).p_slope[0])
        if abs(p - 0.10) > 1e-3:  # nearer than that it is a matter of rounding
            assert (low <= 0 <= high) == (p >= 0.10), (low, high, p)
        for end in (low, high):
            if np.isfinite(end):
                statistic = (best_sum(pair, row, shift=end) - rss) / (rss / freedom)
                assert stats.f.sf(statistic, 1, freedom) == pytest.approx(0.10, rel=0.02)
