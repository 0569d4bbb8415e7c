"""Compare two ladders: fit the nested models to both and test them, before a level is chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from steepen.laws.fits.compute_law import FitSettings, default_c0
from steepen.laws.fits.solver import Array
from steepen.laws.hypotheses.bootstrap import cluster_inflation, fit_without_each
from steepen.laws.hypotheses.nested_models import (
    DecisionRule,
    FTests,
    LadderPair,
    NestedFits,
    f_test_hypotheses,
    fit_hypotheses,
    partner_correlation_p,
)
from steepen.laws.hypotheses.noise_checks import (
    CHECK_LEVEL,
    NoiseCheck,
    NoiseKind,
    check_noise,
    robust_tests,
    scatter_p_value,
)
from steepen.laws.hypotheses.outliers import MIN_DEVIATION, MIN_RUNGS_LEFT, OUTLIER_LEVEL, outlier_p_value
from steepen.laws.hypotheses.variance_components import with_rung_component
from steepen.laws.ladder import MERGE_TOLERANCE, Ladder

MIN_PARTNERS = 6  # pairs of rungs for tests on differences


@dataclass(frozen=True)
class Outlier:
    """A rung that was left out: its loss is `deviation` above the law of the others.

    `p_value` is corrected for the number of points.
    """

    place: str
    arm: str
    flops: float
    deviation: float
    p_value: float


@dataclass(frozen=True, eq=False)
class Comparison:
    """The points, fits and tests of an arm and the reference, before a level is chosen.

    `left_out` are the fits without each of the points `left_out_points`. An `outlier` is in neither ladder.
    """

    reference: Ladder
    arm: Ladder
    c0: float
    y: Array
    fits: NestedFits
    tests: FTests
    rule: DecisionRule  # without a stated noise that the scatter contradicts
    checks: dict[NoiseKind, NoiseCheck]
    robust: FTests
    p_scatter: float
    left_out_points: NDArray[np.intp]
    left_out: NestedFits | None
    outlier: Outlier | None = None


def compare(
    reference: Ladder, arm: Ladder, settings: FitSettings, rule: DecisionRule, arms: int = 1
) -> Comparison:
    """Fit and test the nested models of two ladders, without a rung that is off the law of the others.

    `arms` are compared with the reference in all; they share the level of the test for such a rung.
    """
    c0 = settings.c0 or default_c0(reference)
    found = _compare(reference, arm, c0, rule)
    outlier = _find_outlier(found, OUTLIER_LEVEL / arms)
    if outlier is None:
        return found
    first, second = (
        ladder.keep((ladder.flops != outlier.flops) | (ladder.arm != outlier.arm))
        for ladder in (reference, arm)
    )
    return replace(_compare(first, second, c0, rule), outlier=outlier)


def _compare(reference: Ladder, arm: Ladder, c0: float, rule: DecisionRule) -> Comparison:
    reference, arm = with_rung_component({"reference": reference, "arm": arm}, c0).values()
    pair = LadderPair(
        np.log(np.concatenate([reference.flops, arm.flops]) / c0),
        np.repeat([False, True], [len(reference.flops), len(arm.flops)]),
        np.concatenate([reference.weights, arm.weights]),
        _clusters(reference, arm),
    )
    y = np.concatenate([reference.loss, arm.loss])
    fits = fit_hypotheses(pair, y, rule)
    fits = replace(fits, inflation=cluster_inflation(fits, y, rule))
    partners = find_partners(reference, arm)
    correlated = partners is not None and float(partner_correlation_p(fits, partners)[0]) < CHECK_LEVEL
    if correlated and rule.noise is None and pair.clusters is None:
        fits = replace(fits, pair=replace(pair, partners=partners))
    p_scatter = float(scatter_p_value(fits, rule)[0])
    if p_scatter < CHECK_LEVEL:
        rule = replace(rule, noise=None)
    points, left_out = fit_without_each(fits, rule)
    return Comparison(
        reference=reference,
        arm=arm,
        c0=c0,
        y=y,
        fits=fits,
        tests=f_test_hypotheses(fits, rule),
        rule=rule,
        checks=check_noise(fits, y[None], rule),
        robust=robust_tests(fits, y[None], rule),
        p_scatter=p_scatter,
        left_out_points=points,
        left_out=left_out,
    )


def _find_outlier(found: Comparison, level: float) -> Outlier | None:
    """The rung that is furthest off the law of the others, if noise does not explain it."""
    if found.left_out is None or found.fits.pair.clusters is not None:
        return None
    p = outlier_p_value(found.fits, found.left_out, found.rule)
    row = int(np.argmin(p))
    point = int(found.left_out_points[row])
    is_arm = bool(found.fits.pair.arm[point])
    ladder = found.arm if is_arm else found.reference
    if p[row] >= level or len(ladder.flops) <= MIN_RUNGS_LEFT:
        return None
    law = found.fits.designs["free"].predict(found.left_out.solutions["free"].theta[row], found.fits.pair.x)
    deviation = float(found.y[point] - law[point])
    if abs(deviation) < MIN_DEVIATION * float(found.y[point]):
        return None
    place = point - is_arm * len(found.reference.flops)
    return Outlier(ladder.row_labels[place], ladder.arm, float(ladder.flops[place]), deviation, float(p[row]))


def find_partners(reference: Ladder, arm: Ladder) -> tuple[NDArray[np.intp], NDArray[np.intp]] | None:
    """Points (reference, arm) with the same named seeds: rungs in order, or of equal compute; None if few.

    Ladders of different length are matched by compute, within 1%.
    """
    if not (reference.seed_names and arm.seed_names):
        return None
    count = len(reference.flops)
    if count == len(arm.flops):
        matches = [(i, i) for i in range(count)]
    else:
        matches = [
            (i, int(np.argmin(np.abs(np.log(arm.flops / flops))))) for i, flops in enumerate(reference.flops)
        ]
        matches = [
            (i, k) for i, k in matches if abs(math.log(arm.flops[k] / reference.flops[i])) < MERGE_TOLERANCE
        ]
    alike = [
        (i, k)
        for i, k in matches
        if all(reference.seed_names[i]) and sorted(reference.seed_names[i]) == sorted(arm.seed_names[k])
    ]
    if len(alike) < MIN_PARTNERS:
        return None
    return np.array([i for i, _ in alike]), count + np.array([k for _, k in alike])


def _clusters(reference: Ladder, arm: Ladder) -> NDArray[np.intp] | None:
    """The number of each point's training run; None if every point has its own."""
    if not (reference.clusters or arm.clusters):
        return None
    names = [
        (ladder.arm, ladder.clusters[i] if ladder.clusters else str(i))
        for ladder in (reference, arm)
        for i in range(len(ladder.flops))
    ]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return None if len(numbers) == len(names) else np.array([numbers[name] for name in names])
