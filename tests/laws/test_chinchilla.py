"""The Chinchilla law L = E + A/N^α + B/D^β: recovered exactly, robust, flagged at bounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from steepen.errors import UsageError
from steepen.laws.distributions import Prior
from steepen.laws.fits.chinchilla import ChinchillaSettings, build_problem, fit_chinchilla
from steepen.laws.fits.size_law_comparison import ArmRuns, LawComparison, compare_laws
from steepen.laws.fits.size_law_solver import ModelSize


def grid(
    seed: int = 0, noise: float = 0.0, units: tuple[float, float] = (1.0, 1.0)
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    n, d = (part.ravel() for part in np.meshgrid(np.geomspace(5e7, 1e10, 8), np.geomspace(1e9, 3e11, 8)))
    loss = 1.82 + 480 / n**0.347 + 2100 / d**0.366
    return n * units[0], d * units[1], loss * np.exp(noise * rng.standard_normal(64))


@pytest.mark.parametrize("loss", ["huber", "mse", "log-mse"])
@pytest.mark.parametrize("units", [(1.0, 1.0), (1e-6, 1e-9), (1e3, 1e3)])
def test_exact_three_term_law_is_recovered_in_any_units(loss: str, units: tuple[float, float]) -> None:
    settings = ChinchillaSettings(loss=loss)  # type: ignore[arg-type]
    fit = fit_chinchilla(*grid(units=units), settings)
    assert (fit.e, fit.alpha, fit.beta) == pytest.approx((1.82, 0.347, 0.366), abs=1e-4)
    assert fit.a == pytest.approx(480 * units[0] ** 0.347, rel=2e-3)
    n, d, best = fit.optimum(1e21 * units[0] * units[1])
    assert 6 * n * d == pytest.approx(1e21 * units[0] * units[1])
    assert best <= float(fit.predict(n * 1.1, d / 1.1))
    assert best <= float(fit.predict(n / 1.1, d * 1.1))


def test_gradient_of_the_objective_is_exact() -> None:
    n, d, y = grid(noise=0.01)
    theta = np.array([1.7, 0.1, -0.2, 0.4, 0.3, 0.5])
    passes = np.tile([1.0, 4.0], 32)
    size = ModelSize(0.6 * n, 0.4 * n, np.log(passes))
    for loss in ("huber", "log-mse", "mse"):
        surface = build_problem(size, d, y, ChinchillaSettings(loss=loss), looped=True)  # type: ignore[arg-type]
        surface = replace(surface, e_penalty=(1.8, 2.0))
        _, slope = surface.value_and_gradient(theta)
        for i in range(6):
            step = 1e-6 * np.eye(6)[i]
            rise = surface.value_and_gradient(theta + step)[0] - surface.value_and_gradient(theta - step)[0]
            assert slope[i] == pytest.approx(rise / 2e-6, rel=1e-4, abs=1e-9)


def test_huber_fit_is_robust_to_outliers() -> None:
    n, d, y = grid(noise=1e-3)
    y[[3, 20, 41]] *= 1.3
    robust, mse = (
        fit_chinchilla(n, d, y, ChinchillaSettings(loss=loss))  # type: ignore[arg-type]
        for loss in ("huber", "mse")
    )
    assert abs(robust.alpha - 0.347) < 0.01 < abs(mse.alpha - 0.347)


def test_solution_at_a_bound_is_flagged() -> None:
    n, d, y = grid()
    fit = fit_chinchilla(
        n, d, y - 1.82 - 480 / n**0.347 + 1e-6 * n**-0.1 + 0.5, ChinchillaSettings(loss="mse")
    )
    assert fit.flags


def test_too_few_points_or_values_are_rejected() -> None:
    n, d, y = grid()
    with pytest.raises(UsageError, match=r"at least 6, or fit one exponent \(α = β, `equal_exponents`\)"):
        fit_chinchilla(n[:5], d[:5], y[:5])
    with pytest.raises(UsageError, match="tokens takes only one"):
        fit_chinchilla(n[:8], np.full(8, 1e9), y[:8])


def five_runs(rng: np.random.Generator, noise: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gadre et al.'s protocol: four sizes at 20 tokens per parameter, and the smallest at 320."""
    n = np.array([1e7, 8e7, 1.5e8, 4e8, 1e7])
    d = n * np.array([20, 20, 20, 20, 320])
    return n, d, tied_law(n, d) * np.exp(noise * rng.standard_normal(5))


def tied_law(n: np.ndarray | float, d: np.ndarray | float) -> np.ndarray:
    return np.asarray(1.82 + 480 / np.asarray(n) ** 0.347 + 1500 / np.asarray(d) ** 0.347)


def test_one_exponent_is_fitted_to_five_runs() -> None:
    fit = fit_chinchilla(*five_runs(np.random.default_rng(0), 0.0), ChinchillaSettings(loss="mse", tied=True))
    assert fit.alpha == fit.beta == pytest.approx(0.347, abs=1e-4)
    assert (fit.e, fit.parameters_exponent) == pytest.approx((1.82, 0.5), abs=1e-3)
    assert fit.degrees_of_freedom == 1
    with pytest.raises(UsageError, match="at least 5"):
        fit_chinchilla(np.ones(4), np.ones(4), np.ones(4), ChinchillaSettings(tied=True))


def test_interval_of_a_held_out_run_includes_the_laws_own_error() -> None:
    rng = np.random.default_rng(2)
    n, d, settings = 7e9, 1.4e11, ChinchillaSettings(loss="mse", tied=True, starts_per_axis=3)
    inside, within_noise, repeats = 0, 0, 120
    for _ in range(repeats):
        fit = fit_chinchilla(*five_runs(rng, 0.003), settings)
        observed = float(tied_law(n, d)) * np.exp(0.003 * rng.standard_normal())
        low, high = fit.forecast_interval(n, d)[0]
        inside += low < observed < high
        within_noise += abs(observed - float(fit.predict(n, d))) < 1.645 * fit.residual_sd
    assert 0.82 <= inside / repeats <= 0.97  # nominal 0.90
    assert within_noise / repeats < 0.5  # the noise of a run alone


def test_rows_of_one_run_count_once() -> None:
    """Ten checkpoints of each run share the run's error: intervals must not shrink by √10."""
    rng = np.random.default_rng(3)
    n, d = (part.ravel() for part in np.meshgrid(np.geomspace(5e7, 1e10, 5), np.geomspace(1e9, 3e11, 6)))
    shared = 0.005 * rng.standard_normal(len(n))
    columns = [np.repeat(part, 10) for part in (n, d, shared)]
    columns[1] = columns[1] * np.tile(np.geomspace(0.7, 1, 10), len(n))
    y = (1.82 + 480 / columns[0] ** 0.347 + 2100 / columns[1] ** 0.366) * np.exp(columns[2])
    runs = [str(i) for i in np.repeat(np.arange(len(n)), 10)]
    settings = ChinchillaSettings(loss="log-mse")
    rows, clustered = (fit_chinchilla(columns[0], columns[1], y, settings, runs=r) for r in (None, runs))
    width = [fit.intervals["alpha"][1] - fit.intervals["alpha"][0] for fit in (rows, clustered)]
    assert width[1] > 2 * width[0]
    errors = [fit.law_standard_error(1e11, 1e12) for fit in (rows, clustered)]
    assert errors[1] > 2 * errors[0]
    assert (rows.alpha, rows.beta) == (clustered.alpha, clustered.beta)


def test_tokens_in_proportion_to_parameters_are_refused() -> None:
    n = np.geomspace(1e7, 1e10, 12)
    with pytest.raises(UsageError, match=r"tokens follow parameters .* fit `law` compute"):
        fit_chinchilla(n, 20 * n, 1.8 + 400 / n**0.3)
    with pytest.raises(UsageError, match=r"tokens follow parameters"):  # not: give more of them
        fit_chinchilla(n[:5], 20 * n[:5], 1.8 + 400 / n[:5] ** 0.3)


def test_known_irreducible_loss_is_held_or_drawn_towards() -> None:
    n, d, y = grid(noise=3e-3)
    for loss in ("huber", "log-mse"):
        settings = ChinchillaSettings(loss=loss, starts_per_axis=4)  # type: ignore[arg-type]
        free, fixed, tight, loose = (
            fit_chinchilla(n, d, y, replace(settings, irreducible_loss=prior))
            for prior in (None, Prior(1.7), Prior.from_text("1.7±0.001"), Prior.from_text("1.7+-10"))
        )
        assert fixed.e == 1.7 and fixed.intervals["e"][1] - fixed.intervals["e"][0] < 1e-6
        assert tight.e == pytest.approx(1.7, abs=2e-3) and loose.e == pytest.approx(free.e, abs=2e-3)
        assert (tight.alpha, tight.beta) == pytest.approx((fixed.alpha, fixed.beta), abs=3e-3)
        true = fit_chinchilla(n, d, y, replace(settings, irreducible_loss=Prior(1.82, 0.001)))
        widths = [fit.intervals["alpha"][1] - fit.intervals["alpha"][0] for fit in (free, true)]
        assert widths[0] > 1.1 * widths[1]
    with pytest.raises(UsageError, match="not below the lowest loss"):
        fit_chinchilla(n, d, y, ChinchillaSettings(irreducible_loss=Prior(9.0)))
    for wrong in ("x", "1.7±", "-1", "1.7±0"):
        with pytest.raises(UsageError, match="irreducible loss"):
            Prior.from_text(wrong)


def test_exponent_of_recurrence_is_recovered_with_its_interval() -> None:
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(20):
        shape = np.array(
            [(s, k, t) for s in np.geomspace(2e7, 2e9, 4) for k in (1, 2, 4, 8) for t in (5, 20, 80)]
        )
        stored, passes, tpp = shape.T
        size, d = ModelSize(0.4 * stored, 0.6 * stored, np.log(passes)), tpp * stored
        effective = 0.4 * stored + passes**0.46 * 0.6 * stored
        y = (1.8 + 400 / effective**0.34 + 1500 / d**0.36) * np.exp(2e-3 * rng.standard_normal(len(d)))
        fit = fit_chinchilla(size, d, y, ChinchillaSettings(starts_per_axis=7))
        assert fit.phi == pytest.approx(0.46, abs=0.1) and fit.alpha == pytest.approx(0.34, abs=0.1)
        low, high = fit.intervals["phi"]
        inside += low < 0.46 < high
    assert inside >= 14  # of 20 intervals of 90%: fewer have a probability of 0.2%


def pair(
    rng: np.random.Generator, multiplier: float, growth: float, noise: float, shared: float, paired: bool
) -> LawComparison:
    """Two arms on a grid of cells, with noise that equal cells share and noise of each run."""
    runs: list[ArmRuns] = []
    n, d = (part.ravel() for part in np.meshgrid(np.geomspace(1e8, 1e9, 4), np.geomspace(2e9, 2e10, 4)))
    cell = shared * rng.standard_normal(len(n))
    for arm in (0, 1):
        own = (n, d) if paired or not arm else (n * 1.1, d * 0.95)
        c = own[0] * own[1] / np.exp(np.log(n * d).mean())
        m = (multiplier * c**growth) ** (arm / 2)
        law = 1.8 + 400 / (own[0] * m) ** 0.34 + 1500 / (own[1] * m) ** 0.36
        y = law * np.exp(cell + noise * rng.standard_normal(len(n)))
        settings = ChinchillaSettings(loss="log-mse", starts_per_axis=3)
        runs.append(ArmRuns(*own, y, 6 * own[0] * own[1], fit_chinchilla(*own, y, settings)))
    return compare_laws(runs[0], runs[1])


def test_comparison_of_laws_is_calibrated_and_pairs_equal_cells() -> None:
    rng, repeats = np.random.default_rng(0), 30
    for paired in (True, False):
        null = [pair(rng, 1.0, 0.0, 2e-3, 4e-3 * paired, paired) for _ in range(repeats)]
        assert {one.pairs for one in null} == {16 if paired else 0}
        for p in ([one.multiplier.p for one in null], [one.p_growth for one in null]):
            assert np.mean(np.array(p) < 0.10) < 0.3  # nominal 0.10; 0.3 or more has a probability of 0.2%
        covered = [one.multiplier.interval[0] < 1 < one.multiplier.interval[1] for one in null]
        assert np.mean(covered) > 0.7  # nominal 0.90
    found = pair(rng, 1.3, -0.05, 1e-3, 2e-2, paired=True)
    assert found.multiplier.p < 1e-6 and found.p_growth < 0.01 and found.growth < 1
    low, high = found.multiplier.interval
    assert low < 1.3 * 1.05 and high > 1.3 / 1.05 and high / low < 1.15  # the cells' noise of 2% cancels


def test_flops_of_the_table_enter_the_multiplier() -> None:
    """Two arms with one law, where the second spends twice the FLOPs on each parameter and token."""
    n, d, y = grid(noise=1e-4)
    settings = ChinchillaSettings(loss="log-mse", starts_per_axis=4)
    runs = [
        ArmRuns(n, d, y, factor * n * d, fit_chinchilla(n, d, y, settings, flops=factor * n * d))
        for factor in (6.0, 12.0)
    ]
    assert compare_laws(runs[0], runs[1]).multiplier.value == pytest.approx(0.5, rel=1e-3)
    assert runs[1].fit.optimum(1e21)[:2] == pytest.approx(runs[0].fit.optimum(5e20)[:2])


def test_arms_with_a_known_irreducible_loss_are_compared_with_it() -> None:
    n, d, y = grid(noise=1e-3)
    faster = 1.82 + 480 / (1.2 * n) ** 0.347 + 2100 / (1.2 * d) ** 0.366
    for prior in (Prior(1.82), Prior(1.82, 0.01)):
        settings = ChinchillaSettings(starts_per_axis=4, irreducible_loss=prior)
        runs = [ArmRuns(n, d, loss, 6 * n * d, fit_chinchilla(n, d, loss, settings)) for loss in (y, faster)]
        found = compare_laws(runs[0], runs[1])
        assert found.multiplier.value == pytest.approx(1.44, rel=0.02)
        assert (found.p_irreducible == 1.0) == (prior.sd is None)
