"""Whether the numbers of a ladder's runs are those of a tuned ladder, or tell of an error of the rate.

One test decides: the odds of all errors together, one rung's or a drift along the ladder, against a tuned
ladder. No test finds more of these errors on average. Its limit is a quantile of the odds of tuned ladders
with these rungs, which are simulated. The scatters and responses are those of ladders of `tiny` and `mini`
(docs/log.md, "Mistuned rungs"; benchmarks/mistuned_ladders.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import logsumexp

from steepen.utils.arrays import Array, Mask

Numbers = tuple[float, float, float, float]  # log loss, fall, log gradient ratio, log stream

LEVEL = 0.05  # of a false alarm in a ladder
MIN_RUNGS = 4
DRAWS = 10_000  # of tuned ladders, for the limit
FREEDOM = 60.0  # degrees of freedom for which the scatters below count, each number with its own scale
LONG_STEPS = 5000  # of runs that have these scatters; the variances of others are as 1 + SHORT / steps
SHORT = (400.0, 400.0, 8000.0, 2000.0)

RUNG: Numbers = (0.0035, 0.0045, 0.05, 0.05)  # standard deviation of a rung
# How trends of tuned ladders differ: standard deviations of the slope per unit of log compute (infinite: any)
# and of the bend, how far the ends are above the middle. What ladders of a preset share, and each of its own.
SHARED: tuple[Numbers, Numbers] = ((0.0, 0.010, 0.0, 0.02), (0.010, 0.015, 0.05, 0.12))
OWN: tuple[Numbers, Numbers] = ((math.inf, 0.007, math.inf, 0.063), (0.008, 0.010, 0.046, 0.075))
Trends = tuple[tuple[float, ...], tuple[float, ...]]  # standard deviations of slopes and bends


@dataclass(frozen=True)
class Response:
    """What half the rate, and twice it, do to the numbers: means, and standard deviations about them."""

    share: float  # of errors that look so
    half: tuple[Numbers, Numbers]
    twice: tuple[Numbers, Numbers]


RESPONSES = (
    # Runs of thousands of steps, of hundreds, and arms whose stream does not follow the rate.
    Response(
        0.70,
        ((0.008, 0.010, 0.0, -0.33), (0.007, 0.009, 0.04, 0.05)),
        ((0.012, -0.010, 0.25, 0.38), (0.010, 0.012, 0.15, 0.15)),
    ),
    Response(
        0.18,
        ((0.035, 0.035, 0.0, -0.35), (0.015, 0.030, 0.10, 0.20)),
        ((0.015, -0.050, 0.45, 1.70), (0.012, 0.030, 0.20, 0.80)),
    ),
    Response(
        0.12,
        ((0.035, 0.040, -0.15, 0.0), (0.015, 0.020, 0.15, 0.0)),
        ((0.020, -0.060, 0.15, 0.0), (0.012, 0.030, 0.20, 0.0)),
    ),
)
HIGH_LOSS = (0.02, 0.02)  # of a rung that only its loss tells, mean and standard deviation
POWERS = np.array([2, 1, 2, 1])  # of log rate, that the numbers follow: about the best rate the loss is flat
BOTH: tuple[float, float] = (math.sqrt(2), math.sqrt(0.5))  # factors that check a rate too low, too high


@dataclass(frozen=True)
class FoundError:
    """The likeliest error of a ladder that does not look tuned."""

    rung: int | None
    factor: float | None
    p_value: float  # how often a tuned ladder looks as suspicious


def off_the_curve(
    x: Array, numbers: Array, steps: Array, others: Sequence[tuple[Array, Array]] = ()
) -> list[FoundError]:
    """Rungs off the curve of the others, most significant first; a drift alone, if it is more so.

    A ladder has the log compute, four numbers and steps of its rungs; `others` are log compute and numbers of
    further ladders that share a part of its trends.
    """
    left, trends = _less_shared(x, numbers, others)
    found: list[FoundError] = []
    rungs = np.arange(len(x))
    while len(rungs) >= MIN_RUNGS:
        own = left[rungs]
        known = np.isfinite(own)
        places = tuple(np.round(x[rungs] - x[rungs[0]], 6).tolist())
        columns = tuple(map(tuple, known.tolist()))
        test = _test_of(places, tuple(steps[rungs].tolist()), columns, trends)
        best = test.likeliest(np.where(known, own, 0.0))
        if best is None:
            break
        if best.rung is None:
            return found or [best]
        found.append(FoundError(int(rungs[best.rung]), best.factor, best.p_value))
        rungs = np.delete(rungs, best.rung)
    return found


def _less_shared(x: Array, numbers: Array, others: Sequence[tuple[Array, Array]]) -> tuple[Array, Trends]:
    """The numbers less what others tell of the trends that all share, and the trends that may be left."""
    middle = x.mean()
    half = np.abs(x - middle).max()
    left, trends = numbers.copy(), np.zeros((2, 4))
    for k, rung in enumerate(RUNG):
        shared, own = (np.array([one[k] for one in both]) ** 2 for both in (SHARED, OWN))
        seen: list[Array] = []
        told = np.zeros(2)  # the precision of the shared slope and bend, as others show them
        for at, values in others:
            known = np.isfinite(values[:, k])
            if len(np.unique(at[known])) < MIN_RUNGS:
                continue
            along = at[known] - middle
            design = np.stack([np.ones(len(along)), along, (along / half) ** 2], axis=1)
            inverse = np.linalg.inv(design.T @ design)
            seen.append((inverse @ design.T @ values[known, k])[1:])
            told += 1 / (own + rung**2 * np.diag(inverse)[1:])
        if seen:  # their median, as one may be mistuned itself, as far as it is not each ladder's own
            slope, bend = np.median(seen, axis=0) * shared * told / (1 + shared * told)
            left[:, k] -= slope * (x - middle) + bend * ((x - middle) / half) ** 2
        trends[:, k] = np.sqrt(own + shared / (1 + shared * told))
    slopes, bends = np.round(trends, 6).tolist()
    return left, (tuple(slopes), tuple(bends))


@dataclass(frozen=True)
class _Error:
    """An error that may be: of a rung, or along the ladder (None), and its weight before the numbers."""

    rung: int | None
    factor: float | None  # of the rate that checks it
    mean: Array  # of what it does to the numbers (rungs, numbers)
    roots: Array  # standard deviations about it (rungs, numbers, 2): columns that vary independently
    weight: float


def _errors(x: Array) -> list[_Error]:
    """The errors that are looked for in a ladder."""
    rungs = len(x)
    along = 2 * (x - x[0]) / (x[-1] - x[0]) - 1
    # The more rungs, the surer one that is off; drifts stay as hard, so they get more of the level.
    drifts = min(0.1 * rungs, 0.9)
    by_loss = 0.05 * (1 - drifts)
    found: list[_Error] = []
    for response in RESPONSES:
        share = response.share
        for factor, sign in zip(BOTH, (-1, 1), strict=True):
            for i in range(rungs):
                weight = share * (1 - drifts - by_loss) / (2 * rungs)
                found.append(_error(i, factor, sign * np.eye(rungs)[i], response, weight))
            # A rate that rises along the ladder is too high at its top.
            found.append(_error(None, factor, sign * along, response, share * drifts / 2))
    for i in range(rungs):
        mean, roots = np.zeros((rungs, 4)), np.zeros((rungs, 4, 2))
        mean[i, 0], roots[i, 0, 0] = HIGH_LOSS
        found.append(_Error(i, None, mean, roots, by_loss / rungs))
    return found


def _error(rung: int | None, factor: float, off: Array, response: Response, weight: float) -> _Error:
    """Rates that are off by powers of two (rungs)."""
    sides = [np.maximum(side, 0.0)[:, None] ** POWERS for side in (-off, off)]
    parts = [response.half, response.twice]
    mean = sum((side * part[0] for side, part in zip(sides, parts, strict=True)), np.zeros((len(off), 4)))
    roots = np.stack([side * part[1] for side, part in zip(sides, parts, strict=True)], axis=2)
    return _Error(rung, factor, mean, roots, weight)


@lru_cache(maxsize=256)
def _test_of(
    x: tuple[float, ...], steps: tuple[int, ...], known: tuple[tuple[bool, ...], ...], trends: Trends
) -> LadderTest:
    """The test of ladders with these rungs; most ladders of a study have the same."""
    return LadderTest(np.array(x), np.array(steps), np.array(known), trends)


class LadderTest:
    """The odds that a ladder of these rungs is mistuned, and their limit among tuned ladders.

    A number along a tuned ladder has a multivariate t-distribution: any constant, a slope, a bend, and noise.
    An error shifts its mean and adds the variance of the response. The odds are those of Bayes' rule.
    """

    def __init__(self, x: Array, steps: Array, known: Mask, trends: Trends) -> None:
        self.errors = _errors(x)
        self.weights = np.log([one.weight for one in self.errors])
        along = x - x.mean()
        curve = (along / np.abs(along).max()) ** 2
        generator = np.random.default_rng(0)
        tuned = np.zeros((DRAWS, len(x), 4))
        self.columns: list[Column] = []
        for k, few in enumerate(SHORT):
            rung, slope, bend = RUNG[k], trends[0][k], trends[1][k]
            size = np.sqrt((1 + few / steps) / (1 + few / LONG_STEPS))
            shapes = [(along * size, slope), (curve * size, bend)]
            tuned[:, :, k] = rung * size * generator.standard_normal((DRAWS, len(x)))
            covariance = np.diag((rung * size) ** 2) + (1e3 * rung) ** 2
            for shape, spread in shapes:
                if math.isfinite(spread):  # what may be anything changes no odds
                    tuned[:, :, k] += spread * np.outer(generator.standard_normal(DRAWS), shape)
                covariance += min(spread, 1e3 * rung) ** 2 * np.outer(shape, shape)
            own = known[:, k]
            mean = np.stack([one.mean[own, k] for one in self.errors])
            roots = np.stack([one.roots[own, k] for one in self.errors])
            inverse = np.asarray(np.linalg.inv(covariance[np.ix_(own, own)]), float)
            self.columns.append(Column(k, own, inverse, mean, roots))
        self.tuned = np.sort(logsumexp(self.log_odds(tuned), axis=1))
        # Less what the limit of so many draws is uncertain by.
        self.level = LEVEL - 2 * math.sqrt(LEVEL * (1 - LEVEL) / DRAWS)

    def log_odds(self, numbers: Array) -> Array:
        """Of every error against none (ladders, errors), from numbers (ladders, rungs, numbers)."""
        return self.weights + sum(column.log_ratios(numbers) for column in self.columns)

    def likeliest(self, numbers: Array) -> FoundError | None:
        """The error of a ladder (rungs, numbers) that is likeliest, if its odds are beyond the limit."""
        odds = self.log_odds(numbers[None])[0]
        above = DRAWS - int(np.searchsorted(self.tuned, logsumexp(odds)))
        p_value = (1 + above) / (1 + DRAWS)
        if p_value > self.level:
            return None
        by_rung: dict[int | None, float] = {}
        by_side: dict[tuple[int | None, float | None], float] = {}
        for one, log in zip(self.errors, odds.tolist(), strict=True):
            by_rung[one.rung] = float(np.logaddexp(by_rung.get(one.rung, -math.inf), log))
            side = one.rung, one.factor
            by_side[side] = float(np.logaddexp(by_side.get(side, -math.inf), log))
        rung = max(by_rung, key=lambda one: by_rung[one])
        sides = {factor: value for (at, factor), value in by_side.items() if at == rung}
        return FoundError(rung, max(sides, key=lambda one: sides[one]), p_value)


class Column:
    """One of the four numbers along a ladder, at the rungs where it is known."""

    def __init__(self, k: int, own: Mask, inverse: Array, mean: Array, roots: Array) -> None:
        self.k, self.own, self.inverse = k, own, inverse
        self.shift = 2 * inverse @ mean.T  # (rungs, errors)
        self.length = np.einsum("er,rq,eq->e", mean, inverse, mean)
        # The variances that errors add, roots @ roots.T, by the identity of Woodbury.
        scaled = inverse @ roots
        inner = np.eye(2) + np.swapaxes(roots, 1, 2) @ scaled
        self.determinants = np.linalg.slogdet(inner)[1]
        scaled = scaled @ np.linalg.cholesky(np.linalg.inv(inner))
        self.roots = [scaled[:, :, side].T for side in (0, 1)]
        self.offsets = [np.einsum("er,er->e", mean, scaled[:, :, side]) for side in (0, 1)]

    def log_ratios(self, numbers: Array) -> Array:
        """Log density of every error over that of none (ladders, errors)."""
        values = numbers[:, self.own, self.k]
        tuned = np.sum(values @ self.inverse * values, axis=1)[:, None]
        shifted = tuned - values @ self.shift + self.length
        for roots, offset in zip(self.roots, self.offsets, strict=True):
            shifted -= (values @ roots - offset) ** 2
        ratio = np.log((FREEDOM + np.maximum(shifted, 0.0)) / (FREEDOM + tuned))
        return -0.5 * (self.determinants + (FREEDOM + int(self.own.sum())) * ratio)
