"""The answers that a user would get, for many simulated pairs of ladders at once.

`steepen power` and the calibration count these: after the test for an outlier, the noise checks, the robust
fit and leaving out each rung, as for measured ladders (`laws/verdict`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from steepen.laws.fits.solver import Array, Mask
from steepen.laws.hypotheses.nested_models import (
    Answers,
    DecisionRule,
    FTests,
    LadderPair,
    NestedFits,
    answer_questions,
    confirms,
    f_test_hypotheses,
    fit_hypotheses,
    partner_correlation_p,
)
from steepen.laws.hypotheses.noise_checks import (
    CHECK_LEVEL,
    check_noise,
    judge_checked,
    robust_tests,
    scatter_p_value,
)
from steepen.laws.hypotheses.outliers import MIN_RUNGS_LEFT, OUTLIER_LEVEL, outlier_p_value


@dataclass(frozen=True, eq=False)
class DrawnAnswers:
    """Answers of every draw: by least squares alone, and after all checks; and which of these are claims.

    `claim` is false where the answer to the first question is *undecided* or fragile, `by_what_claim` also
    where there is no second answer or it is fragile (*either* may be true). `outlier` is the point that was
    left out, −1 for none.
    """

    tests: FTests
    least_squares: Answers
    answers: Answers
    claim: Mask
    by_what_claim: Mask
    outlier: NDArray[np.intp]

    @property
    def claimed(self) -> Answers:
        """The answers that are claims; *undecided*, or *either*, where one is fragile."""
        growth = np.where(self.claim, self.answers.growth, "undecided")
        by_what = np.where(self.by_what_claim, self.answers.by_what, "either: not separable here")
        return Answers(growth, np.where(growth == "grows", by_what, ""))


def judge_draws(
    pair: LadderPair,
    y: Array,
    rule: DecisionRule,
    *,
    start: NestedFits,
    weights: Array | None = None,
    arms: int = 1,
) -> DrawnAnswers:
    """Judge each row of `y` (draws, points) as measured ladders are; `start` is a fit to similar losses.

    `pair.partners` are points with the same seed, whose errors may be correlated. `arms` are in the
    table: `rule.level` is that of one of them.
    """
    fits = fit_hypotheses(replace(pair, partners=None), y, rule, weights=weights, warm_start=start)
    tests = f_test_hypotheses(fits, rule)
    least_squares = answer_questions(tests, rule)
    without = _leave_out_each(fits, rule)
    p = np.stack([outlier_p_value(fits, part, rule) for part in without], axis=1)
    for i, flag in enumerate(pair.arm):
        if (pair.arm == flag).sum() <= MIN_RUNGS_LEFT:
            p[:, i] = 1.0
    outlier = np.where(p.min(axis=1) < OUTLIER_LEVEL / arms, p.argmin(axis=1), -1)
    growth, by_what = least_squares.growth.copy(), least_squares.by_what.copy()
    claim, by_what_claim = np.zeros(len(y), bool), np.zeros(len(y), bool)
    for i in np.unique(outlier):
        chosen = outlier == i
        if i < 0:
            found, left_out = fits.rows(chosen), [part.rows(chosen) for part in without]
            partners = pair.partners
        else:
            found = _drop(fits.rows(chosen), rule, int(i))
            left_out = _leave_out_each(found, rule)
            partners = drop_partner(pair.partners, int(i))
        growth[chosen], by_what[chosen], claim[chosen], by_what_claim[chosen] = _judge(
            found, left_out, rule, partners
        )
    return DrawnAnswers(tests, least_squares, Answers(growth, by_what), claim, by_what_claim, outlier)


def _judge(
    fits: NestedFits,
    left_out: list[NestedFits],
    rule: DecisionRule,
    partners: tuple[NDArray[np.intp], NDArray[np.intp]] | None,
) -> tuple[NDArray[np.str_], NDArray[np.str_], Mask, Mask]:
    """Both answers, and whether they are claims, without a test for an outlier."""
    sets = len(fits.y)
    growth, by_what = np.full(sets, "undecided", "<U9"), np.full(sets, "", "<U26")
    claim, by_what_claim = np.zeros(sets, bool), np.zeros(sets, bool)
    # A stated noise that the scatter contradicts is not used. Seeds that match are paired if correlated.
    scatter = scatter_p_value(fits, rule) < CHECK_LEVEL
    paired = np.zeros(sets, bool)
    if partners is not None and rule.noise is None:
        paired = partner_correlation_p(fits, partners) < CHECK_LEVEL
    for use_scatter, pairing in ((a, b) for a in (False, True) for b in (False, True)):
        rows = (scatter == use_scatter) & (paired == pairing)
        if not rows.any():
            continue
        own_rule = replace(rule, noise=None) if use_scatter else rule
        points = replace(fits.pair, partners=partners if pairing else None)
        own = replace(fits.rows(rows), pair=points)
        tests = f_test_hypotheses(own, own_rule)
        plain = answer_questions(tests, own_rule)
        checks = check_noise(own, own.y, own_rule)
        checked, fragile = judge_checked(tests, checks, own_rule)
        robust = answer_questions(robust_tests(own, own.y, own_rule), own_rule)
        solid = ~fragile & (checked.growth != "undecided") & (robust.growth == checked.growth)
        solid_by_what = (checked.by_what != "") & confirms(checked.by_what, robust.by_what)
        for part in left_out:
            one = replace(part.rows(rows), pair=points)
            other = answer_questions(f_test_hypotheses(one, own_rule), own_rule)
            solid &= other.growth == plain.growth
            solid_by_what &= confirms(plain.by_what, other.by_what)
        growth[rows], by_what[rows] = checked.growth, checked.by_what
        claim[rows], by_what_claim[rows] = solid, solid & solid_by_what
    return growth, by_what, claim, by_what_claim


def _leave_out_each(fits: NestedFits, rule: DecisionRule) -> list[NestedFits]:
    """For each point, the fits with its weight set to zero; fitted in one batch, which is faster."""
    sets, points = fits.y.shape
    each = fits.rows(np.tile(np.arange(sets), points))
    weights = each.weights.copy()
    weights[np.arange(sets * points), np.repeat(np.arange(points), sets)] = 0.0
    found = fit_hypotheses(fits.pair, each.y, rule, weights=weights, warm_start=each)
    return [found.rows(np.arange(k * sets, (k + 1) * sets)) for k in range(points)]


def _drop(fits: NestedFits, rule: DecisionRule, point: int) -> NestedFits:
    """Fits to the other points."""
    kept = np.arange(len(fits.pair.x)) != point
    pair = LadderPair(fits.pair.x[kept], fits.pair.arm[kept], fits.pair.weights[kept])
    return fit_hypotheses(pair, fits.y[:, kept], rule, weights=fits.weights[:, kept], warm_start=fits)


def drop_partner(
    partners: tuple[NDArray[np.intp], NDArray[np.intp]] | None, point: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]] | None:
    """Partners without a point, numbered as in the ladders without it."""
    if partners is None:
        return None
    first, second = partners
    first, second = (part[(first != point) & (second != point)] for part in partners)
    return first - (first > point), second - (second > point)
