"""Compare two ladders: fit the nested models to both and test them, before a level is chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from steepen.laws.fits.compute_law import FitSettings, default_c0
from steepen.laws.fits.solver import Array
from steepen.laws.hypotheses.bootstrap import cluster_inflation
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
from steepen.laws.hypotheses.variance_components import with_rung_component
from steepen.laws.ladder import MERGE_TOLERANCE, Ladder

MIN_PARTNERS = 6  # pairs of rungs for tests on differences


@dataclass(frozen=True, eq=False)
class Comparison:
    """The points, fits and tests of an arm and the reference, before a level is chosen."""

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


def compare(reference: Ladder, arm: Ladder, settings: FitSettings, rule: DecisionRule) -> Comparison:
    """Fit and test the nested models of two ladders."""
    c0 = settings.c0 or default_c0(reference)
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
    return Comparison(
        reference,
        arm,
        c0,
        y,
        fits,
        f_test_hypotheses(fits, rule),
        rule,
        check_noise(fits, y[None], rule),
        robust_tests(fits, y[None], rule),
        p_scatter,
    )


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
    """The number of each point's training run; None where every point has its own."""
    if not (reference.clusters or arm.clusters):
        return None
    names = [
        (ladder.arm, ladder.clusters[i] if ladder.clusters else str(i))
        for ladder in (reference, arm)
        for i in range(len(ladder.flops))
    ]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return None if len(numbers) == len(names) else np.array([numbers[name] for name in names])
