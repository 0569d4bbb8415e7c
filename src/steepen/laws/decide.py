"""What would decide between the exponent and its floor twin, and what error would undo a verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from steepen.laws.readings import Pair, PairFits, Rule, compare_readings, fit_readings, judge
from steepen.laws.solver import Array, Design, solve

POWER = 0.90
FURTHEST_DECADES = 12.0
MOST_EXCESS = 0.03


@dataclass(frozen=True)
class Decider:
    """What it would take to tell the two readings apart with 90% power, each remedy alone.

    `runs_factor`: that many times the runs (seeds, or rungs) in the same span. `top_flops`: extend both
    ladders to this compute at the present spacing (None beyond twelve decades). `apart_flops`: where the
    readings' predicted gap between the arms differs by three standard deviations of one run.
    """

    runs_factor: float
    top_flops: float | None
    extra_decades: float | None
    extra_rungs: int | None
    apart_flops: float | None


@dataclass(frozen=True)
class Tolerance:
    """The smallest unnoticed excess of loss at a ladder's top rung that changes the outcome; None: none up
    to 3%.

    A learning rate that is off can only raise a loss, so the excess is taken off the measured value.
    """

    ladder: str
    flops: float
    undoes_slope: float | None
    undoes_verdict: float | None
    verdict_then: str | None


def needed_noncentrality(freedom: float, level: float, power: float = POWER) -> float:
    """How strongly (in squared standard errors) an effect must show for an F-test with one degree to have
    the power.
    """
    if not math.isfinite(freedom):
        return float((special.ndtri(1 - level / 2) + special.ndtri(power)) ** 2)
    if freedom < 1:
        return math.inf
    critical = float(special.fdtri(1.0, freedom, 1.0 - level))
    low, high = 0.0, 10.0
    while special.ncfdtr(1.0, freedom, high, critical) > 1 - power:
        high *= 2
        if high > 1e7:
            return math.inf
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (
            (middle, high) if special.ncfdtr(1.0, freedom, middle, critical) > 1 - power else (low, middle)
        )
    return high


def separation(
    truth: Design, theta: Array, twin: Design, start: Array, pair: Pair, *, log: bool = False
) -> float:
    """The sum of squares the twin cannot explain when the truth is the other reading, without noise."""
    y = truth.predict(theta, pair.x)
    found = solve(twin, pair.x, y[None], start[None], weights=pair.weights[None], log=log, iterations=60)
    return float(found.objective[0])


def extended(pair: Pair, decades: float) -> Pair:
    """Both ladders carried on upwards at their own mean spacing."""
    x, arm, weights = [pair.x], [pair.arm], [pair.weights]
    for flag in (False, True):
        own = np.sort(pair.x[pair.arm == flag])
        step = max((own[-1] - own[0]) / (len(own) - 1), 1e-3)
        more = own[-1] + step * np.arange(1, int(decades * math.log(10) / step + 1e-9) + 1)
        x.append(more)
        arm.append(np.full(len(more), flag))
        weights.append(np.full(len(more), float(np.median(pair.weights[pair.arm == flag]))))
    return Pair(np.concatenate(x), np.concatenate(arm), np.concatenate(weights))


def what_would_decide(fits: PairFits, rule: Rule, c0: float) -> Decider:
    """Remedies for a tie of the exponent reading and its floor twin, each taken in turn as the truth."""
    pair = fits.pair
    variance = float(fits.variance("free", rule)[0])
    exponent, floor = (fits.solutions[name].theta[0] for name in ("exponent", "floor"))

    def strength(where: Pair) -> float:
        own = where.designs()
        first = separation(own["exponent"], exponent, own["floor"], floor, where, log=rule.log)
        second = separation(own["floor"], floor, own["exponent"], exponent, where, log=rule.log)
        return min(first, second) / variance

    def needed(points: int) -> float:
        return needed_noncentrality(math.inf if rule.noise else points - 6.0, rule.level)

    present = strength(pair)
    factor = needed(len(pair.x) * 4) / max(present, 1e-12)
    top = float(pair.x.max())
    spacing = max(
        np.ptp(pair.x[pair.arm == flag]) / (int((pair.arm == flag).sum()) - 1) for flag in (False, True)
    )

    def enough(count: int) -> bool:
        longer = extended(pair, count * spacing * 1.001 / math.log(10))
        return strength(longer) >= needed(len(longer.x))

    # A longer ladder always tells more, so halving finds the shortest that tells enough.
    low, high = -1, int(FURTHEST_DECADES * math.log(10) / spacing)
    decades, rungs = None, None
    if enough(high):
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        decades = high * spacing / math.log(10)
        rungs = len(extended(pair, decades * 1.001).x) - len(pair.x)

    # Along a fine line of compute: how differently do the readings see the gap between the arms?
    line = np.linspace(top, top + FURTHEST_DECADES * math.log(10), 1200)
    both = Pair(np.tile(line, 2), np.repeat([False, True], len(line)), np.ones(2 * len(line)))
    gaps = [
        np.diff(design.predict(theta, both.x).reshape(2, -1), axis=0)[0]
        for design, theta in ((both.designs()["exponent"], exponent), (both.designs()["floor"], floor))
    ]
    noise = math.sqrt(variance) * (float(fits.scale[0]) if rule.log else 1.0)
    far = np.flatnonzero(np.abs(gaps[0] - gaps[1]) >= 3 * noise)
    return Decider(
        runs_factor=max(1.0, factor),
        top_flops=None if decades is None else c0 * math.exp(top) * 10**decades,
        extra_decades=decades,
        extra_rungs=rungs,
        apart_flops=c0 * math.exp(float(line[far[0]])) if len(far) else None,
    )


def top_rung_tolerance(
    fits: PairFits, y: Array, rule: Rule, names: tuple[str, str], c0: float
) -> tuple[Tolerance, Tolerance]:
    """For each ladder, how much too high its top loss would have to be to undo the slope test, or the
    verdict.
    """
    excess = np.concatenate([[0.0], np.geomspace(1e-5, MOST_EXCESS, 60)])
    found: list[Tolerance] = []
    for name, flag in zip(names, (False, True), strict=True):
        own = np.flatnonzero(fits.pair.arm == flag)
        index = own[np.argmax(fits.pair.x[own])]
        data = np.repeat(y[None], len(excess), axis=0)
        data[:, index] *= 1.0 - excess
        tests = compare_readings(fit_readings(fits.pair, data, rule, warm=fits), rule)
        verdicts = judge(tests, rule)
        changed = np.flatnonzero(verdicts != verdicts[0])
        sign = np.sign(tests.delta_gamma[0])
        slope = np.flatnonzero((tests.p_slope >= rule.level) | (np.sign(tests.delta_gamma) != sign))
        # Lowering the reference's end closes a gap in the arm's favour, lowering the arm's end one against
        # it.
        closes = tests.p_slope[0] < rule.level and (sign > 0) != flag and len(slope) > 0
        loss = float(y[index])
        found.append(
            Tolerance(
                ladder=name,
                flops=c0 * math.exp(float(fits.pair.x[index])),
                undoes_slope=loss * float(excess[slope[0]]) if closes else None,
                undoes_verdict=loss * float(excess[changed[0]]) if len(changed) else None,
                verdict_then=str(verdicts[changed[0]]) if len(changed) else None,
            )
        )
    return found[0], found[1]
