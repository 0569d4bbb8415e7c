"""Compare one arm with the reference: fit and test the nested models, and build the verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from steepen.laws.distributions import Interval, t_quantile
from steepen.laws.fits.compute_law import FitSettings, default_c0
from steepen.laws.fits.profile_likelihood import LeastSquaresFit, profile_intervals
from steepen.laws.fits.solver import Array, solve, unscaled_covariance
from steepen.laws.hypotheses.bootstrap import bootstrap, cluster_inflation, leave_one_out
from steepen.laws.hypotheses.nested_models import (
    HYPOTHESES,
    Answers,
    ByWhat,
    DecisionRule,
    FTests,
    Growth,
    Hypothesis,
    LadderPair,
    NestedFits,
    answer_questions,
    f_test_hypotheses,
    fit_hypotheses,
    partner_correlation_p,
)
from steepen.laws.hypotheses.noise_checks import (
    CHECK_LEVEL,
    NoiseCheck,
    NoiseKind,
    check_noise,
    judge_checked,
    robust_tests,
    scatter_p_value,
)
from steepen.laws.hypotheses.variance_components import with_rung_component
from steepen.laws.ladder import MERGE_TOLERANCE, Ladder
from steepen.laws.verdict.evidence import (
    Crossing,
    Demotion,
    Evidence,
    HypothesisFit,
    NoiseCheckResult,
    Prediction,
    Verdict,
)
from steepen.laws.verdict.multipliers import Multiplier
from steepen.laws.verdict.sensitivity import MAX_EXTRA_DECADES, mistuning_tolerance, separate_hypotheses
from steepen.laws.verdict.sentences import (
    by_what_fragile_reasons,
    fragile_reasons,
    verdict_sentence,
    what_would_change,
)

MIN_PARTNERS = 6  # pairs of rungs for tests on differences
MIN_EXPONENT = 1e-6  # below this a curve counts as not falling with compute
HYPOTHESIS_NAMES: dict[Hypothesis, str] = {
    "exponent": "exponent",
    "irreducible": "irreducible loss",
    "free": "free E and γ",
}
MAX_MULTIPLIER = 1e30  # above this (or below its inverse) a multiplier is reported as NaN


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


def judge_arm(
    comparison: Comparison,
    settings: FitSettings,
    *,
    level: float | None = None,
    arms: int = 1,
    draws: int = 2000,
    seed: int = 0,
    budget: float | None = None,
    lr_regret: float | None = None,
    unit: str = "FLOPs",
) -> Verdict:
    """Verdict on an arm against the reference, at `level` (default: the rule's) where `arms` share a level.

    Only these two ladders are used: other arms change nothing but the level.
    """
    evidence = gather_evidence(
        comparison,
        settings,
        level=comparison.rule.level if level is None else level,
        arms=arms,
        draws=draws,
        seed=seed,
        budget=budget,
        lr_regret=lr_regret,
        unit=unit,
    )
    return Verdict(
        **vars(evidence),
        sentence=verdict_sentence(evidence),
        what_would_change=tuple(what_would_change(evidence)),
    )


def gather_evidence(
    comparison: Comparison,
    settings: FitSettings,
    *,
    level: float,
    arms: int,
    draws: int,
    seed: int,
    budget: float | None,
    lr_regret: float | None,
    unit: str,
) -> Evidence:
    """Fits, tests, bootstraps, leave-one-out and sensitivity of one arm against the reference."""
    reference, arm, c0, y = comparison.reference, comparison.arm, comparison.c0, comparison.y
    fits, tests, rule = comparison.fits, comparison.tests, comparison.rule
    own_rule = replace(rule, level=level)
    least_squares = _only_answer(answer_questions(tests, own_rule))
    growth, by_what = _only_answer(judge_checked(tests, comparison.checks, own_rule)[0])
    unadjusted = _only_answer(judge_checked(tests, comparison.checks, rule)[0])
    robust = _only_answer(answer_questions(comparison.robust, own_rule))
    results = _check_results(comparison, own_rule)
    failed = next((result for result in results if result.consequence == "undecided"), None)
    left_out = leave_one_out((reference, arm), fits, y, own_rule)
    resamplings, residual_fits = bootstrap(
        (reference, arm), fits, y, own_rule, confidence=settings.confidence, draws=draws, seed=seed
    )
    top = float(reference.flops[-1])
    prediction_points = [("10× the top rung", 10 * top), ("1000× the top rung", 1000 * top)]
    if budget is not None:
        prediction_points.append((f"{budget:.3g} {unit}", budget))
    delta_gamma, p_slope = float(tests.delta_gamma[0]), float(tests.p_slope[0])
    delta_gamma_interval = _delta_gamma_interval("exponent", 4, fits, y, 1 - level, rule)
    leading = _leading(tests, level)
    span = _common_span(reference, arm)
    log_multiplier = _log_multiplier(
        leading, fits.solutions[leading].theta, np.array([math.log(span[1] / c0)])
    )
    per_decade, per_decade_interval = _growth_per_decade(
        leading,
        fits,
        residual_fits,
        delta_gamma,
        delta_gamma_interval,
        np.log(np.array(span) / c0),
        1 - level,
    )
    return Evidence(
        arm=arm.arm,
        reference=reference.arm,
        growth=growth,
        by_what=by_what,
        unadjusted_growth=unadjusted[0],
        unadjusted_by_what=unadjusted[1],
        robust_growth=robust[0],
        robust_by_what=robust[1],
        fragile=() if growth == "undecided" else fragile_reasons(growth, results, left_out, robust[0]),
        by_what_fragile=by_what_fragile_reasons(growth, by_what, left_out, robust) if by_what else (),
        demoted=Demotion(*least_squares, failed.kind) if failed else None,
        noise_checks=results,
        p_scatter=comparison.p_scatter,
        rule=rule,
        level=level,
        arms=arms,
        leading=leading,
        growth_per_decade=per_decade,
        growth_per_decade_interval=per_decade_interval,
        delta_gamma=delta_gamma,
        delta_gamma_interval=delta_gamma_interval,
        equivalence_interval=_equivalence_interval(tests, own_rule),
        delta_e=float(tests.delta_e[0]),
        p_difference=float(tests.p_difference[0]),
        p_slope=p_slope,
        p_slope_one_sided=p_slope / 2 if delta_gamma > 0 else 1 - p_slope / 2,
        p_shift=float(tests.p_shift[0]),
        p_exponent_hypothesis=float(tests.p_exponent_hypothesis[0]),
        p_irreducible_hypothesis=float(tests.p_irreducible_hypothesis[0]),
        delta_gamma_free=float(tests.delta_gamma_free[0]),
        delta_gamma_free_interval=_delta_gamma_interval("free", 5, fits, y, 1 - level, rule),
        delta_e_free=float(tests.delta_e_free[0]),
        delta_e_free_interval=_delta_e_interval(fits, y, 1 - level, rule),
        free_crossing=_free_crossing(fits, residual_fits, c0, settings.confidence),
        sigma=math.sqrt(float(fits.variance("free", rule)[0])) * (float(y.mean()) if rule.log else 1.0),
        multiplier=float(_usable_multiplier(log_multiplier)[0, 0]),
        multiplier_flops=span[1],
        leading_multipliers=_leading_multipliers(
            leading, comparison, residual_fits, settings.confidence, budget
        ),
        paired=fits.pair.partners is not None,
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
        leave_one_out=left_out,
        separation=separate_hypotheses(
            fits, own_rule, c0, (float(np.median(reference.seeds)), float(np.median(arm.seeds)))
        ),
        tolerance=mistuning_tolerance(fits, y, own_rule, (reference.arm, arm.arm), c0, lr_regret),
        unit=unit,
    )


def _check_results(comparison: Comparison, rule: DecisionRule) -> tuple[NoiseCheckResult, ...]:
    """The noise checks of the only data set, with their consequences for its answer."""
    answers = answer_questions(comparison.tests, rule)
    return tuple(
        NoiseCheckResult(
            kind,
            float(check.p_value[0]),
            float(check.estimate[0]),
            float(check.p_difference[0]),
            float(check.p_slope[0]),
            float(check.p_shift[0]),
            "undecided" if check.failed(answers)[0] else "none" if check.holds(answers)[0] else "fragile",
        )
        for kind, check in comparison.checks.items()
    )


def _equivalence_interval(tests: FTests, rule: DecisionRule) -> Interval:
    """Interval of Δγ that must lie inside the margin for a constant gain (by t, as in the test)."""
    freedom = np.full(1, np.inf) if rule.noise is not None else tests.degrees_of_freedom[:1]
    reach = float(t_quantile(1 - rule.level, freedom)[0] * tests.delta_gamma_error[0])
    return float(tests.delta_gamma[0]) - reach, float(tests.delta_gamma[0]) + reach


def _only_answer(answers: Answers) -> tuple[Growth, ByWhat | None]:
    """The two answers of the first data set."""
    by_what = str(answers.by_what[0])
    return cast(Growth, str(answers.growth[0])), cast(ByWhat, by_what) if by_what else None


def _leading(tests: FTests, level: float) -> Hypothesis:
    """The hypothesis that numbers are taken from: the first one that is not rejected."""
    if tests.p_exponent_hypothesis[0] >= level:
        return "exponent"
    return "irreducible" if tests.p_irreducible_hypothesis[0] >= level else "free"


def _common_span(reference: Ladder, arm: Ladder) -> tuple[float, float]:
    """The lowest and highest compute both ladders cover (the reference's, if they share no span)."""
    low, high = max(reference.flops[0], arm.flops[0]), min(reference.flops[-1], arm.flops[-1])
    return (
        (float(low), float(high)) if low < high else (float(reference.flops[0]), float(reference.flops[-1]))
    )


def _growth_per_decade(
    leading: Hypothesis,
    fits: NestedFits,
    resampled: NestedFits,
    delta_gamma: float,
    delta_gamma_interval: Interval,
    span: Array,
    confidence: float,
) -> tuple[float, Interval]:
    """Factor by which the multiplier grows per decade, the mean over `span` (log compute), and its interval.

    With one E the factor is 10^(Δγ/γ_arm) at every compute, and the interval that of Δγ, so that it excludes
    1 exactly where the test rejects equal slopes. Otherwise the interval is that of the residual bootstrap.
    """
    if leading == "exponent":
        gamma = float(fits.solutions["exponent"].theta[0, 3])
        low, high = (_per_decade(gamma, end) for end in delta_gamma_interval)
        return _per_decade(gamma, delta_gamma), (low, high)
    decades = (span[1] - span[0]) / math.log(10)

    def growth(found: NestedFits) -> Array:
        log = _log_multiplier(leading, found.solutions[leading].theta, span)
        with np.errstate(invalid="ignore", over="ignore"):
            return np.exp((log[:, 1] - log[:, 0]) / decades)

    drawn = growth(resampled)
    tail = (1 - confidence) / 2
    drawn = drawn[np.isfinite(drawn)]
    value = float(growth(fits)[0])
    if not len(drawn) or not math.isfinite(value):
        return math.nan, (math.nan, math.nan)
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return value, (float(low), float(high))


def _per_decade(gamma: float, delta: float) -> float:
    """10^(Δγ/γ_arm); NaN where a curve does not fall."""
    if min(gamma, gamma + delta) < MIN_EXPONENT or not math.isfinite(delta):
        return 0.0 if delta == -math.inf else math.nan
    return 10 ** (delta / (gamma + delta))


def _delta_e_interval(fits: NestedFits, y: Array, confidence: float, rule: DecisionRule) -> Interval:
    """Profile interval of the free model's ΔE: shifts of the arm's losses that leave one E tenable.

    A ΔE of δ is the exponent hypothesis on data whose arm is lower by δ, so the interval contains zero
    exactly where the exponent hypothesis is not rejected at 1 − confidence. Infinite where it is not reached
    within the loss itself.
    """
    arm = fits.pair.arm
    df = math.inf if rule.noise else float(fits.degrees_of_freedom("free")[0])
    limit = float(t_quantile((1 + confidence) / 2, np.array(df))) ** 2
    variance, rss = float(fits.variance("free", rule)[0]), float(fits.rss("free")[0])
    centre = float(fits.solutions["free"].theta[0, 1] - fits.solutions["free"].theta[0, 0])
    start = fits.solutions["free"].theta[:, [0, 2, 3, 4, 5]]
    ends: list[float] = []
    for side in (-1.0, 1.0):
        near, far = 0.0, 0.9 * float(y.min())
        for points in (np.geomspace(1e-7, far, 40), None):
            steps = np.linspace(near, far, 24) if points is None else points
            data = y[None] - (centre + side * steps)[:, None] * arm
            usable = np.min(data, axis=1) > 0
            found = solve(
                fits.designs["exponent"], fits.pair.x, np.maximum(data, 1e-9), start,
                weights=fits.weights, log=rule.log, iterations=120,
            )  # fmt: skip
            outside = ((found.objective - rss) / variance >= limit) | ~usable
            if not outside.any():
                near = math.inf
                break
            first = int(np.argmax(outside))
            if not usable[first]:
                near = math.inf
                break
            near, far = (float(steps[first - 1]) if first else 0.0), float(steps[first])
        ends.append(side * math.inf if math.isinf(near) else centre + side * 0.5 * (near + far))
    return ends[0], ends[1]


def _free_crossing(fits: NestedFits, resampled: NestedFits, c0: float, confidence: float) -> Crossing:
    """The first compute above the ladders at which the free model's two laws cross."""
    top = float(fits.pair.x.max())
    line = np.linspace(top, top + MAX_EXTRA_DECADES * math.log(10), 400)
    pair = LadderPair(np.tile(line, 2), np.repeat([False, True], len(line)), np.ones(2 * len(line)))
    design = pair.designs()["free"]

    def crossings(found: NestedFits) -> Array:
        losses = design.predict(found.solutions["free"].theta, pair.x)
        gap = losses[:, len(line) :] - losses[:, : len(line)]
        crossed = np.sign(gap) != np.sign(gap[:, :1])
        return np.where(crossed.any(axis=1), c0 * np.exp(line[crossed.argmax(axis=1)]), np.inf)

    tail = (1 - confidence) / 2
    low, high = np.quantile(crossings(resampled), [tail, 1 - tail], method="nearest")
    return Crossing(float(crossings(fits)[0]), (float(low), float(high)))


def _leading_multipliers(
    leading: Hypothesis,
    comparison: Comparison,
    resampled: NestedFits,
    confidence: float,
    budget: float | None,
) -> tuple[Multiplier, ...]:
    """Multipliers of the leading hypothesis at the reference's rungs and at the budget, with bands."""
    reference, arm, c0 = comparison.reference, comparison.arm, comparison.c0
    flops = np.append(reference.flops, [] if budget is None else [budget])
    x = np.log(flops / c0)
    value = _usable_multiplier(_log_multiplier(leading, comparison.fits.solutions[leading].theta, x))[0]
    with np.errstate(over="ignore"):
        drawn = np.exp(_log_multiplier(leading, resampled.solutions[leading].theta, x))
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0, method="nearest")
    found: list[Multiplier] = []
    for i, at in enumerate(flops):
        if not math.isfinite(value[i]):
            continue
        needed = at / value[i]
        inside = at <= reference.flops[-1] and arm.flops[0] <= needed <= arm.flops[-1]
        found.append(
            Multiplier(
                f"fitted ({HYPOTHESIS_NAMES[leading]})",
                float(at),
                float(value[i]),
                float(low[i]),
                float(high[i]),
                not inside,
                leads=True,
            )
        )
    return tuple(found)


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
    confidence: float,
    rule: DecisionRule,
) -> Interval:
    """Profile-likelihood interval of Δγ (`index` in θ): all other parameters are refitted.

    For paired ladders it is the t-interval of the tests on differences.
    """
    if fits.pair.partners is not None and hypothesis == "exponent":
        tests = f_test_hypotheses(fits, rule)
        reach = float(
            t_quantile((1 + confidence) / 2, tests.degrees_of_freedom)[0] * tests.delta_gamma_error[0]
        )
        return float(tests.delta_gamma[0]) - reach, float(tests.delta_gamma[0]) + reach
    design, theta = fits.designs[hypothesis], fits.solutions[hypothesis].theta[0]
    weights = fits.weights[0]
    fit = LeastSquaresFit(
        design, fits.pair.x, y, weights, theta, float(fits.rss(hypothesis)[0]),
        float(fits.variance(hypothesis, rule)[0]), rule.log,
    )  # fmt: skip
    df = np.array(math.inf if rule.noise else float(fits.degrees_of_freedom(hypothesis)[0]))
    covariance = unscaled_covariance(design, fits.pair.x, theta, weights=weights, log=rule.log)[0]
    quantile = float(t_quantile((1 + confidence) / 2, df))
    return profile_intervals(fit, [index], covariance, quantile)[0]
