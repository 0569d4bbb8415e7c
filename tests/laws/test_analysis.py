"""Compute laws: exact data give exact laws; intervals, multipliers, hold-outs and sensitivity."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from steepen.errors import SteepenError, UsageError
from steepen.laws.analysis import AnalysisRequest, analyse, fit_compute
from steepen.laws.fits.compute_law import FitSettings
from steepen.laws.fits.solver import Design, solve
from steepen.laws.hypotheses.diagnostics import lack_of_fit, shared_irreducible_loss
from steepen.laws.hypotheses.nested_models import (
    VERDICTS,
    DecisionRule,
    LadderPair,
    f_test_hypotheses,
    fit_hypotheses,
    verdict_words,
)
from steepen.laws.hypotheses.variance_components import held_out_weights, with_rung_component
from steepen.laws.ladder import Ladder, make_ladder, read_ladders
from steepen.laws.power import LadderPlan, simulate_power
from steepen.laws.table import table_from
from steepen.laws.table_selection import HoldOut
from steepen.laws.verdict.holdout import score_hold_outs, split_hold_outs
from steepen.laws.verdict.multipliers import fitted_multipliers, interpolated_multipliers
from steepen.utils.json_io import to_json

FLOPS = np.geomspace(3.25e17, 1.01e20, 8)


def ladder(
    name: str,
    e: float,
    a: float,
    gamma: float,
    *,
    noise: float = 0.0,
    seed: int = 0,
    flops: np.ndarray = FLOPS,
) -> Ladder:
    rng = np.random.default_rng(seed)
    return make_ladder(
        name, flops, e + a * (flops / 1e18) ** -gamma + noise * rng.standard_normal(len(flops))
    )


def pair(noise: float = 0.0, gamma: float = 0.1168) -> dict[str, Ladder]:
    return {
        "vanilla": ladder("vanilla", 1.83, 1.5, 0.1113, noise=noise, seed=1),
        "grow": ladder("grow", 1.83, 1.5 * 1.3**-gamma, gamma, noise=noise, seed=2, flops=FLOPS * 1.1),
    }


@pytest.mark.parametrize("method", ["joint", "paper"])
@pytest.mark.parametrize("loss", ["huber", "mse", "log-mse"])
def test_exact_losses_give_the_exact_law(method: str, loss: str) -> None:
    fit = fit_compute(pair(), FitSettings("vanilla", method=method, loss=loss, c0=1e18))  # type: ignore[arg-type]
    for name, gamma, a in (("vanilla", 0.1113, 1.5), ("grow", 0.1168, 1.5 * 1.3**-0.1168)):
        assert fit.arms[name].gamma.value == pytest.approx(gamma, abs=1e-8)
        assert fit.arms[name].log_a.value == pytest.approx(np.log(a), abs=1e-7)
        assert fit.arms[name].e.value == pytest.approx(1.83, abs=1e-6)
        assert fit.arms[name].predict(1e19) == pytest.approx(1.83 + a * 10**-gamma)
        assert fit.arms[name].compute_for(fit.arms[name].predict(1e19)) == pytest.approx(1e19)


def test_c0_moves_the_constant_and_nothing_else() -> None:
    ladders = pair(1e-3)
    first, second = (fit_compute(ladders, FitSettings("vanilla", c0=c0)) for c0 in (1e18, 1e21))
    assert first.arms["grow"].gamma.value == pytest.approx(second.arms["grow"].gamma.value, abs=1e-7)
    assert first.arms["grow"].predict(5e19) == pytest.approx(second.arms["grow"].predict(5e19), abs=1e-8)
    assert first.c0 == 1e18
    default = fit_compute(ladders, FitSettings("vanilla"))
    assert default.c0 == pytest.approx(np.exp(np.log(FLOPS).mean()))


def test_unconditional_interval_is_wider_than_the_one_given_e() -> None:
    for method in ("joint", "paper"):
        law = fit_compute(pair(1e-3), FitSettings("vanilla", method=method)).arms["grow"]  # type: ignore[arg-type]
        wide, narrow = (end[1] - end[0] for end in (law.gamma.unconditional, law.gamma.conditional))
        assert wide > 3 * narrow > 0


def test_intervals_ends_are_where_the_f_test_begins_to_reject() -> None:
    ladders = pair(3e-3)
    fit = fit_compute(ladders, FitSettings("vanilla"))
    x = np.log(np.concatenate([part.flops for part in ladders.values()]) / fit.c0)
    y = np.concatenate([part.loss for part in ladders.values()])
    own = np.repeat(np.eye(2), 8, axis=0)
    design = Design(np.ones((16, 1)), own, own)
    for index, interval in (
        (4, fit.arms["grow"].gamma.unconditional),
        (2, fit.arms["grow"].log_a.unconditional),
        (0, fit.arms["grow"].e.unconditional),
    ):
        for end in interval:
            start = np.where(np.arange(5) == index, end, fit.theta)
            held = solve(design, x, y[None], start, fixed=np.arange(5) == index)
            rise = (float(held.objective[0]) - fit.objective) / fit.sigma**2
            assert stats.f.sf(rise, 1, 11) == pytest.approx(0.10, abs=1e-3)


def test_other_arms_do_not_change_an_arms_verdict() -> None:
    ladders = pair(1e-3)
    request = AnalysisRequest("vanilla", draws=200, adjust=False)
    alone = analyse(ladders, request).verdicts["grow"]
    crowd = ladders | {"odd": ladder("odd", 1.2, 2.4, 0.3, noise=1e-2)}
    assert analyse(crowd, replace(request, method="joint")).verdicts["grow"] == alone


def test_result_does_not_depend_on_the_order_of_rows() -> None:
    ladders = pair(1e-3)
    columns = {"arm": [], "flops": [], "loss": []}
    for name, rungs in ladders.items():
        columns["arm"] += [name] * 8
        columns["flops"] += list(rungs.flops)
        columns["loss"] += list(rungs.loss)
    order = np.random.default_rng(0).permutation(16)
    shuffled = read_ladders(table_from({k: [v[i] for i in order] for k, v in columns.items()}))
    first, second = (analyse(part, AnalysisRequest("vanilla", draws=200)) for part in (ladders, shuffled))
    assert second.verdicts["grow"].word == first.verdicts["grow"].word
    assert second.verdicts["grow"].delta_gamma == pytest.approx(first.verdicts["grow"].delta_gamma, abs=1e-9)


def test_printed_fineweb_edu_multipliers_follow_from_the_printed_exponents() -> None:
    """1.6 at 1e20 becomes 1.8 at 1.23e21 and 2.7 at 1e25 (paper, section on extrapolation).

    With one E, log m rises with slope 1 − γ/γ_arm against log compute.
    """
    slope = 1 - 0.1095 / 0.1146
    assert 1.6 * (1.23e21 / 1e20) ** slope == pytest.approx(1.8, abs=0.05)
    assert 1.6 * (1e25 / 1e20) ** slope == pytest.approx(2.7, abs=0.05)
    assert pytest.approx(0.0445, abs=5e-5) == 1 - 0.1095 / 0.1146


def test_fitted_multipliers_rise_with_slope_one_minus_the_ratio_of_exponents() -> None:
    """FineWeb's printed exponents give ×1.24 over two decades, whatever E is."""
    for e in (1.0, 1.83, 2.2):
        ladders = {
            "vanilla": ladder("vanilla", e, 1.5, 0.1113),
            "grow": ladder("grow", e, 1.4, 0.1168),
        }
        fit = fit_compute(ladders, FitSettings("vanilla"))
        low, high = fitted_multipliers(fit, "grow", np.array([1e18, 1e20]), extrapolate=True)
        assert high.value / low.value == pytest.approx(100 ** (1 - 0.1113 / 0.1168), rel=1e-6)
        assert high.value / low.value == pytest.approx(1.24, abs=0.005)


def test_interpolated_multipliers_are_the_ratio_of_computes_at_equal_loss() -> None:
    """A power law with E = 0 is straight in log–log, so interpolation is exact."""
    ladders = {
        "vanilla": ladder("vanilla", 0.0, 3.0, 0.1),
        "fast": ladder("fast", 0.0, 3.0 * 1.25**-0.1, 0.1),
    }
    found = interpolated_multipliers(ladders["vanilla"], ladders["fast"], sigma=1e-3, interpolate="log-loss")
    assert [m.value for m in found] == pytest.approx([1.25] * len(found))
    assert all(m.low < 1.25 < m.high and m.method == "interpolated" for m in found)


def test_raw_loss_interpolation_is_linear_in_log_compute() -> None:
    reference = make_ladder("vanilla", np.array([1e18, 1e19]), np.array([3.25, 2.75]))
    arm = make_ladder("arm", np.array([1e17, 1e19]), np.array([3.5, 2.5]))
    first, second = interpolated_multipliers(reference, arm)
    assert (first.value, second.value) == pytest.approx((1e18 / 10**17.5, 1e19 / 10**18.5))
    logs, _ = interpolated_multipliers(reference, arm, interpolate="log-loss")
    assert logs.value != pytest.approx(first.value, rel=1e-3)
    with pytest.raises(UsageError, match="raw-loss, log-loss"):
        AnalysisRequest(reference="vanilla", interpolate="cubic")  # type: ignore[arg-type]


def test_the_papers_method_takes_the_references_exponent_from_the_regression() -> None:
    ladders = pair(1e-3)
    line, free = (
        fit_compute(ladders, FitSettings("vanilla", method="paper", reference_law=law))  # type: ignore[arg-type]
        for law in ("regression", "free-fit")
    )
    base, e = ladders["vanilla"], line.arms["vanilla"].e.value
    slope = np.polyfit(np.log(base.flops), np.log(base.loss - e), 1)[0]
    assert line.arms["vanilla"].gamma.value == pytest.approx(-slope)
    assert free.arms["vanilla"].gamma.value != pytest.approx(-slope, abs=1e-7)
    assert free.arms["vanilla"].e.value == e
    assert free.arms["grow"].gamma.value == line.arms["grow"].gamma.value
    with pytest.raises(UsageError, match="regression, free-fit"):
        FitSettings("vanilla", reference_law="mean")  # type: ignore[arg-type]


def test_raw_huber_gives_an_outlier_less_weight_than_least_squares() -> None:
    clean = ladder("v", 1.7, 1.5, 0.11)
    loss = clean.loss + 1e-4 * np.array([1.0, -1.0, 0.5, -0.5, 1.0, -1.0, 0.5, -0.5][: len(clean.loss)])
    loss[3] += 0.02
    spoiled = {"v": make_ladder("v", clean.flops, loss)}
    errors = {
        name: abs(fit_compute(spoiled, FitSettings("v", method="paper", loss=name)).arms["v"].e.value - 1.7)  # type: ignore[arg-type]
        for name in ("raw-huber", "mse")
    }
    assert errors["raw-huber"] < 0.5 * errors["mse"]


def test_multipliers_are_extrapolated_only_on_request() -> None:
    ladders = pair(1e-3)
    found = interpolated_multipliers(ladders["vanilla"], ladders["grow"])
    assert len(found) == 7  # the reference's first rung is above every loss of the arm
    fit = fit_compute(ladders, FitSettings("vanilla"))
    assert not fitted_multipliers(fit, "grow", np.array([1e25]))
    (beyond,) = fitted_multipliers(fit, "grow", np.array([1e25]), extrapolate=True)
    assert beyond.extrapolated
    assert beyond.low < beyond.value < beyond.high
    assert beyond.method == "fitted (joint)"


def test_held_out_run_is_scored_in_loss_sigma_and_compute() -> None:
    kept, held = split_hold_outs(pair(1e-3), [HoldOut("", "grow", 9e19)])
    assert len(kept["grow"].flops) == 7
    assert len(kept["vanilla"].flops) == 8
    fit = fit_compute(kept, FitSettings("vanilla"))
    (result,) = score_hold_outs(fit, held)
    assert result.interval[0] < result.observed < result.interval[1]
    lower = replace(held["grow"], loss=held["grow"].loss - 0.03)
    (miss,) = score_hold_outs(fit, {"grow": lower})
    assert miss.error == pytest.approx(result.error - 0.03)
    assert miss.error_in_sigma == pytest.approx(miss.error / fit.sigma)
    assert miss.p_value < 1e-3
    assert miss.compute_factor > 1.2  # the law would need over a fifth more compute for that loss
    law = fit.arms["grow"]
    assert law.predict(miss.compute_factor * miss.flops) == pytest.approx(miss.observed)


def test_hold_out_intervals_cover_at_their_confidence() -> None:
    hits = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        long = np.append(FLOPS, 1.2e21)
        rungs = make_ladder(
            "vanilla", long, 1.83 + 1.5 * (long / 1e18) ** -0.1113 + 1e-3 * rng.standard_normal(9)
        )
        kept, held = split_hold_outs({"vanilla": rungs}, [HoldOut("", flops=1e21)])
        (result,) = score_hold_outs(fit_compute(kept, FitSettings("vanilla")), held)
        hits += result.interval[0] < result.observed < result.interval[1]
    assert 45 <= hits <= 59


def ladders_with_rung_errors(seeds: list[int], rng: np.random.Generator) -> dict[str, Ladder]:
    """Two arms whose seeds of a rung share an error four times as large as their own."""
    columns: dict[str, Any] = {"arm": [], "flops": [], "loss": [], "seed": []}
    for arm in ("vanilla", "grow"):
        for flops, count in zip(np.geomspace(3e17, 2e20, len(seeds)), seeds, strict=True):
            loss = 1.83 + 1.5 * (flops / 1e18) ** -0.1113 + 2e-3 * rng.standard_normal()
            columns["arm"] += [arm] * count
            columns["flops"] += [flops] * count
            columns["loss"] += (loss + 5e-4 * rng.standard_normal(count)).tolist()
            columns["seed"] += range(count)
    return read_ladders(table_from(columns))


@pytest.mark.parametrize("seeds", [[3, 3, 2, 2, 1, 1, 1, 1, 10], [1] * 8 + [10], [3] * 8 + [1]])
def test_variance_of_a_held_out_rung_is_that_of_its_own_number_of_seeds(seeds: list[int]) -> None:
    rng = np.random.default_rng(0)
    found: list[float] = []
    for _ in range(25):
        kept, held = split_hold_outs(ladders_with_rung_errors(seeds, rng), [HoldOut("", flops=1.9e20)])
        weighted = with_rung_component(kept, 1e19)
        fit = fit_compute(weighted, FitSettings("vanilla", method="paper"))
        weights = held_out_weights(held, kept, weighted, fit.sigma)
        found.append(fit.sigma**2 / float(weights["grow"][0]))
    assert np.mean(found) == pytest.approx(2e-3**2 + 5e-4**2 / seeds[-1], rel=0.3)


def test_analysis_allows_for_rung_errors_in_hold_outs_and_measured_multipliers() -> None:
    ladders = ladders_with_rung_errors([3, 3, 2, 2, 1, 1, 1, 1, 10], np.random.default_rng(1))
    kept, held = split_hold_outs(ladders, [HoldOut("", flops=1.9e20)])
    found = analyse(kept, AnalysisRequest("vanilla", draws=100, method="joint"), held)
    as_if_independent = score_hold_outs(found.primary_fit, held)
    for one, narrow in zip(found.hold_out, as_if_independent, strict=True):
        assert np.ptp(one.interval) > 1.2 * np.ptp(narrow.interval)
    weighted = with_rung_component(kept, found.primary_fit.c0)
    sigma = found.verdicts["grow"].sigma
    assert interpolated_multipliers(weighted["vanilla"], weighted["grow"], sigma=sigma) == [
        one for one in found.multipliers["grow"] if one.method == "interpolated"
    ]


@pytest.mark.parametrize(("gamma", "ladder_at_fault"), [(0.1140, "vanilla"), (0.1086, "grow")])
def test_penalty_explaining_slope_brings_delta_gamma_to_zero(gamma: float, ladder_at_fault: str) -> None:
    """Removing the penalty that the verdict names from the table leaves Δγ = 0."""
    ladders = pair(1e-3, gamma=gamma)
    verdict = analyse(ladders, AnalysisRequest("vanilla", draws=200)).verdicts["grow"]
    (tolerance,) = [t for t in verdict.tolerance if t.could_explain_slope and t.shape == "top rung"]
    assert tolerance.ladder == ladder_at_fault
    assert tolerance.penalty_explaining_slope is not None
    loss = {name: ladder.loss.copy() for name, ladder in ladders.items()}
    loss[ladder_at_fault][-1] -= tolerance.penalty_explaining_slope
    # Not by `analyse`: a rung lower by so much would be left out as an outlier.
    x = np.log(np.concatenate([ladders[name].flops for name in ("vanilla", "grow")]) / verdict.c0)
    points = LadderPair(
        x, np.repeat([False, True], [len(loss["vanilla"]), len(loss["grow"])]), np.ones(len(x))
    )
    y, rule = np.concatenate([loss["vanilla"], loss["grow"]]), DecisionRule()
    again = f_test_hypotheses(fit_hypotheses(points, y, rule), rule)
    assert abs(again.delta_gamma[0]) < 2e-3 * abs(verdict.delta_gamma)


@pytest.mark.parametrize("delta_gamma", [0.0010, -0.0010])
def test_confounding_penalty_of_power_matches_the_verdicts_tolerance(delta_gamma: float) -> None:
    plan = LadderPlan(delta_gamma, noise=1e-5)
    power = simulate_power(plan, 100)
    where, _ = plan.pair()
    y = where.designs()["exponent"].predict(plan.true_parameters(), where.x)
    ladders = {
        name: make_ladder(name, plan.flops, y[where.arm == (name == "arm")]) for name in ("reference", "arm")
    }
    verdict = analyse(ladders, AnalysisRequest("reference", draws=100, noise=1e-5)).verdicts["arm"]
    (tolerance,) = [t for t in verdict.tolerance if t.could_explain_slope and t.shape == "top rung"]
    assert tolerance.ladder == power.confounding_ladder
    assert tolerance.penalty_explaining_slope == pytest.approx(
        power.confounding_penalty["top rung"], rel=0.1
    )  # power's is a linear response


def test_slope_that_no_penalty_up_to_3_percent_explains() -> None:
    verdict = analyse(pair(1e-3, gamma=0.16), AnalysisRequest("vanilla", draws=100)).verdicts["grow"]
    assert verdict.tolerance[0].could_explain_slope
    assert verdict.tolerance[0].penalty_explaining_slope is None
    assert any("no loss up to 3%" in line for line in verdict.what_would_change)


def test_multipliers_in_sentences_are_those_of_the_budget_they_name() -> None:
    for gamma, noise in ((0.1086, 3e-3), (0.1130, 1e-2)):
        verdict = analyse(pair(noise, gamma=gamma), AnalysisRequest("vanilla", draws=100)).verdicts["grow"]
        assert verdict.multiplier_flops == FLOPS[-1]
        assert "at 1e20 FLOPs" in verdict.sentence
        exact = pair(0.0, gamma=gamma)
        quiet = analyse(exact, AnalysisRequest("vanilla", draws=100, c0=1e18)).verdicts["grow"]
        needed = 1e18 * (1.5 * 1.3**-gamma / (1.5 * (FLOPS[-1] / 1e18) ** -0.1113)) ** (1 / gamma)
        assert quiet.multiplier == pytest.approx(FLOPS[-1] / needed, rel=1e-4)


def test_extra_runs_count_seeds() -> None:
    ladders = {
        name: replace(part, runs=tuple(np.full(3, value) for value in part.loss))
        for name, part in pair(2e-3).items()
    }
    separation = analyse(ladders, AnalysisRequest("vanilla", draws=100)).verdicts["grow"].separation
    assert separation.extra_rungs
    assert separation.extra_runs == 3 * separation.extra_rungs


def test_leave_one_out_covers_every_rung() -> None:
    ladders = pair(1e-3)
    verdict = analyse(ladders, AnalysisRequest("vanilla", draws=200)).verdicts["grow"]
    assert len(verdict.leave_one_out) == 16
    without = {"vanilla": ladders["vanilla"], "grow": ladders["grow"].keep(np.arange(8) != 3)}
    other = analyse(without, AnalysisRequest("vanilla", draws=200, c0=1e19)).verdicts["grow"]
    assert verdict.leave_one_out[8 + 3].delta_gamma == pytest.approx(other.delta_gamma, rel=1e-4)
    assert verdict.leave_one_out[8 + 3].verdict == other.word


def test_smooth_drift_of_half_the_penalty_explains_the_slope() -> None:
    """A recipe whose penalty grows along the ladder imitates an exponent with far less than one bad rung.

    For the paper's Operator-1, .0144 at the top of a linear drift against .0279 at the top rung alone.
    """
    power = simulate_power(LadderPlan(0.0027, highest=1.01e20), 100)
    assert power.confounding_penalty["top rung"] == pytest.approx(0.0279, abs=5e-4)
    assert power.confounding_penalty["linear"] == pytest.approx(0.0144, abs=5e-4)
    ladders = pair(1e-4, gamma=0.1140)
    request = AnalysisRequest("vanilla", method="joint", draws=100, lr_regret=0.005)
    verdict = analyse(ladders, request).verdicts["grow"]
    found = {t.shape: t for t in verdict.tolerance if t.ladder == "vanilla"}
    assert set(found) == {"top rung", "linear", "quadratic"}
    x = np.log(FLOPS)
    place = (x - x[0]) / (x[-1] - x[0])
    for shape, profile in (("linear", place), ("quadratic", place**2)):
        penalty = found[shape].penalty_explaining_slope  # type: ignore[index]
        assert penalty is not None
        drifted = ladders | {
            "vanilla": replace(ladders["vanilla"], loss=ladders["vanilla"].loss - penalty * profile)
        }
        again = analyse(drifted, request).verdicts["grow"]
        assert abs(again.delta_gamma) < 5e-3 * verdict.delta_gamma
        factor = found[shape].lr_factor_explaining_slope  # type: ignore[index]
        assert factor == pytest.approx(2 ** np.sqrt(penalty / 0.005))
    assert any("gets worse" in line for line in verdict.what_would_change)


def test_extended_ladder_separates_the_hypotheses() -> None:
    """The number of decades that the verdict recommends gives 90% power, by simulation."""
    verdict = analyse(pair(2e-3), AnalysisRequest("vanilla", draws=200)).verdicts["grow"]
    assert verdict.word == "grows: either"
    assert verdict.separation.extra_decades is not None
    rungs = 8 + (verdict.separation.extra_rungs or 0) // 2
    plan = LadderPlan(
        verdict.delta_gamma,
        rungs=rungs,
        lowest=3.25e17,
        highest=verdict.separation.top_flops or 0,
        noise=verdict.sigma,
        multiplier=1.25,
    )
    points, rule = plan.pair()[0], plan.rule
    truth = points.designs()["exponent"].predict(plan.true_parameters(), points.x)
    noise = verdict.sigma * np.random.default_rng(0).standard_normal((500, len(truth)))
    fits = fit_hypotheses(points, truth + noise, rule, warm_start=fit_hypotheses(points, truth, rule))
    words = verdict_words(f_test_hypotheses(fits, rule), rule)
    assert np.mean(words == "grows: exponent") > 0.82


def test_seeds_are_averaged_and_their_scatter_is_compared_with_the_laws() -> None:
    rng = np.random.default_rng(5)
    columns: dict[str, Any] = {"arm": [], "flops": [], "loss": [], "seed": []}
    for name, a, gamma in (("vanilla", 1.5, 0.1113), ("grow", 1.45, 0.1168)):
        for flops in FLOPS:
            for seed in range(3):
                values = (
                    name,
                    flops,
                    1.83 + a * (flops / 1e18) ** -gamma + 1e-3 * rng.standard_normal(),
                    seed,
                )
                for key, value in zip(columns, values, strict=True):
                    columns[key].append(value)
    ladders = read_ladders(table_from(columns))
    assert ladders["grow"].seeds.tolist() == [3.0] * 8
    report = analyse(ladders, AnalysisRequest("vanilla", draws=300))
    kinds = {b.kind: b for b in report.verdicts["grow"].bootstraps}
    assert set(kinds) == {"residuals", "seeds"}
    for resampled in kinds.values():
        assert resampled.delta_gamma[0] < report.verdicts["grow"].delta_gamma < resampled.delta_gamma[1]
    assert report.p_lack_of_fit is not None
    assert report.p_lack_of_fit > 0.001
    # A rung whose three seeds have a common error deviates more from the law than its seeds differ.
    bad = ladders["vanilla"]
    loss = bad.loss + np.where(np.arange(8) == 4, 0.02, 0.0)
    runs = tuple(r + (0.02 if i == 4 else 0.0) for i, r in enumerate(bad.runs))
    spoiled = ladders | {"vanilla": replace(bad, loss=loss, runs=runs)}
    p = lack_of_fit(spoiled, fit_compute(spoiled, FitSettings("vanilla")))
    assert p is not None
    assert p < 1e-3


def test_outlier_is_named_by_its_row() -> None:
    columns = {"arm": ["vanilla"] * 8, "flops": list(FLOPS), "loss": list(pair(1e-3)["vanilla"].loss)}
    columns["loss"][3] += 0.05
    report = analyse(read_ladders(table_from(columns, "runs.csv")), AnalysisRequest("vanilla", draws=200))
    assert any("runs.csv, row 4" in warning for warning in report.warnings)


def test_a_law_with_e_at_zero_says_so_and_calls_no_row_an_outlier() -> None:
    # Two measured ladders of four tiny runs: training seconds and losses, whose laws have E = 0.
    seconds = {"vanilla": (9.12, 30.0, 57.3, 143.8), "mine": (7.68, 25.6, 81.1, 204.9)}
    losses = {"vanilla": (4.5832, 4.1987, 3.8559, 3.4634), "mine": (4.5517, 4.2026, 3.8434, 3.4720)}
    ladders = {arm: make_ladder(arm, np.array(seconds[arm]), np.array(losses[arm])) for arm in seconds}
    found = analyse(ladders, AnalysisRequest("vanilla", method="joint", draws=100, unit="seconds"))
    assert found.primary_fit.arms["mine"].e.value == 0
    assert [warning[:35] for warning in found.warnings] == ["the fitted irreducible loss E is 0,"]


def test_different_irreducible_losses_are_detected_and_no_row_is_an_outlier() -> None:
    ladders = pair(1e-4) | {"low": ladder("low", 1.73, 1.5, 0.1113, noise=1e-4, seed=3)}
    report = analyse(ladders, AnalysisRequest("vanilla", draws=100))
    (warning,) = [w for w in report.warnings if "do not share one irreducible loss" in w]
    assert "(low, p = " in warning
    assert "read the verdicts" in warning
    assert not any("off the law of the other rungs" in w for w in report.warnings)
    data = report.to_dict()
    assert (
        data["arms"]["low"]["p_shared_irreducible_loss"]
        < 0.05
        < data["arms"]["grow"]["p_shared_irreducible_loss"]
    )
    assert data["arms"]["vanilla"]["p_shared_irreducible_loss"] is None
    assert data["p_shared_irreducible_loss"] < 0.05
    # What the warning is for: the joint interval of the reference's own exponent misses the truth.
    low, high = report.primary_fit.arms["vanilla"].gamma.unconditional
    assert not low < 0.1113 < high
    # A row that is off by itself is still named, judged by its own arm's law.
    loss = ladders["low"].loss + np.where(np.arange(8) == 3, 0.05, 0.0)
    spoiled = ladders | {"low": replace(ladders["low"], loss=loss)}
    found = analyse(spoiled, AnalysisRequest("vanilla", draws=100)).warnings
    named = [w for w in found if "off the law of the other rungs" in w]
    assert len(named) == 1
    assert named[0].startswith(ladders["low"].row_labels[3])
    assert "more than 20 standard errors" in named[0]


def test_shared_irreducible_loss_test_holds_its_level() -> None:
    arms = [(f"arm{i}", 1.83, 1.5 - 0.03 * i, 0.1113 + 0.002 * i) for i in range(3)]
    fit = fit_compute({a[0]: ladder(*a) for a in arms}, FitSettings("arm0"))
    rejected = 0
    for seed in range(40):
        ladders = {a[0]: ladder(*a, noise=1e-3, seed=1000 * i + seed) for i, a in enumerate(arms)}
        p = shared_irreducible_loss(ladders, fit).p
        assert p is not None
        rejected += p < 0.2
    assert 2 <= rejected <= 16


def test_shared_irreducible_loss_is_not_tested_where_rungs_share_runs() -> None:
    ladders = pair(1e-3)
    fit = fit_compute(ladders, FitSettings("vanilla"))
    own = {name: replace(ladder, clusters=tuple("abcdefgh")) for name, ladder in ladders.items()}
    assert shared_irreducible_loss(own, fit).p == shared_irreducible_loss(ladders, fit).p is not None
    shared = shared_irreducible_loss(own | {"grow": replace(own["grow"], clusters=tuple("aabcdefg"))}, fit)
    assert shared.p is None and not shared.by_arm and len(shared.theta) == 6


def test_loss_at_or_below_the_fitted_e_is_named_by_its_row() -> None:
    ladders = {name: ladder(name, 3.0, 1.0, 1.0, noise=1e-4, seed=i) for i, name in enumerate(("r", "a"))}
    loss = ladders["a"].loss.copy()
    loss[-1] -= 0.03
    spoiled = ladders | {"a": replace(ladders["a"], loss=loss)}
    report = analyse(spoiled, AnalysisRequest("r", method="joint", draws=100))
    assert report.primary_fit.arms["a"].e.value > loss[-1]
    place = ladders["a"].row_labels[-1]
    assert any(w.startswith(place) and "the law cannot hold there" in w for w in report.warnings)


def test_json_has_the_promised_keys_and_no_bare_nan() -> None:
    report = analyse(pair(1e-3), AnalysisRequest("vanilla", draws=200, budget=1e25, extrapolate=True))
    data = json.loads(to_json(report.to_dict()), parse_constant=pytest.fail)
    for arm in data["arms"].values():
        assert {"gamma", "log_a", "e", "intervals", "verdict"} <= set(arm)
        for name in ("gamma", "log_a", "e"):
            assert set(arm["intervals"][name]) == {"conditional", "unconditional"}
    assert data["arms"]["vanilla"]["verdict"] == "reference"
    assert data["arms"]["grow"]["verdict"] in VERDICTS
    assert data["settings"]["draws"] == 200
    assert "grow" in report.summary()


def test_known_noise_replaces_the_residual_scatter() -> None:
    loud = analyse(pair(1e-4), AnalysisRequest("vanilla", draws=200, noise=0.05)).verdicts["grow"]
    assert loud.word == "undecided"
    assert loud.sigma == pytest.approx(0.05)


def test_random_tables_give_an_analysis_or_a_usage_error() -> None:
    """Flat, rising, random and huge ladders: never a crash, never a warning from numpy."""

    @settings(max_examples=8)
    @given(
        st.lists(st.floats(0.5, 12), min_size=4, max_size=7),
        st.lists(st.floats(0.5, 12), min_size=3, max_size=7),
        st.floats(6, 26),
        st.floats(0.2, 6),
    )
    def check(first: list[float], second: list[float], base: float, span: float) -> None:
        ladders = {
            name: make_ladder(name, 10 ** (base + np.linspace(0, span, len(loss))), np.array(loss))
            for name, loss in (("r", first), ("a", second))
        }
        try:
            with np.errstate(all="raise", under="ignore"):
                report = analyse(ladders, AnalysisRequest("r", draws=100, budget=1e27, extrapolate=True))
        except SteepenError:
            return
        json.loads(to_json(report.to_dict()))
        assert report.summary()

    check()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"method": "magic"}, "method"),
        ({"loss": "l1"}, "loss"),
        ({"confidence": 1.5}, "confidence"),
        ({"level": 0.0}, "level"),
        ({"draws": 3}, "draws"),
        ({"margin": -1.0}, "margin"),
        ({"budget": -1.0}, "budget"),
        ({"noise": 0.0}, "noise"),
        ({"c0": -1.0}, "c0"),
    ],
)
def test_bad_setting_is_named(change: dict[str, object], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        analyse(pair(1e-3), AnalysisRequest("vanilla", **change))  # type: ignore[arg-type]
