"""Judge one arm against the reference: gather the evidence of a comparison and put it into words."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import numpy as np

from steepen.laws.fits.compute_law import FitSettings
from steepen.laws.hypotheses.bootstrap import bootstrap, leave_one_out
from steepen.laws.hypotheses.nested_models import (
    HYPOTHESES,
    Answers,
    ByWhat,
    DecisionRule,
    FTests,
    Growth,
    Hypothesis,
    answer_questions,
)
from steepen.laws.hypotheses.noise_checks import judge_checked
from steepen.laws.verdict.compare import Comparison
from steepen.laws.verdict.effect_sizes import (
    common_span,
    delta_e_interval,
    delta_gamma_interval,
    equivalence_interval,
    fit_of_hypothesis,
    free_crossing,
    growth_per_decade,
    leading_multipliers,
    multipliers_at,
)
from steepen.laws.verdict.evidence import Demotion, Evidence, NoiseCheckResult, Verdict
from steepen.laws.verdict.sensitivity import mistuning_tolerance, separate_hypotheses
from steepen.laws.verdict.sentences import (
    by_what_fragile_reasons,
    fragile_reasons,
    verdict_sentence,
    what_would_change,
)


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
    left_out = leave_one_out((reference, arm), comparison.left_out_points, comparison.left_out, own_rule)
    resamplings, residual_fits = bootstrap(
        (reference, arm), fits, y, own_rule, confidence=settings.confidence, draws=draws, seed=seed
    )
    top = float(reference.flops[-1])
    prediction_points = [("10× the top rung", 10 * top), ("1000× the top rung", 1000 * top)]
    if budget is not None:
        prediction_points.append((f"{budget:.3g} {unit}", budget))
    delta_gamma, p_slope = float(tests.delta_gamma[0]), float(tests.p_slope[0])
    slope_interval = delta_gamma_interval("exponent", 4, fits, y, 1 - level, rule)
    leading = _leading(tests, level)
    span = common_span(reference, arm)
    per_decade, per_decade_interval = growth_per_decade(
        leading,
        fits,
        residual_fits,
        delta_gamma,
        slope_interval,
        np.log(np.array(span) / c0),
        1 - level,
    )
    multiplier = float(multipliers_at(leading, fits, np.array([math.log(span[1] / c0)]))[0])
    needed = span[1] / multiplier  # NaN where there is no multiplier
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
        outlier=comparison.outlier,
        p_scatter=comparison.p_scatter,
        rule=rule,
        level=level,
        arms=arms,
        leading=leading,
        growth_per_decade=per_decade,
        growth_per_decade_interval=per_decade_interval,
        delta_gamma=delta_gamma,
        delta_gamma_interval=slope_interval,
        equivalence_interval=equivalence_interval(tests, own_rule),
        delta_e=float(tests.delta_e[0]),
        p_difference=float(tests.p_difference[0]),
        p_slope=p_slope,
        p_slope_one_sided=p_slope / 2 if delta_gamma > 0 else 1 - p_slope / 2,
        p_shift=float(tests.p_shift[0]),
        p_exponent_hypothesis=float(tests.p_exponent_hypothesis[0]),
        p_irreducible_hypothesis=float(tests.p_irreducible_hypothesis[0]),
        delta_gamma_free=float(tests.delta_gamma_free[0]),
        delta_gamma_free_interval=delta_gamma_interval("free", 5, fits, y, 1 - level, rule),
        delta_e_free=float(tests.delta_e_free[0]),
        delta_e_free_interval=delta_e_interval(fits, y, 1 - level, rule),
        free_crossing=free_crossing(fits, residual_fits, c0, settings.confidence),
        sigma=math.sqrt(float(fits.variance("free", rule)[0])) * (float(y.mean()) if rule.log else 1.0),
        multiplier=multiplier,
        multiplier_flops=span[1],
        multiplier_extrapolated=bool(needed < arm.flops[0] * 0.99 or needed > arm.flops[-1] * 1.01),
        leading_multipliers=leading_multipliers(
            leading, comparison, residual_fits, settings.confidence, budget
        ),
        paired=fits.pair.partners is not None,
        c0=c0,
        hypotheses={
            name: fit_of_hypothesis(
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


def _only_answer(answers: Answers) -> tuple[Growth, ByWhat | None]:
    """The two answers of the first data set."""
    by_what = str(answers.by_what[0])
    return cast(Growth, str(answers.growth[0])), cast(ByWhat, by_what) if by_what else None


def _leading(tests: FTests, level: float) -> Hypothesis:
    """The hypothesis that numbers are taken from: the first one that is not rejected."""
    if tests.p_exponent_hypothesis[0] >= level:
        return "exponent"
    return "irreducible" if tests.p_irreducible_hypothesis[0] >= level else "free"
