"""Fits to published measurements give the published results (skipped without the reference data)."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from steepen.laws.fits.chinchilla import ChinchillaSettings, fit_chinchilla
from steepen.laws.fits.isoflop import fit_isoflop, fit_power_law

Find = Callable[[str], Path]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def column(table: list[dict[str, str]], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in table])


def epoch(find: Find) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """N, D and loss of the 240 runs left when the five highest losses are dropped."""
    table = rows(find("refdata/chinchilla_epoch/svg_extracted_data.csv"))
    n, c, loss = (column(table, name) for name in ("Model Size", "Training FLOP", "loss"))
    keep = np.sort(np.argsort(loss)[:-5])
    return n[keep], c[keep] / (6 * n[keep]), loss[keep]


def test_epochs_refit_of_chinchilla(reference_data: Find) -> None:
    fit = fit_chinchilla(*epoch(reference_data), ChinchillaSettings())
    assert fit.points == 240
    assert fit.objective <= 1.01828e-3
    assert fit.e == pytest.approx(1.8172, abs=2e-4)
    assert fit.alpha == pytest.approx(0.3473, abs=1e-3)
    assert fit.beta == pytest.approx(0.3672, abs=2e-3)
    assert fit.a == pytest.approx(477.8, rel=0.01)
    assert fit.b == pytest.approx(2143, rel=0.03)
    assert fit.starts_at_optimum > 0.5
    assert fit.flags == ()
    for name, value in (("e", 1.8172), ("alpha", 0.3478), ("beta", 0.3658)):
        low, high = fit.intervals[name]
        assert low < value < high
    assert not fit.intervals["e"][0] < 1.69 < fit.intervals["e"][1]  # E as published by Hoffmann et al.


@pytest.mark.parametrize(
    ("loss", "answer"),
    [
        ("mse", (1.9051, 4.0005, 1.0509, 0.3511, 0.4587)),
        ("log-mse", (1.8926, 4.0146, 1.0571, 0.3522, 0.4430)),
    ],
)
def test_chinchilla_fits_below_1e21_flops_match_all_printed_digits(
    reference_data: Find, loss: str, answer: tuple[float, ...]
) -> None:
    n, d, y = epoch(reference_data)
    below = 6 * n * d < 1e21
    assert below.sum() == 217
    settings = ChinchillaSettings(loss=loss)  # type: ignore[arg-type]
    fit = fit_chinchilla(n[below] / 1e6, d[below] / 1e9, y[below], settings)
    assert (fit.e, fit.a, fit.b, fit.alpha, fit.beta) == pytest.approx(answer, abs=5.001e-5)
    if loss == "mse":
        assert fit.objective == pytest.approx(0.062414, abs=5e-7)
    # The fit does not depend on units: single parameters and tokens give the same law.
    plain = fit_chinchilla(n[below], d[below], y[below], settings)
    assert (plain.e, plain.alpha, plain.beta) == pytest.approx((fit.e, fit.alpha, fit.beta), abs=1e-6)
    assert plain.objective == pytest.approx(fit.objective, rel=1e-9)


def test_llama_3_isoflop_law_and_its_sensitivity_to_the_mask(reference_data: Find) -> None:
    table = rows(reference_data("refdata/openathena_isoflops/transform_isoflops.csv"))
    llama = [row for row in table if row["experiment"] == "llama_3__raw_loss"]
    for chosen, exponent, tokens in (
        (llama, 0.5368, 16.10),
        ([row for row in llama if row["outlier"] == "False"], 0.5000, 9.81),
    ):
        fit = fit_isoflop(*(column(chosen, name) for name in ("budget", "tokens", "loss")), log_loss=False)
        assert fit.law is not None
        assert fit.law.exponent == pytest.approx(exponent, abs=1e-4)
        assert fit.law.predict(3.8e25) / 1e12 == pytest.approx(tokens, abs=0.006)
        in_logs = fit_isoflop(*(column(chosen, name) for name in ("budget", "tokens", "loss")))
        assert in_logs.law is not None
        assert in_logs.law.exponent == pytest.approx(exponent, abs=5e-4)


def test_llama_3_chinchilla_law(reference_data: Find) -> None:
    table = rows(reference_data("refdata/openathena_isoflops/llama_3.csv"))
    runs = [row for row in table if row["condition"] == "raw_loss"]
    settings = ChinchillaSettings(loss="mse")
    fit = fit_chinchilla(column(runs, "params"), column(runs, "tokens"), column(runs, "loss"), settings)
    assert (fit.e, fit.alpha, fit.beta) == pytest.approx((0.6047, 0.3100, 0.3136), abs=5e-5)
    assert (fit.a, fit.b) == pytest.approx((59.1, 155.1), abs=0.05)
    assert fit.parameters_exponent == pytest.approx(0.5029, abs=5e-5)


def test_porians_fifteen_exponents(reference_data: Find) -> None:
    points = rows(reference_data("refdata/porian2024/isoflop_points.csv"))
    published = rows(reference_data("refdata/porian2024/published_fits.csv"))
    keys = ("dataset", "hparams", "warmup", "decay", "param_count", "val", "summary_file")
    assert len(published) == 15
    for answer in published:
        own = [row for row in points if all(row[key] == answer[key] for key in keys)]
        fit = fit_isoflop(*(column(own, name) for name in ("flops", "N", "loss")), method="akima")
        assert fit.law is not None
        assert fit.law.exponent == pytest.approx(float(answer["basic.n_exponent"]), abs=0.004)


def test_nanochats_exponents(reference_data: Find) -> None:
    table = rows(reference_data("refdata/nanochat/isoflop_vertices_LOG_2026-01.csv"))
    true = {"1e18": 1e18, "2e18": 2.15e18, "5e18": 4.64e18, "1e19": 1e19}
    for convention, parameters, tokens in (
        ("kaplan_matmul_incl_lm_head", 0.54, 0.49),
        ("chinchilla_all_params", 0.37, 0.50),
        ("transformer_only", 0.70, 0.41),
    ):
        own = [row for row in table if row["convention"] == convention]
        budget = np.array([true[row["flops_label"]] for row in own])
        assert round(fit_power_law(budget, column(own, "eff_params")).exponent, 2) == parameters
        assert round(fit_power_law(budget, column(own, "tokens")).exponent, 2) == tokens


def test_every_published_set_fits_without_a_flag(reference_data: Find) -> None:
    for name in ("llama_3", "marin_202603", "misfitting", "ml_scalefit", "epochai_chinchilla"):
        table = rows(reference_data(f"refdata/openathena_isoflops/{name}.csv"))
        for experiment in sorted({row["experiment"] for row in table}):
            own = [row for row in table if row["experiment"] == experiment]
            fit = fit_chinchilla(
                column(own, "params"),
                column(own, "tokens"),
                column(own, "loss"),
                ChinchillaSettings(),
            )
            assert fit.flags == ()
            assert fit.starts_at_optimum > 0.8
            assert fit.r_squared > 0.9
