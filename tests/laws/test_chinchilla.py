"""The Chinchilla law L = E + A/N^α + B/D^β: recovered exactly, robust, flagged at bounds."""

from __future__ import annotations

import numpy as np
import pytest

from steepen.errors import UsageError
from steepen.laws.fits.chinchilla import ChinchillaSettings, fit_chinchilla
from steepen.laws.fits.chinchilla_solver import ChinchillaProblem


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
    settings = ChinchillaSettings(loss=loss, bootstrap=0)  # type: ignore[arg-type]
    fit = fit_chinchilla(*grid(units=units), settings)
    assert (fit.e, fit.alpha, fit.beta) == pytest.approx((1.82, 0.347, 0.366), abs=1e-4)
    assert fit.a == pytest.approx(480 * units[0] ** 0.347, rel=2e-3)
    n, d, best = fit.optimum(1e21 * units[0] * units[1])
    assert 6 * n * d == pytest.approx(1e21 * units[0] * units[1])
    assert best <= float(fit.predict(n * 1.1, d / 1.1))
    assert best <= float(fit.predict(n / 1.1, d * 1.1))


def test_gradient_of_the_objective_is_exact() -> None:
    n, d, y = grid(noise=0.01)
    theta = np.array([1.7, 0.1, -0.2, 0.4, 0.3])
    for log, huber in ((True, 1e-3), (True, None), (False, None)):
        surface = ChinchillaProblem(
            np.log(n) - np.log(n).mean(), np.log(d) - np.log(d).mean(), y, np.ones(64), log, huber
        )
        _, slope = surface.value_and_gradient(theta)
        for i in range(5):
            step = 1e-6 * np.eye(5)[i]
            rise = surface.value_and_gradient(theta + step)[0] - surface.value_and_gradient(theta - step)[0]
            assert slope[i] == pytest.approx(rise / 2e-6, rel=1e-4, abs=1e-9)


def test_huber_fit_is_robust_to_outliers() -> None:
    n, d, y = grid(noise=1e-3)
    y[[3, 20, 41]] *= 1.3
    robust, mse = (
        fit_chinchilla(n, d, y, ChinchillaSettings(loss=loss, bootstrap=0))  # type: ignore[arg-type]
        for loss in ("huber", "mse")
    )
    assert abs(robust.alpha - 0.347) < 0.01 < abs(mse.alpha - 0.347)


def test_solution_at_a_bound_is_flagged() -> None:
    n, d, y = grid()
    fit = fit_chinchilla(
        n, d, y - 1.82 - 480 / n**0.347 + 1e-6 * n**-0.1 + 0.5, ChinchillaSettings(loss="mse", bootstrap=0)
    )
    assert fit.flags


def test_too_few_points_or_values_are_rejected() -> None:
    n, d, y = grid()
    with pytest.raises(UsageError, match=r"at least 6, or fit one exponent \(α = β\) with --equal-exponents"):
        fit_chinchilla(n[:5], d[:5], y[:5])
    with pytest.raises(UsageError, match="tokens takes only 1"):
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
    assert fit.interval_method == "covariance"
    assert fit.degrees_of_freedom == 1
    with pytest.raises(UsageError, match="at least 5"):
        fit_chinchilla(np.ones(4), np.ones(4), np.ones(4), ChinchillaSettings(tied=True))


def test_interval_of_a_held_out_run_includes_the_laws_own_error() -> None:
    rng = np.random.default_rng(2)
    n, d, settings = 7e9, 1.4e11, ChinchillaSettings(loss="mse", tied=True, bootstrap=0, starts_per_axis=3)
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
    settings = ChinchillaSettings(loss="log-mse", bootstrap=100)
    rows, clustered = (fit_chinchilla(columns[0], columns[1], y, settings, runs=r) for r in (None, runs))
    width = [fit.intervals["alpha"][1] - fit.intervals["alpha"][0] for fit in (rows, clustered)]
    assert width[1] > 2 * width[0]
    errors = [fit.law_standard_error(1e11, 1e12) for fit in (rows, clustered)]
    assert errors[1] > 2 * errors[0]
    assert (rows.alpha, rows.beta) == (clustered.alpha, clustered.beta)
