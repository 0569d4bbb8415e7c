"""The recipes plan the authors' published command lines, and `recipe.flops` gives their FLOPs, exactly."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from steepen.model.arms import ARMS
from steepen.model.shape import SizeRule
from steepen.recipe.hyperparameters import Hyperparameters
from steepen.recipe.paper_tables import BASE, INITIAL, recipe_of
from steepen.recipe.recipe import PlannedRun

Find = Callable[[str], Path]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def planned(arm: str, depth: int) -> PlannedRun:
    return recipe_of(ARMS[arm]).at(ARMS[arm], depth)


def as_printed(value: float, text: str) -> bool:
    """Whether a value is the printed one to its last digit; every digit of a double must be equal."""
    return value == float(text) or f"{value:.{len(text.partition('.')[2])}f}" == text


# arm, depth, steps, first step after growth, learning rate, total FLOPs: rows of the authors' tables.
PUBLISHED = [
    ("vanilla", 6, 1142, None, 0.061689730348159694, 3.252671429392466e17),
    ("vanilla", 20, 17581, None, 0.00692257905530223, 1.006362789699335e20),
    ("deep-vanilla", 14, 10542, None, 0.015797555869623347, 2.9872355691567514e19),
    ("operator-1", 12, 5656, None, 0.023644267457764198, 8.091424558361346e18),
    ("loop-2", 18, 15775, None, 0.012778416724849315, 8.72400211962495e19),
    ("untied-2", 16, 15294, None, 0.014430109945155582, 6.378078935381233e19),
    ("loop-grow", 8, 2563, 2101, 0.04, 1.8708922541895844e18),
    ("loop-grow", 16, 12950, 11396, 0.01789538412761687, 5.726577955873122e19),
    ("untied-grow", 6, 1826, 1095, 0.05738316701316035, 6.990536434369167e17),
    ("untied-grow", 26, 68699, 52898, 0.00652527533253161, 1.2252577235512496e21),
]


@pytest.mark.parametrize(("arm", "depth", "steps", "growth_step", "learning_rate", "flops"), PUBLISHED)
def test_published_runs_are_planned_exactly(
    arm: str, depth: int, steps: int, growth_step: int | None, learning_rate: float, flops: float
) -> None:
    rung = planned(arm, depth)
    assert (rung.steps, rung.growth_step) == (steps, growth_step)
    assert rung.hyperparameters.learning_rate == learning_rate
    assert rung.flops.total == flops


def test_all_52_published_command_lines_are_planned_exactly(reference_data: Find) -> None:
    published = rows(reference_data("refdata/authors/ladder_recipes.csv"))
    assert len(published) == 52
    renamed = {"alpha": "injection_weight", "eps": "adam_eps"}
    for row in published:
        rung = planned(row["arm"], int(row["depth"]))
        name = f"{row['arm']} d{row['depth']}"
        assert (rung.shape.width, rung.steps, rung.tokens) == (
            int(row["width"]), int(row["steps"]), int(row["tokens"])
        ), name  # fmt: skip
        assert rung.growth_step == (int(row["crossover_step"]) if row["crossover_step"] else None), name
        assert rung.initial_stored_parameters == int(row["params_for_lr"]), name
        values = rung.hyperparameters.to_dict()
        for column in (*Hyperparameters.__dataclass_fields__, *renamed):
            if row.get(column):
                assert as_printed(values[renamed.get(column, column)], row[column]), (name, column)
        assert rung.hyperparameters.embedding_lr == rung.hyperparameters.learning_rate * float(
            row["embedding_lr_multiplier"]
        ), name


@pytest.mark.parametrize("table", ["fineweb_ladders", "fineweb_edu_ladders"])
def test_every_published_ladder_run_has_the_published_tokens_and_flops(
    table: str, reference_data: Find
) -> None:
    published = rows(reference_data(f"refdata/authors/{table}.csv"))
    assert len(published) == {"fineweb_ladders": 58, "fineweb_edu_ladders": 16}[table]
    for row in published:
        rung = planned(row["arm"], int(row["depth"]))
        found = (rung.stored_parameters, rung.tokens, rung.flops.total)
        expected = (int(row["params_stored"]), int(row["tokens"]), float(row["compute_flops"]))
        assert found == expected, (row["arm"], row["depth"])


def test_ablation_ladders_have_the_published_tokens(reference_data: Find) -> None:
    """Series of the authors' ablations under our names; depth of the 1:64 shapes is half of theirs here."""
    names = {
        "loop-2-no-coda-injection": "loop-2-no-coda-injection",
        "untied-2-no-norm": "untied-2-inject-only",
        "untied-2-no-injection": "untied-2-norm-only",
        "untied-2-no-coda-injection": "untied-2-no-coda-injection",
        "operator-1-1c2": "operator-1-1-c-2",
        "loop-2-no-coda-injection-2c3": "loop-2-nci-2-c-3",
        "deeper-vanilla": "deeper-vanilla",
        "deeper-operator-1": "deeper-operator-1",
    }
    checked = 0
    for row in rows(reference_data("refdata/authors/ablation_ladders.csv")):
        if row["arm"] in names:
            depth = int(row["depth"]) // (2 if row["arm"].startswith("deeper") else 1)
            rung = planned(names[row["arm"]], depth)
            assert rung.shape.width == int(row["width"]), row
            assert (rung.tokens, rung.flops.total) == (int(row["tokens"]), float(row["compute_flops"])), row
            checked += 1
    assert checked == 67


def test_deep_vanillas_head_rate_has_the_digits_that_the_others_have() -> None:
    """Powers of √2 with twelve digits; the published table rounds this one to nine."""
    assert BASE["deep-vanilla"].head_lr_multiplier == float(f"{0.08 / math.sqrt(2):.12g}")
    assert BASE["vanilla"].head_lr_multiplier == float(f"{0.08 * math.sqrt(2):.12g}")


def test_growth_budgets_are_equal_in_matrix_flops_and_rise_in_total_ones() -> None:
    rung = planned("untied-grow", 18)
    without = 8 * rung.initial_stored_parameters
    per_token = rung.stage_flops[0]
    assert rung.flops.matrix == pytest.approx(without * per_token.matrix, rel=1 / rung.steps)
    assert rung.flops.total > without * per_token.total * (1 + 1 / rung.steps)


def test_rho_off_the_list_follows_the_law_at_the_actual_tokens_per_parameter() -> None:
    arm = ARMS["untied-grow"]
    recipe = recipe_of(arm)
    law = recipe.growth_law
    assert law is not None
    assert recipe.at(arm, 8).rho == 0.29  # listed
    unlisted = recipe.at(arm, 9)
    assert unlisted.rho == law.rho(arm, arm.shape(9), 8.0)
    # Another vocabulary, TPP or budget is not the listed run, even at a listed depth.
    small = SizeRule(vocabulary=8192)
    assert recipe.at(arm, 8, small).rho == law.rho(arm, arm.shape(8, small), 8.0)
    assert recipe.with_tpp(12.0).at(arm, 8).rho == law.rho(arm, arm.shape(8), 12.0)
    for tpp in (5.0, 8.0, 20.0):
        flops = tpp * unlisted.initial_stored_parameters * unlisted.stage_flops[0].matrix
        by_flops = recipe.at_budget(arm, 9, flops=flops, count="matrix")
        assert by_flops.rho == pytest.approx(law.rho(arm, arm.shape(9), tpp), rel=1e-12)
        # The same run given by its tokens has the same rho.
        by_tokens = recipe.at_budget(
            arm, 9, tokens=(law.a * tpp + law.b) * by_flops.initial_stored_parameters
        )
        assert by_tokens.rho == pytest.approx(by_flops.rho, rel=1e-9)
        assert by_tokens.steps == by_flops.steps


@pytest.mark.parametrize(
    ("arm", "tpp", "rho"),
    [
        ("loop-grow", 3.75, 0.105),
        ("loop-grow", 188, 0.268),
        ("untied-grow", 1.58, 0.137),
        ("untied-grow", 158, 0.329),
    ],
)
def test_law_holds_at_any_tokens_per_parameter(arm: str, tpp: float, rho: float) -> None:
    """By arithmetic from the paper's coefficients, at d8 and by both ways to give a budget."""
    recipe = recipe_of(ARMS[arm])
    rung = recipe.with_tpp(tpp).at(ARMS[arm], 8)
    assert rung.rho == pytest.approx(rho, abs=5e-4)
    assert recipe.at_budget(ARMS[arm], 8, tokens=rung.tokens).rho == pytest.approx(rho, abs=1e-3)


@pytest.mark.parametrize("tokens", [1e6, 1e7, 1e8])
def test_rho_where_the_law_gives_none_is_that_at_the_lowest_measured_tokens_per_parameter(
    tokens: float,
) -> None:
    arm = ARMS["loop-grow"]
    law = recipe_of(arm).growth_law
    assert law is not None and law.measured_tpp is not None
    lowest = law.rho(arm, arm.shape(9), law.measured_tpp[0])
    assert recipe_of(arm).at_budget(arm, 9, tokens=tokens).rho == lowest > 0


def test_base_values_are_powers_of_root_two_of_the_initial_ones() -> None:
    """What chain tuning sweeps on a grid of √2, as the authors' command lines have it (12 digits)."""
    start = INITIAL.to_dict()
    swept = (
        "embedding_lr_multiplier", "head_lr_multiplier", "residual_multiplier", "output_multiplier",
        "injection_weight", "weight_decay", "embedding_init_std", "init_scale",
    )  # fmt: skip
    for name, base in BASE.items():
        for field in swept:
            power = 2 * math.log2(base.to_dict()[field] / start[field])
            assert power == pytest.approx(round(power), abs=1e-9), (name, field, power)
