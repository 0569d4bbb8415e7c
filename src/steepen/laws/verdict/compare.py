"""Compare two ladders: fit the nested models to both and test them, before a level is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from steepen.laws.fits.compute_law import FitSettings, default_c0
from steepen.laws.fits.solver import Array
from steepen.laws.hypotheses.bootstrap import cluster_inflation, fit_without_each
from steepen.laws.hypotheses.judge_draws import drop_partner
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
    partners = find_partners(reference, arm)
    found = _compare(reference, arm, c0, rule, partners)
    outlier = _find_outlier(found, OUTLIER_LEVEL / arms)
    if outlier is None:
        return found
    first, second = (
        (ladder.flops != outlier.flops) | (ladder.arm != outlier.arm) for ladder in (reference, arm)
    )
    partners = drop_partner(partners, int(np.argmin(np.concatenate([first, second]))))
    return replace(_compare(reference.keep(first), arm.keep(second), c0, rule, partners), outlier=outlier)


def _compare(
    reference: Ladder,
    arm: Ladder,
    c0: float,
    rule: DecisionRule,
    partners: tuple[NDArray[np.intp], NDArray[np.intp]] | None,
) -> Comparison:
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
    """Points (reference, arm) with the same named seeds; None if few.

    Rungs are matched by compute, within 1%, or in order, where ladders of equal length have few of those.
    """
    if not (reference.seed_names and arm.seed_names):
        return None
    count = len(reference.flops)
    apart = np.abs(np.log(arm.flops / reference.flops[:, None]))
    nearest = apart.argmin(axis=1)
    matches = [
        [(i, int(k)) for i, k in enumerate(nearest) if apart[i, k] < MERGE_TOLERANCE],
        [(i, i) for i in range(count)] if count == len(arm.flops) else [],
    ]
    for pairs in matches:
        alike = [
            (i, k)
            for i, k in pairs
            if all(reference.seed_names[i]) and sorted(reference.seed_names[i]) == sorted(arm.seed_names[k])
        ]
        if len(alike) >= MIN_PARTNERS:
            return np.array([i for i, _ in alike]), count + np.array([k for _, k in alike])
    return None


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
