"""What would decide between the exponent and its floor twin, and what error would undo a verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from steepen.laws.distributions import required_noncentrality
from steepen.laws.fits.solver import Array, Design, Mask, best_of, solve, solve_multistart
from steepen.laws.hypotheses.nested_models import (
    DecisionRule,
    FTests,
    LadderPair,
    NestedFits,
    f_test_hypotheses,
    fit_hypotheses,
    verdict_words,
)

MAX_EXTRA_DECADES = 12.0
MAX_LOSS_PENALTY = 0.03
MAX_RUNS_FACTOR = 100
DENSITY_PROBE = 4  # times the rungs, from which it is told what other multiples of them would show


@dataclass(frozen=True)
class Separation:
    """What it would take to tell the two readings apart with 90% power, each remedy alone.

    `seeds_factor`: that many times the seeds; they narrow every rung's mean, but how far rungs scatter about
    a law is known no better. `rungs_factor`: that many times the rungs in the same span (None beyond
    `MOST_RUNS`). `top_flops`: extend both
    ladders to this compute at the present spacing (None beyond twelve decades), which takes `extra_rungs`
    of both together and `extra_runs` with as many seeds as the ladders have now. `apart_flops`: where the
    readings' predicted gap between the arms differs by three standard deviations of one run.
    """

    seeds_factor: float
    rungs_factor: int | None
    top_flops: float | None
    extra_decades: float | None
    extra_rungs: int | None
    extra_runs: int | None
    three_sigma_flops: float | None


@dataclass(frozen=True)
class MistuningTolerance:
    """The smallest unnoticed excess of loss at a ladder's top rung that changes the outcome; None: none up
    to 3%.

    `undoes_slope` is the excess without which Δγ would be zero, so that the error alone explains it; it is
    asked only of the ladder where `may_fake_slope` (the reference's end if the arm is steeper, the arm's if
    it is shallower) and Δγ is resolved. A learning rate that is off can only raise a loss, so the excess is
    taken off the measured value.
    """

    ladder: str
    flops: float
    could_explain_slope: bool
    penalty_explaining_slope: float | None
    penalty_changing_verdict: float | None
    changed_verdict: str | None


def rival_rss(
    truth: Design, theta: Array, rival: Design, start: Array, pair: LadderPair, *, log: bool = False
) -> float:
    """The sum of squares the twin cannot explain when the truth is the other reading, without noise."""
    y = truth.predict(theta, pair.x)
    found = solve(rival, pair.x, y[None], start[None], weights=pair.weights[None], log=log, iterations=100)
    if not found.converged[0]:
        found = best_of(found, solve_multistart(rival, pair.x, y[None], weights=pair.weights[None], log=log))
    return float(found.objective[0])


def extend(pair: LadderPair, decades: float) -> LadderPair:
    """Both ladders carried on upwards at their own mean spacing."""
    x, arm, weights = [pair.x], [pair.arm], [pair.weights]
    for flag in (False, True):
        own = np.sort(pair.x[pair.arm == flag])
        step = max((own[-1] - own[0]) / (len(own) - 1), 1e-3)
        more = own[-1] + step * np.arange(1, int(decades * math.log(10) / step + 1e-9) + 1)
        x.append(more)
        arm.append(np.full(len(more), flag))
        weights.append(np.full(len(more), float(np.median(pair.weights[pair.arm == flag]))))
    return LadderPair(np.concatenate(x), np.concatenate(arm), np.concatenate(weights))


def densify(pair: LadderPair, factor: int) -> LadderPair:
    """That many times the rungs of both ladders, evenly over the span each has."""
    x, arm, weights = list[Array](), list[Mask](), list[Array]()
    for flag in (False, True):
        own = pair.x[pair.arm == flag]
        count = len(own) * factor
        x.append(np.interp(np.linspace(0, len(own) - 1, count), np.arange(len(own)), np.sort(own)))
        arm.append(np.full(count, flag))
        weights.append(np.full(count, float(pair.weights[pair.arm == flag].mean())))
    return LadderPair(np.concatenate(x), np.concatenate(arm), np.concatenate(weights))


def separate_hypotheses(fits: NestedFits, rule: DecisionRule, c0: float) -> Separation:
    """Remedies for a tie of the exponent reading and its floor twin, each taken in turn as the truth."""
    pair = fits.pair
    variance = float(fits.variance("free", rule)[0])
    exponent, floor = (fits.solutions[name].theta[0] for name in ("exponent", "irreducible"))

    def strength(where: LadderPair) -> float:
        own = where.designs()
        first = rival_rss(own["exponent"], exponent, own["irreducible"], floor, where, log=rule.log)
        second = rival_rss(own["irreducible"], floor, own["exponent"], exponent, where, log=rule.log)
        return min(first, second) / variance

    def needed(points: int) -> float:
        return required_noncentrality(math.inf if rule.noise else points - 6.0, rule.level)

    def tells(where: LadderPair) -> bool:
        return strength(where) >= needed(len(where.x))

    seeds = needed(len(pair.x)) / max(strength(pair), 1e-12)
    each = (
        strength(densify(pair, DENSITY_PROBE)) / DENSITY_PROBE
    )  # what one more of each rung adds, once they are many
    enough_rungs = (k for k in range(1, MAX_RUNS_FACTOR) if k * each >= needed(len(pair.x) * k))
    top = float(pair.x.max())
    spacing = max(
        np.ptp(pair.x[pair.arm == flag]) / (int((pair.arm == flag).sum()) - 1) for flag in (False, True)
    )

    def enough(count: int) -> bool:
        return tells(extend(pair, count * spacing * 1.001 / math.log(10)))

    # A longer ladder always tells more, so halving finds the shortest that tells enough.
    low, high = -1, int(MAX_EXTRA_DECADES * math.log(10) / spacing)
    decades, rungs, runs = None, None, None
    if enough(high):
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        decades = high * spacing / math.log(10)
        longer = extend(pair, decades * 1.001)
        rungs = len(longer.x) - len(pair.x)
        runs = round(float(longer.weights[len(pair.x) :].sum()))

    # Along a fine line of compute: how differently do the readings see the gap between the arms?
    line = np.linspace(top, top + MAX_EXTRA_DECADES * math.log(10), 1200)
    both = LadderPair(np.tile(line, 2), np.repeat([False, True], len(line)), np.ones(2 * len(line)))
    gaps = [
        np.diff(design.predict(theta, both.x).reshape(2, -1), axis=0)[0]
        for design, theta in ((both.designs()["exponent"], exponent), (both.designs()["irreducible"], floor))
    ]
    noise = math.sqrt(variance) * (float(fits.scale[0]) if rule.log else 1.0)
    far = np.flatnonzero(np.abs(gaps[0] - gaps[1]) >= 3 * noise)
    return Separation(
        seeds_factor=max(1.0, seeds),
        rungs_factor=next(enough_rungs, None),
        top_flops=None if decades is None else c0 * math.exp(top) * 10**decades,
        extra_decades=decades,
        extra_rungs=rungs,
        extra_runs=runs,
        three_sigma_flops=c0 * math.exp(float(line[far[0]])) if len(far) else None,
    )


def mistuning_tolerance(
    fits: NestedFits, y: Array, rule: DecisionRule, names: tuple[str, str], c0: float
) -> tuple[MistuningTolerance, MistuningTolerance]:
    """For each ladder, how much too high its top loss would have to be to explain the slope by itself,
    or to change the verdict.
    """
    found: list[MistuningTolerance] = []
    for name, flag in zip(names, (False, True), strict=True):
        own = np.flatnonzero(fits.pair.arm == flag)
        index = int(own[np.argmax(fits.pair.x[own])])

        def lowered(excess: Array, index: int = index) -> FTests:
            data = np.repeat(y[None], len(excess), axis=0)
            data[:, index] *= 1.0 - excess
            return f_test_hypotheses(fit_hypotheses(fits.pair, data, rule, warm_start=fits), rule)

        excess = np.concatenate([[0.0], np.geomspace(1e-5, MAX_LOSS_PENALTY, 60)])
        tests = lowered(excess)
        verdicts = verdict_words(tests, rule)
        changed = _first(verdicts != verdicts[0])
        then = None if changed is None else str(verdicts[changed])
        at = math.nan
        if changed is not None:
            # Once more between the last excess that kept the verdict and the first that did not.
            between = np.linspace(excess[changed - 1], excess[changed], 41)
            again = verdict_words(lowered(between), rule)
            sooner = _first(again != verdicts[0])
            at, then = (
                (float(between[sooner]), str(again[sooner])) if sooner else (float(excess[changed]), then)
            )
        sign = float(np.sign(tests.delta_gamma[0]))
        # Lowering the reference's end closes a gap in the arm's favour, lowering the arm's end one against
        # it.
        may = bool(tests.p_slope[0] < rule.level and (sign > 0) != flag)
        zero = _crossing(fits, y, index, sign, log=rule.log) if may else None
        loss = float(y[index])
        found.append(
            MistuningTolerance(
                ladder=name,
                flops=c0 * math.exp(float(fits.pair.x[index])),
                could_explain_slope=may,
                penalty_explaining_slope=None if zero is None else loss * zero,
                penalty_changing_verdict=None if changed is None else loss * at,
                changed_verdict=then,
            )
        )
    return found[0], found[1]


def _first(mask: Mask) -> int | None:
    """The first place that is true."""
    return int(np.argmax(mask)) if mask.any() else None


def _crossing(fits: NestedFits, y: Array, index: int, sign: float, *, log: bool) -> float | None:
    """By bisection, the share of one loss whose removal brings the fitted Δγ to zero; None up to 3%."""
    design, theta = fits.designs["exponent"], fits.solutions["exponent"].theta

    def kept(excess: float) -> bool:
        data = y.copy()
        data[index] *= 1.0 - excess
        found = solve(design, fits.pair.x, data[None], theta, weights=fits.weights, log=log, iterations=80)
        return float(found.theta[0, 4]) * sign > 0

    low, high = 0.0, MAX_LOSS_PENALTY
    if kept(high):
        return None
    while high - low > 1e-4 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if kept(middle) else (low, middle)
    return high
