"""Bootstrap and leave-one-out: the verdict on resampled ladders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from steepen.laws.distributions import Interval
from steepen.laws.fits.solver import Array, jacobian, unscaled_covariance
from steepen.laws.hypotheses.nested_models import (
    VERDICTS,
    ByWhat,
    DecisionRule,
    Growth,
    NestedFits,
    VerdictLabel,
    answer_questions,
    f_test_hypotheses,
    fit_hypotheses,
    verdict_label,
    verdict_words,
)
from steepen.laws.ladder import Ladder

MIN_DRAWS = 200
MAX_POINTS_DRAWN = 1_000_000
MAX_LEFT_OUT_PER_END = 50


@dataclass(frozen=True)
class Resampling:
    """Percentile interval of Δγ over bootstrap draws, and the fraction of draws with each verdict."""

    kind: str
    draws: int
    delta_gamma: Interval
    verdict_fractions: dict[str, float]


@dataclass(frozen=True)
class LeaveOneOut:
    """The verdict without one rung."""

    place: str
    arm: str
    flops: float
    delta_gamma: float
    p_slope: float
    growth: Growth
    by_what: ByWhat | None

    @property
    def verdict(self) -> VerdictLabel:
        """Both answers as one word."""
        return verdict_label(self.growth, self.by_what)


def residual_draws(
    fits: NestedFits, y: Array, rule: DecisionRule, draws: int, rng: np.random.Generator
) -> Array:
    """Residual bootstrap of the free model: (draws, points) losses.

    Residuals are scaled by their leverage first; otherwise draws scatter less than the measurements.
    """
    design, x, weights = fits.designs["free"], fits.pair.x, fits.weights[0]
    theta = fits.solutions["free"].theta[:1]
    predicted = design.predict(theta, x)[0]
    residual = np.log(y / predicted) if rule.log else y - predicted
    j = jacobian(design, x, theta, rule.log)[0]
    inverse = unscaled_covariance(design, x, theta, weights=weights, log=rule.log)[0]
    leverage = np.einsum("ni,ij,nj->n", j, inverse, j) * weights
    scaled = residual * np.sqrt(weights) / np.sqrt(np.maximum(1.0 - leverage, 1e-3))
    if fits.pair.clusters is not None:
        # Rows of one run keep their residuals, with a common random sign (wild cluster bootstrap), and are
        # scaled by the leverage of the run.
        clusters = fits.pair.clusters
        of_run = np.bincount(clusters, leverage)[clusters]
        sign = rng.choice([-1.0, 1.0], size=(draws, int(clusters.max()) + 1))
        noise = residual / np.sqrt(np.maximum(1 - of_run, 0.1)) * sign[:, clusters]
    else:
        # A ladder with as many rungs as parameters has residuals of zero, which say nothing about noise.
        pool = np.flatnonzero(leverage <= max(1 - 1e-6, float(leverage.min())))
        drawn = pool[rng.integers(len(pool), size=(draws, len(x)))]
        if fits.pair.partners is not None:
            # Partners keep a common error: both take the residuals of the same pair.
            first, second = fits.pair.partners
            pairs = rng.integers(len(first), size=(draws, len(first)))
            drawn[:, first], drawn[:, second] = first[pairs], second[pairs]
        noise = (scaled - scaled[pool].mean())[drawn] / np.sqrt(weights)
    return predicted * np.exp(noise) if rule.log else predicted + noise


def cluster_inflation(fits: NestedFits, y: Array, rule: DecisionRule) -> float:
    """By how much points that share runs widen the variance of Δ log A and Δγ: 1 where none do.

    The larger ratio of the cluster-robust variance (residuals scaled by 1 − leverage, which is on the safe
    side with few runs) to the variance of independent points; at least 1.
    """
    clusters = fits.pair.clusters
    if clusters is None:
        return 1.0
    design, x, weights = fits.designs["exponent"], fits.pair.x, fits.weights[0]
    theta = fits.solutions["exponent"].theta[:1]
    predicted = design.predict(theta, x)[0]
    residual = np.log(y / predicted) if rule.log else y - predicted
    j = jacobian(design, x, theta, rule.log)[0]
    inverse = unscaled_covariance(design, x, theta, weights=weights, log=rule.log)[0]
    leverage = np.einsum("ni,ij,nj->n", j, inverse, j) * weights
    scores = j * (weights * residual / np.maximum(1 - leverage, 0.05))[:, None]
    freedom = len(x) - design.n_parameters
    variance = float((weights * residual**2).sum()) / max(freedom, 1)
    summed = np.stack([scores[clusters == i].sum(axis=0) for i in range(int(clusters.max()) + 1)])
    robust = inverse @ (summed.T @ summed) @ inverse
    ratios = [robust[i, i] / max(inverse[i, i] * variance, 1e-300) for i in (2, 4)]
    return max(1.0, *ratios)


def seed_draws(
    ladders: tuple[Ladder, Ladder],
    draws: int,
    rng: np.random.Generator,
    partners: tuple[NDArray[np.intp], NDArray[np.intp]] | None = None,
) -> Array | None:
    """Rung means of seeds resampled within each rung: (draws, rungs); None if no rung has two seeds.

    With k seeds the variance of a resampled mean is too small by (k − 1)/k, so deviations are rescaled.
    `partners` are drawn the same seeds.
    """
    if all(len(runs) < 2 for ladder in ladders for runs in ladder.runs):
        return None
    of_reference = {} if partners is None else {int(k): int(i) for i, k in zip(*partners, strict=True)}
    columns, drawn = list[Array](), list[NDArray[np.intp]]()
    for ladder in ladders:
        for place, (loss, runs) in enumerate(zip(ladder.loss, ladder.runs, strict=True)):
            count, partner = len(runs), of_reference.get(len(columns))
            drawn.append(rng.integers(count, size=(draws, count)) if partner is None else drawn[partner])
            by_name = np.argsort(ladder.seed_names[place]) if of_reference else slice(None)
            deviation = (runs[by_name] - runs.mean()) * np.sqrt(count / max(count - 1, 1))
            columns.append(loss + deviation[drawn[-1]].mean(axis=1))
    return np.stack(columns, axis=1)


def bootstrap(
    ladders: tuple[Ladder, Ladder],
    fits: NestedFits,
    y: Array,
    rule: DecisionRule,
    *,
    confidence: float,
    draws: int,
    seed: int,
) -> tuple[tuple[Resampling, ...], NestedFits]:
    """Residual and seed bootstrap; also return the residual bootstrap's fits, for bands of multipliers."""
    rng = np.random.default_rng(seed)
    # Long ladders are well determined and slow to refit, so they get fewer draws; `draws` reports it.
    draws = min(draws, max(MIN_DRAWS, MAX_POINTS_DRAWN // len(y)))
    found: list[Resampling] = []
    residual_fits = fits
    for kind, data in (
        ("residuals", residual_draws(fits, y, rule, draws, rng)),
        ("seeds", seed_draws(ladders, draws, rng, fits.pair.partners)),
    ):
        if data is None:
            continue
        resampled_fits = fit_hypotheses(fits.pair, data, rule, warm_start=fits)
        residual_fits = resampled_fits if kind == "residuals" else residual_fits
        tests = f_test_hypotheses(resampled_fits, rule)
        words = verdict_words(tests, rule)
        tail = (1 - confidence) / 2
        low, high = np.quantile(tests.delta_gamma, [tail, 1 - tail])
        fractions = {word: float(np.mean(words == word)) for word in VERDICTS}
        found.append(Resampling(kind, draws, (float(low), float(high)), fractions))
    return tuple(found), residual_fits


def fit_without_each(fits: NestedFits, rule: DecisionRule) -> tuple[NDArray[np.intp], NestedFits | None]:
    """Fits to the only data set without each of its points, by weights of zero; which points these are.

    In a very long ladder only rungs near the ends are left out: they have the leverage on the slope.
    """
    if len(fits.pair.x) - 1 < 7:
        return np.zeros(0, np.intp), None
    chosen: list[int] = []
    for flag in (False, True):
        own = np.flatnonzero(fits.pair.arm == flag)
        chosen += [int(p) for i, p in enumerate(own) if min(i, len(own) - 1 - i) < MAX_LEFT_OUT_PER_END]
    weights = np.repeat(fits.pair.weights[None], len(chosen), axis=0)
    weights[np.arange(len(chosen)), chosen] = 0.0
    return np.array(chosen), fit_hypotheses(fits.pair, fits.y, rule, weights=weights, warm_start=fits)


def leave_one_out(
    ladders: tuple[Ladder, Ladder], points: NDArray[np.intp], left_out: NestedFits | None, rule: DecisionRule
) -> tuple[LeaveOneOut, ...]:
    """The verdict without each of `points`, from the fits without them."""
    if left_out is None:
        return ()
    tests = f_test_hypotheses(left_out, rule)
    answers = answer_questions(tests, rule)
    rungs = [
        (place, ladder.arm, float(flops))
        for ladder in ladders
        for place, flops in zip(ladder.row_labels, ladder.flops, strict=True)
    ]
    return tuple(
        LeaveOneOut(
            *rungs[int(point)],
            float(tests.delta_gamma[i]),
            float(tests.p_slope[i]),
            cast(Growth, str(answers.growth[i])),
            cast(ByWhat, str(answers.by_what[i])) if answers.by_what[i] else None,
        )
        for i, point in enumerate(points)
    )
