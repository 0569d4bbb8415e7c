"""Every study runs end to end on synthetic losses, and its answer round-trips through JSON."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest

from steepen.errors import SteepenError, UsageError
from steepen.model.arms import find_arm
from steepen.report.curves import curves_of, legend_entries
from steepen.runs.record import RunRecord
from steepen.runs.spec import RunSpec, expected_flops
from steepen.studies.answer import Answer
from steepen.studies.context import StudyContext
from steepen.studies.data_constrained import data_constrained
from steepen.studies.design.allocation import allocation
from steepen.studies.design.growth_target import growth_target
from steepen.studies.design.growth_timing import growth_timing
from steepen.studies.design.passes import passes
from steepen.studies.registry import STUDIES, find_study
from steepen.studies.synthetic import Formula, growth_fraction_of, initial_parameters, tokens_per_parameter


def bumpy(spec: RunSpec) -> float:
    """A surface with an interior optimum in everything a study may sweep, and some scatter."""
    h = spec.hyperparameters
    k = sum(stage.max_passes for stage in spec.schedule.stages) / len(spec.schedule.stages)
    core = spec.shape.allocation.core / spec.shape.allocation.blocks
    away = [
        math.log(h.learning_rate / 0.1),
        math.log(tokens_per_parameter(spec) / 6),
        math.log(h.embedding_lr_multiplier / 0.3),
        2 * (growth_fraction_of(spec) - 0.3),
        math.log(k / 2),
        3 * (core - 0.35),
        math.log((h.weight_decay + 0.01) / 0.3),
    ]
    scatter = 1e-3 * math.sin(int(spec.hash[:6], 16))
    loss = 2.0 + 2.0 * (expected_flops(spec) / 1e11) ** -0.15
    return loss + 0.01 * sum(value**2 for value in away) + scatter


@pytest.mark.parametrize("name", list(STUDIES))
def test_every_study_returns_an_answer_that_round_trips_through_json(tiny: StudyContext, name: str) -> None:
    formula = Formula(bumpy)
    # All parts of the ablations have a test of their own.
    given = {"parts": ["random", "optimizer"]} if name == "ablations" else {}
    answer = formula.answer(STUDIES[name].start(tiny, given))
    assert isinstance(answer, Answer)
    assert answer.study == name
    assert answer.question.endswith("?")
    assert answer.findings or answer.verdicts
    assert answer.section
    assert answer.method
    assert answer.panels
    assert answer.tables
    text = json.dumps(answer.to_dict(), allow_nan=False)
    again = Answer.from_dict(json.loads(text))
    assert json.dumps(again.to_dict(), allow_nan=False) == text
    asked = {spec.hash for spec in formula.specs}
    assert set(answer.runs) == asked
    shown = {run for panel in answer.panels for series in panel.series for run in series.runs}
    assert shown <= asked
    for panel in answer.panels:
        for series in panel.series:
            assert len(series.x) == len(series.y)
            assert not series.runs or len(series.runs) == len(series.x)
            assert all(map(math.isfinite, (*series.x, *series.y)))
    for table in answer.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)


@pytest.mark.parametrize("preset", ["paper", "tiny"])
@pytest.mark.parametrize("name", list(STUDIES))
def test_every_study_yields_its_first_runs_at_every_preset(
    request: pytest.FixtureRequest, preset: str, name: str
) -> None:
    batch = next(STUDIES[name].start(request.getfixturevalue(preset), {}))
    assert batch
    assert len({spec.hash for spec in batch}) > 1


@pytest.mark.parametrize("name", list(STUDIES))
def test_non_adaptive_studies_yield_all_runs_in_one_batch(tiny: StudyContext, name: str) -> None:
    formula = Formula(bumpy)
    several = {
        "ablations": {"parts": ["random", "optimizer"]},
        "tpp": {"arms": ["vanilla", "operator-1"]},
        "growth-fraction": {"arms": ["loop-grow", "untied-grow"]},
    }
    formula.answer(STUDIES[name].start(tiny, several.get(name, {})))
    assert (len(formula.batches) > 1) == STUDIES[name].adaptive


def test_adaptive_study_batches_arms_together_with_unchanged_results(tiny: StudyContext) -> None:
    arms = ["vanilla", "operator-1"]
    formula = Formula(bumpy)
    both = formula.answer(STUDIES["lr-rule"].start(tiny, {"arms": arms, "parts": ["screen", "drift"]}))
    assert len(formula.batches) == 2
    alone = [Formula(bumpy) for _ in arms]
    answers = [
        one.answer(STUDIES["lr-rule"].start(tiny, {"arms": [arm], "parts": ["screen", "drift"]}))
        for one, arm in zip(alone, arms, strict=True)
    ]
    assert {s.hash for s in formula.specs} == {s.hash for one in alone for s in one.specs}
    assert sorted(both.findings) == sorted((*answers[0].findings, *answers[1].findings))


# Of the ablations only the tuning of optimizers accepts diverged runs; their ladders do not.
@pytest.mark.parametrize(
    "name", [n for n, study in STUDIES.items() if study.accept_diverged and n != "ablations"]
)
def test_sweeps_accept_diverged_runs(tiny: StudyContext, name: str) -> None:
    def fragile(spec: RunSpec) -> float:
        # One setting in fifteen or so, and every very high learning rate.
        unlucky = int(spec.hash[:4], 16) % 15 == 0 and spec.hyperparameters.learning_rate != 0.04
        return math.nan if unlucky or spec.hyperparameters.learning_rate > 0.4 else bumpy(spec)

    answer = Formula(fragile).answer(STUDIES[name].start(tiny, {}))
    json.dumps(answer.to_dict(), allow_nan=False)
    with contextlib.suppress(SteepenError):  # one sentence, where nothing is left to fit
        Formula(lambda spec: math.nan).answer(STUDIES[name].start(tiny, {}))


@pytest.mark.parametrize("name", [name for name, study in STUDIES.items() if study.parts])
def test_every_part_of_the_registry_has_runs_of_its_own(tiny: StudyContext, name: str) -> None:
    study = STUDIES[name]
    first = {part: {s.hash for s in next(study.start(tiny, {"parts": [part]}))} for part in study.parts}
    assert all(first.values())
    assert len({frozenset(runs) for runs in first.values()}) > 1


def test_every_study_says_what_it_does() -> None:
    assert all(study.function.__doc__ and study.question for study in STUDIES.values())


def test_importing_the_registry_imports_neither_numpy_nor_a_study() -> None:
    code = (
        "import sys, steepen.studies.registry; "
        "sys.exit(any(name in sys.modules for name in ('numpy', 'steepen.studies.answer')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_options_and_study_names_are_rejected(tiny: StudyContext) -> None:
    with pytest.raises(UsageError, match="nearest are ladder"):
        find_study("laddr")
    with pytest.raises(UsageError, match="tpp does not take `rungs`; these do: ladder"):
        find_study("tpp").start(tiny, {"rungs": [2, 3]})
    for name, study in STUDIES.items():
        if study.parts:
            with pytest.raises(UsageError, match="`parts` names 'nonsense'"):
                next(find_study(name).start(tiny, {"parts": ["nonsense"]}))


def test_growth_timing_recovers_the_affine_law(paper: StudyContext) -> None:
    a, b = 0.883, 0.103

    def bowl(spec: RunSpec) -> float:
        arm, shape = spec.arm, spec.shape
        tpp = tokens_per_parameter(spec)
        full = paper.flops_per_token(arm, shape.depth, 4) / paper.flops_per_token(arm, shape.depth, 2)
        best = (tpp / (a * tpp + b) - 1) / (full - 1)
        return 3.0 + 0.05 * (growth_fraction_of(spec) - best) ** 2

    answer = Formula(bowl).answer(growth_timing(paper, arms=["untied-grow"]))
    law = answer.values["untied-grow"]["law"]
    # The surface counts attention in its expansion, the law compute-active parameters: a percent apart.
    assert law["a"] == pytest.approx(a, abs=0.01)
    assert law["b"] == pytest.approx(b, abs=0.05)
    assert law["r_squared"] > 0.9999
    # The answer's recipe uses the law in place of a fixed or listed ρ.
    (file,) = answer.recipes
    fitted = file.recipe.growth_law
    assert fitted is not None and (fitted.a, fitted.b) == (law["a"], law["b"])
    assert (file.arm, file.recipe.rho, file.recipe.listed_rho) == ("untied-grow", None, ())


def test_growth_target_reports_kl_depth_when_records_have_it(
    paper: StudyContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    from steepen.studies import synthetic

    fabricate_record = synthetic.fabricate_record

    def scored(spec: RunSpec, loss: float) -> RunRecord:
        return replace(fabricate_record(spec, loss), evaluation={"kl_depth": {"depth": 7, "executed": 11}})

    monkeypatch.setattr(synthetic, "fabricate_record", scored)
    answer = Formula(lambda spec: 3.0).answer(growth_target(paper))
    deep = next(panel for panel in answer.panels if panel.y.label == "KL effective depth")
    assert {y for series in deep.series for y in series.y} == {7.0}


def test_growth_target_finds_the_best_target_at_equal_compute(paper: StudyContext) -> None:
    def bowl(spec: RunSpec) -> float:
        return 3.0 + 0.01 * math.log(spec.schedule.final / 4) ** 2

    formula = Formula(bowl)
    answer = formula.answer(growth_target(paper))
    assert answer.values["target"] == 4
    by_budget: dict[float, list[float]] = {}
    for cell, spec in zip(answer.values["cells"], formula.specs, strict=True):
        if not cell["fixed"]:
            by_budget.setdefault(cell["budget"], []).append(expected_flops(spec, "matrix"))
    assert all(max(costs) / min(costs) < 1.005 for costs in by_budget.values())
    assert len(by_budget) == 3


def test_growth_target_says_tie_where_scatter_hides_the_difference(paper: StudyContext) -> None:
    def noisy(spec: RunSpec) -> float:
        budget = round(math.log(expected_flops(spec, "matrix")), 1)
        noise = 2e-3 * random.Random(f"{spec.schedule.final} {budget}").gauss(0.0, 1.0)
        return 3.0 + 0.2 * (spec.schedule.final == 8) - 4e-4 * (spec.schedule.final == 4) + noise

    answer = Formula(noisy).answer(growth_target(paper))
    assert " is a tie; " in answer.findings[0] and " ± 0.00" in answer.findings[0]
    assert 8 not in answer.values["ties"] and answer.values["target"] != 8
    assert len(answer.values["ties"]) >= 1


def test_growth_target_uses_only_finished_runs(paper: StudyContext) -> None:
    cells = Formula(lambda _: 3.0).answer(growth_target(paper)).values["cells"]
    budgets = sorted({cell["budget"] for cell in cells if not cell["fixed"]})

    def bowl(spec: RunSpec) -> float:
        return 3.0 + 0.01 * math.log(spec.schedule.final / 6) ** 2

    def fragile(spec: RunSpec, lost: int) -> float:
        top = budgets[lost - 1] if lost else 0.0
        return (
            math.nan if spec.arm.passes.grows and expected_flops(spec, "matrix") < 1.01 * top else bowl(spec)
        )

    for lost, told in (
        (
            0,
            "loop-grow: growing to 6 passes has the lowest loss at every budget (by 0.0008 ± 0.0000 over 8).",
        ),
        (
            2,
            "loop-grow: growing to 6 and 8 passes is a tie; 6 is lowest at 1 of 3 budgets "
            "(by 0.0008 over 8, without an error: there is one budget).",
        ),
        (3, "loop-grow: every run that grows diverged, so there is no best target."),
    ):
        answer = Formula(partial(fragile, lost=lost)).answer(growth_target(paper))
        assert answer.findings == (told,)
        assert answer.values["target"] == (6 if lost < 3 else None)
        assert sum("that budget does not count" in warning for warning in answer.warnings) == lost
        json.dumps(answer.to_dict(), allow_nan=False)


def test_allocation_recovers_a_core_fraction_without_drift(paper: StudyContext) -> None:
    def bowl(spec: RunSpec) -> float:
        core = spec.shape.allocation.core / spec.shape.allocation.blocks
        return (expected_flops(spec, "matrix") / 1e18) ** -0.05 * 3.2 + 0.2 * (core - 0.4) ** 2

    formula = Formula(bowl)
    answer = formula.answer(allocation(paper))
    best = [depth["fraction"] for depth in answer.values["best"].values()]
    assert best == pytest.approx([0.4] * 4, abs=0.06)
    assert answer.values["drift_p"] > 0.05 or abs(answer.values["drift_exponent"]) < 0.1
    assert {spec.shape.allocation.blocks for spec in formula.specs} == {6, 8, 10, 12}


def test_allocation_finds_no_drift_where_a_law_with_irreducible_loss_has_none(paper: StudyContext) -> None:
    def bowl(spec: RunSpec) -> float:
        core = spec.shape.allocation.core / spec.shape.allocation.blocks
        key = 100 * spec.shape.depth + spec.shape.allocation.core
        noise = 2e-5 * random.Random(key).gauss(0.0, 1.0)
        return 1.7 + 1.6 * (expected_flops(spec, "matrix") / 1e18) ** -0.1 + 0.15 * (core - 0.36) ** 2 + noise

    answer = Formula(bowl).answer(allocation(paper))
    best = [depth["fraction"] for depth in answer.values["best"].values()]
    assert best == pytest.approx([0.36] * 4, abs=0.005)
    assert answer.values["frontier_irreducible_loss"] == pytest.approx(1.7, abs=0.1)
    assert answer.values["drift_p"] > 0.05
    assert "does not measurably drift" in answer.findings[0]


def test_passes_recovers_the_power_laws_of_a_synthetic_surface(paper: StudyContext) -> None:
    def bowl(spec: RunSpec) -> float:
        """At an anchor the best expansion is 0.82·TPP^0.15; in the ladders the best K is 1.5."""
        one = find_arm("operator-1")
        depth, k = spec.shape.depth, spec.schedule.final
        if spec.tokens == 1900 * 524_288:
            return (
                3.2
                * (expected_flops(spec, "matrix") / 1e18) ** -0.05
                * math.exp(0.01 * math.log(k / 1.5) ** 2)
            )
        tpp = expected_flops(spec, "matrix") / (
            paper.flops_per_token(one, depth) * paper.stored_parameters(one, depth)
        )
        per_pass = paper.flops_per_token(find_arm("loop-2"), depth) / paper.flops_per_token(one, depth) - 1
        best = 1 + (0.82 * tpp**0.15 - 1) / per_pass
        return 3.2 * math.exp(0.01 * math.log(k / max(best, 0.5)) ** 2)

    formula = Formula(bowl)
    answer = formula.answer(passes(paper))
    slices = answer.values["tokens"]["tied"]
    assert [row["best"] for row in slices if row["interior"]] == pytest.approx([1.5] * 6, rel=0.1)
    law = answer.values["anchor"]["tied"]["laws"]["expansion"]
    assert law["exponent"] == pytest.approx(0.15, abs=0.01)
    assert law["coefficient"] == pytest.approx(0.82, abs=0.02)
    # The two families share one pass.
    ones = [spec for spec in formula.specs if spec.schedule.final == 1]
    assert {spec.arm.name for spec in ones} == {"operator-1"}
    assert len({spec.hash for spec in ones}) < len(ones)


def test_data_constrained_reports_slices_gains_and_best_decays(paper: StudyContext) -> None:
    def overfit(spec: RunSpec) -> float:
        """Overfits with stored parameters, less with decay; passes cost nothing but compute."""
        size = initial_parameters(spec) / 2e8
        k, epochs = spec.schedule.final, spec.data.epochs
        best = 0.4 * size**0.5
        decay = 0.03 * math.log(spec.hyperparameters.weight_decay / best) ** 2
        over = 0.05 * (epochs - 1) * size**0.8 / 9
        return 3.2 + 0.6 / (size * k**0.4) ** 0.25 + over + decay

    formula = Formula(overfit)
    answer = formula.answer(data_constrained(paper))
    optima = {(row["depth"], row["passes"]): row["decay"] for row in answer.values["decay"]["optima"]}
    assert optima[12, 1] == pytest.approx(optima[12, 6], rel=1e-4)
    assert optima[16, 1] > optima[8, 1]
    best = [row["best"] for row in answer.values["tuned decay"]["slices"]]
    assert best[-1] > best[0]
    gains = answer.values["decay 0.8"]["gains"]
    assert all(row["difference"] <= 0 for row in gains)
    assert {spec.data.epochs for spec in formula.specs} == {1, 4, 10}
    assert {spec.data.pool_tokens for spec in formula.specs} == {None, 250_000_000, 100_000_000}
    assert {"tied-vanilla-2", "untied-vanilla-2", "untied-2", "loop-12"} <= {
        s.arm.name for s in formula.specs
    }
    for spec in formula.specs:  # what the loader will have to give
        pool = spec.data.pool_tokens
        if pool is not None:
            assert spec.tokens <= pool // 2049 * 2048 * spec.data.epochs


def test_data_constrained_draws_and_compares_passes_with_retuned_decay(paper: StudyContext) -> None:
    def surface(spec: RunSpec) -> float:
        """Best decay 0.3 at d6, rising beyond the sweep at d18; passes do not change it."""
        size = initial_parameters(spec) / 1.2e8
        decay = 0.02 * math.log(spec.hyperparameters.weight_decay / (0.3 * size)) ** 2
        return 3.0 + 0.5 / (size**0.3 * spec.schedule.final**0.3) + 0.02 * size + decay

    answer = Formula(surface).answer(data_constrained(paper, parts=["grid"]))
    use = next(panel for panel in answer.panels if panel.title.startswith("compute spent"))
    names = {
        (series.label, series.style)
        for series in use.series
        if series.kind == "line" and series.role != "control"
    }
    assert names == {
        ("more parameters, decay retuned", "solid"),
        ("more parameters, decay 0.8", "dotted"),
        ("more passes, decay retuned", "dashed"),
        ("more passes, decay 0.8", "solid"),
    }
    curves = curves_of(use, {})
    assert len({curve.label for curve in curves}) == len(curves)
    assert "extrapolated" not in {entry.text for entry in legend_entries(curves)}
    values = answer.values["decay"]
    assert values["retuned_loops_against_size"]["factor"] > 1
    assert values["retuning_lowers_frontier_by"] > 0
    decays = next(panel for panel in answer.panels if panel.title.startswith("best weight decay"))
    censored = {(row["depth"], row["passes"]) for row in values["optima"] if not row["interior"]}
    hollow = [s for s in decays.series if s.kind == "points" and not s.filled]
    assert censored and sum(len(series.x) for series in hollow) == len(censored)
    assert all(series.role == "censored" for series in hollow)


@pytest.mark.parametrize(
    ("size", "passes", "told"),
    [
        (0.3, 0.01, "No depth reaches"),  # passes help a little, also the largest, which must not beat itself
        (0.2, 0.25, r"Adding passes at d\d+ .* with [1-9]\.\d\d× less compute"),
        (0.2, 0.04, r"Adding passes at d\d+ .* with [1-9]\.\d+× more compute"),
    ],
)
def test_passes_are_not_compared_with_their_own_one_pass_run(
    paper: StudyContext, size: float, passes: float, told: str
) -> None:
    def surface(spec: RunSpec) -> float:
        return 3.0 * (initial_parameters(spec) / 2e8) ** -size * spec.schedule.final**-passes

    answer = Formula(surface).answer(data_constrained(paper, parts=["grid"]))
    assert re.match(told, answer.findings[0]), answer.findings[0]
    ratio = answer.values["decay"]["loops_against_size"]
    assert (ratio is None) == told.startswith("No depth")
