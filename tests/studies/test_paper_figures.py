"""Studies that a figure of the paper needs: known truths come back, and the authors' runs are asked for."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from steepen.model.arms import find_arm
from steepen.recipe.flops import compute_active_parameters, stored_parameters
from steepen.recipe.passes_law import TIED_PASSES, UNTIED_PASSES
from steepen.recipe.recipe_choice import RecipeChoice
from steepen.requests.app import main
from steepen.results.arms import family_panel
from steepen.runs.spec import RunSpec, expected_flops
from steepen.studies.context import StudyContext
from steepen.studies.data_constrained import data_constrained
from steepen.studies.design.growth_timing import growth_timing
from steepen.studies.design.passes import passes
from steepen.studies.ladders.ablations import ablations
from steepen.studies.ladders.extrapolate import extrapolate
from steepen.studies.stages.growth_fraction import growth_fraction
from steepen.studies.stages.tpp import tpp
from steepen.studies.synthetic import Formula, fabricate_record, growth_fraction_of

Find = Callable[[str], Path]


def rows(find: Find, table: str) -> list[dict[str, str]]:
    with find(f"refdata/authors/{table}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_growth_sweeps_include_the_arm_without_growth(paper: StudyContext) -> None:
    driver = Formula(lambda spec: 3.0 + 0.05 * (growth_fraction_of(spec) - 0.05) ** 2)
    found = driver.answer(growth_fraction(paper, arms=["untied-grow"])).values["untied-grow"]
    assert {spec.arm.name for spec in driver.specs} == {"untied-2", "untied-grow"}
    assert found["mean"] == pytest.approx(0.05, abs=1e-3)  # between ρ = 0 and the smallest ρ that grows
    assert {spec.arm.name for spec in next(growth_timing(paper, arms=["loop-grow"]))} == {
        "loop-2",
        "loop-grow",
    }


def test_constant_ladders_have_the_published_flops(reference_data: Find) -> None:
    published = rows(reference_data, "constant_ladders")
    assert len(published) == 43
    for row in published:
        arm = find_arm(row["arm"])
        planned = RecipeChoice("paper-constant-lr").of(arm).at(arm, int(row["depth"]))
        assert planned.flops.total == float(row["compute_flops"]), row


def test_growth_sensitivity_crosses_tokens_with_the_moment_of_growth(
    paper: StudyContext, reference_data: Find
) -> None:
    batch = next(ablations(paper, parts=["growth"], rungs=[6, 8, 10, 12]))
    ours = sorted(expected_flops(spec, "matrix") for spec in batch)
    theirs = sorted(
        float(row["scheduled_matrix_flops"])
        for row in rows(reference_data, "growth_prescription_ablation")
        if int(row["depth"]) <= 12
    )
    assert len(ours) == len(theirs) == 16
    assert ours == pytest.approx(theirs, rel=2e-3)
    assert len({spec.hyperparameters.learning_rate for spec in batch}) == 1


def test_hyperparameters_at_other_passes_hold_the_tokens_and_find_the_drift(
    paper: StudyContext, reference_data: Find
) -> None:
    def surface(spec: RunSpec) -> float:
        best = 0.04 * (spec.schedule.final / 2) ** -0.5
        return 3.0 + 0.02 * math.log(spec.hyperparameters.learning_rate / best) ** 2

    driver = Formula(surface)
    answer = driver.answer(passes(paper, parts=["hyperparameters"]))
    for family in ("tied", "untied"):
        found = answer.values["hyperparameters"][family]["learning_rate"]
        assert found["exponent"] == pytest.approx(-0.5, abs=0.02)
    tokens = {spec.arm.tied: set[int]() for spec in driver.specs}
    for spec in driver.specs:
        tokens[spec.arm.tied].add(spec.tokens)
    assert tokens == {True: {1_234_698_240}, False: {1_465_909_248}}  # the authors' 1.235 and 1.466 B
    assert len(rows(reference_data, "recurrence_hyperparameters")) == 2 * 5 * 3 * 5 == len(driver.specs)


def test_sweeps_with_growth_are_drawn_beside_those_without(paper: StudyContext) -> None:
    def bowl(spec: RunSpec) -> float:
        x = 6 * spec.tokens**2 / expected_flops(spec, "matrix")
        best = 8.97 if spec.schedule.grows else 7.43
        return 3.0 * math.exp(0.02 * math.log(x / best) ** 2)

    answer = Formula(bowl).answer(tpp(paper, arms=["untied-2", "untied-grow"]))
    (panel,) = (panel for panel in answer.panels if "6·T²/C" in panel.title)
    assert [mark[1] for mark in panel.lines] == [pytest.approx(7.43, rel=1e-3), pytest.approx(8.97, rel=1e-3)]
    assert {series.filled for series in panel.series if series.kind == "points"} == {True, False}
    assert any(panel.title == "Loss at the optimum" for panel in answer.panels)
    assert sum(column.startswith("loss at") for column in answer.tables[0].columns) == 5


def test_extrapolation_projects_the_multiplier_of_the_laws(paper: StudyContext) -> None:
    def law(spec: RunSpec) -> float:
        gamma = 0.117 if spec.arm.name == "untied-grow" else 0.111
        return 1.7 + 1.3 * (expected_flops(spec) / 1e18) ** -gamma

    answer = Formula(law).answer(extrapolate(paper))
    for row in answer.values["projected_multipliers"]:
        truth = (row["flops"] / 1e18) ** (1 - 0.111 / 0.117)
        assert row["value"] == pytest.approx(truth, rel=2e-3)
        assert row["low"] <= row["value"] <= row["high"]


def test_effective_depth_on_repeated_data_compares_parameters_with_passes(
    paper: StudyContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = replace(
        paper.preset.grids.data_constrained, depths=(6, 8, 10, 12), passes=(1, 2, 4), decays=(0.4, 0.8, 1.6)
    )
    small = replace(
        paper, preset=replace(paper.preset, grids=replace(paper.preset.grids, data_constrained=grid))
    )

    def with_depth(spec: RunSpec, loss: float):
        blocks = spec.shape.allocation
        executed = blocks.prelude + spec.schedule.final * blocks.core + blocks.coda
        return replace(fabricate_record(spec, loss), evaluation={"kl_depth": {"depth": executed}})

    monkeypatch.setattr("steepen.studies.synthetic.fabricate_record", with_depth)

    def surface(spec: RunSpec) -> float:
        return 3.0 + (1.0 if spec.schedule.final == 1 else 0.8) * (expected_flops(spec) / 1e18) ** -0.1

    answer = Formula(surface).answer(data_constrained(small, parts=["grid"]))
    (panel,) = (panel for panel in answer.panels if panel.title.startswith("KL effective depth"))
    curves = {series.label: series.y for series in panel.series if series.kind == "line"}
    by_size, by_passes = curves["more parameters, decay retuned"], curves["more passes, decay 0.8"]
    assert all(more > fewer for more, fewer in zip(by_passes, by_size, strict=True))
    sweeps = [panel.title for panel in answer.panels if panel.group == "Weight decay at each stored depth"]
    assert sweeps == ["d6", "d8", "d10", "d12"]
    grids = [panel for panel in answer.panels if panel.group == "Passes at each weight decay"]
    assert len(grids) == 9 and {panel.columns for panel in grids} == {3}


def test_controls_are_compared_with_tied_passes_at_the_same_budgets(paper: StudyContext) -> None:
    def surface(spec: RunSpec) -> float:
        penalty = 0.0 if "inject" in spec.arm.core_boundary and spec.arm.tied else 0.03
        return 3.0 + (expected_flops(spec, "matrix") / 1e18) ** -0.1 + penalty * (spec.schedule.final > 1)

    answer = Formula(surface).answer(data_constrained(paper, parts=["controls"]))
    for name in ("tied vanilla", "untied vanilla", "untied with the operator"):
        gaps = answer.values[f"control {name}"]["above_tied_with_operator"]
        assert gaps and all(gap > -1e-9 for _, gap in gaps)
    dashed = [s for p in answer.panels for s in p.series if s.style == "dashed" and s.role == "control"]
    assert len(dashed) == 3


def test_best_passes_follow_from_the_law(capsys: pytest.CaptureFixture[str]) -> None:
    for law, arm in ((TIED_PASSES, find_arm("loop-2")), (UNTIED_PASSES, find_arm("untied-2"))):
        best = law.at(10, 20.0)
        shape = arm.shape(10)
        active = [compute_active_parameters(arm, shape, k) for k in (1, 2)]
        stored = [stored_parameters(arm, shape, k) for k in (1, 2)]
        assert best.expansion == pytest.approx(law.coefficient * 20**0.15)
        assert 1 + (best.passes - 1) * (active[1] / active[0] - 1) == pytest.approx(best.expansion)
        size = 1 + (best.passes - 1) * (stored[1] / stored[0] - 1)
        assert best.tpp_at_best * best.expansion * size == pytest.approx(20.0)
    assert main(["best-passes", "--depth", "10", "--tpp", "20", "--family", "tied"]) == 0
    assert "1.94" in capsys.readouterr().out
    assert main(["best-passes", "--tpp", "many"]) == 2


def test_the_family_is_drawn_block_by_block() -> None:
    panel = family_panel([find_arm(name) for name in ("vanilla", "loop-2", "untied-grow")], 8)
    blocks = dict.fromkeys(panel.y.names, 0)
    for series in panel.series:
        if series.marker == "block":
            for row in series.y:
                blocks[panel.y.names[int(row)]] += 1
    assert blocks == {"Vanilla": 8, "Loop-2": 11, "Untied-Grow": 17}
    hollow = [series for series in panel.series if not series.filled]
    assert sum(len(series.x) for series in hollow) == 6  # the two cores that growth adds
