"""Compute laws: exact data give exact laws; intervals, multipliers, hold-outs and sensitivity."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from steepen.errors import SteepenError, UsageError
from steepen.laws.analysis import AnalysisRequest, analyse, fit_compute
from steepen.laws.fits.compute_law import fit_irreducible_loss
from steepen.laws.ladder import Ladder, _link_rungs, make_ladder, read_ladders
from steepen.laws.power import LadderPlan, simulate_power
from steepen.laws.verdict.holdout import split_hold_outs
from steepen.laws.verdict.multipliers import interpolated_multipliers
from steepen.tables.table import table_from
from steepen.tables.table_selection import HoldOut
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
    fit = fit_compute(pair(), AnalysisRequest("vanilla", method=method, loss=loss, c0=1e18))  # type: ignore[arg-type]
    for name, gamma, a in (("vanilla", 0.1113, 1.5), ("grow", 0.1168, 1.5 * 1.3**-0.1168)):
        assert fit.arms[name].gamma.value == pytest.approx(gamma, abs=1e-8)
        assert fit.arms[name].log_a.value == pytest.approx(np.log(a), abs=1e-7)
        assert fit.arms[name].e.value == pytest.approx(1.83, abs=1e-6)
        assert fit.arms[name].predict(1e19) == pytest.approx(1.83 + a * 10**-gamma)
        assert fit.arms[name].compute_for(fit.arms[name].predict(1e19)) == pytest.approx(1e19)


def test_c0_moves_the_constant_and_nothing_else() -> None:
    ladders = pair(1e-3)
    first, second = (fit_compute(ladders, AnalysisRequest("vanilla", c0=c0)) for c0 in (1e18, 1e21))
    assert first.arms["grow"].gamma.value == pytest.approx(second.arms["grow"].gamma.value, abs=1e-7)
    assert first.arms["grow"].predict(5e19) == pytest.approx(second.arms["grow"].predict(5e19), abs=1e-8)
    assert first.c0 == 1e18
    default = fit_compute(ladders, AnalysisRequest("vanilla"))
    assert default.c0 == pytest.approx(np.exp(np.log(FLOPS).mean()))


def test_unconditional_interval_is_wider_than_the_one_given_e() -> None:
    for method in ("joint", "paper"):
        law = fit_compute(pair(1e-3), AnalysisRequest("vanilla", method=method)).arms["grow"]  # type: ignore[arg-type]
        wide, narrow = (end[1] - end[0] for end in (law.gamma.unconditional, law.gamma.conditional))
        assert wide > 3 * narrow > 0


def test_papers_interval_of_e_has_the_degrees_of_freedom_of_the_references_ladder() -> None:
    ladders, request = pair(1e-3), AnalysisRequest("vanilla", method="paper", c0=1e18)
    e = fit_compute(ladders, request).arms["vanilla"].e
    fit = fit_irreducible_loss(ladders["vanilla"], 1e18, request.loss, None)
    half = stats.t.ppf(0.5 + request.confidence / 2, len(FLOPS) - 3) * fit.covariance[0, 0] ** 0.5
    assert e.unconditional == pytest.approx((e.value - half, e.value + half), rel=1e-9)


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
        ladders = {"vanilla": ladder("vanilla", e, 1.5, 0.1113), "grow": ladder("grow", e, 1.4, 0.1168)}
        judge = analyse(ladders, AnalysisRequest("vanilla")).judge
        low, high = judge.multipliers("grow", "vanilla", np.array([1e18, 1e20]), extrapolate=True)
        assert high.value / low.value == pytest.approx(100 ** (1 - 0.1113 / 0.1168), rel=1e-5)
        assert high.value / low.value == pytest.approx(1.24, abs=0.005)


def test_interpolated_multipliers_are_the_ratio_of_computes_at_equal_loss() -> None:
    """A power law with E = 0 is straight in log–log, so interpolation is exact."""
    ladders = {
        "vanilla": ladder("vanilla", 0.0, 3.0, 0.1),
        "fast": ladder("fast", 0.0, 3.0 * 1.25**-0.1, 0.1),
    }
    found = interpolated_multipliers(
        ladders["vanilla"],
        ladders["fast"],
        sigmas=(1e-3 * np.ones(8), 1e-3 * np.ones(8)),
        interpolate="log-loss",
    )
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
        fit_compute(ladders, AnalysisRequest("vanilla", method="paper", reference_law=law))  # type: ignore[arg-type]
        for law in ("regression", "free-fit")
    )
    base, e = ladders["vanilla"], line.arms["vanilla"].e.value
    slope = np.polyfit(np.log(base.flops), np.log(base.loss - e), 1)[0]
    assert line.arms["vanilla"].gamma.value == pytest.approx(-slope)
    assert free.arms["vanilla"].gamma.value != pytest.approx(-slope, abs=1e-7)
    assert free.arms["vanilla"].e.value == e
    assert free.arms["grow"].gamma.value == line.arms["grow"].gamma.value
    with pytest.raises(UsageError, match="regression, free-fit"):
        AnalysisRequest("vanilla", reference_law="mean")  # type: ignore[arg-type]


def test_raw_huber_gives_an_outlier_less_weight_than_least_squares() -> None:
    clean = ladder("v", 1.7, 1.5, 0.11)
    loss = clean.loss + 1e-4 * np.array([1.0, -1.0, 0.5, -0.5, 1.0, -1.0, 0.5, -0.5][: len(clean.loss)])
    loss[3] += 0.02
    spoiled = {"v": make_ladder("v", clean.flops, loss)}
    errors = {
        request.loss: abs(fit_compute(spoiled, request).arms["v"].e.value - 1.7)
        for request in (
            AnalysisRequest("v", method="paper", loss="raw-huber"),
            AnalysisRequest("v", method="paper", loss="mse"),
        )
    }
    assert errors["raw-huber"] < 0.5 * errors["mse"]


def test_multipliers_are_extrapolated_only_on_request() -> None:
    ladders = pair(1e-3)
    found = interpolated_multipliers(ladders["vanilla"], ladders["grow"])
    assert len(found) == 7  # the reference's first rung is above every loss of the arm
    judge = analyse(ladders, AnalysisRequest("vanilla")).judge
    assert not judge.multipliers("grow", "vanilla", np.array([1e25]), extrapolate=False)
    (beyond,) = judge.multipliers("grow", "vanilla", np.array([1e25]), extrapolate=True)
    assert beyond.extrapolated
    assert beyond.low < beyond.value < beyond.high
    assert beyond.method == "fitted (joint)"


@pytest.mark.parametrize(("budget", "extrapolate"), [(None, True), (1.5e18, False), (1e25, True)])
def test_budget_has_a_multiplier_only_where_laws_are_extrapolated(
    budget: float | None, extrapolate: bool
) -> None:
    request = AnalysisRequest("vanilla", draws=100, budget=budget, extrapolate=extrapolate)
    found = analyse(pair(1e-3), request).multipliers["grow"]
    for method in ("fitted (joint)", "fitted (paper)"):
        computes = {one.flops for one in found if one.method == method}
        assert len(computes & set(FLOPS)) >= 7, method
        assert computes - set(FLOPS) == ({budget} if budget and extrapolate else set()), method


def test_held_out_run_is_scored_in_loss_sigma_and_compute() -> None:
    kept, held = split_hold_outs(pair(1e-3), [HoldOut("", "grow", 9e19)])
    assert (len(kept["grow"].flops), len(kept["vanilla"].flops)) == (7, 8)
    found = analyse(kept, AnalysisRequest("vanilla"), held)
    (result,) = found.hold_out
    assert result.interval[0] < result.observed < result.interval[1]
    lower = replace(held["grow"], loss=held["grow"].loss - 0.03)
    (miss,) = analyse(kept, AnalysisRequest("vanilla"), {"grow": lower}).hold_out
    assert miss.error == pytest.approx(result.error - 0.03)
    assert miss.error_in_sigma == pytest.approx(miss.error / found.primary_fit.sigma, rel=0.1)
    assert miss.p_value < 1e-2
    assert miss.compute_factor > 1.2  # the law would need over a fifth more compute for that loss
    law = found.primary_fit.arms["grow"]
    assert law.predict(miss.compute_factor * miss.flops) == pytest.approx(miss.observed)


def test_hold_out_intervals_cover_at_their_confidence() -> None:
    hits = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        long = np.append(FLOPS, 1.2e21)
        loss = 1.83 + 1.5 * (long / 1e18) ** -0.1113 + 1e-3 * rng.standard_normal(9)
        kept, held = split_hold_outs(
            {"vanilla": make_ladder("vanilla", long, loss)}, [HoldOut("", flops=1e21)]
        )
        (result,) = analyse(kept, AnalysisRequest("vanilla", method="joint"), held).hold_out
        hits += result.interval[0] < result.observed < result.interval[1]
    assert hits >= 22


def test_planned_laws_have_the_stated_constant_and_multiplier() -> None:
    plan = LadderPlan(0.002, multiplier=1.2)
    x = plan.cells().x.copy()
    assert plan.laws().predict(x)[0, 0] == pytest.approx(1.83 + 1.5 * (plan.flops / 1e18) ** -plan.gamma)
    x[1] -= np.log(1.2)  # at the bottom, the arm's loss is the reference's at 1.2 times the compute
    loss = plan.laws().predict(x)[0]
    assert loss[1, 0] == pytest.approx(loss[0, 0]) and loss[1, -1] < loss[0, -1]


@pytest.mark.parametrize("delta_gamma", [0.0010, -0.0010])
def test_confounding_penalty_of_power_matches_the_verdicts_tolerance(delta_gamma: float) -> None:
    plan = LadderPlan(delta_gamma, noise=1e-5)
    power = simulate_power(plan, 100)
    loss = plan.laws().predict(plan.cells().x)[0]
    ladders = {name: make_ladder(name, plan.flops, loss[i]) for i, name in enumerate(("reference", "arm"))}
    verdict = analyse(ladders, AnalysisRequest("reference", noise=1e-5)).verdicts["arm"]
    (tolerance,) = [
        t for t in verdict.tolerance if t.shape == "top rung" and t.ladder == power.confounding_ladder
    ]
    assert tolerance.penalty_explaining_growth == pytest.approx(
        power.confounding_penalty["top rung"], rel=0.25
    )  # the verdict's noise follows the penalty, power's is fixed


@pytest.mark.parametrize("rungs", [5, 6, 8])
def test_outliers_have_the_p_values_of_the_t_test_of_leaving_a_rung_out(rungs: int) -> None:
    """Externally studentized residuals of least squares, times the number of rungs."""
    flops = np.geomspace(1e17, 1e20, rungs)
    noise = 1e-4 * np.random.default_rng(3).standard_normal(rungs)
    one = ladder("v", 1.83, 1.5, 0.11, flops=flops)
    one = replace(one, loss=one.loss + noise)
    found, distance = analyse(
        {"v": one}, AnalysisRequest("v", method="joint", draws=100)
    ).judge.fit.outliers()
    if rungs == 4:  # without a rung, three parameters fit the others exactly: nothing is an outlier
        assert found.min() == 1
        return
    x = np.log(flops / 1e18)
    start = [1.83, np.log(1.5), 0.11]
    fit = optimize.least_squares(
        lambda law: law[0] + np.exp(law[1] - law[2] * x) - one.loss, start, xtol=1e-15, ftol=1e-15, gtol=1e-15
    )
    jacobian = cast("np.ndarray", fit.jac)
    residual, free = -fit.fun, 1 - np.diag(jacobian @ np.linalg.pinv(jacobian))
    spare = rungs - 4
    t = residual / np.sqrt(free * (residual @ residual - residual**2 / free) / spare)
    expected = np.minimum(1, rungs * 2 * stats.t.sf(np.abs(t), spare))
    assert found[0, 0] == pytest.approx(expected, rel=1e-3) and expected.min() < 0.5
    assert distance[0, 0] == pytest.approx(residual / free, rel=1e-2)


def test_outlier_is_named_by_its_row() -> None:
    columns = {"arm": ["vanilla"] * 8, "flops": list(FLOPS), "loss": list(pair(1e-3)["vanilla"].loss)}
    columns["loss"][3] += 0.05
    report = analyse(read_ladders(table_from(columns, "runs.csv")), AnalysisRequest("vanilla", draws=200))
    assert any("runs.csv, row 4" in warning for warning in report.warnings)
    assert [one.flops for one in report.left_out] == [FLOPS[3]]
    assert len(report.judge.ladders["vanilla"].flops) == 7


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
    report = analyse(ladders, AnalysisRequest("vanilla"))
    (warning,) = report.warnings
    assert warning.startswith("the arms do not share one irreducible loss E (p = ")
    assert report.one_e_rejected and report.to_dict()["p_shared_irreducible_loss"] < 0.05
    assert not report.left_out
    laws = report.primary_fit.arms
    assert laws["low"].e.value - laws["vanilla"].e.value == pytest.approx(-0.1, abs=0.05)
    assert report.verdicts["low"].growth == "grows"
    low, high = laws["vanilla"].gamma.unconditional
    assert low < 0.1113 < high


def test_shared_irreducible_loss_is_not_tested_where_rungs_share_runs() -> None:
    ladders = pair(1e-3)
    own = {name: replace(ladder, clusters=tuple("abcdefgh")) for name, ladder in ladders.items()}
    request = AnalysisRequest("vanilla", method="joint")
    assert analyse(own, request).p_shared_irreducible_loss is not None
    shared = own | {"grow": replace(own["grow"], clusters=tuple("aabcdefg"))}
    found = analyse(shared, request)
    assert found.p_shared_irreducible_loss is None


def test_rungs_that_share_a_training_run_directly_or_not_have_one_name() -> None:
    assert _link_rungs([["c"], ["a", "b"], ["b", "d"], ["d"]]) == ("c", "a", "a", "a")


def test_loss_at_or_below_the_fitted_e_is_named_by_its_row() -> None:
    ladders = {name: ladder(name, 3.0, 1.0, 1.0, noise=1e-4, seed=i) for i, name in enumerate(("r", "a"))}
    loss = ladders["a"].loss.copy()
    loss[-1] -= 0.03
    spoiled = ladders | {"a": replace(ladders["a"], loss=loss)}
    report = analyse(spoiled, AnalysisRequest("r", method="joint", draws=100))
    # Far off the others' law, the rung is left out and named; were it kept, the law could not hold there.
    assert report.primary_fit.arms["a"].e.value > loss[-1]
    assert any(w.startswith(ladders["a"].row_labels[-1]) for w in report.warnings)


def test_json_has_the_promised_keys_and_no_bare_nan() -> None:
    report = analyse(pair(1e-3), AnalysisRequest("vanilla", draws=200, budget=1e25, extrapolate=True))
    data = json.loads(to_json(report.to_dict()), parse_constant=pytest.fail)
    for arm in data["arms"].values():
        assert {"gamma", "log_a", "e", "intervals", "verdict"} <= set(arm)
        for name in ("gamma", "log_a", "e"):
            assert set(arm["intervals"][name]) == {"conditional", "unconditional"}
    assert data["arms"]["vanilla"]["verdict"] is None
    verdict = data["arms"]["grow"]["verdict"]
    assert {"better", "growth", "by_what", "unadjusted", "gain", "top", "slope", "levels"} <= set(verdict)
    assert data["settings"]["draws"] == 200


def test_stated_noise_is_a_part_of_the_variance() -> None:
    quiet, loud = (
        analyse(pair(1e-3), AnalysisRequest("vanilla", noise=noise)).verdicts["grow"] for noise in (1e-4, 0.2)
    )
    assert quiet.better == "better" and loud.word == "not resolved; undecided"
    half = analyse(pair(1e-3), AnalysisRequest("vanilla", noise=1e-4))
    assert half.lack_of_fit > 5e-4  # what the stated noise does not explain


def test_random_tables_give_an_analysis_or_a_usage_error() -> None:
    """Flat, rising, random and huge ladders: never a crash, never a warning from numpy."""

    @settings(max_examples=8)
    @given(
        st.lists(st.floats(0.5, 12), min_size=4, max_size=7),
        st.lists(st.floats(0.5, 12), min_size=3, max_size=7),
        st.floats(6, 26),
        st.floats(0.2, 6),
    )
    @example([5.0, 5.0, 1.0, 5.0], [1.0, 2.0, 1.0], 6.0, 1.0)
    def check(first: list[float], second: list[float], base: float, span: float) -> None:
        ladders = {
            name: make_ladder(name, 10 ** (base + np.linspace(0, span, len(loss))), np.array(loss))
            for name, loss in (("r", first), ("a", second))
        }
        try:
            with np.errstate(all="raise", under="ignore"):
                report = analyse(ladders, AnalysisRequest("r", draws=100, budget=1e27, extrapolate=True))
                found = report.to_dict()
        except SteepenError:
            return
        json.loads(to_json(found))
        assert all(verdict.summary() for verdict in report.verdicts.values())

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


def test_printed_law_runs_through_the_runs_where_e_is_hardly_known() -> None:
    """Four rungs of a tiny preset; the means of E, A and γ were a curve 0.3 nats above every run."""
    flops = np.array([2.288e9, 1.0193e10, 3.6805e10, 1.10865e11])
    losses = {"vanilla": [5.3945, 4.8926, 4.6330, 4.3075], "operator-1": [5.3321, 4.7473, 4.4647, 4.1219]}
    ladders = {arm: make_ladder(arm, flops, np.array(loss)) for arm, loss in losses.items()}
    found = analyse(ladders, AnalysisRequest("vanilla", method="joint", draws=100))
    for arm, law in found.primary_fit.arms.items():
        assert abs(float(np.mean(law.predict(flops) - ladders[arm].loss))) < 0.03
