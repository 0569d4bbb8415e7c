"""Iso-compute sweeps, drift of optima and matched-compute slices recover simulated truths."""

from __future__ import annotations

import math

import numpy as np
import pytest

from steepen.errors import UsageError
from steepen.laws.fits.isoflop import (
    fit_isoflop,
    fit_isoflop_runs,
    fit_power_law,
    group_budgets,
    rounded_mean,
)
from steepen.laws.fits.vertex import find_vertex
from steepen.laws.isoflop_table import fit_isoflop_table
from steepen.laws.ladder import make_ladder
from steepen.recipe.recipe import GrowthLaw
from steepen.studies.design.matched_compute import convex_envelope, envelope_compute, loss_at, slice_families
from steepen.studies.drift import fit_affine, fit_drift, fit_growth_fraction
from steepen.tables.table import table_from


def sweep(
    best: float, height: float, factors: tuple[float, ...] = (0.25, 0.5, 1, 2, 4), curve: float = 0.02
) -> tuple[np.ndarray, np.ndarray]:
    x = best * np.array(factors)
    return x, height * np.exp(curve * np.log(x / best) ** 2)


def test_vertex_height_and_curvature_of_a_parabola_are_recovered() -> None:
    vertex = find_vertex(*sweep(5.3, 3.27, (0.2, 0.6, 1.1, 2, 3)))
    assert vertex.x == pytest.approx(5.3)
    assert vertex.loss == pytest.approx(3.27)
    assert vertex.curvature == pytest.approx(0.04)
    assert vertex.interior


def test_no_runs_at_all_are_an_error_and_no_empty_mean(recwarn: pytest.WarningsRecorder) -> None:
    """As where every run of a study's sweeps diverged."""
    none = np.array([])
    with pytest.raises(UsageError, match="no budget has three different x"):
        fit_isoflop(none, none, none)
    assert not list(recwarn)


def test_vertex_outside_the_sweep_is_censored_and_gives_the_best_measured() -> None:
    x, loss = sweep(10.0, 3.0, (0.1, 0.2, 0.3, 0.5))
    vertex = find_vertex(x, loss)
    assert vertex.censored
    assert vertex.x == pytest.approx(5.0)
    bowl = find_vertex(np.array([1.0, 2, 4]), np.array([3.0, 3.2, 3.0]))
    assert bowl.censored  # a hill has no minimum


def test_concave_sweep_has_no_minimum_and_no_interval() -> None:
    x, loss = sweep(5.0, 3.0, curve=-0.02)
    fit = fit_isoflop(np.full(5, 1e18), x, loss)
    (vertex,) = fit.vertices
    assert vertex.concave
    assert vertex.interval is None
    assert vertex.leave_one_out is None
    assert any("1e+18: no minimum: the parabola opens downwards" in w for w in fit.warnings)


def test_unbounded_optimum_enters_the_law_with_a_warning_that_names_its_budget() -> None:
    parts = [(1e18, sweep(5.0, 3.0)), (1e19, sweep(5.5, 2.8)), (1e20, sweep(6.0, 2.6, (0.5, 1, 2)))]
    budget = np.concatenate([np.full(len(x), c) for c, (x, _) in parts])
    x, loss = (np.concatenate([part[i] for _, part in parts]) for i in (0, 1))
    fit = fit_isoflop(budget, x, loss)
    (warning,) = [w for w in fit.warnings if "unbounded" in w]
    assert "1e+20" in warning


def test_vertex_intervals_cover_90_percent() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(500):
        x, loss = sweep(6.0, 3.0, (0.3, 0.5, 0.8, 1.2, 2, 3))
        vertex = find_vertex(x, loss * np.exp(1e-3 * rng.standard_normal(6)))
        assert vertex.interval is not None
        hits += vertex.interval[0] <= 6.0 <= vertex.interval[1]
    assert 0.86 <= hits / 500 <= 0.94


def test_sweep_too_wide_for_a_parabola_is_flagged() -> None:
    n = np.geomspace(1e6, 1e9, 12)
    loss = 1.8 + 400 / n**0.34 + 0.6 * (n / 3e8) ** 0.9
    fit = fit_isoflop(np.full(12, 1e18), n, loss)
    assert any("not parabolas (budget 1e+18" in warning for warning in fit.warnings)
    dense = np.geomspace(1e6, 1e9, 20001)
    best = dense[np.argmin(1.8 + 400 / dense**0.34 + 0.6 * (dense / 3e8) ** 0.9)]
    wide, narrow, akima = (
        find_vertex(n, loss, **options).x  # type: ignore[arg-type]
        for options in ({}, {"nearest": 5}, {"method": "akima"})
    )
    assert abs(math.log(narrow / best)) < abs(math.log(wide / best)) / 3
    assert akima == pytest.approx(best, rel=0.05)


def test_scale_shift_test_and_its_detectable_drift() -> None:
    budgets = np.array([1e18, 2e18, 4e18, 8e18, 1.6e19])
    optima = 5.33 * np.exp(0.05 * np.array([1, -1, 0.5, 1, -1.2]))
    line = fit_power_law(budgets, optima)
    assert line.p_value > 0.05
    assert line.interval[0] < 0 < line.interval[1]
    rng = np.random.default_rng(1)
    found = [
        fit_power_law(
            budgets,
            5.33 * (budgets / 1e18) ** line.detectable * np.exp(line.residual_sd * rng.standard_normal(5)),
        ).p_value
        < 0.05
        for _ in range(1500)
    ]
    assert 0.74 <= np.mean(found) <= 0.86  # it promises 80% power


def test_three_standard_errors_with_three_points_is_p_of_one_fifth() -> None:
    """With one degree of freedom, the paper's bold type is only p ≈ 0.2."""
    u = np.log(np.array([1.0, 2.0, 4.0]))
    bend = np.array([1.0, -2.0, 1.0])
    slope = 3 * math.sqrt(6 * 0.01**2 / (2 * math.log(2) ** 2))
    line = fit_power_law(np.exp(u), np.exp(slope * u + 0.01 * bend))
    assert line.exponent / line.standard_error == pytest.approx(3, rel=1e-6)
    assert line.p_value == pytest.approx(0.205, abs=0.001)
    assert line.interval[0] < 0 < line.interval[1]


def test_isoflop_exponents_and_predictions_are_recovered() -> None:
    rows = [
        (c, *pair)
        for c in np.geomspace(1e18, 1e22, 6)
        for pair in zip(*sweep(0.3 * c**0.53, 3 * c**-0.01), strict=True)
    ]
    budget, x, loss = np.array(rows).T
    fit = fit_isoflop(budget, x, loss)
    assert fit.law is not None
    assert fit.law.exponent == pytest.approx(0.53)
    assert fit.law.predict(3.8e25) == pytest.approx(0.3 * 3.8e25**0.53, rel=1e-6)


def shared_runs(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    """Seven models with a checkpoint at each of five budgets; a model's error is that of all its rows."""
    budgets, sizes = np.geomspace(1e18, 1e20, 5), np.geomspace(2e7, 2e9, 7)
    budget, x = (part.ravel() for part in np.meshgrid(budgets, sizes))
    away = np.log(x / (2e8 * (budget / 1e19) ** 0.5))
    error = np.repeat(0.004 * rng.standard_normal(7), 5) + 0.0005 * rng.standard_normal(35)
    runs = [f"model{i}" for i in range(7) for _ in range(5)]
    return budget, x, 2.5 * np.exp(0.01 * away**2 + error), runs


def test_runs_with_rows_at_several_budgets_widen_the_law_of_the_optima() -> None:
    """A 90% interval of the optimum at the middle budget, by scatter of the optima and by runs."""
    rng = np.random.default_rng(0)
    inside = np.zeros(2)
    for _ in range(60):
        budget, x, loss, runs = shared_runs(rng)
        for k, fit in enumerate((fit_isoflop(budget, x, loss), fit_isoflop_runs(budget, x, loss, runs))):
            assert fit.law is not None
            low, high = fit.law.interval_at(1e19)
            inside[k] += low < 2e8 < high
    assert inside[0] / 60 < 0.75, "rows taken as independent"
    assert inside[1] / 60 > 0.8


def test_law_of_few_budgets_takes_its_freedom_from_the_runs() -> None:
    budget, x, loss, runs = shared_runs(np.random.default_rng(1))
    two = np.isin(budget, np.unique(budget)[[0, 4]])
    named = [run for run, chosen in zip(runs, two, strict=True) if chosen]
    unknown, known = (
        fit_isoflop(budget[two], x[two], loss[two]),
        fit_isoflop_runs(budget[two], x[two], loss[two], named),
    )
    assert unknown.law is not None and known.law is not None
    assert unknown.law.interval_at(1e19) == (0.0, math.inf)  # two budgets alone leave no scatter to judge by
    low, high = known.law.interval_at(1e19)
    assert known.law.degrees_of_freedom == 5 and 0 < low < known.law.predict(1e19) < high < math.inf


def test_run_column_of_an_isoflop_table_is_used() -> None:
    budget, x, loss, runs = shared_runs(np.random.default_rng(1))
    rows = {"budget": budget.tolist(), "x": x.tolist(), "loss": loss.tolist()}
    alone, shared = (
        fit_isoflop_table(table_from(columns)).arms[""].fit for columns in (rows, {**rows, "run": runs})
    )
    assert alone.law is not None and shared.law is not None
    assert shared.law.runs == 7 and alone.law.runs is None
    assert shared.law.exponent == alone.law.exponent and shared.law.level_error > alone.law.level_error


def test_budgets_realized_within_a_percent_are_one_sweep() -> None:
    budget = np.array([1e18, 2e18, 1.004e18, 1.998e18, 0.998e18])
    assert [sorted(group.tolist()) for group in group_budgets(budget)] == [[0, 2, 4], [1, 3]]


def test_papers_rounding_rules() -> None:
    assert [rounded_mean([v]) for v in (5.33, 5.66, 5.79, 6.39, 6.08)] == [5, 6, 6, 6, 6]
    assert rounded_mean([0.556, 0.559, 0.516], 1) == 0.5
    assert float(np.mean([0.556, 0.559, 0.516])) == pytest.approx(0.544, abs=5e-4)


def test_growth_fractions_are_fitted_on_a_linear_axis() -> None:
    rho = np.array([0.3, 0.4, 0.5, 0.6, 0.7])
    budget = np.repeat([1e18, 2e18, 3e18], 5)
    loss = np.concatenate(
        [3 - 0.1 * i + 0.5 * (rho - best) ** 2 for i, best in enumerate((0.556, 0.559, 0.516))]
    )
    fit = fit_growth_fraction(budget, np.tile(rho, 3), loss)
    assert [v.x for v in fit.vertices] == pytest.approx([0.556, 0.559, 0.516])
    assert fit.rounded == 0.5


def test_affine_growth_law_reproduces_the_papers_fractions() -> None:
    tpp = np.array([3.0, 5, 8, 12, 20])
    law = fit_affine(tpp, 0.902 * tpp + 0.216)
    assert (law.a, law.b) == pytest.approx((0.902, 0.216))
    assert law.r_squared > 0.9999
    assert GrowthLaw(law.a, law.b).expansion(7.0) == pytest.approx(7 / (0.902 * 7 + 0.216))


def test_drift_exponent_regret_and_range() -> None:
    multiples = np.array([0.25, 0.5, 1, 2, 4])
    slices = {
        n: (multiples, 3.0 * np.exp(0.01 * np.log(multiples / (n / 1e8) ** -0.78) ** 2))
        for n in (1e8, 1.5e8, 2.2e8)
    }
    drift = fit_drift(slices)
    assert drift.law is not None
    assert drift.law.exponent == pytest.approx(-0.78)
    _, top = slices[2.2e8]
    assert drift.regret == pytest.approx((top[1] + top[3]) / 2 - top[2])
    assert drift.span == pytest.approx(top.max() - top.min())
    assert drift.at_parameters == 2.2e8
    assert drift.exceeds_three_standard_errors


def test_matched_compute_slices_interpolate_and_never_extrapolate() -> None:
    flops = np.geomspace(1e17, 1e19, 5)
    families = {
        k: make_ladder(str(k), flops * k, 4 * (flops / 1e17) ** -0.05 * (1 + 0.01 * math.log(k / 2) ** 2))
        for k in (1.0, 2.0, 3.0, 4.0, 6.0)
    }
    assert loss_at(families[1.0], 9e16) is None
    assert loss_at(families[1.0], 1e17) == pytest.approx(families[1.0].loss[0])
    middle = math.sqrt(flops[0] * flops[1])
    first, second = families[1.0].loss[:2]
    assert loss_at(families[1.0], middle, "log-log") == pytest.approx(math.sqrt(first * second))
    assert loss_at(families[1.0], flops[:2].mean()) == pytest.approx((first + second) / 2)
    low, high = slice_families(families, np.array([1.5e17, 5e18]))
    assert set(low.losses) == {1.0}
    assert low.best is None
    assert set(high.losses) == {1.0, 2.0, 3.0, 4.0, 6.0}


def test_best_k_is_interior_or_censored() -> None:
    flops = np.geomspace(1e17, 1e19, 5)

    def families(best: float) -> dict[float, object]:
        return {
            k: make_ladder(str(k), flops, (4 + 0.05 * math.log(k / best) ** 2) * (flops / 1e17) ** -0.05)
            for k in (1.0, 2.0, 3.0, 4.0)
        }

    (inside,) = slice_families(families(1.7), np.array([1e18]))  # type: ignore[arg-type]
    assert inside.best is not None
    assert inside.best.interior
    assert inside.best.x == pytest.approx(1.7, rel=0.01)
    (outside,) = slice_families(families(9.0), np.array([1e18]))  # type: ignore[arg-type]
    assert outside.best is not None
    assert outside.best.censored
    assert outside.best.x == 4.0


def test_the_convex_envelope_keeps_only_what_no_mixture_beats() -> None:
    flops = np.array([4.0, 1.0, 2.0, 3.0, 2.0, 5.0])
    loss = np.array([2.0, 4.0, 3.5, 2.5, 3.0, 2.4])  # (2, 3.5) is beaten at 2; (5, 2.4) rises again
    x, y = convex_envelope(flops, loss)
    assert x.tolist() == [1.0, 2.0, 4.0]  # (3, 2.5) lies on the line from 2 to 4
    assert y.tolist() == [4.0, 3.0, 2.0]
    assert envelope_compute(flops, loss, 2.25) == pytest.approx(3.5)
    assert math.isnan(envelope_compute(flops, loss, 1.9))
    assert math.isnan(envelope_compute(flops, loss, 4.1))


def test_a_vertex_is_bracketed_only_if_the_lowest_point_is_inside() -> None:
    x = np.array([1.0, 2.0, 4.0])
    inside = find_vertex(x, np.array([3.0, 2.9, 3.1]))
    assert inside.interior and inside.bracketed
    edge = find_vertex(x, np.array([3.0, 3.001, 3.1]))  # the parabola turns between 1 and 2
    assert edge.interior and not edge.bracketed


def test_an_unknown_interpolation_is_rejected() -> None:
    ladder = make_ladder("v", np.array([1e17, 1e18]), np.array([3.0, 2.8]))
    with pytest.raises(UsageError, match="choose one of linear, log-log"):
        loss_at(ladder, 5e17, "cubic")  # type: ignore[arg-type]
