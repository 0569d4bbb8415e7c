"""The downstream fit recovers the parameters of simulated tasks and forecasts a held-out large run."""

from __future__ import annotations

import numpy as np
import pytest

from steepen.errors import UsageError
from steepen.laws.fits.downstream import Checkpoints, filter_tasks, fit_downstream, fit_sigmoid, fit_task_law

TASKS = [f"task{i}" for i in range(17)]
FLOPS = {"vanilla": np.geomspace(3.25e17, 1.01e20, 8), "untied-grow": np.geomspace(4e17, 1e20, 7)}
D26 = 1.225e21
R = 0.86912


class World:
    """Seventeen tasks with known laws and sigmoids, and the scores they imply."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.laws = {
            series: {
                task: (rng.uniform(0.3, 1.0), rng.uniform(0.5, 2.0), rng.uniform(0.1, 0.3)) for task in TASKS
            }
            for series in FLOPS
        }
        self.curves = {task: (rng.uniform(2, 5), rng.uniform(2, 6)) for task in TASKS}

    def nll(self, series: str, task: str, flops: np.ndarray) -> np.ndarray:
        e, a, alpha = self.laws[series][task]
        return e + a * (flops / 1e18) ** -alpha

    def accuracy(self, task: str, nll: np.ndarray) -> np.ndarray:
        s, b = self.curves[task]
        return 1 / (1 + np.exp(s * nll - b))

    def score(self, series: str, flops: np.ndarray) -> np.ndarray:
        return R * np.mean([self.accuracy(t, self.nll(series, t, flops)) for t in TASKS], axis=0)

    def measured(self, noise: float, seed: int = 1) -> dict[str, Checkpoints]:
        rng = np.random.default_rng(seed)
        return {
            series: Checkpoints(
                flops,
                {
                    t: self.nll(series, t, flops) * np.exp(noise * rng.standard_normal(len(flops)))
                    for t in TASKS
                },
                {
                    t: self.accuracy(t, self.nll(series, t, flops)) + noise * rng.standard_normal(len(flops))
                    for t in TASKS
                },
                self.score(series, flops) + noise * rng.standard_normal(len(flops)),
            )
            for series, flops in FLOPS.items()
        }


def test_exact_measurements_recover_every_parameter() -> None:
    world = World()
    fit = fit_downstream(world.measured(0.0))
    assert fit.r == pytest.approx(R, abs=1e-6)
    for task in TASKS:
        assert (fit.sigmoids[task].s, fit.sigmoids[task].b) == pytest.approx(world.curves[task], rel=1e-5)
        for series in FLOPS:
            law = fit.laws[series][task]
            assert (law.e, np.exp(law.log_a), law.alpha) == pytest.approx(world.laws[series][task], rel=1e-4)


def test_d26_forecast_is_accurate_under_noise() -> None:
    misses = []
    for seed in range(4):
        world = World(seed)
        fit = fit_downstream(world.measured(2e-3, seed))
        truth = float(world.score("untied-grow", np.array([D26]))[0])
        result = fit.hold_out("untied-grow", D26, truth)
        misses.append(result.error)
        assert result.forecast == pytest.approx(truth, abs=0.015)
        assert 0.5 < result.compute_factor < 2
    assert abs(np.mean(misses)) < 0.006


def test_compute_for_a_score_inverts_the_forecast() -> None:
    fit = fit_downstream(World().measured(0.0))
    assert fit.compute_for("vanilla", float(fit.predict("vanilla", 3e21)[0])) == pytest.approx(3e21, rel=1e-6)
    assert fit.compute_for("vanilla", 0.9999) == np.inf
    # Small runs too; and below what the curves begin with there is no compute to name.
    score = float(fit.predict("vanilla", 5e12)[0])
    assert fit.compute_for("vanilla", score) == pytest.approx(5e12, rel=1e-4)
    for better in (-1e-4, 1e-4):
        factor = fit.hold_out("vanilla", 5e12, score + better).compute_factor
        assert (factor > 1) == (better > 0)
    assert np.isnan(fit.compute_for("vanilla", -1.0))


def test_sigmoid_fit_is_robust_to_an_outlier() -> None:
    nll = np.linspace(0.5, 2.5, 15)
    accuracy = 1 / (1 + np.exp(3 * nll - 4))
    accuracy[7] += 0.3
    curve = fit_sigmoid(nll, accuracy)
    assert (curve.s, curve.b) == pytest.approx((3, 4), rel=0.05)


def test_filter_keeps_rising_tasks_above_chance() -> None:
    training = np.arange(8.0)
    found = filter_tasks(
        training,
        {
            "rising": 0.25 + 0.03 * training,
            "at chance": 0.25 + 0.001 * training,
            "falling": 0.6 - 0.02 * training,
            "noisy": np.array([0.30, 0.42, 0.28, 0.41, 0.29, 0.43, 0.27, 0.44]),
            "constant": np.full(8, 0.5),
        },
        dict.fromkeys(("rising", "at chance", "falling", "noisy", "constant"), 0.25),
    )
    assert [name for name, task in found.items() if task.passed] == ["rising"]
    assert "chance" in found["at chance"].reason
    assert found["falling"].tau == pytest.approx(-1)
    assert found["constant"].tau == 0.0


def test_ties_in_accuracy_count_as_tau_b_counts_them() -> None:
    found = filter_tasks(np.arange(4.0), {"t": np.array([0.3, 0.3, 0.4, 0.5])}, {"t": 0.0})
    assert found["t"].tau == pytest.approx(5 / np.sqrt(6 * 5))


def test_missing_task_or_series_is_named() -> None:
    measured = World().measured(0.0)
    with pytest.raises(UsageError, match="task 'poetry'"):
        fit_downstream(measured, ["poetry"])
    with pytest.raises(UsageError, match="vanila"):
        fit_downstream(measured).predict("vanila", 1e20)


def test_a_task_law_stays_within_the_authors_bounds() -> None:
    flops = FLOPS["vanilla"]
    law = fit_task_law(flops, 0.8 + 1.2 * (flops / 1e18) ** -0.2)
    assert (law.e, law.log_a, law.alpha) == pytest.approx((0.8, np.log(1.2), 0.2), rel=1e-4)
    flat = fit_task_law(flops, np.full(len(flops), 1.5))
    assert flat.alpha >= 0.005
    assert 0 <= flat.e < 1.5
    rising = fit_task_law(flops, np.linspace(1.0, 1.1, len(flops)))
    assert rising.alpha == pytest.approx(0.005)  # a task that gets worse is nearly constant


def test_the_ratio_is_taken_from_measured_scores_or_from_predicted_ones() -> None:
    world = World()
    measured = world.measured(0.0)
    biased = {
        name: Checkpoints(
            p.flops, p.nll, {task: 0.5 * values for task, values in p.centered.items()}, p.score
        )
        for name, p in measured.items()
    }
    assert fit_downstream(biased).r == pytest.approx(2 * R, rel=1e-6)
    assert fit_downstream(measured, ratio="predicted").r == pytest.approx(R, rel=1e-3)
    for options in ({"ratio": "mean"}, {"residuals": "squares"}):
        with pytest.raises(UsageError, match="choose one of"):
            fit_downstream(measured, **options)  # type: ignore[arg-type]
