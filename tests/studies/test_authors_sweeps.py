"""The paper preset's sweeps are the authors': budgets, tokens and FLOPs of their published tables."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from steepen.model.arms import ARMS
from steepen.recipe.flops import flops_per_token
from steepen.recipe.recipe_choice import choose_recipes
from steepen.runs.spec import RunSpec, expected_flops
from steepen.studies.context import StudyContext
from steepen.studies.design.allocation import allocation
from steepen.studies.design.passes import passes
from steepen.studies.preset import ArmRungs, RecipeOverride
from steepen.studies.stages.growth_fraction import growth_fraction
from steepen.studies.stages.tpp import tpp

Find = Callable[[str], Path]


def rows(find: Find, table: str) -> list[dict[str, str]]:
    with find(f"refdata/authors/{table}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_tpp_sweeps_have_the_published_tokens_and_matrix_flops(
    paper: StudyContext, reference_data: Find
) -> None:
    arms = ["vanilla", "operator-1", "loop-2", "untied-2", "deep-vanilla"]
    specs: list[RunSpec] = []
    for arm in arms:
        specs += next(tpp(paper, arms=[arm]))
    ours = sorted(
        (spec.arm.name, spec.shape.width, spec.tokens, expected_flops(spec, "matrix")) for spec in specs
    )
    published = rows(reference_data, "tpp_sweeps")
    # Deep Vanilla's depth counts executed blocks there; its stored parameters give the width.
    widths = {
        (row["arm"], row["params_stored"]): 128 * depth
        for row in published
        for depth in range(6, 20)
        if paper.stored_parameters(ARMS[row["arm"]], depth) == int(row["params_stored"])
    }
    theirs = sorted(
        (row["arm"], widths[row["arm"], row["params_stored"]], int(row["tokens"]), float(row["matrix_flops"]))
        for row in published
    )
    assert len(theirs) == 125 and ours == theirs


def test_fixed_token_sweeps_have_the_published_matrix_flops(
    paper: StudyContext, reference_data: Find
) -> None:
    specs = [*next(passes(paper, parts=["tokens"])), *next(allocation(paper))]
    ours = {(spec.shape.width // 128, expected_flops(spec, "matrix")) for spec in specs}
    grids = paper.preset.grids  # fewer depths than the authors', at which every run must be theirs
    for table, depths, count in (
        ("fresh_recurrence", grids.passes.depths, 50),
        ("block_allocation", grids.allocation.depths, 15),
    ):
        published = [row for row in rows(reference_data, table) if int(row["depth"]) in depths]
        assert len(published) == count
        for row in published:
            costs = [cost for depth, cost in ours if depth == int(row["depth"])]
            assert any(cost == pytest.approx(float(row["matrix_flops"]), rel=1e-14) for cost in costs), row


def test_growth_sweeps_have_the_published_steps(paper: StudyContext, reference_data: Find) -> None:
    """Stage 3's anchors: the budget of six tokens per parameter without growth, at constant matrix FLOPs."""
    checked = 0
    for row in rows(reference_data, "growth_timing"):
        if row["source"] != "diagonal" or float(row["rho"]) == 0:
            continue
        arm = ARMS[row["arm"]]
        depth, rho = int(row["depth"]), float(row["rho"])
        recipe = paper.recipe(arm).with_tpp(6.0)
        budget = paper.flops_at_tpp(arm, depth, 6.0)
        assert paper.run_at_flops(recipe, arm, depth, budget, rho).steps == int(row["steps"])
        checked += 1
    assert checked == 24
    assert {spec.shape.depth for spec in next(growth_fraction(paper))} == {8, 9, 10}


def test_fixed_rho_is_the_papers_simple_prescription(reference_data: Find) -> None:
    arm = ARMS["untied-grow"]
    recipe = choose_recipes(["paper-fixed-rho"]).of(arm)
    published = {
        int(row["depth"]): float(row["scheduled_matrix_flops"])
        for row in rows(reference_data, "growth_prescription_ablation")
        if row["prescription"] == "tpp6_rho0p30"
    }
    assert {depth: recipe.at(arm, depth).flops.matrix for depth in published} == published
    assert list(published) == [6, 8, 10, 12, 14, 16]


def test_data_constrained_costs_are_matrix_flops(paper: StudyContext, reference_data: Find) -> None:
    for row in rows(reference_data, "data_constrained_grid"):
        arm, depth, loops = ARMS["loop-2"], int(row["depth"]), int(row["loops"])
        per_token = paper.flops_per_token(arm, depth, loops)
        assert per_token == flops_per_token(arm, arm.shape(depth), loops).matrix
        assert 1900 * 524_288 * per_token == pytest.approx(float(row["matrix_flops"]), rel=1e-14)


def test_a_preset_may_use_the_papers_names_of_arms() -> None:
    assert RecipeOverride("Deep Vanilla + norm", {"tpp": 5}).arm == "untied-2-norm-only"
    assert ArmRungs("Untied Grow", (2, 3)).arm == "untied-grow"
