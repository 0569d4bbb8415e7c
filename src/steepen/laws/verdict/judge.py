"""Compare one arm with the reference: fit and test the nested models, and build the verdict."""

from __future__ import annotations

import math
from typing import cast

import numpy as np

from steepen.laws.distributions import Interval, t_quantile
from steepen.laws.fits.compute_law import FitSettings, default_c0
from steepen.laws.fits.profile_likelihood import LeastSquaresFit, profile_intervals
from steepen.laws.fits.solver import Array, unscaled_covariance
from steepen.laws.hypotheses.bootstrap import bootstrap, leave_one_out
from steepen.laws.hypotheses.nested_models import (
    HYPOTHESES,
    DecisionRule,
    FTests,
    Hypothesis,
    LadderPair,
    NestedFits,
    VerdictWord,
    f_test_hypotheses,
    fit_hypotheses,
    verdict_words,
)
from steepen.laws.ladder import Ladder
from steepen.laws.verdict.evidence import Evidence, HypothesisFit, Prediction, Verdict
from steepen.laws.verdict.sensitivity import mistuning_tolerance, separate_hypotheses
from steepen.laws.verdict.sentences import verdict_sentence, what_would_change

MIN_EXPONENT = 1e-6  # below this a curve counts as not falling with compute
MAX_MULTIPLIER = 1e30  # above this (or below its inverse) a multiplier is reported as NaN


def judge_arm(
    reference: Ladder,
    arm: Ladder,
    settings: FitSettings,
    rule: DecisionRule,
    *,
    draws: int = 2000,
    seed: int = 0,
    budget: float | None = None,
    unit: str = "FLOPs",
) -> Verdict:
    """Verdict on `arm` against `reference`, from these two ladders alone: other arms do not change it."""
    evidence = gather_evidence(
        reference, arm, settings, rule, draws=draws, seed=seed, budget=budget, unit=unit
    )
    return Verdict(
        **vars(evidence),
        sentence=verdict_sentence(evidence),
        what_would_change=tuple(what_would_change(evidence)),
    )


def gather_evidence(
    reference: Ladder,
    arm: Ladder,
    settings: FitSettings,
    rule: DecisionRule,
    *,
    draws: int,
    seed: int,
    budget: float | None,
    unit: str,
) -> Evidence:
    """Fits, tests, bootstraps, leave-one-out and sensitivity of one arm against the reference."""
    c0 = settings.c0 or default_c0(reference)
    pair = LadderPair(
        np.log(np.concatenate([reference.flops, arm.flops]) / c0),
        np.repeat([False, True], [len(reference.flops), len(arm.flops)]),
        np.concatenate([reference.seeds, arm.seeds]),
    )
    y = np.concatenate([reference.loss, arm.loss])
    fits = fit_hypotheses(pair, y, rule)
    tests = f_test_hypotheses(fits, rule)
    resamplings, residual_fits = bootstrap(
        (reference, arm), fits, y, rule, confidence=settings.confidence, draws=draws, seed=seed
    )
    top = float(reference.flops[-1])
    prediction_points = [("10× the top rung", 10 * top), ("1000× the top rung", 1000 * top)]
    if budget is not None:
        prediction_points.append((f"{budget:.3g} {unit}", budget))
    delta_gamma, p_slope = float(tests.delta_gamma[0]), float(tests.p_slope[0])
    multiplier_flops = _highest_common_compute(reference, arm)
    log_multiplier = _log_multiplier(
        "exponent", fits.solutions["exponent"].theta, np.array([math.log(multiplier_flops / c0)])
    )
    return Evidence(
        arm=arm.arm,
        reference=reference.arm,
        word=cast(VerdictWord, str(verdict_words(tests, rule)[0])),
        rule=rule,
        delta_gamma=delta_gamma,
        delta_gamma_interval=_delta_gamma_interval("exponent", 4, fits, y, settings, rule),
        delta_e=float(tests.delta_e[0]),
        p_slope=p_slope,
        p_slope_one_sided=p_slope / 2 if delta_gamma > 0 else 1 - p_slope / 2,
        p_shift=float(tests.p_shift[0]),
        p_exponent_hypothesis=float(tests.p_exponent_hypothesis[0]),
        p_irreducible_hypothesis=float(tests.p_irreducible_hypothesis[0]),
        delta_gamma_free=float(tests.delta_gamma_free[0]),
        delta_gamma_free_interval=_delta_gamma_interval("free", 5, fits, y, settings, rule),
        sigma=math.sqrt(float(fits.variance("free", rule)[0])) * (float(y.mean()) if rule.log else 1.0),
        multiplier=float(_usable_multiplier(log_multiplier)[0, 0]),
        multiplier_flops=multiplier_flops,
        c0=c0,
        hypotheses={
            name: _hypothesis_fit(
                name,
                fits,
                residual_fits,
                tests,
                prediction_points=prediction_points,
                c0=c0,
                confidence=settings.confidence,
            )
            for name in HYPOTHESES
            if name != "same"
        },
        bootstraps=resamplings,
        leave_one_out=leave_one_out((reference, arm), fits, y, rule),
        separation=separate_hypotheses(fits, rule, c0),
        tolerance=mistuning_tolerance(fits, y, rule, (reference.arm, arm.arm), c0),
        unit=unit,
    )


def _highest_common_compute(reference: Ladder, arm: Ladder) -> float:
    """The highest compute both ladders reach (the reference's top rung, if they share no span)."""
    low, high = max(reference.flops[0], arm.flops[0]), min(reference.flops[-1], arm.flops[-1])
    return float(high if low < high else reference.flops[-1])


def _log_multiplier(hypothesis: Hypothesis, theta: Array, x: Array) -> Array:
    """log(C / C_arm) at the reference's log compute x: (data sets, parameters) θ → (data sets, len(x))."""
    pair = LadderPair(np.tile(x, 2), np.repeat([False, True], len(x)), np.ones(2 * len(x)))
    design = pair.designs()[hypothesis]
    irreducible, constant, exponent = design.split(theta)
    reducible = design.predict(theta, pair.x)[:, : len(x)] - irreducible[:, -1:]
    gamma_arm = exponent.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ratio = constant.sum(axis=1, keepdims=True) - np.log(reducible)
        # A flat arm is above the reference's loss at every compute, or below it at every compute.
        log = np.where(
            gamma_arm > MIN_EXPONENT, x - log_ratio / gamma_arm, np.where(log_ratio > 0, -np.inf, np.inf)
        )
    # The arm never reaches a loss at or below its irreducible loss.
    return np.where(reducible > 0, log, -np.inf)


def _usable_multiplier(log_multiplier: Array) -> Array:
    """exp(log_multiplier); NaN beyond MAX_MULTIPLIER, where one of the curves does not fall."""
    usable = np.abs(log_multiplier) < math.log(MAX_MULTIPLIER)
    return np.exp(np.where(usable, log_multiplier, np.nan))


def _hypothesis_fit(
    name: Hypothesis,
    fits: NestedFits,
    resampled_fits: NestedFits,
    tests: FTests,
    *,
    prediction_points: list[tuple[str, float]],
    c0: float,
    confidence: float,
) -> HypothesisFit:
    """Parameters of one hypothesis and its predictions, with bands from the residual bootstrap."""
    design, theta = fits.designs[name], fits.solutions[name].theta
    irreducible, constant, exponent = (part[0] for part in design.split(theta))
    x = np.log(np.array([flops for _, flops in prediction_points]) / c0)
    pair = LadderPair(np.tile(x, 2), np.repeat([False, True], len(x)), np.ones(2 * len(x)))
    losses = pair.designs()[name].predict(theta[0], pair.x).reshape(2, -1)
    value = _usable_multiplier(_log_multiplier(name, theta, x))[0]
    with np.errstate(over="ignore"):
        resampled = np.exp(_log_multiplier(name, resampled_fits.solutions[name].theta, x))
    tail = (1 - confidence) / 2
    bands = np.quantile(resampled, [tail, 1 - tail], axis=0, method="nearest")
    p = {"exponent": tests.p_exponent_hypothesis, "irreducible": tests.p_irreducible_hypothesis}.get(name)
    return HypothesisFit(
        hypothesis=name,
        gamma=(float(exponent[0]), float(exponent.sum())),
        log_a=(float(constant[0]), float(constant.sum())),
        e=(float(irreducible[0]), float(irreducible[-1])),
        rss=float(fits.rss(name)[0]),
        p_against_free=None if p is None else float(p[0]),
        predictions=tuple(
            Prediction(
                label,
                flops,
                float(losses[0, i]),
                float(losses[1, i]),
                float(value[i]),
                (float(bands[0, i]), float(bands[1, i])),
            )
            for i, (label, flops) in enumerate(prediction_points)
        ),
    )


def _delta_gamma_interval(
    hypothesis: Hypothesis,
    index: int,
    fits: NestedFits,
    y: Array,
    settings: FitSettings,
    rule: DecisionRule,
) -> Interval:
    """Profile-likelihood interval of Δγ (`index` in θ): all other parameters are refitted."""
    design, theta = fits.designs[hypothesis], fits.solutions[hypothesis].theta[0]
    weights = fits.weights[0]
    fit = LeastSquaresFit(
        design, fits.pair.x, y, weights, theta, float(fits.rss(hypothesis)[0]),
        float(fits.variance(hypothesis, rule)[0]), rule.log,
    )  # fmt: skip
    df = np.array(math.inf if rule.noise else float(fits.degrees_of_freedom(hypothesis)[0]))
    covariance = unscaled_covariance(design, fits.pair.x, theta, weights=weights, log=rule.log)[0]
    quantile = float(t_quantile((1 + settings.confidence) / 2, df))
    return profile_intervals(fit, [index], covariance, quantile)[0]
