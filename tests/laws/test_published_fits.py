"""Fits to published measurements give the published results (skipped without the reference data)."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import steepen
from steepen.laws.chinchilla_table import ArmChinchilla
from steepen.laws.fits.chinchilla import ChinchillaFit, ChinchillaSettings, fit_chinchilla
from steepen.laws.fits.isoflop import fit_isoflop, fit_power_law
from steepen.laws.fits.size_law_solver import ModelSize
from steepen.results.chinchilla import ChinchillaResult

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


def law(path: Path, **options: Any) -> ArmChinchilla:
    result = steepen.fit(path, law="chinchilla", **options)
    assert isinstance(result, ChinchillaResult)
    return result.table_fit.first


def test_second_chinchilla_set_with_the_usual_objective(reference_data: Find) -> None:
    fit = law(reference_data("refdata/chinchilla_pkg_llm/df.csv")).fit
    assert (fit.points, fit.flags) == (234, ())
    assert (fit.e, fit.alpha, fit.beta) == pytest.approx((1.784, 0.3426, 0.3420), abs=5e-4)
    assert (fit.a, fit.b) == pytest.approx((442, 1272), rel=2e-3)
    # Its README has 1.700, 185.4, 1627, .2892, .3556, by an asymmetric absolute error: the loss matters.
    assert not fit.intervals["e"][0] < 1.700 < fit.intervals["e"][1]


@pytest.mark.parametrize(
    ("dataset", "e", "a", "b", "eta"),
    [
        ("c4_original", 1.51, 141, 190, 0.121),
        ("rpj", 1.84, 212, 367, 0.136),
        ("rw_original", 1.73, 157, 246, 0.127),
    ],
)
def test_gadres_five_runs_forecast_the_large_ones(
    reference_data: Find, dataset: str, e: float, a: float, b: float, eta: float
) -> None:
    five = "(cc_mult == 1 and N < 4.2e8) or (cc_mult == 16 and N < 2e7)"
    one = law(
        reference_data("refdata/gadre2024/gadre_runs.csv"), equal_exponents=True, objective="mse",
        columns={"loss": "loss_c4_val"}, where=[f"dataset={dataset}", f"{five} or N > 1e9"], hold_out="1e20",
    )  # fmt: skip
    assert one.fit.points == 5
    # L = E + (a·M^η + b·M^−η)·C^−η with M = D/N and C = 6·N·D.
    scale = 6 ** (one.fit.alpha / 2)
    assert one.fit.e == pytest.approx(e, abs=0.005) and one.fit.alpha / 2 == pytest.approx(eta, abs=5e-4)
    assert (one.fit.a * scale, one.fit.b * scale) == pytest.approx((a, b), abs=0.51)
    if dataset == "rpj":
        errors = {
            (run.parameters > 2e9, run.tokens / run.parameters): 100 * abs(run.error) / run.observed
            for run in one.hold_out
        }
        assert errors[False, 640.0] == pytest.approx(0.7103, abs=5e-5)
        assert errors[True, 20.0] == pytest.approx(0.7320, abs=5.1e-5)


@pytest.mark.parametrize("name", ["hot_120b+_only", "cool_end"])
def test_gemstones_objective_is_reached_or_beaten(reference_data: Find, name: str) -> None:
    fit = law(
        reference_data(f"refdata/gemstones/wandb_df_for_fitting_{name}.jsonl"), delta=1e-4,
        columns={"parameters": "params_active_precise", "loss": "final_loss", "run": "run_name"},
    ).fit  # fmt: skip
    file = f"refdata/gemstones/published/parameters_delta-4/approach_3_parameters_grid_search_0_{name}.json"
    answer = json.loads(reference_data(file).read_text())
    assert fit.objective <= answer["loss"]["0"]
    if name == "hot_120b+_only":  # the other published optimum is not converged
        (alpha, beta), (log_a, log_b) = answer["exponents"]["0"], answer["coefficients"]["0"]
        assert (fit.alpha, np.log(fit.a)) == pytest.approx((alpha, log_a), abs=1e-3)
        assert (fit.beta, np.log(fit.b)) == pytest.approx((beta, log_b), rel=0.01)
        assert np.log(fit.e) == pytest.approx(answer["irreducible_error"]["0"], abs=1e-3)


@pytest.mark.parametrize(
    ("column", "task"),
    [
        ("bpb_hellaswag_val", "hellaswag_val"), ("bpb_piqa_val", "piqa_val"),
        ("bpb_arc_challenge_test", "arc_challenge_test"), ("c4", ""),
    ],
)  # fmt: skip
def test_olmo_ladder_forecasts_13b(reference_data: Find, column: str, task: str) -> None:
    one = law(
        reference_data("refdata/olmo_ladder/ladder_final_tidy.csv"),
        columns={"loss": column, "flops": "flops_fwd_bwd"}, hold_out="1.5e23",
    )  # fmt: skip
    file = "step1_main.csv" if task else "step1_c4_main.csv"
    published = rows(reference_data(f"refdata/olmo_ladder/published/{file}"))
    answer = next(row for row in published if row["Task"].startswith(task))
    held = one.hold_out[-1]
    assert (one.fit.points, held.parameters) == (16, 13202396160)
    assert held.forecast == pytest.approx(float(answer["Pred"]), abs=1e-6)
    relative = np.abs(one.runs.loss / one.fit.predict(one.size, one.runs.tokens) - 1)
    assert float(np.mean(relative)) == pytest.approx(float(answer["Fit Error"]), rel=0.01)


def test_recurrence_of_the_authors_models_is_worth_less_than_parameters(reference_data: Find) -> None:
    """At fixed size and compute, φ of tied cores is between 0 (worth nothing) and 1 (new parameters)."""
    runs = rows(reference_data("refdata/authors/fixed_anchor_passes.csv"))
    found: list[ChinchillaFit] = []
    for family in ("tied", "untied"):
        own = [row for row in runs if row["family"] == family]
        compute = {(row["anchor"], row["loops"]): float(row["params_compute"]) for row in own}
        once, core = (np.array([compute[row["anchor"], k] for row in own]) for k in ("1", "2"))
        recurrent = core - once
        size = ModelSize(once - recurrent, recurrent, np.log(column(own, "loops")))
        tokens = column(own, "tpp") * column(own, "params_stored")
        found.append(fit_chinchilla(size, tokens, column(own, "val_loss")))
    tied, untied = (fit.intervals["phi"] for fit in found)
    assert 0.55 < tied[0] < tied[1] < 0.75 and untied[1] < 1
    assert found[0].phi is not None and found[1].phi is not None and found[0].phi < found[1].phi


def test_shrinking_gain_of_an_optimizer_is_seen_in_paired_cells() -> None:
    """Muon against AdamW at four sizes and up to five numbers of tokens (docs/citation.md has the source)."""
    table = Path(__file__).with_name("optimizers.csv")
    result = steepen.fit(table, law="chinchilla", reference="adamw")
    assert isinstance(result, ChinchillaResult)
    found = result.table_fit.comparisons["muon"]
    assert found.pairs == 18
    assert found.p_growth < 1e-4 and found.growth_interval[1] < 1
    first, last = found.multipliers
    assert first.value == pytest.approx(1.3, abs=0.1) and last.value == pytest.approx(1.05, abs=0.05)
    assert "better, and the gain shrinks with compute" in " ".join(result.summary().split())
